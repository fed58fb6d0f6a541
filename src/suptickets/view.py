"""The dense tensor that a sparse weight reads as."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from suptickets.errors import SparsityError


class DenseView(Tensor):
    """What `module.weight` reads as; writing into it would be lost, so in-place functions are refused."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Results are plain tensors."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        in_place = name in _WRITING or (
            name.endswith("_") and not name.startswith("_") and name not in _HARMLESS
        )
        written = [kwargs.get("out"), *((*args[:1], kwargs.get("tensor")) if in_place else ())]
        if any(isinstance(tensor, cls) for tensor in written):
            raise SparsityError(
                f"{name} on a sparse weight would be lost: initialise before sparsify, or assign a dense "
                "tensor (module.weight = tensor), whose values the living connections take"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            return result.as_subclass(cls) if func == Tensor.data.__get__ else result  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved and copied as the plain tensor that it is."""
        return self.detach().__reduce_ex__(protocol)


_HARMLESS = {"requires_grad_", "detach_", "share_memory_", "rename_"}
_WRITING = {
    "__setitem__",
    "__set__",
    *(f"__i{o}__" for o in ("add", "sub", "mul", "truediv", "pow", "matmul")),
}
