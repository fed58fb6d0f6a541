"""`suptickets train` and `evaluate`, in one process: every method, what a run leaves behind, going on."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_data import cifar_folder
from safetensors.torch import load_file
from test_resume import assert_same, contents
from torch import nn
from train_worker import Server

from suptickets import cli, data
from suptickets.bench import bench
from suptickets.cli import main
from suptickets.methods import METHODS
from suptickets.models import MODELS
from suptickets.training import build
from suptickets.training import train as training
from suptickets.training.evaluate import evaluate
from suptickets.training.price import price
from suptickets.training.settings import resolve

KEYS = [
    *("run", "data", "model", "method", "booster", "recipe", "seed", "epochs", "target_sparsity", "sparsity"),
    *("nonzero", "parameters", "accuracy", "nll", "ece", "top5", "reliability", "before_pruning", "start"),
    *("tickets", "members", "superposed", "ensemble", "diversity", "explored", "layers"),
    *("train_flops_ratio", "test_flops_ratio", "seconds", "command", "versions", "hardware"),
]
SHORT = ("--epochs", 3, "--cycles", 2, "--cycle-epochs", 1, "--prune-epochs", 1, "--interval", 2)


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch) -> None:
    """A page takes longer than such a training."""
    monkeypatch.setattr(cli, "write_run_page", lambda run: None)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cifar")
    cifar_folder(folder, size=6)
    return folder


def run(capsys, *arguments: Any) -> dict[str, Any]:
    """The JSON of a command that succeeds; stdout is that and nothing else."""
    status = main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


def small(capsys, cifar: Path, out: Path, *more: Any) -> dict[str, Any]:
    """vgg-small on 30 images: six steps, four of them in the cycles."""
    where = ("--data", "cifar10", "--data-dir", cifar, "--model", "vgg-small", "--out", out)
    return run(capsys, "train", *where, "--batch-size", 16, *SHORT, *more)


@pytest.mark.parametrize("booster", ["none", "sup-tickets"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_vgg_small(
    capsys, cifar: Path, tmp_path: Path, method: str, booster: str
) -> None:
    result = small(capsys, cifar, tmp_path / "run", "--method", method, "--booster", booster)
    assert list(result) == KEYS
    assert len(result["tickets"]) == (0 if booster == "none" else 2)
    assert (result["start"] is None) == (booster == "none")
    sparse = METHODS[method].sparse
    assert result["sparsity"] == pytest.approx(0.9 if sparse else 0, abs=1e-5)
    assert 1 - result["nonzero"] / result["parameters"] == result["sparsity"]
    assert (result["test_flops_ratio"] < 0.5) == (result["train_flops_ratio"] < 1) == (method != "dense")
    assert sum(layer["nonzero"] for layer in result["layers"]) == result["nonzero"]
    assert (result["explored"] == 1) == (not sparse or method == "gmp")
    evaluated = run(capsys, "evaluate", tmp_path / "run")
    same = ("accuracy", "nll", "ece", "sparsity", "nonzero", "top5", "reliability", "explored")
    assert {key: evaluated[key] for key in same} == {key: result[key] for key in same}
    assert evaluated["test_flops_ratio"] == pytest.approx(result["test_flops_ratio"])
    weights = load_file(tmp_path / "run" / "ticket.safetensors").values()
    exact = sum(int(weight.count_nonzero()) for weight in weights if weight.dim() > 1)
    assert evaluated["layers"] == result["layers"]
    assert exact <= result["nonzero"]  # a connection that has just grown holds 0


def test_the_ticket_has_exact_zeros(capsys, cifar: Path, tmp_path: Path) -> None:
    result = small(capsys, cifar, tmp_path / "run", "--method", "static", "--booster", "none")
    weights = [t for t in load_file(tmp_path / "run" / "ticket.safetensors").values() if t.dim() > 1]
    assert sum(int((weight != 0).sum()) for weight in weights) == result["nonzero"]
    assert sum(weight.numel() for weight in weights) == result["parameters"]


def test_evaluate_a_ticket_file_on_other_data(capsys, cifar: Path, tmp_path: Path) -> None:
    small(capsys, cifar, tmp_path / "run")
    cifar_folder(tmp_path / "other", size=9, seed=5)
    file = tmp_path / "run" / "ticket.safetensors"
    other = run(capsys, "evaluate", file, "--data-dir", tmp_path / "other", "--data", "cifar10")
    assert other["nll"] != run(capsys, "evaluate", file)["nll"]
    assert main(["evaluate", str(file), "--data", "digits"]) == 2
    assert "does not fit vgg-small on digits" in capsys.readouterr().err


def test_config_alone_reproduces_the_run(capsys, cifar: Path, tmp_path: Path) -> None:
    small(capsys, cifar, tmp_path / "a", "--method", "set", "--seed", 7, "--rule", "caa")
    run(capsys, "train", "--config", tmp_path / "a" / "config.json", "--out", tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "b")


DIGITS = ("train", "--model", "mlp", "--epochs", 2, "--booster", "none", "--batch-size", 500)


def test_yaml_and_flags_over_it(capsys, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "epochs: 2\nbooster: none\nbatch-size: 500\nweight_decay: 1e-3\nmilestones: [0.5]\nsparsity: 0.5\n"
    )
    flags = ("--sparsity", 0.8, "--out", tmp_path / "run")
    result = run(capsys, "train", "--config", tmp_path / "run.yaml", *flags)
    assert result["sparsity"] == pytest.approx(0.8, abs=1e-4)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["weight_decay"], config["milestones"], config["lr"]) == (0.001, [0.5], 0.1)


def test_again_is_done_and_force_starts_over(capsys, tmp_path: Path) -> None:
    first = run(capsys, *DIGITS, "--out", tmp_path)
    stamp = (tmp_path / "ticket.safetensors").stat().st_mtime_ns
    assert main([*map(str, DIGITS), "--out", str(tmp_path)]) == 0
    assert f"{tmp_path} is done already: --force starts over" in capsys.readouterr().err
    assert run(capsys, *DIGITS, "--out", tmp_path, "--workers", 1) == first
    assert run(capsys, "train", "--resume", tmp_path) == first
    assert (tmp_path / "ticket.safetensors").stat().st_mtime_ns == stamp
    before = contents(tmp_path)
    curves = tmp_path / "tensorboard" / "events.out.tfevents.1.host.1.0"
    curves.parent.mkdir()
    curves.touch()
    run(capsys, *DIGITS, "--out", tmp_path, "--force")
    assert not curves.exists()  # those of the new run would stand in the same plot
    assert (tmp_path / "ticket.safetensors").stat().st_mtime_ns > stamp
    assert before["metrics"] == contents(tmp_path)["metrics"]
    other = run(capsys, *DIGITS, "--out", tmp_path, "--force", "--seed", 2)
    assert other["seed"] == 2 and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_that_was_moved_is_told_where_it_is(capsys, tmp_path: Path) -> None:
    first = run(capsys, *DIGITS, "--out", tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    there = {**first, "run": str(tmp_path / "there")}
    assert run(capsys, "train", "--resume", tmp_path / "there") == there
    assert run(capsys, *DIGITS, "--out", tmp_path / "there") == there


@pytest.mark.parametrize("model", ["mlp", "train_worker:dying"])
def test_a_single_sample_is_enough_for_some(capsys, tmp_path: Path, model: str) -> None:
    """Without batch norms, or with several positions of an image for each."""
    run(capsys, *DIGITS, "--model", model, "--batch-size", 1436, "--out", tmp_path)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2, 4]


def test_the_same_settings_find_the_same_folder(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = run(capsys, *DIGITS)
    assert Path(first["run"]).parent == Path("runs")
    assert run(capsys, *DIGITS) == first
    assert run(capsys, *DIGITS, "--seed", 2)["run"] != first["run"]
    assert len(list(Path("runs").iterdir())) == 2


def test_seeds(capsys, tmp_path: Path) -> None:
    result = run(capsys, *DIGITS, "--seeds", 2, "--seed", 5, "--out", tmp_path)
    assert list(result) == ["runs", "mean", "deviation"]
    assert [one["seed"] for one in result["runs"]] == [5, 6]
    assert [one["run"] for one in result["runs"]] == [str(tmp_path / "seed5"), str(tmp_path / "seed6")]
    nll = [one["nll"] for one in result["runs"]]
    assert result["mean"]["nll"] == pytest.approx(sum(nll) / 2)
    assert result["deviation"]["nll"] == pytest.approx(abs(nll[0] - nll[1]) / 2**0.5)
    assert main([*map(str, DIGITS), "--seeds", "2", "--seed", "5", "--out", str(tmp_path)]) == 0
    assert "mean (deviation) of the seeds: accuracy" in capsys.readouterr().out


def test_a_seed_that_fails_does_not_stop_the_others(capsys, tmp_path: Path, monkeypatch) -> None:
    real = training.train

    def train(settings: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        diverges = {"batch_size": 5000, "lr": 1e38, "epochs": 1} if settings.seed == 2 else {}
        return real(replace(settings, **diverges), *arguments, **options)

    monkeypatch.setattr(training, "train", train)
    seeds = (*DIGITS, "--seeds", 3, "--jobs", 1, "--out", tmp_path)
    assert main([*map(str, seeds), "--json"]) == 1
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("epoch ")]
    assert out == "" and lines[0].startswith("seed 2: the NLL of the trained network is not finite")
    assert lines[1:] == ["suptickets: 1 of 3 runs failed: seed 2 (see above)"]
    assert [(tmp_path / f"seed{n}" / "summary.json").exists() for n in (1, 2, 3)] == [True, False, True]


def test_metrics(capsys, tmp_path: Path) -> None:
    arguments = (
        "--epochs",
        5,
        "--cycles",
        2,
        "--cycle-epochs",
        1,
        "--evaluate-every",
        2,
        "--batch-size",
        500,
        "--model",
        "mlp",
        "--lr-low",
        0.001,
    )
    run(capsys, "train", *arguments, "--out", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    always = ["epoch", "step", "phase", "lr", "loss", "train_accuracy", "sparsity", "layers", "lrs"]
    tested = [*always, "test_accuracy", "test_nll", "test_ece"]
    assert [list(line) for line in lines] == [always, tested, always, tested, always]
    assert [line["phase"] for line in lines] == [*["normal"] * 3, "cycle 1 of 2", "cycle 2 of 2"]
    assert [line["step"] for line in lines] == [3, 6, 9, 12, 15]
    assert lines[-1]["lr"] == 0.001 and lines[-1]["lrs"] == pytest.approx(
        [0.05 * 2 / 3 + 0.001 / 3] * 2 + [0.001]
    )
    assert all(line["lrs"][-1] == line["lr"] and len(line["lrs"]) == 3 for line in lines)
    assert all(set(line["layers"]) == {"fc1", "fc2", "fc3"} for line in lines)


def test_tickets_are_scored_before_they_are_explored(capsys, tmp_path: Path) -> None:
    """Exploring at the end of a cycle must not change what is told of its ticket."""
    arguments = ("--model", "mlp", "--epochs", 4, "--cycles", 2, "--cycle-epochs", 1)
    arguments += ("--batch-size", 200, "--lr-low", 0)
    start = run(capsys, "train", *arguments, "--out", tmp_path / "a", "--explore-at", "start")["start"]
    ends = run(capsys, "train", *arguments, "--out", tmp_path / "b", "--explore-at", "end", "--lr-high", 0)
    assert ends["start"] == start == ends["tickets"][0]


def test_own_model(capsys, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(classes, channels):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, classes))\n"
        "def nothing():\n    return 3\n"
        "def empty(classes):\n    return nn.Linear(64, classes, device='meta')\n"
        "def leaves():\n    raise SystemExit('bye')\n"
        "def says(classes):\n    print('hello')\n    return net(classes, 1)\n"
        "number = 3\n"
    )
    (tmp_path / "wrong.py").write_text("def net(:\n")
    (tmp_path / "left.py").write_text("raise SystemExit('bye')\n")
    monkeypatch.chdir(tmp_path)
    result = run(capsys, *DIGITS, "--model", "mine:net", "--out", "run")
    assert (result["model"], result["parameters"]) == ("mine:net", 640)
    assert run(capsys, "evaluate", "run", "--model", "mine:net")["accuracy"] == result["accuracy"]
    for name, message in (
        ("mine:nothing", "must return a torch.nn.Module"),
        ("mine:absent", "cannot import the model mine:absent"),
        ("absent.module:net", "cannot import the model"),
        ("wrong:net", "cannot import the model wrong:net: invalid syntax"),
        ("left:net", "cannot import the model left:net: bye"),
        ("mine:number", "is not a callable"),
        ("builtins:dict", "cannot import the model builtins:dict: no signature"),
        ("mine:empty", "a model without weights"),
        ("mine:leaves", "mine:leaves failed: bye"),
    ):
        assert main([*map(str, DIGITS), "--model", name]) == 2
        assert message in capsys.readouterr().err
    assert main([*map(str, DIGITS), "--model", "mine:net", "--method", "small-dense"]) == 2
    assert "takes no argument `width`" in capsys.readouterr().err
    assert run(capsys, *DIGITS, "--model", "mine:says", "--out", "said")["parameters"] == 640


@pytest.mark.parametrize("name", MODELS)
def test_small_dense_narrows_each_model(name: str) -> None:
    size = 64 if name == "resnet50-imagenet" else 32

    class Images:
        classes, shape = 10, (3, size, size)

    def parameters(method: str) -> int:
        with torch.device("meta"):
            built = build.model(resolve({"model": name, "method": method, "sparsity": 0.8}), Images())  # type: ignore[arg-type]
        return sum(p.numel() for p in built.parameters())

    assert 0.18 < parameters("small-dense") / parameters("dense") <= 0.2


# ---- several processes ----


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("method", ["rigl", "granet", "snfs", "dense"])
def test_two_processes_follow_one(server: Server, tmp_path: Path, method: str) -> None:
    """Half the batch each, ranks weighted by their samples; the last batch of 37 is uneven."""
    arguments = (
        "train",
        "--model",
        "mlp",
        "--precision",
        "fp64",
        "--epochs",
        4,
        "--batch-size",
        100,
        "--interval",
        7,
    )
    arguments += ("--cycles", 2, "--cycle-epochs", 1, "--prune-epochs", 1, "--method", method, "--lr", 0.05)
    for ranks in (1, 2):
        log = tmp_path / f"{ranks}.log"
        statuses = server.run(*arguments, "--out", tmp_path / str(ranks), log=log, ranks=ranks)
        assert statuses == [0] * ranks, log.read_text()
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    for key, tensor in one["ticket"].items():
        torch.testing.assert_close(two["ticket"][key], tensor, rtol=0, atol=1e-9)
    for key in ("accuracy", "nll", "ece", "start", "tickets"):
        assert close(one["summary"][key], two["summary"][key]), key
    lines = [[json.loads(line) for line in each["metrics"].splitlines()] for each in (one, two)]
    assert close(*lines)


def test_a_layer_that_is_not_used(server: Server, tmp_path: Path) -> None:
    """Its gradient would be waited for; one process need not."""
    command = ("train", "--model", "train_worker:Idle", "--epochs", 1, "--booster", "none", "--sparsity", 0.5)
    assert server.run(*command, "--out", tmp_path / "one", log=tmp_path / "log") == [0]
    assert server.run(*command, "--out", tmp_path / "two", log=tmp_path / "log", ranks=2) == [2, 2]
    told = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("suptickets")]
    assert told[-1].startswith("suptickets: the model does not use idle.weight, idle.bias, which several")


def close(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    return a == b if isinstance(a, str) else abs(a - b) < 1e-9


@pytest.mark.parametrize("booster", ["none", "sup-tickets"])
def test_batch_norm_of_two_processes(server, capsys, cifar: Path, tmp_path: Path, booster: str) -> None:
    """Rank 0's statistics are kept, in the ticket and in the scores: `evaluate` finds the same numbers."""
    where = ("--data", "cifar10", "--data-dir", cifar, "--model", "vgg-small", "--out", tmp_path / "run")
    where, log = (*where, "--booster", booster), tmp_path / "log"
    assert server.run("train", *where, "--batch-size", 15, *SHORT, log=log, ranks=2) == [0, 0], (
        log.read_text()
    )
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    evaluated = run(capsys, "evaluate", tmp_path / "run")
    for key in ("accuracy", "nll", "ece", "sparsity", "nonzero", "test_flops_ratio"):
        assert result[key] == pytest.approx(evaluated[key], abs=1e-7)  # other batches


def test_a_process_with_a_single_sample(server: Server, tmp_path: Path) -> None:
    arguments = (*DIGITS, "--model", "vgg-small", "--batch-size", 1434, "--out", tmp_path / "run")
    assert server.run(*arguments, log=tmp_path / "log", ranks=2) == [2, 2]
    assert "the last batch of an epoch has 3 for 2 processes" in (tmp_path / "log").read_text()


def test_dropout_differs_between_processes(server: Server, tmp_path: Path) -> None:
    """Each process draws from a generator of its own; all of them are in the checkpoint."""
    arguments = (*DIGITS, "--model", "train_worker:dying", "--out", tmp_path / "run")
    assert server.run(*arguments, log=tmp_path / "log", ranks=2) == [0, 0]
    first, second = contents(tmp_path / "run")["checkpoint"]["rng"]
    assert not torch.equal(first, second)


def test_nothing_is_written_when_something_is_missing(capsys, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["train", "--data", "folder", "--data-dir", str(tmp_path / "no"), "--out", str(out)]) == 2
    assert not out.exists() and capsys.readouterr().err.count("\n") == 1


def test_the_network_is_plain(capsys, tmp_path: Path) -> None:
    run(capsys, *DIGITS, "--out", tmp_path)
    model = build.model(resolve({"model": "mlp"}), type("D", (), {"classes": 10, "shape": (1, 8, 8)})())  # type: ignore[arg-type]
    assert isinstance(model, nn.Sequential)
    model.load_state_dict(load_file(tmp_path / "ticket.safetensors"))


def test_resume_without_a_folder_is_that_of_out_or_of_the_settings(
    capsys, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*map(str, DIGITS), "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
    first = run(capsys, *DIGITS)
    assert run(capsys, *DIGITS, "--resume") == first
    other = run(capsys, *DIGITS, "--out", "there", "--seed", 3)
    assert run(capsys, "train", "--out", "there", "--resume") == other
    assert main(["train", "--out", "there", "--resume", "--seed", "4"]) == 2
    assert "seed: 3 -> 4" in capsys.readouterr().err


def test_a_run_with_a_holdout_never_looks_at_the_test_data(capsys, cifar, tmp_path, monkeypatch):
    """Accuracy, tickets and start are of the held-out samples; `evaluate` then takes the test data."""
    result = small(capsys, cifar, tmp_path / "run", "--holdout", 0.3)
    real = data._loaded
    with monkeypatch.context() as patched:
        patched.setattr(data, "_loaded", lambda *given: replace(real(*given), test_x=real(*given).test_x * 0))
        blind = small(capsys, cifar, tmp_path / "blind", "--holdout", 0.3)
    for key in ("accuracy", "nll", "ece", "start", "tickets"):
        assert blind[key] == result[key]
    counts = [s["accuracy"] * 9 for s in (result, result["start"], *result["tickets"])]  # 9 of 30
    assert counts == pytest.approx([round(count) for count in counts])
    assert "--holdout 0.3" in result["command"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["holdout"] == 0.3
    assert run(capsys, "evaluate", tmp_path / "run", "--data-dir", cifar)["accuracy"] * 6 % 1 == 0


def test_data_are_found_from_anywhere(capsys, cifar: Path, tmp_path: Path, monkeypatch) -> None:
    """Their place is written down in full, `~` and all; if they have moved, `--resume --data-dir` says so."""
    (tmp_path / "first").mkdir()
    shutil.copytree(cifar, tmp_path / "first" / "images")
    monkeypatch.setenv("HOME", str(tmp_path))
    places = {tmp_path / "first": Path("images"), Path("/"): Path("~/first/images")}
    for number, (here, place) in enumerate(places.items()):
        monkeypatch.chdir(here)
        result = small(capsys, place, tmp_path / f"run{number}")
        config = json.loads((tmp_path / f"run{number}" / "config.json").read_text())
        assert config["data_dir"] == str(tmp_path / "first" / "images")
        monkeypatch.chdir(tmp_path)
        assert run(capsys, "evaluate", f"run{number}")["nll"] == pytest.approx(result["nll"], abs=1e-6)
    (tmp_path / "first").rename(tmp_path / "second")
    assert main(["evaluate", "run0"]) == 2
    assert run(capsys, "train", "--resume", "run0", "--data-dir", "second/images")["nll"] == result["nll"]
    for path in ("run0", "run0/ticket.safetensors"):
        assert run(capsys, "evaluate", path)["nll"] == pytest.approx(result["nll"], abs=1e-6)


def test_a_place_is_left_to_links(capsys, cifar: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(cifar, tmp_path / "there" / "images")
    (tmp_path / "there" / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "sub")
    monkeypatch.chdir(tmp_path)
    small(capsys, Path("link/../images"), tmp_path / "run")


def test_a_run_that_is_done_is_left_alone(capsys, cifar: Path, tmp_path: Path, monkeypatch) -> None:
    """Older versions wrote places down as they were given."""
    result = small(capsys, cifar, tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace(str(cifar), "images"))
    before = config.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "train", "--resume", "run") == {**result, "run": "run"}
    assert config.read_bytes() == before


def test_a_holdout_is_said(capsys, cifar, tmp_path):
    where = ("--data", "cifar10", "--data-dir", cifar, "--model", "vgg-small", "--out", tmp_path / "run")
    main([*map(str, ("train", *where, "--batch-size", 16, *SHORT, "--holdout", 0.2))])
    assert "evaluated on 6 held-out training samples, not on the test data" in capsys.readouterr().err
    assert main(["train", "--holdout", "10"]) == 2
    assert "--holdout is a fraction, not a percentage: 10.0, did you mean 0.1?" in capsys.readouterr().err


@pytest.mark.parametrize("epochs, rates", [(1, [0.1]), (2, [0.1, 0.001]), (4, [0.1, 0.1, 0.01, 0.001])])
def test_a_short_training_begins_at_the_rate_that_is_asked_for(epochs: int, rates: list[float]) -> None:
    chosen = resolve({"data": "digits", "epochs": epochs, "booster": "none", "milestones": (0.5, 0.75)})
    schedule = build.learning_rate(chosen, 10)
    assert [schedule(10 * epoch + 1) for epoch in range(epochs)] == pytest.approx(rates)


@pytest.mark.parametrize(
    "fraction, epochs, dropped", [(0.58, 50, 29), (0.7, 90, 63), (0.29, 100, 29), (0.75, 226, 169)]
)
def test_the_rate_drops_after_the_fraction_as_it_is_written(fraction, epochs, dropped) -> None:
    """As floats 0.58 * 50 is below 29; what is no whole number of epochs is rounded down."""
    chosen = resolve({"data": "digits", "epochs": epochs, "booster": "none", "milestones": (fraction,)})
    rate = build.learning_rate(chosen, 10)
    assert [step for step in range(1, epochs * 10) if rate(step + 1) < rate(step)] == [dropped * 10]


def test_lenet5_learns_though_it_is_sparse(capsys, tmp_path: Path) -> None:
    options = ("--model", "lenet5", "--sparsity", 0.9, "--booster", "none", "--epochs", 8, "--interval", 20)
    assert run(capsys, "train", *options, "--out", tmp_path / "r")["accuracy"] > 0.5


def test_a_search_around_trainings_draws_on(tmp_path: Path) -> None:
    """Whatever a run seeds, it seeds for itself."""

    def drawn() -> list[float]:
        gpus = [torch.device("cuda")] if torch.cuda.is_initialized() else []
        own = [float(torch.rand((), device=device)) for device in (torch.device("cpu"), *gpus)]
        return [random.random(), float(np.random.rand()), *own]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [drawn(), drawn()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    found = [drawn()]
    settings = resolve({"model": "mlp", "epochs": 1, "booster": "none"})
    training.train(settings, tmp_path / "run")
    evaluate([tmp_path / "run"])
    price(settings)
    bench("build", model="mlp", rounds=1)
    assert [*found, drawn()] == expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--interval 3", True),
        ("--interval 4", False),
        ("--interval 3 --decay cosine", False),
        ("--interval 3 --method gmp --prune-epochs 1", False),
        ("--interval 3 --method dsr", True),
        ("--interval 3 --sparsity 0", False),
        ("--interval 4 --booster swa --cycles 1 --cycle-epochs 0.7", False),
    ],
)
def test_connections_that_change_after_the_last_step_are_told(tmp_path, recwarn, options, told) -> None:
    """Six steps: what the last would grow is not trained any more."""
    short = "train --model mlp --booster none --epochs 2 --batch-size 500 --out"
    assert main([*short.split(), str(tmp_path / "run"), *options.split()]) == 0
    assert any("after the last step too" in str(warning.message) for warning in recwarn) == told
