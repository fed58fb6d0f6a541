"""Interrupted at random steps and resumed, a run ends as if nothing had happened: real processes, signals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_worker import DIE, Server

RUN = ("train", "--model", "train_worker:dying", "--epochs", 8, "--batch-size", 200, "--interval", 5)
RUN += ("--cycles", 2, "--cycle-epochs", 2, "--evaluate-every", 3, "--sparsity", 0.8, "--prune-epochs", 2)
STEPS = 8 * 8  # 1,437 digits, 200 a step: the last of an epoch has 37
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


def same(a: Any, b: Any) -> bool:
    """Whether two states are the same, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def contents(folder: Path) -> dict[str, Any]:
    """All that a run left behind, but the time that it took, and where it is."""
    checkpoint = torch.load(folder / "checkpoint" / "last.pt", weights_only=True)
    summary = json.loads((folder / "summary.json").read_text())
    for timed in (checkpoint, summary):
        del timed["seconds"]
    del summary["run"]
    metrics = (folder / "metrics.jsonl").read_text()
    ticket = load_file(folder / "ticket.safetensors")
    return {"ticket": ticket, "checkpoint": checkpoint, "summary": summary, "metrics": metrics}


def assert_same(folder: Path, other: Path) -> None:
    ours, theirs = contents(folder), contents(other)
    assert [
        key for key in ours["checkpoint"] if not same(ours["checkpoint"][key], theirs["checkpoint"][key])
    ] == []
    assert [key for key in ours if not same(ours[key], theirs[key])] == []


def interrupted(
    server: Server, out: Path, arguments: tuple, plan: list[tuple[int, int]], ranks: int = 1
) -> None:
    """Run with a signal after so many steps in each process, then to the end."""
    log = out.with_suffix(".log")
    for number, (steps, kind) in enumerate(plan):
        statuses = server.run(
            *arguments, "--out", out, log=log, ranks=ranks, die=f"{number % ranks}:{steps}:{int(kind)}"
        )
        expected = -kind if kind == signal.SIGKILL else 1
        assert statuses[number % ranks] == expected, log.read_text()
        assert not (out / "summary.json").exists()
        if kind != signal.SIGKILL:
            assert f"suptickets train --resume {out} goes on" in log.read_text().splitlines()[-1]
    assert server.run(*arguments, "--out", out, log=log, ranks=ranks) == [0] * ranks, log.read_text()


def plans(seed: int, every: int, count: int = 10) -> list[tuple[int, int]]:
    """Signals after random numbers of steps that leave some for the last process."""
    generator = random.Random(seed)
    kinds = [SIGNALS[i % 3] for i in range(count)]
    return [(generator.randint(2, 2 * every), kind) for kind in kinds]


@pytest.mark.parametrize("method", ["rigl", "granet"])
def test_ten_interruptions(server: Server, tmp_path: Path, method: str) -> None:
    arguments = (*RUN, "--method", method, "--checkpoint-every", 0)
    assert server.run(*arguments, "--out", tmp_path / "whole", log=tmp_path / "log") == [0]
    interrupted(server, tmp_path / "parts", arguments, plans(seed=1, every=STEPS // 22))
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_killed_between_checkpoints(server: Server, tmp_path: Path) -> None:
    """From the last checkpoint some steps are done again, and their metrics are not there twice."""
    arguments = (*RUN, "--checkpoint-every", 0.1)
    assert server.run(*arguments, "--out", tmp_path / "whole", log=tmp_path / "log") == [0]
    interrupted(server, tmp_path / "parts", arguments, [(30, signal.SIGKILL), (11, signal.SIGKILL)])
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("step", [8, 9, 32, 48])
def test_stopped_at_the_end_of_an_epoch_or_a_cycle(server: Server, tmp_path: Path, step: int) -> None:
    assert server.run(*RUN, "--out", tmp_path / "whole", log=tmp_path / "log") == [0]
    interrupted(server, tmp_path / "parts", RUN, [(step, signal.SIGTERM)])
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_killed_while_the_network_before_the_cycles_is_scored(server: Server, tmp_path: Path) -> None:
    """Its epoch is over: the line of the metrics is there."""
    assert server.run(*RUN, "--out", tmp_path / "whole", log=tmp_path / "log") == [0]
    killed = server.run(
        *RUN, "--out", tmp_path / "parts", log=tmp_path / "log", die=f"0:-32:{int(signal.SIGKILL)}"
    )
    assert killed == [-signal.SIGKILL]
    assert server.run("train", "--resume", tmp_path / "parts", log=tmp_path / "log") == [0]
    assert_same(tmp_path / "whole", tmp_path / "parts")


OPTIONS = (
    "--method snfs --explore-at end",
    "--method dsr --include-start",
    "--method snip --rule cima",
    "--method dense --rule caa",
    "--booster none",
    "--batch-norm recompute --prune-when end",
)


@pytest.mark.parametrize("options", OPTIONS)
def test_methods_and_rules(server: Server, tmp_path: Path, options: str) -> None:
    arguments = (*RUN, *options.split())
    assert server.run(*arguments, "--out", tmp_path / "whole", log=tmp_path / "log") == [0]
    interrupted(server, tmp_path / "parts", arguments, [(21, signal.SIGTERM), (20, signal.SIGINT)])
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_two_processes(server: Server, tmp_path: Path) -> None:
    arguments = (*RUN, "--checkpoint-every", 0)
    assert server.run(*arguments, "--out", tmp_path / "whole", log=tmp_path / "log", ranks=2) == [0, 0]
    interrupted(server, tmp_path / "parts", arguments, plans(seed=2, every=STEPS // 22), ranks=2)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_same_seed_same_result_other_seed_other_result(server: Server, tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert server.run(*RUN, "--seed", seed, "--out", tmp_path / name, log=tmp_path / "log") == [0]
    assert_same(tmp_path / "a", tmp_path / "b")
    a, c = contents(tmp_path / "a"), contents(tmp_path / "c")
    assert not any(same(a[key], c[key]) for key in a)


def test_other_number_of_processes_goes_on(server: Server, tmp_path: Path) -> None:
    """Not bit-identical (dropout), but nothing is lost: the epoch's samples are counted once."""
    out, log = tmp_path / "run", tmp_path / "log"
    server.run(*RUN, "--out", out, log=log, ranks=2, die=f"0:13:{int(signal.SIGTERM)}")
    assert f"torchrun --nproc-per-node 2 -m suptickets train --resume {out} goes on" in log.read_text()
    assert server.run(*RUN, "--out", out, log=log) == [0], log.read_text()
    assert "the run was one of 2 processes and goes on with 1" in log.read_text()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 9))
    assert all(0 < line["loss"] < 3 and 0 <= line["train_accuracy"] <= 1 for line in lines)


def launch(*arguments: Any, ranks: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "-m", "suptickets", *map(str, arguments)]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_as_a_user_does(server: Server, tmp_path: Path) -> None:
    """`python -m suptickets`, interrupted, and `--resume`."""
    assert server.run(*RUN, "--out", tmp_path / "whole", log=tmp_path / "log") == [0]
    stopped = launch(*RUN, "--out", tmp_path / "parts", **{DIE: f"0:30:{int(signal.SIGTERM)}"})
    assert stopped.returncode == 1 and stopped.stdout == ""
    assert stopped.stderr.splitlines()[-1].startswith("suptickets: stopped after step 30")
    resumed = launch("train", "--resume", tmp_path / "parts", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout) == json.loads((tmp_path / "parts" / "summary.json").read_text())
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_torchrun(server: Server, tmp_path: Path) -> None:
    """Two processes by torchrun, one of them killed, then again: rank 0 alone prints."""
    assert server.run(*RUN, "--out", tmp_path / "whole", log=tmp_path / "log", ranks=2) == [0, 0]
    arguments = (*RUN, "--checkpoint-every", 0, "--out", tmp_path / "parts", "--json")
    killed = launch(*arguments, ranks=2, **{DIE: f"1:25:{int(signal.SIGKILL)}"})
    assert killed.returncode != 0 and killed.stdout == ""
    done = launch(*arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"] == str(tmp_path / "parts")
    assert sum(line.startswith("epoch 8/8") for line in done.stderr.splitlines()) == 1
    assert_same(tmp_path / "whole", tmp_path / "parts")
