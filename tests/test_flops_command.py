"""`suptickets flops`: what it says beforehand is what `train` finds; what a person sees; bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suptickets import cli
from suptickets.methods import METHODS
from suptickets.training.boosters import BOOSTERS
from suptickets.training.price import price
from suptickets.training.settings import resolve

EXACT = ("dense", "small-dense", "static", "set", "rigl")  # the distribution decides, not the weights


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page takes longer than such a training."""
    monkeypatch.setattr(cli, "write_run_page", lambda run: None)


def run(capsys: Any, *arguments: Any) -> dict[str, Any]:
    status = cli.main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


def fails(capsys: Any, *arguments: Any) -> str:
    assert cli.main(["flops", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err


def test_a_recipe_decides_the_model_unless_one_is_named(capsys) -> None:
    assert run(capsys, "flops")["model"] == "vgg16"
    assert run(capsys, "flops", "--recipe", "digits")["model"] == "vgg-small"
    found = run(capsys, "flops", "--recipe", "paper-imagenet")
    assert (found["model"], found["forward_flops_dense"]) == ("resnet50-imagenet", 8_178_368_512)
    assert run(capsys, "flops", "--recipe", "digits", "--model", "mlp")["model"] == "mlp"


# ---- as train finds it ----


@pytest.mark.parametrize("method", METHODS)
def test_the_ratios_of_every_method_are_those_of_train(capsys, tmp_path: Path, method: str) -> None:
    options = ("--recipe", "digits", "--model", "mlp", "--method", method, "--epochs", 9, "--booster", "none")
    found = run(capsys, "train", *options, "--out", tmp_path)
    counted = run(capsys, "flops", *options)
    close = {"rel": 1e-6} if method in EXACT else {"abs": 0.1}
    assert counted["ratio"] == pytest.approx(living(found, counted), **close)
    assert counted["ratio"] == pytest.approx(found["test_flops_ratio"], **close)
    assert counted["training_ratio"] == pytest.approx(found["train_flops_ratio"], **close)
    assert counted["parameters"] == found["parameters"] and counted["nonzero"] == found["nonzero"]
    if method in EXACT:
        return
    told = run(capsys, "flops", *options, "--final", found["test_flops_ratio"])
    assert told["ratio"] == found["test_flops_ratio"]
    assert told["training_ratio"] == pytest.approx(found["train_flops_ratio"], abs=0.03)


def living(found: dict[str, Any], counted: dict[str, Any]) -> float:
    """The forward pass of a run's network, by its living connections."""
    prices = {layer["name"]: layer["flops"] for layer in counted["layers"]}
    spent = sum(prices[one["name"]] * one["nonzero"] / one["size"] for one in found["layers"])
    return spent / counted["forward_flops_dense"]


PAIRS = [(booster, "rigl") for booster in BOOSTERS]
PAIRS += [("swa", "static"), ("distillation", "small-dense"), ("free-tickets", "set"), ("ensemble", "dense")]
PAIRS += [("tree-net", "dense"), ("batch-ensemble", "dense"), ("sup-tickets", "static")]


@pytest.mark.parametrize(("booster", "method"), PAIRS)
def test_the_ratios_of_every_booster_are_those_of_train(
    capsys, tmp_path: Path, booster: str, method: str
) -> None:
    model = "vgg-small" if booster == "free-tickets" else "mlp"  # fewer zeros that live
    short = {"model": model, "epochs": 6, "cycle_epochs": 1, "batch_size": 200, "interval": 5}
    settings = resolve({**short, "booster": booster, "method": method, "recipe": "digits"})
    (tmp_path / "c.json").write_text(json.dumps(settings.as_dict()))
    found = run(capsys, "train", "--config", tmp_path / "c.json", "--out", tmp_path / "run")
    counted = price(settings)
    assert counted["training_ratio"] == pytest.approx(found["train_flops_ratio"], rel=1e-6)
    moved = {"sup-tickets": 0.2, "free-tickets": 0.02}.get(booster, 1e-6)  # pruned over all layers; zeros
    assert counted["ratio"] == pytest.approx(found["test_flops_ratio"], rel=moved)
    assert counted["networks"] == (3 if booster in ("ensemble", "free-tickets") else 1)


def test_the_first_swa_baseline(capsys, tmp_path: Path) -> None:
    """Dense until the cycles: the weights decide only what is left of the layers then."""
    options = ("--recipe", "digits", "--model", "mlp", "--method", "dense", "--booster", "swa", "--epochs", 9)
    found, counted = run(capsys, "train", *options, "--out", tmp_path), run(capsys, "flops", *options)
    assert 0.3 < counted["training_ratio"] == pytest.approx(found["train_flops_ratio"], rel=0.05)
    assert counted["ratio"] == pytest.approx(found["test_flops_ratio"], abs=0.05)


def test_what_a_ratio_is_a_share_of(capsys) -> None:
    """One dense training of the plain network, of the epochs of this run: FreeTickets has more of them."""
    plain = run(capsys, "flops", "--model", "vgg-small")
    longer = run(capsys, "flops", "--model", "vgg-small", "--booster", "free-tickets")
    assert (plain["epochs"], longer["epochs"]) == (250, 450)
    assert longer["training_flops_dense"] == 3 * plain["forward_flops_dense"] * 450 * 50_000
    assert "450 epochs" in longer["notes"][0]
    narrow = run(capsys, "flops", "--model", "vgg-small", "--method", "small-dense")
    assert narrow["forward_flops_dense"] == plain["forward_flops_dense"] > 5 * narrow["forward_flops"]
    assert narrow["training_flops_dense"] == plain["training_flops_dense"]
    assert sum(layer["flops"] for layer in narrow["layers"]) == narrow["forward_flops"]


@pytest.mark.parametrize(("sparsity", "final", "paper"), [(0.8, 0.35, 0.37), (0.9, 0.203, 0.25)])
def test_granet_of_the_paper(capsys, sparsity: float, final: float, paper: float) -> None:
    """From its own test FLOPs; without them at ERK, which is not where GraNet's layers end."""
    options = ("--model", "resnet50-imagenet", "--sparsity", sparsity, "--method", "granet")
    found = run(capsys, "flops", *options, "--final", final)
    assert found["training_ratio"] == pytest.approx(paper, abs=0.01)
    assert found["ratio"] == final and found["layers"][0]["sparsity"] is None


# ---- layers, and what a person sees ----


def test_layers_have_dense_and_sparse_flops(capsys) -> None:
    found = run(capsys, "flops", "--model", "vgg-small", "--sparsity", 0.9, "--recipe", "digits")
    layers = found["layers"]
    assert sum(layer["flops"] for layer in layers) == found["forward_flops_dense"]
    assert sum(layer["sparse_flops"] for layer in layers) == pytest.approx(found["forward_flops"], abs=9)
    assert [layer["dense"] for layer in layers] == [layer["sparsity"] == 0 for layer in layers]
    assert layers[0]["dense"] and not layers[1]["dense"]  # ERK keeps the first convolution


def test_flops_for_people(capsys) -> None:
    assert cli.main(["flops", "--model", "vgg-small", "--method", "granet", "--booster", "ensemble"]) == 0
    out = capsys.readouterr().out
    assert "sparse_flops" in out and "training_ratio" in out
    assert "one dense training of it, of 250 epochs" in out and "unless --final" in out
    assert "a prediction runs 3 networks" in out
    assert any(line.startswith("features.conv1_1") and "32 x 3 x 3 x 3" in line for line in out.splitlines())


def test_a_model_of_the_users_own(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "priced.py").write_text(
        "from torch import nn\ndef net(classes, size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    found = run(capsys, "flops", "--model", "priced:net", "--size", 4, "--classes", 5, "--sparsity", 0.5)
    assert (found["parameters"], found["forward_flops_dense"], found["ratio"]) == (240, 480, 0.5)


WRONG = [
    ("--method rigl --final 0.3", "--final is for methods whose final layers depend on the weights"),
    ("--method granet --final 30", "--final is a fraction, not a percentage"),
    ("--method granet --final nan", "--final must be"),
    ("--booster ensembel", "did you mean 'ensemble'?"),
    ("--classes 0", "--classes must be at least 1"),
    ("--size -3", "--size must be at least 1"),
    ("--size 100000000", "--size must be at most 1,000,000"),
    ("--epochs 0", "--epochs must be at least 1"),
    ("--method granet --epochs 5", "reaches its sparsity after"),
    ("--sparsity 95", "did you mean 0.95?"),
    ("--model absent:net", "cannot import the model absent:net"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_bad_input_is_one_line(capsys, options: str, message: str) -> None:
    assert message in fails(capsys, *options.split())


@pytest.mark.parametrize("booster", ["none", "tree-net"])
@pytest.mark.parametrize("model", ["resnet50-imagenet", "vgg16"])
def test_a_dense_network_is_dense(capsys, model: str, booster: str) -> None:
    """Whatever zeros its random numbers may have."""
    if (model, booster) == ("resnet50-imagenet", "tree-net"):
        pytest.skip("slow")
    found = run(capsys, "flops", "--model", model, "--method", "dense", "--booster", booster)
    assert found["ratio"] == pytest.approx(found["training_ratio"], abs=1e-12)
    if booster == "none":
        assert found["forward_flops"] == found["forward_flops_dense"] and found["ratio"] == 1
