"""Loss and accuracy of an epoch, added up on the device of the losses: a step waits for nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LATER = 32  # steps that are counted together


class Meter:
    """Sums over what this process has seen of an epoch: loss, right predictions, finite losses.

    Losses are added one by one, in order: their sum does not depend on when it is looked at. It is made only
    when it is, in plain numbers, because on a CPU one operation more takes as long as many of these.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Nothing counted yet."""
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self.sums.zero_()
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._counted: list[tuple[Tensor, Tensor, list[int]]] = []  # losses, right predictions, batch sizes

    def add(self, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        """Note a step's mean loss and predictions; they are counted later, together with the next ones."""
        self._waiting.append((loss.detach(), logits.detach(), y))
        if len(self._waiting) == LATER:
            self._count()

    def _count(self) -> None:
        if not self._waiting:
            return
        losses, logits, labels = zip(*self._waiting, strict=True)
        self._waiting = []
        right = (torch.cat(logits).max(1).indices == torch.cat(labels)).sum()
        self._counted.append((torch.stack(losses), right, [len(y) for y in labels]))

    @staticmethod
    def summed(loss: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        """What a step adds to the sums, for steps that add it themselves."""
        right = (logits.argmax(1) == y).sum()
        return torch.stack([loss.double() * len(y), right.double(), loss.isfinite().double()])

    def values(self) -> Tensor:
        """The sums, on the CPU: waits for the device."""
        self._count()
        total, right, finite = self.sums.tolist()
        for losses, hits, sizes in self._counted:
            for loss, size in zip(losses.tolist(), sizes, strict=True):
                total += loss * size
                finite += math.isfinite(loss)
            right += int(hits)
        if self._counted:
            self._counted = []
            self.sums.copy_(torch.tensor([total, right, finite], dtype=torch.float64))
        return self.sums.cpu().clone()

    def load(self, values: Tensor) -> None:
        """Go on from `values()`."""
        self.reset()
        self.sums.copy_(values)
