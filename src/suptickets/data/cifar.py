"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), from the published archives or the folders in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from suptickets.data.archives import Archive, data_folder, obtain, unpack
from suptickets.data.base import ArrayData
from suptickets.data.pickles import read_pickle
from suptickets.errors import SparsityError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Cifar:
    """One of the two: where it lies and what it is like. Both are cropped with a padding of 4, and flipped.

    Attributes:
        name: what it is called.
        classes: number of classes.
        archive: what is published; checked before it is opened (a folder is taken as it is).
        folder: what the archive unpacks to.
        train_files: names in that folder.
        test_file: likewise.
        labels: key of the labels in each file.
        mean: of the training images, by channel.
        std: likewise.
        padding_mode: as in the published recipe.
    """

    name: str
    classes: int
    archive: Archive
    folder: str
    train_files: tuple[str, ...]
    test_file: str
    labels: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding_mode: str


CIFAR10 = Cifar(
    name="cifar10",
    classes=10,
    archive=Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    ),
    folder="cifar-10-batches-py",
    train_files=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test_file="test_batch",
    labels="labels",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    padding_mode="reflect",
)

CIFAR100 = Cifar(
    name="cifar100",
    classes=100,
    archive=Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    ),
    folder="cifar-100-python",
    train_files=("train",),
    test_file="test",
    labels="fine_labels",
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    padding_mode="zeros",
)


def load_cifar(source: Cifar, data_dir: Path | None = None) -> ArrayData:
    """The data from the folder `data_dir`, or from the folder or archive in it; downloaded otherwise."""
    folder = _locate(source, data_folder(data_dir))
    train_x, train_y = _read(source, folder, source.train_files)
    test_x, test_y = _read(source, folder, (source.test_file,))
    return ArrayData(
        name=source.name,
        classes=source.classes,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        mean=source.mean,
        std=source.std,
        padding=4,
        padding_mode=source.padding_mode,
        flip=True,
    )


def _locate(source: Cifar, folder: Path) -> Path:
    """The folder with the files, unpacked first if need be."""
    if folder.name == source.folder or (folder / source.test_file).is_file():
        return folder
    inside = folder / source.folder
    if not inside.is_dir():
        archive = obtain(source.archive, folder, f", or the folder {source.folder} that is in it,")
        unpack(archive, inside)
    return inside


def _read(source: Cifar, folder: Path, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    parts = [_read_file(source, folder / name) for name in names]
    images = np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in parts])
    return torch.from_numpy(images), torch.from_numpy(labels)


def _read_file(source: Cifar, path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images, a row each, and their labels; a file that does not hold both is refused."""
    if not path.is_file():
        raise SparsityError(f"{path} is missing: put all of {source.folder} from {source.archive.url} there")
    content = read_pickle(path)
    images, labels = content.get("data"), content.get(source.labels)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (PIXELS,):
        raise SparsityError(f"{path} has no rows of {PIXELS} bytes, one for each image: replace it")
    if not _are_labels(labels, len(images), source.classes):
        raise SparsityError(f"{path} has no label from 0 to {source.classes - 1} for each image: replace it")
    return images, np.array(labels, np.int64)


def _are_labels(found: object, count: int, classes: int) -> bool:
    if not isinstance(found, list) or len(found) != count:
        return False
    return all(isinstance(label, int) and 0 <= label < classes for label in found)
