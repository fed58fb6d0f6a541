"""What a method is: which connections live at the start, and what changes after which step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from suptickets.criteria import need_gradient
from suptickets.distribution import DISTRIBUTIONS, counts
from suptickets.errors import SparsityError, choice, fraction, whole
from suptickets.network import SparseNetwork
from suptickets.schedules import cosine


@dataclass
class Method:
    """Connections are drawn at random by the distribution and stay; subclasses change them.

    Args:
        sparsity: the fraction of the connections that are not alive, in total.
        distribution: how the living ones are spread over the layers: `erk`, `er` or `uniform`.
        dense_first: keep all connections of the first layer; the others make up for it.
        dense_last: the same for the last layer.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    sparse: ClassVar[bool] = True  # whether weights are stored sparse at all
    changes: ClassVar[bool] = False  # whether connections change after some steps
    observes: ClassVar[bool] = False  # whether it needs the gradient of all positions at every step
    prune: ClassVar[str] = "magnitude"  # the criteria of an exploration; static methods borrow RigL's
    grow: ClassVar[str] = "gradient"

    sparsity: float
    _: KW_ONLY
    distribution: str = "erk"
    dense_first: bool = False
    dense_last: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible settings."""
        self.sparsity = fraction("sparsity", self.sparsity)
        choice("distribution", self.distribution, DISTRIBUTIONS)
        for name in ("dense_first", "dense_last"):
            if not isinstance(getattr(self, name), bool):
                raise SparsityError(f"{name} must be True or False, not {getattr(self, name)!r}")

    @property
    def initial(self) -> float:
        """The sparsity at the start."""
        return self.sparsity

    @property
    def ready(self) -> int:
        """The number of steps after which the target sparsity is reached."""
        return 0

    def begin(self, network: SparseNetwork) -> None:
        """Choose the first connections; all are alive when this is called."""
        shapes = {name: weight.shape for name, weight in network.weights.items()}
        network.prune(self.assigned(shapes, self.initial), by="random")

    def assigned(self, shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, int]:
        """The living connections that the distribution gives to each layer."""
        names = list(shapes)
        dense = {names.index(name) for name in self.kept_dense(names)}
        living = counts([*shapes.values()], sparsity, self.distribution, dense=dense, names=names)
        return dict(zip(names, living, strict=True))

    def kept_dense(self, names: Sequence[str]) -> list[str]:
        """Which of the sparse layers keep all their connections from the start to the end."""
        return [*names[: self.dense_first], *names[len(names) - self.dense_last :]]

    def needs_gradient(self, step: int) -> bool:
        """Whether step number `step` (the first is 1) needs the gradient of all positions."""
        return False

    def observe(self, network: SparseNetwork) -> None:
        """Called after every step, even while a booster holds the updates off."""

    def update(self, network: SparseNetwork, step: int) -> None:
        """Change connections after step number `step`, if it is time to."""

    def state_dict(self, network: SparseNetwork) -> dict[str, Any]:
        """What the method itself remembers."""
        return {}

    def load_state_dict(self, network: SparseNetwork, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""


@dataclass
class Dynamic(Method):
    """A method that changes connections every `interval` steps.

    Args:
        interval: optimizer steps between two updates.
        rate: the share of the connections that an update prunes and grows.
        decay: `constant`, or `cosine`: the rate falls to 0 at the stop (RigL's own schedule).
        total_steps: steps of the whole training; needed for `cosine` and for a `stop` below 1.
        stop: the fraction of `total_steps` after which connections stay as they are. If the very last
            step is a multiple of the interval, what it grows stays untrained unless this is below 1.
    """

    changes: ClassVar[bool] = True

    _: KW_ONLY
    interval: int = 1000
    rate: float = 0.5
    decay: str = "constant"
    total_steps: int | None = None
    stop: float = 1.0

    def __post_init__(self) -> None:
        """Refuse impossible settings."""
        super().__post_init__()
        fraction("rate", self.rate, one=True)
        fraction("stop", self.stop, one=True)
        choice("decay", self.decay, ("constant", "cosine"))
        if self.total_steps is None and (self.decay == "cosine" or self.stop < 1):
            raise SparsityError(
                "decay='cosine' and a stop below 1 need total_steps, the steps of the training"
            )
        whole("interval", self.interval)
        if self.total_steps is not None:
            whole("total_steps", self.total_steps)

    @property
    def last(self) -> float:
        """The last step after which connections may change; 0.29 * 100 is 29, though less in floats."""
        return float("inf") if self.total_steps is None else math.floor(self.stop * self.total_steps + 1e-9)

    def due(self, step: int) -> bool:
        """Whether connections change after this step."""
        return step % self.interval == 0 and step <= self.last

    def rate_at(self, step: int) -> float:
        """The share that an update after this step prunes and grows."""
        return self.rate if self.decay == "constant" else cosine(step, max(self.last, 1), self.rate)

    def needs_gradient(self, step: int) -> bool:
        """Whether something is chosen by gradient after this step."""
        return need_gradient(self.prune, self.grow) and self.due(step)

    def update(self, network: SparseNetwork, step: int) -> None:
        """Prune a share of each layer and grow as many, if it is time to."""
        if self.due(step):
            network.explore(self.rate_at(step))
