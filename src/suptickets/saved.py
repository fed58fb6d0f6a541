"""What a saved network looks like, and the checks that a given state is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from suptickets.errors import SparsityError
from suptickets.weight import POSITIONS, SUFFIX, SparseWeight

if TYPE_CHECKING:
    from suptickets.network import SparseNetwork

FORMAT = 1
_PARTS = {"model": Mapping, "shapes": Mapping, "step": int, "generator": Tensor, "method": Mapping}


def sparse_weights(model: nn.Module) -> Iterator[tuple[str, SparseWeight]]:
    """Sparse weights by their names in the model's state dict; a tied one once for each owner.

    Where some modules have other names in the state dict, as in wrappers for activation checkpointing, the
    names that it gives to the parameters are used.
    """
    paths = dict(_paths(model))
    if paths.keys() <= model.state_dict().keys():
        yield from paths.items()
        return
    weights = {id(weight.values): weight for weight in paths.values()}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) in weights:
            yield key, weights[id(value)]


def _paths(model: nn.Module) -> Iterator[tuple[str, SparseWeight]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, weight in module._modules.items():
            if isinstance(weight, SparseWeight):
                yield f"{prefix}.{name}".removeprefix(".").removesuffix(SUFFIX), weight


def check_saved(network: SparseNetwork) -> None:
    """Refuse a model whose state dict lacks sparse weights, or that cannot load its own state dict."""
    names = dict(sparse_weights(network.model))
    missing = sorted({*network.weights} - {weight.name for weight in names.values()})
    if missing:
        raise SparsityError(f"the model's state_dict(), of which tickets are made, leaves out {missing[0]}")
    if names.keys() != dict(_paths(network.model)).keys():
        plain = network.densify()
        load(plain, plain.state_dict())


def load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state that has exactly the entries of the model's `state_dict()`, which may leave some out."""
    found = model.load_state_dict(state, strict=False)
    wrong = [*found.unexpected_keys, *(key for key in found.missing_keys if key in model.state_dict())]
    if wrong:
        raise SparsityError(f"the model does not load what its state_dict() gives: {', '.join(wrong)}")


def keys(model: nn.Module) -> dict[str, Any]:
    """Where sparse weights stand in the model's state dict: `shapes` by name, `aliases` of tied ones."""
    first: dict[SparseWeight, str] = {}
    aliases = {}
    for key, weight in sparse_weights(model):
        if first.setdefault(weight, key) != key:
            aliases[key] = first[weight]
    return {"shapes": {key: list(weight.shape) for weight, key in first.items()}, "aliases": aliases}


def check_state(network: SparseNetwork, state: Mapping[str, Any]) -> None:
    """Refuse a state that does not fit this network as a whole, before any part of it is loaded."""
    if not isinstance(state, Mapping):
        raise SparsityError(f"this is not the state of a sparse network, but a {type(state).__name__}")
    missing = sorted(_PARTS.keys() - state.keys())
    if missing:
        raise SparsityError(f"this is not the state of a sparse network: it has no {', '.join(missing)}")
    wrong = [name for name, kind in _PARTS.items() if not isinstance(state[name], kind)]
    wrong += ["step"] if not wrong and state["step"] < 0 else []
    wrong += ["generator"] if not wrong and not _is_generator(state["generator"]) else []
    wrong += ["method"] if not wrong and not isinstance(state["method"].get("state"), Mapping) else []
    if wrong:
        raise SparsityError(f"the state is damaged: {', '.join(wrong)}")
    if state.get("format") != FORMAT:
        raise SparsityError(f"the state has format {state.get('format')}, and this version reads {FORMAT}")
    name = state["method"].get("name")
    if name != network.method.name:
        raise SparsityError(f"the state is that of {name}, not of {network.method.name}: use the same method")
    ours, theirs = keys(network.model)["shapes"], state["shapes"]
    if ours != theirs:
        differing = sorted(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
        raise SparsityError(f"the state has other layers or shapes: {', '.join(differing)}")
    problems = list(_problems(network.model, state["model"]))
    if problems:
        raise SparsityError("; ".join(problems))


def _is_generator(state: Tensor) -> bool:
    """Whether a stream of random numbers can go on from here: tried on one that nobody uses."""
    try:
        torch.Generator().set_state(state.cpu())
    except (RuntimeError, TypeError):
        return False
    return True


def _problems(model: nn.Module, theirs: Mapping[str, Any]) -> Iterator[str]:
    ours, weights = model.state_dict(), dict(sparse_weights(model))
    yield from (f"the state has no {key}" for key in ours if key not in theirs)
    yield from (f"the state has an unknown {key}" for key in theirs if key not in ours)
    yield from weight_problems(model, theirs)
    taken = {*weights, *(key + POSITIONS for key in weights)}
    for key in ours.keys() & theirs.keys() - taken:
        if type(ours[key]) is not type(theirs[key]) and isinstance(ours[key], Tensor):
            yield f"{key} is no tensor in the state"
        elif getattr(ours[key], "shape", None) != getattr(theirs[key], "shape", None):
            yield f"{key} has another shape in the state"


def weight_problems(model: nn.Module, state: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What is wrong with the sparse weights in a state dict whose names begin with `prefix`.

    Weights that are missing altogether are left to torch, which reports them if it is strict.
    """
    for name, weight in sparse_weights(model):
        given = state.get(prefix + name), state.get(prefix + name + POSITIONS)
        problem = weight.problem(*given) if any(part is not None for part in given) else None
        yield from [] if problem is None else [problem]
