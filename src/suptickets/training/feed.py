"""Batches for a step that is captured once and replayed: they are always in the same place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from suptickets.data import Data
from suptickets.data.augment import Normalise
from suptickets.data.base import ArrayData
from suptickets.data.order import shares
from suptickets.training.parts import Parts


class Feed(Protocol):
    """Where a captured step finds its batch."""

    def epoch(self, epoch: int, done: int) -> Iterator[int]:
        """Make the batch of each step of an epoch ready, from step `done` on, and yield its size."""

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """The batch of `size` samples that is ready, made by operations that can be captured."""

    def advance(self, size: int) -> None:
        """Move on to the next batch, by operations that can be captured too."""


def feed(parts: Parts) -> Feed:
    """The feed of a run: data on the device are augmented there, as part of the step; others are sent."""
    data, device = parts.data, parts.processes.device
    if isinstance(data, ArrayData) and data.train_x.device == device:
        return Resident(data, parts)
    return Sent(data, parts)


class Resident:
    """Bytes and the epoch's plan are on the device: a step gathers, crops, flips and normalises its batch."""

    def __init__(self, data: ArrayData, parts: Parts) -> None:
        """Make room for a plan."""
        self.data, self.batch_size, self.seed = data, parts.settings.batch_size, parts.settings.seed
        self.normalise = Normalise(data.mean, data.std, data.train_x.device, parts.dtype)
        self.plan = data.epoch_plan(self.seed, 0).to(data.train_x.device, copy=True)
        self.place = torch.zeros((), dtype=torch.int64, device=data.train_x.device)

    def epoch(self, epoch: int, done: int) -> Iterator[int]:
        """See `Feed.epoch`."""
        self.plan.fill(self.data.epoch_plan(self.seed, epoch))
        self.place.fill_(done * self.batch_size)
        for part in shares(self.data.train_size, self.batch_size, skip=done):
            yield part.stop - part.start

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """See `Feed.batch`."""
        plan, data = self.plan, self.data
        places = self.place + torch.arange(size, device=self.place.device)
        samples = plan.order[places]
        images = data.augmented(data.train_x[samples], plan.dy[places], plan.dx[places], plan.flips[places])
        return self.normalise(images), data.train_y[samples]

    def advance(self, size: int) -> None:
        """See `Feed.advance`."""
        self.place += size


class Sent:
    """Batches from a loader, copied to where the step expects them."""

    def __init__(self, data: Data, parts: Parts) -> None:
        """Make room for the largest batch."""
        self.data, self.parts = data, parts
        size, device = parts.settings.batch_size, parts.processes.device
        self.x = torch.zeros(size, *data.shape, dtype=parts.dtype, device=device)
        self.y = torch.zeros(size, dtype=torch.int64, device=device)

    def epoch(self, epoch: int, done: int) -> Iterator[int]:
        """See `Feed.epoch`."""
        s = self.parts.settings
        for x, y in self.data.train_batches(
            s.batch_size, s.seed, epoch, device=self.x.device, dtype=self.x.dtype, skip=done
        ):
            self.x[: len(x)].copy_(x, non_blocking=True)
            self.y[: len(y)].copy_(y, non_blocking=True)
            yield len(y)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """See `Feed.batch`."""
        return self.x[:size], self.y[:size]

    def advance(self, size: int) -> None:
        """See `Feed.advance`."""
