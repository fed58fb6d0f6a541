"""How a rate changes with the step: exploration and pruning rates."""

from __future__ import annotations

import math


def cosine(step: int, total: int, high: float, low: float = 0.0) -> float:
    """From `high` at step 0 to `low` at `total`, along half a cosine."""
    progress = min(max(step / total, 0.0), 1.0)
    return low + (high - low) * (1 + math.cos(math.pi * progress)) / 2


def cubic(step: int, start: int, end: int, initial: float, final: float) -> float:
    """Gradual pruning (Zhu and Gupta): the sparsity from `initial` to `final`, fast at first."""
    if step >= end:
        return final
    left = 1 - max(step - start, 0) / (end - start)
    return final + (initial - final) * left**3
