"""SET (Mocanu et al., 2018): prune by magnitude, grow at random."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from suptickets.errors import choice
from suptickets.methods.base import Dynamic


@dataclass
class SET(Dynamic):
    """The weakest connections go, random ones come.

    Args:
        pruning: `magnitude`, or `signed`: the smallest positive and the largest negative values go, as in
            SET's own paper.
    """

    name: ClassVar[str] = "set"
    summary: ClassVar[str] = "prune by magnitude, grow at random"
    grow: ClassVar[str] = "random"

    _: KW_ONLY
    pruning: str = "magnitude"

    def __post_init__(self) -> None:
        """Refuse impossible settings."""
        super().__post_init__()
        self.prune = choice("pruning", self.pruning, ("magnitude", "signed"))  # type: ignore[misc]
