"""Gradual magnitude pruning (Zhu and Gupta, 2017)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from suptickets.methods.granet import GraNet
from suptickets.network import SparseNetwork


@dataclass
class GMP(GraNet):
    """Gradual magnitude pruning: GraNet's schedule from a dense start, without growth."""

    name: ClassVar[str] = "gmp"
    summary: ClassVar[str] = "gradual global magnitude pruning from a dense start, no growth"

    _: KW_ONLY
    initial_sparsity: float = 0.0

    def needs_gradient(self, step: int) -> bool:
        """Never, because nothing is grown."""
        return False

    def _explore(self, network: SparseNetwork, step: int) -> None:
        """Does nothing: nothing is grown."""
