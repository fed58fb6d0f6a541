"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.live import Live

REFRESH = 0.5  # seconds between two changes of the live line


class Progress:
    """Shows an epoch at a time, on stderr."""

    def __init__(self, epochs: int, *, quiet: bool = False) -> None:
        """`quiet` shows nothing (the other processes of a distributed run)."""
        self.epochs, self.quiet = epochs, quiet
        self.console = Console(stderr=True)
        self.live = (
            Live(console=self.console, transient=True) if self.console.is_terminal and not quiet else None
        )
        self.began, self.first, self.shown = time.monotonic(), 0.0, 0.0

    def __enter__(self) -> Progress:
        """Start the live line, on a terminal."""
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the live line."""
        if self.live is not None:
            self.live.stop()

    def say(self, message: str) -> None:
        """Print a line that stays."""
        if not self.quiet:
            (self.console.out if self.live else print_plain)(message)

    def due(self) -> bool:
        """Whether the live line is to be shown again, in the middle of an epoch."""
        return self.live is not None and time.monotonic() - self.shown > REFRESH

    def show(
        self,
        *,
        epoch: int,
        part: float,
        phase: str,
        lr: float,
        sparsity: float,
        samples: int,
        loss: float | None = None,
        train_accuracy: float | None = None,
    ) -> None:
        """Show where the run stands: `part` of the epoch (the first is 1), which has `samples`, is done.

        Loss and accuracy are left out until they are read.
        """
        if self.quiet:
            return
        self.shown = time.monotonic()
        done = max(epoch - 1 + part - self.first, 1e-9)
        seconds = (self.shown - self.began) / done
        read = "" if loss is None else f"loss {loss:.4f}  accuracy {train_accuracy:.2%}  "
        line = (
            f"epoch {epoch}/{self.epochs}  {phase}  lr {lr:.4g}  {read}sparsity {sparsity:.2%}  "
            f"{samples / max(seconds, 1e-9):,.0f} samples/s  "
            f"{clock(seconds * (self.epochs - epoch + 1 - part))} left"
        )
        if self.live is not None:
            self.live.update(line, refresh=True)
        elif epoch == self.epochs or epoch % max(self.epochs // 20, 1) == 0:
            print_plain(line)


def print_plain(message: str) -> None:
    """Print a plain line on stderr; it is no error if nobody reads it any more."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Seconds as 1:02:03, or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
