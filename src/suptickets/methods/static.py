"""Static sparse training: random connections that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from suptickets.methods.base import Method


@dataclass
class Static(Method):
    """Connections are drawn once, by the distribution, and stay."""

    name: ClassVar[str] = "static"
    summary: ClassVar[str] = "random connections that stay (with ERK: the paper's ERK)"
