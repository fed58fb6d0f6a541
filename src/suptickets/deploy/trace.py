"""A plain network as a graph, tidied: batch norms folded, and which parts of it the kernels can run."""

from __future__ import annotations

import builtins
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Proxy, Tracer
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from suptickets.deploy.operations import IMAGES, NOTHING, Modules, known, module_of, shape
from suptickets.errors import SparsityError, reason

FOLDS: dict[Any, Callable[..., nn.Module]] = {
    (nn.Conv2d, nn.BatchNorm2d): fuse_conv_bn_eval,
    (nn.Linear, nn.BatchNorm1d): fuse_linear_bn_eval,
}


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
HARMLESS = ("requires_grad_", "detach_")
VIEWS = {  # what may share memory with its input
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "getitem", "getattr", "select"),
    *("chunk", "split", "tensor_split", "unbind", "narrow", "transpose", "swapaxes", "permute", "movedim"),
    *("squeeze", "unsqueeze", "expand", "expand_as", "diagonal", "unfold", "detach", "contiguous"),
    *("t", "to", "float"),
}


class Followed(Proxy):
    """A proxy that tells `x += y`, which changes a tensor under all its names, from `x = x + y`."""


def _recorded(what: Callable[..., Any]) -> Callable[[Proxy, Any], Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", what, (self, other), {})


for _operator in IN_PLACE:
    setattr(Followed, f"__{_operator.__name__}__", _recorded(_operator))


class OnCPU(Tracer):
    """A tracer that knows where the network will run, for code that asks."""

    def proxy(self, node: Node) -> Proxy:
        """A proxy that records changes in place."""
        return Followed(node, self)

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
    _order(graph)
    _fold(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    _find_shapes(graph, example)
    return graph


def _find_shapes(graph: GraphModule, example: Tensor) -> None:
    """Find all shapes by a run with images of its own, which the network may change."""
    try:
        with torch.no_grad(), redirect_stderr(StringIO()):  # torch prints what it raises
            ShapeProp(graph).propagate(example[:1].expand(IMAGES, *example.shape[1:]).clone())
    except Exception as error:
        cause = reason(error.__cause__ or error)
        raise SparsityError(f"the network does not take {IMAGES} images like the example: {cause}") from error


def _skip(graph: GraphModule) -> None:
    """Take out modules that do nothing in evaluation mode."""
    modules = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        if node.op == "call_module" and type(modules[node.target]) in NOTHING:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.graph.erase_node(node)


def _order(graph: GraphModule) -> None:
    """Let nodes that read a tensor after it was changed in place read the node that changed it."""
    modules, nodes = dict(graph.named_modules()), list(graph.graph.nodes)
    changes = {node for node in nodes if node.all_input_nodes and _in_place(node, modules)}
    sizes, roots, seen = set[Node](), dict[Node, Node](), set[Node]()
    for node in nodes:
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        sizes |= {node} if _is_size(node, sizes) else set()
        roots[node] = roots.get(source, node) if node in changes or _is_view(node, modules) else node
        if node in changes and source in sizes:
            _part(node, modules)  # a number, which nobody changes
        elif node in changes:
            _follow(node, seen, [other for other in seen if roots[other] is roots[node]], modules)
        seen.add(node)


def _follow(node: Node, seen: Set[Node], names: Sequence[Node], modules: Modules) -> None:
    """Let later nodes see a change in place.

    They may know the tensor by several `names`: views of it, or what it is a view of. If others should read
    it before the change, and might now do so after it, the change makes a new tensor instead.
    """
    source = node.all_input_nodes[0]
    readers = {name: [user for user in name.users if user is not node] for name in names}
    if any(user not in seen for name, users in readers.items() if name is not source for user in users):
        raise SparsityError(f"torch.fx does not follow {node}: it changes a view. Use the plain network")
    source.replace_all_uses_with(node, lambda user: user is not node and user not in seen)
    if any(user in seen and user not in readers for users in readers.values() for user in users):
        _part(node, modules)


def _in_place(node: Node, modules: Modules) -> bool:
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    return node.target in IN_PLACE or _written(node) or bool(_given(node).get("inplace"))


def _written(node: Node) -> bool:
    """Whether a node writes in place, by its name."""
    name = _name(node)
    own = getattr(node.target, "__module__", "") == "_operator"  # and_, or_
    return name.endswith("_") and not name.endswith("__") and name not in HARMLESS and not own


def _name(node: Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def _is_view(node: Node, modules: Modules) -> bool:
    """Whether the result of a node may share memory with its input."""
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], nn.Flatten | nn.Unflatten | nn.Identity)
    return node.op in ("call_method", "call_function") and _name(node) in VIEWS


def _is_size(node: Node, sizes: Set[Node]) -> bool:
    """Whether a node gives sizes of a tensor, or what was computed from such alone."""
    if node.op == "call_method" and node.target in ("size", "dim", "numel", "ndimension"):
        return True
    if node.target is builtins.getattr:
        return node.args[1] in ("shape", "ndim")
    return bool(node.all_input_nodes) and all(source in sizes for source in node.all_input_nodes)


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
    if node.op == "call_module":
        modules[str(node.target)].inplace = False  # type: ignore[assignment]
    elif node.target in IN_PLACE:
        node.target = IN_PLACE[node.target]
    elif not _written(node):
        given = {**_given(node), "inplace": False}
        node.args, node.kwargs = (given.pop(next(iter(given))),), given
    else:
        name, method = _name(node)[:-1], node.op == "call_method"
        found = [getattr(place, name, None) for place in ((Tensor,) if method else (F, torch))]
        known = next((one for one in found if callable(one)), None)
        if known is None:
            raise SparsityError(f"torch.fx does not follow {name}_: use the plain network")
        node.target = name if method else known


def _fold(graph: GraphModule) -> None:
    """Make batch norms part of the layers before them, where nothing else reads what is between."""
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
    """Tells torch.fx what the kernels can do."""

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool:
        """Whether the kernels can do what the node does."""
        return known(node, submodules)


def parts(graph: GraphModule) -> list[dict[Node, int | None]]:
    """The nodes of the largest parts that the kernels can run without torch.

    The partitioner adds indexing to the part that makes what is indexed, without asking; that is undone here.
    """
    partitioner = CapabilityBasedPartitioner(graph, Known(), allows_single_node_partition=True)
    modules = dict(graph.named_modules())
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
