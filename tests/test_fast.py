"""The fast step does what the plain one does: the same weights, momenta, sums, connections, tickets."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import statistics
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import suptickets
from suptickets.data import load_data
from suptickets.data.base import ArrayData
from suptickets.errors import TrainingError
from suptickets.methods import METHODS
from suptickets.models import build_model
from suptickets.training import fast as fast_step
from suptickets.training import loop
from suptickets.training.fast import FastStep, inductor_options
from suptickets.training.feed import Resident, Sent
from suptickets.training.folder import RunFolder
from suptickets.training.loop import Trainer
from suptickets.training.plain import PlainStep
from suptickets.training.processes import Processes
from suptickets.training.progress import Progress
from suptickets.training.settings import resolve

PACKAGE = str(Path(suptickets.__file__).parent)
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ---- models, data, runs ----


def tiny(classes: int, channels: int, size: int, width: float = 1.0) -> nn.Module:
    """Convolutions with and without batch norm, two linear layers; 2,700 weights for 6 x 6 images."""
    a, b, c = (max(int(n * width), 1) for n in (8, 16, 10))
    return nn.Sequential(
        nn.Conv2d(channels, a, 3, padding=1),
        nn.BatchNorm2d(a),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(a, b, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(b * (size // 2) ** 2, c),
        nn.Tanh(),
        nn.Linear(c, classes),
    )


class Unusual(nn.Module):
    """A weight that is used twice, one with two owners, one that is frozen, and what has no connections."""

    def __init__(self, inputs: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(inputs, 16), nn.Linear(16, 16)
        self.tied, self.other = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.other.weight = self.tied.weight
        self.frozen, self.last = nn.Linear(16, 16), nn.Linear(16, classes)
        self.frozen.requires_grad_(False)
        self.dropout, self.scale = nn.Dropout(dropout), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.twice, self.twice, self.tied, self.other, self.frozen):
            x = torch.tanh(layer(x.flatten(1)))
        return self.last(self.dropout(x) * self.scale)


def unusual(classes: int, channels: int, size: int) -> nn.Module:
    return Unusual(channels * size**2, classes, dropout=0.1)


def without_dropout(classes: int, channels: int, size: int) -> nn.Module:
    return Unusual(channels * size**2, classes, dropout=0.0)


class Spare(nn.Sequential):
    """A layer that the forward pass leaves out."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__(nn.Linear(inputs, 16), nn.Linear(16, classes), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self[1](torch.tanh(self[0](x.flatten(1))))


def spare(classes: int, channels: int, size: int) -> nn.Module:
    return Spare(channels * size**2, classes)


def made(count: int = 46, size: int = 6, **options: Any) -> ArrayData:
    """Noise; 16 a step, the third and last step of an epoch has 14."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(256, (count, 2, size, size), generator=generator, dtype=torch.uint8)
    y = torch.randint(4, (count,), generator=generator)
    options = {"padding": 2, "flip": True, **options}
    return ArrayData("made", 4, x, y, x[:9], y[:9], (0.4, 0.5), (0.3, 0.2), **options)


def trainer(
    data: ArrayData | None = None, device: torch.device = CPU, *, quiet: bool = True, **given: Any
) -> Trainer:
    """27 steps in float64: 18 in which connections change at every second, two cycles of 4, and one more."""
    settings = {"model": "test_fast:tiny", "precision": "fp64", "sparsity": 0.8, "batch_size": 16, "seed": 3}
    settings |= {"epochs": 9, "cycles": 2, "cycle_epochs": 1.4, "interval": 2, "prune_epochs": 4.5}
    built = Trainer(resolve(settings | given), made() if data is None else data, Processes(0, 1, device))
    if quiet and built.tickets is not None:
        built.tickets.told = None
    return built


def fast(built: Trainer) -> FastStep:
    return FastStep(built, compile=False)


def go(built: Trainer, step: PlainStep | FastStep, until: int | None = None) -> Iterator[dict[str, Any]]:
    """The state after each epoch, up to `until` steps, and after the last step."""
    until = built.settings.epochs * built.steps if until is None else until
    for epoch in range(built.network.step // built.steps, built.settings.epochs):
        for _ in step.epoch(epoch, built._enter(epoch)):
            if built.network.step % built.steps == 0 or built.network.step == until:
                built.network.check()
                yield copy.deepcopy(built.state_dict())
            if built.network.step == until:
                return


def assert_same(ours: Any, theirs: Any, where: str = "", **tolerance: float) -> None:
    """The same up to rounding: tensors, numbers, and all that holds them."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}/{key}", **tolerance)
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}/{i}", **tolerance)
    elif isinstance(ours, Tensor | float):
        close = {"rtol": 1e-8, "atol": 1e-10, "equal_nan": True} | tolerance
        torch.testing.assert_close(ours, theirs, **close, msg=lambda text: f"{where}: {text}")
    else:
        assert ours == theirs, where


def trained(state: dict[str, Any]) -> dict[str, Any]:
    """Without momenta of what is never trained (zeros, or absent), and without a GPU's unused generator."""
    found = state["optimizer"]["state"]
    moving = {
        i: s for i, s in found.items() if s.get("momentum_buffer") is not None and s["momentum_buffer"].any()
    }
    return {**state, "cuda_rng": None, "optimizer": {**state["optimizer"], "state": moving}}


SINGLE = {"rtol": 1e-5, "atol": 1e-7}  # a GPU's fused optimizer takes learning rates in float32


def compare(**given: Any) -> tuple[Trainer, Trainer]:
    """Both paths, one after the other, compared after each epoch, and their tickets at the end."""
    near = SINGLE if given.get("device") == GPU else {}
    expected = [*go(plain := trainer(**given), PlainStep(plain))]
    step = fast(quick := trainer(**given))
    for ours, theirs in zip(expected, go(quick, step), strict=True):
        assert_same(trained(ours), trained(theirs), **near)
    step.close()
    assert plain.network.step == quick.network.step == 27
    if plain.tickets is not None and quick.tickets is not None:
        assert plain.tickets.explored == quick.tickets.explored
        ours, theirs = (
            t.tickets.ticket(t.data.train_batches(16, 0, 0, dtype=t.dtype)) for t in (plain, quick)
        )
        assert_same(dict(ours.state_dict()), dict(theirs.state_dict()), **near)
    ours, theirs = (dict(t.network.densify().state_dict()) for t in (plain, quick))
    assert_same(ours, theirs, **near)
    return plain, quick


# ---- both paths ----


@pytest.mark.parametrize("booster", ["none", "sup-tickets"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_the_same_way(method: str, booster: str) -> None:
    compare(method=method, booster=booster)


@pytest.mark.parametrize("booster", ["swa", "ensemble", "free-tickets", "tree-net", "batch-ensemble"])
def test_every_booster_of_the_fast_path(booster: str) -> None:
    """But distillation, whose teachers come first."""
    compare(method="rigl", booster=booster, **({"members": 2} if booster == "batch-ensemble" else {}))


VARIANTS: dict[str, dict[str, Any]] = {
    "no momentum": {"momentum": 0.0},
    "no momentum, other counts": {"momentum": 0.0, "method": "granet"},
    "no weight decay": {"weight_decay": 0.0},
    "label smoothing": {"label_smoothing": 0.1},
    "warm-up and drops": {"warmup_epochs": 2.5, "milestones": [0.3, 0.6]},
    "explore at every step": {"interval": 1},
    "everything is explored": {"rate": 1.0, "explore_rate": 1.0},
    "explore at the end": {"explore_at": "end"},
    "collect in the middle": {"schedule": "fge", "include_start": True, "rule": "caa"},
    "prune at the end": {"rule": "cima", "prune": "layer", "prune_when": "end", "batch_norm": "recompute"},
    "cosine": {"decay": "cosine", "method": "set"},
    "very sparse": {"sparsity": 0.99},
    "layers that lose everything": {"method": "snip", "sparsity": 0.995},
}


@pytest.mark.filterwarnings("ignore:SNIP left no connection", "ignore:pruning left", "ignore:the average has")
@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_mean_the_same(variant: str) -> None:
    compare(**VARIANTS[variant])


@pytest.mark.parametrize("method", ["rigl", "granet", "set", "dsr"])
def test_weights_with_two_uses_two_owners_or_none_that_trains(method: str) -> None:
    """Dropout draws the same too: the random state is part of what is compared."""
    _, quick = compare(method=method, model="test_fast:unusual", sparsity=0.6)
    assert quick.network.weights["tied"].owners[1][0] is quick.model.other


def test_a_layer_that_is_not_used_stays_as_it_is() -> None:
    compare(method="static", booster="none", model="test_fast:spare")


@pytest.mark.parametrize("shape", [{"batch_size": 23}, {"batch_size": 46, "epochs": 27, "cycle_epochs": 4}])
def test_batches_of_equal_size(shape: dict[str, Any]) -> None:
    """Without a smaller last batch, and with the whole data in one."""
    plain, quick = trainer(**shape), trainer(**shape)
    for ours, theirs in zip(go(plain, PlainStep(plain)), go(quick, fast(quick)), strict=True):
        assert_same(ours, theirs)


def test_a_loader_gives_the_same_as_data_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, quick = trainer(), trainer()
    step = fast(quick)
    assert isinstance(step.feed, Resident)
    step.feed = Sent(quick.data, quick)
    for ours, theirs in zip(go(plain, PlainStep(plain)), go(quick, step), strict=True):
        assert_same(ours, theirs)


def test_half_the_bits_stay_near_float32() -> None:
    """bf16 on a CPU: both paths round alike, so they stay far closer than bf16 is to float32."""
    states = {}
    for precision in ("fp32", "bf16", "fast"):
        built = trainer(
            method="static",
            booster="none",
            epochs=2,
            sparsity=0.5,
            lr=0.02,
            precision="bf16" if precision == "fast" else precision,
        )
        step = fast(built) if precision == "fast" else PlainStep(built)
        *_, last = go(built, step)
        states[precision] = torch.cat(
            [v.flatten() for k, v in last["network"]["model"].items() if "weight" in k]
        )
    away = (states["bf16"] - states["fp32"]).norm()
    assert 0 < (states["fast"] - states["bf16"]).norm() < away
    assert (states["fast"] - states["fp32"]).norm() < 2 * away


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rigl", "granet"])
def test_compiled(method: str) -> None:
    """What is compiled is compiled once: no exploration and no count changes that."""
    plain, quick = trainer(method=method), trainer(method=method)
    step = FastStep(quick, compile=True)
    torch._dynamo.utils.counters.clear()
    for ours, theirs in zip(go(plain, PlainStep(plain)), go(quick, step), strict=True):
        assert_same(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is compiled, by a backend that takes no time."""
    gc.collect()  # runs of other tests that were never closed, whose keys would become free at some time
    torch.compiler.reset()
    monkeypatch.setattr(fast_step, "_compiled", set())
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    counted: Counter[str] = torch._dynamo.utils.counters["stats"]
    return counted


def first_step(**given: Any) -> FastStep:
    """A compiled run that has taken a step and then ended."""
    step = FastStep(trainer(**given), compile=True)
    next(step.epoch(0, 0))
    step.close()
    return step


def parameters(step: FastStep) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in step.parts.model.parameters()])


def test_a_run_like_one_before_compiles_nothing(compiled: Counter[str]) -> None:
    """Whatever the seed, the method and what comes at the end; and it computes what is its own."""
    alike = [{"method": "rigl"}, {"method": "set"}, {"booster": "none"}, {"sparsity": 0.5}, {"seed": 4}]
    ended = [first_step(**given) for given in alike]
    assert compiled["unique_graphs"] == 1
    assert torch.equal(parameters(ended[0]), parameters(first_step(**alike[0])))
    assert not torch.equal(parameters(ended[0]), parameters(ended[-1]))
    first_step(method="dense")
    assert compiled["unique_graphs"] == 2
    first_step()
    assert compiled["unique_graphs"] == 2


def test_explorations_compile_nothing(compiled: Counter[str]) -> None:
    """Steps that collect the gradient of all positions run the code of those that do not."""
    for _ in go(built := trainer(), FastStep(built, compile=True)):
        pass
    assert compiled["unique_graphs"] == 1


def test_the_compiler_never_gives_up(compiled: Counter[str]) -> None:
    """It falls back to eager steps, in silence, when it has compiled one function for too many kinds."""
    for smoothing in range(12):
        first_step(label_smoothing=smoothing / 100)
        assert compiled["unique_graphs"] == smoothing + 1


def test_a_known_kind_is_not_compiled_again(compiled: Counter[str]) -> None:
    """Not even where there is no room for another."""
    for smoothing in [*range(fast_step.KINDS), 0, 1]:
        first_step(label_smoothing=smoothing / 100)
    assert compiled["unique_graphs"] == fast_step.KINDS


LOADED_ASIDE = """
import sys, threading
import torch
from suptickets.training.fast import load_compiler

torch.manual_seed(5)
assert "torch._inductor.compile_fx" not in sys.modules
before = set(threading.enumerate())
load_compiler()
(thread,) = set(threading.enumerate()) - before
draws = 0
while thread.is_alive() or not draws:
    draws += 1
    torch.rand(1)
assert "torch._inductor.compile_fx" in sys.modules
expected = torch.Generator().manual_seed(5)
for _ in range(draws):
    torch.rand(1, generator=expected)
assert torch.equal(torch.get_rng_state(), expected.get_state())
"""


@pytest.mark.slow
def test_a_compiler_that_is_loaded_aside_leaves_the_random_state_alone() -> None:
    """Weights are drawn meanwhile, and what dropout draws from is seeded. (A new process has none loaded.)"""
    subprocess.run([sys.executable, "-c", LOADED_ASIDE], check=True, timeout=100)


def test_who_goes_which_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast on a GPU in bf16, unless it is not wanted; plain where weights cannot be kept, which is said."""
    said: list[str] = []

    def way(device: str, precision: str, wanted: bool | None, suits: bool = True) -> Any:
        monkeypatch.setattr(loop, "PlainStep", lambda built: "plain")
        fast = SimpleNamespace(suits=lambda built: suits)
        monkeypatch.setattr(loop, "FastStep", type("Fast", (), {"suits": fast.suits, "__new__": new}))
        about: Any = SimpleNamespace(
            settings=SimpleNamespace(compile=wanted, precision=precision),
            processes=SimpleNamespace(device=torch.device(device)),
        )
        return Trainer.stepper(about, said.append)

    def new(kind: type, built: Any, compile: bool) -> str:
        return "compiled" if compile else "fast"

    assert way("cuda", "bf16", None) == "compiled"
    assert way("cuda", "fp32", None) == way("cuda", "bf16", False) == way("cpu", "fp32", None) == "plain"
    assert way("cuda", "fp32", True) == way("cpu", "fp32", True) == "compiled"
    assert not said
    assert way("cuda", "bf16", None, suits=False) == way("cuda", "bf16", True, suits=False) == "plain"
    assert len(said) == 2 and "not captured" in said[0]


def test_what_the_fast_step_suits() -> None:
    """One process, one weight decay of the weights, and layers that all compute in one dtype."""
    assert FastStep.suits(trainer())
    assert FastStep.suits(trainer(booster="batch-ensemble", members=2))  # whose factors are not decayed
    several = trainer()
    several.processes = Processes(0, 2, torch.device("cpu"))
    assert not FastStep.suits(several)
    decayed = trainer()
    assert decayed.network.state is not None
    decayed.network.state.decay[next(iter(decayed.network.weights))] = 0.5
    assert not FastStep.suits(decayed)
    mixed = trainer(precision="bf16")
    assert FastStep.suits(mixed)
    next(iter(mixed.network.weights.values())).casts = False
    assert not FastStep.suits(mixed)


# ---- counts that change ----


def watched(step: FastStep) -> list[bool]:
    """What each `take` says from now on: whether buffers were renewed."""
    told: list[bool] = []
    assert step.kept is not None
    take = step.kept.take
    step.kept.take = lambda: told.append(take()) or told[-1]  # type: ignore[method-assign,func-returns-value]
    return told


def counts(built: Trainer, step: FastStep) -> list[list[int]]:
    """Of each layer, before the first step and after each."""
    found = [[w.nonzero for w in built.network.weights.values()]]
    for epoch in range(built.settings.epochs):
        for _ in step.epoch(epoch, built._enter(epoch)):
            found.append([w.nonzero for w in built.network.weights.values()])
    return found


@pytest.mark.parametrize("method", ["granet", "gmp"])
def test_pruning_at_every_step_renews_a_handful_of_times(method: str) -> None:
    """A cubic schedule from half-dense or dense to 95 %; what is renewed is captured again."""
    built = trainer(
        method=method, sparsity=0.95, epochs=40, interval=1, prune_epochs=35, cycles=1, cycle_epochs=2
    )
    step = fast(built)
    told, found = watched(step), counts(built, step)
    totals = [sum(layers) for layers in found]
    assert all(a >= b for a, b in zip(totals, totals[1:], strict=False)) and len(set(totals)) > 80
    assert 2 <= sum(told) <= 5 and len(told) > 80
    assert step.kept is not None and sum(step.kept.capacities) <= 2 * built.network.nonzero


@pytest.mark.parametrize("method", ["rigl", "set", "static"])
def test_counts_that_stay_renew_nothing(method: str) -> None:
    built = trainer(method=method, interval=1)
    step = fast(built)
    assert step.kept is not None
    buffers = [t.data_ptr() for t in (step.kept.values, step.kept.positions, step.kept.momentum)]
    told = watched(step)
    assert len(set(map(tuple, counts(built, step)))) == 1
    assert told and not any(told)
    assert buffers == [t.data_ptr() for t in (step.kept.values, step.kept.positions, step.kept.momentum)]
    assert step.kept.capacities == [w.nonzero for w in built.network.weights.values()]


@pytest.mark.parametrize("method", ["snfs", "dsr"])
def test_counts_that_grow_and_shrink(method: str) -> None:
    """The total stays; a layer that grows out of its part gets a larger one, with some to spare."""
    built = trainer(method=method, epochs=20)
    step = fast(built)
    told, found = watched(step), counts(built, step)
    assert len({sum(layers) for layers in found}) == 1
    moves = [
        b - a
        for before, after in zip(found, found[1:], strict=False)
        for a, b in zip(before, after, strict=True)
    ]
    assert min(moves) < 0 < max(moves)
    assert any(told) and not all(told)
    assert step.kept is not None
    assert sum(step.kept.capacities) <= built.network.nonzero * 9 // 8 + 1


@pytest.mark.parametrize("method", ["granet", "dsr"])
def test_a_tail_is_in_no_count_state_message_or_file(method: str, tmp_path: Path) -> None:
    plain, quick = trainer(method=method), trainer(method=method)
    step = fast(quick)
    *_, ours = go(plain, PlainStep(plain), until=17)
    *_, theirs = go(quick, step, until=17)
    assert step.kept is not None
    assert sum(step.kept.capacities) > quick.network.nonzero
    assert_same(trained(ours), trained(theirs))
    assert repr(plain.network) == repr(quick.network) and repr(plain.model) == repr(quick.model)
    assert plain.network.nonzero == quick.network.nonzero
    for name, weight in quick.network.weights.items():
        dense = quick.model.get_submodule(name).weight.detach()
        assert torch.equal(dense, weight.build(weight.values.detach(), torch.float64))
        assert int(quick.network.densify().get_submodule(name).weight.count_nonzero()) <= weight.nonzero
    sizes = [written(built, tmp_path / name) for name, built in (("plain", plain), ("fast", quick))]
    assert abs(sizes[0] - sizes[1]) < 0.02 * sizes[0]


def written(built: Trainer, path: Path) -> int:
    """Bytes of a checkpoint; none of its tensors brings along what it does not show."""
    folder = RunFolder(path)
    folder.checkpoint.parent.mkdir(parents=True)
    folder.save_checkpoint({**built.state_dict(), "seconds": 0.0}, built.settings)
    for tensor in tensors(torch.load(folder.checkpoint, weights_only=True)):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    return folder.checkpoint.stat().st_size


def tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from tensors(part)


# ---- what is captured ----


class Replayed:
    """Stands in for CUDA graphs: nothing is computed by a capture; a replay finds everything where it was."""

    def __init__(self, step: FastStep, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.body, self.capturing = step, step._body, False
        step.cuda, step.stream, step.pool = True, None, None  # type: ignore[assignment]
        monkeypatch.setattr(step, "_aside", contextlib.nullcontext)
        monkeypatch.setattr(step, "_body", lambda size: None if self.capturing else self.body(size))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    @contextlib.contextmanager
    def capture(self, graph: Any, **_: Any) -> Iterator[None]:
        self.capturing, places = True, self.places()
        size, _ = next(key for key, value in self.step.graphs.items() if value is graph)
        yield
        self.capturing = False

        def replay() -> None:
            now = {name: tensor.data_ptr() for name, tensor in self.places().items()}
            assert [name for name, tensor in places.items() if tensor.data_ptr() != now.get(name)] == []
            self.body(size)
            for slot in () if self.step.kept is None else self.step.kept.slots:
                slot.arrived = False  # a graph runs no Python

        graph.replay = replay

    def places(self) -> dict[str, Tensor]:
        """Everything that a step reads or writes, by name."""
        built, step = self.step.parts, self.step
        found = {name: t for name, t in (*built.model.named_parameters(), *built.model.named_buffers())}
        for name, parameter in built.model.named_parameters():
            found[f"momentum of {name}"] = built.optimizer.state[parameter].get("momentum_buffer")
        for name, weight in built.network.weights.items():
            found[f"canvas of {name}"] = weight.canvas
        slots = [] if step.kept is None else step.kept.slots
        plan = step.feed.plan if isinstance(step.feed, Resident) else None
        for i, owner in enumerate((step, step.kept, step.feed, plan, built.meter, *slots)):
            held = plan._asdict() if owner is plan and plan else getattr(owner, "__dict__", {})
            found |= {f"{type(owner).__name__} {i}: {n}": t for n, t in held.items()}
        return {name: t.detach() for name, t in found.items() if isinstance(t, Tensor)}


def replayed(monkeypatch: pytest.MonkeyPatch, **given: Any) -> FastStep:
    """A run by replays, compared with the plain one."""
    expected = [*go(plain := trainer(**given), PlainStep(plain))]
    step = fast(built := trainer(**given))
    Replayed(step, monkeypatch)
    for ours, theirs in zip(expected, go(built, step), strict=True):
        assert_same(trained(ours), trained(theirs))
    return step


@pytest.mark.parametrize("method", METHODS)
def test_what_is_captured_stays_where_it_was(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever moves is captured again."""
    step = replayed(monkeypatch, method=method, epochs=18, cycle_epochs=3, interval=4)
    assert {size for size, _ in step.graphs} == {16, 14}
    assert step.captures <= 4 or method in ("granet", "gmp", "snfs", "dsr")


@pytest.mark.parametrize("method", ["rigl", "granet"])
def test_unusual_weights_stay_where_they_were(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed(monkeypatch, method=method, epochs=18, model="test_fast:without_dropout", sparsity=0.6)


def test_four_graphs_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes of batch, each with and without the gradient of all positions, each captured once."""
    step = replayed(monkeypatch, method="rigl", epochs=30)
    assert step.graphs.keys() == {(16, False), (16, True), (14, False), (14, True)}
    assert step.captures == 4


def test_gradual_pruning_captures_a_handful_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"sparsity": 0.95, "epochs": 60, "prune_epochs": 50, "cycles": 1, "cycle_epochs": 2}
    step = fast(built := trainer(method="granet", **given))
    Replayed(step, monkeypatch)
    told, found = watched(step), counts(built, step)
    assert len({sum(layers) for layers in found}) > 50
    assert 2 <= sum(told) <= 5 and step.captures <= 4 * (sum(told) + 1)


# ---- checkpoints, whole runs ----


@pytest.mark.parametrize("method", ["rigl", "granet", "snfs", "dsr", "dense"])
def test_from_one_path_to_the_other_and_back(method: str, tmp_path: Path) -> None:
    """In the middle of an epoch, before the cycles and in them; by way of a file."""
    *_, expected = go(whole := trainer(method=method), PlainStep(whole))
    for first in (True, False):
        built, quick = trainer(method=method), first
        for number, until in enumerate((4, 11, 17, 20, 24, 27)):
            step = fast(built) if quick else PlainStep(built)
            *_, state = go(built, step, until)
            if until == 27:
                break
            path = tmp_path / f"{first}{number}.pt"
            torch.save(state, path)
            built, quick = trainer(method=method), not quick
            built.load_state_dict(torch.load(path, weights_only=True))
        assert_same(trained(expected), trained(state))


@pytest.mark.parametrize("method", ["rigl", "granet", "set"])
def test_taken_over_and_given_back(method: str) -> None:
    """The same network and optimizer, now by one path, now by the other."""
    *_, expected = go(whole := trainer(method=method), PlainStep(whole))
    built = trainer(method=method)
    for number, until in enumerate((4, 8, 15, 21, 26, 27)):
        step = fast(built) if number % 2 else PlainStep(built)
        *_, state = go(built, step, until)
        step.close()
        assert all(weight.slot is None for weight in built.network.weights.values())
    assert_same(trained(expected), trained(state))


@pytest.mark.parametrize("method", ["rigl", "granet"])
def test_a_state_loaded_into_a_fast_step(method: str) -> None:
    """Back to an earlier state, of other connections, without building the step anew."""
    *_, expected = go(whole := trainer(method=method), PlainStep(whole))
    built = trainer(method=method)
    step = fast(built)
    *_, state = go(built, step, 5)
    for _ in go(built, step, 11):
        pass
    built.load_state_dict(state)
    *_, found = go(built, step)
    assert_same(trained(expected), trained(found))


def whole_run(built: Trainer, path: Path, step: Callable[[Trainer], Any]) -> dict[str, Any]:
    """Everything that a run leaves behind, but the time that it took."""
    folder = RunFolder(path)
    folder.begin(built.settings, force=False)
    built.stepper = lambda say: step(built)  # type: ignore[method-assign]
    summary = built.run(folder, Progress(built.settings.epochs, quiet=True), lambda line: None)
    del summary["seconds"], summary["run"]
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {"summary": summary, "metrics": metrics, "ticket": load_file(path / "ticket.safetensors")}


@pytest.mark.parametrize("method", ["rigl", "granet", "snfs"])
def test_whole_runs_leave_the_same_behind(method: str, tmp_path: Path) -> None:
    """Tickets scored in the middle of an epoch, checkpoints after every step, evaluations, the summary."""
    given = {"method": method, "evaluate_every": 2, "checkpoint_every": 0.0, "quiet": False}
    ours = whole_run(trainer(**given), tmp_path / "plain", PlainStep)
    theirs = whole_run(trainer(**given), tmp_path / "fast", fast)
    assert len(ours["summary"]["tickets"]) == 2 and ours["summary"]["start"] is not None
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore:gradients are not finite")
@pytest.mark.parametrize("method", ["rigl", "granet", "snfs", "dsr"])
def test_a_loss_that_is_not_finite(method: str, tmp_path: Path) -> None:
    """Explorations in between choose among what is not finite; the message names the same step."""
    messages = []
    for name, step in (("plain", PlainStep), ("fast", fast)):
        built = trainer(method=method, lr=1e200, interval=1, batch_size=5, prune_epochs=1)
        with pytest.raises(TrainingError, match="not finite at step") as error:
            whole_run(built, tmp_path / name, step)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


# ---- nothing waits for the device ----

WAITING = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"}
SIZED_BY_CONTENT = {"_local_scalar_dense", "nonzero", "equal", "_unique2", "bincount", "masked_select"}


class Waits(TorchDispatchMode):
    """Counts what would wait for a device, by where it happens.

    Seeds are drawn from the network's own generator, which is on the CPU; superposing needs the number of
    connections of a union, and comes once a cycle.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        for name in WAITING:
            monkeypatch.setattr(Tensor, name, self._counting(name, getattr(Tensor, name)))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self._note(name)
            return function(*args, **kwargs)

        return counting

    def _note(self, name: str) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE)]
        own = any(
            (Path(f.filename).stem, f.name) in {("criteria", "_rand"), ("superpose", "add")} for f in frames
        )
        if frames and not own:
            self.found[f"{name}: " + " < ".join(f"{f.name}, line {f.lineno}" for f in frames[:-4:-1])] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        number = "masked_fill" in name and isinstance(args[2], Tensor)  # reads the value, out of sight
        if masked or number or name in SIZED_BY_CONTENT:
            self._note(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("method", "criteria"),
    [("rigl", []), ("set", []), ("static", []), ("dense", []), ("rigl", ["signed:random"])],
)
def test_nothing_is_read_from_the_device_within_an_epoch(
    method: str, criteria: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explorations and cycles included."""
    built = trainer(method=method, criteria=criteria)
    step = fast(built)
    with Waits(monkeypatch) as waits:
        for epoch in range(9):
            for _ in step.epoch(epoch, built._enter(epoch)):
                pass
    assert built.tickets is not None and len(built.tickets.collected) == 2
    assert waits.found == {}


def test_parts_of_a_model_ask_the_compiler_for_more() -> None:
    """Wherever they are: heads of a TreeNet have VGG's features within."""
    vgg, other = build_model("vgg-small", 4), build_model("lenet5", 4)
    assert inductor_options(other) == {"combo_kernels": True}
    assert inductor_options(vgg) == inductor_options(nn.ModuleList([other, vgg]))
    assert inductor_options(vgg).keys() == {"combo_kernels", "realize_reads_threshold"}


def test_a_batch_of_all_images_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    built, sizes = trainer(batch_size=10_000, booster="none", epochs=2), []
    step = fast(built)
    monkeypatch.setattr(step, "forward", lambda size: sizes.append(size) or step._forward(size))
    for _ in step.epoch(0, built._enter(0)):
        pass
    assert sizes == [built.data.train_size]


def test_what_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    built = trainer(booster="none")
    with Waits(monkeypatch) as waits:
        for epoch in range(2):
            for _ in PlainStep(built).epoch(epoch, built._enter(epoch)):
                built.meter.values()
    found = " ".join(waits.found)
    assert "cpu: values" in found and "__bool__: gradients_finite" in found and "_local_scalar_dense" in found


def test_within_an_epoch_a_run_reads_nothing_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a progress line at every step, on what takes itself for a GPU; whole epochs end in a reading."""
    built = trainer(booster="none")
    built.on_gpu, step = True, fast(built)
    progress = Progress(built.settings.epochs, quiet=True)
    monkeypatch.setattr(progress, "due", lambda: True)
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(progress, "show", lambda **line: shown.append(line))
    waits = Waits(monkeypatch)
    quietly = waits.found.copy
    monkeypatch.setattr(built, "_end_epoch", lambda *_: None)
    monkeypatch.setattr(built, "_finish", lambda folder: {})
    built.stepper = lambda say: step  # type: ignore[method-assign]
    folder = RunFolder(tmp_path / "run")
    folder.begin(built.settings, force=False)
    with waits:
        built.run(folder, progress, lambda line: None)
    assert quietly() == {} and len(shown) == 2 * 9


def test_a_run_that_fails_gives_its_network_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is captured and kept would stay on the GPU, and the next run in the process compile anew."""
    built = trainer(booster="none")
    step, weights = fast(built), built.network.weights.values()

    def fail(*_: object) -> None:
        assert any(weight.slot is not None for weight in weights)
        raise TrainingError("the loss is not finite")

    monkeypatch.setattr(built, "_end_epoch", fail)
    with pytest.raises(TrainingError, match="the loss is not finite"):
        whole_run(built, tmp_path, lambda _: step)
    assert all(weight.slot is None for weight in weights)


# ---- a GPU ----


def on_gpu(**given: Any) -> Trainer:
    return trainer(made().to(GPU), GPU, **given)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.gpu
@needs_gpu
def test_replayed_steps_are_plain_ones(method: str) -> None:
    """In float64, with explorations and cycles, whichever count changes."""
    compare(data=made().to(GPU), device=GPU, method=method)


@pytest.mark.parametrize("method", ["rigl", "granet"])
@pytest.mark.gpu
@needs_gpu
def test_replayed_steps_of_unusual_weights(method: str) -> None:
    compare(data=made().to(GPU), device=GPU, method=method, model="test_fast:without_dropout", sparsity=0.6)


@pytest.mark.gpu
@needs_gpu
def test_replayed_steps_with_a_loader() -> None:
    """Data that are not on the device are sent to where the graph expects them."""
    compare(data=made(), device=GPU)


@pytest.mark.gpu
@needs_gpu
def test_four_graphs_on_a_gpu() -> None:
    built = on_gpu(epochs=30)
    step = fast(built)
    for _ in go(built, step):
        pass
    assert step.graphs.keys() == {(16, False), (16, True), (14, False), (14, True)}
    assert step.captures == 4


@pytest.mark.gpu
@needs_gpu
def test_gradual_pruning_on_a_gpu() -> None:
    built = on_gpu(method="granet", sparsity=0.95, epochs=60, prune_epochs=50, cycles=1, cycle_epochs=2)
    step = fast(built)
    told, found = watched(step), counts(built, step)
    assert len({sum(layers) for layers in found}) > 50
    assert sum(told) <= 5 and step.captures <= 4 * (sum(told) + 1)


@pytest.mark.parametrize("method", ["rigl", "granet"])
@pytest.mark.gpu
@needs_gpu
def test_compiled_once_and_replayed(method: str) -> None:
    """In float64; no exploration and no count compiles anything again."""
    expected = [*go(plain := on_gpu(method=method), PlainStep(plain))]
    step = FastStep(quick := on_gpu(method=method), compile=True)
    torch._dynamo.utils.counters.clear()
    for ours, theirs in zip(expected, go(quick, step), strict=True):
        assert_same(trained(ours), trained(theirs), **SINGLE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert step.captures > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.gpu
@needs_gpu
def test_replayed_steps_are_those_that_run_as_they_are(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels for float32 values; never captured, the same steps are computed one by one."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    states = []
    for warm_up in (2, 10**9):
        monkeypatch.setattr("suptickets.training.fast.WARM_UP", warm_up)
        built = on_gpu(method="static", booster="none", precision=precision, lr=0.02)
        *_, state = go(built, step := fast(built))
        assert (step.captures > 0) == (warm_up == 2)
        model = state["network"]["model"]
        states.append(torch.cat([v.flatten().double() for k, v in model.items() if k.endswith("weight")]))
    first, second = states
    limit = 1e-4 if precision == "fp32" else 2e-2
    assert (first - second).norm() < limit * first.norm()


@pytest.mark.parametrize("method", ["rigl", "set", "static"])
@pytest.mark.gpu
@needs_gpu
def test_nothing_waits_for_a_gpu_within_an_epoch(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explorations and cycles included; superposing, which needs the size of a union, is left out."""
    built = on_gpu(method=method, epochs=30, cycle_epochs=2.4)
    assert built.tickets is not None
    step, add = fast(built), built.tickets.superposition.add
    mode = ["default"]

    def unwatched(ticket: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        add(ticket)
        torch.cuda.set_sync_debug_mode(mode[0])

    monkeypatch.setattr(built.tickets.superposition, "add", unwatched)
    try:
        for epoch in range(30):
            mode[0] = "error" if epoch >= 20 else "default"  # everything is captured by then
            steps = step.epoch(epoch, built._enter(epoch))
            next(steps)  # the epoch's plan and rates are sent before its first step
            torch.cuda.set_sync_debug_mode(mode[0])
            assert len([*steps]) == 2
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(built.tickets.collected) == 2


@pytest.mark.gpu
@needs_gpu
def test_two_hundred_steps_in_bf16_lose_nothing() -> None:
    """The digits' training loss in the 17th epoch, over five seeds: fast in bf16, and plain in float32."""
    losses: dict[str, list[float]] = {"plain": [], "fast": []}
    data = load_data("digits").to(GPU)
    given = {"model": "vgg-small", "booster": "none", "batch_size": 120, "epochs": 17, "sparsity": 0.9}
    for name, found in losses.items():
        for seed in range(5):
            precision = "bf16" if name == "fast" else "fp32"
            built = trainer(data, GPU, **given, interval=20, precision=precision, seed=seed)
            step = FastStep(built, compile=seed == 0) if name == "fast" else PlainStep(built)
            *_, last = go(built, step)
            assert built.network.step == 204
            found.append(float(last["meter"][0][0]) / data.train_size)
    spread = statistics.stdev(losses["plain"])
    assert abs(statistics.mean(losses["fast"]) - statistics.mean(losses["plain"])) < 3 * spread


@pytest.mark.gpu
@needs_gpu
def test_a_sparse_step_needs_less_memory_than_a_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """VGG-16, 95 % sparse, 32 images: the peak of a step that runs as it is, weights and momenta included."""
    monkeypatch.setattr("suptickets.training.fast.WARM_UP", 10**9)
    x = torch.randint(256, (192, 3, 32, 32), dtype=torch.uint8)
    y = torch.randint(10, (192,))
    data = ArrayData("images", 10, x, y, x[:9], y[:9], (0.5,) * 3, (0.5,) * 3).to(GPU)
    peaks = {}
    for method in ("dense", "rigl"):
        given = {"method": method, "model": "vgg16", "booster": "none", "precision": "bf16", "batch_size": 32}
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        step = fast(built := trainer(data, GPU, **given, sparsity=0.95, epochs=1, interval=100))
        for i, _ in enumerate(step.epoch(0, built._enter(0))):
            if i == 2:
                torch.cuda.reset_peak_memory_stats()
        peaks[method] = torch.cuda.max_memory_allocated() - before
        del step, built
    assert peaks["rigl"] < 0.65 * peaks["dense"]
