"""How settings look in a plot of several: coloured by method, dashed without a booster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from suptickets.report.colours import MUTED, SERIES, Colour, series
from suptickets.report.runs import Group, labels, method_name, varying
from suptickets.training.boosters import PREDICTION_ENSEMBLES

START, TICKET, SUPERPOSED, ENSEMBLE = MUTED, *SERIES[:3]  # on the page of one run
MOST = len(SERIES)  # settings in plots that could not be read with more


class Look(NamedTuple):
    """The colour and the name of a setting; `plain` is one without a booster beside one with it."""

    colour: Colour
    plain: bool = False
    family: str = ""


def looks(groups: Sequence[Group], *, across: bool = False) -> list[Look]:
    """A look for each setting; if `across`, it is the same for all data, models and sparsities."""
    names = ("data", "model", "sparsity") if across else ()
    if _paired(groups, names):
        families = [method_name({**one.config, "booster": "none"}) for one in groups]
        boosted = {f for f, one in zip(families, groups, strict=True) if one.config.get("booster") != "none"}
        order = list(dict.fromkeys(families))
        return [
            Look(series(order.index(f)), one.config.get("booster") == "none" and f in boosted, f)
            for f, one in zip(families, groups, strict=True)
        ]
    telling = [key for key in varying([one.config for one in groups]) if key not in names]
    kinds = [json.dumps([one.config.get(key) for key in telling]) for one in groups]
    order = list(dict.fromkeys(kinds))
    first = [groups[kinds.index(kind)].config for kind in order]
    alike = {method_name(one) for one in first}
    unsaid = (*names, "method", "booster") if len(alike) == 1 < len(order) else names
    families = labels([{key: value for key, value in one.items() if key not in unsaid} for one in first])
    places = map(order.index, kinds)
    return [Look(series(place), family=families[place]) for place in places]


def final_colour(one: Group) -> Colour:
    """The colour of the result of a single setting, as in the plots of its tickets."""
    if len(one.runs) > 1 or not one.runs[0].parts:
        return TICKET
    return ENSEMBLE if one.config.get("booster") in PREDICTION_ENSEMBLES else SUPERPOSED


def first_of(count: int) -> str:
    """A sentence to append that says which settings a plot shows, if not all."""
    return f" Shown: the first {MOST} of {count} settings." if count > MOST else ""


def _paired(groups: Sequence[Group], names: Sequence[str]) -> bool:
    """Whether the settings are several methods, each with a booster or without, and differ in no more."""
    methods = {str(one.config.get("method")) for one in groups}
    told = {json.dumps([one.config.get(key) for key in ("method", "booster", *names)]) for one in groups}
    return len(methods) > 1 and len(told) == len(groups)
