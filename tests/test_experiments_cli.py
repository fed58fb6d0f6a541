"""`suptickets reproduce`, and `suptickets report` on what it stored."""

import json

import pytest
from experiments_tiny import CHANGES, data

from suptickets.cli import main
from suptickets.experiments import reproduction

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
    assert found["experiment"] == "vgg16" and found["runs"] == 6 and found["epochs"] == 2 * (2 + 3 + 3)
    assert reproduce("--dry-run", "--out", str(tmp_path / "r")) == 0
    told = capsys.readouterr()
    assert "6 runs, 16 epochs" in told.out and "plain finish" in told.err


def test_a_table_then_its_page(tiny, tmp_path, capsys):
    place = ["--data-dir", str(data(tmp_path / "data")), "--out", str(tmp_path / "r")]
    assert reproduce("--json", *place) == 0
    found = json.loads(capsys.readouterr().out)
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


def test_missing_data_show_in_the_exit_status(tiny, tmp_path, capsys):
    where = data(tmp_path / "data")
    for file in (where / "cifar-100-python").iterdir():
        file.write_bytes(b"")
    assert reproduce("--data-dir", str(where), "--out", str(tmp_path / "r")) == 1
    assert "without cifar100: " in capsys.readouterr().err


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
