"""How step, exploration and superposing grow with the number of weights and with the sparsity.

The network is a stack of linear layers: at batch 128 it has more weights for its arithmetic than any
convolution, so what is done once per weight shows most. On a GPU the steps are captured but not compiled, so
that two dozen networks are ready in a minute.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import numpy as np
from torch import nn

from suptickets.bench.contenders import BATCH, Run, noise, tidy
from suptickets.bench.superpose import collection
from suptickets.bench.turns import Options, Row, ratio, take_turns
from suptickets.errors import SparsityError

SIZES = (1, 3, 10, 30, 100, 300, 500)  # million weights
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.99)
LARGEST = {"cpu": 10, "cuda": 500}
MIDDLE = 30  # million weights of the networks that vary in sparsity, at most
LAYERS, REPLAYS = 8, 50
TIMES = ("dense_milliseconds", "milliseconds", "exploration_milliseconds", "superposing_milliseconds")


def stack(classes: int, size: int) -> nn.Module:
    """Linear layers as wide as the image has pixels: its size decides the number of weights."""
    width = size * size
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, classes))


def pixels(millions: float) -> int:
    """Pixels a side of the image that makes a stack of about so many weights."""
    return round(math.sqrt(math.sqrt(millions * 1e6 / LAYERS)))


def run(options: Options) -> list[Row]:
    """A row for each size, one for each sparsity, and how the times grow with them."""
    largest = LARGEST[options.device.type] if options.largest is None else options.largest
    sizes = [size for size in SIZES if size <= largest]
    if not sizes:
        raise SparsityError(f"--largest must be at least {SIZES[0]} (million weights), not {largest:g}")
    by_size = [measure("size", size, options) for size in sizes]
    middle = max(size for size in sizes if size <= MIDDLE)
    by_sparsity = [measure("sparsity", middle, replace(options, sparsity=s)) for s in SPARSITIES]
    return [*by_size, *by_sparsity, *growth(by_size, by_sparsity)]


def measure(varied: str, millions: float, options: Options) -> Row:
    """One network: a dense step, and a step, an exploration and a collection of ours."""
    tidy(options)
    options.say(f"{millions:g} million weights, {options.sparsity:.0%} sparse")
    side = pixels(millions)
    data = noise(BATCH * (REPLAYS if options.cuda else 2), options, (1, side, side))
    model = f"{stack.__module__}:{stack.__name__}"
    dense = Run(model, "dense", data, options, fast=options.cuda, compile=False, booster="none")
    ours = Run(model, "rigl", data, options, fast=options.cuda, compile=False)
    contenders = {
        "dense": dense.contender(REPLAYS),
        "ours": ours.contender(REPLAYS),
        "exploration": ours.exploration(),
        "superposing": collection(ours),
    }
    times = take_turns(contenders, options)
    return {
        "variant": varied,
        "million_weights": ours.network.parameters_total / 1e6,
        "sparsity": options.sparsity,
        **dict(zip(TIMES, map(median, times.values()), strict=True)),
        "ratio_to_dense": ratio(times["ours"], times["dense"]),
    }


def growth(by_size: list[Row], by_sparsity: list[Row]) -> list[Row]:
    """Milliseconds per million weights, and per million living ones at one size: slopes of fitted lines."""
    fits = {
        "fit: per million weights": (by_size, [row["million_weights"] for row in by_size]),
        "fit: per million living weights": (
            by_sparsity,
            [row["million_weights"] * (1 - row["sparsity"]) for row in by_sparsity],
        ),
    }
    return [_fitted(name, rows, amounts) for name, (rows, amounts) in fits.items() if len(rows) > 1]


def _fitted(name: str, rows: list[Row], amounts: list[float]) -> Row:
    slopes = {key: float(np.polyfit(amounts, [row[key] for row in rows], 1)[0]) for key in TIMES}
    return {**dict.fromkeys(rows[0]), "variant": name, **slopes}
