"""Builds the parts of a run from its settings."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from suptickets.baselines import BatchEnsemble, TreeNet, as_one_batch
from suptickets.data import Data, load_data
from suptickets.errors import SparsityError, choice, reason
from suptickets.measure.flops import flops
from suptickets.methods import GMP, METHODS, SNIP, Dense, Dynamic, GraNet, Method, SmallDense
from suptickets.models import MODELS, build_model
from suptickets.network import SparseNetwork
from suptickets.plain import densified
from suptickets.randomness import fork_random, seed_all
from suptickets.schedules import Schedule, step_drops
from suptickets.tickets import epochs_to_steps
from suptickets.training.settings import Settings

MOST_MEMBERS = 1000  # each has its own copy of what members do not share
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # dtypes of the parameters


def precision(settings: Settings, device: torch.device) -> str:
    """The precision of a run, with `auto` resolved."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16" if device.type == "cuda" else "fp32"


def compiles(settings: Settings, device: torch.device) -> bool:
    """Whether to compile the steps: by default, on a GPU in bfloat16."""
    usual = device.type == "cuda" and precision(settings, device) == "bf16"
    return usual if settings.compile is None else settings.compile


def model(settings: Settings, data: Data) -> nn.Module:
    """The dense network, initialised from the seed, with heads or members if the booster asks for them."""
    seed_all(settings.seed)
    if settings.booster == "tree-net":
        return TreeNet([_network(settings, data) for _ in range(settings.members)])
    network = _network(settings, data)
    if settings.booster == "batch-ensemble":
        return BatchEnsemble(network, settings.members, settings.seed)
    return network


def _network(settings: Settings, data: Data) -> nn.Module:
    build = partial(make_model, settings.model, data)
    if settings.method == "small-dense":
        _check_width(settings.model)
        return SmallDense(settings.sparsity).narrow(build)
    return build(1.0)


def data_of(settings: Settings) -> Data:
    """The data that a run is trained and evaluated on; with a holdout, the test data are not used."""
    return load_data(settings.data, settings.data_dir, settings.workers, settings.holdout)


def relative(settings: Settings, data: Data, dense: int) -> float:
    """`dense` FLOPs of a forward pass, as a share of those of the plain dense network of full width."""
    if settings.method != "small-dense" and settings.members == 1:
        return 1.0
    plain = flops(make_model(settings.model, data), torch.zeros(1, *data.shape)).dense
    return dense / plain if plain else 1.0


ARGUMENTS = ("classes", "channels", "size", "width")  # of a user's function that builds a model


def make_model(name: str, data: Data, width: float = 1.0) -> nn.Module:
    """A model for these data, by its name or from `module:function`."""
    channels, size = data.shape[0], data.shape[-1]
    if ":" not in name:
        return build_model(name, data.classes, channels, size, width)
    function, accepted = _imported(name)
    known = dict(zip(ARGUMENTS, (data.classes, channels, size, width), strict=True))
    try:
        built = function(**{key: value for key, value in known.items() if key in accepted})
    except SparsityError:
        raise
    except (Exception, SystemExit) as error:
        raise SparsityError(f"{name} failed: {reason(error)}") from error
    if not isinstance(built, nn.Module):
        raise SparsityError(f"{name} must return a torch.nn.Module, not {type(built).__name__}")
    wanted = torch.empty(0).is_meta  # by callers that only count weights
    if not wanted and any(tensor.is_meta for tensor in (*built.parameters(), *built.buffers())):
        raise SparsityError(f"{name} returned a model without weights: leave out the meta device")
    return built


def _check_width(name: str) -> None:
    if ":" in name and "width" not in _imported(name)[1]:
        raise SparsityError(f"{name} takes no argument `width`, so small-dense cannot narrow it")


def _imported(name: str) -> tuple[Callable[..., Any], Collection[str]]:
    """The function, and the arguments of ours that it takes. Importing its module may fail in any way."""
    module, _, function = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
        taken = inspect.signature(found).parameters
        return found, ARGUMENTS if any(one.kind is one.VAR_KEYWORD for one in taken.values()) else taken
    except (Exception, SystemExit) as error:
        raise SparsityError(f"cannot import the model {name}: {reason(error)}") from error


def check_fit(model: nn.Module, data: Data, dtype: torch.dtype) -> None:
    """Refuse a model that does not accept the images, or does not give a logit for each class."""
    if not any(True for _ in model.parameters()):
        raise SparsityError("the model has no parameters: there is nothing to train")
    strange = [key for key, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if strange:
        raise SparsityError(
            f"the model's state has {', '.join(strange)}, which is no tensor, and could not be saved: let "
            "get_extra_state return a tensor, or leave it out"
        )
    example = torch.zeros(2, *data.shape, dtype=dtype, device=next(model.parameters()).device)
    training = model.training
    try:
        with torch.no_grad(), fork_random():
            logits = model.eval()(example)
    except Exception as error:
        raise SparsityError(f"the model does not take images of {data.name}: {reason(error)}") from error
    finally:
        model.train(training)
    shape = list(logits.shape) if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
    if shape != [2, data.classes]:
        raise SparsityError(
            f"the model gives {shape} for two images of {data.name}, not a logit for each class: "
            f"[2, {data.classes}]"
        )


def check_trains(settings: Settings, model: nn.Module, data: Data, world: int) -> None:
    """Refuse a model whose outputs in training mode are others, such as those of several heads.

    In several processes all parameters must be used: the others would wait for their gradients. A model that
    does not take a few images without content may still take whole batches: its training will tell.
    """
    samples = 2 * settings.members
    with torch.enable_grad(), fork_random():
        try:
            twin, x = densified(model).train(), next(model.parameters()).new_zeros(samples, *data.shape)
            logits = twin(x)
        except Exception:
            return
        try:
            loss(settings, logits, x.new_zeros(samples, dtype=torch.int64)).backward()
        except Exception as error:
            raise SparsityError(
                f"the model cannot be trained ({reason(error)}): in training mode too, it must give logits "
                "alone, that depend on its parameters"
            ) from error
    unused = [name for name, p in twin.named_parameters() if p.requires_grad and p.grad is None]
    if unused and world > 1:
        raise SparsityError(
            f"the model does not use {', '.join(unused)}, which several processes cannot train: take it out "
            "of the model, or train in one process"
        )


def check_model(name: str) -> None:
    """Refuse an unknown model before any data is read."""
    if ":" in name:
        _imported(name)
    else:
        choice("model", name, MODELS)


def check_members(settings: Settings, data: Data, world: int) -> None:
    """Refuse too many members; BatchEnsemble's need two samples each of a process's share of a batch."""
    if settings.members > MOST_MEMBERS:
        raise SparsityError(f"--members must be at most {MOST_MEMBERS:,}, not {settings.members:,}")
    if settings.booster != "batch-ensemble":
        return
    last, which = _last_batch(settings, data)
    most = last // world // 2
    if settings.members > most:
        fewer = f"at most {most} --members, or " if most else ""
        raise SparsityError(
            f"each of {settings.members} members needs two samples of every batch, but {which} has {last}"
            f"{f' for {world} processes' if world > 1 else ''}: use {fewer}another --batch-size"
        )


def _last_batch(settings: Settings, data: Data) -> tuple[int, str]:
    """The size of the smallest batch of an epoch, and what to call it."""
    last = data.train_size % settings.batch_size or settings.batch_size
    return last, "a batch" if last == settings.batch_size else "the last batch of an epoch"


def check_batches(settings: Settings, data: Data, world: int, model: nn.Module) -> None:
    """Refuse batches that leave a process a single sample, if the model's batch norms need more."""
    last, which = _last_batch(settings, data)
    if last >= 2 * world:
        return
    twin, one = densified(model).train(), next(model.parameters()).new_zeros(1, *data.shape)
    try:
        with torch.no_grad(), fork_random():
            twin(one)
    except Exception as error:
        share = "a single sample" if world == 1 else f"{last} for {world} processes"
        raise SparsityError(
            f"{which} has {share}, and the model cannot be trained on one alone ({reason(error)}): use "
            "another --batch-size"
        ) from error


def method(settings: Settings, steps: int, backward: Callable[[nn.Module], None]) -> Method:
    """The sparse training method, for epochs of `steps` steps; SNIP measures sensitivity by `backward`."""
    kind = METHODS[settings.method]
    if kind is Dense and settings.target:
        return _pruned_once(settings, steps)
    if not kind.sparse:
        return SmallDense(settings.sparsity) if kind is SmallDense else Dense()
    options: dict[str, Any] = {"distribution": settings.distribution}
    if issubclass(kind, SNIP):
        options["backward"] = backward
    if issubclass(kind, Dynamic):
        options |= {
            "interval": settings.interval,
            "decay": settings.decay,
            "total_steps": normal(settings, steps),
        }
        options |= {} if kind.name == "dsr" else {"rate": settings.rate}
    if issubclass(kind, GraNet):
        options["prune_end"] = max(round(settings.prune_epochs * steps), 1)
        options |= (
            {"initial_sparsity": min(settings.initial_sparsity, settings.sparsity)} if kind is GraNet else {}
        )
    built = kind(settings.sparsity, **options)
    _check_ready(settings, built, steps)
    return built


class PrunedOnce(GMP):
    """SWA's first baseline: all connections live until the cycles, then only those of largest magnitude."""

    told: Callable[[], None] | None = None  # called just before pruning, while the network is dense

    def _prune(self, network: SparseNetwork, step: int) -> None:
        if self.told is not None:
            self.told()
        super()._prune(network, step)


def _pruned_once(settings: Settings, steps: int) -> Method:
    end = normal(settings, steps)
    return PrunedOnce(settings.sparsity, interval=end, prune_end=end, total_steps=end)


def _check_ready(settings: Settings, built: Method, steps: int) -> None:
    """Refuse a pruning schedule for which the normal phase is too short."""
    there, needed = normal(settings, steps), built.ready
    if needed > there:
        raise SparsityError(
            f"{built.name} reaches its sparsity after {needed / steps:.4g} epochs, but has "
            f"{there / steps:.4g}: use at least "
            f"{settings.epochs + math.ceil((needed - there) / steps)} --epochs, or in train a lower "
            "--prune-epochs (or --interval)"
        )


def first_batch(settings: Settings, data: Data, device: torch.device, network: nn.Module) -> None:
    """The backward pass for SNIP's sensitivity: of one batch, the same in every process."""
    dtype = DTYPES[precision(settings, device)]
    for x, y in islice(
        data.train_batches(settings.batch_size, settings.seed, 0, device=device, dtype=dtype), 1
    ):
        cross_entropy(*as_one_batch(network(x), y)).backward()


def optimizer(settings: Settings, network: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum; weight decay on everything, as in the paper, except the factors of members."""
    decay = settings.weight_decay
    trained = network.groups(decay) if isinstance(network, BatchEnsemble) else network.parameters()
    return torch.optim.SGD(trained, lr=settings.lr, momentum=settings.momentum, weight_decay=decay)


def normal(settings: Settings, steps: int) -> int:
    """The number of steps of the normal phase; without cycles, all of them."""
    if not settings.cyclic:
        return settings.epochs * steps
    length = epochs_to_steps(settings.cycle_epochs, steps)
    left = settings.epochs * steps - settings.cycles * length
    if left < 1:
        few = f"{settings.epochs} epochs of {steps} steps are too few"
        raise SparsityError(
            f"{few} for {settings.cycles} cycles of {length}: use at least "
            f"{settings.cycles * length // steps + 1} epochs, fewer cycles, or --booster none"
        )
    return left


def drop_epochs(settings: Settings, epochs: float) -> list[int]:
    """The epochs after which the rate drops, rounded down; 0.7 * 90 is 63, though it is less in floats."""
    return [int(fraction * epochs + 1e-9) for fraction in settings.milestones]


def learning_rate(settings: Settings, steps: int) -> Schedule:
    """The rate at each step of the normal phase: warm-up, then drops at milestones in whole epochs.

    If a training run is so short that a milestone falls within its first epoch, that drop is left out.
    """
    of_training = settings.milestones_of == "training"
    epochs = settings.epochs if of_training else normal(settings, steps) / steps
    drops = step_drops(settings.lr, [epoch * steps for epoch in drop_epochs(settings, epochs) if epoch])
    warmup = settings.warmup_epochs * steps
    return lambda step: drops(step) * min(step / warmup, 1.0) if warmup else drops(step)


def loss(settings: Settings, logits: Tensor, y: Tensor) -> Tensor:
    """The mean loss over the samples (and members), in float32 at least; 0 if there are no samples."""
    logits, y = as_one_batch(logits, y)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    reduction = "mean" if len(y) else "sum"
    return cross_entropy(logits, y, reduction=reduction, label_smoothing=settings.label_smoothing)
