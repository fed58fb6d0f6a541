"""A plain network as a graph, tidied: batch norms folded, and which parts of it the kernels can run."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Proxy, Tracer
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from suptickets.deploy.operations import IMAGES, IN_PLACE, NOTHING, Modules, known, module_of, shape
from suptickets.errors import SparsityError, reason

FOLDS: dict[Any, Callable[..., nn.Module]] = {
    (nn.Conv2d, nn.BatchNorm2d): fuse_conv_bn_eval,
    (nn.Linear, nn.BatchNorm1d): fuse_linear_bn_eval,
}


class OnCPU(Tracer):
    """Knows where the network will run, so that it may ask."""

    def to_bool(self, obj: Proxy) -> bool:
        """What a condition on a tensor is: known for `x.is_cuda` alone."""
        if obj.node.target is builtins.getattr and obj.node.args[1] == "is_cuda":
            return False
        return super().to_bool(obj)


def traced(model: nn.Module, example: Tensor) -> GraphModule:
    """The graph of a network in use, batch norms folded, with the shapes that the example gives."""
    try:
        graph = GraphModule(model, OnCPU().trace(model))
    except Exception as error:
        raise SparsityError(f"the network cannot be traced by torch.fx: {reason(error)}") from error
    _skip(graph)
    _order(graph)
    _fold(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    _find_shapes(graph, example)
    return graph


def _find_shapes(graph: GraphModule, example: Tensor) -> None:
    """By a run with images of its own, which the network may change."""
    try:
        with torch.no_grad(), redirect_stderr(StringIO()):  # torch prints what it raises
            ShapeProp(graph).propagate(example[:1].expand(IMAGES, *example.shape[1:]).clone())
    except Exception as error:
        cause = reason(error.__cause__ or error)
        raise SparsityError(f"the network does not take {IMAGES} images like the example: {cause}") from error


def _skip(graph: GraphModule) -> None:
    """Take out what does nothing in use."""
    modules = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        if node.op == "call_module" and type(modules[node.target]) in NOTHING:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def _order(graph: GraphModule) -> None:
    """Who reads a tensor after it was changed in place reads what changed it, by name."""
    modules = dict(graph.named_modules())
    seen: set[Node] = set()
    for node in graph.graph.nodes:
        seen.add(node)
        if node.all_input_nodes and _in_place(node, modules):
            node.all_input_nodes[0].replace_all_uses_with(node, lambda user: user not in seen)


def _in_place(node: Node, modules: Modules) -> bool:
    return node.target in IN_PLACE or bool(getattr(module_of(node, modules), "inplace", False))


def _fold(graph: GraphModule) -> None:
    """Make batch norms part of the layers before them, where nobody else wants what is between."""
    modules = dict(graph.named_modules())
    calls = Counter(node.target for node in graph.graph.nodes if node.op == "call_module")
    for node in list(graph.graph.nodes):
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if {node.op, source.op} != {"call_module"} or len(source.users) > 1 or calls[source.target] > 1:
            continue
        layer, norm = (module_of(n, modules) for n in (source, node))
        fold = FOLDS.get((type(layer), type(norm)))
        if fold and getattr(norm, "running_mean", None) is not None:
            modules[source.target] = fold(layer, norm)
            graph.set_submodule(source.target, modules[source.target])
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)


class Known(OperatorSupportBase):
    """What the kernels can do, as torch.fx asks for it."""

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool:
        """Whether it is of that."""
        return known(node, submodules)


def parts(graph: GraphModule) -> list[dict[Node, int | None]]:
    """The nodes of the largest parts that the kernels can run without torch.

    The partitioner adds indexing to the part that makes what is indexed, without asking.
    """
    partitioner = CapabilityBasedPartitioner(graph, Known(), allows_single_node_partition=True)
    modules = dict(graph.named_modules())
    proposed = [part.nodes for part in partitioner.propose_partitions()]
    return [{node: size for node, size in nodes.items() if known(node, modules)} for nodes in proposed]


def multiplications(nodes: Iterable[Node], modules: Modules) -> dict[str, tuple[int, int]]:
    """For an image, in each convolution or linear layer: of a dense network, and those not by zero."""
    found = {}
    for node in nodes:
        module = module_of(node, modules) if node.op == "call_module" else None
        if isinstance(module, nn.Conv2d | nn.Linear):
            pixels, weight = torch.Size(shape(node)[1:]).numel(), module.weight
            found[str(node.target)] = weight.numel() * pixels, int(weight.count_nonzero()) * pixels
    return found
