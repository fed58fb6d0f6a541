"""A plain copy of a sparse model: the original classes, dense weights with exact zeros."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils._pytree import tree_leaves

from suptickets.errors import SparsityError
from suptickets.owner import restore
from suptickets.ranks import forget
from suptickets.weight import SparseWeight


def densified(model: nn.Module) -> nn.Module:
    """A plain copy of a model, with no trace of the library."""
    check_values(model)
    memo = _detached(model)
    plain = copy.deepcopy(model, memo)
    for weight in [module for module in plain.modules() if isinstance(module, SparseWeight)]:
        restore(weight)
    for module in plain.modules():
        _undecorate(module, memo)
        loading = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
        for hooks in (module._forward_pre_hooks, *loading):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), Link)]:
                del hooks[key]
    forget(plain)
    return plain


def _detached(model: nn.Module) -> dict[int, Any]:
    """A memo for `deepcopy`, which refuses activations: copies of those kept from a forward pass."""
    held = [leaf for module in model.modules() for leaf in tree_leaves(vars(module))]
    return {id(t): t.detach().clone() for t in held if isinstance(t, Tensor) and not t.is_leaf}


def _undecorate(module: nn.Module, memo: dict[int, Any]) -> None:
    """Take off what trainers and compilers wrap around the methods of a module.

    `deepcopy` binds a method to the copy, but does not look into a function: a wrapper of a method would
    still call the original. A method of the class that was wrapped for a training (autocast) is unwrapped.
    """
    for name, value in list(vars(module).items()):
        own = getattr(type(module), name, None)
        inner = _wrapped(value, own)
        if isinstance(inner, MethodType) and id(inner.__self__) in memo:
            vars(module)[name] = inner = MethodType(inner.__func__, memo[id(inner.__self__)])
        if inner is not None and inner in (own, MethodType(own, module) if callable(own) else None):
            del vars(module)[name]


def _wrapped(value: Any, own: Any) -> Any:
    """The method in a wrapper (`functools.wraps`): bound, or the class's own; None if there is no wrapper."""
    if not callable(value) or not hasattr(value, "__wrapped__"):
        return None
    return inspect.unwrap(value, stop=lambda f: f is not value and (f is own or isinstance(f, MethodType)))


def check_values(model: nn.Module) -> None:
    """Refuse a model that has no values, or computes weights from other parameters (by masks, say)."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SparsityError("the model has no values yet (it is on the meta device): move it first")
    if any(parametrize.is_parametrized(module) for module in model.modules()) or prune.is_pruned(model):
        raise SparsityError(
            "the model has parametrizations or masks: remove them first "
            "(parametrize.remove_parametrizations, prune.remove)"
        )


class Link:
    """A hook from the model to its network; a copy of the model does not take it along."""

    def __init__(self, action: Callable[..., None] | None = None) -> None:
        self.action = action

    def __call__(self, *arguments: Any) -> None:
        """Called by torch."""
        if self.action is not None:
            self.action(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        return Link()

    def __reduce__(self) -> Any:
        return Link, ()
