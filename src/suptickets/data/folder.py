"""Folders of images, one for each class, as ImageNet has them; decoded in worker processes.

    DIR/train/CLASS/*.jpg        DIR/val/CLASS/*.jpg (or DIR/test)

Workers decode and crop; what they draw depends on the seed, the epoch and the image alone, so that their
number changes nothing but the speed. Images travel as bytes and are normalised on the device.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from suptickets.data import transforms
from suptickets.data.augment import Normalise
from suptickets.data.base import Batches, Data, Device
from suptickets.data.order import EpochPlan, split, stable_seed
from suptickets.errors import SparsityError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SUFFIXES = (".jpg", ".jpeg", ".png")
TEST_FOLDERS = ("val", "test")

Sample = tuple[npt.NDArray[np.uint8], int]


@dataclass(frozen=True, eq=False)
class Files:
    """Image files and their classes, in arrays: lists of millions are copied by every worker that reads them.

    Attributes:
        paths: as bytes, sorted.
        labels: the number of each one's class.
    """

    paths: npt.NDArray[np.bytes_]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, places: npt.NDArray[np.int64]) -> Files:
        return Files(self.paths[places], self.labels[places])


@dataclass(frozen=True, eq=False)
class FolderData(Data):
    """Images in class folders; see `Data`.

    Attributes:
        name: what the data are called.
        classes: number of class folders.
        class_names: their names, sorted; a label is a place in this tuple.
        train: files to train on.
        test: files to test on.
        workers: processes that decode; 0 for none but this one.
    """

    name: str
    classes: int
    class_names: tuple[str, ...]
    train: Files
    test: Files
    workers: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return 3, transforms.SIZE, transforms.SIZE

    @property
    def train_size(self) -> int:
        """Number of images to train on."""
        return len(self.train)

    @property
    def test_size(self) -> int:
        """Number of images to test on."""
        return len(self.test)

    def held_out(self, share: float) -> FolderData:
        """See `Data.held_out`."""
        train, test = (self.train[part.numpy()] for part in split(self.train_size, share))
        return replace(self, train=train, test=test)

    def _train(self, mine: list[slice], seed: int, epoch: int, device: Device, dtype: torch.dtype) -> Batches:
        order = EpochPlan.draw(self.train_size, seed, epoch).order
        images = _Images(self.train, partial(_at_random, seed, epoch))
        return self._batches(images, [order[s].tolist() for s in mine], device, dtype)

    def _test(self, mine: list[slice], device: Device, dtype: torch.dtype) -> Batches:
        order = range(self.test_size)
        return self._batches(_Images(self.test, _at_centre), [list(order[s]) for s in mine], device, dtype)

    def _batches(
        self, images: Dataset[Any], batches: list[list[int]], device: torch.device | str, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Load batches; the loader has its own generator, so that it draws no number from the global one."""
        normalise = Normalise(MEAN, STD, device, dtype)
        loader: DataLoader[Any] = DataLoader(
            images,
            batch_sampler=batches,
            collate_fn=_collate,
            num_workers=min(self.workers, len(batches)),
            pin_memory=torch.device(device).type == "cuda",
            generator=torch.Generator(),
            worker_init_fn=_undisturbed,
        )
        with _blocked():
            loaded = iter(loader)
        try:
            for batch in loaded:
                if isinstance(batch, str):
                    raise SparsityError(batch)
                x, y = (t.to(device, non_blocking=True) for t in batch)
                yield normalise(x), y
        finally:
            del loaded  # ends the workers now: an error's traceback would keep them for seconds


ASKING = (signal.SIGINT, signal.SIGTERM)  # signals that ask to stop


@contextmanager
def _blocked() -> Iterator[None]:
    """Block signals that ask to stop, for processes that are started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _undisturbed(worker: int) -> None:
    """Let a worker ignore Ctrl-C, and leave only at the second SIGTERM.

    A signal to the whole group is meant for the process that trains, which then ends its workers itself.
    """
    asked = count(1)

    def terminate(number: int, frame: FrameType | None) -> None:
        if next(asked) > 1:
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


class _Images(Dataset[Any]):
    """Decoded images, each cut as told; one that cannot be read gives an error message instead.

    (An error raised in a worker would arrive wrapped into a traceback of many lines.)
    """

    def __init__(self, files: Files, cut: Callable[[Image.Image, int], Image.Image]) -> None:
        self.files, self.cut = files, cut

    def __getitem__(self, index: int) -> Sample | str:
        try:
            image = transforms.read_image(Path(os.fsdecode(self.files.paths[index])))
        except SparsityError as error:
            return str(error)
        pixels = np.array(self.cut(image, index)).transpose(2, 0, 1)
        return pixels, int(self.files.labels[index])


def _at_random(seed: int, epoch: int, image: Image.Image, index: int) -> Image.Image:
    """The image cropped and flipped by random numbers of its own."""
    return transforms.random_crop(image, random.Random(stable_seed(seed, epoch, index)))


def _at_centre(image: Image.Image, index: int) -> Image.Image:
    return transforms.centre_crop(image)


def _collate(samples: list[Sample | str]) -> tuple[Tensor, Tensor] | str:
    """A batch, possibly empty, or the first error message."""
    pixels = torch.empty(len(samples), 3, transforms.SIZE, transforms.SIZE, dtype=torch.uint8)
    labels = torch.empty(len(samples), dtype=torch.int64)
    for i, sample in enumerate(samples):
        if isinstance(sample, str):
            return sample
        pixels[i], labels[i] = torch.from_numpy(sample[0]), sample[1]
    return pixels, labels


# ---- finding the files ----


def load_folder(data_dir: Path | None = None, name: str = "folder") -> FolderData:
    """The images beneath `data_dir`/train and `data_dir`/val (or test), with a folder for each class."""
    if data_dir is None or not data_dir.is_dir():
        given = "none was given" if data_dir is None else f"{data_dir} is not a folder"
        raise SparsityError(
            f"{name} needs a data directory (--data-dir) with train/CLASS/*.jpg and val/CLASS/*.jpg: {given}"
        )
    train = data_dir / "train"
    test = next((data_dir / t for t in TEST_FOLDERS if (data_dir / t).is_dir()), data_dir / TEST_FOLDERS[0])
    classes, test_classes = _class_folders(train), _class_folders(test)
    for extra in sorted(set(classes) ^ set(test_classes)):
        has, lacks = (train, test) if extra in classes else (test, train)
        raise SparsityError(
            f"class {extra!r} is in {has} but not in {lacks}: add it there, or remove it here"
        )
    return FolderData(name, len(classes), tuple(classes), _files(train, classes), _files(test, classes))


def _class_folders(folder: Path) -> list[str]:
    found = folder.is_dir() and sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != ".")
    if not found:
        raise SparsityError(f"{folder} has no class folders: put images into {folder}/CLASS for each class")
    return found


def _files(folder: Path, classes: list[str]) -> Files:
    found = [_images(folder / name) for name in classes]
    paths = np.array([os.fsencode(path) for paths in found for path in paths])
    return Files(paths, np.repeat(np.arange(len(classes)), [len(paths) for paths in found]))


def _images(folder: Path) -> list[str]:
    """All JPEG and PNG files beneath a class folder, at any depth."""
    paths = sorted(_walk(str(folder), frozenset()))
    if not paths:
        raise SparsityError(f"class folder {folder} has no images ({', '.join(SUFFIXES)}): fill or remove it")
    return paths


def _walk(folder: str, above: frozenset[str]) -> Iterator[str]:
    """All images beneath a folder; a link that leads back to a folder `above` it is not followed."""
    place = os.path.realpath(folder)
    if place in above:
        return
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise SparsityError(f"cannot read the folder {folder}: {error.strerror}") from error
    for entry in entries:
        if entry.is_dir():
            yield from _walk(entry.path, above | {place})
        elif _is_image(entry.name):
            yield entry.path


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")
