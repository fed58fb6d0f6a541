"""The measurements: who takes part, what is compared with what, what a row says. No time is tested."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from surface import SCHEMA, check
from torch import nn

import suptickets as st
from suptickets.bench import (
    BENCHMARKS,
    bench,
    contenders,
    explore,
    inference,
    loop,
    memory,
    peers,
    profile,
    rivals,
    scale,
    show,
    superpose,
    together,
    turns,
)
from suptickets.bench import step as steps
from suptickets.bench.contenders import BATCH, NEVER, Run, batches, noise, variant
from suptickets.bench.turns import Contender, Options, judged, ratio, take_turns
from suptickets.layers import ELIGIBLE
from suptickets.measure.flops import flops
from suptickets.training.settings import resolve

QUIET = Options(torch.device("cpu"), "lenet5", rounds=1, say=lambda line: None)
KEYS = {
    "step": "model mode precision variant milliseconds ratio_to_dense ratio_to_masks",
    "explore": "model variant milliseconds steps speedup",
    "superpose": "model variant milliseconds steps share_of_run",
    "memory": "model mode variant mebibytes ratio_to_dense counted",
    "peers": "model what variant milliseconds seconds ratio_to_ours note",
    "profile": "model kind kernels microseconds share_of_step",
    "together": "model variant start_seconds epoch_seconds seconds throughput_of_epochs throughput",
    "loop": "model variant milliseconds ratio_to_bare",
    "build": "model variant milliseconds ratio_to_step",
    "inference": "model sparsity batch threads torch_milliseconds compiled_milliseconds "
    "onnxruntime_milliseconds milliseconds speedup",
}
SCALE = (
    "variant million_weights sparsity dense_milliseconds milliseconds exploration_milliseconds "
    "superposing_milliseconds ratio_to_dense device torch"
)


def given(monkeypatch: pytest.MonkeyPatch, module: ModuleType, times: dict[str, list[float]]) -> None:
    """Let the contenders of a module take these times; all of them must take part."""

    def take(contenders: dict[str, Contender], options: Options) -> dict[str, list[float]]:
        return {name: times[name] for name in contenders}

    monkeypatch.setattr(module, "take_turns", take)


def column(rows: list[dict[str, Any]], key: str, name: str = "variant") -> dict[str, Any]:
    return {row[name]: row[key] for row in rows}


# ---- turns ----


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes by one second a look; the first round is not counted, orders alternate."""
    called: list[str] = []
    clock = count()
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(clock))

    def contender(name: str, repeats: int) -> Contender:
        def prepare() -> Any:
            called.append(f"prepare {name}")
            return lambda: called.append(name)

        return Contender(prepare, repeats)

    options = Options(torch.device("cpu"), rounds=2)
    times = take_turns({"a": contender("a", 1), "b": contender("b", 2)}, options)
    a, b = ["prepare a", "a"], ["prepare b", "b", "b"]
    assert called == [*a, *b, *b, *a, *a, *b]
    assert times == {"a": [1000, 1000], "b": [500, 500]}  # of one call


def test_a_ratio_is_the_median_of_ratios_within_rounds() -> None:
    assert ratio([1.0, 10.0, 300.0], [1.0, 5.0, 100.0]) == 2.0  # the ratio of the medians, too, is 2
    assert ratio([1.0, 10.0, 12.0], [4.0, 1.0, 6.0]) == 2.0  # here it would be 2.5


def test_requirements() -> None:
    row = {"milliseconds": 2.0, "speedup": 3.0}
    assert judged(row) == {**row, "requirement": None, "met": None}
    assert judged(row, {"milliseconds": 2.0}, {"speedup": 3.0})["met"] is True
    missed = judged(row, {"milliseconds": 1.65}, {"speedup": 3.0})
    assert (missed["requirement"], missed["met"]) == ("milliseconds <= 1.65, speedup >= 3", False)
    assert judged(row, None, {"speedup": 3.5})["met"] is False


def test_what_is_measured_by_default() -> None:
    cpu, gpu = (Options(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert (cpu.models, gpu.models) == (("vgg16",), ("vgg16", "resnet50", "wrn28-10"))
    assert Options(torch.device("cuda"), "mlp").models == ("mlp",)
    assert cpu.limits("vgg16", steps.GPU) == {
        "ratio_to_dense": 0.95,
        "ratio_to_masks": 0.95,
        "milliseconds": 1.65,
    }
    assert not cpu.limits("mlp", steps.GPU)
    assert not Options(torch.device("cpu"), sparsity=0.9).limits("vgg16", steps.GPU)


# ---- contenders ----


@pytest.mark.parametrize("fast", [False, True])
def test_masks_keep_weights_at_zero(fast: bool) -> None:
    data = batches("lenet5", QUIET)
    run = Run("lenet5", "dense", data, QUIET, fast=fast, compile=False, booster="none")
    run.mask()
    weights = [m.weight for m in run.parts.model.modules() if isinstance(m, ELIGIBLE)]
    sizes = sum(weight.numel() for weight in weights)
    assert sum(int(mask.sum()) for mask in run.masks) == pytest.approx(0.05 * sizes, abs=1)
    for _ in range(3):
        before = [weight.detach().clone() for weight in weights]
        run.step()
        for weight, mask, old in zip(weights, run.masks, before, strict=True):
            assert set(mask.unique().tolist()) <= {0.0, 1.0}
            assert not weight[mask == 0].any()
            assert not torch.equal(weight, old)


@pytest.mark.parametrize("fast", [False, True])
def test_ours_is_the_products_own_step(fast: bool) -> None:
    run = Run("lenet5", "rigl", batches("lenet5", QUIET), QUIET, fast=fast, compile=False)
    assert run.network.nonzero == pytest.approx(0.05 * run.network.parameters_total, abs=1)
    for _ in range(5):  # beyond the two batches of an epoch
        run.step()
    assert run.network.step == 5 and run.parts.meter.values()[2] >= 5  # finite losses
    before = {name: w.positions.clone() for name, w in run.network.weights.items()}
    timed = run.exploration().prepare()
    assert all(torch.equal(w.positions, before[n]) for n, w in run.network.weights.items())
    timed()
    assert any(not torch.equal(w.positions, before[n]) for n, w in run.network.weights.items())
    assert not any(w.slot.stale for w in run.network.weights.values() if w.slot is not None)
    run.step()
    run.network.check()


def test_variants() -> None:
    data = batches("mlp", QUIET)
    built = {name: variant(name, "mlp", data, QUIET, fast=False) for name in contenders.VARIANTS}
    assert [run.network.method.name for run in built.values()] == ["dense", "dense", "static"]
    assert [len(run.masks) for run in built.values()] == [0, 3, 0]
    assert all(run.contender().repeats == 1 for run in built.values())


def test_noise_is_of_whole_batches_and_the_same_for_all() -> None:
    first, again = batches("lenet5", QUIET), batches("lenet5", QUIET)
    assert first.train_size % BATCH == 0 and first.shape == (3, 32, 32)
    assert torch.equal(first.train_x, again.train_x)
    assert batches("mlp", QUIET).shape == (3, 28, 28)


# ---- kinds of kernels, and the floor ----

KERNELS = {  # of VGG-16 on an H200
    "sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64": "input gradient",
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x64x64": "forward",
    "sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc": "weight gradient",
    "void convolve_common_engine_float_NHWC<__nv_bfloat16, __nv_bfloat16, 1024>": "weight gradient",
    "void cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace_kernel<xmma__5x_cudnn::i": "cuDNN",
    "void nhwcAddPaddingKernel<__nv_bfloat16, __nv_bfloat16, float, true>": "cuDNN",
    "triton_red_fused__native_batch_norm_legit_functional_native_batch_norm_backward_2": "batch norm",
    "triton_poi_fused__native_batch_norm_legit_functional_convolution_backward_native": "batch norm",
    "triton_per_fused__log_softmax__to_copy_abs_add_arange_eq_index_mul_ne_nll_loss_forward": "batch norm",
    "nvjet_sm90_tst_64x8_64x16_1x2_h_bz_bias_TNT": "linear",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32>": "linear",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native>": "optimizer",
    "Memset (Unknown)": "rest",
    "_take": "ours",
    "_sgd": "ours",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kinds_of_kernels(kernel: str) -> None:
    (found,) = profile.by_kind([(kernel, 2.0, 3.0)])
    assert KERNELS[kernel] in found


def test_kinds_are_added_up_and_the_longest_comes_first() -> None:
    kinds = profile.by_kind(
        [("_take", 15, 36.0), ("_sgd", 1, 14.0), ("memset", 1, 2.0), ("x_fprop_y", 3, 60.0)]
    )
    assert list(kinds.values()) == [(3, 60.0), (16, 50.0), (1, 2.0)]


def test_the_floor_is_that_of_each_layer() -> None:
    """At a rate of 1 FLOP and 1 byte: three passes over a batch, the greater of the two in each layer."""
    run = Run("lenet5", "static", batches("lenet5", QUIET), QUIET, fast=False, booster="none")
    example = torch.zeros(1, *run.parts.data.shape)
    counted = {
        name: 3 * BATCH * layer.dense for name, layer in flops(run.parts.model, example).layers.items()
    }
    bounds = profile.floor(run, profile.Rates(1.0, 1e-6))
    assert bounds["arithmetic"] == sum(counted.values())
    assert bounds["both, layer by layer"] == bounds["bytes"] > bounds["arithmetic"]
    fast = profile.floor(run, profile.Rates(1e-9, 1e9))
    assert fast["both, layer by layer"] == fast["arithmetic"]


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("fast", [False, True])
def test_bytes_are_those_of_input_output_and_weight(fast: bool, precision: str, size: int) -> None:
    what = {"booster": "none", "precision": precision}
    run = Run("mlp", "static", batches("mlp", QUIET), QUIET, fast=fast, compile=False, **what)
    sizes = [tuple(m.weight.shape) for m in run.parts.model.modules() if isinstance(m, ELIGIBLE)]
    assert list(profile._moved(run).values()) == [size * (BATCH * i + BATCH * o + i * o) for o, i in sizes]


# ---- several runs at a time ----


def clocked(folder: Path) -> Any:
    """A run that takes a while, and notes when."""

    def steps() -> float:
        begin = time.time()
        time.sleep(0.7)
        (folder / f"{begin}-{time.time()}").touch()
        return 5.0

    return steps


def failing(folder: Path) -> Any:
    """The first to come fails; the others would wait for it."""
    try:
        (folder / "first").mkdir()
    except FileExistsError:
        return clocked(folder)
    raise ValueError("no memory left")


def test_runs_are_alone_and_at_once_in_turns(tmp_path: Path) -> None:
    begin, quiet = time.time(), Options(torch.device("cpu"))
    shared = together.in_turns(2, partial(clocked, tmp_path), quiet, rounds=2)
    assert shared.alone == shared.at_once == [5.0, 5.0]
    turns = sorted(tuple(map(float, path.name.split("-"))) for path in tmp_path.iterdir())
    assert len(turns) == 6  # alone, both, alone, both
    overlaps = [after[0] < before[1] for before, after in zip(turns, turns[1:], strict=False)]
    assert overlaps == [False, True, False, False, True]
    assert 0 < shared.ready <= turns[0][0] - begin


def caches(folder: Path) -> Any:
    """A run that notes where its compiler keeps what it compiles."""
    found = [Path(os.environ[name]) for name in together.CACHES]
    (folder / "-".join(str(len([*path.iterdir()])) for path in found)).touch()
    return lambda: 1.0


def test_nothing_is_compiled_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "compiled").touch()
    for name in together.CACHES:
        monkeypatch.setenv(name, str(full))
    (tmp_path / "out").mkdir()
    together.in_turns(1, partial(caches, tmp_path / "out"), Options(torch.device("cpu")), rounds=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0-0"]


def test_nobody_waits_for_a_run_that_failed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no memory left"):
        together.in_turns(2, partial(failing, tmp_path), Options(torch.device("cpu")), rounds=1)


def test_throughput_is_that_of_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    one, several = ([9.0], [9.0]), ([1.0, 2.0, 1.0], [2.0, 4.0, 1.5])
    measured = {1: together.Shared(31.0, *one), 3: together.Shared(41.5, *several)}
    monkeypatch.setattr(together, "in_turns", lambda runs, *_, rounds: measured[runs])
    alone, three = together.measure("vgg16", QUIET)
    assert (alone["start_seconds"], alone["epoch_seconds"], alone["seconds"]) == (30.0, 1.0, 30 + 250 * 1)
    assert (three["start_seconds"], three["epoch_seconds"], three["seconds"]) == (39.5, 2.0, 39.5 + 250 * 2)
    assert (alone["throughput"], alone["throughput_of_epochs"]) == (1.0, 1.0)
    assert (three["throughput"], three["throughput_of_epochs"]) == (3 * 280 / 539.5, 1.5)
    assert three["variant"] == "3 at once"


# ---- rows: keys, and ratios from the right pairs ----


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "together")) for name in KEYS]
)
def test_rows(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.IMAGES, "cpu", BATCH + 80)
    monkeypatch.setattr(rivals, "WORKERS", 0)
    monkeypatch.setattr(together, "RUNS", 2)
    result = bench(name, model="mlp" if name == "loop" else "lenet5", device="cpu", rounds=1)
    assert json.loads(json.dumps(result)) == result
    check(result, SCHEMA["outputs"]["bench"])
    assert result["name"] == name and len(result["rows"]) > 1
    common = "requirement met device torch"
    for row in result["rows"]:
        assert list(row) == f"{KEYS[name]} {common}".split()
        assert row["torch"] == torch.__version__ and row["device"].startswith("CPU")
    out, err = capsys.readouterr()
    assert out == "" and (err or name in ("build", "inference"))  # onnxruntime may be there


def test_step_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, steps, {"dense": [4.0, 4.0], "masks": [8.0, 8.0], "ours": [2.0, 2.0]})
    rows = steps.measure("mlp", QUIET, fast=False)
    assert column(rows, "ratio_to_dense") == {"dense": 1, "masks": 2, "ours": 0.5}
    assert column(rows, "ratio_to_masks") == {"dense": 0.5, "masks": 1, "ours": 0.25}
    assert column(rows, "milliseconds") == {"dense": 4, "masks": 8, "ours": 2}
    assert column(rows, "mode") == dict.fromkeys(("dense", "masks", "ours"), "eager")


def test_explore_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, explore, {"step": [10.0], explore.SORT: [30.0], "ours": [5.0]})
    rows = explore.measure("mlp", QUIET)
    assert column(rows, "steps") == {"step": 1, explore.SORT: 3, "ours": 0.5}
    assert column(rows, "speedup") == {"step": None, explore.SORT: 1, "ours": 6}


def test_what_explorations_add_to_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each 20th step explores: 0.1 ms a step is 2 ms an exploration, 391 / 1000 of them an epoch."""
    given(monkeypatch, explore, {"rigl": [1.1, 1.1], "static": [1.0, 1.0]})
    row = explore.added("mlp", QUIET)
    assert row["milliseconds"] == pytest.approx(2 * 391 / 1000)
    assert row["steps"] == pytest.approx(2 * 391 / 1000)


def test_steps_with_and_without_explorations() -> None:
    assert all(map(math.isfinite, explore.in_a_run("mlp", QUIET, every=2, steps=4)))


def test_superpose_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """226 normal epochs of 391 steps, an exploration each 1000 and one in each of three cycles."""
    given(monkeypatch, superpose, {"step": [2.0], "exploration": [6.0], "collection": [1.0]})
    rows = superpose.measure("mlp", QUIET)
    assert column(rows, "steps") == {"step": 1, "exploration": 3, "collection": 0.5, "all of a run": None}
    shares = column(rows, "share_of_run")
    assert shares["exploration"] == pytest.approx((88 + 3) * 3 / (250 * 391))
    assert shares["collection"] == pytest.approx(3 * 0.5 / (250 * 391))
    assert shares["all of a run"] == pytest.approx(shares["exploration"] + shares["collection"])


def test_requirements_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"model": "vgg16", "mode": "eager", "variant": "ours"}
    assert steps._limits(row, QUIET) == {"ratio_to_dense": 1.10}
    assert steps._limits({**row, "mode": "fast"}, Options(torch.device("cuda")))["ratio_to_masks"] == 0.95
    assert not steps._limits(row, Options(torch.device("cuda")))
    assert not steps._limits({**row, "variant": "masks"}, QUIET)


# ---- explorations ----


def test_both_explorations_choose_the_same_connections() -> None:
    contest = explore.Contest("lenet5", batches("lenet5", QUIET), QUIET)
    contest.copy()
    before = contest.run.network.nonzero
    contest.explore_copy()
    contest.run.explore()
    network = contest.run.network
    pairs = list(zip(contest.masked, network.weights.values(), strict=True))
    both = sum(int(m.mask.view(-1)[w.rows().long()].sum()) for m, w in pairs)
    assert both / network.nonzero > 0.999 and network.nonzero == before
    for masked, weight in pairs:
        assert int(masked.mask.sum()) == weight.nonzero
        assert torch.equal(masked.weight, weight.build(weight.values.detach(), torch.float32))


# ---- memory ----


def test_memory_is_counted() -> None:
    """Of a dense weight: value, momentum, gradient. Masks add one number each, collecting another."""
    held = {
        name: memory.held(memory._run("mlp", name, QUIET))
        for name in (*contenders.VARIANTS, memory.COLLECTING)
    }
    data = batches("mlp", QUIET)
    network = Run("mlp", "static", data, QUIET, fast=False, booster="none").network
    weights, living = network.parameters_total, network.nonzero
    assert held["masks"] - held["dense"] == 4 * weights
    assert held[memory.COLLECTING] - held["ours"] == 4 * weights
    sparse = 16 * living  # value, position, momentum, gradient
    first, *later = (layer.size for layer in network.layers.values())
    built = 4 * sum(later)  # the dense weights that a backward pass needs: not that of the first layer
    assert held["dense"] - held["ours"] == 12 * (first + sum(later)) - sparse - built


def test_storages_are_counted_once() -> None:
    tensor = torch.zeros(10)
    assert memory.nbytes([tensor, tensor[:5], tensor.view(2, 5), torch.zeros(3)]) == 52


def test_memory_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_run", lambda model, name, options: name)
    monkeypatch.setattr(memory, "held", lambda name: {"dense": 4, "masks": 6, "ours": 1}.get(name, 2) * 2**20)
    rows = memory.measure("mlp", QUIET, fast=False)
    assert list(column(rows, "ratio_to_dense").values()) == [1, 1.5, 0.25, 0.5]
    assert column(rows, "mebibytes")["masks"] == 6


# ---- scale ----


@pytest.mark.parametrize("millions", [1, 10, 500])
def test_stacks_have_the_weights_that_they_are_asked_for(millions: int) -> None:
    with torch.device("meta"):
        stack = scale.stack(100, scale.pixels(millions))
    weights = sum(p.numel() for p in stack.parameters())
    assert weights == pytest.approx(millions * 1e6, rel=0.1)


def test_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "SIZES", (0.01, 0.03, 500))
    monkeypatch.setattr(scale, "SPARSITIES", (0.5, 0.9))
    monkeypatch.setattr(scale, "MIDDLE", 0.02)
    result = bench("scale", device="cpu", rounds=1, sparsity=0.8)
    check(result, SCHEMA["outputs"]["bench"])
    rows = result["rows"]
    assert all(list(row) == SCALE.split() for row in rows)
    assert [row["variant"].split(":")[0] for row in rows] == ["size"] * 2 + ["sparsity"] * 2 + ["fit"] * 2
    assert [row["sparsity"] for row in rows] == [0.8, 0.8, 0.5, 0.9, None, None]
    assert rows[2]["million_weights"] == rows[0]["million_weights"] < rows[1]["million_weights"]


def test_growth_is_the_slope_of_a_line() -> None:
    def row(millions: float, sparsity: float, milliseconds: float) -> dict[str, Any]:
        named = dict.fromkeys(scale.TIMES, milliseconds)
        return {"variant": "", "million_weights": millions, "sparsity": sparsity, **named}

    by_size = [row(n, 0.95, 7 + 3 * n) for n in (1, 10, 100)]
    by_sparsity = [row(10, s, 1 + 2 * 10 * (1 - s)) for s in (0.5, 0.9, 0.99)]
    total, living = scale.growth(by_size, by_sparsity)
    assert all(total[key] == pytest.approx(3) and living[key] == pytest.approx(2) for key in scale.TIMES)
    assert len(scale.growth(by_size[:1], by_sparsity)) == 1


# ---- peers ----


def test_rivals_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sparsimony", None)
    for what in (peers.STEP, peers.EXPLORATION):
        rows = peers.contest("mlp", what, QUIET)
        assert [row["variant"] for row in rows] == ["ours", "torch.ao.pruning", "sparsimony", peers.PUBLISHED]
        notes, times = column(rows, "note"), column(rows, "milliseconds")
        assert notes["sparsimony"].startswith("not installed: ") and times["sparsimony"] is None
        assert all(times[name] is not None for name in notes if name != "sparsimony")


def test_a_rival_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(rivals.Rival):
        def prepare(self) -> None:
            raise RuntimeError("no such layer\nand more")

    entry = peers.entered(Broken, "mlp", peers.STEP, batches("mlp", QUIET), QUIET)
    assert entry == (None, "failed: no such layer")


def test_ratios_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "RIVALS", {peers.PUBLISHED: rivals.Published})
    given(monkeypatch, peers, {"ours": [2.0], peers.PUBLISHED: [9.0]})
    rows = peers.contest("mlp", peers.STEP, QUIET)
    assert column(rows, "ratio_to_ours") == {"ours": 1, peers.PUBLISHED: 4.5}
    monkeypatch.setitem(peers.IMAGES, "cpu", BATCH)
    monkeypatch.setattr(peers, "epochs_in_turn", lambda trainer, other: ([500.0], [4000.0]))
    rows = peers.epochs("mlp", QUIET)
    assert column(rows, "seconds") == {"ours": 0.5, peers.PUBLISHED: 4.0}
    assert column(rows, "ratio_to_ours") == {"ours": 1, peers.PUBLISHED: 8}


def own(classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 64), nn.Linear(64, classes))


def test_rivals_take_a_model_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.IMAGES, "cpu", BATCH + 80)
    monkeypatch.setattr(rivals, "WORKERS", 0)
    rows = peers.contest("test_bench:own", peers.STEP, QUIET) + peers.epochs("test_bench:own", QUIET)
    measured = {(row["what"], row["variant"]) for row in rows if row["milliseconds"]}
    assert {(peers.STEP, "torch.ao.pruning"), (peers.EPOCH, peers.PUBLISHED)} <= measured


def masks_of(rival: rivals.Rival) -> list[torch.Tensor]:
    if isinstance(rival, rivals.Published):
        return [mask.clone() for mask in rival.masks.values()]
    return [m.parametrizations["weight"][0].mask.clone() for m in rival.layers.values()]


@pytest.mark.parametrize("name", peers.RIVALS)
def test_rivals_are_sparse_and_explore(name: str) -> None:
    if name == "sparsimony":
        pytest.importorskip("sparsimony")
    rival = peers.RIVALS[name]("lenet5", batches("lenet5", QUIET), QUIET, interval=2)
    for _ in range(2):
        masks = masks_of(rival)
        timed = rival.exploring().prepare()
        assert all(map(torch.equal, masks, masks_of(rival)))
        for module, mask in zip(rival.layers.values(), masks, strict=True):
            assert not module.weight[mask == 0].any() and module.weight[mask == 1].any()
        sizes = sum(mask.numel() for mask in masks)
        assert sum(int(mask.sum()) for mask in masks) == pytest.approx(0.05 * sizes, abs=5)
        timed()
        changed = [int((a != b).sum()) for a, b in zip(masks, masks_of(rival), strict=True)]
        assert sum(changed) > 0 or name == "torch.ao.pruning"  # which may have nothing to change


def test_published_transforms() -> None:
    """Each image is one of the 162 crops and flips of its padded original."""
    data = noise(4, QUIET)
    images = rivals.Transformed(data)
    padded = torch.nn.functional.pad(data.train_x, [4] * 4)
    for i in range(4):
        x, y = images[i]
        assert y == data.train_y[i] and x.dtype == torch.float32
        pixels = (x * 0.5 + 0.5).mul(255).round().to(torch.uint8)
        crops = [padded[i, :, a : a + 32, b : b + 32] for a in range(9) for b in range(9)]
        assert sum(torch.equal(pixels, c) or torch.equal(pixels, c.flip(2)) for c in crops) == 1
    plain, _ = rivals.Transformed(data, augment=False)[2]
    assert torch.equal((plain * 0.5 + 0.5).mul(255).round().to(torch.uint8), data.test_x[2])


def test_torchvision_transforms_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the published code's order; a torchvision that cannot be imported is none."""

    def made(name: str) -> Any:
        return lambda *given, **more: (name, *given, *more.values())

    names = ("RandomCrop", "RandomHorizontalFlip", "ToTensor", "Normalize")
    stand_in: Any = ModuleType("torchvision.transforms")
    vars(stand_in).update({name: made(name) for name in names}, Compose=lambda steps: lambda image: steps)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.transforms", stand_in)
    data = noise(2, QUIET)
    images, half = rivals.Transformed(data), (0.5,) * 3
    plain = [("ToTensor",), ("Normalize", half, half)]
    assert images.by == "torchvision"
    assert images[0][0] == [("RandomCrop", 32, 4), ("RandomHorizontalFlip",), *plain]
    assert rivals.Transformed(data, augment=False)[0][0] == plain
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    assert rivals.Transformed(data).by == "no torchvision"


def test_the_published_epoch_sees_every_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "WORKERS", 0)
    data = noise(BATCH + 80, QUIET)
    published, sizes = rivals.Published("mlp", data, QUIET), []
    for part in ("train", "evaluate"):
        monkeypatch.setattr(published, part, lambda x, y: sizes.append(len(y)))
    published.epoch(*(rivals.Transformed(data, augment=augment).loader() for augment in (True, False)))
    assert sizes == [BATCH, 80, BATCH]


# ---- the loop ----


def test_epochs_in_turn() -> None:
    """Both have as many epochs; the first is not counted."""
    seen: list[int] = []
    trainer = loop.make("mlp", noise(64, QUIET), 3, 0.9)
    ours, theirs = loop.epochs_in_turn(trainer, seen.append)
    assert seen == [1, 2, 3] and len(ours) == len(theirs) == 2
    assert trainer.network.step == 3 and trainer.settings.interval == NEVER


# ---- inference ----


def test_the_fastest_dense_network_counts() -> None:
    times = {"ours": [1.0, 2.0], "torch": [9.0, 9.0], "channels_last": [6.0, 8.0], "onnxruntime": [4.0, 8.0]}
    row = inference.compared(times)
    assert (row["torch_milliseconds"], row["onnxruntime_milliseconds"], row["milliseconds"]) == (7, 6, 1.5)
    assert row["speedup"] == 4 and row["compiled_milliseconds"] is None


def test_contenders_of_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """All compute the same; one that is not installed, or fails, is said."""
    said: list[str] = []
    options = Options(torch.device("cpu"), rounds=1, say=said.append)
    network, x = inference.sparse_network("lenet5", options), torch.randn(2, 3, 32, 32)
    assert st.flops(network, x).ratio < 0.2
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    runs = inference.dense(network, x, options)
    assert [*runs] == ["torch", "channels_last"] and said[0].startswith("onnxruntime does not take part: ")
    results = [run() for run in (inference._ours(network, x), *runs.values())]
    assert all(torch.allclose(result, network(x), atol=1e-5) for result in results)


@pytest.mark.parametrize(
    ("sparsity", "limit"), [(0.95, {"speedup": 4.9}), (0.8, {"speedup": 1.0}), (0.5, {})]
)
def test_what_inference_has_to_reach(sparsity: float, limit: dict[str, float]) -> None:
    assert inference._limits({"model": "vgg16", "batch": 16, "sparsity": sparsity}) == limit
    assert inference._limits({"model": "mlp", "batch": 16, "sparsity": sparsity}) == {}


# ---- the command ----


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("stpe", {}, "unknown benchmark 'stpe': did you mean 'step'?"),
        ("step", {"model": "vgg61"}, "unknown model 'vgg61': did you mean 'vgg16'?"),
        ("step", {"sparsity": 95}, "--sparsity is a fraction, not a percentage: 95, did you mean 0.95?"),
        ("step", {"rounds": 0}, "--rounds must be a whole number, at least 1, not 0"),
        ("scale", {"model": "vgg16"}, "scale has networks of its own: leave out --model"),
        ("loop", {"device": "cuda"}, "loop is measured on a CPU: leave out --device"),
        ("inference", {"device": "cuda"}, "inference is measured on a CPU: leave out --device"),
        ("loop", {"compile": True}, "--compile is for step and inference: leave it out"),
        ("scale", {"largest": 0.5}, "--largest must be at least 1 (million weights), not 0.5"),
    ],
)
def test_bad_input(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(st.SparsityError) as error:
        bench(name, **{"device": "cpu", **options})
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["step", "explore", "superpose", "memory", "peers", "together"])
def test_a_sparsity_that_empties_a_layer_is_refused_before_anything_is_said(name: str, capsys) -> None:
    with pytest.raises(st.SparsityError, match="the layer conv1 would lose all its connections: use at most"):
        bench(name, model="lenet5", sparsity=0.9999, device="cpu")
    assert capsys.readouterr() == ("", "")


def test_table() -> None:
    rows = [
        judged({"variant": "dense", "milliseconds": 1234.5, "steps": None}),
        judged({"variant": "ours", "milliseconds": 0.0123, "steps": None}, {"milliseconds": 0.01}),
    ]
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    show({"name": "step", "rows": [{**row, "device": "H200", "torch": "2.11"} for row in rows]}, console)
    head, dense, ours, common = console.export_text().splitlines()
    assert head.split() == ["variant", "milliseconds", "requirement", "met"]  # nobody has steps
    assert dense.split() == ["dense", "1,234.500"]
    assert ours.split() == ["ours", "0.0123", "milliseconds", "<=", "0.01", "MISSED"]
    assert common.strip() == "H200; torch 2.11"


def test_every_benchmark_has_a_summary() -> None:
    assert (
        " ".join(BENCHMARKS)
        == "step explore superpose memory scale peers profile together loop build inference"
    )
    assert all(entry.summary for entry in BENCHMARKS.values())


def test_the_recipe_that_shares_are_stated_for() -> None:
    recipe = resolve({"data": "cifar100"})
    assert (recipe.epochs, recipe.batch_size, recipe.interval, recipe.cycles) == (250, BATCH, 1000, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["step", "memory", "explore", "superpose", "profile"])
def test_on_a_gpu(name: str) -> None:
    rows = bench(name, model="lenet5", rounds=1)["rows"]
    if name in ("step", "memory"):
        assert {row["mode"] for row in rows} == {"eager", "fast"}
    assert all(row["milliseconds"] > 0 for row in rows if row.get("variant") == "ours" and name != "memory")
