"""The dense network, which sparse ones are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from suptickets.errors import SparsityError
from suptickets.methods.base import Method
from suptickets.network import SparseNetwork


@dataclass
class Dense(Method):
    """The network as it is; nothing is stored sparse."""

    name: ClassVar[str] = "dense"
    summary: ClassVar[str] = "the dense network, for comparison"
    sparse: ClassVar[bool] = False

    sparsity: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a sparsity, which a dense network does not have."""
        super().__post_init__()
        if self.sparsity != 0 and type(self) is Dense:
            raise SparsityError(f"dense has sparsity 0, not {self.sparsity:g}: choose a sparse method")

    def begin(self, network: SparseNetwork) -> None:
        """Nothing to choose."""
