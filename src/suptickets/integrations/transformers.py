"""A callback for Hugging Face's Trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from suptickets.errors import SparsityError, reason
from suptickets.integrations import Integration

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise ImportError("transformers is needed: pip install 'suptickets[transformers]'") from error

FILE = "suptickets.pt"


class SparseTraining(Integration, TrainerCallback):
    """Trains the Trainer's model sparse, with Sup-tickets if `cycles` are given.

    After `trainer.train()`, `ticket()` is a plain copy of the model: `ticket().save_pretrained(folder)`.
    Checkpoints of the Trainer hold the sparse network and, in `suptickets.pt`, all that is needed to go on.
    The arguments are those of `Integration`.
    """

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model becomes sparse before a checkpoint is loaded and the optimizer is built."""
        _refuse(args)
        self.make_sparse(kwargs["model"], _unwrapped(kwargs.get("optimizer")))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The optimizer is there; if there is a checkpoint, its state and the model's have been loaded."""
        optimizer, loader = _unwrapped(kwargs["optimizer"]), kwargs["train_dataloader"]
        if self.network is None or kwargs["model"] is not self.network.model:
            raise SparsityError("give the callback and the model (no model_init) to Trainer(...) itself")
        if self.network.step:
            late = " (auto_find_batch_size came too late: set the size)" if args.auto_find_batch_size else ""
            raise SparsityError(f"this model has been trained: make a new Trainer, callback and model{late}")
        steps = -(-len(loader) // args.gradient_accumulation_steps) if has_length(loader) else None
        self.follow(optimizer, state.max_steps, steps)
        if state.global_step:
            self._resume(args, state)

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        """The Trainer does not say which checkpoint it has loaded: usually that of the step in its folder."""
        assert self.network is not None
        folders = [Path(args.resume_from_checkpoint or ""), _checkpoint(args, state)]
        name = "if it lies elsewhere, name it in TrainingArguments(resume_from_checkpoint=...) too"
        earlier = "take an earlier checkpoint"
        path = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
        if path is None:
            raise SparsityError(f"the checkpoint has no {FILE} ({earlier}), or is not {folders[-1]}: {name}")
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
            raise SparsityError(f"{path} is damaged ({reason(error)}): {earlier}") from error
        if saved.pop("digest") != _digest(self.network.model):
            raise SparsityError(f"{path} is not of the checkpoint that was loaded: {name}")
        self.go_on(saved)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put a file into the checkpoint."""
        if args.should_save and self.network is not None:
            path = _checkpoint(args, state) / FILE
            torch.save({**self.saved(), "digest": _digest(self.network.model)}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add `sparsity` and, in a cycle, `cycle_lr` to what is printed and to the log history."""
        for logs in (kwargs["logs"], state.log_history[-1]):
            if "loss" in logs:
                logs.update(self.metrics())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn if the training ended early or late."""
        self.ended()

    def ticket(self, loader: Iterable[Any] | None = None) -> nn.Module:
        """See `Integration`; without the autocast of the training."""
        plain = super().ticket(loader)
        vars(plain).pop("_original_forward", None)
        return plain


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"checkpoint-{state.global_step}"


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer itself, if accelerate has wrapped it."""
    return getattr(optimizer, "optimizer", optimizer)


def _digest(model: nn.Module) -> str:
    """A hash of the model's tensors, to tell which model a file belongs to."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            data = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
            digest.update(data.numpy().tobytes())
    return digest.hexdigest()


def _refuse(args: TrainingArguments) -> None:
    if getattr(args, "enable_jit_checkpoint", False):
        raise SparsityError("enable_jit_checkpoint saves without telling callbacks: save every some steps")
    kind = getattr(args.distributed_state, "distributed_type", "unknown")
    if kind != "NO" and not str(kind).removeprefix("DistributedType.").startswith("MULTI_"):
        raise SparsityError(f"{kind} is not supported: use one device, or DistributedDataParallel (torchrun)")
    if args.world_size > 1 and args.ddp_find_unused_parameters is not False:
        raise SparsityError("several processes need TrainingArguments(ddp_find_unused_parameters=False)")
    if args.world_size == 1 and args.n_gpu > 1:
        raise SparsityError(
            "DataParallel is not supported: start one process per GPU (torchrun), or show it one"
        )
