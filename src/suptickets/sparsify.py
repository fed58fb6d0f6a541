"""`sparsify`: from a model to a sparse network."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from suptickets.errors import SparsityError, whole
from suptickets.layers import Candidate, LayerSparsity, Patterns, choose
from suptickets.methods import Method
from suptickets.network import Layer, SparseNetwork
from suptickets.optimizer_state import check_optimizer, store_state
from suptickets.owner import restore, store
from suptickets.plain import check_values
from suptickets.weight import SparseWeight


def sparsify(
    model: nn.Module,
    method: Method,
    optimizer: Optimizer | None = None,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    seed: int | None = None,
) -> SparseNetwork:
    """Store the weights of `model` sparsely, in place, and let `method` decide which connections live.

    Args:
        model: any module; convolutions and linear layers become sparse unless `include` says otherwise.
        method: for instance `RigL(sparsity=0.95)`.
        optimizer: the optimizer that trains the model; it may have been used before, and it may also be
            built afterwards (`network.attach(optimizer)`).
        include: names of weights or modules, or patterns, to make sparse instead of the default.
        exclude: names or patterns to leave dense.
        seed: seed of all random choices of connections; torch's own initial seed by default, so that models
            of the same shapes get the same connections; to avoid that, give each its own seed.
    """
    _refuse(model, method)
    if optimizer is not None:
        check_optimizer(optimizer)
    chosen = choose(model, include, exclude)
    method = copy.copy(method)
    for name, value in vars(method).items():
        if isinstance(value, dict | list | set):  # a method's memory belongs to one network
            setattr(method, name, copy.copy(value))
    seed = torch.initial_seed() if seed is None else whole("seed", seed, 0) % 2**63
    generator = torch.Generator().manual_seed(seed)
    # if anything is refused from here on, the model is given back as it was; what is made here is trained
    with ExitStack() as undo, torch.inference_mode(False):
        layers: dict[str, Layer] = {
            c.name: _store(c, optimizer, undo)
            if method.sparse
            else LayerSparsity(c.parameter.shape, c.parameter.numel())
            for c in chosen
        }
        network = SparseNetwork(model, method, layers, generator)
        undo.callback(network.detach)
        if optimizer is not None:
            network.attach(optimizer)
        method.begin(network)
        undo.pop_all()
    return network


def _store(candidate: Candidate, optimizer: Optimizer | None, undo: ExitStack) -> SparseWeight:
    parameter = candidate.parameter
    state = None if optimizer is None else dict(optimizer.state.get(parameter, {}))
    dense = parameter.detach()
    weight = store(candidate.name, candidate.owners)
    undo.callback(restore, weight, dense)
    if optimizer is not None and state:
        undo.callback(optimizer.state.__setitem__, parameter, state)
        store_state(optimizer, weight)
    return weight


def _refuse(model: nn.Module, method: Method) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule | AveragedModel):
        raise SparsityError(
            f"expected a plain torch.nn.Module, not {model if isinstance(model, type) else type(model)}"
        )
    if not isinstance(method, Method):
        given = repr(method) if isinstance(method, str | type) else type(method).__name__
        raise SparsityError(f"expected a method such as RigL(sparsity=0.9), not {given}")
    modules = list(model.modules())
    if any(isinstance(module, SparseWeight) for module in modules):
        raise SparsityError("the model is sparse already: sparsify a fresh one")
    kinds = {cls.__name__ for module in modules for cls in type(module).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"} or any(
        "DTensor" in type(p).__name__ for p in model.parameters()
    ):
        raise SparsityError(
            "FSDP is not supported: it shards weights by position; use DistributedDataParallel"
        )
    if any(isinstance(module, nn.DataParallel) for module in modules):
        raise SparsityError("DataParallel is not supported: use DistributedDataParallel")
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise SparsityError("sparsify the model first, then wrap it in DistributedDataParallel")
    if "OptimizedModule" in kinds:
        raise SparsityError("sparsify the model first, then compile it")
    check_values(model)
