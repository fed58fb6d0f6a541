"""Loss and accuracy of an epoch, counted many steps at a time: a step waits for nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LATER = 32  # steps that are counted together


class Meter:
    """Sums over what this process has seen of the epoch, added up in the order of the steps."""

    def __init__(self) -> None:
        """Nothing counted yet."""
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self.loss, self.right, self.finite = 0.0, 0, 0
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        """Take note of a step: its mean loss, and its predictions."""
        self._waiting.append((loss.detach(), logits.detach(), y))
        if len(self._waiting) == LATER:
            self._count()

    def _count(self) -> None:
        if not self._waiting:
            return
        losses, logits, labels = zip(*self._waiting, strict=True)
        self._waiting = []
        self.right += int((torch.cat(logits).max(1).indices == torch.cat(labels)).sum())
        for loss, y in zip(torch.stack(losses).tolist(), labels, strict=True):
            self.loss += loss * len(y)
            self.finite += math.isfinite(loss)

    def values(self) -> Tensor:
        """Loss, right predictions, and steps with a finite loss, in float64 on the CPU."""
        self._count()
        return torch.tensor([self.loss, self.right, self.finite], dtype=torch.float64)

    def load(self, values: Tensor) -> None:
        """Go on from `values()`."""
        self.reset()
        self.loss, self.right, self.finite = float(values[0]), int(values[1]), int(values[2])
