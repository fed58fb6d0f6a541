"""Whether Sup-tickets helps: every cell of a store with it and without, the two runs of a seed as a pair.

All pairs of the paper's recipe count, whichever experiment they were trained for. Means are those of one
network, so that the gain of a network that hardly learns is no part of another's mean. Three tests are
reported: the permutation test of the mean difference, Wilcoxon's, which no single run decides, and the t-test
of the seeds' means, which assumes only that the seeds are independent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from suptickets.errors import SparsityError
from suptickets.experiments.numbers import spent
from suptickets.experiments.plan import Mode, Reading
from suptickets.experiments.store import Results, mode_of
from suptickets.measure.predictions import SCORES
from suptickets.measure.significance import paired_t, permutation, wilcoxon
from suptickets.report.again import again, time_spent
from suptickets.report.colours import MUTED, SERIES
from suptickets.report.document import Block, Cell, Note, Number, Page, Plot, Section, Table
from suptickets.report.measures import MINUS, NO_BREAK, measure
from suptickets.report.parted import parted

if TYPE_CHECKING:
    from suptickets.report.chart import Chart

GAINS = "gains"  # its name in a report
TITLE = "Does Sup-tickets help?"
ABOUT = "All cells with and without it, paired by seed; not in the paper."
NAMED = ("data", "model", "method", "sparsity")
FEWEST = 6  # the fewest pairs for which the permutation test can give less than 0.05
BOTH = ("none", "sup-tickets")
TEXT = (
    "Differences are those with Sup-tickets minus those without: of accuracy more is better, else less. "
    "Permutation and Wilcoxon tests take pairs as independent, which those of one seed at several sparsities "
    "are only in part; the t-test is of the means of seeds that all cells have, and takes the "
    "seeds as independent."
)


class Pair(NamedTuple):
    """The measures of one seed of a cell (data, model, method, sparsity), without and with Sup-tickets."""

    cell: tuple[str, str, str, float]
    seed: int
    plain: Mapping[str, Any]
    boosted: Mapping[str, Any]

    def difference(self, name: str) -> float:
        """The difference in a measure, with Sup-tickets minus without."""
        return float(self.boosted[name]) - float(self.plain[name])


def pairs(records: Sequence[Mapping[str, Any]], mode: Mode) -> list[Pair]:
    """All pairs among the results of one mode, cell by cell."""
    results, found = Results(records, mode), []
    cells = {named(one["cell"]) for one in records if _boosted(one, mode)}
    for cell in sorted(cells, key=lambda cell: (*cell[:3], -cell[3])):
        with suppress(SparsityError):  # a cell of no experiment
            plain, boosted = map(results.measures, _readings(cell))
            both = [Pair(cell, seed, plain[seed], boosted[seed]) for seed in boosted if seed in plain]
            found += [pair for pair in both if _measured(pair.plain) and _measured(pair.boosted)]
    return found


def over_start(found: Iterable[Pair]) -> list[Pair]:
    """The same networks with Sup-tickets, each paired with the network that its cycles began with."""
    started = [(pair, pair.boosted.get("start") or {}) for pair in found]
    return [pair._replace(plain=start) for pair, start in started if _measured(start)]


def _readings(cell: tuple[str, str, str, float]) -> list[Reading]:
    """The readings of a cell, without Sup-tickets and with."""
    settings = dict(zip(NAMED, cell, strict=True))
    return [Reading.of({**settings, "booster": booster}) for booster in BOTH]


def named(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a cell from others here: data, model, method, sparsity."""
    return tuple(cell[name] for name in NAMED)


def _boosted(record: Mapping[str, Any], mode: Mode) -> bool:
    return mode_of(record) == mode and record["cell"]["booster"] == "sup-tickets"


def _measured(measures: Mapping[str, Any]) -> bool:
    return all(measures.get(name) is not None for name in SCORES)


@dataclass(frozen=True)
class Gain:
    """What a measure gains over all pairs.

    Attributes:
        pairs: how many there are.
        better: how many of them are better with Sup-tickets.
        cells: how many there are.
        cells_better: how many of them are better in the mean over their seeds.
        mean: the mean difference, with minus without.
        deviation: the deviation of the differences.
        permutation: p-value of the mean difference; None below two pairs.
        wilcoxon: p-value of the signed ranks.
        t: p-value of the mean differences of the seeds, by the t-test; None if the cells
            have fewer than two seeds in common.
    """

    pairs: int
    better: int
    cells: int
    cells_better: int
    mean: float
    deviation: float | None
    permutation: float | None
    wilcoxon: float | None
    t: float | None


def gain(found: Sequence[Pair], name: str) -> Gain:
    """The gain in one measure; there must be a pair."""
    sign, differences = measure(name).better, [pair.difference(name) for pair in found]
    of_cells = [mean(pair.difference(name) for pair in own) for own in by_cell(found).values()]
    tested = len(found) > 1
    without, boosted = ([float(side[name]) for side in sides] for sides in _sides(found))
    return Gain(
        pairs=len(found),
        better=sum(sign * difference > 0 for difference in differences),
        cells=len(of_cells),
        cells_better=sum(sign * difference > 0 for difference in of_cells),
        mean=mean(differences),
        deviation=stdev(differences) if tested else None,
        permutation=permutation(boosted, without).p if tested else None,
        wilcoxon=wilcoxon(boosted, without).p if tested else None,
        t=_over_seeds(found, name),
    )


def _over_seeds(found: Iterable[Pair], name: str) -> float | None:
    """The t-test's p-value of the means of the seeds that all cells have; None for fewer than two."""
    cells = [{pair.seed: pair for pair in own} for own in by_cell(found).values()]
    seeds = set[int]().union(*cells).intersection(*cells)
    if len(seeds) < 2:
        return None
    of_seeds = [_sides([own[seed] for own in cells]) for seed in sorted(seeds)]
    without, boosted = ([mean(float(s[name]) for s in both[side]) for both in of_seeds] for side in (0, 1))
    return paired_t(boosted, without).p


def _sides(found: Sequence[Pair]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The measures of all runs without Sup-tickets, and of all with it."""
    return [pair.plain for pair in found], [pair.boosted for pair in found]


def by_cell(found: Iterable[Pair]) -> dict[tuple[str, str, str, float], list[Pair]]:
    """The pairs of each cell."""
    return parted(found, lambda pair: pair.cell)


# ---- the page ----


def gains_page(
    records: Sequence[Mapping[str, Any]], mode: Mode, notes: Iterable[str] = (), commands: Sequence[str] = ()
) -> Page:
    """The tests, every cell, and a plot of all differences; results without a pair give an empty page."""
    found = pairs(records, mode)
    if not found:
        return Page(TITLE, ABOUT, (), [])
    first, *others = (_section(model, own) for model, own in _by("model", found).items())
    sections = [replace(first, blocks=[*map(Note, notes), *first.blocks]), *others]
    sections.append(Section("Every cell", [_cells(found)]))
    made = _made(found, records, mode)
    sections.append(again([], commands, made))
    return Page(TITLE, ABOUT, (*_headline(found), *time_spent(spent(made), made)), sections)


def _made(found: Iterable[Pair], records: Iterable[Mapping[str, Any]], mode: Mode) -> list[Mapping[str, Any]]:
    """The results that the pairs are made of."""
    used = {_line(one.key, pair.seed) for pair in found for one in _readings(pair.cell)}
    own = [record for record in records if mode_of(record) == mode]
    return [record for record in own if _line(record["cell"], record["seed"]) in used]


def _line(key: Mapping[str, Any], seed: int) -> str:
    return json.dumps([key, seed], sort_keys=True)


def _by(name: str, found: Iterable[Pair]) -> dict[str, list[Pair]]:
    """The pairs by a part of their cell's name, the most frequent value first."""
    parts = parted(found, lambda pair: str(pair.cell[NAMED.index(name)]))
    return dict(sorted(parts.items(), key=lambda part: -len(part[1])))


def _section(model: str, found: Sequence[Pair]) -> Section:
    """The tests and plots of one network."""
    blocks: list[Block] = [_tests(f"tests-{model}", "Paired tests", found)]
    if before := over_start(found):
        title = "The same against the network before the cycles"
        blocks.append(_tests(f"start-{model}", title, before))
    blocks += [_plot(name, model, found) for name in SCORES]
    return Section(f"All pairs of {model}", blocks, TEXT)


def _headline(found: Sequence[Pair]) -> tuple[Number, ...]:
    every = {name: gain(found, name) for name in SCORES}
    numbers = [Number("Pairs", str(len(found)), f"of {every['accuracy'].cells} cells")]
    for name, one in every.items():
        numbers.append(Number(f"Better {measure(name).label}", f"{one.better} of {one.pairs}"))
    for model, own in _by("model", found).items():
        numbers.append(Number(f"Accuracy of {model}", *_accuracy(own)))
    return tuple(numbers)


def _accuracy(own: Sequence[Pair]) -> tuple[str, str]:
    """The mean difference; of pairs too few for a test to tell from chance, the least and the largest."""
    show, one = measure("accuracy").change, gain(own, "accuracy")
    if len(own) >= FEWEST:
        return show(one.mean), f"on average, p = {measure('p_value').bare(one.permutation)}"
    least, most = (show(end(pair.difference("accuracy") for pair in own)) for end in (min, max))
    if len(own) == 1:
        return most, "in one pair"
    return f"{least.removesuffix(f'{NO_BREAK}points')} to {most}", f"in {len(own)} pairs"


def _tests(name: str, title: str, found: Sequence[Pair]) -> Table:
    """The tests of all pairs, and of those of each data set and method, if there are several."""
    header = ["Measure", "Of", "Pairs", "Better", "Cells", "Cells better"]
    header += ["Mean difference", "Permutation p", "Wilcoxon p", "t of seeds p"]
    parts = [("all", found)]
    for kind in ("data", "method"):
        split = _by(kind, found)
        parts += [*split.items()] if len(split) > 1 else []
    return Table(name, title, header, [_tested(key, of, own) for key in SCORES for of, own in parts])


def _tested(name: str, of: str, found: Sequence[Pair]) -> list[Cell]:
    kind, one = measure(name), gain(found, name)
    spread = "" if one.deviation is None else f" ± {kind.bare(one.deviation)}"
    ps = map(measure("p_value").cell, (one.permutation, one.wilcoxon, one.t))
    counts = (one.pairs, one.better, one.cells, one.cells_better)
    numbers = [Cell(str(count), float(count)) for count in counts]
    return [Cell(kind.header), Cell(of), *numbers, Cell(_change(name, one.mean) + spread, one.mean), *ps]


def _cells(found: Sequence[Pair]) -> Table:
    header = ["Data", "Model", "Method", "Sparsity", "Seeds"]
    for name in SCORES:
        header += [f"{measure(name).header} without", "with", "difference"]
    rows = [_cell(cell, own) for cell, own in by_cell(found).items()]
    return Table("gains", "Means over seeds", header, rows)


def _cell(cell: tuple[str, str, str, float], own: Sequence[Pair]) -> list[Cell]:
    data, model, method, sparsity = cell
    row = [Cell(data), Cell(model), Cell(method), measure("sparsity").cell(sparsity)]
    row.append(Cell(str(len(own)), float(len(own))))
    for name in SCORES:
        kind, difference = measure(name), mean(pair.difference(name) for pair in own)
        better = kind.better * kind.rounded(difference) > 0
        row += [kind.cell(mean(float(side[name]) for side in sides)) for sides in _sides(own)]
        row.append(Cell(_change(name, difference), difference, better))
    return row


def _change(name: str, difference: float) -> str:
    """A difference as text, in the unit of the column."""
    return measure(name).change(difference).removesuffix(f"{NO_BREAK}points")


def _plot(name: str, model: str, found: Sequence[Pair]) -> Plot:
    """A row for each cell, a point for each seed, a line at no difference."""
    cells, kind = by_cell(found), measure(name)
    labels = [f"{data} {method} {sparsity:.0%}" for data, _, method, sparsity in cells]

    text = f"{model} with Sup-tickets minus without; a dot is a seed."

    def draw(chart: Chart) -> None:
        chart.rows(labels)
        unit = ", in points" if kind.percent else ""
        chart.axis_names("", f"with {MINUS} without{unit}{kind.aim}")
        chart.axes.margins(x=0.1)
        chart.axes.axvline(0, color=MUTED.light, linewidth=1)
        for y, (label, own) in enumerate(zip(labels, cells.values(), strict=True)):
            points = [(kind.rounded(p.difference(name)), float(y), _tip(label, p, name)) for p in own]
            chart.points(points, SERIES[0])

    return Plot(f"gain-{name}-{model}", kind.label, draw, text, height=70 + 20 * len(cells))


def _tip(label: str, pair: Pair, name: str) -> str:
    plain, boosted = (measure(name).show(float(side[name])) for side in (pair.plain, pair.boosted))
    return f"{label}, seed {pair.seed}\n{plain} without, {boosted} with"
