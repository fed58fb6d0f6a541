"""Several processes of one command: what they say, and how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from make_data import image_folder

from suptickets.cli import main
from suptickets.training import processes
from suptickets.training.folder import RunFolder
from suptickets.training.settings import resolve

TESTS = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FOLDER = "--data folder --model experiments_tiny:network --booster none --epochs 1 --batch-size 4"
OTHERS = "--workers 0 --warmup-epochs 0 --interval 2 --device cpu"


def together(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, "-m", "suptickets", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_what_only_one_process_meets_is_said_once(tmp_path: Path) -> None:
    """Whichever of the two draws the broken image; the other says that it is not the cause."""
    image_folder(tmp_path / "data", train=6, val=2)
    broken = next(path for path in sorted((tmp_path / "data").rglob("*.*")) if "train" in path.parts)
    broken.write_bytes(broken.read_bytes()[:50])
    place = ["--data-dir", tmp_path / "data", "--out", tmp_path / "run"]
    done = together("train", *FOLDER.split(), *OTHERS.split(), *place)
    said = [line for line in done.stderr.splitlines() if line.startswith("suptickets: ")]
    assert done.returncode == 1 and sum(broken.name in line for line in said) == 1
    assert all(broken.name in line or "another process has ended, or" in line for line in said)


def test_what_all_meet_is_said_once(tmp_path: Path) -> None:
    done = together("train", "--batch-size", 4, "--booster", "none", "--model", "none", "--out", tmp_path)
    assert done.returncode == 1 and done.stderr.count("suptickets: unknown model 'none'") == 1


def on_two_machines(folder: Path, *arguments: object, stop_at: str = "") -> list[tuple[int, str]]:
    """One process on each; they share no folder. Asked to stop when the first has said `stop_at`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in (0, 1):
        (folder / str(rank)).mkdir(exist_ok=True)
        nodes = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
        where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command = [sys.executable, "-m", "torch.distributed.run", *nodes, *where]
        started.append(
            subprocess.Popen(
                [*command, "-m", "suptickets", *map(str, arguments)],
                cwd=folder / str(rank),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = ""
        while stop_at and stop_at not in said:
            said += started[0].stderr.readline()  # type: ignore[union-attr]
            assert started[0].poll() is None, said
        for process in started if stop_at else ():
            process.send_signal(signal.SIGTERM)
        errors = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, err) for process, err in zip(started, errors, strict=True)]


def test_a_student_on_several_machines_learns_from_teachers_that_only_the_first_has(tmp_path: Path) -> None:
    short = ("--model", "mlp", "--epochs", 3, "--cycles", 2, "--cycle-epochs", 1, "--interval", 3)
    done = on_two_machines(tmp_path, "train", *short, "--booster", "distillation", "--out", "run")
    assert [code for code, _ in done] == [0, 0], done
    assert (tmp_path / "0" / "run" / "summary.json").exists() and not (tmp_path / "1" / "run").exists()
    summary = json.loads((tmp_path / "0" / "run" / "summary.json").read_text())
    assert summary["command"].startswith("torchrun --nnodes 2 --nproc-per-node 1 -m suptickets train ")


def test_a_run_on_several_machines_goes_on_from_what_the_first_has(tmp_path: Path) -> None:
    options = ("--model", "mlp", "--booster", "none", "--epochs", 40, "--interval", 10, "--out", "run")
    stopped = on_two_machines(tmp_path, "train", *options, stop_at="epoch 10/")
    goes_on = "torchrun --nnodes 2 --nproc-per-node 1 -m suptickets train --resume run goes on"
    assert goes_on in stopped[0][1]
    done = on_two_machines(tmp_path, "train", "--resume", "run")
    assert [code for code, _ in done] == [0, 0], done
    missing = on_two_machines(tmp_path, "train", "--resume", "none")
    assert all(code for code, _ in missing)
    assert sum(err.count("suptickets: none holds no run to resume") for _, err in missing) == 1


def test_alone_one_says_what_there_is_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.speaks("a message") and not processes.deserted(RuntimeError("closed by peer"))
    monkeypatch.setenv("RANK", "1")
    assert not processes.speaks("a message")


def test_the_place_is_the_name_of_images_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of published data it is not: they are the same wherever they are."""

    def settings(data: str, place: Path | str) -> object:
        return resolve({"data": data, "data_dir": str(place), "model": "mlp"})

    monkeypatch.chdir(tmp_path)
    one, other, same = (settings("folder", place) for place in (tmp_path / "a", tmp_path / "b", "a"))
    assert one.identity() != other.identity() and one.identity() == same.identity()
    assert one.differences(other) == [f"data_dir: {tmp_path / 'b'} -> {tmp_path / 'a'}"]
    assert not one.differences(same)
    one, other = (settings("cifar10", place) for place in (tmp_path / "a", tmp_path / "b"))
    assert one.identity() == other.identity() and not one.differences(other)


def test_images_in_folders_may_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From whichever folder the command is given, and wherever they are now, if it is said."""
    monkeypatch.syspath_prepend(TESTS)
    options = [*FOLDER.split(), *OTHERS.split()]
    for name in ("a", "b"):
        image_folder(tmp_path / name / "images", train=4, val=2)
    monkeypatch.chdir(tmp_path / "a")
    run = ["--out", str(tmp_path / "run")]
    assert main(["train", *options, "--data-dir", "images", *run]) == 0
    monkeypatch.chdir(tmp_path / "b")
    assert main(["train", *options, "--data-dir", "images", *run]) == 2  # others, of the same name
    assert main(["train", *options, "--data-dir", str(tmp_path / "a" / "images"), *run]) == 0
    (tmp_path / "a" / "images").rename(tmp_path / "moved")
    assert main(["train", "--resume", str(tmp_path / "run"), "--data-dir", str(tmp_path / "moved")]) == 0
    settings = RunFolder(tmp_path / "run").settings()
    assert settings is not None and settings.data_dir == str(tmp_path / "moved")


@pytest.mark.parametrize("done", [False, True])
def test_a_place_without_data_is_not_taken_for_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], done: bool
) -> None:
    monkeypatch.syspath_prepend(TESTS)
    image_folder(tmp_path / "images", train=4, val=2)
    command = ["train", *FOLDER.split(), *OTHERS.split(), "--data-dir", str(tmp_path / "images")]
    command += ["--out", str(tmp_path / "run")]
    assert main(command) == 0
    if not done:
        (tmp_path / "run" / "summary.json").unlink()
    before = (tmp_path / "run" / "config.json").read_bytes()
    assert main(["train", "--resume", str(tmp_path / "run"), "--data-dir", str(tmp_path / "typo")]) == 2
    assert "typo is not a folder" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert main(command) == 0


def test_a_damaged_summary_without_a_checkpoint_is_no_reason_to_train_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["train", "--model", "mlp", "--epochs", "1", "--booster", "none", "--out", str(tmp_path / "run")]
    assert main(short) == 0
    folder = RunFolder(tmp_path / "run")
    ticket = folder.ticket.read_bytes()
    folder.summary.write_text("{")
    folder.checkpoint.unlink()
    capsys.readouterr()
    assert main(short) == 2 and "start over with --force" in capsys.readouterr().err
    assert folder.ticket.read_bytes() == ticket


def test_a_gpu_for_each_process_is_asked_for_only_by_runs_that_need_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = ["--model", "mlp", "--booster", "none", "--epochs", "1"]
    assert main(["train", *short, "--device", "cpu", "--out", str(run)]) == 0
    command = [*TORCHRUN, TESTS / "one_gpu.py", "train"]
    for arguments, status, said in (
        (["--resume", run], 0, f"{run} is done already"),
        ([*short, "--device", "cuda"], 1, "there is no device cuda number 1 here (1 GPUs)"),
    ):
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == status and done.stderr.count(said) == 1, done.stderr
