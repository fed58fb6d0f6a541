"""Options that would do nothing are refused, and members that cannot be; what boosters tell of parts."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from suptickets import cli
from suptickets.data import load_data
from suptickets.errors import SparsityError
from suptickets.training import build
from suptickets.training.boosters import BOOSTERS, CYCLIC, MEMBERS
from suptickets.training.loop import Trainer
from suptickets.training.processes import Processes
from suptickets.training.settings import Settings, recipes, resolve
from suptickets.training.verdict import verdict

SHORT = ("--model", "mlp", "--epochs", 6, "--cycle-epochs", 1, "--batch-size", 200, "--interval", 5)


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page takes longer than such a training."""
    monkeypatch.setattr(cli, "write_run_page", lambda run: None)


def train(capsys, out: Path, *flags: Any) -> dict[str, Any]:
    status = cli.main([*map(str, ("train", *SHORT, *flags, "--out", out)), "--json"])
    text, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(text)


def flags_of(*arguments: Any) -> dict[str, Any]:
    given = vars(cli.parser().parse_args([*map(str, arguments)]))
    return {name: given[name] for name in Settings.__dataclass_fields__ if name in given}


def given(line: str) -> dict[str, Any]:
    return flags_of("train", *line.split())


# ---- options that do nothing ----

NOTHING = [
    *((f"--booster {b} --members 2", "tree-net or batch-ensemble") for b in BOOSTERS if b not in MEMBERS),
    *((f"--booster {b} --keep-tickets", "has no cycles of its own") for b in BOOSTERS if b not in CYCLIC),
    ("--booster ensemble --no-keep-tickets", "--booster ensemble keeps its tickets in any case"),
    ("--booster free-tickets --no-keep-tickets", "keeps its tickets in any case"),
    *((f"--booster {b} --explore-at end", b) for b in ("none", "swa", *MEMBERS)),
    *((f"--booster {b} --criteria magnitude:random", b) for b in ("none", "swa", *MEMBERS)),
    *((f"--method {m} --criteria magnitude:random", "a sparse --method") for m in ("dense", "small-dense")),
    *((f"--method {m} --explore-at end", "a sparse --method") for m in ("dense", "small-dense")),
    ("--explore-rate 0 --criteria magnitude:random", "at --explore-rate 0: leave out one of them"),
    ("--booster distillation --teachers x --criteria magnitude:random", "has no cycles to explore in"),
]


@pytest.mark.parametrize(("line", "says"), NOTHING)
def test_an_option_that_does_nothing_is_refused(capsys, tmp_path: Path, line: str, says: str) -> None:
    assert cli.main(["train", *line.split(), "--out", str(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    option = [word for word in line.split() if word.startswith("--")][-1]
    assert err.startswith(f"suptickets: {option} does nothing, for ") and err.count("\n") == 1
    assert says in err and "leave" in err and out == "" and not (tmp_path / "run").exists()


SOMETHING = [
    *(f"--booster {b} --members 2" for b in MEMBERS),
    *(f"--booster {b} --keep-tickets" for b in CYCLIC),
    "--booster sup-tickets --no-keep-tickets",
    "--booster none --no-keep-tickets",
    *(f"--booster {b} --members 1" for b in BOOSTERS),
    *(f"--booster {b} --explore-at end" for b in ("sup-tickets", "ensemble", "free-tickets", "distillation")),
    *(f"--method {m} --criteria magnitude:random" for m in ("static", "snip", "gmp", "rigl")),
    "--booster distillation --criteria magnitude:random",
    "--booster free-tickets --method dense --explore-at end",  # which it asks for itself
    "--booster swa --method dense --explore-rate 0 --explore-at start",
    "--method granet --sparsity 0.9 --initial-sparsity 0.95",  # it begins at 0.9 then, not at the usual 0.5
]


@pytest.mark.parametrize("line", SOMETHING)
def test_an_option_that_does_something_or_is_as_usual_is_taken(line: str) -> None:
    settings = resolve(given(line))
    assert resolve(flags_of(*shlex.split(settings.command())[1:])) == settings


@pytest.mark.parametrize("booster", BOOSTERS)
@pytest.mark.parametrize("recipe", recipes())
def test_what_recipe_and_booster_say_can_be_said_again(recipe: str, booster: str) -> None:
    """All at once, as flags: only that ensembles keep no tickets is no way to say what they do."""
    settings = resolve({"recipe": recipe, "booster": booster})
    values = settings.as_dict()
    if settings.keeps:
        values.pop("keep_tickets")
    assert resolve(values) == settings


@pytest.mark.parametrize(("line", "says"), NOTHING)
def test_a_config_may_say_more_than_is_used(tmp_path: Path, line: str, says: str) -> None:
    """The file of an old run; the command for it leaves out what does nothing, and is the same run."""
    *_, option = [word for word in line.split() if word.startswith("--")]
    used = resolve(given(line.partition(option)[0]))
    (tmp_path / "config.json").write_text(json.dumps({**used.as_dict(), **given(line)}))
    settings = resolve({"seed": 3}, tmp_path / "config.json")
    assert option not in settings.command().split()
    assert resolve(flags_of(*shlex.split(settings.command())[1:])) == replace(used, seed=3)


# ---- members that cannot be ----

TOO_MANY = [
    (3, 4, 1, "but a batch has 3: use at most 1 --members, or another --batch-size"),
    (359, 4, 1, "the last batch of an epoch has 1: use another --batch-size"),
    (205, 2, 1, "the last batch of an epoch has 2: use at most 1 --members, or another --batch-size"),
    (16, 3, 3, "the last batch of an epoch has 13 for 3 processes: use at most 2 --members"),
    (5000, 360, 2, "each of 360 members needs two samples of every batch"),
]


@pytest.mark.parametrize(("batch", "members", "world", "says"), TOO_MANY)
def test_members_without_two_samples_are_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, batch: int, members: int, world: int, says: str
) -> None:
    monkeypatch.setattr(build, "model", lambda *_: pytest.fail("built"))
    settings = resolve({"booster": "batch-ensemble", "batch_size": batch, "members": members})
    with pytest.raises(SparsityError) as refused:
        Trainer(settings, load_data("digits"), Processes(0, world, torch.device("cpu")))
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_refused_members_leave_no_folder(capsys, tmp_path: Path) -> None:
    command = ("train", "--booster", "batch-ensemble", "--batch-size", "359", "--out", str(tmp_path / "run"))
    assert cli.main([*command]) == 2
    assert "another --batch-size" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("size", "batch"), [(40, 8), (44, 12), (9, 16), (32, 16)])
@pytest.mark.parametrize("members", [1, 2, 4, 5])
def test_members_are_refused_exactly_where_a_batch_leaves_one_fewer_than_two(
    size: int, batch: int, members: int
) -> None:
    data = type("Data", (), {"train_size": size})()
    settings = resolve({"booster": "batch-ensemble", "batch_size": batch, "members": members})
    batches = [range(size)[i : i + batch] for i in range(0, size, batch)]
    owners = [[i * members // len(one) for i in range(len(one))] for one in batches]
    fewest = min(one.count(member) for one in owners for member in range(members))
    try:
        build.check_members(settings, data, 1)
        assert fewest >= 2
    except SparsityError:
        assert fewest < 2


# ---- what is told of the parts ----


@pytest.mark.parametrize("booster", MEMBERS)
def test_the_summary_has_the_scores_of_each_head_or_member(capsys, tmp_path: Path, booster: str) -> None:
    result = train(capsys, tmp_path, "--booster", booster, "--method", "dense", "--members", 2)
    assert result["tickets"] == [] and len(result["members"]) == 2
    settings, data = resolve(result_settings(tmp_path)), load_data("digits")
    model = build.model(settings, data).eval()
    model.load_state_dict(load_file(tmp_path / "ticket.safetensors"))
    x, y = next(iter(data.test_batches(1000)))
    with torch.no_grad():
        for told, logits in zip(result["members"], model.members(x), strict=True):
            assert told["accuracy"] == float((logits.argmax(1) == y).double().mean())
            assert told["nll"] == pytest.approx(float(cross_entropy(logits.double(), y)), rel=1e-6)
    assert result["members"][0] != result["members"][1]


def result_settings(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())


def test_others_have_no_members(capsys, tmp_path: Path) -> None:
    for booster in ("none", "sup-tickets", "ensemble"):
        assert train(capsys, tmp_path / booster, "--booster", booster)["members"] == []


def test_a_dense_network_is_scored_before_it_is_pruned_for_swa(capsys, tmp_path: Path) -> None:
    """The same training, three epochs of it, without pruning: the score before it. `start` is after it."""
    flags = ("--method", "dense", "--evaluate-every", 1, "--milestones")
    result = train(capsys, tmp_path / "swa", "--booster", "swa", *flags)
    train(capsys, tmp_path / "dense", "--booster", "none", *flags)
    dense, pruned = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
                     for name in ("dense", "swa"))  # fmt: skip
    scores = {key: dense[2][f"test_{key}"] for key in ("accuracy", "nll", "ece")}
    assert result["before_pruning"] == scores
    assert result["start"] == {key: pruned[2][f"test_{key}"] for key in scores} != scores
    assert (pruned[1]["sparsity"], round(pruned[2]["sparsity"], 3)) == (0, 0.9)


def test_others_are_not_pruned_before_the_cycles(capsys, tmp_path: Path) -> None:
    for booster, method in (("swa", "static"), ("sup-tickets", "dense"), ("sup-tickets", "gmp")):
        flags = ("--booster", booster, "--method", method, "--prune-epochs", 1)
        assert train(capsys, tmp_path / booster / method, *flags)["before_pruning"] is None


def test_an_average_that_is_worse_is_said_in_the_words_of_its_booster() -> None:
    tickets = [{"accuracy": 0.9, "nll": 0.3}, {"accuracy": 0.8, "nll": 0.5}]
    average = {"accuracy": 0.84, "nll": 0.41}
    swa, superposed = (verdict(average, tickets, booster) for booster in ("swa", "sup-tickets"))
    assert swa is not None and superposed is not None and superposed == verdict(average, tickets)
    assert swa.startswith("the average is worse than the mean of the networks that it averages (accuracy 84")
    assert "ticket" not in swa and "exploration" not in swa and "--lr-high" in swa and "\n" not in swa
    assert "superposed ticket" in superposed and "exploration" in superposed
    assert verdict({"accuracy": 0.86, "nll": 0.39}, tickets, "swa") is None
