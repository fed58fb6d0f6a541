"""Which weights of a model become sparse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from math import prod

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from suptickets.errors import SparsityError, unknown

Patterns = str | Iterable[str] | None

#: The kinds of layer whose weight becomes sparse without being named.
ELIGIBLE = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
CASTING = (nn.Linear, nn.RNNBase, nn.MultiheadAttention, nn.modules.conv._ConvNd)


def casts(module: nn.Module) -> bool:
    """Whether autocast casts the weights of a module: only where torch's own forward pass uses them."""
    code = module.forward, getattr(module, "_conv_forward", module.forward)
    places = [str(getattr(one, "__module__", "")) for one in code]
    return isinstance(module, CASTING) and all(place.startswith("torch.nn.") for place in places)


@dataclass
class Candidate:
    """A parameter of two or more dimensions, with every module that owns it."""

    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[tuple[str, str]] = field(default_factory=list)  # (module, attribute) for each owner

    @property
    def name(self) -> str:
        """The name of the layer: that of its module, followed by the attribute unless that is `weight`."""
        module, attribute = self.names[0]
        return module if module and attribute == "weight" else f"{module}.{attribute}".lstrip(".")

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, while it is dense."""
        module, attribute = self.owners[0]
        return module.get_parameter(attribute)

    @property
    def eligible(self) -> bool:
        """Whether it becomes sparse without being named: a trained convolution or linear layer."""
        named = any(isinstance(m, ELIGIBLE) and a == "weight" for m, a in self.owners)
        return named and self.parameter.requires_grad

    def matches(self, pattern: str, *, below: bool) -> bool:
        """Whether `pattern` names the weight or its module, or (`below`) a module around it."""
        return any(fnmatchcase(name, pattern) for name in self._known_as(below))

    def _known_as(self, below: bool) -> Iterator[str]:
        for module, attribute in self.names:
            yield f"{module}.{attribute}".lstrip(".")
            yield module
            parts = module.split(".")
            if below:
                yield from (".".join(parts[:n]) for n in range(1, len(parts)))


@dataclass(frozen=True)
class LayerSparsity:
    """The non-zero weights of one layer; all of them, in a network that stores nothing sparse."""

    shape: tuple[int, ...]
    nonzero: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    def sparsity(self) -> float:
        """Share of the weights that are zero."""
        return 1 - self.nonzero / self.size if self.size else 0.0


def choose(model: nn.Module, include: Patterns = None, exclude: Patterns = None) -> list[Candidate]:
    """The weights to make sparse: by default those of all trained convolutions and linear layers.

    `include` and `exclude` hold names of weights or modules, or patterns such as `encoder.*`. A name in
    `include` takes any weight of two or more dimensions (attention's packed projections, embeddings,
    LSTM weights); the name of a module around others takes the convolutions and linear layers in it.
    """
    candidates = _candidates(model)
    excluded = _patterns("exclude", exclude, candidates)
    if include is None:
        _refuse_hidden(model, ["*"], excluded)
        chosen = [c for c in candidates if c.eligible]
    else:
        included = _patterns("include", include, candidates)
        _refuse_hidden(model, included, excluded)
        chosen = [c for c in candidates if any(c.matches(p, below=c.eligible) for p in included)]
    chosen = [c for c in chosen if not any(c.matches(p, below=True) for p in excluded)]
    for candidate in chosen:
        _refuse_unfit(candidate)
    if not chosen:
        raise SparsityError("no layer to make sparse: name weights of two or more dimensions with include")
    return chosen


def _refuse_unfit(candidate: Candidate) -> None:
    """Refuse weights of modules that use them in ways that a sparse one does not take."""
    modules = [module for module, _ in candidate.owners]
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise SparsityError(f"{candidate.name} is compiled by torch.jit: sparsify the module itself")
    if any(getattr(module, "sparse", False) is True for module in modules):
        raise SparsityError(f"{candidate.name} has sparse gradients: build the embedding with sparse=False")
    if any(getattr(module, "max_norm", None) is not None for module in modules):
        raise SparsityError(
            f"{candidate.name} writes into its weight in each pass: build the embedding without max_norm"
        )


def _refuse_hidden(model: nn.Module, included: Iterable[str], excluded: Iterable[str]) -> None:
    """Refuse layers whose weight is computed from other parameters: they would be left out silently."""

    def named(module: str, patterns: Iterable[str]) -> bool:
        """Whether a pattern names the module, or one around it."""
        around = accumulate(module.split("."), "{}.{}".format)
        return any(fnmatchcase(name, pattern) for name in around for pattern in patterns)

    for name, module in model.named_modules():
        hidden = isinstance(module, ELIGIBLE) and module._parameters.get("weight") is None
        if hidden and named(name, included) and not named(name, excluded):
            raise SparsityError(
                f"the weight of {name} is no plain parameter (weight_norm, spectral_norm): remove that, or "
                "exclude the layer"
            )


def _candidates(model: nn.Module) -> list[Candidate]:
    found: dict[int, Candidate] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if isinstance(parameter, UninitializedParameter):
                raise SparsityError(f"{prefix} has no shape yet: run one batch through the model first")
            if parameter is None or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            if parameter.dim() >= 2 and parameter.numel() > 0:
                candidate = found.setdefault(id(parameter), Candidate())
                candidate.owners.append((module, attribute))
                candidate.names.append((prefix, attribute))
    return list(found.values())


def _patterns(option: str, patterns: Patterns, candidates: list[Candidate]) -> list[str]:
    patterns = [] if patterns is None else [patterns] if isinstance(patterns, str) else patterns
    listed = list(patterns) if isinstance(patterns, Iterable) else [patterns]
    if not all(isinstance(pattern, str) for pattern in listed):
        raise SparsityError(f"{option} must be a name or a list of names, not {patterns!r}")
    for pattern in listed:
        if not any(c.matches(pattern, below=True) for c in candidates):
            raise unknown(f"{option} name (it matches no weight)", pattern, [c.name for c in candidates])
    return listed
