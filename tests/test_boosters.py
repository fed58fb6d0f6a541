"""Every booster through the command line, on digits: each trains, and gives its kind of result."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from make_data import cifar_folder
from safetensors.torch import load_file
from test_resume import assert_same, interrupted
from torch.nn.functional import softmax
from train_worker import Server

from suptickets import cli
from suptickets.data import load_data
from suptickets.experiments import EXPERIMENTS
from suptickets.training import build
from suptickets.training.boosters import BOOSTERS
from suptickets.training.processes import Processes
from suptickets.training.settings import Settings, recipes, resolve

CPU = torch.device("cpu")
SHORT = ("--model", "mlp", "--epochs", 6, "--cycle-epochs", 1, "--batch-size", 200, "--interval", 5)


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page takes longer than such a training."""
    monkeypatch.setattr(cli, "write_run_page", lambda run: None)


def run(capsys, *arguments: Any) -> dict[str, Any]:
    status = cli.main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


def train(capsys, out: Path, *flags: Any) -> dict[str, Any]:
    return run(capsys, "train", *SHORT, *flags, "--out", out)


def probabilities(file: Path) -> torch.Tensor:
    """What a ticket file predicts for the test data, without the library's own evaluation."""
    model = build.model(resolve({"model": "mlp"}), load_data("digits")).eval()
    model.load_state_dict(load_file(file))
    with torch.no_grad():
        return torch.cat([softmax(model(x).double(), 1) for x, _ in load_data("digits").test_batches(1000)])


def labels() -> torch.Tensor:
    return torch.cat([y for _, y in load_data("digits").test_batches(1000)])


def nonzero(file: Path) -> int:
    return sum(int(t.count_nonzero()) for t in load_file(file).values() if t.dim() > 1)


def files(run: Path) -> list[Path]:
    return sorted((run / "tickets").iterdir())


# ---- all of them ----


PAIRS = [(booster, method) for booster in BOOSTERS for method in ("rigl", "dense")]
PAIRS += [("tree-net", "snip"), ("swa", "snip"), ("distillation", "small-dense")]


@pytest.mark.parametrize(("booster", "method"), PAIRS)
def test_every_booster_trains_and_is_evaluated(capsys, tmp_path: Path, booster: str, method: str) -> None:
    result = train(capsys, tmp_path, "--booster", booster, "--method", method, "--prune-epochs", 1)
    assert result["booster"] == booster and 0 < result["accuracy"] <= 1 and result["top5"] > 0.5
    pruned = method in ("rigl", "snip") or (method, booster) == ("dense", "swa")
    assert result["sparsity"] == pytest.approx(0.9 if pruned else 0, abs=1e-4)
    evaluated = run(capsys, "evaluate", tmp_path)
    same = ("accuracy", "nll", "ece", "sparsity", "nonzero", "top5", "reliability", "diversity", "explored")
    assert {key: evaluated[key] for key in same} == {key: result[key] for key in same}
    assert evaluated["test_flops_ratio"] == pytest.approx(result["test_flops_ratio"])


@pytest.mark.parametrize("booster", BOOSTERS)
def test_a_boosted_run_says_how_to_run_it_again(capsys, tmp_path: Path, booster: str) -> None:
    flags = ("--booster", booster, "--method", "set", "--seed", 3, "--milestones", "--include-start")
    settings = resolve(parsed("train", *SHORT, *flags))
    command = shlex.split(settings.command())
    assert command[0] == "suptickets" and resolve(parsed(*command[1:])) == settings


def parsed(*arguments: Any) -> dict[str, Any]:
    given = vars(cli.parser().parse_args([*map(str, arguments)]))
    return {name: given[name] for name in Settings.__dataclass_fields__ if name in given}


def test_the_commands_of_all_recipes_are_short() -> None:
    assert resolve({}).command() == "suptickets train"
    assert resolve({"recipe": "paper-cifar"}).command() == "suptickets train --recipe paper-cifar"
    for name in recipes():
        for booster in BOOSTERS:
            assert len(resolve({"recipe": name, "booster": booster}).command().split()) <= 8


def test_cells_of_the_paper_are_settings() -> None:
    """All but the ensemble of several runs."""
    cells = [cell for one in EXPERIMENTS.values() for cell in one.cells() if cell.booster != "dense-ensemble"]
    for settings in {json.dumps(cell.settings()) for cell in cells}:
        resolve(json.loads(settings))


# ---- tickets that are kept ----


def test_kept_tickets(capsys, tmp_path: Path) -> None:
    """They change nothing else; each is worth what is told of it."""
    kept = train(capsys, tmp_path / "kept", "--keep-tickets")
    plain = train(capsys, tmp_path / "plain")
    same = ("accuracy", "nll", "ece", "start", "tickets", "superposed", "layers", "explored")
    assert {key: kept[key] for key in same} == {key: plain[key] for key in same}
    assert plain["ensemble"] is plain["diversity"] is None and not (tmp_path / "plain" / "tickets").exists()
    assert [file.name for file in files(tmp_path / "kept")] == [f"ticket-{n}.safetensors" for n in (1, 2, 3)]
    for file, scores in zip(files(tmp_path / "kept"), kept["tickets"], strict=True):
        evaluated = run(capsys, "evaluate", file)
        assert {key: evaluated[key] for key in scores} == scores
        assert evaluated["nonzero"] == kept["nonzero"] == nonzero(file)


def test_the_start_is_no_kept_ticket(capsys, tmp_path: Path) -> None:
    result = train(capsys, tmp_path, "--keep-tickets", "--include-start", "--cycles", 2)
    assert len(files(tmp_path)) == len(result["tickets"]) == 2
    assert run(capsys, "evaluate", files(tmp_path)[0])["nll"] == result["tickets"][0]["nll"]


def test_forced_runs_forget_kept_tickets(capsys, tmp_path: Path) -> None:
    train(capsys, tmp_path, "--keep-tickets")
    (tmp_path / "report.html").write_text("old")
    train(capsys, tmp_path, "--force")
    assert not list((tmp_path / "tickets").iterdir()) and not (tmp_path / "report.html").exists()


def test_evaluate_single_tickets_and_several_runs(capsys, tmp_path: Path) -> None:
    kept = train(capsys, tmp_path / "a", "--keep-tickets")
    other = train(capsys, tmp_path / "b", "--seed", 2)
    single = run(capsys, "evaluate", "--tickets", tmp_path / "a")
    assert [{k: n[k] for k in ("accuracy", "nll", "ece")} for n in single["networks"]] == kept["tickets"]
    assert single["diversity"] == kept["diversity"]
    assert {key: single["ensemble"][key] for key in kept["ensemble"]} == kept["ensemble"]
    both = run(capsys, "evaluate", tmp_path / "a", tmp_path / "b")
    assert [network["nll"] for network in both["networks"]] == [kept["nll"], other["nll"]]
    assert [network["path"] for network in both["networks"]] == [str(tmp_path / "a"), str(tmp_path / "b")]
    p, q = (probabilities(tmp_path / name / "ticket.safetensors") for name in "ab")
    assert both["diversity"]["disagreement"] == float((p.argmax(1) != q.argmax(1)).double().mean())
    kl = ((p - q) * (p.log() - q.log())).sum(1).mean() / 2
    assert both["diversity"]["kl"] == pytest.approx(float(kl))
    nll = -(((p + q) / 2)[torch.arange(len(p)), labels()].log().mean())
    assert both["ensemble"]["nll"] == pytest.approx(float(nll))
    assert cli.main(["evaluate", str(tmp_path / "b"), "--tickets"]) == 2
    assert "has no single tickets: train with --keep-tickets" in capsys.readouterr().err


def test_networks_of_different_data_are_not_compared(capsys, tmp_path: Path) -> None:
    train(capsys, tmp_path / "a")
    cifar_folder(tmp_path / "data", size=6)
    where = ("--data", "cifar10", "--data-dir", tmp_path / "data", "--recipe", "digits")
    train(capsys, tmp_path / "b", *where, "--batch-size", 16)
    assert cli.main(["evaluate", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "different data (cifar10, digits): say which with --data" in capsys.readouterr().err


# ---- each its kind of result ----


def test_ensembles_average_probabilities(capsys, tmp_path: Path) -> None:
    """The run's result is the mean of the tickets' probabilities; the file beside them is superposed."""
    result = train(capsys, tmp_path / "e", "--booster", "ensemble")
    superposed = train(capsys, tmp_path / "s", "--booster", "sup-tickets")
    assert result["tickets"] == superposed["tickets"]
    mean = torch.stack([probabilities(file) for file in files(tmp_path / "e")]).mean(0)
    assert result["accuracy"] == float((mean.argmax(1) == labels()).double().mean())
    assert result["nll"] == pytest.approx(float(-mean[torch.arange(len(mean)), labels()].log().mean()))
    assert result["superposed"] == {key: superposed[key] for key in ("accuracy", "nll", "ece")}
    assert result["test_flops_ratio"] == pytest.approx(3 * superposed["test_flops_ratio"], rel=0.05)
    ours, theirs = (load_file(tmp_path / name / "ticket.safetensors") for name in "es")
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_free_tickets_have_long_cycles_in_steps(capsys, tmp_path: Path) -> None:
    published = resolve({"booster": "free-tickets", "recipe": "paper-cifar"})
    assert (published.epochs, published.cycles, published.cycle_epochs) == (450, 3, 100)
    assert (published.lr_high, published.lr_low, published.milestones) == (0.01, 0.001, ())
    result = run(
        capsys, "train", "--booster", "free-tickets", "--model", "mlp", "--epochs", 9, "--out", tmp_path
    )
    assert len(files(tmp_path)) == 3 and result["ensemble"]["nll"] == result["nll"]
    rates = [json.loads(line)["lrs"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {rate for epoch in rates[:3] for rate in epoch} == {0.1}
    assert set(rates[3]) == {0.01} and set(rates[4]) == {0.001} and set(rates[5]) == {0.01}
    last, final = load_file(files(tmp_path)[-1]), load_file(tmp_path / "ticket.safetensors")
    assert all(torch.equal(last[key], final[key]) for key in last)


@pytest.mark.parametrize("method", ["dense", "static", "rigl"])
def test_swa_averages_without_exploring(capsys, tmp_path: Path, method: str) -> None:
    result = train(capsys, tmp_path, "--booster", "swa", "--method", method, "--keep-tickets")
    alive = [{k: t != 0 for k, t in load_file(f).items() if t.dim() > 1} for f in files(tmp_path)]
    assert all(torch.equal(one[key], alive[0][key]) for one in alive for key in one)
    assert result["nonzero"] == nonzero(tmp_path / "ticket.safetensors") == round(0.1 * result["parameters"])
    rates = [json.loads(line)["lrs"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rates[-1] == sorted(rates[-1], reverse=True) and rates[-1][-1] == pytest.approx(0.005)
    if method == "dense":  # half of the epochs at full price, then the sparse one's
        assert result["train_flops_ratio"] == pytest.approx(0.5 + 0.5 * result["test_flops_ratio"])
        assert [json.loads(line)["sparsity"] for line in (tmp_path / "metrics.jsonl").open()][:2] == [0, 0]


def test_a_student_is_sparse_and_has_three_teachers(capsys, tmp_path: Path) -> None:
    result = train(capsys, tmp_path / "d", "--booster", "distillation")
    tickets = train(capsys, tmp_path / "t", "--keep-tickets")
    assert result["nonzero"] == nonzero(tmp_path / "d" / "ticket.safetensors") == tickets["nonzero"]
    assert json.loads((tmp_path / "d" / "teachers" / "summary.json").read_text())["nll"] == tickets["nll"]
    assert result["tickets"] == [] and result["start"] is None
    forward = sum(run(capsys, "evaluate", f)["nonzero"] for f in files(tmp_path / "t")) / result["parameters"]
    plain = train(capsys, tmp_path / "p", "--booster", "none")["train_flops_ratio"]
    expected = plain + tickets["train_flops_ratio"] + forward / 3
    assert result["train_flops_ratio"] == pytest.approx(expected, rel=0.02)
    again = train(capsys, tmp_path / "a", "--booster", "distillation", "--teachers", tmp_path / "t")
    assert again["nll"] == result["nll"] and not (tmp_path / "a" / "teachers").exists()
    by_file = train(capsys, tmp_path / "f", "--booster", "distillation", "--teachers", *files(tmp_path / "t"))
    assert by_file["nll"] == result["nll"] != plain
    train(capsys, tmp_path / "d", "--booster", "distillation", "--force", "--seed", 2)


def test_teachers_are_found_from_anywhere_and_have_not_seen_what_is_held_out(
    capsys, tmp_path: Path, monkeypatch
) -> None:
    train(capsys, tmp_path / "t", "--keep-tickets")
    monkeypatch.chdir(tmp_path)
    student = ("--booster", "distillation", "--teachers", "t")
    result = train(capsys, tmp_path / "s", *student)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(capsys, "train", "--resume", tmp_path / "s") == result
    monkeypatch.chdir(tmp_path)
    given = [*student, "--holdout", "0.2", "--out", str(tmp_path / "h")]
    assert cli.main(["train", *given]) == 2
    assert "were trained on images that are held out here" in capsys.readouterr().err


def test_members_share_a_network(capsys, tmp_path: Path) -> None:
    plain = train(capsys, tmp_path / "p", "--booster", "none", "--method", "dense")
    tree = train(capsys, tmp_path / "t", "--booster", "tree-net", "--method", "dense")
    batch = train(capsys, tmp_path / "b", "--booster", "batch-ensemble", "--method", "dense", "--members", 2)
    keys = load_file(tmp_path / "t" / "ticket.safetensors")
    assert {key.split(".")[1] for key in keys if key.startswith("heads.")} == {"0", "1", "2"}
    head = plain["layers"][-1]
    assert tree["parameters"] == plain["parameters"] + 2 * head["size"]
    ratio = 1 + 2 * head["size"] / plain["parameters"]
    assert tree["train_flops_ratio"] == tree["test_flops_ratio"] == pytest.approx(ratio)
    assert (batch["train_flops_ratio"], batch["test_flops_ratio"]) == (1, 2)
    assert all(one["diversity"]["kl"] > 0 for one in (tree, batch))
    factors = [t for key, t in load_file(tmp_path / "b" / "ticket.safetensors").items() if key.endswith(".r")]
    assert all(len(r) == 2 for r in factors) and len(factors) == len(plain["layers"])


def test_one_member_is_the_plain_network(capsys, tmp_path: Path) -> None:
    one = train(capsys, tmp_path / "t", "--booster", "tree-net", "--members", 1)
    plain = train(capsys, tmp_path / "p", "--booster", "none")
    assert one["nll"] == pytest.approx(plain["nll"], rel=1e-6) and one["diversity"] is None


def test_factors_do_not_decay() -> None:
    settings = resolve({"booster": "batch-ensemble", "model": "mlp"})
    groups = build.optimizer(settings, build.model(settings, load_data("digits"))).param_groups
    assert [group["weight_decay"] for group in groups] == [settings.weight_decay, 0]


def test_criteria_one_for_each_cycle(capsys, tmp_path: Path) -> None:
    """The first cycle's own: pruning the largest magnitudes is felt."""
    pairs = ("largest:gradient", "magnitude:random", "magnitude:random")
    unequal = train(capsys, tmp_path / "a", "--criteria", *pairs)
    usual = train(capsys, tmp_path / "b")
    named = train(capsys, tmp_path / "c", "--criteria", "magnitude:gradient")
    assert named["tickets"] == usual["tickets"] != unequal["tickets"]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["criteria"] == list(pairs)


# ---- costs and rates ----


def test_small_dense_costs_what_it_costs(capsys, tmp_path: Path) -> None:
    """Of the network of full width, not of itself."""
    result = train(capsys, tmp_path, "--method", "small-dense", "--booster", "none")
    full = train(capsys, tmp_path / "full", "--method", "dense", "--booster", "none")
    ratio = result["parameters"] / full["parameters"]
    assert result["train_flops_ratio"] == result["test_flops_ratio"] == pytest.approx(ratio)
    assert ratio < 0.1


@pytest.mark.parametrize("booster", ["none", "sup-tickets"])
def test_imagenet_drops_at_the_epochs_of_the_paper(booster: str) -> None:
    settings = resolve({"recipe": "paper-imagenet", "booster": booster})
    rate, steps = build.learning_rate(settings, 10), 10
    rates = [rate(epoch * steps + 1) for epoch in range(5, 92)]
    drops = [epoch for epoch, (a, b) in enumerate(zip(rates, rates[1:], strict=False), 6) if b < a]
    assert drops == [30, 60, 85]


@pytest.mark.parametrize(("booster", "expected"), [("none", [125, 187]), ("sup-tickets", [113, 169])])
def test_cifar_drops_at_half_and_three_quarters_of_the_normal_phase(
    booster: str, expected: list[int]
) -> None:
    rate = build.learning_rate(resolve({"recipe": "paper-cifar", "booster": booster}), 10)
    rates = [rate(epoch * 10 + 1) for epoch in range(226)]
    assert [e for e, (a, b) in enumerate(zip(rates, rates[1:], strict=False), 1) if b < a] == expected


def test_training_flops_before_training(capsys) -> None:
    """The notes on the paper: ResNet-50 on CIFAR 9.735e16 for 250 epochs, 0.114 of it at 95 % with ERK."""
    counted = run(capsys, "flops", "--model", "resnet50", "--sparsity", 0.95)
    assert counted["training_flops_dense"] == pytest.approx(9.735e16, rel=1e-3)
    assert round(counted["training_ratio"], 3) == 0.114
    options = ("--method", "rigl", "--booster", "sup-tickets", "--recipe", "digits", "--epochs", 10)
    other = run(capsys, "flops", "--model", "vgg-small", "--size", 8, *options)
    dense = 3 * other["forward_flops_dense"] * 10 * 1437
    assert other["training_flops_dense"] == dense and other["training_ratio"] > other["ratio"]


# ---- interrupted ----


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


RUN = ("train", "--model", "train_worker:dying", "--epochs", 4, "--batch-size", 200, "--interval", 5)
RUN += ("--cycles", 2, "--cycle-epochs", 1, "--sparsity", 0.8, "--checkpoint-every", 0)
KILLED = {
    "ensemble": [(20, signal.SIGKILL), (5, signal.SIGTERM)],
    "distillation": [(20, signal.SIGTERM), (21, signal.SIGKILL)],  # in the teachers, then in the student
    "swa --method dense": [(20, signal.SIGTERM)],
    "tree-net": [(9, signal.SIGKILL)],
    "batch-ensemble --method dense": [(9, signal.SIGTERM)],
}


@pytest.mark.parametrize("booster", KILLED)
def test_interrupted_boosters_end_the_same(server: Server, tmp_path: Path, booster: str) -> None:
    arguments = (*RUN, "--booster", *booster.split())
    assert server.run(*arguments, "--out", tmp_path / "whole", log=tmp_path / "log") == [0]
    interrupted(server, tmp_path / "parts", arguments, KILLED[booster])
    assert_same(tmp_path / "whole", tmp_path / "parts")
    for file in (tmp_path / "whole").rglob("*.safetensors"):
        other = load_file(tmp_path / "parts" / file.relative_to(tmp_path / "whole"))
        assert all(torch.equal(tensor, other[key]) for key, tensor in load_file(file).items())


def test_two_processes_keep_tickets_and_teach(server: Server, tmp_path: Path) -> None:
    for booster in ("distillation", "ensemble", "tree-net"):
        out, log = tmp_path / booster, tmp_path / "log"
        assert server.run(*RUN, "--booster", booster, "--out", out, log=log, ranks=2) == [0, 0], (
            log.read_text()
        )
        assert 0 < json.loads((out / "summary.json").read_text())["accuracy"] <= 1


# ---- the fast step ----


@pytest.mark.parametrize("booster", ["tree-net", "batch-ensemble", "distillation", "swa"])
def test_the_fast_step_follows_the_plain_one(capsys, tmp_path: Path, booster: str) -> None:
    """Not compiled, on a CPU, in float64."""
    from suptickets.training.fast import FastStep
    from suptickets.training.loop import Trainer
    from suptickets.training.plain import PlainStep

    teachers = {"teachers": [str(tmp_path / "t" / "ticket.safetensors")]} if booster == "distillation" else {}
    if teachers:
        train(capsys, tmp_path / "t", "--booster", "none")
    given = {"booster": booster, "model": "mlp", "precision": "fp64", "epochs": 4, "cycle_epochs": 1}
    given |= {"batch_size": 200, "interval": 5, "method": "dense" if booster == "swa" else "rigl", **teachers}
    states = []
    for step in (PlainStep, lambda trainer: FastStep(trainer, compile=False)):
        trainer = Trainer(resolve(given), load_data("digits"), Processes(0, 1, CPU))
        stepper = step(trainer)
        for epoch in range(3):
            for _ in stepper.epoch(epoch, trainer._enter(epoch)):
                pass
        stepper.close()
        states.append((trainer.network.densify().state_dict(), trainer.meter.values()))
    for key, tensor in states[0][0].items():
        torch.testing.assert_close(states[1][0][key], tensor, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(states[1][1], states[0][1])
