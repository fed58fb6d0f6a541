"""RigL (Evci et al., ICML 2020): prune by magnitude, grow by gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from suptickets.methods.base import Dynamic


@dataclass
class RigL(Dynamic):
    """The weakest connections go, those with the largest gradients come."""

    name: ClassVar[str] = "rigl"
    summary: ClassVar[str] = "prune by magnitude, grow by gradient"
