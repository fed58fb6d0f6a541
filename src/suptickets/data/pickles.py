"""Reading pickled numpy arrays without running anything that the file asks for.

A pickle is a program: it may call whatever it names. The CIFAR files name three things of numpy. Here even
those are not called: each name stands for a class below that only remembers what it is told. (To admit the
real `numpy.ndarray` would not be safe: asked for an array of objects over given bytes, it takes the bytes for
pointers.)
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from suptickets.errors import SparsityError, reason


class _Dtype:
    """Stands for `numpy.dtype`, of plain numbers: bool, int, unsigned and float."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        self.code, self.order = _text(code), "|"
        if not re.fullmatch("[biuf][1248]", self.code):
            raise pickle.UnpicklingError(f"it holds an array of {self.code!r}, which are no plain numbers")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = _text(state[1])


class _Array:
    """Stands for `numpy.ndarray` and the function that makes an empty one; the numbers come as a state."""

    values: npt.NDArray[Any] | None = None

    def __init__(self, kind: Any, shape: Any, code: Any) -> None:
        """Ignore what is told here: the state replaces it."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        self.values = _numbers(raw, dtype, shape, "F" if fortran else "C")

    @staticmethod
    def of(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
        """Stands for numpy's `_frombuffer`, which pickles of protocol 5 ask for."""
        array = _Array(None, None, None)
        array.values = _numbers(raw, dtype, shape, "F" if order == "F" else "C")
        return array


def _numbers(raw: Any, dtype: _Dtype, shape: Any, order: Literal["C", "F"]) -> npt.NDArray[Any]:
    return np.frombuffer(raw, np.dtype(dtype.order + dtype.code)).reshape(shape, order=order)


def _encoded(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`: bytes, as Python 3 writes them for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it holds bytes as {encoding!r}, which no array needs")
    return text.encode(encoding)


_ADMITTED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encoded,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _Array.of,
    ("numpy._core.numeric", "_frombuffer"): _Array.of,
}


class _Unpickler(pickle.Unpickler):
    """Knows the names above and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return _ADMITTED[module, name]


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle of any Python: numpy arrays, numbers, text (as bytes, by Python 2), lists.

    Raises:
        SparsityError: if the file is damaged, is no dictionary, or names anything but numpy's arrays.
    """
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        items = {_text(key): value for key, value in content.items()}
        return {key: value.values if isinstance(value, _Array) else value for key, value in items.items()}
    except Exception as error:  # a damaged pickle can fail in any way
        raise SparsityError(
            f"{path} cannot be read ({reason(error)}): replace it by the published file"
        ) from error


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
