"""The methods: which connections live when. One short file each; `METHODS` has them by name."""

from suptickets.methods.base import Dynamic, Method
from suptickets.methods.dense import Dense
from suptickets.methods.dsr import DSR
from suptickets.methods.gmp import GMP
from suptickets.methods.granet import GraNet
from suptickets.methods.rigl import RigL
from suptickets.methods.set import SET
from suptickets.methods.small_dense import SmallDense
from suptickets.methods.snfs import SNFS
from suptickets.methods.snip import SNIP
from suptickets.methods.static import Static

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Dense, SmallDense, Static, SNIP, SET, RigL, GraNet, GMP, SNFS, DSR)
}

__all__ = [
    "DSR",
    "GMP",
    "METHODS",
    "SET",
    "SNFS",
    "SNIP",
    "Dense",
    "Dynamic",
    "GraNet",
    "Method",
    "RigL",
    "SmallDense",
    "Static",
]
