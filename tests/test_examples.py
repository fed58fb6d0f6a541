"""The example that users copy runs, and is short."""

import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from suptickets.training.verdict import verdict

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits.py"


def test_the_plain_loop_runs_and_is_under_60_lines():
    assert len(EXAMPLE.read_text().splitlines()) < 60
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["accuracy", "NLL", "sparsity"]
    tickets = ["ticket 1", "ticket 2", "ticket 3"]
    names = ["before the cycles", *tickets, "mean of the tickets", "superposed"]
    assert [row[:20].strip() for row in rows] == names
    scores = {row[:20].strip(): [float(cell.rstrip("%")) for cell in row[20:].split()] for row in rows}
    for accuracy, nll, sparsity in scores.values():
        assert accuracy > 93 and nll < 0.2
        assert 95 <= sparsity < 96  # a connection may hold the value 0
    means = [mean(column) for column in zip(*(scores[ticket] for ticket in tickets), strict=True)]
    assert scores["mean of the tickets"] == pytest.approx(means, abs=0.011)


def test_superposing_that_hurts_is_said():
    tickets = [{"accuracy": 0.9, "nll": 0.3}, {"accuracy": 0.8, "nll": 0.5}]
    assert verdict({"accuracy": 0.86, "nll": 0.39}, tickets) is None
    assert verdict({"accuracy": 0.84, "nll": 0.41}, []) is None
    line = verdict({"accuracy": 0.84, "nll": 0.41}, tickets)
    assert line is not None and "accuracy 84.00% against 85.00%, NLL 0.4100 against 0.4000" in line
    assert "cycles too short" in line and "\n" not in line
    assert "NLL" not in (verdict({"accuracy": 0.84, "nll": 0.4}, tickets) or "NLL")
