"""Runs that are disturbed: signals to all their processes, folders that others use, damaged data, disks."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from make_data import image_folder

import suptickets.training.folder as folders
from suptickets.cli import main
from suptickets.data.pickles import read_pickle
from suptickets.errors import SparsityError, TrainingError
from suptickets.training.files import write
from suptickets.training.folder import RunFolder
from suptickets.training.loop import Trainer
from suptickets.training.settings import resolve
from suptickets.training.stop import asked_to_stop

SHORT = ("train", "--model", "mlp", "--epochs", "2", "--batch-size", "500", "--booster", "none")
IMAGES = ("train", "--data", "folder", "--model", "lenet5", "--recipe", "digits", "--cycle-epochs", "1")


def started(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "suptickets", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def test_a_signal_to_all_processes_of_a_run_leaves_a_checkpoint(tmp_path: Path) -> None:
    """`timeout` and schedulers send it to the group: workers that read images get it too."""
    data = image_folder(tmp_path / "images", train=8)
    run = tmp_path / "run"
    process = started(
        *IMAGES, "--data-dir", data, "--epochs", 500, "--batch-size", 8, "--workers", 2, "--out", run
    )
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err
    assert f"suptickets train --resume {run} goes on" in err
    assert (run / "checkpoint" / "last.pt").exists()


def test_a_damaged_test_image_costs_no_training(tmp_path: Path, capsys) -> None:
    data = image_folder(tmp_path / "images", train=8)
    broken = next((data / "val").rglob("*.*"))
    good = broken.read_bytes()
    broken.write_bytes(good[: len(good) // 2])
    command = [
        *IMAGES,
        "--data-dir",
        data,
        "--epochs",
        5,
        "--batch-size",
        4,
        "--cycles",
        2,
        "--workers",
        0,
        "--out",
        tmp_path / "run",
    ]
    assert main([*map(str, command)]) == 2
    assert f"{broken} cannot be read" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoint" / "last.pt").exists()
    broken.write_bytes(good)
    assert main([*map(str, command), "--json"]) == 0
    found, err = capsys.readouterr()
    assert json.loads(found)["start"] is not None and "epoch 1/" not in err  # it went on


# ---- who stops, and who is told ----


def test_all_who_look_see_the_same_signal() -> None:
    before = signal.getsignal(signal.SIGINT)
    with asked_to_stop() as outer:
        with asked_to_stop() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        with asked_to_stop() as later:
            assert [*outer] == [*inner] == [*later] == [signal.SIGTERM]
    with asked_to_stop() as new:
        assert not new
    assert signal.getsignal(signal.SIGINT) is before


def test_a_request_to_stop_while_a_seed_is_scored_stops_before_the_next(
    tmp_path, capsys, monkeypatch
) -> None:
    finish = Trainer._finish

    def stopped(*arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return finish(*arguments)

    monkeypatch.setattr(Trainer, "_finish", stopped)
    command = [*SHORT, "--seeds", "3", "--out", str(tmp_path)]
    assert main(command) == 1
    assert "suptickets: stopped before seed 2: the same command goes on\n" in capsys.readouterr().err
    assert [(tmp_path / f"seed{n}" / "summary.json").exists() for n in (1, 2, 3)] == [True, False, False]
    monkeypatch.undo()
    assert main(command) == 0


def test_a_request_to_stop_while_the_teachers_are_scored_stops_before_the_student(
    tmp_path, capsys, monkeypatch
) -> None:
    finish = Trainer._finish

    def stopped(*arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return finish(*arguments)

    monkeypatch.setattr(Trainer, "_finish", stopped)
    short = ("--epochs", "3", "--cycles", "2", "--cycle-epochs", "1", "--interval", "3")
    command = ["train", "--model", "mlp", *short, "--booster", "distillation", "--out", str(tmp_path)]
    assert main(command) == 1
    err = capsys.readouterr().err
    assert f"stopped when the teachers were trained: suptickets train --resume {tmp_path} goes on\n" in err
    assert (tmp_path / "teachers" / "summary.json").exists() and not (tmp_path / "summary.json").exists()
    monkeypatch.undo()
    assert main(["train", "--resume", str(tmp_path)]) == 0


def test_a_request_to_stop_before_the_training_ends_it_in_a_line(tmp_path, monkeypatch) -> None:
    slow = "import time\ndef net(classes):\n    print('here')\n    time.sleep(60)\n"
    (tmp_path / "slow.py").write_text(slow)
    monkeypatch.chdir(tmp_path)
    process = started("train", "--model", "slow:net", "--out", tmp_path / "run", "--json")
    while process.stderr.readline() != "here\n":
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (1, "", "suptickets: stopped\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_model_that_takes_long_to_build_can_be_interrupted(tmp_path, monkeypatch, number, seeds) -> None:
    slow = "import time\ndef net(classes):\n    print('here')\n    time.sleep(60)\n"
    (tmp_path / "slow.py").write_text(slow)
    monkeypatch.chdir(tmp_path)
    options = ("--seeds", seeds, "--jobs", 1, "--out", tmp_path / "run", "--json")
    process = started("train", "--model", "slow:net", *options)
    while process.stderr.readline() != "here\n":
        assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (1, "", "suptickets: stopped\n")


def test_an_interrupt_that_a_library_takes_for_its_own_error_is_one(tmp_path) -> None:
    code = "import os, signal\nfrom suptickets import cli\nfrom suptickets.errors import SparsityError\n"
    code += "def fail(kind):\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n        signal.pause()\n"
    code += "    except KeyboardInterrupt:\n        raise SparsityError('a damaged file') from None\n"
    code += "cli.COMMANDS['list'] = fail\ncli.program()\n"
    process = subprocess.run([sys.executable, "-c", code, "list", "models"], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (1, "suptickets: stopped\n")


@pytest.mark.parametrize(("rank", "told"), [("0", "suptickets: look\n"), ("1", "")])
def test_the_first_process_alone_gives_warnings(rank: str, told: str) -> None:
    code = "import warnings\nfrom suptickets import cli\n"
    code += "cli.main = lambda: warnings.warn('look', RuntimeWarning) or 0\ncli.program()\n"
    environment = {**os.environ, "RANK": rank}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, told)


# ---- folders ----


def test_a_folder_is_one_process_at_a_time(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(folders, "PATIENCE", 0.3)
    command = [*SHORT, "--out", str(tmp_path / "run")]
    code = (
        "import sys\nfrom suptickets.training.folder import RunFolder\nwith RunFolder(sys.argv[1]).held():\n"
    )
    code += "    print('held', flush=True)\n    input()\n"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "held\n"
    assert main(command) == 2
    told = f"suptickets: another process trains in {tmp_path / 'run'}: wait, or choose another --out\n"
    assert capsys.readouterr().err == told
    other.kill()  # and the folder is free
    other.wait()
    assert main(command) == 0


def test_a_place_that_cannot_be_written_is_told_in_a_line(tmp_path: Path, monkeypatch) -> None:
    """A read-only file system refuses to remove what is not there, too."""

    def refuses(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuses)
    with pytest.raises(TrainingError, match="Read-only file system"):
        write(tmp_path / "a", refuses)
    with pytest.raises(SparsityError, match="cannot start over in .*: Read-only file system"):
        RunFolder(tmp_path / "run").begin(None, force=True)


def test_torchs_own_words_do_not_hide_a_full_disk(tmp_path: Path, monkeypatch) -> None:
    def full(state: object, file: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr("torch.save", full)
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(TrainingError, match="No space left on device"):
        RunFolder(tmp_path).save_checkpoint({}, resolve({}))


# ---- files of other versions ----


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_cifar_saved_again_by_this_python_is_read(tmp_path: Path, protocol: int) -> None:
    content = {b"data": np.arange(24, dtype=np.uint8).reshape(2, 12), b"labels": [1, 2], b"name": b"\xe9\x00"}
    (tmp_path / "batch").write_bytes(pickle.dumps(content, protocol))
    found = read_pickle(tmp_path / "batch")
    assert np.array_equal(found["data"], content[b"data"]) and found["labels"] == [1, 2]


def test_bytes_in_another_encoding_are_refused(tmp_path: Path) -> None:
    harmful = b"c_codecs\nencode\n(Vabc\nVrot13\ntR."
    (tmp_path / "batch").write_bytes(harmful)
    with pytest.raises(SparsityError, match="holds bytes as 'rot13'"):
        read_pickle(tmp_path / "batch")


# ---- what was asked for ----


def test_cells_given_twice_both_count(capsys, tmp_path: Path) -> None:
    def runs(*cells: str) -> int:
        assert main([*f"reproduce vgg16 --seeds 1 --dry-run --json --out {tmp_path}".split(), *cells]) == 0
        return json.loads(capsys.readouterr().out)["runs"]

    twice = runs("--cells", "method=set", "--cells", "sparsity=0.95")
    assert twice == runs("--cells", "method=set,sparsity=0.95") < runs("--cells", "sparsity=0.95")


def test_a_rate_that_dsr_would_not_use_is_refused(capsys, tmp_path: Path) -> None:
    command = [*SHORT, "--method", "dsr", "--out", str(tmp_path / "run")]
    assert main([*command, "--rate", "0.3"]) == 2
    assert "--rate does nothing, for --method dsr adapts how much it prunes" in capsys.readouterr().err
    assert main([*command, "--json"]) == 0
    assert "--rate" not in json.loads(capsys.readouterr().out)["command"]


def test_the_live_line_of_several_processes_is_as_that_of_one() -> None:
    """Each has seen its share of the samples."""
    one = SimpleNamespace(meter=SimpleNamespace(values=lambda: torch.tensor([6.0, 4.0, 3.0])))
    one.processes = SimpleNamespace(world=2)
    assert Trainer._so_far(one)[:2].tolist() == [12.0, 8.0]


def test_data_that_have_changed_since_the_checkpoint_are_refused(tmp_path: Path, capsys) -> None:
    """Their order, the length of an epoch and the labels would be others."""
    command = (*SHORT, "--out", str(tmp_path))
    assert main([*command]) == 0
    folder = RunFolder(tmp_path)
    state = folder.load_checkpoint()
    assert state is not None and state["data"] == [1437, 360, 10]
    folder.summary.unlink()
    folder.save_checkpoint({**state, "data": [36, 9, 10]}, resolve({"data": "digits"}))
    capsys.readouterr()
    assert main([*command]) == 2
    said = "36 and 9 images in 10 classes -> 1437 and 360 images in 10 classes"
    assert said in capsys.readouterr().err


def test_nobody_reads_the_progress_any_more(tmp_path: Path) -> None:
    """As with `2>&1 | head`: the run goes on."""
    process = started(*SHORT, "--out", tmp_path)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait() == 0 and (tmp_path / "summary.json").exists()


def test_what_is_no_plain_file_is_not_replaced(tmp_path: Path) -> None:
    """Root could put a file in the place of /dev/null."""
    os.mkfifo(tmp_path / "device")
    with pytest.raises(SparsityError, match="it is no plain file"):
        write(tmp_path / "device", lambda path: path.write_text("new"))
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to("there")
    write(tmp_path / "link", lambda path: path.write_text("new"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "new"
    assert not (tmp_path / "device").is_file()


def test_the_output_is_not_replaced(tmp_path: Path) -> None:
    """As with `--out /dev/stdout > FILE`."""
    code = "import sys; from pathlib import Path; from suptickets.training.files import write; "
    code += "write(Path('/dev/stdout'), lambda path: path.write_text('new'))"
    with open(tmp_path / "file", "w") as file:
        done = subprocess.run([sys.executable, "-c", code], stdout=file, stderr=subprocess.PIPE, text=True)
    assert "it is no plain file" in done.stderr and (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("finished", [True, False])
def test_a_config_that_was_edited_is_not_believed(tmp_path: Path, capsys, finished: bool) -> None:
    """The network, or the checkpoint, knows what it was trained with."""
    command = (*SHORT, "--out", str(tmp_path))
    assert main([*command]) == 0
    folder = RunFolder(tmp_path)
    if not finished:
        folder.summary.unlink()
        folder.ticket.unlink()
    config = json.loads(folder.config.read_text())
    folder.config.write_text(json.dumps({**config, "sparsity": 0.5, "lr": 0.01}))
    capsys.readouterr()
    assert main(["train", "--resume", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "sparsity: 0.9 -> 0.5" in said and "lr: 0.1 -> 0.01" in said
    folder.config.write_text(json.dumps(config))
    assert main(["train", "--resume", str(tmp_path)]) == 0
