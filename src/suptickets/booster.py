"""What a network expects of its booster."""

from __future__ import annotations

from typing import Protocol


class Booster(Protocol):
    """What takes over the last part of a training run (`SupTickets`)."""

    def needs_gradient(self, step: int) -> bool:
        """Whether step number `step` needs the gradient of all positions."""

    def before_step(self) -> None:
        """Called before every step of the optimizer."""

    def put_back(self) -> None:
        """Called when a step was skipped, or is finished with everything that it triggered."""

    def holds(self, step: int) -> bool:
        """Whether the method is to keep still after step number `step`."""

    def after_step(self) -> None:
        """Called after every step that was done, and after what the method did then."""
