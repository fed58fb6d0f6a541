"""Small data in the published formats, for tests of the readers and of all that reads data."""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from suptickets.data import fashion_mnist
from suptickets.data.cifar import CIFAR10, PIXELS, Cifar


class Python2Pickler(pickle._Pickler):
    """Writes text and bytes as Python 2 did, which the CIFAR files come from."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        raw = value.encode("latin1") if isinstance(value, str) else value
        head = b"U" + bytes([len(raw)]) if len(raw) < 256 else b"T" + struct.pack("<i", len(raw))
        self.write(head + raw)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def python2_pickle(content) -> bytes:
    """Protocol 2, byte strings, numpy's old module names."""
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def cifar_content(source: Cifar, size: int, rng: np.random.Generator) -> dict:
    """What one file of CIFAR holds: random images, one a row, and labels."""
    content = {
        b"batch_label": b"made by a test",
        b"data": rng.integers(0, 256, (size, PIXELS), dtype=np.uint8),
        source.labels.encode(): rng.integers(0, source.classes, size).tolist(),
        b"filenames": [b"image_%d.png" % i for i in range(size)],
    }
    return content if source is CIFAR10 else content | {b"coarse_labels": [0] * size}


def cifar_folder(where: Path, source: Cifar = CIFAR10, size: int = 20, seed: int = 0) -> dict[str, dict]:
    """A folder as in the archive, `size` images a file, beneath `where`; gives the content by file name."""
    rng, folder = np.random.default_rng(seed), where / source.folder
    folder.mkdir(parents=True)
    contents = {name: cifar_content(source, size, rng) for name in (*source.train_files, source.test_file)}
    for name, content in contents.items():
        (folder / name).write_bytes(python2_pickle(content))
    (folder / "meta").write_bytes(python2_pickle({b"label_names": [b"a", b"b"]}))
    return contents


def cifar_archive(where: Path, source: Cifar = CIFAR10, size: int = 20) -> tuple[Cifar, dict[str, dict]]:
    """An archive of such a folder in `where`; gives the source with its checksum, and the content."""
    contents = cifar_folder(where / "packed", source, size)
    path = where / source.archive.name
    with tarfile.open(path, "w:gz") as tar:
        tar.add(where / "packed" / source.folder, arcname=source.folder)
    return with_checksum(source, path), contents


def with_checksum(source: Cifar, path: Path) -> Cifar:
    """The source, of which the file at `path` is the published archive."""
    checksum = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    return replace(source, archive=replace(source.archive, checksum=checksum))


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as an IDX file."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def fashion_mnist_files(where: Path, sizes=(30, 10), packed: bool = False) -> dict[str, np.ndarray]:
    """The four files, unpacked unless `packed`; gives the arrays."""
    rng, arrays = np.random.default_rng(0), {}
    for part, size in zip(("train", "test"), sizes, strict=True):
        arrays[part + "_x"] = rng.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        arrays[part + "_y"] = rng.integers(0, 10, size, dtype=np.uint8)
    for key, array in arrays.items():
        name = fashion_mnist.FILES[key].name
        if packed:
            (where / name).write_bytes(gzip.compress(idx(array)))
        else:
            (where / name.removesuffix(".gz")).write_bytes(idx(array))
    return arrays


def image(mode: str = "RGB", size: tuple[int, int] = (60, 40), seed: int = 0) -> Image.Image:
    """A smooth picture with a gradient both ways, in any of Pillow's modes."""
    x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    pixels = np.stack([x, y, np.full_like(x, seed * 37 % 256)], -1).astype(np.uint8)
    picture = Image.fromarray(pixels)
    if mode == "I;16":
        return Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
    return picture.convert(mode)


def image_folder(where: Path, classes=("cat", "dog"), train: int = 6, val: int = 3, test_name="val") -> Path:
    """Class folders of JPEG files of different sizes."""
    for part, count in (("train", train), (test_name, val)):
        for c, name in enumerate(classes):
            folder = where / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                image(size=(50 + 7 * i, 70 - 5 * i), seed=10 * c + i).save(folder / f"{i}.jpg")
    return where


def same(a: list, b: list) -> bool:
    """Whether two lists of batches hold the same, bit for bit."""
    pairs = [(s, t) for p, q in zip(a, b, strict=True) for s, t in zip(p, q, strict=True)]
    return all(torch.equal(s, t) for s, t in pairs)
