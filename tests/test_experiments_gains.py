"""Whether Sup-tickets helps: which results are pairs, what is counted, which tests are told."""

from __future__ import annotations

from itertools import product
from statistics import mean
from typing import Any

import pytest
from scipy import stats

from suptickets.experiments.gains import gain, gains_page, over_start, pairs
from suptickets.experiments.plan import Mode, Reading
from suptickets.report.chart import drawn
from suptickets.report.html import html
from suptickets.report.text import markdown

CELL = {"data": "cifar100", "model": "vgg16", "method": "rigl", "sparsity": 0.95}


def record(booster: str, seed: int, accuracy: float, mode: Mode | None = None, **what: Any) -> dict[str, Any]:
    """A line of a store; calibration follows the accuracy."""
    measures = {"accuracy": accuracy, "nll": 2 - accuracy, "ece": 0.9 - accuracy}
    cell = Reading.of({**CELL, **what, "booster": booster}).key
    return {"cell": cell, "seed": seed, **(mode or Mode()).as_dict(), "measures": measures}


def both(seed: int, plain: float, boosted: float, **what: Any) -> list[dict[str, Any]]:
    return [record("none", seed, plain, **what), record("sup-tickets", seed, boosted, **what)]


def test_pairs_are_of_one_seed_one_cell_and_one_mode() -> None:
    records = [
        *both(1, 0.70, 0.72),
        *both(2, 0.71, 0.70),
        *both(1, 0.60, 0.65, method="set"),
        record("none", 3, 0.1),  # no partner
        record("sup-tickets", 4, 0.1),
        *both(5, 0.2, 0.3, mode=Mode(0.1)),
        *both(6, 0.2, 0.3, mode=Mode(separate=True)),
        record("sup-tickets", 1, 0.99, rule="caa"),  # not the recipe's
        record("sup-tickets", 1, 0.99, cycle_epochs=4),
        record("ensemble", 1, 0.99),
        record("none", 1, 0.99, sparsity=0.9),
    ]
    found = pairs(records, Mode())
    names = {(pair.cell[2], pair.seed): pair.difference("accuracy") for pair in found}
    assert names == pytest.approx({("rigl", 1): 0.02, ("rigl", 2): -0.01, ("set", 1): 0.05})
    assert [pair.seed for pair in pairs(records, Mode(0.1))] == [5]


def test_cells_are_sorted_whatever_came_first() -> None:
    levels = (0.9, 0.95, 0.8)
    records = [one for level in levels for one in both(1, 0.7, 0.72, sparsity=level)]
    assert [pair.cell[3] for pair in pairs(records, Mode())] == [0.95, 0.9, 0.8]


def test_what_is_counted() -> None:
    records = [*both(1, 0.70, 0.73), *both(2, 0.70, 0.69), *both(1, 0.60, 0.58, method="set")]
    records += both(2, 0.60, 0.61, method="set")
    found = pairs(records, Mode())
    accuracy, ece = gain(found, "accuracy"), gain(found, "ece")
    assert (accuracy.pairs, accuracy.better, accuracy.cells, accuracy.cells_better) == (4, 2, 2, 1)
    assert (ece.better, ece.cells_better) == (2, 1)  # less is better
    assert accuracy.mean == pytest.approx(0.0025) and ece.mean == pytest.approx(-0.0025)


def test_the_p_value_is_the_share_of_all_swaps_that_are_as_extreme() -> None:
    differences = [0.011, 0.002, 0.013, -0.004, 0.008, 0.009, 0.001]
    records = [r for seed, d in enumerate(differences, 1) for r in both(seed, 0.7, 0.7 + d)]
    swaps = [
        mean(s * d for s, d in zip(signs, differences, strict=True)) for signs in product((1, -1), repeat=7)
    ]
    extreme = sum(abs(swap) >= mean(differences) - 1e-12 for swap in swaps) / len(swaps)
    assert gain(pairs(records, Mode()), "accuracy").permutation == pytest.approx(extreme)


def test_the_t_test_is_of_the_means_of_the_seeds_that_all_cells_have() -> None:
    differences = {("rigl", 1): 0.010, ("rigl", 2): 0.014, ("rigl", 3): 0.007, ("set", 1): 0.003}
    differences |= {("set", 2): 0.006, ("set", 3): 0.001}
    records = [
        r for (method, seed), d in differences.items() for r in both(seed, 0.05, 0.05 + d, method=method)
    ]
    means = [(differences["rigl", seed] + differences["set", seed]) / 2 for seed in (1, 2, 3)]
    expected = stats.ttest_1samp(means, 0).pvalue
    assert gain(pairs(records, Mode()), "accuracy").t == pytest.approx(expected)
    records += [one for seed in (4, 5) for one in both(seed, 0.05, 0.05)]  # RigL's alone
    assert gain(pairs(records, Mode()), "accuracy").t == pytest.approx(expected)
    records += both(1, 0.05, 0.95, method="granet")  # of which there is one seed
    assert gain(pairs(records, Mode()), "accuracy").t is None
    assert gain(pairs(both(1, 0.7, 0.72) + both(1, 0.6, 0.65, method="set"), Mode()), "accuracy").t is None


def test_few_pairs_have_no_mean_in_the_headline() -> None:
    records = [r for seed, d in enumerate((0.01, 0.30, 0.02), 1) for r in both(seed, 0.4, 0.4 + d)]
    told = {number.label: (number.text, number.note) for number in gains_page(records, Mode()).numbers}
    assert told["Accuracy of vgg16"] == ("+1.00 to +30.00\xa0points", "in 3 pairs")


def test_the_page_tells_of_the_results_of_its_pairs_alone() -> None:
    used = [{**one, "command": "suptickets reproduce vgg16", "seconds": 100.0} for one in both(1, 0.7, 0.72)]
    others = [
        record("none", 2, 0.7),
        record("sup-tickets", 1, 0.9, cycle_epochs=4),
        record("none", 1, 0.7, sparsity=0.9),
    ]
    others = [{**one, "command": "suptickets reproduce other", "seconds": 1e9} for one in others]
    one = gains_page([*used, *others], Mode(), commands=["suptickets reproduce vgg16 --seeds 1"])
    text = markdown(one)
    assert "reproduce vgg16 --seeds 1" in text and "reproduce other" not in text
    (made,) = (table for table in one.tables() if table.name == "made")
    assert [row[2].text for row in made.rows] == ["2"]
    assert [number.text for number in one.numbers if number.label == "Time of all runs"] == ["3\xa0min"]


def test_one_pair_is_not_tested() -> None:
    only = gain(pairs(both(1, 0.70, 0.72), Mode()), "accuracy")
    assert (only.permutation, only.wilcoxon, only.deviation) == (None, None, None)


def test_the_page_in_every_format() -> None:
    records = [*both(1, 0.70, 0.73), *both(2, 0.70, 0.71), *both(1, 0.60, 0.58, method="set")]
    page = gains_page(records, Mode(), ["A note."])
    text = markdown(page)
    assert "| Accuracy (%) | all | 3 | 2 | 2 | 1 | +0.67" in text.replace("\\", "")
    assert "| Accuracy (%) | rigl | 2 | 2 | 1 | 1 | +2.00" in text.replace("\\", "")
    assert "A note." in text and len(page.plots()) == 3
    assert html(page).count("<svg") >= 3


def test_plots_say_what_is_better_and_leave_room() -> None:
    records = [*both(1, 0.70, 0.73), *both(2, 0.70, 0.71), *both(1, 0.60, 0.58, method="set")]
    found = {}
    for plot in gains_page(records, Mode()).plots():
        with drawn(plot) as chart:
            found[plot.title] = chart.axes.get_xlabel()
            low, high = chart.axes.get_xlim()
            ends = [x for line in chart.axes.lines for x in line.get_xdata()]
            assert low < min(ends) - 0.05 * (high - low) and high > max(ends) + 0.05 * (high - low)
    assert found == {
        "Accuracy": "with \N{MINUS SIGN} without, in points (more is better)",
        "NLL": "with \N{MINUS SIGN} without (less is better)",
        "ECE": "with \N{MINUS SIGN} without, in points (less is better)",
    }


def test_each_network_has_its_own_mean_tests_and_plots() -> None:
    """One that hardly learns would decide the mean of all."""
    few = both(1, 0.27, 0.58, model="resnet50", method="snip")
    others = [one for seed in range(1, 7) for one in both(seed, 0.70, 0.71 + 0.002 * seed)]
    page = gains_page([*few, *others], Mode())
    tests = {table.name: [cell.text for cell in table.rows[0]] for table in page.tables()}
    assert tests["tests-vgg16"][2:7] == ["6", "6", "1", "1", "+1.70 ± 0.37"]
    assert tests["tests-resnet50"][2:7] == ["1", "1", "1", "1", "+31.00"]
    said = {number.label: (number.text, number.note) for number in page.numbers}
    assert said["Pairs"] == ("7", "of 2 cells") and said["Better Accuracy"][0] == "7 of 7"
    assert said["Accuracy of vgg16"][0].startswith("+1.70") and "p = 0.031" in said["Accuracy of vgg16"][1]
    assert said["Accuracy of resnet50"] == ("+31.00\N{NO-BREAK SPACE}points", "in one pair")
    assert [plot.name for plot in page.plots()][::3] == ["gain-accuracy-vgg16", "gain-accuracy-resnet50"]


def test_without_a_pair_the_page_is_empty() -> None:
    assert not gains_page([record("none", 1, 0.7)], Mode()).sections


def test_the_network_before_the_cycles_is_a_rival_too() -> None:
    """A plain run may lose in its last epochs; the second table does not take that for a gain."""
    records = [*both(1, 0.68, 0.72), *both(2, 0.70, 0.71)]
    for one, start in zip(records[1::2], (0.70, 0.72), strict=True):
        one["measures"]["start"] = {"accuracy": start, "nll": 2 - start, "ece": 0.9 - start}
    found = pairs(records, Mode())
    assert [pair.difference("accuracy") for pair in over_start(found)] == pytest.approx([0.02, -0.01])
    assert [pair.difference("accuracy") for pair in found] == pytest.approx([0.04, 0.01])
    tests = {table.name: table for table in gains_page(records, Mode()).tables()}
    assert [row[3].text for row in tests["start-vgg16"].rows] == ["1", "1", "1"]
    assert [row[3].text for row in tests["tests-vgg16"].rows] == ["2", "2", "2"]
    del records[3]["measures"]["start"]["nll"]
    assert len(over_start(pairs(records, Mode()))) == 1
