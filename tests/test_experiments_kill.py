"""Runners that are killed, that meet on one store, and that give their work to other processes."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from experiments_tiny import data, run

from suptickets.experiments.runner import Runner
from suptickets.experiments.store import Store
from suptickets.training.files import held
from suptickets.training.stop import Interrupted

TESTS = Path(__file__).parent
CELLS = "data=cifar10,method=rigl,method=set"
WANTED = 12  # two methods, three sparsities, with and without Sup-tickets


@pytest.fixture(scope="module")
def where(tmp_path_factory) -> Path:
    return data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def start(where, tmp_path):
    """Starts runners on the store `r`, and ends those that are left."""
    started = []

    def begin(executor="debug", jobs=1, cells=CELLS, **variables):
        paths = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}
        arguments = [str(where), str(tmp_path / "r"), executor, str(jobs), "vgg16", cells]
        command = [sys.executable, str(TESTS / "experiments_tiny.py"), *arguments]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def lines(tmp_path) -> list[str]:
    files = sorted((tmp_path / "r").glob("*.jsonl"))
    return [line for file in files for line in file.read_text().splitlines()]


def wait_for(condition, seconds=90):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def each_once(tmp_path, wanted=WANTED):
    store = Store(tmp_path / "r")
    found = Counter((str(one["cell"]), one["seed"]) for one in store.read())
    assert not store.damaged and len(found) == wanted and set(found.values()) == {1}


def finished(tmp_path) -> dict[Path, int]:
    """When each run ended that has ended."""
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "r" / "runs").glob("forked/*/summary.json")}


def test_a_killed_runner_loses_nothing_and_repeats_nothing(start, where, tmp_path):
    process = start()
    wait_for(lambda: len(lines(tmp_path)) >= 4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before, runs = lines(tmp_path), finished(tmp_path)
    assert 4 <= len(before) < WANTED
    found = run("vgg16", where, tmp_path / "r", CELLS)
    assert not found["failed"] and all(one["ours"]["runs"] == 1 for one in found["cells"])
    each_once(tmp_path)
    assert set(before) < set(lines(tmp_path))
    assert runs.items() <= finished(tmp_path).items()


def test_two_runners_on_one_store_share_the_work(start, tmp_path):
    ready = [tmp_path / "a", tmp_path / "b"]
    both = [start(READY=str(file)) for file in ready]
    wait_for(lambda: all(file.exists() for file in ready))
    for file in ready:
        file.unlink()
    output = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    each_once(tmp_path)
    done = [sum(line.endswith("left)") and ": done" in line for line in text.splitlines()) for text in output]
    assert sum(done) == WANTED // 2 and min(done) >= 1, output


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],
    ids=["SIGTERM", "SIGKILL"],
)
def test_local_processes_end_with_their_runner(start, tmp_path, number):
    """Each leaves a checkpoint, though the next by the clock is a minute away; the next runner goes on."""
    cells = "data=cifar10,method=rigl,sparsity=0.9,sparsity=0.8"
    process = start("local", 2, cells, SCALE="1")
    place = tmp_path / "r" / "runs" / "forked"
    wait_for(lambda: len(list(place.glob("*/metrics.jsonl"))) == 2)
    process.send_signal(number)
    began = time.monotonic()
    process.wait()
    wait_for(lambda: not left_behind(tmp_path), 30)
    assert time.monotonic() - began < 30
    saved = {file.parents[1].name: step_of(file) for file in place.glob("*/checkpoint/last.pt")}
    assert len(saved) == 2 and all(0 < step < 226 * STEPS for step in saved.values())
    assert not list((tmp_path / "r").glob("*.jsonl")) and process.returncode not in (0, None)
    if number == signal.SIGTERM:
        return  # what is left is the same
    again = start("local", 2, cells, SCALE="1")
    done, seen = {name: step // STEPS for name, step in saved.items()}, list[dict[str, int]]()

    def ahead():
        seen.append({name: epochs(place / name) for name in done})
        return all(seen[-1][name] > done[name] for name in done)

    wait_for(ahead)
    assert all(now[name] >= done[name] for now in seen for name in done)  # none has begun anew
    again.send_signal(signal.SIGTERM)
    assert again.wait(20) == 1 and not left_behind(tmp_path)


STEPS = 2  # of an epoch


def left_behind(tmp_path) -> list[str]:
    """Processes that were told of this folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().replace(b"\0", b" ").decode()
            found += [words] if str(tmp_path) in words and file.parent.name != str(os.getpid()) else []
    return found


def step_of(checkpoint) -> int:
    return torch.load(checkpoint, weights_only=True)["network"]["step"]


def epochs(folder) -> int:
    """Of which the run has told."""
    return len((folder / "metrics.jsonl").read_text().splitlines())


def test_who_does_not_hear_is_ended(tmp_path):
    """As in a long compilation: the process comes to no point where it could stop."""
    code = (
        "import signal, sys, time; from suptickets.experiments import work; work.GRACE = 0.5; "
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "with work.bound_to(sys.argv[1]):\n    time.sleep(1); until = time.monotonic() + 60\n"
        "    while time.monotonic() < until: time.sleep(0.1)"
    )
    with held(tmp_path / "runner.lock"):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "runner.lock")])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        assert process.poll() is None
    assert process.wait(30) == 1 and not (tmp_path / "runner.lock").exists()


def test_asked_to_stop_between_two_readings(where, tmp_path, monkeypatch):
    """What is found is stored at once, and nothing more is begun."""
    add = Store.add
    monkeypatch.setattr(Store, "add", lambda *a: (add(*a), os.kill(os.getpid(), signal.SIGTERM)))
    options = {"cells": "model=vgg16,sparsity=0.9"}
    with pytest.raises(Interrupted, match="the same command goes on"):
        run("averaging", where, tmp_path / "r", **options)
    assert len(lines(tmp_path)) == 1
    monkeypatch.setattr(Store, "add", add)
    runs = finished(tmp_path)
    run("averaging", where, tmp_path / "r", **options)
    assert len(lines(tmp_path)) == 7 and finished(tmp_path) == runs


class Dies:
    """An executor whose processes die without a word, the first so many times."""

    def __init__(self, times):
        self.times, self.paths = times, SimpleNamespace(stderr="the log")

    def submit(self, job):
        self.times -= 1
        self.job = job
        return self

    def done(self):
        return True

    def result(self):
        if self.times >= 0:
            raise RuntimeError("no result")
        return self.job()


@pytest.mark.parametrize(("times", "fails"), [(0, False), (2, False), (3, True)])
def test_a_process_that_dies_is_replaced_twice(where, tmp_path, monkeypatch, times, fails):
    monkeypatch.setattr(Runner, "_executor", lambda self: nullcontext(Dies(times)))
    found = run("vgg16", where, tmp_path / "r", "data=cifar10,method=rigl,sparsity=0.9")
    assert [one["ours"] is None for one in found["cells"]] == [fails] * 2
    assert ["its process died 3 times, see the log" in line for line in found["failed"]] == [True] * fails


# ---- Slurm ----


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A real Slurm of one node, with authentication of its own, where its programs are installed."""
    programs = [shutil.which(name) for name in ("munged", "slurmctld", "slurmd", "sbatch", "mungekey")]
    if not all(programs) or getpass.getuser() != "root":
        pytest.skip("needs root, and Slurm: apt-get install slurmctld slurmd slurm-client munge")
    place, host = Path(tempfile.mkdtemp(prefix="slurm-")), socket.gethostname().partition(".")[0]
    place.chmod(0o755)
    keys = [f"--key-file={place}/key", f"--socket={place}/munge"]
    logs = [f"--{name}={place}/munged.{name[:3]}" for name in ("log-file", "pid-file", "seed-file")]
    subprocess.run(["mungekey", "--create", f"--keyfile={place}/key"], check=True)
    known = {"place": place, "host": host, "cpus": os.cpu_count(), "ports": free_ports(2)}
    (place / "slurm.conf").write_text(CONFIGURATION.format(**known))
    monkeypatch.setenv("SLURM_CONF", str(place / "slurm.conf"))
    servers = [
        subprocess.Popen(["munged", "--foreground", "--force", *keys, *logs], stderr=subprocess.DEVNULL),
        subprocess.Popen(["slurmctld", "-D", "-c"], stderr=subprocess.DEVNULL),
        subprocess.Popen(["slurmd", "-D", "-N", host], stderr=subprocess.DEVNULL),
    ]
    try:
        wait_for(lambda: b"idle" in subprocess.run(["sinfo"], capture_output=True).stdout, 30)
        yield
    finally:
        for server in reversed(servers):
            server.terminate()
            server.wait()
        shutil.rmtree(place)


def free_ports(count) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={place}/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmdSpoolDir={place}/spool
StateSaveLocation={place}/state
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def test_slurm_does_the_same(slurm, start, tmp_path):
    process = start("slurm", 2, "data=cifar10,method=rigl,sparsity=0.9,sparsity=0.8")
    output = process.communicate(timeout=200)[1]
    assert process.returncode == 0, output
    each_once(tmp_path, 4)
    assert output.count(": done") == 2


def test_without_slurm_it_says_so(where, tmp_path, monkeypatch):
    from suptickets.errors import SparsityError

    monkeypatch.setenv("PATH", "")
    with pytest.raises(SparsityError, match="there is no Slurm here .*: use --executor local"):
        run("vgg16", where, tmp_path / "r", "data=cifar10,method=rigl,sparsity=0.9", executor="slurm")
