"""Several runs at a time, and data that do not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from suptickets.cli import main
from suptickets.data import load_data
from suptickets.data.base import ArrayData
from suptickets.errors import TrainingError
from suptickets.training import jobs, train
from suptickets.training.processes import Processes
from suptickets.training.settings import resolve
from suptickets.training.stop import Interrupted

SHORT = ["--model", "mlp", "--epochs", "4", "--cycles", "1", "--cycle-epochs", "1", "--interval", "5"]
MESSAGES = SimpleNamespace(join=lambda: None)
HERE = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_seeds_at_a_time_are_the_same_as_one_after_another(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = ["train", *SHORT, "--seeds", "3", "--json"]
    results = {}
    for number in ("1", "2"):
        assert main([*given, "--jobs", number, "--out", str(tmp_path / number)]) == 0
        output = capsys.readouterr()
        results[number] = json.loads(output.out)
    scores = [[run[key] for run in r["runs"] for key in ("accuracy", "nll")] for r in results.values()]
    assert scores[0] == scores[1]
    assert results["1"]["mean"] == results["2"]["mean"]
    assert all(f"seed {n}: " in output.err for n in (1, 2, 3))
    assert "is done already" not in output.err


def test_one_that_fails_does_not_stop_the_others(capfd) -> None:
    commands = {name: ["list", name] for name in ("methods", "nonsense", "models")}
    with pytest.raises(TrainingError, match="1 of 3 runs failed: nonsense"):
        jobs.run_together(commands, 2)
    assert capfd.readouterr().err.startswith("nonsense: suptickets: unknown kind 'nonsense'")


def test_no_more_than_so_many_at_a_time(monkeypatch) -> None:
    running, most = set(), []

    def start(name, arguments, environment):
        running.add(name)
        most.append(len(running))
        left = iter(range(3))

        def poll() -> int | None:
            if next(left, None) is not None:
                return None
            running.discard(name)
            return 0

        return SimpleNamespace(poll=poll, returncode=0, send_signal=None), MESSAGES

    monkeypatch.setattr(jobs, "_start", start)
    jobs.run_together({str(n): [] for n in range(7)}, 3)
    assert len(most) == 7 and max(most) == 3


@pytest.mark.parametrize(
    ("given", "seen"), [(None, ["0", "1", "0"]), ("GPU-a,3,-1,5", ["GPU-a", "3", "GPU-a"])]
)
def test_runs_share_the_machine(monkeypatch, given: str | None, seen: list[str]) -> None:
    """Each has its share of the cores, and the GPUs in turn; also where cores are not told (macOS)."""
    told: list[dict[str, str]] = []

    def start(name, arguments, environment):
        told.append(environment)
        return SimpleNamespace(poll=lambda: 0 if len(told) == 3 else None, returncode=0), MESSAGES

    monkeypatch.setattr(jobs, "_start", start)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(jobs, "shared_gpu", lambda: nullcontext({"MPS": "here"}))
    for name, value in (("CUDA_VISIBLE_DEVICES", given), ("OMP_NUM_THREADS", None)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    jobs.run_together(dict.fromkeys("abc", ()), 3, "auto")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in told] == seen
    assert all((one["MPS"], one["OMP_NUM_THREADS"]) == ("here", "2") for one in told)
    told.clear()
    jobs.run_together(dict.fromkeys("abc", ()), 3, "cuda:1")
    assert told == [{"MPS": "here", "OMP_NUM_THREADS": "2"}] * 3
    told.clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    jobs.run_together(dict.fromkeys("abc", ()), 4)
    assert told == [{}, {}, {}]


def test_a_request_to_stop_reaches_all_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "suptickets", "train", *SHORT, "--epochs", "400", "--json"]
    command += ["--seeds", "2", "--jobs", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(command, env=HERE, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folders = [tmp_path / f"seed{n}" for n in (1, 2)]
    deadline = time.monotonic() + 60
    while not all((f / "metrics.jsonl").exists() for f in folders) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 1 and messages.strip().splitlines()[-1].endswith("the same command goes on")
    assert all((f / "checkpoint" / "last.pt").exists() and not (f / "summary.json").exists() for f in folders)


def test_stopped_runs_are_told_once(monkeypatch) -> None:
    told: list[int] = []
    process = SimpleNamespace(
        poll=lambda: 1 if told else None, returncode=1, terminate=lambda: told.append(15)
    )

    def start(*_: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return process, MESSAGES

    monkeypatch.setattr(jobs, "_start", start)
    with pytest.raises(Interrupted):
        jobs.run_together({"a": [], "b": []}, 1)
    assert told == [signal.SIGTERM]


@pytest.mark.parametrize(("works", "there"), [(True, True), (False, True), (True, False)])
def test_a_shared_gpu(monkeypatch, tmp_path: Path, works: bool, there: bool) -> None:
    """MPS is started in a folder of its own, and ended; where it is not there or fails, nothing is set.

    All devices are visible to it: those that are chosen are for the runs to see.
    """
    calls = tmp_path / "calls"
    note = f'echo "$1 $CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES $(cat </dev/stdin)" >> {calls}'
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "hidden")
    monkeypatch.setattr(jobs, "PROBE", "")
    script = f"#!/bin/sh\n{note}\nexit {int(not works)}\n"
    control = tmp_path / "bin" / jobs.CONTROL
    control.parent.mkdir()
    control.write_text(script)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", (f"{control.parent}:" if there else "") + "/usr/bin:/bin")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with jobs.shared_gpu() as environment:
        assert bool(environment) == (works and there)
        if environment:
            assert Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    lines = calls.read_text().splitlines() if calls.exists() else []
    assert len(lines) == (0 if not there else 2 if works else 1)
    assert not works or not there or lines[1].endswith("quit")
    assert not any("hidden" in line for line in lines)


@pytest.mark.parametrize(("probe", "reached"), [("", True), ("import sys; sys.exit(1)", False)])
def test_a_server_that_cannot_be_reached(monkeypatch, probe: str, reached: bool) -> None:
    monkeypatch.setattr(jobs, "PROBE", probe)
    assert jobs._reached({"CUDA_MPS_PIPE_DIRECTORY": "nowhere"}) is reached


def test_data_that_do_not_fit_stay_where_they_are_and_that_is_said(monkeypatch) -> None:
    data = load_data("digits")
    assert isinstance(data, ArrayData)
    size = data.train_x.nbytes + data.test_x.nbytes
    gpu, said = torch.device("cuda", 0), []
    for free, expected in ((2 * size, True), (2 * size - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        assert train.fits(data, gpu) is expected
    progress = SimpleNamespace(say=said.append)
    found = train._data(resolve({}), Processes(0, 1, gpu), progress)  # type: ignore[arg-type]
    assert isinstance(found, ArrayData) and found.train_x.device.type == "cpu"
    assert said == ["digits does not fit into the GPU's memory: batches are sent to it"]
    assert train.fits(data, torch.device("cpu"))


@pytest.mark.parametrize("number", ["0", "-2"])
def test_jobs_are_at_least_one(capsys, number: str) -> None:
    assert main(["train", "--seeds", "2", "--jobs", number]) == 2
    assert capsys.readouterr().err == f"suptickets: --jobs must be at least 1, not {number}\n"


def test_one_run_of_several_processes_or_several_runs(monkeypatch, tmp_path: Path, capsys) -> None:
    """Under torchrun the processes share each run, and there is one at a time."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        main(["train", "--data", "digits", *SHORT, "--seeds", "2", "--jobs", "2", "--out", str(tmp_path)])
        == 2
    )
    assert "2 processes train one run together" in capsys.readouterr().err
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run = {"accuracy": 1, "nll": 1, "ece": 1}
    monkeypatch.setattr(train, "_at_a_time", lambda *_, **__: asked.append("several") or [run, run])
    monkeypatch.setattr(train, "train", lambda *_, **__: run)
    monkeypatch.setattr(train, "connect", lambda _: Processes(0, 1, torch.device("cpu")))
    train.train_seeds(resolve({"data": "digits"}), 2, tmp_path)
    assert not asked
    monkeypatch.delenv("WORLD_SIZE")
    train.train_seeds(resolve({"data": "digits"}), 2, tmp_path)
    assert asked == ["several"]
