"""Which operations of a traced network the kernels know, and what steps they become."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from suptickets.deploy.steps import (
    Planes,
    Pool,
    Sparse,
    Step,
    convolution,
    diagonal,
    flat,
    linear,
    normalisation,
    pair,
)

Modules = Mapping[str, nn.Module]

#: Functions and methods that do what a module does; it is made from their arguments but the first.
FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys((F.relu, torch.relu, "relu"), lambda inplace=False: nn.ReLU(inplace)),
    **dict.fromkeys((torch.relu_, "relu_"), lambda: nn.ReLU(inplace=True)),
    **dict.fromkeys(
        (torch.flatten, "flatten"), lambda start_dim=0, end_dim=-1: nn.Flatten(start_dim, end_dim)
    ),
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.avg_pool2d: nn.AvgPool2d,
    F.max_pool2d: nn.MaxPool2d,
}
SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
NOTHING = (  # what these do in evaluation mode
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def shape(node: Node) -> tuple[int, ...]:
    """The shape of what a node makes of one image; empty if it does not make float32 numbers for each."""
    image: tuple[int, ...] = node.meta.get("image", ())
    return image


def module_of(node: Node, modules: Modules) -> nn.Module | None:
    """The module that a node calls, or one that does the same as the function that it calls."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return None if module._forward_hooks or module._forward_pre_hooks else module
    if node.op in ("call_function", "call_method") and node.target in FUNCTIONS:
        try:
            return FUNCTIONS[node.target](*node.args[1:], **node.kwargs)
        except TypeError:
            return None
    return None


def known(node: Node, modules: Modules) -> bool:
    """Whether the kernels can do what a node does."""
    sources = node.all_input_nodes
    if not shape(node) or not sources or not all(map(shape, sources)):
        return False
    if node.target in SUMS and node.op != "call_module":
        return len(node.args) == 2 and not node.kwargs and all(_same(node, a) for a in node.args)
    module = module_of(node, modules)
    check = CHECKS.get(type(module))
    return check is not None and len(sources) == 1 and check(module, shape(sources[0]))


def _same(node: Node, argument: Any) -> bool:
    return isinstance(argument, Node) and shape(argument) == shape(node)


def emit(node: Node, modules: Modules, made: Mapping[Node, Planes], y: Planes) -> list[Step]:
    """The steps of a known node, from planes made before to `y`."""
    module = module_of(node, modules)
    if module is None:
        x, other = (made[argument] for argument in node.args if isinstance(argument, Node))
        return [_sum(x, other, y)]
    x = made[node.all_input_nodes[0]]
    steps: list[Step] = EMITTERS[type(module)](module, x, y)
    return steps


def _sum(x: Planes, other: Planes, y: Planes) -> Sparse:
    step = diagonal(x, y)
    step.residual = other
    return step


def _relu(module: nn.Module, x: Planes, y: Planes) -> list[Step]:
    step = diagonal(x, y)
    step.relu = True
    return [step]


def _greatest(pool: nn.MaxPool2d, x: Planes, y: Planes) -> list[Step]:
    sizes = (pair(pool.kernel_size), pair(pool.stride), pair(pool.padding))
    return [Pool(x, y, *sizes)]


def _mean(pool: nn.AvgPool2d, x: Planes, y: Planes) -> list[Step]:
    return [Pool(x, y, pair(pool.kernel_size), pair(pool.stride), (0, 0), mean=True)]


def _mean_of_all(pool: nn.AdaptiveAvgPool2d, x: Planes, y: Planes) -> list[Step]:
    size = x.height, x.width
    return [Pool(x, y, size, size, (0, 0), mean=True)]


EMITTERS: dict[type, Callable[..., list[Step]]] = {
    nn.Conv2d: convolution,
    nn.Linear: linear,
    nn.BatchNorm1d: normalisation,
    nn.BatchNorm2d: normalisation,
    nn.ReLU: _relu,
    nn.MaxPool2d: _greatest,
    nn.AvgPool2d: _mean,
    nn.AdaptiveAvgPool2d: _mean_of_all,
    nn.Flatten: lambda module, x, y: flat(x, y),
}
CHECKS: dict[type, Callable[[Any, tuple[int, ...]], bool]] = {
    nn.Conv2d: lambda m, x: len(x) == 3 and m.padding_mode == "zeros",
    nn.Linear: lambda m, x: len(x) == 1,
    nn.BatchNorm1d: lambda m, x: len(x) == 1 and m.running_mean is not None,
    nn.BatchNorm2d: lambda m, x: len(x) == 3 and m.running_mean is not None,
    nn.ReLU: lambda m, x: True,
    nn.MaxPool2d: lambda m, x: pair(m.dilation) == (1, 1) and not (m.ceil_mode or m.return_indices),
    nn.AvgPool2d: lambda m, x: pair(m.padding) == (0, 0) and not (m.ceil_mode or m.divisor_override),
    nn.AdaptiveAvgPool2d: lambda m, x: pair(m.output_size) == (1, 1),
    nn.Flatten: lambda m, x: (m.start_dim, m.end_dim) == (1, -1),
}
