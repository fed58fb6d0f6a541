"""A callback for Lightning's Trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from suptickets.errors import SparsityError
from suptickets.integrations import Integration
from suptickets.layers import ELIGIBLE

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("Lightning is needed: pip install 'suptickets[lightning]'") from error

_BUILD = "build layers in __init__, not in setup() or configure_model()"
_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
_AVERAGES = "would average values of different connections: omit it"
_TUNES = "needs a model that is not sparse: tune with a Trainer without this callback"
_REFUSED = {
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "LearningRateFinder": _TUNES,
    "BatchSizeFinder": _TUNES,
}


class SparseTraining(Integration, Callback):
    """Trains the LightningModule sparse, with Sup-tickets if `cycles` are given.

    After `trainer.fit`, `ticket()` is a plain copy of the LightningModule. Checkpoints of the trainer hold
    the sparse network and all that is needed to go on. The arguments are those of `Integration`.
    """

    _state: dict[str, Any] | None = None
    _built: set[nn.Module]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The model becomes sparse before the checkpoint is loaded and the strategy sets up the optimizer."""
        if stage == "fit":
            _refuse(trainer, pl_module)
            if (
                self.settings.get("batch_norm") == "recompute"
                and type(pl_module).forward is LightningModule.forward
            ):
                raise SparsityError(
                    "batch_norm='recompute' calls the model, which has no forward(): write one"
                )
            self._state = None
            self.make_sparse(pl_module)
            self._built = set(pl_module.modules())

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimizer is there; its own state is loaded after this."""
        self._check_built(trainer, pl_module)
        if _tried(trainer) and self.cycles:
            self.planned = 0
            warnings.warn(
                "fast_dev_run is too short for cycles: they are left out", RuntimeWarning, stacklevel=2
            )
        self.follow(trainer.optimizers[0], *self._steps(trainer, pl_module))
        if self._state is not None:
            self.go_on(self._state)

    def _check_built(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse layers that were built too late to become sparse, and any but one optimizer."""
        new = [name for name, m in module.named_modules() if m not in self._built and isinstance(m, ELIGIBLE)]
        if new:
            raise SparsityError(f"{new[0]} was built after the model became sparse: {_BUILD}")
        optimizers = [one for one in trainer.optimizers if type(one).__name__ != "_MockOptimizer"]
        if len(optimizers) != 1:
            raise SparsityError(f"one optimizer is needed, and there are {len(optimizers)}")

    def _steps(self, trainer: Trainer, module: LightningModule) -> tuple[float, int | None]:
        """The steps of the training and of an epoch, as far as they can be known."""
        uncounted = None if module.automatic_optimization else "manual optimization"
        if "GradientAccumulationScheduler" in _callbacks(trainer):
            uncounted = "GradientAccumulationScheduler"
        if uncounted is not None or _tried(trainer):
            if self.planned and self.total_steps is None:
                raise SparsityError(
                    f"{uncounted}: give total_steps and cycle_steps, in steps of the optimizer"
                )
            return math.inf, None
        total = trainer.estimated_stepping_batches
        if math.isinf(trainer.num_training_batches):  # with max_steps alone the data are not looked at
            trainer.fit_loop.setup_data()
        batches = trainer.num_training_batches / trainer.accumulate_grad_batches
        return total if total > 0 else math.inf, None if math.isinf(batches) else math.ceil(batches)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is loaded: refuse a checkpoint that was made without this callback."""
        if trainer.global_step and self._state is None:
            raise SparsityError("the checkpoint was made without this callback: begin anew")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log `sparsity` and, in a cycle, `cycle_lr`."""
        pl_module.log_dict(self.metrics())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the training ended early or late."""
        self.ended()

    def ticket(self, loader: Iterable[Any] | None = None) -> nn.Module:
        """See `Integration`; the module may be compiled, the ticket is not."""
        plain = super().ticket(loader)
        vars(plain)["_compiler_ctx"] = None
        return plain

    def state_dict(self) -> dict[str, Any]:
        """What the trainer saves with its checkpoints."""
        return self.saved()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what the trainer has loaded, until the optimizer is there."""
        self._state = state_dict


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    strategy = trainer.strategy
    if not _STRATEGIES & {cls.__name__ for cls in type(strategy).__mro__}:
        raise SparsityError(f"{type(strategy).__name__} is not supported: use one device, or strategy='ddp'")
    if getattr(strategy, "_start_method", "popen") != "popen":
        raise SparsityError("tickets would be lost with their process: use strategy='ddp', no spawn or fork")
    for name in sorted(_REFUSED.keys() & _callbacks(trainer)):
        raise SparsityError(f"{name} {_REFUSED[name]}")
    if next(module.parameters(), None) is None:
        raise SparsityError(f"the model has no layers yet: {_BUILD}")


def _callbacks(trainer: Trainer) -> set[str]:
    """The names of the callbacks' classes and of their bases."""
    return {cls.__name__ for callback in getattr(trainer, "callbacks", ()) for cls in type(callback).__mro__}


def _tried(trainer: Trainer) -> bool:
    return bool(getattr(trainer, "fast_dev_run", False))
