"""Steps of an optimizer: seen by its hooks, or driven by a loop that tells when they begin and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

Action = Callable[[], None]


class Steps:
    """Calls `begin` before and `end` after each step; `broken` if the step's closure raises.

    `begin` is told whether gradients are complete: a closure adds to them inside the step. `end` is told
    whether the step was skipped: by GradScaler, for gradients that are not finite.
    """

    def __init__(self, begin: Callable[[bool], None], end: Callable[[bool], None], broken: Action) -> None:
        """Nothing is followed yet."""
        self.optimizer: Optimizer | None = None
        self._actions = begin, end, broken
        self._open = self._explicit = self._stepped = self._hooked = False
        self._handles: list[Any] = []

    def follow(self, optimizer: Optimizer, *, hooks: bool) -> None:
        """Without `hooks`, only `before` and `after` tell of steps."""
        self.leave()
        self.optimizer, self._hooked = optimizer, hooks
        if hooks:
            self._handles = [
                optimizer.register_step_pre_hook(self._pre_hook),
                optimizer.register_step_post_hook(lambda *_: self._hook(self._end)),
            ]

    def leave(self) -> None:
        """Follow nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before(self) -> None:
        """A step that is driven explicitly begins."""
        self._explicit, self._stepped = True, not self._hooked
        self._begin()

    def after(self) -> None:
        """It is over."""
        try:
            self._end()
        finally:
            self._explicit = False

    def _pre_hook(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closures = any(map(_is_closure, [*args, *kwargs.values()]))
        self._hook(lambda: self._begin(complete=not closures))
        return tuple(map(self._guarded, args)), {name: self._guarded(one) for name, one in kwargs.items()}

    def _guarded(self, argument: Any) -> Any:
        """A closure that tells when it raises; what is none as it is."""
        if not _is_closure(argument):
            return argument

        def closure() -> Any:
            try:
                return argument()
            except BaseException:
                self._open = False
                self._actions[2]()
                raise

        return closure

    def _hook(self, action: Action) -> None:
        """Inside a step that is driven explicitly, the hooks only show that the optimizer's step happened."""
        self._stepped = not self._inert()
        if not self._explicit:
            action()

    def _begin(self, complete: bool = True) -> None:
        self._open = True
        self._actions[0](complete)

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._actions[1](not self._stepped if self._explicit else self._inert())

    def _inert(self) -> bool:
        """Whether GradScaler makes the fused step that it is just calling do nothing."""
        found = getattr(self.optimizer, "found_inf", None)
        return found is not None and bool(found)


def _is_closure(argument: Any) -> bool:
    return callable(argument) and not isinstance(argument, Optimizer)
