"""What a cycle of Sup-tickets adds to a 95 % sparse VGG-16: one exploration and one collection, in steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.timing import Row, ratio, take_turns
from benchmarks.training import Trainer
from suptickets import RigL, SupTickets

RATE = 0.5
REQUIRED = {"exploration": 2.0, "collection": 1.0}


class Contest:
    """A network in its cycles, whose connections differ from those of the tickets collected before."""

    def __init__(self) -> None:
        self.trainer = Trainer("vgg16", RigL(0.95, interval=10**9))
        assert self.trainer.network is not None
        self.network = self.trainer.network
        self.tickets = SupTickets(self.network, 10**6, 10, 3, (0.001, 0.005))
        self.tickets.collect()

    def step(self) -> Callable[[], None]:
        """A training step, in which the gradient of all positions is collected for the exploration."""
        self.network.request_gradient()
        return self.trainer.step

    def explore(self) -> Callable[[], bool]:
        """Prune half of the connections, grow as many by gradient."""
        self.network.request_gradient()
        self.trainer.step()
        return lambda: self.network.explore(RATE)

    def collect(self) -> Callable[[], None]:
        """Average one more ticket in, and prune the average."""
        return self.tickets.collect


def run() -> list[Row]:
    """Milliseconds of all three, and how many steps the other two take."""
    contest = Contest()
    contenders = {"step": contest.step, "exploration": contest.explore, "collection": contest.collect}
    times = take_turns(contenders, rounds=4)
    rows = [Row("vgg16", "step", statistics.median(times["step"]), "steps", 1.0)]
    for name, limit in REQUIRED.items():
        steps = ratio(times[name], times["step"])
        rows.append(
            Row(
                "vgg16",
                name,
                statistics.median(times[name]),
                "steps",
                steps,
                f"<= {limit:.2f}",
                steps <= limit,
            )
        )
    return rows
