"""What the last part of a training run is used for: each booster, what it asks for, and what it ignores.

Every booster accepts the settings of the cycles and of the average, so that two runs can differ in
`--booster` alone. Settings that only some of them know (members, criteria, kept tickets) are refused by the
others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from suptickets.criteria import grow_criterion, prune_criterion
from suptickets.errors import SparsityError
from suptickets.methods import METHODS

if TYPE_CHECKING:
    from suptickets.training.settings import Settings

BOOSTERS = {
    "none": "the sparse method alone",
    "sup-tickets": "superpose the cheap tickets of the last cycles into one network",
    "swa": "average the weights along a saw-tooth; connections stay (dense: pruned before it)",
    "ensemble": "keep the tickets of the last cycles and average their predictions",
    "distillation": "the tickets of a first run teach a sparse student in a second one",
    "free-tickets": "long cycles, the predictions of their tickets averaged",
    "tree-net": "one trunk with several heads, their predictions averaged",
    "batch-ensemble": "members that share each weight up to factors, their predictions averaged",
}
CYCLIC = ("sup-tickets", "swa", "ensemble", "free-tickets")  # boosters that end in cycles
PREDICTION_ENSEMBLES = ("ensemble", "free-tickets")  # boosters whose result is all tickets together
# The words for what a booster combines and for the result; all others superpose tickets.
PARTS = {
    "swa": ("cycle", "average"),
    "tree-net": ("head", "together"),
    "batch-ensemble": ("member", "together"),
}
MEMBERS = {"tree-net": 3, "batch-ensemble": 4}  # boosters with heads or members, and how many by default


def part_names(booster: str) -> tuple[str, str]:
    """The words for what a booster combines and for the result: by default "ticket" and "superposed"."""
    return PARTS.get(booster, ("ticket", "superposed"))


def asked(booster: str | None, epochs: int, cycles: int, lr: float, *, longer: bool) -> dict[str, Any]:
    """The settings in which a booster differs from the recipe; with `longer`, it may take more epochs.

    For free-tickets they are the published ones for CIFAR, as shares: 450 epochs where others have 250, a
    third of them at the first rate, then cycles, half of each at a tenth of it and half at a hundredth.
    """
    if booster == "swa":
        return {"schedule": "swa", "explore_rate": 0.0}
    if booster in MEMBERS:
        return {"members": MEMBERS[booster]}
    if booster != "free-tickets":
        return {}
    epochs = round(1.8 * epochs) if longer else epochs
    return {
        **{"epochs": epochs, "cycle_epochs": epochs * 2 / 3 / max(cycles, 1)},
        **{"milestones": [], "lr_low": lr / 100, "lr_high": lr / 10},
        **{"schedule": "steps", "explore_rate": 0.8, "explore_at": "end"},
    }


def check(s: Settings) -> None:
    """Refuse settings that are impossible with the booster."""
    if (s.cyclic or _makes_teachers(s)) and s.cycles * s.cycle_epochs >= s.epochs:
        raise SparsityError(
            f"{s.epochs} epochs are too few for {s.cycles} cycles of {s.cycle_epochs:g}: use at least "
            f"{int(s.cycles * s.cycle_epochs) + 1} epochs, fewer cycles, or --booster none"
        )
    if (s.cyclic or _makes_teachers(s)) and s.lr_low > s.lr_high:
        raise SparsityError(f"--lr-low {s.lr_low:g} is above --lr-high {s.lr_high:g}: lower it")
    if s.booster == "swa" and s.explore_rate:
        raise SparsityError(
            "swa does not explore in its cycles: use --explore-rate 0, or --booster sup-tickets with "
            "--schedule swa"
        )
    if s.teachers and s.booster != "distillation":
        raise SparsityError("--teachers need a student: use --booster distillation")
    _check_criteria(s)


def _check_criteria(s: Settings) -> None:
    if len(s.criteria) not in (0, 1, s.cycles):
        raise SparsityError(
            f"--criteria takes one prune:grow for all cycles or one for each of the {s.cycles}, not "
            f"{len(s.criteria)}"
        )
    for pair in s.criteria:
        prune, colon, grow = pair.partition(":")
        if not colon:
            raise SparsityError(f"--criteria takes prune:grow, such as magnitude:gradient, not {pair!r}")
        prune_criterion(prune), grow_criterion(grow)


def idle(s: Settings) -> dict[str, str]:
    """Settings that have no effect, each with the reason and what to do about it."""
    found = {}
    if s.booster not in MEMBERS and s.members != 1:
        found["members"] = (
            f"--booster {s.booster} has none: leave it out, or use --booster {' or '.join(MEMBERS)}"
        )
    if s.keep_tickets != s.keeps:
        why = "keeps its tickets in any case" if s.keeps else "has no cycles of its own"
        found["keep_tickets"] = f"--booster {s.booster} {why}: leave it out, or use --booster sup-tickets"
    if s.method == "dsr":
        found["rate"] = "--method dsr adapts how much it prunes: leave it out"
    why_not = _explores_not(s)
    if why_not is not None and s.criteria:
        found["criteria"] = why_not
    if why_not is not None and s.explore_at == "end" and s.booster != "free-tickets":
        found["explore_at"] = why_not
    return found


def _explores_not(s: Settings) -> str | None:
    """Why connections do not change in the cycles of this run or its teachers' run; None if they do."""
    other = "leave it out, or use --booster sup-tickets"
    if not METHODS[s.method].sparse:
        return f"--method {s.method} has no connections to explore: leave it out, or use a sparse --method"
    if not (s.cyclic or _makes_teachers(s)):
        return f"--booster {s.booster} has no cycles to explore in: {other}"
    if s.booster == "swa":
        return f"--booster swa does not explore: {other}"
    return None if s.explore_rate else "nothing is explored at --explore-rate 0: leave out one of them"


def _makes_teachers(s: Settings) -> bool:
    return s.booster == "distillation" and not s.teachers
