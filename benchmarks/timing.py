"""Contenders take turns; what is reported is medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Makes everything ready and returns what is timed.
Contender = Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Row:
    """One measurement, and the requirement that it has to meet, if there is one."""

    model: str
    variant: str
    milliseconds: float
    ratio_name: str
    ratio: float
    requirement: str = ""
    met: bool | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, the ratio under its own name."""
        values = asdict(self)
        name = values.pop("ratio_name")
        return {name if key == "ratio" else key: value for key, value in values.items()}


def take_turns(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contender in each round, after one that is not counted; orders alternate."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        ready = [(name, prepare()) for name, prepare in contenders.items()]
        for name, run in ready if number % 2 else reversed(ready):
            start = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: values[1:] for name, values in times.items()}


def ratio(above: list[float], below: list[float]) -> float:
    """The median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
