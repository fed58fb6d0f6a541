"""Ctrl-C and SIGTERM: the step is finished, a checkpoint is written, the run says how to go on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from suptickets.errors import TrainingError


class Interrupted(TrainingError):
    """The run was asked to stop, and has written a checkpoint."""


_asked: list[list[int]] = []  # the list of the outermost `asked_to_stop`, which those within share
_unanswered: list[int] = []  # signals that came when there was nothing left to stop


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that gets the signal when Ctrl-C or SIGTERM asks to stop; signals reach the main thread only."""
    if _asked:
        yield _asked[0]
        return
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = [signal.signal(number, ask) for number in signals]
    _asked.append(asked)
    try:
        yield asked
        _unanswered.extend(asked)
    finally:
        _asked.remove(asked)
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def unanswered() -> int:
    """How many requests to stop came since the last call while a run was being finished."""
    count = len(_unanswered)
    _unanswered.clear()
    return count
