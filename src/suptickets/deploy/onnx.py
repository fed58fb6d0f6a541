"""A network as an ONNX file; its zeros are in it, for runtimes that look for them."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from suptickets.deploy.same import same
from suptickets.errors import SparsityError, reason

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

MANY = 2**31  # images; the bound of an unbounded number is above
TRIED = (1, 3, 7)  # numbers of images; torch traces with an even one


def save_onnx(model: nn.Module, images: Tensor, path: str | Path) -> None:
    """Write a plain network, from `images` to `logits`, for any number of images.

    Args:
        model: what `ticket()` or `densify()` give, in evaluation mode.
        images: an example of what it takes.
        path: path of the file.
    """
    if not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))):
        raise SparsityError("ONNX files need more packages: pip install 'suptickets[onnx]'")
    if model.training:
        raise SparsityError(
            "an ONNX file is for predictions: put the network in evaluation mode first (eval)"
        )
    try:
        with _quiet():
            program = _program(model, images)
            if free := _for_any_number(program, model, images):
                program.save(path, external_data=False)
    except Exception as error:
        raise SparsityError(f"torch cannot write this network as ONNX: {reason(error)}") from error
    if not free:
        raise SparsityError(
            "torch would write this network as ONNX for some numbers of images only: let it use x.shape[0], "
            "not len(x) or int(x.shape[0]), and neither a loop over x nor a condition on the number"
        )


def _program(model: nn.Module, images: Tensor) -> ONNXProgram:
    program = torch.onnx.export(
        model,
        (torch.cat([images, images]),),  # if there were one, torch would take the number as fixed
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["images"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None  # only the old exporter gives None
    return program


@torch.no_grad()
def _for_any_number(program: ONNXProgram, model: nn.Module, images: Tensor) -> bool:
    """Whether the traced network does the same as the given one for other numbers of images too.

    If the code asks for the number, torch silently makes it fixed, or gives it bounds. Of a condition on
    it, torch traces one side only, which shows when the traced network is run.
    """
    traced = program.exported_program
    if traced is None or not any(bounds.upper > MANY for bounds in traced.range_constraints.values()):
        return False
    run = traced.module()
    batches = [torch.cat([images[:1]] * count) for count in TRIED]
    return all(same(tree_leaves(model(x.clone())), tree_leaves(run(x.clone()))) for x in batches)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's messages and warnings, also those about missing packages; its errors are enough."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
