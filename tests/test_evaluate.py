"""`suptickets evaluate`: what it shows, and files from elsewhere: spoiled ones are refused in one line."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from suptickets import cli
from suptickets.errors import SparsityError
from suptickets.experiments.averages import Finished
from suptickets.training import saved
from suptickets.training.files import to_json
from suptickets.training.folder import RunFolder, read_ticket
from suptickets.training.settings import Settings
from suptickets.training.verdict import verdict

SHORT = ("train", "--model", "mlp", "--epochs", 4, "--cycle-epochs", 1, "--batch-size", 500, "--interval", 5)
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of each kind, that nobody changes."""
    folder = tmp_path_factory.mktemp("runs")
    for booster in ("sup-tickets", "ensemble", "tree-net", "none"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli, "write_run_page", lambda run: None)
            out = str(folder / booster)
            assert cli.main([*map(str, SHORT), "--booster", booster, "--out", out, "--json"]) == 0
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a run, to spoil."""
    return lambda booster: shutil.copytree(runs / booster, tmp_path / booster)


def evaluated(capsys: Any, *arguments: Any) -> dict[str, Any]:
    status = cli.main(["evaluate", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out, parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def fails(capsys: Any, *arguments: Any) -> str:
    assert cli.main(["evaluate", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("suptickets: "), err
    return err


def rewrite(file: Path, state: State | None = None, about: Any = None, **changes: Any) -> None:
    """Write a ticket file anew, with some of what it says of itself changed."""
    old_state, old_about = read_ticket(file)
    metadata = json.dumps(about if about is not None else {**old_about, **changes})
    save_file(old_state if state is None else state, file, {"suptickets": metadata})


def with_settings(file: Path, **changes: Any) -> None:
    rewrite(file, settings={**read_ticket(file)[1]["settings"], **changes})


# ---- what it shows ----


@pytest.mark.parametrize("booster", ["sup-tickets", "ensemble", "tree-net", "none"])
def test_what_is_told_of_a_run_is_what_the_run_told(capsys, runs: Path, booster: str) -> None:
    found = evaluated(capsys, runs / booster)
    told = json.loads((runs / booster / "summary.json").read_text())
    same = ("accuracy", "nll", "ece", "top5", "reliability", "diversity", "explored", "nonzero", "sparsity")
    same += ("layers",)
    assert {key: found[key] for key in same} == {key: told[key] for key in same}
    assert found["test_flops_ratio"] == pytest.approx(told["test_flops_ratio"])
    ratio = found["forward_flops"] / found["forward_flops_dense"]
    assert found["test_flops_ratio"] == ratio and 0.05 < ratio < 3
    assert evaluated(capsys, runs / booster / "ticket.safetensors")["explored"] is None


def test_beside_an_ensemble_is_the_superposed_ticket(capsys, runs: Path) -> None:
    """Its own connections are told of it, not those of the tickets that predict together."""
    superposed, file = read_ticket(runs / "sup-tickets" / "ticket.safetensors")[1], "ticket.safetensors"
    assert read_ticket(runs / "ensemble" / file)[1]["living"] == superposed["living"]
    assert (
        evaluated(capsys, runs / "ensemble" / file)["layers"]
        != evaluated(capsys, runs / "ensemble")["layers"]
    )


def test_a_verdict_is_none_where_nothing_differs() -> None:
    one, other = {"accuracy": 0.9, "nll": 0.3}, {"accuracy": 0.8, "nll": 0.5}
    assert verdict({"accuracy": 0.8, "nll": 0.4}, [one]) is None
    assert verdict({"accuracy": 0.85 * (1 - 1e-7), "nll": 0.4 * (1 + 1e-7)}, [one, other]) is None
    told = str(verdict({"accuracy": 0.849999, "nll": 0.40001}, [one, other]))
    assert "(accuracy 84.9999% against 85.0000%, NLL 0.40001 against 0.40000)" in told


def test_what_cannot_be_is_not_believed(capsys, run: Callable[[str], Path]) -> None:
    """Living connections are those that the run counted, unless the file has more non-zeros, or others."""
    file = run("none") / "ticket.safetensors"
    before, (state, about) = evaluated(capsys, file), read_ticket(file)
    exact = {
        layer["name"]: int(state[f"{layer['name']}.weight"].count_nonzero()) for layer in before["layers"]
    }
    name = next(iter(exact))
    wrong = [
        3,
        [],
        {},
        {"x": 1},
        {**exact, name: exact[name] - 1},
        {**exact, name: 10**9},
        {**exact, name: "x"},
    ]
    for lie in (*wrong, None):
        rewrite(file, living=lie, nonzero=1, parameters=2)
        found = evaluated(capsys, file)
        assert {layer["name"]: layer["nonzero"] for layer in found["layers"]} == exact
        assert found["nonzero"] == sum(exact.values())
    rewrite(file, about=about)
    assert evaluated(capsys, file) == before


def test_a_living_connection_may_hold_zero(capsys, run: Callable[[str], Path]) -> None:
    """As `train` counts it; the tensors have no place for the difference."""
    file = run("none") / "ticket.safetensors"
    before, (state, _) = evaluated(capsys, file), read_ticket(file)
    weight = next(tensor for tensor in state.values() if tensor.dim() > 1).view(-1)
    weight[weight.nonzero()[0]] = 0
    rewrite(file, state)
    after = evaluated(capsys, file)
    same = ("nonzero", "sparsity", "layers", "forward_flops", "test_flops_ratio")
    assert {key: after[key] for key in same} == {key: before[key] for key in same}


def test_for_people(capsys, runs: Path) -> None:
    assert cli.main(["evaluate", str(runs / "none")]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("accuracy", "top5", "forward_flops", "explored", "reliability"))
    assert any(line.split()[:3] == ["fc1", "300", "x"] for line in out.splitlines())
    bins = out[out.index("low ") : out.index("sparsity of the layers")].splitlines()[1:]
    assert (
        0 < len(bins) < 15 and sum(int(line.split()[2]) for line in bins) == 360
    )  # the empty ones are left out


def test_several_for_people(capsys, runs: Path) -> None:
    """The layers of each are a column."""
    assert cli.main(["evaluate", str(runs / "none"), str(runs / "sup-tickets")]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("together", "disagreement", "kl", "reliability", "test_flops_ratio"))
    layers = [line for line in out.splitlines() if line.startswith("fc1")]
    found = evaluated(capsys, runs / "none", runs / "sup-tickets")["networks"]
    assert [f"{one['layers'][0]['sparsity']:.4f}" for one in found] == layers[0].split()[-2:]


# ---- tickets that are gone ----


@pytest.mark.parametrize("gone", [(1,), (2,), (3,), (1, 2), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("tickets", [(), ("--tickets",)], ids=["run", "--tickets"])
def test_some_tickets_of_an_ensemble_are_gone(
    capsys, run: Callable[[str], Path], gone: tuple[int, ...], tickets: tuple[str, ...]
) -> None:
    folder = RunFolder(run("ensemble"))
    for number in gone:
        folder.single(number).unlink()
    line = fails(capsys, folder.path, *tickets)
    assert f"kept 3 tickets, of which {3 - len(gone)} are there" in line


def test_the_folder_of_tickets_is_gone(capsys, run: Callable[[str], Path]) -> None:
    folder = run("ensemble")
    shutil.rmtree(folder / "tickets")
    assert "kept 3 tickets, of which 0 are there" in fails(capsys, folder)
    (folder / "config.json").unlink()  # the ticket knows what it belongs to
    assert "kept 3 tickets, of which 0 are there" in fails(capsys, folder)
    assert "has no single tickets" in fails(capsys, folder, "--tickets")


# ---- numbers that are none ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["fc1.weight", "fc2.bias"])
def test_a_ticket_that_is_not_finite_is_refused(
    capsys, run: Callable[[str], Path], name: str, value: float
) -> None:
    file = run("none") / "ticket.safetensors"
    state = load_file(file)
    assert name in state
    state[name].view(-1)[3] = value
    rewrite(file, state)
    assert f"{name} in {file} has numbers that are not finite" in fails(capsys, file)


def test_a_single_ticket_that_is_not_finite_is_refused(capsys, run: Callable[[str], Path]) -> None:
    file = RunFolder(run("ensemble")).single(2)
    rewrite(file, {name: tensor * math.nan for name, tensor in load_file(file).items()})
    assert "not finite" in fails(capsys, file.parent.parent)


def test_json_has_no_number_that_json_does_not_know(capsys, run: Callable[[str], Path]) -> None:
    """Weights of which each is finite may still predict nothing: null."""
    file = run("none") / "ticket.safetensors"
    state = load_file(file)
    for tensor in state.values():
        tensor.copy_(1e38 * (-1) ** torch.arange(tensor.numel()).view_as(tensor))
    rewrite(file, state)
    assert evaluated(capsys, file)["nll"] is None
    assert cli.main(["evaluate", str(file)]) == 0 and "nan" in capsys.readouterr().out
    nested = {"a": math.nan, "b": [math.inf, 1.5, {"c": -math.inf}], "d": (1, None), "e": True}
    assert json.loads(to_json(nested)) == {
        "a": None,
        "b": [None, 1.5, {"c": None}],
        "d": [1, None],
        "e": True,
    }


def test_files_of_a_run_have_no_number_that_json_does_not_know(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log({"epoch": 1, "loss": math.nan})
    folder.save_summary({"nll": math.inf})
    folder.save_ticket({"x": torch.ones(2)}, {"tickets": [{"nll": math.nan}]})
    assert json.loads(folder.metrics.read_text())["loss"] is folder.load_summary()["nll"] is None  # type: ignore[index]
    assert read_ticket(folder.ticket)[1] == {"tickets": [{"nll": None}]}


# ---- code that a file names ----


def test_code_that_a_file_names_is_not_run(capsys, run: Callable[[str], Path], monkeypatch) -> None:
    folder = run("none")
    file, model = folder / "ticket.safetensors", folder / "evil_model.py"
    model.write_text("open('attacked', 'w').close()\ndef net(classes):\n    open('attacked', 'w').close()\n")
    monkeypatch.chdir(folder)
    for name in ("os:system", "evil_model:net", ":", "a:b:c", "os:\nsystem"):
        with_settings(file, model=name)
        for path in (file, folder):
            line = fails(capsys, path)
            assert "asks to import and call" in line and "--model package.module:function" in line
        assert "asks to import and call" in fails(capsys, file, "--model", "mlp")
    assert not Path("attacked").exists()


def test_where_single_tickets_could_come_from(capsys, run: Callable[[str], Path]) -> None:
    folder = run("none")
    said = "none has no single tickets: --booster none makes none, sup-tickets with --keep-tickets does"
    assert said in fails(capsys, folder, "--tickets")
    teachers = folder / "teachers"
    (teachers / "tickets").mkdir(parents=True)
    RunFolder(teachers).single(1).write_bytes(b"")
    assert f"its teachers', in {teachers}, are the only ones" in fails(capsys, folder, "--tickets")


def test_code_that_the_user_names_is_run(capsys, run: Callable[[str], Path], monkeypatch) -> None:
    """Not what the file names, and only for a file that needs it."""
    file = run("none") / "ticket.safetensors"
    before = evaluated(capsys, file)
    assert "leave it out" in fails(capsys, file, "--model", "absent.module:net")
    with_settings(file, model="os:system")
    Path(file.parent / "users_own.py").write_text("from suptickets.models import mlp as net\n")
    monkeypatch.chdir(file.parent)
    assert evaluated(capsys, file, "--model", "users_own:net") == before
    assert "cannot import the model absent:net" in fails(capsys, file, "--model", "absent:net")
    assert "must return a torch.nn.Module" in fails(capsys, file, "--model", "os:getcwd")
    assert "does not fit" in fails(capsys, file, "--model", "suptickets.models:lenet5")


# ---- spoiled metadata ----

SCORES = {"accuracy": 0.5, "nll": 1.0, "ece": 0.1}
SPOILED: list[dict[str, Any]] = [
    *({"parameters": value} for value in (0, -1, "x", None, 1.5, True, [])),
    *({"nonzero": value} for value in ("x", -1, None, 1.5, 10**30, {})),
    *({"settings": value} for value in ({}, [], 5, None, "x", {"data": "digits"}, {"nothing": 1})),
    *({"tickets": value} for value in (5, "x", None, [5], [{}], [{**SCORES, "nll": "x"}], {"a": 1})),
    {"tickets": [{**SCORES, "nll": 10**400}]},
]
SETTINGS: list[dict[str, Any]] = [
    *({"model": value} for value in (5, None, "", "vgg61", "../mlp", "vgg16", "resnet50")),
    *({"data": value} for value in (5, None, "digitss", "folder", "imagenet")),
    *({"data": "cifar10", "data_dir": value} for value in ("/nowhere", "a\0b", "~nobody-of-this-name/x", 5)),
    *({"seed": value} for value in (-1, 2**64, 10**30, 1.5)),
    *({"booster": value} for value in ("nothing", 5, "tree-net", "batch-ensemble")),
    *({"booster": booster, "members": 10**9} for booster in ("tree-net", "batch-ensemble")),
    *({"method": value} for value in ("small-dense", "nothing")),
    *({"precision": value} for value in ("fp8", None)),
    *({"sparsity": value} for value in (math.nan, math.inf, 90, "x")),
    {"method": "small-dense", "sparsity": 0.9999999},
    {"criteria": [5]},
    {"unknown\nsetting": 1},
]


@pytest.mark.parametrize("changes", SPOILED, ids=repr)
def test_spoiled_metadata_is_refused(capsys, run: Callable[[str], Path], changes: dict[str, Any]) -> None:
    file = run("sup-tickets") / "ticket.safetensors"
    rewrite(file, **changes)
    assert str(file) in fails(capsys, file)


@pytest.mark.parametrize("changes", SETTINGS, ids=repr)
def test_spoiled_settings_are_refused(capsys, run: Callable[[str], Path], changes: dict[str, Any]) -> None:
    file = run("sup-tickets") / "ticket.safetensors"
    with_settings(file, **changes)
    fails(capsys, file)


@pytest.mark.parametrize("booster", ["tree-net", "batch-ensemble"])
def test_a_small_file_has_few_members(capsys, run: Callable[[str], Path], booster: str) -> None:
    """So that nobody builds a million networks for it."""
    file = run("tree-net") / "ticket.safetensors"
    with_settings(file, booster=booster, members=1000)
    assert "says that it has 1000 members" in fails(capsys, file)


def test_spoiled_tensors_are_refused(capsys, run: Callable[[str], Path]) -> None:
    file = run("none") / "ticket.safetensors"
    state = load_file(file)
    spoiled: list[State] = [{}, {**state, "more": torch.ones(1)}, dict(list(state.items())[1:])]
    spoiled += [{name: tensor[..., :1].clone() for name, tensor in state.items()}]
    spoiled += [{name: tensor.to(torch.complex64) for name, tensor in state.items()}]
    for one in spoiled:
        rewrite(file, one)
        fails(capsys, file)
    rewrite(file, {name: tensor.to(torch.float8_e4m3fn) for name, tensor in state.items()})
    assert evaluated(capsys, file)["nonzero"] > 0  # rounded, and weights nevertheless


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", '{"explored": 7}', '{"explored": "x"}'])
def test_a_spoiled_summary_is_refused(capsys, run: Callable[[str], Path], text: str) -> None:
    folder = run("none")
    (folder / "summary.json").write_text(text)
    assert "summary.json" in fails(capsys, folder)
    (folder / "summary.json").unlink()
    assert evaluated(capsys, folder)["explored"] is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"cycles": 3}', '{"model": 5}'])
def test_a_spoiled_config_is_refused(capsys, run: Callable[[str], Path], text: str) -> None:
    folder = run("ensemble")
    (folder / "config.json").write_text(text)
    assert "config.json" in fails(capsys, folder, "--tickets")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["mlp", "x:y"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["settings", "nonzero", "parameters", "tickets", *Settings.__dataclass_fields__]


@settings(max_examples=300)
@given(changes=st.dictionaries(st.sampled_from(NAMES), JSON, min_size=1, max_size=3), whole=st.none() | JSON)
@example(changes={"members": 3, "booster": "tree-net"}, whole=None)
@example(changes={"tickets": [[]]}, whole=None)
def test_whatever_a_file_says_it_is_read_or_refused(runs: Path, changes: dict[str, Any], whole: Any) -> None:
    """Nothing but a `SparsityError` comes of it."""
    from suptickets.data import load_data

    file = runs / "fuzzed.safetensors"
    state, about = read_ticket(runs / "sup-tickets" / "ticket.safetensors")
    inner = {name: value for name, value in changes.items() if name in about["settings"]}
    outer = {name: value for name, value in changes.items() if name not in inner}
    about = {**about, "settings": {**about["settings"], **inner}, **outer}
    save_file(state, file, {"suptickets": json.dumps(about if whole is None else whole)})
    try:
        found = saved.result(file).named(None)
        found.load(load_data("digits"), torch.device("cpu"))
        assert isinstance(found.tickets, list)
    except SparsityError as error:
        assert str(error)


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos = nn.Parameter(torch.randn(16, 32))
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.fc2((self.fc1(x.flatten(1)) + self.pos.mean(0)).relu())
"""


def test_tickets_superposed_again_keep_what_is_not_sparse(tmp_path: Path, monkeypatch, capsys) -> None:
    """A dense parameter of two dimensions is no sparse weight."""
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    flags = [
        "--model",
        "own_net:Net",
        "--epochs",
        "4",
        "--cycles",
        "2",
        "--cycle-epochs",
        "1",
        "--keep-tickets",
    ]
    assert cli.main(["train", *flags, "--out", "run"]) == 0
    own = RunFolder("run").settings()
    finished = Finished(RunFolder("run"), own)
    found = finished._superposed(replace(own, rule="caa"))
    summary = json.loads(Path("run/summary.json").read_text())
    assert found["nonzero"] == summary["nonzero"] < summary["parameters"] == 64 * 32 + 320
    Path("again").mkdir()
    finished._superpose(replace(own, rule="caa"), RunFolder("again"))
    assert bool((load_file("again/ticket.safetensors")["pos"] != 0).all())


@pytest.mark.parametrize("rule", ["cima", "caa"])
def test_tickets_that_are_read_again_keep_the_counts_of_their_layers(capsys, tmp_path: Path, rule) -> None:
    """SET grows to 0 behind units that never fire, and in a file such a connection looks like none."""
    options = ("--model", "mlp", "--method", "set", "--epochs", 6, "--cycles", 3, "--cycle-epochs", 1)
    options += ("--interval", 10, "--keep-tickets", "--prune", "layer")
    command = [*map(str, ("train", *options))]
    assert cli.main([*command, "--out", str(tmp_path / "cia")]) == 0
    assert cli.main([*command, "--rule", rule, "--out", str(tmp_path / rule)]) == 0
    own, other = (RunFolder(tmp_path / name) for name in ("cia", rule))
    read, real = Finished(own, own.settings())._superposed(other.settings()), other.load_summary()
    assert [layer["nonzero"] for layer in read["layers"]] == [layer["nonzero"] for layer in real["layers"]]
    assert [read[key] for key in SCORES] == [real[key] for key in SCORES]
    first = real["layers"][0]
    weights = [load_file(file)[first["name"] + ".weight"] for file in own.singles()]
    assert any(int((weight != 0).sum()) < first["nonzero"] for weight in weights)


@pytest.mark.parametrize("held", [False, True])
def test_a_verdict_compares_scores_on_the_same_images(
    capsys, tmp_path: Path, monkeypatch, held: bool
) -> None:
    """The tickets of a run with a holdout were judged by other images than `evaluate` judges by."""
    monkeypatch.setattr(cli, "write_run_page", lambda run: None)
    options = ["--holdout", 0.2] if held else []
    assert cli.main([*map(str, (*SHORT, *options)), "--out", str(tmp_path / "r"), "--json"]) == 0
    file = tmp_path / "r" / "ticket.safetensors"
    tickets = [{**ticket, "accuracy": 1.0, "nll": 0.0} for ticket in read_ticket(file)[1]["tickets"]]
    rewrite(file, tickets=tickets)
    capsys.readouterr()
    assert cli.main(["evaluate", str(tmp_path / "r"), "--json"]) == 0
    assert ("worse than the mean of its tickets" in capsys.readouterr().err) is not held
