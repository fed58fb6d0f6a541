"""Steps of an optimizer: seen by its hooks, or driven by a loop that tells when they begin and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

Action = Callable[[], None]


class Steps:
    """Calls `begin` before and `end` after each step, or `broken` instead of `end` if the step fails.

    `complete` is called in between, once the gradients are those that the optimizer steps with: GradScaler
    unscales them just before. With a closure, which adds to them inside the step, it is not called. A step
    fails if its closure raises, or if GradScaler skips it for gradients that are not finite.
    """

    def __init__(self, begin: Action, complete: Action, end: Action, broken: Action) -> None:
        """Nothing is followed yet."""
        self.optimizer: Optimizer | None = None
        self._begun, self._complete, self._ended, self._broken = begin, complete, end, broken
        self._open = self._explicit = self._stepped = False
        self._handles: list[Any] = []

    def follow(self, optimizer: Optimizer, *, hooks: bool) -> None:
        """Follow the steps of an optimizer; without `hooks`, only `before` and `after` report them."""
        self.leave()
        self.optimizer = optimizer
        if hooks:
            self._handles = [
                optimizer.register_step_pre_hook(self._pre_hook),
                optimizer.register_step_post_hook(lambda *_: self._hook(self._end)),
            ]

    def leave(self) -> None:
        """Follow no optimizer any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before(self) -> None:
        """A step that is driven explicitly begins; without hooks, nothing else reports its gradients."""
        self._explicit, self._stepped = True, not self._handles
        self._begin()
        if not self._handles:
            self._complete()

    def after(self) -> None:
        """A step that is driven explicitly is over."""
        try:
            self._end()
        finally:
            self._explicit = False

    def _pre_hook(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._hook(self._begin)
        if not any(map(_is_closure, [*args, *kwargs.values()])):
            self._complete()
        return tuple(map(self._guarded, args)), {name: self._guarded(one) for name, one in kwargs.items()}

    def _guarded(self, argument: Any) -> Any:
        """A closure, wrapped so that it reports if it raises; any other argument as it is."""
        if not _is_closure(argument):
            return argument

        def closure() -> Any:
            try:
                return argument()
            except BaseException:
                self._open = False
                self._broken()
                raise

        return closure

    def _hook(self, action: Action) -> None:
        """Inside a step that is driven explicitly, the hooks only show that the optimizer's step happened."""
        if self._explicit:
            self._stepped = not self._inert()
        else:
            action()

    def _begin(self) -> None:
        self._open = True
        self._begun()

    def _end(self) -> None:
        if self._open:
            self._open = False
            skipped = not self._stepped if self._explicit else self._inert()
            (self._broken if skipped else self._ended)()

    def _inert(self) -> bool:
        """Whether GradScaler makes the fused step that it is just calling do nothing."""
        found = getattr(self.optimizer, "found_inf", None)
        return found is not None and bool(found)


def _is_closure(argument: Any) -> bool:
    return callable(argument) and not isinstance(argument, Optimizer)
