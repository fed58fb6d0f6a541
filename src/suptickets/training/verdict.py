"""Whether superposing helped on the data at hand, and what is usually wrong when it did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

SUPERPOSING = ("sup-tickets", "swa")  # the boosters whose result is the superposed ticket
CAUSES = (
    "the usual causes: cycles too short to recover from the exploration (--cycle-epochs), a restart rate "
    "that leaves the basin (--lr-high), too few steps before the cycles"
)


def verdict(superposed: Mapping[str, float], tickets: Sequence[Mapping[str, float]]) -> str | None:
    """A line if the superposed ticket is worse than the mean of its tickets, in accuracy or in NLL."""
    if not tickets:
        return None
    accuracy, nll = (mean(ticket[key] for ticket in tickets) for key in ("accuracy", "nll"))
    worse = []
    if superposed["accuracy"] < accuracy:
        worse.append(f"accuracy {superposed['accuracy']:.2%} against {accuracy:.2%}")
    if superposed["nll"] > nll:
        worse.append(f"NLL {superposed['nll']:.4f} against {nll:.4f}")
    if not worse:
        return None
    return f"the superposed ticket is worse than the mean of its tickets ({', '.join(worse)}); {CAUSES}"
