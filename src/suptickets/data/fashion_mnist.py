"""Fashion-MNIST (Xiao et al., 2017): 70,000 grey images of clothes, 28 x 28, in IDX files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from suptickets.data.archives import DAMAGE, Archive, data_folder, obtain
from suptickets.data.base import ArrayData
from suptickets.errors import SparsityError

_SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FILES = {
    "train_x": Archive(f"{_SITE}/train-images-idx3-ubyte.gz", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    "train_y": Archive(f"{_SITE}/train-labels-idx1-ubyte.gz", "md5:25c81989df183df01b3e8a0aad5dffbe"),
    "test_x": Archive(f"{_SITE}/t10k-images-idx3-ubyte.gz", "md5:bef4ecab320f06d8554ea6380940ec79"),
    "test_y": Archive(f"{_SITE}/t10k-labels-idx1-ubyte.gz", "md5:bb300cfdad3c16e7a12a480ee83cd310"),
}
CLASSES = 10


def load_fashion_mnist(data_dir: Path | None = None) -> ArrayData:
    """The data from the four files in `data_dir`, downloaded if they are not there.

    Packed files are checked against the published checksums; unpacked ones (no .gz) are taken as they are.
    """
    folder = data_folder(data_dir)
    train_x, train_y = _read(folder, "train")
    test_x, test_y = _read(folder, "test")
    return ArrayData(
        name="fashion-mnist",
        classes=CLASSES,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        mean=(0.2860,),
        std=(0.3530,),
        padding=2,
        padding_mode="zeros",
        flip=True,
    )


def _read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images = _read_file(folder, FILES[part + "_x"], dimensions=3)
    labels = _read_file(folder, FILES[part + "_y"], dimensions=1)
    if images.shape[1:] != (28, 28) or len(images) != len(labels) or int(labels.max(initial=0)) >= CLASSES:
        raise SparsityError(
            f"the {part} images in {folder} are not 28 x 28 with one label of {CLASSES} each: replace them"
        )
    return torch.from_numpy(images)[:, None], torch.from_numpy(labels).long()


def _read_file(
    folder: Path, archive: Archive, dimensions: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """An IDX file: 0, 0, 8 (bytes), the number of dimensions, each of them in four bytes, then the bytes."""
    plain = folder / archive.name.removesuffix(".gz")
    path = plain if plain.is_file() else obtain(archive, folder, f" or {plain.name}")
    try:
        raw = path.read_bytes() if path == plain else gzip.decompress(path.read_bytes())
    except DAMAGE as error:
        raise SparsityError(f"{path} is truncated or damaged ({error}): replace it") from error
    start = 4 + 4 * dimensions
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(raw) < start:
        raise SparsityError(f"{path} is not an IDX file of bytes in {dimensions} dimensions: replace it")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", dimensions, offset=4))
    if len(raw) != start + np.prod(shape, dtype=object):
        raise SparsityError(f"{path} holds {len(raw) - start} bytes, not {shape} as it says: replace it")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()
