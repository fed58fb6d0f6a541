"""The kernels: compiled once by the user's C++ compiler, kept in a cache folder, called by ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
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
    """The compiled kernels; the first use on a machine compiles them, which takes some seconds."""
    compiler = find_compiler()
    path = cached(compiler)
    if not path.exists():
        build(compiler, path)
    loaded = ctypes.CDLL(str(path))
    loaded.suptickets_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    loaded.suptickets_run.restype = None
    loaded.suptickets_tile.restype = ctypes.c_int64
    return loaded


def find_compiler() -> str:
    """The first C++ compiler that is installed."""
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        if found := shutil.which(name):
            return found
    raise SparsityError("the sparse kernels need a C++ compiler: install g++ or clang++, or set CXX to one")


def cached(compiler: str) -> Path:
    """Where the compiled kernels are kept: source, flags, compiler and CPU together make their name."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    parts = [SOURCE.read_text(), *FLAGS, compiler, version, _cpu()]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "suptickets" / f"kernels-{name}.so"


def _cpu() -> str:
    """The CPU for which code is made: its name and features, where the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    keys = ("model name", "flags", "CPU part", "Features")
    found = {line.partition(":")[0].strip(): line for line in lines if line.startswith(keys)}
    return "\n".join([platform.machine(), platform.processor(), *found.values()])


def build(compiler: str, path: Path) -> None:
    """Compile to a temporary folder, then move the file to `path`: other processes find only whole files."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SparsityError(f"no place for the sparse kernels, set XDG_CACHE_HOME: {error}") from error
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        done = subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", str(made)], capture_output=True, text=True
        )
        if done.returncode:
            lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
            why = next((line for line in lines if "error" in line), lines[0])
            raise SparsityError(f"{compiler} cannot compile the sparse kernels, set CXX to another: {why}")
        os.replace(made, path)
