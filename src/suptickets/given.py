"""Tickets from elsewhere: state dicts of plain models, states of networks, files of both; all are checked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

import torch
from safetensors import safe_open
from torch import Tensor

from suptickets.compact import load_compact
from suptickets.connections import Ticket, fits, is_number
from suptickets.errors import SparsityError, reason
from suptickets.weight import POSITIONS


def layer_names(layers: str | Iterable[str]) -> list[str]:
    """The names of the sparse weights in plain state dicts, as a list; anything else is refused."""
    names = [layers] if isinstance(layers, str) else list(layers) if isinstance(layers, Iterable) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise SparsityError(f"layers must be the names of weights, not {layers!r}")
    return names


def read_ticket(
    item: Mapping[str, Any] | str | os.PathLike[str], layers: list[str] | None, first: Ticket | None
) -> Ticket:
    """Read a ticket; its sparse weights are those that `layers`, its file or the `first` one names."""
    if not isinstance(item, Mapping | str | os.PathLike):
        raise SparsityError(f"a ticket must be a state dict or a file, not a {type(item).__name__}")
    state = item if isinstance(item, Mapping) else _load(item)
    if any(str(key).endswith(POSITIONS) for key in state):
        raise SparsityError(
            "this is the state of a sparse model: give network.state_dict() or network.densify().state_dict()"
        )
    if {"model", "shapes"} <= set(state):
        _check_network(state)
        if state["shapes"]:
            return Ticket.of(state["model"], state["shapes"], state.get("aliases"))
        state = state["model"]  # of a network that stores nothing sparse
    _check_tensors(state)
    if layers is None:
        weights = {key: value for key, value in state.items() if _is_weight(value)}
        if first is not None:
            layers = [key for key in weights if key not in first.dense]
        else:
            layers = [] if isinstance(item, Mapping) else _told_sparse(item, weights)
            layers = layers or [*weights]
    layers = [f"{key}.weight" if key not in state and f"{key}.weight" in state else key for key in layers]
    _check_layers(state, layers)
    if not isinstance(item, Mapping):
        layers += _copies(state, layers)
    return Ticket.of_dense(state, layers)


def _check_layers(state: Mapping[str, Any], layers: list[str]) -> None:
    """Refuse a plain state dict that has no such weights."""
    missing = [key for key in layers if key not in state]
    if missing:
        raise SparsityError(f"a ticket has no {', '.join(missing)}")
    if not layers:
        nested = [str(key) for key, value in state.items() if isinstance(value, Mapping)]
        hint = f", perhaps what is under {', '.join(nested)}" if nested else ""
        raise SparsityError(f"a ticket has no weights: give the state dict itself{hint}")
    wrong = [key for key in layers if not _is_dense(state[key])]
    if wrong:
        raise SparsityError(
            f"layers must name dense tensors of floating-point numbers, not {', '.join(wrong)}"
        )


def _check_network(state: Mapping[str, Any]) -> None:
    """Refuse a `network.state_dict()` that is not whole."""
    model, shapes, aliases = state["model"], state["shapes"], state.get("aliases") or {}
    wrong = [name for name in ("model", "shapes") if not isinstance(state[name], Mapping)]
    if not wrong:
        _check_tensors(model)
        wrong = [k for k, shape in shapes.items() if not fits(model.get(k), model.get(k + POSITIONS), shape)]
        tied = isinstance(aliases, Mapping) and all(key in shapes for key in aliases.values())
        wrong += [] if tied else ["aliases"]
    if wrong:
        raise SparsityError(f"the state of a network is damaged: {', '.join(map(str, wrong))}: save it anew")


def _check_tensors(state: Mapping[str, Any]) -> None:
    """Refuse tensors without numbers (meta), or with numbers that torch does not compute with (float8)."""
    strange = [
        f"{key} ({value.dtype}, {value.device})"
        for key, value in state.items()
        if isinstance(value, Tensor)
        and (value.is_meta or (value.is_floating_point() and value.element_size() < 2))
    ]
    if strange:
        raise SparsityError(
            f"a ticket has tensors that cannot be averaged, convert them: {', '.join(strange)}"
        )


def _is_dense(value: Any) -> TypeGuard[Tensor]:
    return is_number(value) and value.layout is torch.strided


def _is_weight(value: Any) -> bool:
    return _is_dense(value) and value.dim() >= 2 and value.is_floating_point()


def _told_sparse(path: str | os.PathLike[str], weights: Mapping[str, Tensor]) -> list[str]:
    """The weights that were sparse in training, if the file says so and has all of them."""
    names = {key.removesuffix(".weight"): key for key in weights}
    with suppress(Exception), safe_open(path, "pt") as file:  # any other file says nothing
        return [names[name] for name in json.loads(file.metadata()["suptickets"])["living"]]
    return []


def _copies(state: Mapping[str, Any], layers: list[str]) -> list[str]:
    """Other names of these weights: a file has a copy for each name of one that is tied."""
    named = [state[key] for key in layers]
    others = {key: value for key, value in state.items() if key not in layers and _is_weight(value)}
    return [k for k, v in others.items() if any(v.dtype == w.dtype and torch.equal(v, w) for w in named)]


def _load(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """A state from a file, without running anything that is in it."""
    try:
        if str(path).endswith(".safetensors"):
            return load_compact(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise SparsityError(f"cannot read a ticket from {path}: {reason(error)}") from error
    except Exception as error:
        known = "it is no file of safetensors or of torch.save, or it is damaged"
        raise SparsityError(f"cannot read a ticket from {path}: {known} ({reason(error)})") from error
    if not isinstance(state, Mapping):
        raise SparsityError(f"cannot read a ticket from {path}: it holds no state dict")
    return state
