"""A plain network as a graph, tidied: batch norms folded, and which parts of it the kernels can run."""

from __future__ import annotations

import builtins
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Proxy, Tracer
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support
from torch.fx.proxy import Attribute

from suptickets.deploy.operations import NOTHING, Modules, known, module_of, shape
from suptickets.deploy.steps import folded
from suptickets.deploy.watch import name_of, watch
from suptickets.errors import SparsityError, reason

FOLDS = ((nn.Conv2d, nn.BatchNorm2d), (nn.Linear, nn.BatchNorm1d))
IN_PLACE = {  # operators, and those that give the same result in a new tensor
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.imatmul: operator.matmul,
}


class Followed(Proxy):
    """A proxy that tells `x += y`, which changes a tensor under all its names, from `x = x + y`."""

    def __getattr__(self, name: str) -> Attribute:
        return FollowedAttribute(self, name)


class FollowedAttribute(Followed, Attribute):
    """The same for attributes such as `x.data`."""


def _recorded(what: Callable[..., Any]) -> Callable[[Proxy, Any], Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", what, (self, other), {})


for _operator in IN_PLACE:
    setattr(Followed, f"__{_operator.__name__}__", _recorded(_operator))


class OnCPU(Tracer):
    """A tracer that knows where the network will run, for code that asks."""

    def proxy(self, node: Node) -> Proxy:
        """A proxy that records changes in place."""
        return Followed(node, self)

    def create_args_for_root(self, root_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The input alone is an argument; others have their defaults."""
        return super().create_args_for_root(lambda root, x: root_fn(root, x), *args, **kwargs)

    def to_bool(self, obj: Proxy) -> bool:
        """The value of a condition on a tensor; it is known for `x.is_cuda` alone."""
        if obj.node.target is builtins.getattr and obj.node.args[1] == "is_cuda":
            return False
        return super().to_bool(obj)


def traced(model: nn.Module, example: Tensor) -> GraphModule:
    """The graph of a network in evaluation mode, batch norms folded, with the shapes from the example."""
    try:
        graph = GraphModule(model, OnCPU().trace(model))
    except Exception as error:
        raise SparsityError(f"the network cannot be traced by torch.fx: {reason(error)}") from error
    _skip(graph)
    watch(graph, example)
    _order(graph)
    _fold(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _skip(graph: GraphModule) -> None:
    """Take out modules that do nothing in evaluation mode, and have no hooks."""
    modules = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        if node.op == "call_module" and type(module_of(node, modules)) in NOTHING:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.graph.erase_node(node)


def _order(graph: GraphModule) -> None:
    """Let nodes that read a tensor after it was changed in place read the node that changed it.

    Where `x += y` changes nothing, as with numbers, it must not be written so in the code of the graph: there
    it would change `x`.
    """
    modules, seen = dict(graph.named_modules()), set[Node]()
    for node in list(graph.graph.nodes):
        if node.meta["changed"]:
            _follow(node, seen, modules)
        else:
            node.target = IN_PLACE.get(node.target, node.target)
        seen.add(node)


def _follow(node: Node, seen: Set[Node], modules: Modules) -> None:
    """Let later nodes see a change in place.

    They may know the tensor by several names: views of it, or what it is a view of. If others should read it
    before the change, and might now do so after it, the change makes a new tensor instead.
    """
    memory, tensor = node.meta["memory"], node.meta["tensor"]
    source = next((one for one in node.all_input_nodes if one.meta["tensor"] == tensor), None)
    if source is None or not node.meta["changed"] <= memory:
        raise SparsityError(f"torch.fx does not follow {node}: use the plain network")
    names = {other for other in seen if other.meta["memory"] & memory}
    readers = {name: [user for user in name.users if user is not node] for name in names}
    if any(user not in seen for name, users in readers.items() if name is not source for user in users):
        raise SparsityError(f"torch.fx does not follow {node}: it changes a view. Use the plain network")
    source.replace_all_uses_with(node, lambda user: user is not node and user not in seen)
    if any(user in seen and user not in readers for users in readers.values() for user in users):
        _part(node, modules)


def _given(node: Node) -> dict[str, Any]:
    """The arguments by name, if the node calls a function whose signature can be read."""
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return {}
    try:
        return inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return {}


def _part(node: Node, modules: Modules) -> None:
    """Let a node that changes a tensor in place make a new one instead."""
    given, name = _given(node), name_of(node)
    if node.op == "call_module" and hasattr(modules[str(node.target)], "inplace"):
        modules[str(node.target)].inplace = False  # type: ignore[assignment]
    elif node.target in IN_PLACE:
        node.target = IN_PLACE[node.target]
    elif given.get("inplace"):
        given["inplace"] = False
        node.args, node.kwargs = (given.pop(next(iter(given))),), given
    else:
        places = (Tensor,) if node.op == "call_method" else (F, torch)
        found = [getattr(place, name[:-1], None) for place in places if name.endswith("_")]
        known = next((one for one in found if callable(one)), None)
        if known is None:
            raise SparsityError(f"torch.fx does not follow {name}: use the plain network")
        node.target = name[:-1] if node.op == "call_method" else known


def _fold(graph: GraphModule) -> None:
    """Make batch norms part of the layers before them, where nothing else reads these or what is between."""
    modules, nodes = dict(graph.named_modules()), list(graph.graph.nodes)
    calls = Counter(node.target for node in nodes if node.op == "call_module")
    read = {str(node.target).rpartition(".")[0] for node in nodes if node.op == "get_attr"}
    for node in nodes:
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if {node.op, source.op} != {"call_module"} or len(source.users) > 1 or calls[source.target] > 1:
            continue
        pair: list[Any] = [module_of(n, modules) for n in (source, node)]
        if tuple(map(type, pair)) in FOLDS and known(node, modules) and source.target not in read:
            modules[source.target] = folded(*pair)
            graph.set_submodule(source.target, modules[source.target])
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)


def parts(graph: GraphModule) -> list[dict[Node, int | None]]:
    """The nodes of the largest parts that the kernels can run without torch.

    The partitioner adds indexing to the part that makes what is indexed, without asking; that is undone here.
    """
    modules, can = dict(graph.named_modules()), create_op_support(lambda modules, node: known(node, modules))
    partitioner = CapabilityBasedPartitioner(graph, can, allows_single_node_partition=True)
    proposed = [part.nodes for part in partitioner.propose_partitions()]
    return [{node: size for node, size in nodes.items() if known(node, modules)} for nodes in proposed]


def multiplications(nodes: Iterable[Node], modules: Modules) -> dict[str, tuple[int, int]]:
    """Multiplications per image in each convolution or linear layer: if dense, and those not by zero."""
    found = {}
    for node in nodes:
        module = module_of(node, modules) if node.op == "call_module" else None
        if isinstance(module, nn.Conv2d | nn.Linear):
            pixels, weight = torch.Size(shape(node)[1:]).numel(), module.weight
            found[str(node.target)] = weight.numel() * pixels, int(weight.count_nonzero()) * pixels
    return found
