"""Random numbers that leave no trace in the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def fork_random() -> Iterator[None]:
    """Random numbers may be drawn and seeded within it: afterwards all generators are as they were before."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(gpus, device_type="cuda"):
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)


def seed_all(seed: int) -> None:
    """Seed torch's generators, NumPy's and Python's; no GPU is asked for that is not in use."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # otherwise the seed would wait for that, in place of the user's
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def python_state() -> torch.Tensor:
    """Where Python's and NumPy's generators are, as numbers, all exact in float64."""
    version, words, gauss = random.getstate()
    numpys: Any = np.random.get_state()
    _, keys, place, has_gauss, kept = numpys
    own = [version, *words, gauss is not None, gauss or 0.0]
    return torch.tensor([*own, *keys.tolist(), place, has_gauss, kept], dtype=torch.float64)


def set_python_state(state: torch.Tensor) -> None:
    """Undo `python_state`."""
    numbers: Sequence[float] = state.tolist()
    version, *words, has, gauss = numbers[:628]
    *keys, place, has_gauss, kept = numbers[628:]
    random.setstate((int(version), tuple(map(int, words)), gauss if has else None))
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), int(place), int(has_gauss), kept))
