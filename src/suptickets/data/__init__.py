"""All data sets, which `DATA` knows by name. Each is read into the same kind of object, a `Data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from suptickets.data.base import ArrayData, Data
from suptickets.data.cifar import CIFAR10, CIFAR100, load_cifar
from suptickets.data.digits import load_digits
from suptickets.data.fashion_mnist import load_fashion_mnist
from suptickets.data.folder import FolderData, load_folder
from suptickets.data.order import EpochPlan
from suptickets.errors import SparsityError, choice

WORKERS = 1024  # the most processes; more must be a mistake


@dataclass(frozen=True)
class DataEntry:
    """Data that can be loaded by name.

    Attributes:
        load: what reads them, from a folder or from where they are by default.
        summary: one line about them.
    """

    load: Callable[[Path | None], Data]
    summary: str


DATA: dict[str, DataEntry] = {
    "digits": DataEntry(load_digits, "1,797 handwritten digits, 8 x 8, embedded: nothing to download"),
    "fashion-mnist": DataEntry(load_fashion_mnist, "70,000 grey images of clothes, 28 x 28, 10 classes"),
    "cifar10": DataEntry(partial(load_cifar, CIFAR10), "60,000 images, 32 x 32, 10 classes"),
    "cifar100": DataEntry(partial(load_cifar, CIFAR100), "60,000 images, 32 x 32, 100 classes"),
    "imagenet": DataEntry(partial(load_folder, name="imagenet"), "ImageNet in class folders, 224 x 224"),
    "folder": DataEntry(load_folder, "your JPEG and PNG files in class folders, 224 x 224"),
}


def load_data(
    name: str, data_dir: Path | str | None = None, workers: int | None = None, holdout: float = 0.0
) -> Data:
    """The data of that name.

    Args:
        name: one of `DATA`.
        data_dir: the folder where they are, or are to be downloaded to; by default one in the user's cache.
        workers: processes that decode image files; data in memory need none.
        holdout: share of the training data that takes the place of the test data.
    """
    choice("data", name, DATA)
    if workers is not None and not 0 <= workers <= WORKERS:
        raise SparsityError(f"the number of workers must be from 0 to {WORKERS}, not {workers}")
    data = _loaded(name, None if data_dir is None else Path(data_dir).expanduser())
    if isinstance(data, FolderData) and workers is not None:
        data = replace(data, workers=workers)
    return data.held_out(holdout) if holdout else data


_READ: ContextVar[dict[tuple[str, Path | None], Data] | None] = ContextVar("read", default=None)


@contextmanager
def read_once() -> Iterator[None]:
    """Read data only once in this context: for a process that trains and evaluates many networks on them."""
    token = _READ.set({})
    try:
        yield
    finally:
        _READ.reset(token)


def _loaded(name: str, folder: Path | None) -> Data:
    read = _READ.get()
    if read is None:
        return DATA[name].load(folder)
    if (name, folder) not in read:
        read[name, folder] = DATA[name].load(folder)
    return read[name, folder]


__all__ = [
    "DATA",
    "ArrayData",
    "Data",
    "DataEntry",
    "EpochPlan",
    "FolderData",
    "load_cifar",
    "load_data",
    "load_digits",
    "load_fashion_mnist",
    "load_folder",
    "read_once",
]
