"""DSR, dynamic sparse reparameterisation (Mostafa and Wang, ICML 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from suptickets.distribution import apportion
from suptickets.errors import SparsityError, fraction
from suptickets.methods.base import Dynamic
from suptickets.network import SparseNetwork


@dataclass
class DSR(Dynamic):
    """One adaptive threshold prunes all layers; each gets connections back in proportion to its survivors.

    Args:
        rate: the share of all living connections that an update should prune; the threshold is doubled or
            halved when it pruned less or more than that, beyond the tolerance.
        threshold: the first threshold.
        tolerance: how far from the share is near enough.
    """

    name: ClassVar[str] = "dsr"
    summary: ClassVar[str] = "one adaptive threshold, counts by survivors, random growth"
    grow: ClassVar[str] = "random"

    _: KW_ONLY
    rate: float = 0.1
    threshold: float = 1e-3
    tolerance: float = 0.1
    _threshold: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse impossible settings."""
        super().__post_init__()
        fraction("tolerance", self.tolerance)
        if not isinstance(self.threshold, int | float) or not 0 < self.threshold < float("inf"):
            raise SparsityError(f"threshold must be above 0, not {self.threshold!r}")
        self._threshold = self.threshold

    def update(self, network: SparseNetwork, step: int) -> None:
        """Prune below the threshold, adapt it, and grow as many as were pruned."""
        weights = network.changing
        if not self.due(step) or not weights:  # a threshold says nothing about layers that are frozen
            return
        kept = {
            name: min(max(int((w.values.abs() >= self._threshold).sum()), 1), w.nonzero)
            for name, w in weights.items()
        }
        freed = sum(w.nonzero - kept[name] for name, w in weights.items())
        self._adapt(freed, self.rate_at(step) * network.nonzero)
        grown = apportion(freed, list(kept.values()), [w.size - kept[name] for name, w in weights.items()])
        network.rewire(kept, {name: kept[name] + n for name, n in zip(kept, grown, strict=True)})

    def _adapt(self, pruned: int, wanted: float) -> None:
        if pruned < (1 - self.tolerance) * wanted:
            self._threshold *= 2
        elif pruned > (1 + self.tolerance) * wanted:
            self._threshold /= 2

    def state_dict(self, network: SparseNetwork) -> dict[str, Any]:
        """The threshold in force."""
        return {"threshold": self._threshold}

    def load_state_dict(self, network: SparseNetwork, state: Mapping[str, Any]) -> None:
        """Take the threshold from a state."""
        if not isinstance(state.get("threshold"), int | float):
            raise SparsityError("the state is damaged: DSR's has no threshold")
        self._threshold = float(state["threshold"])
