"""The settings of a callback: checked before there is a model, compared when a training goes on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from typing import Any

import torch
from torch import nn

from suptickets.errors import SparsityError
from suptickets.methods import SNFS, Method
from suptickets.sparsify import sparsify
from suptickets.tickets import SupTickets


def further() -> dict[str, Any]:
    """The settings of `SupTickets` beyond the steps, and their defaults."""
    return {name: p.default for name, p in list(inspect.signature(SupTickets).parameters.items())[4:]}


def check_method(method: Method) -> Method:
    """The method, or an error if it is none."""
    if not isinstance(method, Method):
        raise SparsityError(f"expected a method such as RigL(sparsity=0.9), not {method!r}")
    return method


def check_cycles(
    cycles: int, length: tuple[float | None, int | None], settings: Mapping[str, Any], seed: int | None
) -> None:
    """Refuse what `SupTickets` would refuse later, by building it for a small network."""
    epochs, steps = length
    if epochs is not None and (not isinstance(epochs, int | float) or not 0 < epochs < float("inf")):
        raise SparsityError(f"cycle_epochs must be a number above 0, not {epochs!r}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        small = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    network = sparsify(small, SNFS(0.5), seed=seed)
    SupTickets(network, 2**60, 2 if steps is None else steps, cycles, **settings)


def check_steps(method: Method, total: float, cycles: int) -> None:
    """Refuse a training that is too short for the method, or has no end at which cycles could be."""
    if cycles and total == float("inf"):
        raise SparsityError("cycles come last, and this training has no end: give the trainer max_steps")
    end, told = f"the training has {total:.0f}", getattr(method, "total_steps", None) or 0
    if method.ready > total and not cycles:  # else SupTickets says when the cycles begin
        raise SparsityError(
            f"{method.name} reaches its sparsity after {method.ready} steps, and {end}: let it prune faster "
            "(prune_end, interval)"
        )
    if told > total:
        raise SparsityError(f"{method.name} has total_steps={told}, and {end}: give it that number")


def described(method: Method, tickets: SupTickets | None, settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that must be the same to go on, as text."""
    given = {"method": method.name}
    given |= {f"method.{field.name}": getattr(method, field.name) for field in fields(method) if field.init}
    if tickets is not None:
        given |= {name: getattr(tickets, name) for name in ("cycles", "cycle_steps", "total_steps")}
        given |= {**further(), **settings}
    return {name: _text(value) for name, value in given.items()}


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    plain = value is None or isinstance(value, str | Real)
    return str(value) if plain else getattr(value, "__qualname__", type(value).__name__)


def check_same(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Refuse a checkpoint with other settings."""
    names = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    if names:
        differing = ", ".join(f"{name}: {theirs.get(name)} -> {ours.get(name)}" for name in names)
        raise SparsityError(
            f"the checkpoint is of other settings ({differing}): give the same, and as many epochs, or "
            "begin anew"
        )
