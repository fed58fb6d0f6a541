"""A callback for Lightning's Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from suptickets.errors import SparsityError
from suptickets.integrations import Integration

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("Lightning is needed: pip install 'suptickets[lightning]'") from error

_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}


class SparseTraining(Integration, Callback):
    """Trains the LightningModule sparse, with Sup-tickets if `cycles` are given.

    After `trainer.fit`, `ticket()` is a plain copy of the LightningModule. Checkpoints of the trainer hold
    the sparse network and all that is needed to go on. The arguments are those of `Integration`.
    """

    _state: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The model becomes sparse before the checkpoint is loaded and the strategy sets up the optimizer."""
        if stage == "fit":
            _refuse(trainer)
            self._state = None
            self.make_sparse(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimizer is there; its own state is loaded after this."""
        if len(trainer.optimizers) != 1:
            raise SparsityError(f"one optimizer is needed, and there are {len(trainer.optimizers)}")
        self.follow(trainer.optimizers[0], *self._steps(trainer, pl_module))
        if self._state is not None:
            self.go_on(self._state)

    def _steps(self, trainer: Trainer, module: LightningModule) -> tuple[float, int | None]:
        """Of the training and of an epoch, as far as they can be known."""
        uncounted = None if module.automatic_optimization else "manual optimization"
        if "GradientAccumulationScheduler" in _callbacks(trainer):
            uncounted = "GradientAccumulationScheduler"
        if uncounted is not None:
            if self.planned and self.total_steps is None:
                raise SparsityError(
                    f"{uncounted}: give total_steps and cycle_steps, in steps of the optimizer"
                )
            return math.inf, None
        total = trainer.estimated_stepping_batches
        batches = trainer.num_training_batches / trainer.accumulate_grad_batches
        return total if total > 0 else math.inf, None if math.isinf(batches) else math.ceil(batches)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is loaded."""
        if trainer.global_step and self._state is None:
            raise SparsityError("the checkpoint was made without this callback: begin anew")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log `sparsity` and, in a cycle, `cycle_lr`."""
        pl_module.log_dict(self.metrics())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say if it ended early or late."""
        self.ended()

    def ticket(self, loader: Iterable[Any] | None = None) -> nn.Module:
        """See `Integration`; of a compiled module too, and itself not compiled."""
        plain = super().ticket(loader)
        vars(plain)["_compiler_ctx"] = None
        return plain

    def state_dict(self) -> dict[str, Any]:
        """What the trainer saves with its checkpoints."""
        return self.saved()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What it has loaded: used when the optimizer is there."""
        self._state = state_dict


def _refuse(trainer: Trainer) -> None:
    strategy = trainer.strategy
    if not _STRATEGIES & {cls.__name__ for cls in type(strategy).__mro__}:
        raise SparsityError(f"{type(strategy).__name__} is not supported: use one device, or strategy='ddp'")
    if getattr(strategy, "_start_method", "popen") != "popen":
        raise SparsityError("tickets would be lost with their process: use strategy='ddp', no spawn or fork")
    if "StochasticWeightAveraging" in _callbacks(trainer):
        raise SparsityError(
            "StochasticWeightAveraging would average values of different connections: omit it"
        )


def _callbacks(trainer: Trainer) -> set[str]:
    """The names of their classes and of these classes' bases."""
    return {cls.__name__ for callback in getattr(trainer, "callbacks", ()) for cls in type(callback).__mro__}
