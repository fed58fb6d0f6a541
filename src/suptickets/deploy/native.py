"""The kernels: compiled once by the user's C++ compiler, kept in a cache folder, called by ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from suptickets.errors import SparsityError

SOURCE = Path(__file__).with_name("kernels.cpp")
OWN = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"  # for this very CPU
FLAGS = ("-O3", OWN, "-std=c++17", "-shared", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")  # tried in this order, after $CXX

Pair = ctypes.c_int64 * 2


class Planes(ctypes.Structure):
    """Where a tensor lies: see the C++ structure of the same name."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("at", "channels", "height", "width", "row", "step", "lead")
    ]


class Step(ctypes.Structure):
    """One operation: see the C++ structure of the same name."""

    _fields_ = [
        *(("kind", ctypes.c_int64), ("x", Planes), ("y", Planes), ("port", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("taps", "starts", "bias", "mask")),
        *((name, ctypes.c_int64) for name in ("blocks", "residual", "relu")),
        *((name, Pair) for name in ("kernel", "stride", "padding")),
    ]


class Call(ctypes.Structure):
    """A call of all steps: see the C++ structure of the same name."""

    _fields_ = [
        ("steps", ctypes.POINTER(Step)),
        *((name, ctypes.c_int64) for name in ("count", "lanes", "images")),
        ("arena", ctypes.c_void_p),
        ("inputs", ctypes.POINTER(ctypes.c_void_p)),
        ("outputs", ctypes.POINTER(ctypes.c_void_p)),
        ("threads", ctypes.c_int64),
    ]


@cache
def kernels() -> ctypes.CDLL:
    """The compiled kernels; the first use on a machine compiles them, which takes some seconds.

    The name of their file holds digests of what they were made of, of the compiler and of the file itself: so
    a damaged one is made again. Without a compiler, what another one has made will do.
    """
    compiler = find_compiler()
    try:
        found = map(load, sorted(folder().glob(pattern(compiler))))
        loaded = next(filter(None, found), None) or _fresh(compiler)
    except (OSError, RuntimeError) as error:  # there may be no home
        raise SparsityError(f"no place for the sparse kernels, set XDG_CACHE_HOME: {error}") from error
    loaded.suptickets_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    loaded.suptickets_run.restype = None
    loaded.suptickets_tile.restype = ctypes.c_int64
    return loaded


def find_compiler() -> str | None:
    """The first C++ compiler that is installed."""
    names = filter(None, (os.environ.get("CXX"), *COMPILERS))
    return next(filter(None, map(shutil.which, names)), None)


def folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "suptickets"


def pattern(compiler: str | None) -> str:
    """The names of the files that a compiler, or any, makes of this source with these flags for this CPU."""
    code = _digest("\n".join([SOURCE.read_text(), *FLAGS, _cpu()]).encode())
    made_by = _digest((compiler + _run(compiler, "--version").stdout).encode()) if compiler else "*"
    return f"kernels-{code}-{made_by}-*.so"


def load(path: Path) -> ctypes.CDLL | None:
    """The kernels in a file; none if it is damaged, or cannot be loaded."""
    try:
        return ctypes.CDLL(str(path)) if _whole(path) else None
    except OSError:
        return None


def _whole(path: Path) -> bool:
    """Whether the content is what the name says."""
    return path.stem.endswith(_digest(path.read_bytes()))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise SparsityError(f"{command[0]} cannot be run, set CXX to another compiler: {error}") from error


def _cpu() -> str:
    """The CPU for which code is made: its name and features, where the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    keys = ("model name", "flags", "CPU part", "Features")
    found = {line.partition(":")[0].strip(): line for line in lines if line.startswith(keys)}
    return "\n".join([platform.machine(), platform.processor(), *found.values()])


def _fresh(compiler: str | None) -> ctypes.CDLL:
    """Kernels that are compiled now."""
    if compiler is None:
        raise SparsityError(
            "the sparse kernels need a C++ compiler: install g++ or clang++, or set CXX to one"
        )
    path = build(compiler)
    if loaded := load(path):
        return loaded
    path.unlink(missing_ok=True)
    raise SparsityError(
        f"{compiler} made kernels that do not load from {path.parent}: set CXX to another compiler, or "
        "XDG_CACHE_HOME to another folder"
    )


def build(compiler: str) -> Path:
    """Compile to a temporary folder, then move the file: other processes find only whole ones."""
    name = pattern(compiler)
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as temporary:
        made = _compiled(compiler, Path(temporary) / "kernels.so")
        path = folder() / name.replace("*", _digest(made.read_bytes()))
        os.replace(made, path)
    for old in folder().glob(name):
        with suppress(OSError):  # another process may remove it too
            if not _whole(old):
                old.unlink()
    return path


def _compiled(compiler: str, path: Path) -> Path:
    done = _run(compiler, *FLAGS, str(SOURCE), "-o", str(path))
    if done.returncode or not path.exists():
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        why = next((line for line in lines if "error" in line), lines[0])
        raise SparsityError(f"{compiler} cannot compile the sparse kernels, set CXX to another: {why}")
    return path
