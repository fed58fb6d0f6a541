"""Random numbers that leave no trace in the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def fork_random(model: nn.Module) -> Iterator[None]:
    """Within it, random numbers may be drawn: those of Python, NumPy and torch go on as if none had been.

    Of torch's, those of the CPU and of the GPUs that hold the model.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)
