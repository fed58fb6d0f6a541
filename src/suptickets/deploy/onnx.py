"""A network as an ONNX file; its zeros are in it, for runtimes that look for them."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from suptickets.errors import SparsityError, reason


def save_onnx(model: nn.Module, images: Tensor, path: str | Path) -> None:
    """Write a plain network, from `images` to `logits`, for any number of images.

    Args:
        model: what `ticket()` or `densify()` give, in evaluation mode.
        images: an example of what it takes.
        path: of the file.
    """
    if not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))):
        raise SparsityError("ONNX files need more packages: pip install 'suptickets[onnx]'")
    try:
        with _quiet():
            torch.onnx.export(
                model,
                (torch.cat([images, images]),),  # of one, torch would take the number for fixed
                path,
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["images"],
                output_names=["logits"],
                external_data=False,
                verbose=False,
            )
    except Exception as error:
        raise SparsityError(f"torch cannot write this network as ONNX: {reason(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings that are not about the network: of packages that are not there, of torch to itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
