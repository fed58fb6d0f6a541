"""`suptickets reproduce`, and `suptickets report` on what it stored."""

import json
import os
import shlex

import pytest
from experiments_tiny import CHANGES, SAID, data
from report_runs import make_run
from surface import SCHEMA, check

from suptickets.cli import main
from suptickets.experiments import EXPERIMENTS, reproduction
from suptickets.experiments.plan import Reading
from suptickets.experiments.store import Store

CELLS = "method=rigl,sparsity=0.9"


@pytest.fixture
def tiny(monkeypatch):
    """The paper's networks stand back for a tiny one."""
    real = reproduction.reproduce
    changed = {"changes": CHANGES, "executor": "debug"}
    monkeypatch.setattr("suptickets.cli.reproduce", lambda *a, **o: real(*a, **{**o, **changed}))


def reproduce(*arguments):
    return main(["reproduce", "vgg16", "--cells", CELLS, "--seeds", "1", "--scale", "0.01", *arguments])


def test_a_dry_run(tmp_path, capsys):
    assert reproduce("--dry-run", "--json", "--out", str(tmp_path / "r")) == 0
    found = json.loads(capsys.readouterr().out)
    check(found, SCHEMA["outputs"]["reproduce --dry-run"])
    assert found["experiment"] == "vgg16" and found["runs"] == 6 and found["epochs"] == 2 * (2 + 3 + 3)
    assert reproduce("--dry-run", "--out", str(tmp_path / "r")) == 0
    told = capsys.readouterr()
    assert "6 runs, 16 epochs" in told.out and "plain finish" in told.err
    assert "hours (vgg16: steps measured on an NVIDIA H200, one run at a time)" in told.out
    assert main(["reproduce", "schedule", "--dry-run"]) == 0
    assert capsys.readouterr().out == "nothing is left to train\n"


def test_a_table_then_its_page(tiny, tmp_path, capsys):
    place = ["--data-dir", str(data(tmp_path / "data")), "--out", str(tmp_path / "r")]
    assert reproduce("--json", *place) == 0
    found = json.loads(capsys.readouterr().out)
    check(found, SCHEMA["outputs"]["reproduce"])
    assert [one["paper"]["mean"] for one in found["cells"]] == [0.9348, 0.7220, 0.9381, 0.7257]
    assert all(one["ours"].keys() == {"mean", "sd", "runs"} for one in found["cells"])
    assert reproduce(*place) == 0
    told = capsys.readouterr().out
    assert "93.48 ± 0.16" in told and "A trial (forked at scale 0.01" in told
    assert main(["report", str(tmp_path / "r"), "--format", "md", "--json"]) == 0
    capsys.readouterr()
    assert "93.48" in (tmp_path / "r" / "vgg16.md").read_text()
    assert main(["report", str(tmp_path / "r"), "--scale", "1"]) == 2
    assert "there are no results yet" in capsys.readouterr().err


def test_another_setting_is_a_trial_that_its_command_repeats(tmp_path, capsys):
    others = [word for name, value in CHANGES.items() for word in ("--set", f"{name}={value}")]
    where, out = str(data(tmp_path / "data")), str(tmp_path / "r")
    cells, place = f"{CELLS},booster=none,data=cifar10", ["--data-dir", where, "--out", out]
    usual = ["reproduce", "vgg16", "--cells", cells, "--seeds", "1", "--scale", "0.01", *place]
    usual += ["--executor", "debug"]
    assert main([*usual, *others, "--set", "label_smoothing=0.1"]) == 0
    assert "A trial (forked at scale 0.01, batch_size 20" in (told := capsys.readouterr().out)
    assert "label_smoothing 0.1" in told
    (record,) = Store(out).read()
    assert record["changes"] == {**SAID, "label_smoothing": 0.1} == {**record["changes"], **SAID}
    assert record["settings"]["label_smoothing"] == 0.1
    program, *again = shlex.split(record["command"].replace("DATA", where))
    assert program == "suptickets" and main([*again, "--dry-run"]) == 0
    assert capsys.readouterr().out == "nothing is left to train\n"
    assert main([*usual, *others, "--dry-run"]) == 0  # with the paper's loss
    assert "2 runs" in capsys.readouterr().out
    assert (
        main([*usual, *others, "--set", "label_smoothing=0.1", "--set", "rate=0.5"]) == 0
    )  # the recipe's own
    assert f"1 of 1 results are in {out} already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("decay", "'decay' changes no setting: write NAME=VALUE, as in --set prune=layer"),
        ("deacy=cosine", "there is no setting 'deacy': did you mean 'decay'?"),
        ("decay=slow", "unknown decay 'slow'"),
        ("decay=cosine", "decay=cosine needs --separate: the rate of a fork falls over another time"),
        ("rate=half", "rate must be of type float, not 'half'"),
        ("rate=2", "--rate is a fraction"),
        ("sparsity=0.5", "sparsity belongs to the cells, which are the paper's: --cells picks some"),
        ("booster=swa", "booster belongs to the cells"),
        ("model=vgg61", "unknown model 'vgg61': did you mean 'vgg16'?"),
        ("seed=7", "seed cannot be changed"),
        ("milestones=[0.5]", "milestones cannot be changed"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_one_line(tmp_path, capsys, setting, told):
    assert reproduce("--set", setting, "--out", str(tmp_path / "r")) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_missing_data_show_in_the_exit_status(tiny, tmp_path, capsys):
    where = data(tmp_path / "data")
    for file in (where / "cifar-100-python").iterdir():
        file.write_bytes(b"")
    for _ in range(2):
        assert reproduce("--data-dir", str(where), "--out", str(tmp_path / "r")) == 1
        told = capsys.readouterr()
        assert "without cifar100: " in told.err and "93.48 ± 0.16" in told.out


def stored(where, *damage):
    cell = EXPERIMENTS["vgg16"].cells("method=rigl,data=cifar10")[0]
    mode = {"scale": 1.0, "separate": False, "changes": {}}
    key = Reading.of(cell.settings()).key
    Store(where).add({"cell": key, "seed": 1, **mode, "measures": {"accuracy": 0.9}})
    with (where / "cifar10-vgg16.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in damage)


def test_report_tells_damaged_lines(tmp_path, capsys):
    stored(tmp_path, "{", "")
    assert main(["report", str(tmp_path), "--format", "md"]) == 0
    told = capsys.readouterr().err
    assert told == f"{tmp_path / 'cifar10-vgg16.jsonl'}, line 2 is damaged: skipped, and left as it is\n"
    (tmp_path / "cifar10-vgg16.jsonl").write_text("{\n")
    assert main(["report", str(tmp_path)]) == 2
    _, last = capsys.readouterr().err.splitlines()
    assert last == f"suptickets: all results in {tmp_path} are damaged: run suptickets reproduce again"


def test_the_lines_of_a_run_are_no_damaged_results(tmp_path, capsys):
    assert main(["report", str(make_run(tmp_path / "run")), "--format", "md"]) == 0
    assert "damaged" not in capsys.readouterr().err


def test_pages_of_some_experiments(tmp_path, capsys):
    stored(tmp_path)
    assert main(["report", str(tmp_path), "--experiment", "vgg16", "schedule", "--format", "md"]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.md")) == ["schedule.md", "vgg16.md"]
    assert main(["report", str(tmp_path), "--experiment", "vgg17"]) == 2
    assert "did you mean 'vgg16'?" in capsys.readouterr().err
    assert main(["report", str(tmp_path), str(tmp_path), "--experiment", "vgg16"]) == 2
    assert "--experiment needs one store" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["png", "svg"])
def test_what_has_no_plot_is_told_in_a_line(tmp_path, capsys, format):
    stored(tmp_path)
    assert main(["report", str(tmp_path), "--experiment", "gains", "--format", format]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last == "suptickets: there is nothing to draw: --format html tells what there is"


def test_what_trains_nothing_has_a_page_too(tmp_path, capsys):
    out = str(tmp_path / "r")
    assert main(["reproduce", "schedule", "--out", out]) == 0
    assert "suptickets report STORE --experiment" in capsys.readouterr().out and not (tmp_path / "r").exists()
    assert main(["report", out, "--experiment", "schedule"]) == 0
    page = (tmp_path / "r" / "schedule.html").read_text()
    assert page.count("<figure") == 1 and "suptickets report STORE --experiment schedule" in page


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null", "{file}", "{file}/x"])
def test_a_folder_that_cannot_be_made_is_said_in_one_line(tiny, tmp_path, capsys, place):
    (tmp_path / "file").write_text("mine")
    stored(tmp_path / "store")
    out = place.format(file=tmp_path / "file")
    data(tmp_path / "data")
    for arguments in (
        ["reproduce", "vgg16", "--cells", CELLS, "--data-dir", str(tmp_path / "data")],
        ["report", str(tmp_path / "store")],
    ):
        assert main([*arguments, "--out", out]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"suptickets: cannot make the folder {out}") and told.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_page_replaces_no_device(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["report", str(make_run(tmp_path / "run")), "--out", str(tmp_path / "pipe")]) == 2
    assert "it is no plain file" in capsys.readouterr().err and (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "vgg17"], "unknown experiment 'vgg17': did you mean 'vgg16'?"),
        (["reproduce", "vgg16", "--cells", "method=rgil"], "unknown method 'rgil': did you mean 'rigl'?"),
        (
            ["reproduce", "vgg16", "--cells", "method=dense,sparsity=0.9"],
            "no cell has method=dense,sparsity=0.9",
        ),
        (["reproduce", "vgg16", "--scale", "3"], "--scale must be above 0 and at most 1, not 3.0"),
        (["reproduce", "vgg16", "--exe", "slurm"], "unknown argument --exe"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"suptickets: {message}") and told.count("\n") == 1
    assert not any(tmp_path.iterdir())
