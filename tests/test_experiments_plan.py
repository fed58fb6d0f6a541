"""From cells to runs: what is shared, what it costs, what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from experiments_tiny import run as reproduce_tiny

from suptickets.errors import SparsityError
from suptickets.experiments import EXPERIMENTS, reproduction, select
from suptickets.experiments.estimate import about_model, cost, run_flops, tree
from suptickets.experiments.plan import Mode, Reading, drops, plan, run_of, trunk_of, wanted
from suptickets.experiments.reproduction import reproduce
from suptickets.training.build import drop_epochs, learning_rate
from suptickets.training.price import price
from suptickets.training.settings import resolve

FORKED, SEPARATE = Mode(), Mode(separate=True)
ABLATIONS = ["averaging", "cycle-length", "lr-schedules", "large-lr", "batch-norm", "uncertainty", "ensemble"]


def tasks(names, where="", mode=FORKED, seeds=1):
    cells = select([cell for name in names for cell in EXPERIMENTS[name].table], where)
    return plan(wanted(cells, seeds), mode)


def epochs(*arguments, **options):
    return sum(task.epochs for task in tasks(*arguments, **options))


def test_the_main_table_shares_its_trunks():
    """18 trunks of 226 epochs with two finishes of 24 each, and two dense runs, for 38 runs of 250."""
    assert epochs(["vgg16"], mode=SEPARATE) == 38 * 250
    assert epochs(["vgg16"]) == 18 * (226 + 2 * 24) + 2 * 250 <= 0.6 * 38 * 250


def test_the_ablations_share_even_more():
    alone = sum(epochs([name], "model=vgg16", SEPARATE) for name in ABLATIONS)
    assert alone == (21 + 12 + 9 + 2 + 38 + 12 + 12) * 250
    assert epochs(ABLATIONS, "model=vgg16") <= 0.25 * alone


def test_the_dry_run_counts_as_the_documents_do(tmp_path, capsys):
    """Separate, each experiment on its own as in the paper; what is then trained once is said."""
    options = {"cells": "model=vgg16", "seeds": 1, "dry_run": True, "out": tmp_path / "r"}
    forked, alone = (reproduce(ABLATIONS, separate=s, **options)["epochs"] for s in (False, True))
    assert alone == sum(epochs([name], "model=vgg16", SEPARATE) for name in ABLATIONS)
    assert forked <= 0.25 * alone
    once = epochs(ABLATIONS, "model=vgg16", SEPARATE)
    assert (
        once < alone and f"are trained once: {once // 250} runs, {once:,} epochs" in capsys.readouterr().err
    )
    documents = (Path(__file__).parent.parent / "docs" / "reproduce.md").read_text()
    assert f"| {alone:,} | {forked:,} | {forked / alone:.2f} |" in documents


def test_the_tree_tells_separate_runs_apart(capsys, tmp_path):
    options = {"seeds": 1, "dry_run": True, "separate": True, "out": tmp_path / "r"}
    reproduce(["averaging", "batch-norm"], cells="model=vgg16,sparsity=0.9,data=cifar100", **options)
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "triangle to 0.005, rule cima, beta 0.9): 250 epochs, seed 1" in told
    assert "triangle to 0.005, rule caa): 250 epochs, seed 1" in told
    assert "triangle to 0.005, batch norm recompute): 250 epochs, seed 1" in told
    assert "seeds" not in told and "triangle to 0.005): 250 epochs, seed 1, 2 times" in told


def test_equal_trees_are_one_with_a_count():
    few = tasks(["vgg16"], "method=rigl,sparsity=0.9,data=cifar10", SEPARATE, seeds=3)
    shown = [node.label for node in tree(few[::-1]).children]
    assert len(shown) == 2 and all(line.endswith(": 250 epochs, 3 seeds") for line in shown)
    twice = [node.label for node in tree([*few, *few]).children]
    assert twice == [f"{line}, 2 times" for line in shown[::-1]]
    shown = [node.label for node in tree([t for t in few if t.seed != 2]).children]
    assert all(line.endswith(", 2 seeds (1, 3)") for line in shown)
    assert tree(few).label == "0 trunks and 6 other runs, 1,500 epochs"


def test_the_tree_names_a_distribution_other_than_the_default():
    labels = [node.label for node in tree(tasks(["imagenet"], "sparsity=0.9", seeds=None)).children]
    assert "imagenet resnet50-imagenet set 0.9 uniform: 92 epochs, seed 1" in labels
    assert sum("uniform" in label or "erk" in label for label in labels) == 1


def test_a_table_from_other_tables_trains_nothing_of_its_own():
    tables = ["vgg16", "resnet50", "wrn28-10"]
    assert epochs([*tables, "granet-vs-dense"]) == epochs(tables)


def test_fewer_cycles_are_the_beginning_of_more():
    (task,) = tasks(["ticket-count-extended"], "model=vgg16,sparsity=0.9")
    (branch,) = task.branches
    assert (task.trunk.epochs, branch.settings.cycles, branch.settings.epochs) == (226, 9, 298)
    assert sorted(reading.settings.cycles for reading in branch.readings) == [3, 6, 9]


def test_averages_train_nothing():
    (task,) = tasks(["averaging"], "model=vgg16,sparsity=0.9")
    (branch,) = task.branches
    assert len(branch.readings) == 7 and task.epochs == 250


def test_the_teachers_are_the_tickets_of_a_branch():
    (task,) = tasks(["distillation"], "data=cifar10,method=set,sparsity=0.9")
    fork, student = task.branches
    assert student.teacher == fork.settings and fork.settings.keep_tickets and not student.fork
    assert task.epochs == 250 + 250
    alone = tasks(["distillation"], "data=cifar10,method=set,sparsity=0.9,booster=distillation", SEPARATE)
    assert [one.epochs for one in alone] == [2 * 250]


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.1, 0.037, 0.01])
@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_a_branch_goes_on_as_its_trunk_began(name, scale):
    """At every step before the fork, trunk and branch have the same learning rate; the fork is an epoch."""
    for task in tasks([name], mode=Mode(scale)):
        for branch in task.branches:
            if not branch.fork:
                continue
            trunk, steps = learning_rate(task.trunk, 7), task.trunk.epochs * 7
            own = learning_rate(branch.settings, 7)
            assert [trunk(n) for n in range(1, steps + 1)] == [own(n) for n in range(1, steps + 1)]
            added = branch.settings.epochs - task.trunk.epochs
            assert (
                added == branch.settings.cycles * branch.settings.cycle_epochs or not branch.settings.cyclic
            )
            assert added >= 1 and task.trunk == trunk_of(branch.settings)


def test_plain_runs_drop_where_those_with_cycles_do_and_alone_where_the_paper_says():
    reading = Reading.of(
        {"data": "cifar10", "model": "vgg16", "method": "set", "sparsity": 0.9, "booster": "none"}
    )
    forked, alone = (run_of(reading, 1, mode) for mode in (Mode(), SEPARATE))
    assert drops(forked) == [113, 169] and forked.epochs == alone.epochs == 250
    rate = learning_rate(alone, 1)
    assert [n for n in range(1, 250) if rate(n + 1) < rate(n)] == [125, 187]


def test_what_has_no_effect_makes_no_other_reading():
    same = {"data": "cifar100", "model": "vgg16", "method": "rigl", "sparsity": 0.9, "booster": "sup-tickets"}
    assert Reading.of({**same, "rule": "cia", "beta": 0.3}) == Reading.of({**same, "cycle_epochs": 8})
    assert Reading.of({**same, "rule": "cima", "beta": 0.3}) != Reading.of({**same, "rule": "cima"})
    ensemble = {**same, "booster": "ensemble"}
    assert Reading.of({**ensemble, "rule": "caa"}) == Reading.of(ensemble) != Reading.of(same)


def test_the_key_of_a_reading_survives_new_settings():
    """The store is read by versions with more settings: its keys name only what the paper varies."""
    reading = Reading.of(EXPERIMENTS["variance"].table[0].settings())
    other = Reading(replace(reading.settings, workers=7, explore_at="end"))
    assert reading.key == other.key
    assert reading.key["criteria"] == ["largest:gradient", "magnitude:random", "magnitude:random"]


def test_the_rate_of_exploration_is_in_a_key_where_it_is_not_the_boosters():
    """It was varied after the first results had been stored: their keys do not name it."""
    same = {"data": "cifar100", "model": "vgg16", "method": "rigl", "sparsity": 0.9}
    cycles, less = ({**same, "booster": "sup-tickets", "explore_rate": rate} for rate in (0.5, 0.2))
    assert "explore_rate" not in Reading.of(cycles).key and Reading.of(less).key["explore_rate"] == 0.2
    for booster in ("none", "swa", "ensemble"):
        assert "explore_rate" not in Reading.of({**same, "booster": booster}).key
    assert Reading.of({**less, "booster": "none"}) == Reading.of({**same, "booster": "none"})
    first, second = (trunk_of(run_of(Reading.of(one), 1, Mode())) for one in (cycles, less))
    assert first == second


def test_the_rate_of_exploration_can_be_changed_where_no_cell_varies_it(tmp_path):
    """As in stores that were made before any did."""
    changed = {"explore_rate": 0.2}
    assert Mode(changes=(("explore_rate", 0.2),)).as_dict()["changes"] == changed
    options = {"dry_run": True, "out": tmp_path / "r", "seeds": 1}
    found = reproduce(["vgg16"], cells="method=rigl,sparsity=0.95", changes=changed, **options)
    assert found["mode"] == "forked at scale 1, explore_rate 0.2"
    with pytest.raises(SparsityError, match="explore_rate is what earlier-cycles varies: --cells picks some"):
        reproduce(["vgg16", "earlier-cycles"], changes=changed, **options)


def test_the_dry_run_tells_how_much_branches_explore(tmp_path, capsys):
    reproduce(["earlier-cycles"], cells="sparsity=0.9,cycles=9", dry_run=True, out=tmp_path / "r")
    shown = capsys.readouterr().err
    assert "(9 cycles of 8, triangle to 0.02, explore rate 0.2)" in shown
    assert "(9 cycles of 8, triangle to 0.02): 72 epochs" in shown


def test_seeds_are_the_papers_unless_told():
    assert {task.seed for task in tasks(["significance"], "method=rigl", seeds=None)} == set(range(1, 16))
    assert {task.seed for task in tasks(["imagenet"], "method=rigl", seeds=None)} == {1}
    assert {task.seed for task in tasks(["vgg16"], "method=rigl", seeds=2)} == {1, 2}


def test_the_dry_run_tells_the_cost_and_needs_nothing(tmp_path, capsys):
    found = reproduce(["vgg16"], seeds=2, cells="sparsity=0.95,method=rigl", dry_run=True, out=tmp_path / "r")
    assert found["runs"] == 2 * 2 * 3 and found["epochs"] == 2 * 2 * 274
    dense = 3 * 2 * 313_200_000 * 50_000 * found["epochs"]  # VGG-16: 0.63 GFLOPs a forward pass
    assert 0.05 * dense < found["flops"] < 0.3 * dense and 0 < found["hours"] < 10
    shown = capsys.readouterr().err
    assert "cifar10 vgg16 rigl 0.95: 226 epochs, 2 seeds" in shown and "plain finish: 24 epochs" in shown
    assert "sup-tickets (3 cycles of 8, triangle to 0.005): 24 epochs" in shown
    assert not (tmp_path / "r").exists()


def test_separate_runs_cost_more():
    forked, alone = (cost(tasks(["vgg16"], "method=rigl", mode)) for mode in (Mode(), SEPARATE))
    assert forked["flops"] < 0.6 * alone["flops"] and forked["hours"] < 0.6 * alone["hours"]


def test_hours_come_from_results_on_this_hardware_where_the_store_has_some():
    """Three at a time, a run of 2,500 s took a third of the hardware."""
    few = tasks(["vgg16"], "method=rigl,sparsity=0.9,data=cifar10")
    known = {"cell": {"model": "vgg16"}, "changes": {}, "measures": {"epochs": 250}, "hardware": "mine"}
    record = {**known, "seconds": 2500.0}
    found = cost(few, [record], "mine")
    assert found["hours"] == pytest.approx(274 * 10 / 3600)
    assert found["hours_from"] == "vgg16: the store's 1 results on mine"
    assert cost(few, [record | {"jobs": 3}], "mine")["hours"] == pytest.approx(found["hours"] / 3)
    usual = cost(few)
    assert usual["hours_from"] == "vgg16: steps measured on an NVIDIA H200, one run at a time"
    assert cost(few, [record | {"changes": {"model": "x"}}], "mine") == usual
    assert cost(few, [record], "another") == usual
    other = cost(few + tasks(["imagenet"], "method=rigl,sparsity=0.9", seeds=None))
    assert other["hours_from"].endswith("; resnet50-imagenet: a guess for an NVIDIA H200")


def test_cells_about_the_model_need_no_run():
    cells = {(c.measure, c.layer): c for c in EXPERIMENTS["layer-sparsity"].table if c.of == "model"}
    assert about_model(cells["layer_parameters", "overall"]) == 25_502_912
    assert about_model(cells["layer_parameters", "backbone"]) == 25_502_912 - 2_048_000
    assert (
        about_model(cells["layer_flops", "layer1.0.conv2"])
        == cells["layer_flops", "layer1.0.conv2"].paper.mean
    )
    (train,) = [c for c in EXPERIMENTS["imagenet"].table if c.measure == "train_flops"]
    assert about_model(train) == pytest.approx(train.paper.mean, rel=0.03)
    assert about_model(EXPERIMENTS["schedule"].table[0]) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": "vgg17"}, "unknown experiment 'vgg17': did you mean 'vgg16'?"),
        ({"cells": "method=rigle"}, "unknown method 'rigle': did you mean 'rigl'?"),
        ({"cells": "sparsety=0.9"}, "unknown key of a cell 'sparsety': did you mean 'sparsity'?"),
        ({"cells": "method=dense,booster=sup-tickets"}, "no cell has method=dense,booster=sup-tickets"),
        ({"seeds": 0}, "--seeds must be a whole number, at least 1, not 0"),
        ({"scale": 0}, "--scale must be above 0 and at most 1, not 0"),
        ({"scale": 2}, "--scale must be above 0 and at most 1, not 2"),
        ({"jobs": 0}, "--jobs must be a whole number, at least 1, not 0"),
        ({"executor": "slrm"}, "unknown executor 'slrm': did you mean 'slurm'?"),
        (
            {"changes": {"sparsity": 0.5}},
            "sparsity belongs to the cells, which are the paper's: --cells picks some",
        ),
        ({"changes": {"include_start": True}}, "include_start needs --separate: "),
        ({"changes": {"lrr": 0.5}}, "there is no setting 'lrr': did you mean 'lr'?"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, arguments, message):
    options = {"names": "vgg16", "where": tmp_path, "out": tmp_path / "r", **arguments}
    with pytest.raises(SparsityError) as refused:
        reproduce_tiny(**options)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)
    assert not (tmp_path / "r").exists()


def test_a_change_after_which_all_runs_are_the_same_is_none():
    """Compared run by run: a scale changes what a recipe says."""

    def mode(scale, separate=False, **changes):
        return reproduction._mode(scale, separate, changes, EXPERIMENTS["vgg16"].cells("method=rigl"))

    assert mode(1.0, decay="constant", interval=1000) == Mode()
    assert mode(1.0, True, decay="cosine", interval=1000) == Mode(1.0, True, (("decay", "cosine"),))
    assert mode(0.1, interval=1000) == Mode(0.1, changes=(("interval", 1000),))
    assert mode(0.1, interval=100) == Mode(0.1)
    several = mode(1.0, workers=4)
    assert several == Mode() and not several.trial and several.unsaid == (("workers", 4),)
    reading = Reading.of({"data": "cifar100"})
    assert run_of(reading, 1, several).workers == 4 and "workers" not in str(several)


def test_shares_of_epochs_give_the_drops_that_they_are_made_of():
    usual = resolve({"data": "cifar10"})
    for epochs in range(1, 300):
        every = range(epochs + 1)
        run = replace(usual, milestones=tuple(drop / epochs for drop in every))
        assert drop_epochs(run, epochs) == [*every]


@pytest.mark.parametrize("booster", ["tree-net", "batch-ensemble", "none"])
def test_a_plan_costs_what_flops_says(booster):
    run = resolve({"data": "cifar10", "model": "vgg16", "method": "rigl", "booster": booster, "epochs": 3})
    assert run_flops(run, "vgg16") == pytest.approx(price(run)["training_flops"], rel=1e-9)
