"""The gradient of all positions of one weight, collected on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn


def when_complete(leaf: Tensor, call: Callable[[Tensor], None]) -> Any:
    """Call a method when a backward pass has added to the gradient of `leaf`; returns the hook's handle.

    The hook does not keep the method's object alive: Python's garbage collector does not look into hooks of
    this kind, so an object that leads back to the leaf would never be freed, nor the model that both are of.
    """
    method = WeakMethod(call)

    def hook(tensor: Tensor) -> None:
        bound = method()
        if bound is not None:
            bound(tensor)

    return leaf.register_post_accumulate_grad_hook(hook)


class DenseGradient:
    """Adds up the gradient of all positions over the backward passes of a step.

    The dense weight is computed as `canvas` plus the living values. The canvas, a leaf that is all zeros and
    takes no room, therefore receives the gradient of every position. It is taken from there after each
    backward pass, and starts anew when the gradient of the living values has started anew: when `zero_grad`
    was called, wherever in the loop that was, after a step that GradScaler skipped or for any other reason.
    """

    def __init__(self, values: nn.Parameter, size: int) -> None:
        """Collect from the next forward pass on."""
        self.canvas = values.new_zeros(1).expand(size).requires_grad_()
        self.total: Tensor | None = None
        self._incoming: Tensor | None = None
        self._fresh = True
        self._anew: bool | None = None
        self._pass = -1
        self._last: Callable[[], Tensor | None] = lambda: None
        self._version = -1
        self._hooks = [
            when_complete(self.canvas, self._take),
            values.register_hook(lambda _: self._see(values)),
            when_complete(values, self._note),
        ]

    def _take(self, canvas: Tensor) -> None:
        self._enter()
        self._incoming, canvas.grad = canvas.grad, None
        self._add()

    def _see(self, values: Tensor) -> None:
        """Before a backward pass adds to it: was the gradient of the values removed, or set to zero?

        `torch.autograd.grad` calls this too, but adds nothing: it counts only once `_note` is called.
        """
        old, self._anew = values.grad, None
        same = old is not None and old is self._last() and old._version == self._version
        self._fresh = old is None or (not same and not bool(old.any()))

    def _note(self, values: Tensor) -> None:
        """Remember the gradient's version, to tell one that happens to be zero from one that was zeroed."""
        assert values.grad is not None
        self._last, self._version = ref(values.grad), values.grad._version
        self._enter()
        self._anew = self._fresh
        self._add()

    def _enter(self) -> None:
        """Forget the half that another backward pass has left: of a frozen weight only the canvas is told."""
        now = torch._C._current_graph_task_id()
        if now != self._pass:
            self._pass, self._incoming, self._anew = now, None, None

    def _add(self) -> None:
        """Add up, once both hooks of a backward pass have been called, in whichever order."""
        if self._incoming is None or self._anew is None:
            return
        goes_on = self.total is not None and not self._anew
        self.total = self.total.add_(self._incoming) if goes_on else self._incoming  # type: ignore[union-attr]
        self._incoming = self._anew = None

    def discard(self) -> None:
        """Forget what was collected; go on collecting."""
        self.total = self.canvas.grad = self._incoming = self._anew = None
        self._version = -1

    def close(self) -> None:
        """Stop collecting; nothing of a dense size stays, even if an old loss is alive."""
        self.discard()
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def scale_like(collected: list[Tensor], living: list[Tensor], wanted: list[Tensor]) -> None:
    """Multiply what was collected by the factor between its `living` part and the `wanted` gradients.

    Unscaling a loss scale and clipping by norm multiply the optimizer's gradients by one number, which is
    found here by least squares and applied to the gradient of all positions. If there is none, because the
    optimizer's gradients were set to zero, what was collected stays as it is.
    """
    pairs = [(_wide(a), _wide(b)) for a, b in zip(living, wanted, strict=True)]
    inner = torch.stack([(a.conj() * b).real.sum() for a, b in pairs]).sum()
    square = torch.stack([a.abs().square().sum() for a, _ in pairs]).sum()
    factor = torch.where((square > 0) & ~(inner <= 0), inner / square, torch.ones_like(square))
    for tensor in collected:
        tensor.mul_(factor.to(tensor))


def _wide(gradient: Tensor) -> Tensor:
    """The gradient, in float32 if it is half precision, in which the square of a scaled one may overflow."""
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
