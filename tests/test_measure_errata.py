"""What docs/errata.md says of the paper's printed numbers, checked by arithmetic."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from statistics import pstdev, pvariance
from typing import Any

import pytest
import torch

import suptickets as st
from suptickets.measure.flops import Flops
from suptickets.models import build_model

TABLE = json.loads((Path(__file__).parent / "data/paper_resnet50_layers.json").read_text())
ROWS: list[list[Any]] = TABLE["layers"]
COLUMN = {name: i for i, name in enumerate(TABLE["columns"])}


@pytest.fixture(scope="module")
def resnet50() -> tuple[Flops, dict[str, tuple[int, ...]]]:
    model = build_model("resnet50-imagenet", 1000)
    shapes = {n.removesuffix(".weight"): tuple(p.shape) for n, p in model.named_parameters() if p.dim() > 1}
    return st.flops(model, torch.zeros(1, 3, 224, 224)), shapes


# ---- the layer table ----

MISPRINTS = {  # printed over true
    "conv1": 1 / 2,
    "layer1.0.conv1": 147 / 16,  # that of conv1, a row too low
    "layer4.0.conv3": 1 / 2,
    "layer4.2.conv1": 2,
}


def test_the_layers_and_their_sizes_are_right(resnet50: tuple[Flops, dict[str, tuple[int, ...]]]) -> None:
    assert {row[0]: row[1] for row in ROWS} == {name: prod(shape) for name, shape in resnet50[1].items()}
    assert sum(row[1] for row in ROWS) == TABLE["overall"][1] == 25_502_912
    assert sum(row[1] for row in ROWS[:-1]) == TABLE["backbone"][1]


def test_fifty_of_54_rows_have_the_right_flops(resnet50: tuple[Flops, dict[str, tuple[int, ...]]]) -> None:
    printed = {row[0]: row[2] for row in ROWS}
    wrong = {
        n: printed[n] / layer.dense for n, layer in resnet50[0].layers.items() if printed[n] != layer.dense
    }
    assert len(ROWS) == 54 and wrong == MISPRINTS
    assert printed["layer1.0.conv1"] == resnet50[0].layers["conv1"].dense


def test_the_sums_of_the_flops(resnet50: tuple[Flops, dict[str, tuple[int, ...]]]) -> None:
    """The printed total is the true one and the average pooling; the rows as printed sum to another."""
    assert sum(row[2] for row in ROWS) == 8_322_072_576
    assert TABLE["overall"][2] == resnet50[0].dense + 2 * 2048 * 7 * 7 == 8_178_569_216
    assert TABLE["backbone"][2] == resnet50[0].dense - 2 * 2048 * 1000


@pytest.mark.parametrize(
    ("method", "overall", "backbone"),
    [
        ("granet+sup-tickets", 90.00, 90.64),
        ("granet", 90.00, 90.65),
        ("rigl+sup-tickets", 90.00, 89.76),
        ("rigl", 90.02, 89.79),
    ],
)
def test_the_sparsities_that_the_rows_give(method: str, overall: float, backbone: float) -> None:
    def mean(rows: list[list[Any]]) -> float:
        return sum(row[1] * row[COLUMN[method]] for row in rows) / sum(row[1] for row in rows)

    assert (mean(ROWS), mean(ROWS[:-1])) == pytest.approx((overall, backbone), abs=5e-3)


def test_erk_gives_other_layers_than_the_printed_rigl(
    resnet50: tuple[Flops, dict[str, tuple[int, ...]]],
) -> None:
    names = list(resnet50[1])
    sparsities = dict(zip(names, (1 - d for d in st.erk(list(resnet50[1].values()), 0.9)), strict=True))
    assert sparsities["layer1.0.conv1"] == 0
    assert sparsities["layer1.0.conv3"] == pytest.approx(0.041, abs=5e-4)
    printed = {row[0]: row[COLUMN["rigl"]] for row in ROWS}
    assert (printed["layer1.0.conv1"], printed["layer1.0.conv3"]) == (9.40, 16.41)
    assert (
        resnet50[1]["layer1.0.conv3"] == resnet50[1]["layer1.1.conv3"] and printed["layer1.1.conv3"] == 4.07
    )
    share, size = sparsities["layer1.0.conv3"], prod(resnet50[1]["layer1.0.conv3"])
    assert 100 * (share * (1 - share) / size) ** 0.5 == pytest.approx(0.155, abs=5e-4)  # of a random draw


# ---- accuracies ----

#: (method, with Sup-tickets) at 95, 90, 80 % on CIFAR-10, then on CIFAR-100.
CIFAR = {
    "vgg16": {
        "set": ([92.96, 93.54, 93.56, 70.10, 71.50, 72.38], [93.22, 93.63, 93.80, 71.18, 71.99, 73.02]),
        "rigl": ([92.70, 93.48, 93.60, 70.65, 72.20, 72.63], [93.20, 93.81, 93.85, 71.31, 72.57, 73.61]),
        "granet": ([93.87, 93.83, 93.77, 72.91, 73.48, 73.36], [94.10, 94.13, 94.24, 73.61, 73.87, 73.95]),
    },
    "resnet50": {
        "snip": ([94.01, 94.81, 94.91, 41.25, 68.79, 75.29], [94.33, 95.05, 95.21, 65.56, 76.34, 77.43]),
        "static": ([93.44, 94.41, 94.85, 74.49, 76.36, 77.41], [93.92, 94.80, 95.11, 75.75, 76.82, 77.85]),
        "set": ([94.49, 94.73, 94.74, 76.59, 77.79, 78.45], [94.81, 94.87, 94.90, 76.68, 77.89, 78.35]),
        "rigl": ([94.59, 94.70, 94.70, 76.96, 77.95, 78.19], [94.65, 94.82, 94.81, 77.58, 78.52, 78.69]),
        "granet": ([94.70, 94.95, 94.86, 77.47, 78.25, 78.80], [94.89, 95.08, 94.94, 77.70, 78.37, 78.95]),
    },
    "wrn28-10": {
        "set": ([95.63, 95.85, 95.92, 79.36, 80.44, 80.60], [95.53, 95.91, 95.93, 79.66, 80.65, 80.91]),
        "rigl": ([95.70, 95.96, 96.12, 79.41, 80.45, 80.92], [95.90, 95.98, 96.15, 80.00, 80.72, 81.16]),
        "granet": ([95.95, 96.02, 96.09, 80.43, 80.97, 81.31], [96.03, 96.13, 96.08, 80.65, 81.20, 81.42]),
    },
}
DENSE = {"vgg16": (93.91, 73.61), "resnet50": (94.88, 78.00), "wrn28-10": (96.00, 81.09)}
DYNAMIC = ("set", "rigl", "granet")


def gains(*methods: str) -> list[float]:
    pairs = [pair for model in CIFAR.values() for name, pair in model.items() if name in methods]
    return [round(b - a, 2) for before, after in pairs for a, b in zip(before, after, strict=True)]


def test_better_in_63_of_66_cases() -> None:
    """The text calls all of them dynamic; 12 are SNIP and ERK, which are static."""
    every = gains(*DYNAMIC, "snip", "static")
    assert (sum(g > 0 for g in every), len(every)) == (63, 66)
    assert (sum(g > 0 for g in gains(*DYNAMIC)), len(gains(*DYNAMIC))) == (51, 54)


def test_the_gain_is_not_largest_with_vgg16() -> None:
    """Up to 1.08 points there; with SNIP and ResNet-50 24.31."""
    vgg = [b - a for before, after in CIFAR["vgg16"].values() for a, b in zip(before, after, strict=True)]
    assert (max(vgg), max(gains(*DYNAMIC))) == pytest.approx((1.08, 1.08))
    assert max(gains("snip")) == 24.31 and max(gains("static")) == 1.26


def test_granet_against_dense() -> None:
    """16 of 18 cells are bold as better: 15 are, and one is a tie."""
    cells = [
        (accuracy, DENSE[model][i // 3])
        for model, methods in CIFAR.items()
        for i, accuracy in enumerate(methods["granet"][1])
    ]
    assert (len(cells), sum(a > d for a, d in cells), [a for a, d in cells if a == d]) == (18, 15, [73.61])


def test_three_tickets_in_two_tables() -> None:
    """RigL on CIFAR-100, three tickets of eight epochs: the main tables against the one of ticket counts."""
    counts = {"vgg16": [71.47, 72.86, 73.42], "resnet50": [77.14, 77.84, 78.08]}
    differences = {
        m: [round(b - a, 2) for a, b in zip(CIFAR[m]["rigl"][1][3:], counts[m], strict=True)] for m in counts
    }
    assert differences == {"vgg16": [0.16, 0.29, -0.19], "resnet50": [-0.44, -0.68, -0.61]}


@pytest.mark.parametrize(
    ("accuracies", "printed"),
    [
        ([69.44, 76.52, 61.50], 6.13),
        ([77.15, 77.56, 77.07], 0.21),
        ([64.02, 70.01, 58.76], 4.60),
        ([70.31, 70.15, 70.32], 0.08),
    ],
)
def test_the_column_called_variance_is_the_deviation(accuracies: list[float], printed: float) -> None:
    assert pstdev(accuracies) == pytest.approx(printed, abs=6e-3)
    assert pvariance(accuracies) != pytest.approx(printed, rel=0.2)
