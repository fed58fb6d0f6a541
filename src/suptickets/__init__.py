"""Sup-tickets and sparse training for PyTorch: weights stored as values, exact counts."""

from importlib.metadata import PackageNotFoundError, version

from suptickets.distribution import erk
from suptickets.errors import SparsityError
from suptickets.measure.flops import flops
from suptickets.methods import (
    DSR,
    GMP,
    SET,
    SNFS,
    SNIP,
    Dense,
    GraNet,
    Method,
    RigL,
    SmallDense,
    Static,
)
from suptickets.network import SparseNetwork
from suptickets.sparsify import sparsify
from suptickets.superpose import superpose
from suptickets.tickets import SupTickets, epochs_to_steps

try:
    __version__ = version("suptickets")
except PackageNotFoundError:  # run from source
    __version__ = "0+source"

__all__ = [
    "DSR",
    "GMP",
    "SET",
    "SNFS",
    "SNIP",
    "Dense",
    "GraNet",
    "Method",
    "RigL",
    "SmallDense",
    "SparseNetwork",
    "SparsityError",
    "Static",
    "SupTickets",
    "epochs_to_steps",
    "erk",
    "flops",
    "sparsify",
    "superpose",
]
