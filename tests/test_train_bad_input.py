"""What a user can put right is said in one line, with status 2; what stops a run, with status 1."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from make_data import cifar_folder
from safetensors.torch import save_file

from suptickets import cli
from suptickets.cli import main
from suptickets.training import folder as folders

SHORT = ("train", "--epochs", 2, "--booster", "none", "--batch-size", 500)


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch) -> None:
    """A page takes longer than such a training."""
    monkeypatch.setattr(cli, "write_run_page", lambda run: None)


def fails(capsys, *arguments: Any, status: int = 2) -> str:
    """The one line that the command fails with."""
    assert main([*map(str, arguments)]) == status
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("epoch ")]
    assert out == "" and len(lines) == 1 and lines[0].startswith("suptickets: "), err
    return lines[0]


NAMES = [
    ("train --data cifra10", "'cifar10'"),
    ("train --model vgg61", "'vgg16'"),
    ("train --method rigel", "'rigl'"),
    ("train --booster sup-ticket", "'sup-tickets'"),
    ("train --recipe paper-cifer", "'paper-cifar'"),
    ("train --distribution erkk", "'erk'"),
    ("train --rule ciaa", "'cia'"),
    ("train --sparsty 0.9", "--sparsity"),
    ("train --log wandbb", "'wandb'"),
    ("evaluate --dtaa x", "--data"),
    ("trian", "'train'"),
    ("list method", "'methods'"),
    ("flops --model resnet5", "'resnet50'"),
    ("flops --distribution unifrom", "'uniform'"),
]


FLAGS = [
    ("--json evaluate x", "--json comes after the command: suptickets evaluate --json"),
    ("--out x train", "--out comes after the command: suptickets train --out"),
    ("--sparsity=0.9", "--sparsity comes after the command: suptickets COMMAND --sparsity"),
    ("train --nosuch", "unknown argument --nosuch"),
    ("train --out=", "--out is empty: name a place, or leave it out"),
    ("train --data-dir=", "--data-dir is empty"),
    ("train --lr inf", "--lr must be finite, not inf"),
    ("evaluate x --tickets y", "y comes after an option: give all paths before the options"),
    ("report x --format md y", "y comes after an option"),
    ("reproduce vgg16 --seeds 3 averaging", "averaging comes after an option"),
    ("train here", "unknown argument here"),
    ("report x --out x.tex", "x.tex is no name for html: add --format tex"),
    ("report x --out x.html --format md", "x.html is no name for md: add --format html"),
]


@pytest.mark.parametrize(("command", "said"), FLAGS)
def test_flags_in_the_wrong_place_or_of_the_wrong_kind(capsys, command: str, said: str) -> None:
    line = fails(capsys, *command.split())
    assert said in line and ("did you mean" not in line or "did you mean" in said)


@pytest.mark.parametrize(
    "command",
    [
        "train --out {}",
        "train --resume {}",
        "train --data cifar10 --data-dir {}",
        "evaluate {}",
        "export {}",
        "report {}",
        "reproduce vgg16 --data-dir {} --out here",
        "reproduce schedule --out {}",
    ],
)
def test_a_name_that_no_file_system_takes(capsys, tmp_path: Path, monkeypatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert "File name too long" in fails(capsys, *command.format("x" * 300).split())


@pytest.mark.parametrize("name", ["c", "c.txt", "c.yml"])
def test_a_config_by_another_name_is_json_or_yaml(capsys, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("sparsity: 90\n")
    assert "did you mean 0.9?" in fails(capsys, "train", "--config", tmp_path / name)
    if name != "c.yml":  # which may have no tabs
        (tmp_path / name).write_text('{\n\t"sparsity": 80\n}')
        assert "did you mean 0.8?" in fails(capsys, "train", "--config", tmp_path / name)


@pytest.mark.parametrize(("command", "nearest"), NAMES)
def test_unknown_names_suggest_the_nearest(capsys, command: str, nearest: str) -> None:
    line = fails(capsys, *command.split(), *(["x"] if command.startswith("evaluate") else []))
    assert f"did you mean {nearest}?" in line


def test_unknown_name_in_a_file(capsys, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("sparsitty: 0.9\n")
    line = fails(capsys, "train", "--config", tmp_path / "c.yaml")
    assert "there is no setting 'sparsitty': did you mean 'sparsity'?" in line


VALUES = [
    ("--sparsity 90", "did you mean 0.9?"),
    ("--sparsity 1", "below 1"),
    ("--sparsity -0.1", "at least 0"),
    ("--sparsity nan", "sparsity must be"),
    ("--sparsity many", "invalid float value: 'many'"),
    ("--epochs 6", "at least 7 epochs"),
    ("--epochs 10 --cycle-epochs 0.5 --cycles 30", "at least 16 epochs"),
    ("--epochs 0", "--epochs must be at least 1"),
    ("--batch-size 0", "--batch-size must be at least 1"),
    ("--lr -1", "--lr must be at least 0"),
    ("--lr nan", "--lr must be"),
    ("--seed 99999999999999999999999", "--seed must be below 2**63"),
    ("--cycle-epochs 0.01", "use a higher --cycle-epochs"),
    ("--booster tree-net --members 1000000000", "--members must be at most 1,000"),
    ("--lr inf", "--lr must be"),
    ("--momentum -1", "--momentum must be"),
    ("--rate 2", "--rate"),
    ("--label-smoothing 7", "--label-smoothing"),
    ("--milestones 0.5 75", "did you mean 0.75?"),
    ("--seeds 0", "--seeds must be at least 1"),
    ("--seed -1", "--seed must be at least 0"),
    ("--workers -1", "--workers must be at least 0"),
    ("--cycle-epochs 0", "cycle"),
    ("--lr-low 1", "--lr-low 1 is above --lr-high 0.05"),
    ("--epochs 5 --cycles 3 --cycle-epochs 1.66 --batch-size 500", "use at least 6 epochs"),
    ("--epochs 1 --cycles 1 --cycle-epochs 0.9 --batch-size 479", "use at least 2 epochs"),
    ("--method granet --epochs 9", "at least 15 --epochs"),
    ("--method gmp --epochs 5 --booster none", "at least 9 --epochs"),
    ("--device cuda", "use --device cpu"),
    ("--device cuda:7", "use --device cpu"),
    ("--device tpu", "use cpu, cuda or auto"),
    ("--device meta", "use cpu, cuda or auto"),
    ("--data cifar10 --data-dir /nowhere/at/all --model vgg-small", "/nowhere/at/all"),
    ("--data folder", "data directory"),
    ("--model vgg16 --method small-dense", "vgg16 needs images"),
    ("--config /nowhere.json", "cannot read /nowhere.json"),
    ("--resume /nowhere", "/nowhere holds no run"),
    ("--resume /nowhere --out here", "leave out"),
    ("--precision fp8", "unknown precision"),
    ("--out /dev/null/run", "/dev/null"),
    ("--criteria magnitude", "such as magnitude:gradient, not 'magnitude'"),
    ("--criteria magnitde:random", "did you mean 'magnitude'?"),
    ("--criteria magnitude:random magnitude:random", "one for each of the 3, not 2"),
    ("--criteria magnitude:momentum", "use the method SNFS"),
    ("--members 0", "--members must be at least 1"),
    ("--booster swa --explore-rate 0.5", "swa does not explore"),
    ("--booster tree-net --members 3 --model resnet-none", "unknown model"),
    ("--teachers here", "use --booster distillation"),
    ("--booster distillation --epochs 6", "at least 7 epochs"),
    ("--milestones-of all", "unknown milestones-of"),
    ("--batch-size 4 --epochs 1 --booster none", "the last batch of an epoch has a single sample"),
    ("--batch-size 1 --epochs 1 --booster none --method snip", "a batch has a single sample"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
@pytest.mark.parametrize(("flags", "says"), VALUES)
def test_values(capsys, tmp_path: Path, monkeypatch, flags: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in fails(capsys, "train", *flags.split())
    assert list(tmp_path.iterdir()) == []


def test_teachers(capsys, tmp_path: Path) -> None:
    student = ("train", "--booster", "distillation", "--out", tmp_path / "student", "--teachers")
    assert "there is no ticket at" in fails(capsys, *student, tmp_path / "nothing")
    assert not (tmp_path / "student").exists()
    run = trained(tmp_path, capsys)
    assert "know digits, not cifar10" in fails(
        capsys, *student, run, "--data", "cifar10", "--data-dir", cifar(tmp_path), "--model", "vgg-small"
    )


def cifar(tmp_path: Path) -> Path:
    cifar_folder(tmp_path / "cifar", size=6)
    return tmp_path / "cifar"


FILES = [
    ("c.json", "{", "no valid YAML or JSON"),
    ("c.yaml", "a: [", "no valid YAML or JSON"),
    (
        "c.yaml",
        "model: mlp\nlr: [1\nseed: 2",
        "no valid YAML or JSON: line 3 column 5: while parsing a flow sequence, expected ',' or ']'",
    ),
    ("c.json", "[1]", "must hold names and values, not list"),
    ("c.yaml", "", "must hold names and values"),
    ("c.json", '{"epochs": "many"}', "epochs must be of type int, not 'many'"),
    ("c.json", '{"epochs": 2.5}', "epochs must be of type int"),
    ("c.json", '{"epochs": true}', "epochs must be of type int"),
    ("c.json", '{"lr": null}', "lr must be of type float"),
    ("c.json", '{"include_start": 1}', "include_start must be of type bool"),
    ("c.json", '{"milestones": ["x"]}', "milestones must be of type float"),
    ("c.yaml", "data: 5", "data must be of type str"),
    ("c.yaml", "\x00\xff", "no valid YAML or JSON"),
]


@pytest.mark.parametrize(("name", "text", "says"), FILES)
def test_files(capsys, tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text, encoding="latin1")
    assert says in fails(capsys, "train", "--config", tmp_path / name)


def trained(tmp_path: Path, capsys) -> Path:
    run = tmp_path / "run"
    assert main([*map(str, SHORT), "--out", str(run)]) == 0
    capsys.readouterr()
    return run


def test_nothing_of_a_run_is_written_over(capsys, tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    cycles = ["--epochs", "3", "--cycles", "2", "--cycle-epochs", "1", "--keep-tickets"]
    assert main(["train", "--model", "mlp", "--batch-size", "500", *cycles, "--out", str(run)]) == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    own = [path for path in before if path.name != "report.html"]
    assert {"config.json", "last.pt", "ticket-1.safetensors"} <= {path.name for path in own}
    for path in own:
        assert "belongs to the run" in fails(capsys, "report", run, "--out", path)
        fails(capsys, "export", run, "--out", path)
    monkeypatch.chdir(run / "checkpoint")
    assert "belongs to the run" in fails(capsys, "report", "..", "--out", "../config.json")
    assert {path: path.read_bytes() for path in before} == before
    other = tmp_path / "elsewhere"
    other.mkdir()
    for _ in range(2):  # a name alone makes no run
        assert main(["export", str(run), "--out", str(other / "ticket.safetensors")]) == 0


def test_damaged_metrics_are_told(capsys, tmp_path: Path) -> None:
    run = trained(tmp_path, capsys)
    (run / "summary.json").unlink()
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[: len(text) // 2])
    assert main([*map(str, SHORT), "--out", str(run)]) == 0
    assert "metrics.jsonl: 1 damaged lines are dropped" in capsys.readouterr().err


def test_other_settings_in_the_folder(capsys, tmp_path: Path) -> None:
    run = trained(tmp_path, capsys)
    line = fails(capsys, *SHORT, "--out", run, "--lr", 0.2, "--seed", 3)
    assert "lr: 0.1 -> 0.2; seed: 1 -> 3" in line and "--force" in line
    assert "sparsity: 0.9 -> 0.5" in fails(capsys, "train", "--resume", run, "--sparsity", 0.5)


NULL = json.dumps({**dict.fromkeys(folders.SHOWN), **dict.fromkeys(folders.SCORES)})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run": 3}', "\xff", NULL])
def test_a_damaged_summary_is_written_again(capsys, tmp_path: Path, text: str) -> None:
    run = trained(tmp_path, capsys)
    before = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(text, encoding="latin1")
    assert main([*map(str, SHORT), "--out", str(run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert {**json.loads(out), "seconds": before["seconds"]} == before and err == ""


def test_a_network_that_is_gone_is_written_again(capsys, tmp_path: Path) -> None:
    run = trained(tmp_path, capsys)
    before = (run / "ticket.safetensors").read_bytes()
    (run / "ticket.safetensors").unlink()
    assert main([*map(str, SHORT), "--out", str(run), "--json"]) == 0
    assert (run / "ticket.safetensors").read_bytes() == before
    for file in ("ticket.safetensors", "checkpoint/last.pt"):  # for the room that they take
        (run / file).unlink()
    assert main([*map(str, SHORT), "--out", str(run), "--json"]) == 0
    assert not (run / "ticket.safetensors").exists()


@pytest.mark.parametrize(
    ("text", "says"), [("", "no valid"), ("{}", "missing, such as data"), ("[]", "names")]
)
def test_a_damaged_config(capsys, tmp_path: Path, text: str, says: str) -> None:
    run = trained(tmp_path, capsys)
    (run / "config.json").write_text(text)
    for arguments in ((*SHORT, "--out", run), ("train", "--resume", run)):
        line = fails(capsys, *arguments)
        assert says in line and "config.json" in line and "delete it" in line and "__init__" not in line
    (run / "config.json").unlink()
    line = fails(capsys, *SHORT, "--lr", 0.02, "--out", run)
    assert "holds a run with other settings (lr" in line
    assert main([*map(str, SHORT), "--out", str(run)]) == 0
    assert "is done already" in capsys.readouterr().err
    for file in ("ticket.safetensors", "summary.json"):
        (run / file).unlink()  # as if it had been stopped before its end
    line = fails(capsys, *SHORT, "--lr", 0.02, "--out", run)
    assert "holds a run with other settings (lr" in line and not (run / "config.json").exists()
    assert main([*map(str, SHORT), "--out", str(run)]) == 0
    assert (run / "config.json").exists()


def test_damaged_lines_of_metrics_are_dropped(capsys, tmp_path: Path) -> None:
    run = trained(tmp_path, capsys)
    (run / "summary.json").unlink()
    first, last = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    damaged = first.replace(b"normal", b"nor\xffal")
    (run / "metrics.jsonl").write_bytes(damaged + b"\xff\x00\n" + b'{"epoch": 1' + b"0" * 400 + b"}\n" + last)
    assert main([*map(str, SHORT), "--out", str(run)]) == 0
    assert (run / "metrics.jsonl").read_bytes() == last


class Attack:
    """Calls something when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def damage(file: Path) -> None:
    """Zeros in the place of stored values; the file is as long as it was."""
    with zipfile.ZipFile(file) as archive:
        values = archive.read(max(archive.infolist(), key=lambda entry: entry.file_size))
    zeros = values[:400] + bytes(400) + values[800:]
    file.write_bytes(file.read_bytes().replace(values, zeros))
    torch.load(file, weights_only=True)  # torch does not see it


def checkpoints(tmp_path: Path) -> dict[str, Any]:
    return {
        "empty": lambda file: file.write_bytes(b""),
        "noise": lambda file: file.write_bytes(os.urandom(3000)),
        "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        "values": damage,
        "list": lambda file: torch.save([1, 2], file),
        "partial": lambda file: torch.save({"network": {}}, file),
        "other": lambda file: torch.save(
            {**torch.load(file), "optimizer": {"state": {}, "param_groups": []}}, file
        ),
        "pickle": lambda file: file.write_bytes(pickle.dumps(Attack(tmp_path / "attacked"))),
        "attack": lambda file: torch.save({"network": Attack(tmp_path / "attacked")}, file),
    }


@pytest.mark.parametrize("kind", checkpoints(Path()))
def test_damaged_checkpoints(capsys, tmp_path: Path, kind: str) -> None:
    run = trained(tmp_path, capsys)
    (run / "summary.json").unlink()
    checkpoints(tmp_path)[kind](run / "checkpoint" / "last.pt")
    assert "--force" in fails(capsys, *SHORT, "--out", run)
    assert not (tmp_path / "attacked").exists()
    assert main([*map(str, SHORT), "--out", str(run), "--force"]) == 0


def test_what_is_no_ticket(capsys, tmp_path: Path) -> None:
    assert "there is no ticket at" in fails(capsys, "evaluate", tmp_path)
    assert "there is no ticket at" in fails(capsys, "evaluate", tmp_path / "nothing")
    (tmp_path / "a").write_bytes(b"not a ticket")
    assert "cannot read a ticket from" in fails(capsys, "evaluate", tmp_path / "a")
    (tmp_path / "b").write_bytes(pickle.dumps(Attack(tmp_path / "attacked")))
    assert "cannot read a ticket from" in fails(capsys, "evaluate", tmp_path / "b")
    save_file({"x": torch.ones(3)}, tmp_path / "c")
    assert "was not written by suptickets train" in fails(capsys, "evaluate", tmp_path / "c")
    for about in ("{", "[]", '{"settings": 3, "nonzero": 1, "parameters": 1}'):
        save_file({"x": torch.ones(3)}, tmp_path / "d", {"suptickets": about})
        fails(capsys, "evaluate", tmp_path / "d")
    assert not (tmp_path / "attacked").exists()


def test_loss_that_is_not_finite(capsys, tmp_path: Path) -> None:
    line = fails(capsys, *SHORT, "--model", "mlp", "--lr", 1e9, "--out", tmp_path / "a", status=1)
    assert "the loss is not finite at step" in line and "(epoch 1)" in line
    assert "there is no checkpoint yet" in line
    warm = ("--model", "mlp", "--lr", 1e9, "--warmup-epochs", 1e7, "--checkpoint-every", 0, "--epochs", 60)
    line = fails(capsys, *SHORT, *warm, "--momentum", 0.99, "--out", tmp_path / "b", status=1)
    saved = torch.load(tmp_path / "b" / "checkpoint" / "last.pt", weights_only=True)
    step = saved["network"]["step"]
    assert f"the loss is not finite at step {step + 1} " in line
    assert f"the checkpoint of step {step} is kept" in line
    values = [v for v in saved["network"]["model"].values() if v.is_floating_point()]
    assert all(bool(torch.isfinite(value).all()) for value in values)


@pytest.mark.parametrize("cycle", ["1", "0.5"])
def test_no_checkpoint_is_written_of_a_loss_that_is_not_finite(capsys, tmp_path: Path, cycle: str) -> None:
    """Not even before the cycles, on an epoch's end or within one."""
    options = ("--model", "mlp", "--epochs", 3, "--cycles", 2, "--cycle-epochs", cycle, "--lr", 1e9)
    line = fails(capsys, "train", *options, "--out", tmp_path, status=1)
    assert "the loss is not finite at step" in line and "there is no checkpoint yet" in line
    assert not (tmp_path / "checkpoint" / "last.pt").exists()


ENDS = ("--model", "mlp", "--epochs", 1, "--batch-size", 5000, "--lr", 1e38)  # with its first step


def test_a_last_step_that_diverges(capsys, tmp_path: Path) -> None:
    for _ in range(2):
        line = fails(capsys, *SHORT, *ENDS, "--out", tmp_path, status=1)
        assert "the NLL of the trained network is not finite: use a lower --lr" in line
        assert not (tmp_path / "summary.json").exists()


def test_a_cycle_that_diverges(capsys, tmp_path: Path) -> None:
    cycles = ("--epochs", 3, "--cycles", 2, "--cycle-epochs", 1, "--lr-low", 1e36, "--lr-high", 1e38)
    line = fails(capsys, "train", "--model", "mlp", "--batch-size", 500, *cycles, "--out", tmp_path, status=1)
    assert "after step 6 ticket 1 has NaN" in line and "use a lower --lr-high" in line


def test_full_disk(tmp_path: Path) -> None:
    """A process that may write small files only: the checkpoint does not fit, the old one is kept."""
    run, small = tmp_path / "run", 20_000
    command = [
        sys.executable,
        "-m",
        "suptickets",
        *map(str, SHORT),
        "--checkpoint-every",
        "0",
        "--out",
        str(run),
    ]
    (run / "checkpoint").mkdir(parents=True)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=limit)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert f"suptickets: cannot write {run / 'checkpoint' / 'last.pt'}" in done.stderr
    assert list((run / "checkpoint").iterdir()) == []


@pytest.mark.parametrize("writer", ["save", "save_tensors"])
def test_disk_that_fills_up_keeps_the_last_checkpoint(
    capsys, tmp_path: Path, monkeypatch, writer: str
) -> None:
    run = trained(tmp_path, capsys)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (run / "summary.json").unlink()

    def full(state: Any, file: Any, *more: Any) -> None:
        (file.write if writer == "save" else file.write_bytes)(b"half of it")
        raise OSError(28, "No space left on device")

    place = torch if writer == "save" else folders
    monkeypatch.setattr(place, writer, full)
    line = fails(capsys, *SHORT, "--out", run, status=1)
    assert "No space left on device" in line and "what was there before is unchanged" in line
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    changing = {"summary.json", "last.pt"} if writer == "save_tensors" else {"summary.json"}
    assert {p: b for p, b in before.items() if p.name not in changing}.items() <= after.items()
    assert not list(run.rglob("*.part"))
    monkeypatch.undo()
    assert main([*map(str, SHORT), "--out", str(run), "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["accuracy"]
        == json.loads(before[run / "summary.json"])["accuracy"]
    )


OWN = """
from torch import nn

def needs(a, b): return nn.Linear(a, b)
def boom(): raise RuntimeError("no such thing")
def three(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10))
def few(size): return nn.Sequential(nn.Flatten(), nn.Linear(size * size, 3))
def nothing(): return nn.Flatten()
"""


@pytest.mark.parametrize("command", ["train", "flops"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs", "own_models:needs failed: "),
        ("boom", "own_models:boom failed: no such thing"),
        ("three", "does not take images"),
        ("few", "not a logit for each class: [2, 10]"),
        ("nothing", "no parameters"),
    ],
)
def test_own_models_that_do_not_fit(capsys, tmp_path: Path, monkeypatch, command, name, message) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    options = ("--recipe", "digits", "--model", f"own_models:{name}")
    assert message in fails(capsys, command, *options, *(("--out", "run") if command == "train" else ()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", [("--size", 100_000), ("--classes", 99_999_999_999)])
def test_a_model_that_is_too_large_to_be_counted(capsys, option) -> None:
    assert "does not fit into the memory" in fails(capsys, "flops", "--model", "mlp", *option)


HEADS = """
import torch
from torch import nn

class Heads(nn.Module):
    def __init__(self, size, classes, training=tuple):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(size * size, classes))

    def forward(self, x):
        if self.training:
            return self.other(self.body(x))
        return self.body(x)

class Pair(Heads):
    def forward(self, x): return self.body(x), 1

class Two(Heads):
    def other(self, y): return y, y

class Ghosts(Heads):
    def other(self, y): return torch.cat([part - part.mean(0) for part in y.split(len(y) // 4)])

class Detached(Heads):
    def other(self, y): return y.detach()

class Any(nn.Sequential):
    def __init__(self, **known):
        super().__init__(nn.Flatten(), nn.Linear(known["size"] ** 2, known["classes"]))
"""


@pytest.mark.parametrize(("name", "message"), [("Two", "tuple"), ("Detached", "does not require")])
def test_own_models_that_are_others_in_training(capsys, tmp_path: Path, monkeypatch, name, message) -> None:
    (tmp_path / "own_heads.py").write_text(HEADS)
    monkeypatch.chdir(tmp_path)
    line = fails(capsys, *SHORT, "--model", f"own_heads:{name}", "--out", "run")
    assert "the model cannot be trained" in line and message in line and not (tmp_path / "run").exists()


def test_own_models_that_give_a_tuple(capsys, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "own_heads.py").write_text(HEADS)
    monkeypatch.chdir(tmp_path)
    line = fails(capsys, *SHORT, "--model", "own_heads:Pair", "--out", "run")
    assert "the model gives a tuple for two images of digits, not a logit for each class" in line


@pytest.mark.parametrize("name", ["Any", "Ghosts"])
def test_own_models_that_take_anything_or_large_batches_alone(tmp_path: Path, monkeypatch, name) -> None:
    (tmp_path / "own_heads.py").write_text(HEADS)
    monkeypatch.chdir(tmp_path)
    assert main([*map(str, SHORT), "--model", f"own_heads:{name}", "--out", "run"]) == 0


@pytest.mark.parametrize("command", ["train --out run", "evaluate run", "report run", "export run"])
def test_folders_that_may_not_be_read(capsys, monkeypatch, command: str) -> None:
    """Another user's. (Root may read any.)"""

    def refused(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("exists", "is_dir", "is_file"):
        monkeypatch.setattr(Path, name, refused)
    assert "Permission denied: run" in fails(capsys, *command.split())


def test_settings_in_other_encodings(tmp_path: Path) -> None:
    """UTF-8 whatever the locale is, with a byte-order mark or without."""
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "c.yaml").write_bytes(mark + "# réglages\nseed: 7\n".encode())
        code = "import sys; from suptickets.training.settings import resolve; "
        code += "print(resolve({}, sys.argv[1]).seed)"
        environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        command = [sys.executable, "-c", code, str(tmp_path / "c.yaml")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.stdout == "7\n", done.stderr


HUGE = "9" * 401


@pytest.mark.parametrize(
    "command",
    [
        "train --method gmp --prune-epochs 1e308",
        f"train --epochs {HUGE}",
        f"train --cycles {HUGE}",
        f"train --booster free-tickets --epochs {HUGE}",
        f"flops --epochs {HUGE}",
        f"flops --classes {HUGE}",
        f"reproduce vgg16 --dry-run --seeds {HUGE}",
    ],
)
def test_huge_numbers(capsys, command: str) -> None:
    assert len(fails(capsys, *command.split())) < 500


def test_settings_from_nowhere(capsys) -> None:
    """As of a variable that is not set."""
    assert "--config is empty" in fails(capsys, "train", "--config", "")


# ---- several in one folder, full disks, what an earlier run left ----


def test_a_run_that_waited_for_another_looks_again(capsys, tmp_path: Path, monkeypatch) -> None:
    """The other one had other settings, or did all that there was to do."""
    held, others = folders.RunFolder.held, ["--lr", "0.02"]

    @contextmanager
    def after_another(self: Any) -> Any:
        monkeypatch.setattr(folders.RunFolder, "held", held)
        assert main([*map(str, SHORT), "--out", str(self.path), *others]) == 0
        capsys.readouterr()
        with held(self):
            yield

    run = tmp_path / "run"
    monkeypatch.setattr(folders.RunFolder, "held", after_another)
    line = fails(capsys, *SHORT, "--out", run)
    assert "holds a run with other settings" in line
    assert json.loads((run / "config.json").read_text())["lr"] == 0.02
    monkeypatch.setattr(folders.RunFolder, "held", after_another)
    others.clear()
    assert main([*map(str, SHORT), "--out", str(tmp_path / "same"), "--json"]) == 0
    lines = (tmp_path / "same" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


def test_a_line_that_the_disk_has_no_room_for_is_not_begun(tmp_path: Path, monkeypatch) -> None:
    folder = folders.RunFolder(tmp_path)
    folder.log({"epoch": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:5]))
    with pytest.raises(folders.TrainingError, match="No space left"):
        folder.log({"epoch": 2})
    monkeypatch.undo()
    folder.log({"epoch": 3})
    assert folder.metrics.read_text() == '{"epoch": 1}\n{"epoch": 3}\n'


def test_starting_over_leaves_nothing_of_the_earlier_run(capsys, tmp_path: Path) -> None:
    run = trained(tmp_path, capsys)
    (run / "tickets").mkdir()
    for name in ("ticket.compact.safetensors", "ticket.onnx", "tickets/ticket-2.safetensors"):
        (run / name).write_bytes(b"old")
    (run / "notes.txt").write_text("mine")
    assert main([*map(str, SHORT), "--out", str(run), "--force"]) == 0
    left = {path.name for path in run.rglob("*") if path.is_file()}
    assert left >= {"ticket.safetensors", "notes.txt"} and not any(
        name in left for name in ("ticket.compact.safetensors", "ticket.onnx", "ticket-2.safetensors")
    )


@pytest.mark.parametrize(
    ("name", "value"), [("explored", None), ("start", "foo"), ("tickets", [1]), ("sparsity", "x")]
)
def test_a_summary_with_damaged_values_is_written_again(
    capsys, tmp_path: Path, name: str, value: Any
) -> None:
    run = trained(tmp_path, capsys)
    before = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**before, name: value}))
    assert main([*map(str, SHORT), "--out", str(run)]) == 0
    assert json.loads((run / "summary.json").read_text())[name] == before[name]


def test_a_damaged_network_is_written_again(capsys, tmp_path: Path) -> None:
    run = trained(tmp_path, capsys)
    before = (run / "ticket.safetensors").read_bytes()
    (run / "ticket.safetensors").write_bytes(before[:-100])
    assert main([*map(str, SHORT), "--out", str(run)]) == 0
    assert (run / "ticket.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("c.json", '{"epochs": 1, "epochs": 2}', "has epochs twice"),
        ("c.yaml", "epochs: 1\nepochs: 2\n", "has epochs twice"),
        ("c.yaml", "lr-low: 0.1\nlr_low: 0.2\n", "has lr_low twice"),
        ("c.json", '{"lr": 1' + "0" * 400 + "}", "lr is too large a number"),
    ],
)
def test_files_that_say_two_things_or_too_much(
    capsys, tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    assert says in fails(capsys, "train", "--config", tmp_path / name)


def test_a_setting_that_is_no_json_is_text(capsys, tmp_path: Path) -> None:
    line = fails(capsys, "reproduce", "vgg16", "--dry-run", "--set", f"lr={'1' * 5000}", "--out", tmp_path)
    assert "lr" in line


def test_a_file_is_not_exported_to_itself(capsys, tmp_path: Path) -> None:
    run = trained(tmp_path, capsys)
    line = fails(capsys, "export", run, "--format", "dense", "--out", run / "ticket.safetensors")
    assert "is the file to be exported: choose another --out" in line


def test_a_model_with_state_that_cannot_be_saved_is_refused_before_it_is_trained(
    capsys, tmp_path: Path, monkeypatch
) -> None:
    code = "from torch import nn\nclass Net(nn.Sequential):\n"
    code += "    def get_extra_state(self):\n        return {'n': 3}\n"
    code += "    def set_extra_state(self, state):\n        pass\n"
    code += "def net(classes):\n    return Net(nn.Flatten(), nn.Linear(64, classes))\n"
    (tmp_path / "stateful.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    line = fails(capsys, "train", "--model", "stateful:net", "--out", tmp_path / "run")
    assert "_extra_state, which is no tensor" in line and not (tmp_path / "run").exists()
