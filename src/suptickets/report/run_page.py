"""The page of runs: of one run, of several seeds, or of several settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from suptickets.measure.predictions import SCORES
from suptickets.report.again import again, time_spent
from suptickets.report.curves import curve_plots
from suptickets.report.document import Block, Cell, Note, Number, Numbers, Page, Section, Table
from suptickets.report.layers import layer_plots, layer_table
from suptickets.report.measures import MEASURES, NOTHING, duration, number, plain, reading
from suptickets.report.runs import (
    Group,
    Run,
    common_cycles,
    group,
    method_name,
    narrow,
    repeated,
    sparsity_name,
    varying,
)
from suptickets.report.scores import (
    cost_plots,
    diversity_plots,
    part_plots,
    reliability_plots,
    score_rows,
    setting_plots,
)
from suptickets.report.tables import result_tables
from suptickets.training.boosters import PREDICTION_ENSEMBLES
from suptickets.training.verdict import SUPERPOSING, verdict

CYCLES = "Shaded: the cycles; a ticket is collected at the end of each, where its number stands."
REPEATED = "{} has the settings and the seed of {}, and is left out."
STRETCHED = " There the axis is stretched."
MARKS = " On the test data: a ring before the cycles, a dot for each ticket, a diamond for {}."


def run_page(runs: Sequence[Run]) -> Page:
    """Everything that there is to see of these runs; a seed of the same settings counts once."""
    twice = repeated(runs)
    runs = [run for run in runs if run.path not in twice]
    groups = group(runs)
    if len(runs) == 1:
        title, about, numbers = _title(runs[0].config), _about(runs[0].config), _headline(runs[0])
    else:
        title = _title(runs[0].config) if len(groups) == 1 else f"{len(groups)} settings compared"
        differing = {*varying([run.config for run in runs]), "seed"}
        same = {key: value for key, value in runs[0].config.items() if key not in differing}
        about, numbers = f"{_about(same)} · {len(runs)} runs".removeprefix(" · "), _headlines(groups)
    first, *others = [*run_sections(groups), again(runs)]
    said = [Note(REPEATED.format(plain(one), plain(other))) for one, other in twice.items()]
    return Page(title, about, numbers, [replace(first, blocks=[*said, *first.blocks]), *others])


def run_sections(groups: Sequence[Group]) -> list[Section]:
    """The sections of these runs, without empty ones."""
    runs = [run for one in groups for run in one.runs]
    sections = [
        _parts(runs[0]) if len(runs) == 1 else _results(groups),
        Section("Training", [*_unread(runs), *curve_plots(groups)], cycles_text(runs)),
        Section("Layers", [*layer_plots(groups), *(layer_table(runs[0]) if len(runs) == 1 else [])]),
        Section("Cost", cost_plots(groups)),
        Section("Calibration and diversity", [*reliability_plots(groups), *_diversity(groups)]),
    ]
    return [section for section in sections if section.blocks]


# ---- names and headline numbers ----


def _title(config: Mapping[str, Any]) -> str:
    sparsity = sparsity_name(config)
    return method_name(config) + (f" at {sparsity} sparsity" if sparsity else "")


def _about(config: Mapping[str, Any]) -> str:
    """Data, model and so on, in a line: digits · vgg-small · 20 epochs · seed 1."""
    names = {"data": "{}", "model": "{}", "epochs": "{} epochs", "recipe": "recipe {}", "seed": "seed {}"}
    return " · ".join(text.format(plain(config[key])) for key, text in names.items() if key in config)


def _headline(run: Run) -> Numbers:
    if not run.summary:
        return _so_far(run)
    scores = [Number(MEASURES[k].label, MEASURES[k].show(run.value(k)), _gain(run, k)) for k in SCORES]
    living, total = run.value("nonzero"), run.value("parameters")
    note = f"{living:,.0f} of {total:,.0f} weights live" if living is not None and total is not None else ""
    return (
        *scores,
        Number("Sparsity", MEASURES["sparsity"].show(run.value("sparsity")), note),
        _flops("Training FLOPs", run.value("train_flops_ratio")),
        _flops("Test FLOPs", run.value("test_flops_ratio")),
        *_explored(run),
        Number("Time", duration(run.value("seconds")), plain(run.summary.get("hardware") or "")),
    )


def _explored(run: Run) -> Numbers:
    rate = run.value("explored")
    shown = MEASURES["explored"]
    note = "of all weights lived at some time"
    return () if rate is None else (Number(shown.label, shown.show(rate), note),)


def _flops(label: str, ratio: float | None) -> Number:
    return Number(label, NOTHING if ratio is None else f"{ratio:.3f}×", "dense = 1")


def _gain(run: Run, key: str) -> str:
    """What the cycles brought, in words."""
    start, end = run.value(key, "start"), run.value(key)
    if start is None or end is None:
        return ""
    changed = MEASURES[key].rounded(end - start)
    return f"{MEASURES[key].change(end - start) if changed else 'unchanged'} through the cycles"


def _so_far(run: Run) -> Numbers:
    """The headline numbers of a run that is not done."""
    last = run.metrics[-1] if run.metrics else {}
    epochs = f"{number(last.get('epoch')) or 0:g} of {plain(run.config.get('epochs', '?'))}"
    return (
        Number("Epoch", epochs, "not finished"),
        Number("Training accuracy", MEASURES["accuracy"].show(reading(last, "train_accuracy"))),
        Number("Training loss", MEASURES["nll"].show(number(last.get("loss")))),
        Number("Sparsity", MEASURES["sparsity"].show(reading(last, "sparsity"))),
    )


def _headlines(groups: Sequence[Group]) -> Numbers:
    """The best of several settings, or the mean of the only one."""
    numbers = [_best(groups, key) for key in SCORES if any(one.values(key) for one in groups)]
    runs = [run for one in groups for run in one.runs]
    done = sum(bool(run.summary) for run in runs)
    note = "all finished" if done == len(runs) else f"{len(runs) - done} not finished"
    seconds = [value for run in runs if (value := run.value("seconds")) is not None]
    spent = time_spent(sum(seconds) if seconds else None, [run.summary for run in runs])
    return (*numbers, Number("Runs", str(done), note), *spent)


def _best(groups: Sequence[Group], key: str) -> Number:
    measure, known = MEASURES[key], [one for one in groups if one.values(key)]
    best = max(known, key=lambda one: measure.better * (one.mean(key) or 0.0))
    text = measure.show(best.mean(key), best.deviation(key))
    if len(groups) == 1:
        return Number(measure.label, text, "mean ± deviation over the seeds")
    name = measure.label if measure.label.isupper() else measure.label.lower()
    as_good = [one for one in known if measure.show(one.mean(key)) == measure.show(best.mean(key))]
    if len(as_good) > 1:
        return Number(f"Best {name}", measure.show(best.mean(key)), f"{len(as_good)} settings")
    return Number(f"Best {name}", text, best.label)


# ---- sections ----


def _parts(run: Run) -> Section:
    """A single run: the tickets against the superposed one and the start; heads and members likewise."""
    if not run.summary:
        return Section("Results", [])
    booster = run.config.get("booster")
    averaged = booster in SUPERPOSING and _complete(run)
    worse = verdict(run.summary, run.tickets, str(booster)) if averaged else None
    header = ["Network", *(MEASURES[key].header for key in SCORES)]
    rows = [
        [Cell(name), *(MEASURES[key].cell(reading(scores, key)) for key in SCORES)]
        for name, scores, _ in score_rows(run)
    ]
    notes: list[Block] = [Note(worse[0].upper() + worse[1:] + ".")] if worse else []
    title = f"{run.part.capitalize()}s" if run.parts else "Result"
    text = f"Dotted: the mean of the {run.part}s." if run.parts else ""
    return Section(title, [*notes, *part_plots(run), Table("scores", "Scores", header, rows)], text)


def _complete(run: Run) -> bool:
    """Whether all scores are there."""
    return all(reading(one, key) is not None for one in (run.summary, *run.tickets) for key in SCORES)


def _results(groups: Sequence[Group]) -> Section:
    """Several runs: mean and deviation by setting, and each run."""
    return Section("Results", [*setting_plots(groups), *result_tables(groups)])


def _unread(runs: Sequence[Run]) -> list[Note]:
    """Notes on lines of metrics that could not be read."""
    text = "Lines of {} that could not be read, and are left out: {}."
    return [Note(text.format(plain(run.path / "metrics.jsonl"), run.damaged)) for run in runs if run.damaged]


def cycles_text(runs: Sequence[Run]) -> str:
    """What is seen of the cycles in the curves, in words."""
    borders = common_cycles(runs)
    if not borders:
        return ""
    alone = all(run.config.get("booster") not in PREDICTION_ENSEMBLES for run in runs)
    marks = MARKS.format("the superposed one" if alone else "the result")
    marked = any(run.tickets for run in runs)
    return CYCLES + (STRETCHED if narrow(borders) else "") + (marks if marked else "")


def _diversity(groups: Sequence[Group]) -> list[Block]:
    """Diversity: plots for several settings, numbers for one."""
    if len(groups) > 1:
        return [*diversity_plots(groups)]
    one, part = groups[0], groups[0].runs[0].part
    together = f"all {part}s together, at the cost of all"
    numbers = [
        _number(one, "disagreement", "diversity", f"share of images on which two {part}s disagree"),
        _number(one, "kl", "diversity", f"between the predictions of two {part}s"),
        _number(one, "accuracy", "ensemble", together, "Ensemble: accuracy"),
        _number(one, "nll", "ensemble", together, "Ensemble: NLL"),
    ]
    known = tuple(each for each in numbers if each.text != NOTHING)
    return [known] if known else []


def _number(one: Group, key: str, part: str, note: str, label: str = "") -> Number:
    measure = MEASURES[key]
    return Number(label or measure.label, measure.show(one.mean(key, part), one.deviation(key, part)), note)
