"""Archives of published data: downloaded, checked against their checksums, unpacked without trust."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from suptickets.errors import SparsityError, reason

CHUNK = 1 << 20
TIMEOUT = 30  # seconds without an answer, or without a byte
DAMAGE = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError)  # what broken archives raise


@dataclass(frozen=True)
class Archive:
    """A published file.

    Attributes:
        url: where it is published.
        checksum: algorithm and digest, as in "md5:8d4f...".
    """

    url: str
    checksum: str

    @property
    def name(self) -> str:
        """What the file is called."""
        return self.url.rsplit("/", 1)[-1]


def data_folder(data_dir: Path | None) -> Path:
    """The folder to look for data in, and to download to: `data_dir`, or one in the user's cache."""
    if data_dir is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "suptickets"
    if data_dir.is_file():
        raise SparsityError(f"{data_dir} is a file: give the folder that holds it")
    return data_dir


def obtain(archive: Archive, folder: Path, or_else: str = "") -> Path:
    """The archive in `folder`, downloaded if it is not there, its checksum verified.

    Args:
        archive: what is wanted.
        folder: where it lies, or will lie.
        or_else: what would do instead, for the message when there is no network.
    """
    path = folder / archive.name
    if not path.is_file():
        _download(archive, path, or_else)
    elif not _intact(path, archive.checksum):
        raise SparsityError(
            f"{path} is not the published file (wrong checksum): delete it, and it is downloaded anew"
        )
    return path


def _intact(path: Path, checksum: str) -> bool:
    """Whether a file is what was published."""
    algorithm, _, digest = checksum.partition(":")
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest() == digest


def _download(archive: Archive, path: Path, or_else: str) -> None:
    """Download a file beside `path`, which appears only when it is complete and right."""
    try:
        with urllib.request.urlopen(archive.url, timeout=TIMEOUT) as source, _beside(path) as part:
            with part.open("wb") as target:
                _copy(source, target, archive.name)
            if not _intact(part, archive.checksum):
                raise OSError("what came has the wrong checksum")
            part.replace(path)
    except (OSError, http.client.HTTPException) as error:
        raise SparsityError(
            f"cannot download {archive.name} ({reason(error)}):"
            f" put it{or_else} into {path.parent}; it is published at {archive.url}"
        ) from error


def _copy(source: IO[bytes], target: IO[bytes], name: str) -> None:
    """Copy, with a line on stderr for every tenth of the whole."""
    headers = getattr(source, "headers", {})
    total, done, told = int(headers.get("Content-Length") or 0), 0, 0
    while chunk := source.read(CHUNK):
        target.write(chunk)
        done += len(chunk)
        if total and done * 10 // total > told:
            told = done * 10 // total
            print(f"{name}: {done >> 20} of {total >> 20} MiB, {told * 10} %", file=sys.stderr, flush=True)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A path beside `path` that no other process uses and that is removed in the end, whatever happens.

    Folders that were made for it are removed too, unless something lies in them.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name + ".", suffix=".part") as folder:
            yield Path(folder) / path.name
    finally:
        with suppress(OSError):  # one that is not empty stays, and so do those above it
            for empty in made:
                empty.rmdir()


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the files beneath `folder.name` in a .tar.gz archive as `folder`: completely, or not at all.

    Nothing but plain files and folders beneath that name is accepted; no owner, mode or time is restored.
    """
    try:
        with _beside(folder) as part:
            with gzip.open(archive) as packed, tarfile.open(fileobj=packed) as tar:
                for member in tar:
                    _write(tar, member, part)
                while packed.read(CHUNK):  # to the very end, where the length and the checksum are
                    pass
            _place(part, folder)
    except DAMAGE as error:
        raise SparsityError(f"{archive} is truncated or damaged ({reason(error)}): replace it") from error
    except OSError as error:
        raise SparsityError(f"cannot unpack {archive} ({reason(error)}): unpack it yourself") from error


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write one member after a check of where it would go, with paths resolved as this system does."""
    root = folder.parent.resolve()
    target = (root / member.name).resolve()
    if not (member.isreg() or member.isdir()) or not target.is_relative_to(root / folder.name):
        raise SparsityError(
            f"{tar.name!s} is refused: {member.name!r} in it is a link, a device or outside {folder.name};"
            " replace it by the published archive"
        )
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file, CHUNK)


def _place(part: Path, folder: Path) -> None:
    """Rename `part` to `folder`; if another process was faster, it has placed the same."""
    if not part.is_dir():
        raise tarfile.ReadError(f"there is no {folder.name} in it")
    try:
        part.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
