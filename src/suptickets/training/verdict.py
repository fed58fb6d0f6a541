"""Whether averaging weights helped on the data at hand, and what is usually wrong when it did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

SUPERPOSING = ("sup-tickets", "swa")  # the boosters whose result is an average of weights
ROUNDING = 1e-6  # relative: numbers that differ by less are the same
_BASIN = "a restart rate that leaves the basin (--lr-high), too few steps before the cycles"
# What is worse than what, and why: swa has no exploration to recover from.
_WORDS = {
    "sup-tickets": (
        "the superposed ticket is worse than the mean of its tickets",
        f"cycles too short to recover from the exploration (--cycle-epochs), {_BASIN}",
    ),
    "swa": (
        "the average is worse than the mean of the networks that it averages",
        f"cycles too short to come down from their rate, or from the pruning of a dense network "
        f"(--cycle-epochs), {_BASIN}",
    ),
}


def verdict(
    average: Mapping[str, float], tickets: Sequence[Mapping[str, float]], booster: str = "sup-tickets"
) -> str | None:
    """A line if the average is worse than the mean of what it averages, in accuracy or in NLL.

    None otherwise, and for a single network, which is its own average.
    """
    keys = ("accuracy", "nll")
    if len(tickets) < 2 or any(one[key] is None for one in (average, *tickets) for key in keys):
        return None
    accuracy, nll = (mean(ticket[key] for ticket in tickets) for key in keys)
    worse = []
    if average["accuracy"] < accuracy * (1 - ROUNDING):
        worse.append("accuracy " + _against(average["accuracy"], accuracy, 2, "%"))
    if average["nll"] > nll * (1 + ROUNDING):
        worse.append("NLL " + _against(average["nll"], nll, 4, "f"))
    if not worse:
        return None
    what, causes = _WORDS[booster]
    return f"{what} ({', '.join(worse)}); the usual causes: {causes}"


def _against(one: float, other: float, digits: int, kind: str) -> str:
    """Two numbers that differ, with as many digits as it takes to see that."""
    shown = [f"{number:.{digits}{kind}}" for number in (one, other)]
    return " against ".join(shown) if shown[0] != shown[1] else _against(one, other, digits + 1, kind)
