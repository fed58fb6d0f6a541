"""A sparse network that is faster than the dense one on a CPU: `accelerate`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions
from torch.utils._pytree import tree_leaves

from suptickets.deploy import native
from suptickets.deploy.operations import Modules
from suptickets.deploy.recipe import Writer
from suptickets.deploy.runtime import Accelerated, Part
from suptickets.deploy.same import same
from suptickets.deploy.trace import multiplications, parts, traced
from suptickets.errors import SparsityError, reason
from suptickets.layers import ELIGIBLE
from suptickets.plain import densified

#: Torch is as fast if at least this share of the multiplications is not by zero.
DENSE: dict[type, float] = {nn.Conv2d: 0.8, nn.Linear: 0.3}


def accelerate(model: nn.Module, example: Tensor) -> Accelerated:
    """A copy of a network for use on a CPU, which skips its zeros; outputs stay the same, up to rounding.

    It takes batches of any size and as many threads as torch. Operations that the kernels do not know stay
    torch's own, and so do parts of the network that have too few zeros; a warning says if that is all of it.

    Args:
        model: a plain network, such as `tickets.ticket()`; it is not changed.
        example: a batch of inputs; others must have the same shape, but for the number of images.
    """
    if not isinstance(model, nn.Module):
        raise SparsityError(f"accelerate takes a network, not {type(model).__name__}: load it into one")
    native.kernels()
    plain = densified(model).cpu().eval().requires_grad_(False)
    kinds = {module.weight.dtype for module in plain.modules() if isinstance(module, ELIGIBLE)}
    if kinds and torch.float32 not in kinds:
        raise SparsityError("the kernels compute in float32: call model.float() first, and example.float()")
    if type(plain) in ELIGIBLE:
        plain = nn.Sequential(plain)  # torch.fx traces into what it is given
    expected, graph = _outputs(plain, example), traced(plain, example)
    shares = _replace(graph)
    layers = [name for name, module in plain.named_modules() if isinstance(module, ELIGIBLE)]
    sparse = {name: shares[name] for name in layers if name in shares}
    made = Accelerated(graph, sparse, [name for name in layers if name not in shares])
    if not same(expected, tree_leaves(made(example.clone()))):
        raise SparsityError("torch.fx does not see all that the network does: use the plain one")
    if not sparse:
        unchanged = "no layer gains by its zeros: they are too few, or the kernels do not know its kind"
        warnings.warn(unchanged, RuntimeWarning, stacklevel=2)
    return made


def _outputs(plain: nn.Module, example: Tensor) -> list[Any]:
    try:
        with torch.no_grad():
            return tree_leaves(plain(example.clone()))
    except Exception as error:
        raise SparsityError(f"the network does not take the example: {reason(error)}") from error


def _replace(graph: GraphModule) -> dict[str, float]:
    """Let the kernels run what gains by it; returns the layers in it, with the shares that are not zero."""
    modules = dict(graph.named_modules())
    taken = [part for part in parts(graph) if _gains(part, modules)]
    nodes = [node for part in taken for node in part]
    found = multiplications(nodes, modules)
    fuse_by_partitions(graph, taken, prefix="part_")
    for k in range(len(taken)):
        part = graph.get_submodule(f"part_{k}")
        assert isinstance(part, GraphModule)
        graph.set_submodule(f"part_{k}", Part(Writer(part).recipe))
    graph.delete_all_unused_submodules()
    graph.recompile()
    return {name: living / dense for name, (dense, living) in found.items()}


def _gains(part: dict[Node, int | None], modules: Modules) -> bool:
    counted = multiplications(part, modules)
    least = sum(living / DENSE[type(modules[name])] for name, (_, living) in counted.items())
    return least < sum(dense for dense, _ in counted.values())
