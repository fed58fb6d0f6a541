"""The command line: its surface (`schema.json`), help, lists, progress on a terminal or not, loggers."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import types
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from surface import SCHEMA, check

import suptickets as st
from suptickets import cli
from suptickets.training.progress import Progress, clock
from suptickets.training.settings import Settings, recipes, resolve

SHORT = ("train", "--epochs", "2", "--booster", "none", "--batch-size", "500")
COMMANDS = ("train", "evaluate", "export", "list", "flops", "report", "reproduce", "bench")


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch) -> None:
    """A page takes longer than such a training."""
    monkeypatch.setattr(cli, "write_run_page", lambda run: None)


def output(capsys, *arguments: Any) -> Any:
    assert cli.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- the surface changes only on purpose: with schema.json ----


def test_outputs(capsys, tmp_path: Path) -> None:
    boosted = ("train", "--epochs", 3, "--cycles", 2, "--cycle-epochs", 1, "--batch-size", 500)
    check(output(capsys, *boosted, "--out", tmp_path / "a"), SCHEMA["outputs"]["train"])
    check(output(capsys, *SHORT, "--out", tmp_path / "b"), SCHEMA["outputs"]["train"])
    check(output(capsys, *SHORT, "--seeds", 2, "--out", tmp_path / "c"), SCHEMA["outputs"]["train --seeds"])
    check(output(capsys, "evaluate", tmp_path / "a"), SCHEMA["outputs"]["evaluate"])
    several = output(capsys, "evaluate", tmp_path / "a", tmp_path / "b")
    check(several, SCHEMA["outputs"]["evaluate PATH PATH"])
    check(output(capsys, "export", tmp_path / "a"), SCHEMA["outputs"]["export"])
    check(output(capsys, "report", tmp_path / "a", "--format", "md"), SCHEMA["outputs"]["report"])
    check(output(capsys, "flops", "--model", "vgg-small"), SCHEMA["outputs"]["flops"])
    measured = output(capsys, "bench", "explore", "--model", "mlp", "--device", "cpu", "--rounds", 1)
    check(measured, SCHEMA["outputs"]["bench"])
    assert SCHEMA["outputs"]["list"]["properties"].keys() == cli.LISTS.keys()
    for kind in cli.LISTS:
        listed = output(capsys, "list", kind)
        check(listed, SCHEMA["outputs"]["list"])
        assert len(listed[kind]) > 1


def test_the_validator_refuses() -> None:
    for value in ({}, {"accuracy": 2, "nll": 1, "ece": 0}, {"accuracy": "1", "nll": 1, "ece": 0}):
        with pytest.raises(AssertionError):
            check(value, {"$ref": "#/$defs/scores"})


def test_flags() -> None:
    commands = next(action for action in cli.parser()._actions if action.dest == "command").choices
    assert set(commands) == set(COMMANDS) == SCHEMA["flags"].keys()
    for name, command in commands.items():
        flags = sorted(s for action in command._actions for s in action.option_strings if s.startswith("--"))
        assert flags == SCHEMA["flags"][name]
    assert {f"--{name.replace('_', '-')}" for name in inspect.get_annotations(Settings)} < set(
        SCHEMA["flags"]["train"]
    )


@pytest.mark.parametrize("name", SCHEMA["python"])
def test_signatures(name: str) -> None:
    assert str(inspect.signature(getattr(st, name))).replace("'", "") == SCHEMA["python"][name]


def test_all_of_the_python_surface_is_listed() -> None:
    assert {*SCHEMA["python"], "Method", "SparseNetwork", "SparsityError"} == set(st.__all__)


# ---- help, lists, tables ----


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help(capsys, command: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and out.startswith(" ".join(("usage: suptickets", *command)))
    flags = SCHEMA["flags"][command[0]] if command else COMMANDS
    assert all(flag in out for flag in flags)


def test_python_m_and_the_script(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("suptickets")
    for command in ([sys.executable, "-m", "suptickets"], [str(script)]):
        done = subprocess.run([*command, "list", "boosters"], capture_output=True, text=True)
        assert done.returncode == 0 and "sup-tickets" in done.stdout


def test_names_are_printed_as_they_are(capsys, tmp_path: Path) -> None:
    folder = tmp_path / "[red]run:smile:"
    assert cli.main([*SHORT, "--out", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"everything is in {folder}"
    assert cli.main(["evaluate", str(folder), str(folder)]) == 0
    assert f"2  {folder}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["list methods", "list models --json", "flops --model mlp", "list --help"]
)
def test_nobody_reads_on(command: str) -> None:
    """As with `| head`: no traceback, and what was asked for was done."""
    arguments = [sys.executable, "-m", "suptickets", *command.split()]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0


def test_a_message_of_several_lines_is_one(capsys, monkeypatch) -> None:
    def broken(kind: str) -> Any:
        raise st.SparsityError("this\nand that")

    monkeypatch.setitem(cli.COMMANDS, "list", broken)
    assert cli.main(["list", "data"]) == 2
    assert capsys.readouterr().err == "suptickets: this and that\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_without_room_is_told_in_one_line() -> None:
    command = [sys.executable, "-m", "suptickets", "list", "boosters"]
    for options in ([], ["--json"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([*command, *options], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1
        assert done.stderr.splitlines() == ["suptickets: cannot write the output: No space left on device"]
    closed = subprocess.run(["sh", "-c", f"{shlex.join(command)} >&-"], stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_tables_in_a_pipe_are_not_folded(capsys) -> None:
    assert cli.main(["flops", "--model", "resnet50-imagenet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("layer")]) == 52
    assert not any(line.startswith(" ") for line in lines)


@pytest.mark.parametrize("kind", cli.LISTS)
def test_lists_for_people(capsys, kind: str) -> None:
    assert cli.main(["list", kind]) == 0
    out, names = capsys.readouterr().out, [entry["name"] for entry in output(capsys, "list", kind)[kind]]
    assert all(any(line.startswith(name) for line in out.splitlines()) for name in names)


def test_names_of_the_design(capsys) -> None:
    listed = {kind: [e["name"] for e in output(capsys, "list", kind)[kind]] for kind in cli.LISTS}
    assert " ".join(listed["methods"]) == "dense small-dense static snip set rigl granet gmp snfs dsr"
    assert {"vgg16", "resnet50", "wrn28-10", "resnet50-imagenet"} <= set(listed["models"])
    assert " ".join(listed["data"]) == "digits fashion-mnist cifar10 cifar100 imagenet folder"
    recipes = "digits earlier-cifar paper-cifar paper-imagenet published-cifar"
    assert " ".join(listed["recipes"]) == recipes
    boosters = "none sup-tickets swa ensemble distillation free-tickets tree-net batch-ensemble"
    assert " ".join(listed["boosters"]) == boosters
    assert len(listed["experiments"]) == 21 + 1 and "vgg16" in listed["experiments"]


def test_flops_for_people(capsys) -> None:
    assert cli.main(["flops", "--model", "vgg-small", "--sparsity", "0.9"]) == 0
    out = capsys.readouterr().out
    assert "forward_flops_dense" in out and "conv" in out


def test_flops_of_the_literature(capsys) -> None:
    """ResNet-50 on ImageNet, ERK: the notes on the paper have 0.242 at 90 %."""
    counted = output(capsys, "flops", "--model", "resnet50-imagenet", "--sparsity", 0.9)
    assert (counted["parameters"], counted["forward_flops_dense"]) == (25_502_912, 8_178_368_512)
    assert round(counted["ratio"], 3) == 0.242


def test_recipes_name_every_hyper_parameter() -> None:
    required = {field.name for field in fields(Settings) if field.default is MISSING}
    for name, recipe in recipes().items():
        assert recipe.keys() == {"summary", *required}, name
        resolve({"recipe": name})


@pytest.mark.parametrize("seeds", [1, 2])
def test_an_average_that_is_worse_is_said_beside_the_json(capsys, tmp_path: Path, monkeypatch, seeds) -> None:
    monkeypatch.setattr(cli, "verdict", lambda *_: "it is worse")
    arguments = ("train", "--model", "mlp", "--epochs", 3, "--cycles", 2, "--cycle-epochs", 1, "--json")
    options = ("--batch-size", 500, "--seeds", seeds, "--out", tmp_path)
    assert cli.main([*map(str, (*arguments, *options))]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    said = [line for line in err.splitlines() if "worse" in line]
    several = [f"{tmp_path / f'seed{n}'}: it is worse" for n in (1, 2)]
    assert said == (several if seeds > 1 else ["it is worse"])


def test_table_at_the_end(capsys, tmp_path: Path) -> None:
    arguments = ("train", "--epochs", 3, "--cycles", 2, "--cycle-epochs", 1, "--batch-size", 500)
    assert cli.main([*map(str, arguments), "--out", str(tmp_path)]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert rows[1:5] == ["before the cycles", "ticket 1", "ticket 2", "superposed"]
    assert rows[5].endswith("% of the possible connections have lived")
    assert rows[6] == f"everything is in {tmp_path}"


TABLES = {
    "swa --method dense": ["before pruning", "before the cycles", "cycle 1", "cycle 2", "average"],
    "swa --method static": ["before the cycles", "cycle 1", "cycle 2", "average"],
    "tree-net --method dense": ["head 1", "head 2", "head 3", "together"],
    "batch-ensemble --method dense --members 2": ["member 1", "member 2", "together"],
    "ensemble": ["before the cycles", "ticket 1", "ticket 2", "superposed", "ensemble"],
    "none": ["final network"],
}


@pytest.mark.parametrize("booster", TABLES)
def test_the_table_names_the_parts_as_the_booster_does(capsys, tmp_path: Path, booster: str) -> None:
    arguments = ("train", "--model", "mlp", "--epochs", 3, "--cycles", 2, "--cycle-epochs", 1)
    flags = ("--batch-size", 500, "--booster", *booster.split(), "--out", tmp_path)
    assert cli.main([*map(str, (*arguments, *flags))]) == 0
    _, *rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert rows[: len(TABLES[booster])] == TABLES[booster]
    assert rows[len(TABLES[booster])].endswith("have lived")


# ---- reports ----


def test_train_writes_the_page_of_its_run(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.undo()  # of what keeps other tests from it
    output(capsys, *SHORT, "--seeds", 2, "--out", tmp_path)
    pages = [tmp_path / f"seed{seed}" / "report.html" for seed in (1, 2)]
    assert all("<html" in page.read_text() for page in pages)
    stamp = pages[0].stat().st_mtime_ns
    output(capsys, *SHORT, "--out", tmp_path / "seed1")  # is done already
    assert pages[0].stat().st_mtime_ns == stamp


def test_a_page_that_fails_loses_no_run(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.undo()

    def broken(paths: Any) -> None:
        raise ValueError("no ink\nand no paper")

    monkeypatch.setattr(cli, "write_report", broken)
    assert cli.main([*SHORT, "--out", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "summary.json").read_text())
    assert err.splitlines()[-1] == f"the report of {tmp_path} could not be written: no ink"


def test_report(capsys, tmp_path: Path) -> None:
    for name in "ab":
        output(capsys, *SHORT, "--out", tmp_path / name, "--seed", ord(name))
    page = output(capsys, "report", tmp_path / "a", "--out", tmp_path / "page.html")["path"]
    assert page == str(tmp_path / "page.html") and "<html" in Path(page).read_text()
    table = output(capsys, "report", tmp_path / "a", tmp_path / "b", "--format", "tex", "--out", tmp_path)
    assert "tabular" in Path(table["path"]).read_text()
    plots = output(capsys, "report", tmp_path / "a", "--format", "svg")["path"]
    assert plots == str(tmp_path / "a" / "plots") and len(list(Path(plots).glob("*.svg"))) > 3
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_evaluate_for_people(capsys, tmp_path: Path) -> None:
    for name in "ab":
        output(capsys, *SHORT, "--out", tmp_path / name, "--seed", ord(name))
    assert cli.main(["evaluate", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "accuracy" in out and "top5" in out and "conv" in out and "reliability" in out
    assert cli.main(["evaluate", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "together" in out and "disagreement" in out and "kl" in out


# ---- progress ----


def test_plain_progress(capsys, tmp_path: Path) -> None:
    assert cli.main([*SHORT, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    first, second = err.splitlines()
    assert first.startswith("epoch 1/2  normal  lr 0.1  loss ") and second.startswith("epoch 2/2  normal  ")
    assert all(word in first for word in ("accuracy ", "sparsity 90.00%", "samples/s", "0:0"))


def test_progress_on_a_terminal(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    command = [sys.executable, "-m", "suptickets", *SHORT, "--out", str(tmp_path), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    while True:
        try:
            seen += os.read(master, 10_000)
        except OSError:  # the other end is closed
            break
    os.close(master)
    out = process.communicate()[0]
    assert process.returncode == 0 and json.loads(out)["epochs"] == 2
    assert b"\x1b[2K" in seen  # a line that is written over
    assert b"epoch 2/2  normal" in re.sub(rb"\x1b\[[0-9;]*m", b"", seen)


def test_what_is_not_read_yet_is_left_out(capsys) -> None:
    line = {"epoch": 1, "part": 0.5, "phase": "normal", "lr": 0.1, "sparsity": 0.9, "samples": 10}
    with Progress(1) as progress:
        progress.show(**line)
        progress.show(**line, loss=0.25, train_accuracy=0.5)
    before, after = capsys.readouterr().err.splitlines()
    assert "nan" not in before and "loss" not in before and "loss 0.2500  accuracy 50.00%" in after


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 125, 3723)] == ["0:00", "1:00", "2:05", "1:02:03"]


# ---- loggers ----


def test_tensorboard(capsys, tmp_path: Path, monkeypatch) -> None:
    logged: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, path: str) -> None:
            assert path == str(tmp_path / "tensorboard")

        def add_scalar(self, key: str, value: float, step: int) -> None:
            logged.append((key, value, step))

        def flush(self) -> None:
            pass

    stub = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    output(capsys, *SHORT, "--out", tmp_path, "--log", "tensorboard")
    assert [step for key, _, step in logged if key == "loss"] == [3, 6]
    assert {key for key, _, _ in logged} == {"epoch", "lr", "loss", "train_accuracy", "sparsity"}


def test_wandb(capsys, tmp_path: Path, monkeypatch) -> None:
    logged: list[int] = []
    asked: dict[str, Any] = {}

    def init(**options: Any) -> Any:
        asked.update(options)
        return types.SimpleNamespace(log=lambda line, step: logged.append(step))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    output(capsys, *SHORT, "--out", tmp_path, "--log", "wandb")
    assert logged == [3, 6] and asked["config"]["epochs"] == 2 and asked["resume"] == "allow"
    assert asked["reinit"] == "finish_previous"  # of several seeds in one process, each is a run of its own


@pytest.mark.parametrize(("kind", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_logger_that_is_not_installed(capsys, tmp_path: Path, monkeypatch, kind: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main([*SHORT, "--out", str(tmp_path / "run"), "--log", kind]) == 2
    err = capsys.readouterr().err
    assert err == f"suptickets: {kind} is not installed: pip install 'suptickets[{kind}]'\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", ["recipe: [1]", "data: [digits]", "booster: {a: 1}"])
def test_a_file_with_values_of_other_types_is_refused_in_one_line(tmp_path, capsys, given) -> None:
    (tmp_path / "c.yaml").write_text(given + "\n")
    assert cli.main(["train", "--config", str(tmp_path / "c.yaml")]) == 2
    error = capsys.readouterr().err
    assert f"{given.split(':')[0]} must be of type str" in error and error.count("\n") == 1


def test_a_warning_is_one_line(tmp_path: Path) -> None:
    options = ("--model", "mlp", "--epochs", "5", "--cycle-epochs", "1", "--interval", "500")
    command = [sys.executable, "-m", "suptickets", "train", *options, "--out", str(tmp_path / "r")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert said[0].startswith(
        "suptickets: rigl changes connections every 500 steps, and the cycles begin after"
    )
    assert not [line for line in said if "Warning" in line or "ScoredTickets" in line]
