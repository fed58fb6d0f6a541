"""Tickets for use elsewhere: compact files, ONNX, `export`."""

import json
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from suptickets import SparsityError, cli
from suptickets.baselines import BatchEnsemble, Ensemble, TreeNet
from suptickets.deploy import load_compact, save_compact, save_onnx
from suptickets.models import build_model
from suptickets.models.vgg import VGG

SHORT = ("train", "--epochs", "3", "--cycles", "2", "--cycle-epochs", "1", "--batch-size", "500")


def same(ours: dict, theirs: dict) -> bool:
    """To the bit: of 0.0 and -0.0, and of NaN, too."""
    return ours.keys() == theirs.keys() and all(
        ours[key].shape == value.shape
        and ours[key].dtype == value.dtype
        and ours[key].numpy().tobytes() == value.contiguous().numpy().tobytes()
        for key, value in theirs.items()
    )


# ---- compact files ----


@given(
    shape=some.lists(some.integers(0, 9), max_size=4),
    density=some.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]),
    dtype=some.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64]),
    seed=some.integers(0, 99),
)
def test_a_tensor_comes_back_to_the_bit(tmp_path_factory, shape, density, dtype, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * (rng.random(shape) < density)
    state = {"a.weight": torch.tensor(values, dtype=dtype).reshape(shape), "a.bias": torch.arange(3.0)}
    file = tmp_path_factory.mktemp("compact") / "t.safetensors"
    save_compact(state, file)
    assert same(load_compact(file), state)


def test_what_is_not_zero_to_the_bit_is_kept(tmp_path):
    odd = torch.zeros(1000)
    odd[[3, 500, 999]] = torch.tensor([-0.0, float("nan"), float("inf")])
    layout = torch.randn(8, 4, 3, 3).relu_().to(memory_format=torch.channels_last)
    save_compact({"odd": odd, "layout": layout}, tmp_path / "t")
    assert same(load_compact(tmp_path / "t"), {"odd": odd, "layout": layout})


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05, 0.1, 0.5, 0.97, 1.0])
def test_a_file_has_the_size_of_its_values(tmp_path, density):
    """A value has 32 bits, where it is one for each position, or 32 for each value if that is less."""
    size = 200_000
    weight = torch.zeros(size)
    weight[torch.randperm(size)[: round(density * size)]] = 1.0
    save_compact({"weight": weight}, tmp_path / "t")
    expected = size * min(4 * density + min(1 / 8, 4 * density), 4)
    assert expected <= (tmp_path / "t").stat().st_size <= expected + 300


def test_a_plain_file_is_read_as_it_is(tmp_path):
    save_file({"a": torch.eye(3)}, tmp_path / "t")
    assert same(load_compact(tmp_path / "t"), {"a": torch.eye(3)})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"a/where": None}, "it has no a/where"),
        ({"a": None}, "it has no a"),
        ({"a": torch.ones(2)}, "a does not fit its shape"),
        ({"a/where": torch.zeros(2, dtype=torch.uint8)}, "a does not fit its shape"),
        ({"a/where": torch.tensor([0, 4, 3], dtype=torch.int32)}, "a does not fit its shape"),
        ({"a/where": torch.tensor([0, 4, 99], dtype=torch.int32)}, "a does not fit its shape"),
        ({"a/where": torch.tensor([-1, 4, 9], dtype=torch.int32)}, "a does not fit its shape"),
        ({"a/where": torch.tensor([0.5, 4, 9])}, "a does not fit its shape"),
        ({"a": torch.ones(3, 1)}, "a does not fit its shape"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change, told):
    parts = {"a": torch.ones(3), "a/where": torch.tensor([0, 4, 9], dtype=torch.int32)}
    kept = {key: value for key, value in {**parts, **change}.items() if value is not None}
    save_file(kept, tmp_path / "t", {"packed": json.dumps({"a": [10, 2]})})
    with pytest.raises(SparsityError, match=told):
        load_compact(tmp_path / "t")


@pytest.mark.parametrize(
    "packed", ["", "[1]", '{"a": 3}', '{"a": [-1]}', '{"a": ["x"]}', '{"a": [1000000000000000]}']
)
def test_metadata_that_make_no_sense_are_refused(tmp_path, packed):
    parts = {"a": torch.ones(1), "a/where": torch.zeros(1, dtype=torch.int32)}
    save_file(parts, tmp_path / "t", {"packed": packed})
    with pytest.raises(SparsityError):
        load_compact(tmp_path / "t")


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "t").write_bytes(b"no tensors")
    for path in (tmp_path / "t", tmp_path / "none", tmp_path):
        with pytest.raises(SparsityError, match="cannot read"):
            load_compact(path)


# ---- the command ----


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    assert cli.main([*SHORT, "--keep-tickets", "--out", str(folder)]) == 0
    return folder


def exported(capsys, *arguments: object) -> dict:
    capsys.readouterr()
    assert cli.main(["export", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def scores(capsys, path: Path) -> dict:
    capsys.readouterr()
    assert cli.main(["evaluate", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("format", ["dense", "compact"])
def test_exported_tickets_are_the_same_network(capsys, run, tmp_path, format):
    found = exported(capsys, run, "--format", format)
    file = run / f"ticket.{format}.safetensors"
    assert found == {"path": str(file), "bytes": file.stat().st_size}
    assert same(load_compact(file), load_file(run / "ticket.safetensors"))
    build_model("vgg-small", 10, channels=1, size=8).load_state_dict(load_compact(file))
    ours, theirs = scores(capsys, file), scores(capsys, run / "ticket.safetensors")
    assert ours == theirs
    again = exported(capsys, file, "--format", "dense", "--out", tmp_path / "again")
    assert load_file(again["path"]).keys() == load_file(run / "ticket.safetensors").keys()


def test_a_single_ticket(capsys, run):
    found = exported(capsys, run / "tickets" / "ticket-1.safetensors")
    assert found["path"] == str(run / "tickets" / "ticket-1.compact.safetensors")
    assert found["bytes"] < 0.2 * (run / "tickets" / "ticket-1.safetensors").stat().st_size


def test_others_may_read_what_a_user_lets_them_read(capsys, run):
    exported(capsys, run)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in run.iterdir() if file.is_file()}
    assert len(modes) == 1


def test_what_cannot_be_exported_is_refused_in_a_line(capsys, run, tmp_path):
    other = tmp_path / "ensemble"
    assert cli.main([*SHORT, "--booster", "ensemble", "--out", str(other)]) == 0
    for arguments, told in (
        ((tmp_path,), "there is no ticket at"),
        ((other,), "predicts with 2 networks: export one of them"),
        ((run, "--format", "pickle"), "unknown format"),
        ((run, "--model", "own:net"), "--model is for onnx, and networks that are not the library's own"),
        ((run, "--format", "onnx", "--model", "own:net"), "--model is for onnx, and networks that are not"),
        ((run, "--out", run / "ticket.safetensors", "--format", "dense"), "choose another --out"),
        ((run, "--out", tmp_path), "choose another --out"),
        ((run, "--out", tmp_path / "none" / "file"), "choose another --out"),
    ):
        capsys.readouterr()
        assert cli.main(["export", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert not out and told in err and err.count("\n") == 1
    assert scores(capsys, run / "ticket.safetensors")


# ---- ONNX ----


def test_without_its_packages_onnx_says_what_to_install(capsys, run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    capsys.readouterr()
    assert cli.main(["export", str(run), "--format", "onnx"]) == 2
    assert "pip install 'suptickets[onnx]'" in capsys.readouterr().err
    assert not [*run.glob("*.onnx*")]


def test_onnx_computes_the_same(capsys, run):
    onnx = pytest.importorskip("onnx.reference")
    file = exported(capsys, run, "--format", "onnx")["path"]
    model = build_model("vgg-small", 10, channels=1, size=8).eval()
    model.load_state_dict(load_file(run / "ticket.safetensors"))
    session = onnx.ReferenceEvaluator(file)
    for batch in (1, 3):
        images = torch.randn(batch, 1, 8, 8)
        (logits,) = session.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(logits, model(images).detach().numpy(), rtol=1e-3, atol=1e-4)


def test_a_model_that_onnx_cannot_have_is_refused(tmp_path):
    pytest.importorskip("onnxscript")

    class Odd(torch.nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    with pytest.raises(SparsityError, match="torch cannot write this network as ONNX"):
        save_onnx(Odd().eval(), torch.ones(1, 3), tmp_path / "odd.onnx")


def small() -> torch.nn.Module:
    return build_model("vgg-small", 10, channels=1, size=8)


@pytest.mark.parametrize(
    "build",
    [
        lambda: TreeNet([small(), small(), small()]),
        lambda: BatchEnsemble(small(), 3),
        lambda: BatchEnsemble(small(), 1),
        lambda: Ensemble([small(), small()]),
    ],
    ids=["tree-net", "batch-ensemble", "one member", "ensemble"],
)
def test_networks_with_members_are_written_for_any_number_of_images(capfd, tmp_path, build):
    onnx = pytest.importorskip("onnx.reference")
    model = build()
    for name, tensor in model.state_dict().items():  # no two members alike
        if name.endswith("running_mean"):
            tensor.normal_()
    save_onnx(model.eval(), torch.zeros(1, 1, 8, 8), tmp_path / "t.onnx")
    assert capfd.readouterr() == ("", "")
    session = onnx.ReferenceEvaluator(str(tmp_path / "t.onnx"))
    for batch in (1, 2, 3, 7):
        images = torch.randn(batch, 1, 8, 8)
        (logits,) = session.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(logits, model(images).detach().numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "makes",
    [
        lambda x: x.view(len(x), -1),
        lambda x: x.view(int(x.shape[0]), -1),
        lambda x: torch.stack([one * 2 for one in x]),
        lambda x: x if x.shape[0] <= 100 else -x,
        lambda x: x if x.shape[0] > 1 else -x,
        lambda x: x if x.shape[0] % 2 == 0 else -x,
    ],
    ids=["len", "int", "loop", "bound", "one", "even"],
)
def test_a_network_for_some_numbers_of_images_is_refused(capfd, tmp_path, makes):
    pytest.importorskip("onnxscript")

    class Counting(torch.nn.Module):
        def forward(self, x):
            return makes(x)

    (tmp_path / "old").write_text("old")
    with pytest.raises(SparsityError, match=r"for some numbers of images only: let it use x\.shape\[0\]"):
        save_onnx(Counting().eval(), torch.ones(1, 3), tmp_path / "old")
    assert capfd.readouterr() == ("", "")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_the_command_refuses_it_in_a_line(capfd, run, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    forward = VGG.forward
    monkeypatch.setattr(VGG, "forward", lambda self, x: forward(self, x).view(len(x), -1))
    capfd.readouterr()
    assert cli.main(["export", str(run), "--format", "onnx", "--out", str(tmp_path / "t.onnx")]) == 2
    out, err = capfd.readouterr()
    assert not out and "for some numbers of images only" in err and err.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_network_in_training_is_refused(tmp_path):
    pytest.importorskip("onnxscript")
    with pytest.raises(SparsityError, match="put the network in evaluation mode first"):
        save_onnx(small(), torch.zeros(1, 1, 8, 8), tmp_path / "t.onnx")


def test_what_was_read_from_a_compact_file_is_a_copy(tmp_path):
    file = tmp_path / "n.st"
    save_compact({"conv": torch.eye(64), "norm": torch.ones(1000)}, file)
    old = load_compact(file)
    save_compact({"conv": torch.eye(64), "norm": torch.full((1000,), 7.0)}, file)
    assert old["norm"].eq(1).all() and load_compact(file)["norm"].eq(7).all()
    save_compact({"conv": torch.eye(64)}, file)
    assert old["norm"].sum() == 1000 and [path.name for path in tmp_path.iterdir()] == ["n.st"]


def test_what_a_compact_file_cannot_have_is_refused(tmp_path):
    with pytest.raises(SparsityError, match="a/where is the name of where a is not zero"):
        save_compact({"a": torch.eye(40), "a/where": torch.ones(3)}, tmp_path / "n.st")
    with pytest.raises(SparsityError, match="extra is no tensor"):
        save_compact({"a": torch.eye(40), "extra": {"b": 1}}, tmp_path / "n.st")
    for kind in (torch.complex128, torch.float4_e2m1fn_x2):
        with pytest.raises(SparsityError, match=rf"cannot hold odd \({kind}, torch.strided\): leave it out"):
            save_compact({"odd": torch.empty(40, dtype=kind)}, tmp_path / "n.st")
    for odd in (torch.eye(3).to_sparse(), torch.eye(3).to("meta")):
        with pytest.raises(SparsityError, match=r"cannot hold odd \(torch.float32, torch.(sparse|meta)"):
            save_compact({"odd": odd}, tmp_path / "n.st")
    with pytest.raises(SparsityError, match=r"takes model.state_dict\(\), not a Linear"):
        save_compact(torch.nn.Linear(2, 2), tmp_path / "n.st")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_numbers_are_kept_where_torch_takes_them_for_zero(tmp_path, dtype):
    tiny = torch.zeros(1000, dtype=dtype)
    tiny[:3] = torch.tensor([torch.finfo(dtype).smallest_normal / 8, -0.0, 1], dtype=dtype)
    try:
        assert torch.set_flush_denormal(True)
        save_compact({"tiny": tiny}, tmp_path / "t")
        found = load_compact(tmp_path / "t")
    finally:
        torch.set_flush_denormal(False)
    assert same(found, {"tiny": tiny}) and found["tiny"].count_nonzero() == 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_eight_bits_are_packed_too(tmp_path, dtype):
    state = {"a": torch.eye(40).to(dtype), "b": torch.rand(40, 40).to(dtype)}
    save_compact(state, tmp_path / "n.st")
    found = load_compact(tmp_path / "n.st")
    assert all(torch.equal(found[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state)


def test_tied_tensors_are_in_a_compact_file_once(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=generator) * (torch.rand(300, 200, generator=generator) < 0.1)
    bias = torch.randn(300, generator=generator)
    save_compact({"a": weight, "b": bias}, tmp_path / "once")
    tied = {"a": weight, "b": bias, "c": weight, "d": bias, "turned": weight.t(), "part": bias[:100]}
    save_compact(tied, tmp_path / "tied")
    assert same(load_compact(tmp_path / "tied"), tied)
    save_compact({"a": weight, "b": bias, "c": weight, "d": bias}, tmp_path / "tied")
    assert (tmp_path / "tied").stat().st_size < (tmp_path / "once").stat().st_size + 200


def test_tensors_that_are_made_on_demand_are_not_taken_for_tied(tmp_path):
    """One may lie where another was."""

    class Made(Mapping):
        def __getitem__(self, name):
            return torch.eye(100) * int(name)

        def __iter__(self):
            return iter("12345678")

        def __len__(self):
            return 8

    save_compact(Made(), tmp_path / "t")
    assert same(load_compact(tmp_path / "t"), dict(Made()))


def test_metadata_of_the_user_do_not_change_what_is_read(tmp_path):
    state = {"a": torch.eye(8)}
    for text in ("yes", '{"x": "a"}'):
        save_compact(state, tmp_path / "t", metadata={"tied": text, "packed": text, "mine": text})
        assert same(load_compact(tmp_path / "t"), state)


@pytest.mark.parametrize("tied", ['["a"]', '{"b": "c"}', '{"b": "a/where"}', '{"a": "a"}', "3", "no"])
def test_a_file_with_wrong_ties_is_refused(tmp_path, tied):
    save_compact({"a": torch.eye(64)}, tmp_path / "t")
    with safe_open(tmp_path / "t", "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, tmp_path / "t", {**metadata, "tied": tied})
    with pytest.raises(SparsityError, match="damaged|cannot read"):
        load_compact(tmp_path / "t")
