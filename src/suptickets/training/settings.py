"""The settings of a run: one dataclass makes the flags, the help, `config.json` and the files that are read.

A value comes from, in this order: a flag, the file given with `--config`, what the booster asks for, the
recipe. Recipes are files in `suptickets/recipes` that name every hyper-parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import shlex
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from suptickets.data import DATA
from suptickets.distribution import DISTRIBUTIONS
from suptickets.errors import SparsityError, choice, fraction, reason
from suptickets.methods import METHODS
from suptickets.schedules import CYCLES
from suptickets.superpose import RULES
from suptickets.training import boosters
from suptickets.training.boosters import BOOSTERS, CYCLIC, PREDICTION_ENSEMBLES
from suptickets.training.files import once, read_mapping

_CHOICES: dict[str, tuple[str, ...]] = {
    "data": tuple(DATA),
    "method": tuple(METHODS),
    "distribution": tuple(DISTRIBUTIONS),
    "booster": tuple(BOOSTERS),
    "rule": tuple(RULES),
    "prune": ("global", "layer"),
    "prune_when": ("each", "end"),
    "batch_norm": ("average", "recompute"),
    "explore_at": ("start", "end"),
    "schedule": tuple(CYCLES),
    "decay": ("constant", "cosine"),
    "milestones_of": ("normal", "training"),
    "precision": ("auto", "fp32", "bf16", "fp64"),
    "log": ("none", "tensorboard", "wandb"),
}
# Where things are and how they are kept, not what is computed: these are no part of a run's identity.
UNSAID = ("workers", "checkpoint_every", "log")
_PLACE = ("data_dir", *UNSAID)
_BASE = ("epochs", "cycles", "lr")  # what a booster derives its own settings from
_COUNTS = ("epochs", "batch_size", "interval", "cycles", "members")
_LENGTHS = ("warmup_epochs", "prune_epochs", "cycle_epochs", "evaluate_every", "workers")
_AT_LEAST = {
    **dict.fromkeys(_COUNTS, 1),
    **dict.fromkeys((*_LENGTHS, "lr", "lr_low", "lr_high", "momentum", "weight_decay"), 0),
    **dict.fromkeys(("seed", "checkpoint_every"), 0),
}
_AT_MOST = dict.fromkeys((*_COUNTS, *_LENGTHS), 10**9)
_FRACTIONS = ("initial_sparsity", "rate", "explore_rate", "beta", "label_smoothing")


def option(text: str, default: Any = dataclasses.MISSING) -> Any:
    """A setting with its help text; without a default the recipe must give it."""
    return field(default=default, metadata={"help": text}, kw_only=True)


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run computes."""

    data: str = option("data set: see `suptickets list data`")
    data_dir: str | None = option("folder with the data set's published files", None)
    holdout: float = option(
        "share of the training data to evaluate on instead of the test data: to choose settings by", 0.0
    )
    model: str = option("model, see `suptickets list models`, or package.module:function")
    method: str = option("sparse training method: see `suptickets list methods`", "rigl")
    sparsity: float = option("fraction of the weights that are zero", 0.9)
    distribution: str = option("how connections are spread over the layers: erk, er, uniform", "erk")
    booster: str = option(
        "what the last part of the training is used for: see `suptickets list boosters`", "sup-tickets"
    )
    recipe: str = option("hyper-parameters: see `suptickets list recipes`", "digits")
    epochs: int = option("passes over the training data")
    batch_size: int = option("samples per step, over all processes")
    lr: float = option("learning rate at the start")
    momentum: float = option("momentum of SGD")
    weight_decay: float = option("weight decay")
    label_smoothing: float = option("label smoothing")
    warmup_epochs: float = option("epochs of linear warm-up of the learning rate")
    milestones: tuple[float, ...] = option("fractions after which the rate is divided by 10")
    milestones_of: str = option("what they are fractions of: normal (the epochs before the cycles), training")
    interval: int = option("steps between two changes of connections")
    rate: float = option("share of the connections that a change prunes and grows")
    decay: str = option("how that share changes: constant, cosine")
    initial_sparsity: float = option("sparsity at which GraNet starts")
    prune_epochs: float = option("epochs after which GraNet and GMP reach their sparsity")
    cycles: int = option("number of cycles, so of tickets")
    cycle_epochs: float = option("epochs of a cycle")
    lr_low: float = option("lowest learning rate of a cycle")
    lr_high: float = option("highest learning rate of a cycle")
    schedule: str = option("shape of a cycle: triangle, swa, fge, steps")
    explore_rate: float = option("share of the connections that the exploration of a cycle prunes and grows")
    explore_at: str = option("when a cycle explores: start, end")
    include_start: bool = option("take the network before the cycles as a ticket too")
    rule: str = option("how tickets are averaged: cia, caa, cima")
    beta: float = option("weight of the old average in cima")
    prune: str = option("how the average is pruned: global, layer")
    prune_when: str = option("when the average is pruned: each, end")
    batch_norm: str = option("batch-norm statistics of the average: average, recompute")
    criteria: tuple[str, ...] = option(
        "prune:grow to explore by, one for all cycles or one for each (else the method's own)", ()
    )
    keep_tickets: bool = option("save the single tickets of the cycles too", False)
    members: int = option("members of batch-ensemble (4), heads of tree-net (3)", 1)
    teachers: tuple[str, ...] = option(
        "runs with kept tickets, or ticket files, that teach the student (else a first run makes them)", ()
    )
    seed: int = option("seed of everything random", 1)
    device: str = option("cpu, cuda or auto", "auto")
    precision: str = option("fp32, bf16, fp64, or auto: bf16 on a GPU, fp32 elsewhere", "auto")
    compile: bool | None = option("compile and capture the step: on a GPU that is the default in bf16", None)
    evaluate_every: int = option("epochs between two evaluations on the test data (0: only at the end)", 0)
    workers: int = option("worker processes that decode images", 2)
    checkpoint_every: float = option("seconds between two checkpoints (0: one after every step)", 60.0)
    log: str = option("log to: none (but metrics.jsonl), tensorboard, wandb", "none")

    def __post_init__(self) -> None:
        """Refuse impossible settings before anything is built."""
        for name, known in _CHOICES.items():
            choice(name.replace("_", "-"), getattr(self, name), known)
        fraction("sparsity", self.sparsity)
        fraction("--holdout", self.holdout)
        for name in _FRACTIONS:
            fraction(flag(name), getattr(self, name), one=True)
        for milestone in self.milestones:
            fraction("--milestones", milestone, one=True)
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if not least <= value < float("inf"):
                bound = "finite" if value == float("inf") else f"at least {least}"
                raise SparsityError(f"{flag(name)} must be {bound}, not {value}")
            if value > (most := _AT_MOST.get(name, value)):
                raise SparsityError(f"{flag(name)} must be at most {most:,}")
        if self.momentum >= 1:
            raise SparsityError(f"--momentum must be below 1, not {self.momentum:g}")
        if self.seed >= 2**63:
            raise SparsityError(f"--seed must be below 2**63, not {self.seed}")
        boosters.check(self)

    @property
    def cyclic(self) -> bool:
        """Whether the last part of the training is cycles."""
        return self.booster in CYCLIC

    @property
    def keeps(self) -> bool:
        """Whether single tickets are kept."""
        return self.cyclic and (self.keep_tickets or self.booster in PREDICTION_ENSEMBLES)

    @property
    def target(self) -> float:
        """The sparsity that the final network is to have; 0 for a dense one, unless SWA prunes it."""
        return 0.0 if self.method == "dense" and self.booster != "swa" else self.sparsity

    def command(self, program: str = "suptickets") -> str:
        """A command line for these settings: the recipe, and what differs from it and has an effect."""
        given = {key: value for key, value in self.as_dict().items() if value is not None}
        named = {"recipe": self.recipe, "booster": self.booster}
        default = {f.name: f.default for f in dataclasses.fields(self)}
        default |= _values({**named, **{key: given[key] for key in _BASE}})
        default |= {key: _values(named)[key] for key in _BASE}
        default |= {"booster": "sup-tickets", "recipe": None}
        default |= {"recipe": "digits"} if _recipe_for(self.data) == "digits" else {}
        unsaid = {*UNSAID, *boosters.idle(self)}
        shown = [key for key in given if key not in unsaid and not _alike(given[key], default[key])]
        words = [word for key in shown for word in _words(key, given[key])]
        return f"{program} {shlex.join(['train', *words])}"

    def as_dict(self) -> dict[str, Any]:
        """All settings as plain values, for `config.json`."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}

    def identity(self) -> str:
        """A short hash; runs with the same settings find the same folder by it."""
        return hashlib.sha256(json.dumps(self.mattering(), sort_keys=True).encode()).hexdigest()[:10]

    def differences(self, other: Settings) -> list[str]:
        """`name: other -> self` for each setting that differs and matters."""
        ours, theirs = self.mattering(), other.mattering()
        names = {**ours, **theirs}
        return [f"{n}: {theirs.get(n)} -> {ours.get(n)}" for n in names if ours.get(n) != theirs.get(n)]

    def mattering(self) -> dict[str, Any]:
        """The settings that decide what is computed, with the place of the data only if it is their name."""
        kept = {key: value for key, value in self.as_dict().items() if key not in _PLACE}
        placed = self.data == "folder" and self.data_dir is not None
        return kept | ({"data_dir": os.path.realpath(str(self.data_dir))} if placed else {})


def place(folder: str) -> str:
    """The absolute path of a folder; `..` is kept, since it may follow a link."""
    return str(Path(folder).expanduser().absolute())


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def _words(name: str, value: Any) -> list[str]:
    """A setting on the command line."""
    if isinstance(value, bool):
        return [flag(name) if value else f"--no-{name.replace('_', '-')}"]
    return [flag(name), *map(str, value if isinstance(value, list) else [value])]


def _alike(value: Any, default: Any) -> bool:
    return bool(value == (list(default) if isinstance(default, tuple) else default))


def recipes() -> dict[str, dict[str, Any]]:
    """All recipes: name -> summary and settings."""
    folder = files("suptickets") / "recipes"
    return {
        path.name.removesuffix(".json"): json.loads(path.read_text())
        for path in sorted(folder.iterdir(), key=lambda p: p.name)
        if path.name.endswith(".json")
    }


def resolve(flags: Mapping[str, Any], config: str | Path | None = None) -> Settings:
    """Settings from flags, over a file, over what the booster asks for, over a recipe.

    A flag that has no effect with the booster or the method is refused. A file may hold more than is used: a
    run's `config.json` holds everything.
    """
    settings = build(_values({**(read_config(config) if config else {}), **flags}))
    if settings.data_dir is not None:
        settings = dataclasses.replace(settings, data_dir=place(settings.data_dir))
    settings = dataclasses.replace(settings, teachers=tuple(map(place, settings.teachers)))
    for name, why in boosters.idle(settings).items():
        if name in flags:
            given, *_ = _words(name, getattr(settings, name))
            raise SparsityError(f"{given} does nothing, for {why}")
    return settings


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are given, over what the booster asks for, over a recipe."""
    for key in ("recipe", "data", "booster"):
        _typed(key, given.get(key), str | None)
    known = recipes()
    name = given.get("recipe") or _recipe_for(given.get("data", "digits"))
    choice("recipe", name, known)
    recipe = {key: value for key, value in known[name].items() if key != "summary"}
    return {**recipe, **_asked_by_booster({**recipe, **given}, given), **given, "recipe": name}


def _asked_by_booster(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in which a booster differs from the recipe."""
    hints = get_type_hints(Settings)
    epochs, cycles, lr = (_typed(name, values[name], hints[name]) for name in _BASE)
    return boosters.asked(given.get("booster"), epochs, cycles, lr, longer="epochs" not in given)


def _recipe_for(data: str) -> str:
    """The recipe that suits a data set when none is named."""
    suited = {"cifar10": "paper-cifar", "cifar100": "paper-cifar"}
    suited |= {"imagenet": "paper-imagenet", "folder": "paper-imagenet"}
    return suited.get(data, "digits")


def read_config(path: str | Path) -> dict[str, Any]:
    """Settings from a YAML or JSON file, such as a run's `config.json`."""
    return once(path, [(str(key).replace("-", "_"), value) for key, value in read_mapping(path).items()])


def build(values: Mapping[str, Any]) -> Settings:
    """Settings from names and values, each checked against its type."""
    hints = get_type_hints(Settings)
    for name in values:
        if name not in hints:
            nearest = difflib.get_close_matches(name, hints, n=1)
            hint = f": did you mean {nearest[0]!r}?" if nearest else ""
            raise SparsityError(f"there is no setting {name!r}{hint}")
    return Settings(**{name: _typed(name, value, hints[name]) for name, value in values.items()})


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type that the setting has."""
    if get_origin(hint) is types.UnionType:
        return None if value is None else _typed(name, value, get_args(hint)[0])
    if get_origin(hint) is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_typed(name, one, get_args(hint)[0]) for one in values)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
        raise SparsityError(f"{name} is too large a number")
    if hint is int and isinstance(value, int) and abs(value) >= 2**100:
        raise SparsityError(f"{name} is too large a number")
    if hint is float and isinstance(value, str):  # YAML takes 1e-3 for text
        with contextlib.suppress(ValueError):
            return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise SparsityError(f"{name} must be of type {hint.__name__}, not {value!r}")
    return value


def settings_from(values: Mapping[str, Any], source: Path) -> Settings:
    """The settings of a run that were read from a file."""
    missing = [
        f.name
        for f in dataclasses.fields(Settings)
        if f.default is dataclasses.MISSING and f.name not in values
    ]
    try:
        if missing:
            raise SparsityError(f"{len(missing)} of them are missing, such as {missing[0]}")
        return build(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise SparsityError(f"{source} holds no settings of a run: {reason(error)}") from error
