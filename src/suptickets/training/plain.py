"""The plain step: eager, in any precision, in any number of processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from suptickets.training.parts import Parts


class PlainStep:
    """Gives batches of the data to the model, the loss and the optimizer as one would by hand."""

    def __init__(self, parts: Parts) -> None:
        """Compile the model in place, if that is asked for."""
        self.parts = parts
        if parts.settings.compile:
            parts.model.compile()

    def epoch(self, epoch: int, done: int) -> Iterator[None]:
        """Do the steps of an epoch, from step `done` on, one at each iteration."""
        s, p = self.parts.settings, self.parts.processes
        for x, y in self.parts.data.train_batches(
            s.batch_size,
            s.seed,
            epoch,
            device=p.device,
            dtype=self.parts.dtype,
            rank=p.rank,
            world=p.world,
            skip=done,
        ):
            self.step(x, y)
            yield

    def step(self, x: Tensor, y: Tensor) -> None:
        """Forward, backward, optimizer, on this process's share of the batch."""
        parts, optimizer = self.parts, self.parts.optimizer
        parts.begin_step()
        weight = parts.weight(len(y))
        optimizer.zero_grad()
        loss, logits = parts.loss(x, y)
        loss.backward(None if weight == 1 else torch.full_like(loss, weight))
        optimizer.step()
        parts.meter.add(loss, logits, y)

    def close(self) -> None:
        """Nothing to give back."""
