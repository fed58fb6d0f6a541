"""Compact files: a tensor that is mostly zero is stored as its other values, and where they are.

A file is in the safetensors format. A packed tensor is its values in order, under its own name, and beside
them `NAME/where`: a bit for each position or, if fewer than one in 32 has a value, the positions. Tied
tensors are stored once. The metadata name the packed tensors and their shapes, and those that are tied.
Nothing is rounded: what is read is what was saved.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from suptickets.errors import SparsityError, reason
from suptickets.layout import in_order, place_of

PACKED, TIED = "packed", "tied"  # in the metadata
WHERE = "/where"
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # whole numbers of so many bytes


def save_compact(
    state: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state dict, such as that of a ticket, with its zeros left out.

    Args:
        state: the tensors, by name.
        path: path of the file.
        metadata: texts to store in the file.
    """
    if not isinstance(state, Mapping):
        raise SparsityError(f"save_compact takes model.state_dict(), not a {type(state).__name__}")
    tensors, shapes, tied = dict[str, Tensor](), dict[str, list[int]](), dict[str, str]()
    places, held = dict[object, str](), dict(state)  # a mapping may make its tensors on demand
    taken = [name for name in held if name + WHERE in held]
    if taken:
        raise SparsityError(f"{taken[0]}{WHERE} is the name of where {taken[0]} is not zero: rename it")
    for name, tensor in held.items():
        if not isinstance(tensor, Tensor):
            raise SparsityError(f"{name} is no tensor, and a compact file has nothing else: leave it out")
        first = places.setdefault(place_of(name, tensor), name)
        if first != name:
            tied[name] = first
            continue
        tensors[name], where = _stored(name, tensor)
        if where is not None:
            shapes[name], tensors[name + WHERE] = [*tensor.shape], where
    about = {PACKED: json.dumps(shapes), TIED: json.dumps(tied)}
    Path(path).write_bytes(save(tensors, {**(metadata or {}), **about}))


def load_compact(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The state dict in a file, for `load_state_dict`; a file without packed tensors is read as it is.

    Its tensors are copies, so the file may be written anew. Those that were tied are one tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return unpacked(tensors, file.metadata() or {})
    except SparsityError:
        raise
    except Exception as error:
        raise SparsityError(f"cannot read {path}: {reason(error)}") from error


def unpacked(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a file, with the packed ones as they were before."""
    shapes, tied = (json.loads(metadata.get(key, "{}")) for key in (PACKED, TIED))
    helpers = {name + WHERE for name in shapes}
    missing = (shapes.keys() | helpers | {*tied.values()}) - tensors.keys()
    if missing:
        raise SparsityError(f"the file is damaged: it has no {min(missing)}")
    if helpers & {*tied.values()} or tensors.keys() & tied.keys():
        raise SparsityError(f"the file is damaged: it has {min(tied)} twice")
    state = {
        name: _restored(name, tensor, tensors[name + WHERE], shapes[name]) if name in shapes else tensor
        for name, tensor in tensors.items()
        if name not in helpers
    }
    return state | {name: state[first] for name, first in tied.items()}


def _stored(name: str, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """The values of a tensor, and where they are if it is packed."""
    try:
        plain = tensor.detach().cpu()
        packed = _packed(plain)
        stored = packed or (plain.clone(memory_format=torch.contiguous_format), None)
        save({name: stored[0].reshape(-1)[:0]})  # not all types can be saved
        return stored
    except Exception as error:
        kind = f"{tensor.dtype}, {'torch.meta' if tensor.is_meta else tensor.layout}"
        raise SparsityError(f"a compact file cannot hold {name} ({kind}): leave it out") from error


def _packed(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """The values other than 0, and where they are; None if the tensor itself is not larger."""
    if not tensor.is_floating_point():
        return None
    flat = tensor.reshape(-1)
    alive = flat.view(WHOLE[flat.itemsize]) != 0  # the bits: -0.0 is kept, and what torch may take for zero
    bits = torch.from_numpy(np.packbits(alive.numpy()))
    positions = alive.nonzero().reshape(-1).to(torch.int32 if len(flat) < 2**31 else torch.int64)
    where = min(bits, positions, key=lambda one: one.nbytes)
    values = flat[alive]
    return (values, where) if values.nbytes + where.nbytes < tensor.nbytes else None


def _restored(name: str, values: Tensor, where: Tensor, shape: list[int]) -> Tensor:
    size = math.prod(shape)
    bits = where.dtype == torch.uint8 and len(where) == -(-size // 8)
    positions = torch.from_numpy(np.unpackbits(where.numpy())[:size]).nonzero().reshape(-1) if bits else where
    whole = positions.dim() == 1 and positions.dtype in (torch.int32, torch.int64)
    if values.shape != positions.shape or not (whole and in_order(positions, size)):
        raise SparsityError(f"the file is damaged: {name} does not fit its shape {shape}")
    kind = WHOLE[values.itemsize]
    flat = torch.zeros(size, dtype=kind).index_put_((positions,), values.view(kind))
    return flat.view(values.dtype).reshape(shape)
