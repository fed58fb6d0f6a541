"""`export`: the network of a run, or of a ticket file, for use elsewhere."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch

from suptickets.data import Data, load_data
from suptickets.deploy import save_compact, save_onnx
from suptickets.errors import SparsityError, choice
from suptickets.training import saved
from suptickets.training.files import save_tensors, to_json, write
from suptickets.training.folder import EXPORTED, refuse_own
from suptickets.training.price import SIZES, images
from suptickets.training.saved import Saved

FORMATS = dict(zip(("dense", "compact", "onnx"), EXPORTED, strict=True))


def export(
    path: Path,
    format: str = "compact",
    out: str | Path | None = None,
    *,
    model: str | None = None,
    data_dir: str | None = None,
) -> dict[str, Any]:
    """Write a network in another format; gives the file's `path` and `bytes`.

    Args:
        path: a run's folder, or a ticket file.
        format: `dense` is a plain state dict, `compact` one without its zeros, `onnx` the whole network.
        out: the file; by default beside the ticket.
        model: with onnx, the function that makes a network which is not the library's own.
        data_dir: with onnx, where images in folders are, if they have moved.
    """
    choice("format", format, FORMATS)
    one = saved.result(path)
    file = one.files[0]
    if one.together:
        raise SparsityError(f"{path} predicts with {len(one.files)} networks: export one of them ({file})")
    target = Path(out) if out is not None else file.with_name(_stem(file) + FORMATS[format])
    if target.resolve() == file.resolve():
        raise SparsityError(f"{target} is the file to be exported: choose another --out")
    refuse_own(target)
    if target.is_dir() or not target.parent.is_dir():
        raise SparsityError(f"cannot write {target}: choose another --out, a file in a folder that is there")
    if model is not None and (format != "onnx" or ":" not in one.settings.model):
        raise SparsityError("--model is for onnx, and networks that are not the library's own: leave it out")
    if format == "onnx":
        one = one.named(model)
        write(target, lambda part: _save_onnx(one, _data(one, data_dir), part))
    else:
        save = save_tensors if format == "dense" else save_compact
        write(target, lambda part: save(one.states[0], part, {"suptickets": to_json(one.about)}))
    return {"path": str(target), "bytes": target.stat().st_size}


def _stem(file: Path) -> str:
    """The name of a file without the ending of its format."""
    for ending in (*FORMATS.values(), file.suffix):
        if file.name.endswith(ending):
            return file.name.removesuffix(ending)
    return file.name


def _save_onnx(one: Saved, data: Data, path: Path) -> None:
    network = one.load(data, torch.device("cpu")).float()
    save_onnx(network, torch.linspace(-1, 1, prod(data.shape)).view(1, *data.shape), path)


def _data(one: Saved, folder: str | None) -> Data:
    """Data with the right shape of image; files are read only if the shape is not known otherwise."""
    name = one.settings.data
    return images(name, None, None) if name in SIZES else load_data(name, folder or one.settings.data_dir)
