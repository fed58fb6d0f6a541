"""Which sample comes when, and how it is moved: drawn from the seed and the epoch, from nothing else.

A plan is drawn on the CPU, for a whole epoch at once, by a generator that is made for that epoch. There is no
state: a run resumes at any step of any epoch, and what it sees depends neither on the number of workers and
processes nor on the device.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from suptickets.errors import SparsityError


def stable_seed(*numbers: int) -> int:
    """A seed for these numbers: the same on every machine, unrelated for neighbouring numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class EpochPlan(NamedTuple):
    """One epoch: place i shows the sample `order[i]`, moved by `dy[i]` and `dx[i]`, mirrored if `flips[i]`.

    Attributes:
        order: a permutation of the samples.
        dy: first row of the crop in the padded image, from 0 to twice the padding.
        dx: first column, likewise.
        flips: whether left and right are exchanged.
    """

    order: Tensor
    dy: Tensor
    dx: Tensor
    flips: Tensor

    @classmethod
    def draw(cls, size: int, seed: int, epoch: int, *, padding: int = 0, flip: bool = False) -> EpochPlan:
        """The plan of an epoch over `size` samples; all offsets are equally likely, as are flip and none."""
        generator = torch.Generator().manual_seed(stable_seed(seed, epoch))
        order = torch.randperm(size, generator=generator)
        dy, dx = torch.randint(2 * padding + 1, (2, size), generator=generator)
        flips = torch.randint(2 if flip else 1, (size,), generator=generator).bool()
        return cls(order, dy, dx, flips)

    def to(self, device: torch.device | str, *, copy: bool = False) -> EpochPlan:
        """The same plan on a device, so that nothing is sent there during the epoch."""
        return EpochPlan(*(tensor.to(device, copy=copy) for tensor in self))

    def fill(self, other: EpochPlan) -> None:
        """Copy another plan into this one, in place."""
        for mine, theirs in zip(self, other, strict=True):
            mine.copy_(theirs)


def split(size: int, share: float) -> tuple[Tensor, Tensor]:
    """The samples that are kept to train on and those that are held out, each in order: always the same."""
    held = round(share * size)
    if not 0 < held < size:
        raise SparsityError(f"{share:g} of {size} samples leaves none to train on, or none to evaluate on")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(stable_seed(size)))
    return order[held:].sort().values, order[:held].sort().values


def steps(size: int, batch_size: int) -> int:
    """Number of batches in `size` samples, a last partial one included: 391 for CIFAR at 128."""
    if batch_size < 1:
        raise SparsityError(f"the batch size must be at least 1, not {batch_size}")
    return -(-size // batch_size)


def shares(size: int, batch_size: int, rank: int = 0, world: int = 1, skip: int = 0) -> list[slice]:
    """The places of each batch from `skip` on that fall to process `rank` of `world`: every world-th.

    `batch_size` counts the samples of all processes. All get the same number of batches, to stay in step; of
    a last batch that is smaller than `world`, some get an empty share.
    """
    count = steps(size, batch_size)
    if not 0 <= rank < world:
        raise SparsityError(f"the rank must be from 0 to {world - 1}, not {rank}")
    if batch_size < world:
        raise SparsityError(
            f"a batch of {batch_size} is too small for {world} processes: make it {world} or more"
        )
    if not 0 <= skip <= count:
        raise SparsityError(f"an epoch of {count} steps cannot be entered after step {skip}")
    starts = range(skip * batch_size, size, batch_size)
    return [slice(start + rank, min(start + batch_size, size), world) for start in starts]
