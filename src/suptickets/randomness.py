"""Random numbers that leave no trace in the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def fork_random(where: nn.Module | torch.device) -> Iterator[None]:
    """Within it, random numbers may be drawn: those of Python, NumPy and torch go on as if none had been.

    Of torch's, those of the CPU and of the device, or of the devices that hold the model.
    """
    held = {where} if isinstance(where, torch.device) else {p.device for p in where.parameters()}
    devices = [device for device in held if device.type == "cuda"]
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)


def seed_all(seed: int) -> None:
    """Seed torch's generators, NumPy's and Python's."""
    torch.manual_seed(seed)
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
