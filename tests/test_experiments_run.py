"""Experiments from end to end, tiny, on the CPU: forks, averages, tables, what goes wrong."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from experiments_tiny import CHANGES, SAID, data, run
from safetensors.torch import load_file

from suptickets.errors import SparsityError
from suptickets.experiments import EXPERIMENTS, reproduction, runner, work
from suptickets.experiments.averages import located
from suptickets.experiments.plan import Mode, plan, readings, run_of, trunk_of, wanted
from suptickets.experiments.provenance import revision
from suptickets.experiments.results import write_pages
from suptickets.experiments.store import Results, Store
from suptickets.experiments.work import fork
from suptickets.training.folder import RunFolder
from suptickets.training.parts import TOO_LATE
from suptickets.training.train import default_folder, train

MODE = Mode(0.01, False, tuple(sorted(SAID.items())))
RESNET = {**CHANGES, "model": "experiments_tiny:narrow_resnet50"}
RUNS = [
    (" ".join(name for name in EXPERIMENTS if name != "layer-sparsity"), "", 1, CHANGES),
    ("diversity", "", 2, CHANGES),
    ("significance", "data=cifar10,sparsity=0.9", 2, CHANGES),
    ("layer-sparsity", "", 1, RESNET),
]


@pytest.fixture(scope="module")
def where(tmp_path_factory) -> Path:
    return data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def store(tmp_path_factory, where) -> Path:
    """All experiments of the paper at once, in one store; two seeds where one is not enough."""
    out = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)  # hundreds of runs
        patch.setattr("suptickets.training.progress.print_plain", lambda line: None)
        for names, cells, seeds, changes in RUNS:
            found = run(names, where, out, cells, seeds, changes=changes)
            assert not found["failed"] and not found["missing"]
    return out


def test_results_are_counted_as_they_come(tmp_path, where, monkeypatch, capsys):
    monkeypatch.setattr(runner, "TELL", 0.0)
    run("vgg16", where, tmp_path / "r", "method=rigl,data=cifar10,sparsity=0.9")
    assert "2 of 2 results" in capsys.readouterr().err.splitlines()
    run("vgg16 cycle-length", where, tmp_path / "r", "method=rigl,data=cifar10,sparsity=0.9", 2)
    told = [line for line in capsys.readouterr().err.splitlines() if line.endswith("results")]
    assert told[-1] == "2 of 2 results" and len(told) == len(set(told))


# ---- forks ----


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("averaging", "model=vgg16,sparsity=0.9,rule=cia"),
        ("swa", "method=dense,sparsity=0.9"),
        ("vgg16", "method=granet,sparsity=0.9,booster=none,data=cifar10"),
    ],
)
def test_a_forked_branch_is_the_same_run_bit_for_bit(tmp_path, where, name, cells):
    """As if trained from the trunk's checkpoint by hand, and as if trained alone from its first step."""
    run(name, where, tmp_path / "r", cells)
    (task,) = plan(wanted(EXPERIMENTS[name].cells(cells), 1), MODE)
    settings = located(task.branches[0].settings, str(where))
    trunk, forked = (
        RunFolder(tmp_path / "r/runs/forked" / default_folder(s).name) for s in (task.trunk, settings)
    )
    fork(trunk, RunFolder(tmp_path / "by-hand"), settings)
    (tmp_path / "by-hand" / "config.json").unlink()  # its checkpoint knows that it is a branch, and which
    assert RunFolder(tmp_path / "by-hand").look(settings) is None
    with pytest.raises(SparsityError, match="a run with other settings .weight_decay"):
        RunFolder(tmp_path / "by-hand").look(replace(settings, weight_decay=0.25))
    train(settings, tmp_path / "by-hand")
    train(settings, tmp_path / "alone")
    summary = same_parts(forked)
    for other in (RunFolder(tmp_path / "by-hand"), RunFolder(tmp_path / "alone")):
        assert same_parts(other) == summary and len(summary["tickets"]) == 3 * settings.cyclic
        assert len(other.singles()) == 3 * settings.cyclic
        for ours, theirs in zip(
            [forked.ticket, *forked.singles()], [other.ticket, *other.singles()], strict=True
        ):
            a, b = load_file(ours), load_file(theirs)
            assert a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)
    lines = [line["epoch"] for line in map(json.loads, forked.metrics.read_text().splitlines())]
    assert lines == [1, 2, 3, 4, 5]


CIA = "model=vgg16,sparsity=0.9,rule=cia"


@pytest.fixture
def trained(monkeypatch) -> list[int]:
    """The epochs that are trained, in order."""
    epochs, log = [], RunFolder.log
    monkeypatch.setattr(RunFolder, "log", lambda self, line: (epochs.append(line["epoch"]), log(self, line)))
    return epochs


def folders(out, booster) -> list[Path]:
    return list(Path(out).glob(f"runs/forked/*-{booster}-*seed*/"))


def test_trunks_are_not_told_that_they_change_in_vain_at_their_end(tmp_path, where, recwarn):
    """Their branches go on."""
    run("vgg16", where, tmp_path / "r", "method=rigl,sparsity=0.9,booster=sup-tickets,data=cifar10")
    (trunk,) = folders(tmp_path / "r", "none")
    last = json.loads((trunk / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert last % CHANGES["interval"] == 0 and not any(TOO_LATE in str(told.message) for told in recwarn)


@pytest.mark.parametrize("trunk", ["kept", "gone"])
def test_a_branch_that_was_cut_off_goes_on_from_its_own_checkpoint(tmp_path, where, monkeypatch, trunk):
    """That is all it needs: with it, the trunk is not trained again where it was left behind."""
    trained, log = [], RunFolder.log

    def cut_off(self, line):
        trained.append(line["epoch"])
        if line["epoch"] == 4 and trained.count(4) == 1:
            raise OSError("the power is gone")
        log(self, line)

    options = {"cells": CIA, "changes": {**CHANGES, "checkpoint_every": 0}}
    whole = run("averaging", where, tmp_path / "whole", **options)
    monkeypatch.setattr(RunFolder, "log", cut_off)
    broken = run("averaging", where, tmp_path / "r", **options)
    assert len(broken["failed"]) == 1 and "the power is gone" in broken["failed"][0]
    if trunk == "gone":
        shutil.rmtree(*folders(tmp_path / "r", "none"))
    again = run("averaging", where, tmp_path / "r", **options)
    assert trained == [1, 2, 3, 4, 4, 5] and again["cells"] == whole["cells"] and not again["failed"]
    ours, theirs = (
        {file.name: load_file(file) for file in out.glob("runs/forked/*sup-tickets*/**/*.safetensors")}
        for out in (tmp_path / "r", tmp_path / "whole")
    )
    assert len(ours) == 4 and ours.keys() == theirs.keys()
    assert all(ours[n][key].equal(theirs[n][key]) for n in ours for key in ours[n])


@pytest.mark.parametrize(
    ("left", "again"),
    [
        (("checkpoint/last.pt", "summary.json", "metrics.jsonl", "config.json"), [3, 4, 5]),
        (("checkpoint/last.pt",), [3, 4, 5]),
        (("summary.json", "metrics.jsonl", "config.json"), [1, 2, 3, 4, 5]),
        ((), [1, 2, 3, 4, 5]),
    ],
)
def test_a_trunk_is_trained_again_only_if_its_checkpoint_is_gone(tmp_path, where, trained, left, again):
    run("averaging", where, tmp_path / "r", CIA)
    (trunk,), (branch,) = (folders(tmp_path / "r", name) for name in ("none", "sup-tickets"))
    shutil.rmtree(branch)
    for file in [path for path in trunk.rglob("*") if path.is_file()]:
        if str(file.relative_to(trunk)) not in left:
            file.unlink()
    (line,) = (tmp_path / "r" / "cifar100-vgg16.jsonl").read_text().splitlines()
    (tmp_path / "r" / "cifar100-vgg16.jsonl").unlink()
    trained.clear()
    run("averaging", where, tmp_path / "r", CIA)
    assert trained == again
    (record,) = Store(tmp_path / "r").read()
    assert same(record["measures"]) == same(json.loads(line)["measures"])


def same(measures):
    return {key: value for key, value in measures.items() if key != "seconds"}


def test_a_checkpoint_that_was_damaged_on_its_way_is_not_used(tmp_path, where, trained, capsys):
    run("averaging", where, tmp_path / "r", CIA)
    (trunk,), (branch,) = (folders(tmp_path / "r", name) for name in ("none", "sup-tickets"))
    shutil.rmtree(branch)
    (tmp_path / "r" / "cifar100-vgg16.jsonl").unlink()
    checkpoint = trunk / "checkpoint" / "last.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    trained.clear()
    found = run("averaging", where, tmp_path / "r", CIA)
    assert trained == [1, 2, 3, 4, 5] and not found["failed"]
    assert f"{checkpoint} is damaged: the run starts over" in capsys.readouterr().err


def test_more_seeds_train_only_the_new_ones(tmp_path, where, monkeypatch):
    seeds = []
    monkeypatch.setattr(work, "train", lambda s, *a, **o: (seeds.append(s.seed), train(s, *a, **o)))
    cells = "data=cifar10,method=rigl,sparsity=0.9,booster=none"
    for count, new in ((1, [1]), (3, [2, 3]), (2, []), (3, [])):
        seeds.clear()
        found = run("vgg16", where, tmp_path / "r", cells, seeds=count)
        assert sorted(set(seeds)) == new and found["cells"][0]["ours"]["runs"] == count
    assert [one["seed"] for one in Store(tmp_path / "r").read()] == [1, 2, 3]


def test_several_measures_are_read_off_one_run(tmp_path, where, trained):
    found = run("uncertainty", where, tmp_path / "r", "model=vgg16,data=cifar10,sparsity=0.9")
    assert sorted(one["measure"] for one in found["cells"]) == ["ece", "ece", "nll", "nll"]
    assert trained == [1, 2, 3, 4, 5, 3, 4, 5] and len(Store(tmp_path / "r").read()) == 2


def test_networks_that_are_compared_must_be_there(tmp_path, where):
    """A store alone does not have them."""
    cells = "booster=dense-ensemble"
    run("diversity", where, tmp_path / "r", cells, seeds=1)
    gone = folders(tmp_path / "r", "none")
    for folder in gone:
        shutil.rmtree(folder)
    found = run("diversity", where, tmp_path / "r", cells, seeds=2)
    (line,) = found["failed"]
    assert "networks are compared that are gone: bring back " in line and "seed1" in line


def same_parts(folder):
    return {k: v for k, v in folder.load_summary().items() if k not in ("run", "seconds", "command")}


SHARED = [
    ("averaging", "sparsity=0.9"),
    ("batch-norm", "data=cifar100,method=rigl,sparsity=0.9,model=vgg16"),
    ("ensemble", "data=cifar100,sparsity=0.9,model=vgg16"),
    ("ticket-count-extended", "sparsity=0.9,model=vgg16"),
    ("ticket-count-fixed", "sparsity=0.9"),
    ("large-lr", "model=vgg16"),
    ("variance", "model=vgg16"),
    ("swa", "sparsity=0.9"),
    ("diversity", "method=rigl"),
]


@pytest.mark.parametrize(("name", "cells"), SHARED, ids=[name for name, _ in SHARED])
def test_what_is_read_off_a_fork_is_what_a_run_of_its_own_gives(where, store, name, cells):
    """Every rule, beta, BU, ensemble, number of tickets: without training, and the same measures."""
    run(name, where, store, cells)
    run(name, where, store, cells, separate=True)
    forked, alone = (Results(Store(store).read(), replace(MODE, separate=s)) for s in (False, True))
    found = wanted(EXPERIMENTS[name].cells(cells), 1)
    for _, reading in found:
        a, b = forked.measures(reading)[1], alone.measures(reading)[1]
        assert a.keys() >= {"nonzero", "tickets", "start"} and a["booster"] == reading.settings.booster
        differing = [k for k in a.keys() & b.keys() - UNLIKE if not near(a[k], b[k])]
        assert not differing, {key: (a[key], b[key]) for key in differing}
    assert found


# What need not be the same; living connections may hold a 0, which a file of values does not tell.
UNLIKE = {"layers", "nonzero", "sparsity", "reliability"}


def near(a, b) -> bool:
    """Whether two measures are the same, but for rounding."""
    if isinstance(a, float | int):
        return a == pytest.approx(b, rel=1e-5, abs=1e-7)
    if isinstance(a, dict):
        return all(near(a[key], b[key]) for key in a.keys() & b.keys())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(near, a, b))
    return a == b


# ---- every experiment ----


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_every_cell_of_the_paper(where, store, name):
    """They were all run together; alone, nothing is left to do."""
    changes = RESNET if name == "layer-sparsity" else CHANGES
    lines = len(Store(store).read())
    found = run(name, where, store, changes=changes)
    assert len(Store(store).read()) == lines
    assert len(found["cells"]) == len(EXPERIMENTS[name].table)
    for cell, one in zip(EXPERIMENTS[name].table, found["cells"], strict=True):
        assert one["settings"].items() >= {"data": cell.data, "sparsity": cell.sparsity}.items()
        assert one["measure"] == cell.measure
        paper = cell.paper and (cell.paper.mean, cell.paper.deviation, cell.printed)
        assert (one["paper"] and tuple(one["paper"].values())) == paper
        several = cell.of == "seeds" or cell.measure == "learning_rate"
        assert (one["ours"] is None) == several, one
        assert several or one["ours"]["runs"] == (0 if cell.of == "model" else 1)
    json.dumps(found)


def test_what_needs_several_seeds_has_them(where, store):
    found = run("diversity", where, store, seeds=2)
    assert [one["ours"]["runs"] for one in found["cells"]] == [2] * 10
    together = next(one for one in found["cells"] if one["settings"]["booster"] == "dense-ensemble")
    assert together["ours"]["mean"] > 0 and together["ours"]["sd"] is None
    found = run("significance", where, store, "data=cifar10,sparsity=0.9", seeds=2)
    tests = [one["ours"] for one in found["cells"] if one["measure"] == "p_value"]
    assert len(tests) == 2 and all(0 < one["mean"] <= 1 and one["runs"] == 2 for one in tests)


def test_pages_are_computed_from_the_store(tmp_path, where):
    """A page of each experiment that has results."""
    out = tmp_path / "r"
    run("vgg16", where, out, "sparsity=0.9")
    for format in ("html", "md", "tex"):
        some = [] if format == "tex" else ["vgg16", "granet-vs-dense"]  # plots take their time
        written = {path.name: path.read_text() for path in write_pages(out, some, format=format)}
        assert f"vgg16.{format}" in written and f"granet-vs-dense.{format}" in written
        assert f"resnet50.{format}" not in written
    html = (out / "vgg16.html").read_text()
    changed = " ".join(f"--set {name}={value}" for name, value in sorted(CHANGES.items()))
    command = f"suptickets reproduce vgg16 --cells sparsity=0.9 --seeds 1 --scale 0.01 {changed}"
    command += f" --data-dir DATA --out {out}"
    assert "A trial (forked at scale 0.01" in html and f">{command}</td>" in html
    again = re.search("<code>(suptickets reproduce vgg16 .*) --data-dir DATA --out again</code>", html)
    assert again and "sparsity=0.9" in again[1] and "--seeds 1 --scale 0.01 --set" in again[1]
    record = Store(out).read()[0]
    assert f"torch {record['versions']['torch']}" in html and f"revision {revision()}" in html
    assert record["hardware"] in html and record["command"] == command
    for format in ("md", "tex"):
        text = (out / f"vgg16.{format}").read_text()
        assert "A trial (forked at scale 0.01" in text and "Forked: runs share" in text
    (drawn,) = write_pages(tmp_path / "r", ["schedule"], tmp_path / "plots", format="svg")
    assert drawn.name == "schedule.svg" and ">Sup-tickets'<" in drawn.read_text()


# ---- results ----


def test_a_result_says_all_it_depends_on(tmp_path, where):
    run("vgg16", where, tmp_path / "r", "data=cifar10,method=rigl,sparsity=0.9,booster=sup-tickets", seeds=2)
    first, second = Store(tmp_path / "r").read()
    assert (first["seed"], second["seed"]) == (1, 2) and first["settings"]["seed"] == 1
    assert first["cell"]["model"] == "vgg16" and first["settings"]["model"] == CHANGES["model"]
    assert first["changes"] == SAID and first["scale"] == 0.01 and first["separate"] is False
    assert {"python", "torch", "suptickets"} <= first["versions"].keys() and first["hardware"]
    assert first["seconds"] > 0 and first["revision"] == revision() and first["time"].endswith("+00:00")
    assert first["jobs"] == 1 and first["command"].startswith(
        "suptickets reproduce vgg16 --cells data=cifar10"
    )
    assert {"accuracy", "nll", "ece", "layers", "diversity", "tickets", "start"} <= first["measures"].keys()
    assert len(first["measures"]["tickets"]) == 3 and "data_dir" not in first["settings"]


@pytest.mark.parametrize(
    ("known", "todo"),
    [("a" * 40, None), ("a" * 40 + "-dirty", "commit first"), ("unknown", "set SUPTICKETS_REVISION")],
)
def test_results_of_no_committed_revision_are_announced(monkeypatch, capsys, known, todo):
    """With what helps: a checkout does not heed the variable. Not for a trial: nobody is to believe it."""
    monkeypatch.setattr(reproduction, "revision", lambda: known)
    tasks = plan(wanted(EXPERIMENTS["vgg16"].cells("method=set"), 1), Mode())
    reproduction._tell_revision(Mode(), tasks)
    said = f"results will name the revision {known}: {todo}\n" if todo else ""
    assert capsys.readouterr().err == said
    reproduction._tell_revision(Mode(0.1), tasks)
    reproduction._tell_revision(Mode(), [])
    assert not capsys.readouterr().err


def test_a_number_that_does_not_exist_is_null(tmp_path):
    cell = {"data": "cifar10", "model": "vgg16"}
    mode = {"scale": 1, "separate": False, "changes": {}}
    Store(tmp_path).add({"cell": cell, "seed": 1, **mode, "measures": {"nll": float("nan")}})
    text = (tmp_path / "cifar10-vgg16.jsonl").read_text()
    assert "NaN" not in text and json.loads(text)["measures"] == {"nll": None}


def test_what_is_done_is_not_done_again(tmp_path, where):
    filter_ = "data=cifar10,method=rigl,sparsity=0.9"
    found = run("vgg16", where, tmp_path / "r", filter_)
    shutil.rmtree(tmp_path / "r" / "runs")
    lines = Store(tmp_path / "r").read()
    assert run("vgg16 uncertainty", where, tmp_path / "r", filter_ + ",measure=accuracy") == {
        **found,
        "experiment": "vgg16 uncertainty",
    }
    assert Store(tmp_path / "r").read() == lines and len(lines) == 2
    assert not any((tmp_path / "r" / "runs").glob("*/cifar*/"))
    more = run("vgg16", where, tmp_path / "r", filter_, seeds=2)
    assert [one["ours"]["runs"] for one in more["cells"]] == [2, 2]
    assert len(Store(tmp_path / "r").read()) == 4


def test_missing_data_are_told_and_the_rest_is_done(tmp_path, where, capsys):
    (tmp_path / "data").mkdir()
    shutil.copytree(where / "cifar-10-batches-py", tmp_path / "data" / "cifar-10-batches-py")
    (tmp_path / "data" / "cifar-100-python").write_text("not a folder")
    first, found = (
        run("vgg16", tmp_path / "data", tmp_path / "r", "method=rigl,sparsity=0.9") for _ in range(2)
    )
    assert first == found  # again, though all that can be done is done
    (missing,) = found["missing"]
    assert missing.startswith("without cifar100: ") and capsys.readouterr().err.count(f"{missing}\n") == 2
    done = {one["settings"]["data"]: one["ours"] is not None for one in found["cells"]}
    assert done == {"cifar10": True, "cifar100": False}
    with pytest.raises(SparsityError, match=r"^without cifar100: [^\n]+$"):
        run("vgg16", tmp_path / "data", tmp_path / "r", "method=rigl,sparsity=0.9,data=cifar100")
    capsys.readouterr()
    with pytest.raises(SparsityError, match=r"^without cifar10: [^\n]+; without cifar100: [^\n]+$"):
        run("vgg16", tmp_path / "no", tmp_path / "other", "method=rigl,sparsity=0.9")
    assert capsys.readouterr().err == ""  # all are named, in one line


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path, where):
    found = run(
        "diversity", where, tmp_path / "r", changes={**CHANGES, "model": "experiments_tiny:unchained"}
    )
    (failed,) = found["failed"]
    assert "tree-net" in failed and "is no chain of modules" in failed
    boosters = {one["settings"]["booster"] for one in found["cells"] if one["ours"]}
    assert boosters == {"batch-ensemble", "sup-tickets"}


@pytest.mark.parametrize(
    ("names", "cells", "least"),
    [("vgg16", "method=rigl,sparsity=0.9,data=cifar10", 0.19), ("cycle-length", "cycle_epochs=2", 0.75)],
)
def test_a_scale_that_leaves_too_few_steps_is_refused(tmp_path, where, names, cells, least):
    """Of all images in one batch: a cycle of one step has no middle. The scale that is named works."""
    options = {"changes": {**CHANGES, "batch_size": 100}, "cells": f"{cells},model=vgg16"}
    with pytest.raises(SparsityError) as refused:
        run(names, where, tmp_path / "r", scale=0.05, **options)
    told = f"--scale 0.05 leaves too few steps of training: use at least {least}"
    assert str(refused.value) == told and not (tmp_path / "r").exists()
    with pytest.raises(SparsityError, match=f"use at least {least}"):
        run(names, where, tmp_path / "r", scale=least - 0.01, **options)
    if least < 0.5:
        found = run(names, where, tmp_path / "r", scale=least, **options)
        assert not found["failed"] and all(one["ours"] for one in found["cells"])


def test_without_submitit_it_says_so(tmp_path, where, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SparsityError, match="needs submitit: pip install"):
        run("vgg16", where, tmp_path / "r", "data=cifar10,method=rigl,sparsity=0.9")
    assert run("vgg16", where, tmp_path / "r", dry_run=True)["runs"] > 0
    assert len(run("schedule", where, tmp_path / "r")["cells"]) == 2  # nothing to train
    assert not (tmp_path / "r").exists()


def test_a_damaged_line_is_told(tmp_path, where, capsys):
    filter_ = "data=cifar10,method=rigl,sparsity=0.9,booster=none"
    run("vgg16", where, tmp_path / "r", filter_)
    file = tmp_path / "r" / "cifar10-vgg16.jsonl"
    file.write_text(file.read_text()[:-20])
    found = run("vgg16", where, tmp_path / "r", filter_)
    assert "line 1 is damaged: skipped, and left as it is" in capsys.readouterr().err
    assert found["cells"][0]["ours"] and found["damaged"] == [f"{file}, line 1"]


@pytest.mark.parametrize("change", [{"prune": "layer"}, {"prune_when": "end"}])
def test_a_changed_setting_holds_for_all_that_is_read_off_the_tickets(tmp_path, where, change):
    """Forked, where one run gives all averages, as with runs of their own."""
    counts = {}
    for separate in (False, True):
        out = tmp_path / str(separate)
        cells = "model=vgg16,sparsity=0.9,rule=cia,rule=caa"
        run("averaging", where, out, cells, changes={**CHANGES, **change}, separate=separate)
        counts[separate] = {
            record["cell"]["rule"]: [layer["nonzero"] for layer in record["measures"]["layers"]]
            for record in Store(out).read()
        }
    assert counts[False].keys() == {"cia", "caa"} and counts[False] == counts[True]
    if "prune" in change:  # as many as a ticket has in each layer, in whichever way they are averaged
        assert counts[False]["cia"] == counts[False]["caa"]


def test_what_is_held_out_is_held_out_of_all_that_is_read_off_the_tickets(tmp_path, where):
    cells = "model=vgg16,data=cifar100,sparsity=0.9"
    run("averaging ensemble", where, tmp_path / "r", cells, changes={**CHANGES, "holdout": 0.25})
    records = Store(tmp_path / "r").read()
    seen = {sum(part["samples"] for part in record["measures"]["reliability"]) for record in records}
    assert len(records) > 3 and seen == {10}


@pytest.mark.parametrize("change", [("prune", "layer"), ("prune_when", "end"), ("lr_low", 0.002)])
def test_what_acts_in_the_cycles_alone_has_the_same_trunk(change):
    (cell,) = EXPERIMENTS["vgg16"].cells("data=cifar100,method=rigl,sparsity=0.95,booster=sup-tickets")
    (reading,) = readings(cell)
    trunks = {trunk_of(run_of(reading, 1, Mode(1.0, False, changes))) for changes in ((), (change,))}
    assert len(trunks) == 1
