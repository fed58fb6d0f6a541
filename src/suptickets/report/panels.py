"""What is shown of an experiment's runs: results by data and model and, folded, the runs of a sparsity."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from suptickets.report.curves import curve_plots
from suptickets.report.document import Block, Plot, Section
from suptickets.report.layers import end_plots, moving_plots
from suptickets.report.measures import file_names, plain
from suptickets.report.parted import parted
from suptickets.report.run_page import cycles_text
from suptickets.report.runs import INCIDENTAL, Group, Run, grouped, sparsity_name
from suptickets.report.scores import cost_plots, diversity_plots, reliability_plots, setting_plots
from suptickets.report.stored import trained
from suptickets.report.tables import result_tables

CURVES = ("learning-rate", "accuracy", "train-accuracy", "test-accuracy")  # curves that are shown
COMBINING = ("booster", "rule", "beta", "batch_norm")  # how tickets are combined
OF_TICKETS = ("sup-tickets", "ensemble")  # boosters that combine the same tickets
ONE_SEED = "Curves and layers over time are those of one seed; all else is the mean over the seeds."
BY_SETTING = "Every setting of the experiment, the mean over its seeds."
DIVERSITY = "How much what a run combines differs in its predictions."


def panel_sections(runs: Sequence[Run]) -> list[Section]:
    """The results of all runs and, folded, what is long about them."""
    panels, tables = parted(runs, _where), result_tables(grouped(runs), fold=True)
    sections = [
        Section("Results", [*_each(panels, setting_plots), *tables], BY_SETTING),
        Section("Cost", _each(panels, cost_plots)),
        Section("Diversity", _each(parted(_one_reading(runs), _where), diversity_plots), DIVERSITY),
        *_runs(parted(runs, lambda run: f"{_where(run)} · {_level(run)}")),
    ]
    return [section for section in sections if section.blocks]


def _one_reading(runs: Sequence[Run]) -> list[Run]:
    """Keep one of several ways in which runs combine the same tickets: these differ as much in all."""
    kept, first = list[Run](), dict[str, list[object]]()
    for run in runs:
        how = [run.config.get(key) for key in COMBINING]
        tickets = {key: value for key, value in run.config.items() if key not in (*COMBINING, *INCIDENTAL)}
        tickets["booster"] = "" if run.config.get("booster") in OF_TICKETS else run.config.get("booster")
        if first.setdefault(json.dumps(tickets, sort_keys=True), how) == how:
            kept.append(run)
    return kept


def _where(run: Run) -> str:
    return " · ".join(plain(run.config.get(key, "")) for key in ("data", "model"))


def _level(run: Run) -> str:
    return sparsity_name(run.config) or "dense"


def _each(panels: dict[str, list[Run]], plots: Callable[[Sequence[Group]], list[Plot]]) -> list[Plot]:
    """The plots of each panel; where there are several panels, their titles say which."""
    found = []
    for name, (where, runs) in zip(file_names(list(panels)), panels.items(), strict=True):
        drawn = _renamed(plots(grouped(runs)), name)
        found += [replace(p, title=f"{p.title}, {where}") if len(panels) > 1 else p for p in drawn]
    return found


def _renamed(plots: Sequence[Plot], name: str) -> list[Plot]:
    return [replace(plot, name=f"{plot.name}-{name}") for plot in plots]


def _runs(panels: dict[str, list[Run]]) -> list[Section]:
    names = file_names(list(panels))
    return [_section(name, *panel) for name, panel in zip(names, panels.items(), strict=True)]


def _section(name: str, where: str, runs: Sequence[Run]) -> Section:
    """Curves, layers and calibration of runs that share data, model and sparsity."""
    groups, single = grouped(runs), grouped(trained(runs))
    curves = [plot for plot in curve_plots(single) if plot.name in CURVES]
    plots = [*curves, *moving_plots(single), *end_plots(groups), *reliability_plots(groups)]
    blocks: list[Block] = [*_renamed(plots, name)]
    text = f"{cycles_text([one.runs[0] for one in single])} {ONE_SEED}".strip()
    return Section(f"Runs: {where}", blocks, text, folded=True)
