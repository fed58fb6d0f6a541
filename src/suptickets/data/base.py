"""What all data offer (`Data`), and data that fit into memory as bytes (`ArrayData`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from suptickets.data.augment import PADDING_MODES, Normalise, crop
from suptickets.data.order import EpochPlan, shares, split, steps
from suptickets.errors import SparsityError

Batches = Iterator[tuple[Tensor, Tensor]]
Device = torch.device | str


class Data(ABC):
    """Labelled images, some to train on and some to test on.

    Attributes:
        name: what the data are called.
        classes: number of classes; labels run from 0 to one less.
    """

    name: str
    classes: int

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what `train_batches` and `test_batches` give."""

    @property
    @abstractmethod
    def train_size(self) -> int:
        """Number of images to train on."""

    @property
    @abstractmethod
    def test_size(self) -> int:
        """Number of images to test on."""

    @abstractmethod
    def held_out(self, share: float) -> Data:
        """Data that are tested on a share of these training data, and trained on the rest of them."""

    def steps(self, batch_size: int) -> int:
        """Number of batches in an epoch of training, the last partial one included."""
        return steps(self.train_size, batch_size)

    def train_batches(
        self,
        batch_size: int,
        seed: int,
        epoch: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        world: int = 1,
        skip: int = 0,
    ) -> Batches:
        """One epoch, shuffled, augmented and normalised, from step `skip` on.

        Args:
            batch_size: samples in a batch, over all processes.
            seed: with `epoch`, decides the order and the augmentation.
            epoch: counted from 0.
            device: where the batches are wanted.
            dtype: of the images.
            rank: which process this is; its share is every `world`-th sample of each batch.
            world: number of processes.
            skip: steps of the epoch that are already done.
        """
        mine = shares(self.train_size, batch_size, rank, world, skip)
        return self._train(mine, seed, epoch, device, dtype)

    def test_batches(
        self,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        world: int = 1,
    ) -> Batches:
        """All test images once, in their order, never augmented; arguments as for `train_batches`."""
        return self._test(shares(self.test_size, batch_size, rank, world), device, dtype)

    @abstractmethod
    def _train(self, mine: list[slice], seed: int, epoch: int, device: Device, dtype: torch.dtype) -> Batches:
        """The batches at these places of an epoch."""

    @abstractmethod
    def _test(self, mine: list[slice], device: Device, dtype: torch.dtype) -> Batches:
        """The batches at these places of the test data."""


@dataclass(frozen=True, eq=False)
class ArrayData(Data):
    """Data that fit into memory, kept as bytes; augmented by a crop of the padded image and a flip.

    Attributes:
        name: what the data are called.
        classes: number of classes.
        train_x: images to train on, uint8, (N, C, H, W).
        train_y: their labels, int64.
        test_x: images to test on.
        test_y: their labels.
        mean: of each channel, of values from 0 to 1.
        std: deviation, likewise.
        padding: pixels added on each side before the crop; 0 for no crop.
        padding_mode: "reflect" or "zeros", see `augment.crop`.
        flip: whether half of the images are mirrored.
    """

    name: str
    classes: int
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 0
    padding_mode: str = "reflect"
    flip: bool = False

    def __post_init__(self) -> None:
        for part, x, y in (("training", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if x.dtype != torch.uint8 or x.dim() != 4 or not len(x) == len(y) > 0:
                raise SparsityError(
                    f"{self.name}: {part} images must be bytes of shape (N, C, H, W), N > 0, with N labels"
                )
        if self.padding_mode not in PADDING_MODES:
            raise SparsityError(f"the padding is one of {PADDING_MODES}, not {self.padding_mode!r}")
        if not 0 <= self.padding < min(self.shape[1:]):
            raise SparsityError(f"a padding of {self.padding} does not suit images of shape {self.shape}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.train_x.shape
        return channels, height, width

    @property
    def train_size(self) -> int:
        """Number of images to train on."""
        return len(self.train_x)

    @property
    def test_size(self) -> int:
        """Number of images to test on."""
        return len(self.test_x)

    def held_out(self, share: float) -> ArrayData:
        """See `Data.held_out`."""
        train, test = ((self.train_x[part], self.train_y[part]) for part in split(self.train_size, share))
        return replace(self, train_x=train[0], train_y=train[1], test_x=test[0], test_y=test[1])

    def to(self, device: torch.device | str) -> ArrayData:
        """The same data with the bytes on a device, for batches that are made there from start to end."""
        train, test = (self.train_x, self.train_y), (self.test_x, self.test_y)
        train_x, train_y, test_x, test_y = (t.to(device) for t in (*train, *test))
        return replace(self, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)

    def epoch_plan(self, seed: int, epoch: int) -> EpochPlan:
        """Order, offsets and flips of an epoch, on the CPU."""
        return EpochPlan.draw(self.train_size, seed, epoch, padding=self.padding, flip=self.flip)

    def augmented(self, images: Tensor, dy: Tensor, dx: Tensor, flips: Tensor) -> Tensor:
        """Images (bytes) moved and mirrored as told, on whichever device they are."""
        if not self.padding and not self.flip:
            return images
        return crop(images, dy, dx, flips, self.padding, self.padding_mode)

    def _train(self, mine: list[slice], seed: int, epoch: int, device: Device, dtype: torch.dtype) -> Batches:
        """Images that live elsewhere travel to `device` as bytes."""
        drawn, normalise = self.epoch_plan(seed, epoch), Normalise(self.mean, self.std, device, dtype)
        order, plan = drawn.order.to(self.train_x.device), drawn.to(device)

        def batch(places: slice) -> tuple[Tensor, Tensor]:
            samples = order[places]
            x, y = (_sent(t.index_select(0, samples), device) for t in (self.train_x, self.train_y))
            return normalise(self.augmented(x, plan.dy[places], plan.dx[places], plan.flips[places])), y

        return map(batch, mine)

    def _test(self, mine: list[slice], device: Device, dtype: torch.dtype) -> Batches:
        normalise = Normalise(self.mean, self.std, device, dtype)
        return (
            (normalise(self.test_x[places].to(device)), self.test_y[places].to(device)) for places in mine
        )


def _sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device; it goes to a GPU through pinned memory, so that nothing waits."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
