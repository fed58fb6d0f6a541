"""The dense tensor that a sparse weight reads as."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from suptickets.errors import SparsityError

_BASE = Tensor._base.__get__  # type: ignore[union-attr]


class DenseView(Tensor):
    """What `module.weight` reads as; writing into it would be lost, so in-place functions are refused."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Results that share its memory are such views too; others are plain, and all are in a compiler."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__" and func == Tensor.is_leaf.__get__ and _asked_by_optimizer():  # type: ignore[attr-defined]
            raise SparsityError(
                "module.weight is the dense view of a sparse weight: give the optimizer the parameter, from "
                "model.parameters() or named_parameters()"
            )
        if any(isinstance(tensor, cls) for tensor in _written(name, args, kwargs)):
            what = func.__self__.__name__ if name == "__set__" else name
            raise SparsityError(
                f"{what} of a sparse weight would be lost at its next read, which builds it anew: "
                f"{_INSTEAD.get(what, _ASSIGN)}; for a tensor of your own, clone it first"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor | list | tuple) or func == _BASE:
                return result  # a marked base would be a view with a base again, without end
            return _marked(result, [t for t in _flat((*args, *kwargs.values())) if isinstance(t, cls)])

    def set_(self, *_: Any, **__: Any) -> Any:
        """Refused here, because torch does not call `__torch_function__` for it."""
        raise SparsityError(
            "set_ on a sparse weight would be lost: assign a dense tensor (module.weight = tensor)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return copy.deepcopy(self.detach().as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the plain tensor that it is."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


def _asked_by_optimizer() -> bool:
    """Whether the function that asks about a view is about to optimize it."""
    return sys._getframe(2).f_code.co_name == "add_param_group"


_skipped = False


def as_view(dense: Tensor) -> DenseView:
    """The tensor as a `DenseView`.

    Where torch.compile falls back to eager (recurrent layers), it would compile `__torch_function__` alone
    and reuse the result for another attribute or tensor: so dynamo is told to skip it.
    """
    global _skipped
    if not _skipped:
        skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip is not None:  # the compiler is there
            skip(DenseView.__dict__["__torch_function__"].__func__.__code__)
            _skipped = True
    return dense.as_subclass(DenseView)


def _marked(result: Any, ours: Sequence[DenseView]) -> Any:
    """The result; what shares memory with one of `ours` becomes such a view too."""
    if type(result) in (list, tuple):
        return type(result)(_marked(part, ours) for part in result)
    alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
    shares = isinstance(result, Tensor) and any(alias(result, view) for view in ours)
    return result.as_subclass(DenseView) if shares else result


def _flat(arguments: Iterable[Any]) -> Iterator[Any]:
    for one in arguments:
        yield from one if isinstance(one, list | tuple) else (one,)


_ASSIGN = (
    "initialise before sparsify, or assign a dense tensor (module.weight = tensor), whose values the living "
    "connections take"
)
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_INSTEAD = {
    **dict.fromkeys(("requires_grad", "requires_grad_"), "freeze by module.requires_grad_(False)"),
    **dict.fromkeys(_HOOKS, "use the parameter that model.named_parameters() has"),
}
_HARMLESS = {"detach_", "share_memory_", "rename_"}
_WRITING = {"__setitem__", "__set__", *_HOOKS}  # besides all names that end in _, as += calls them


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    """The arguments that a function writes into, by its name, by `out=` and by `inplace=`."""
    yield from _flat([kwargs.get("out")])
    if kwargs.get("inplace") is True:
        yield from args[:1]
    if name in _WRITING or (name.endswith("_") and not name.startswith("__") and name not in _HARMLESS):
        yield kwargs.get("tensor")
        yield from _flat(args[:1])
