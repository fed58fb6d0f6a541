"""Dense weights that are kept: read, delivered to, stepped and rewritten as if they were built anew."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import batches, living, mlp, per_position, sgd, tiny_net, train_step, verify
from hypothesis import given, settings
from hypothesis import strategies as st_
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import suptickets as st
from suptickets import kept as module
from suptickets.kept import ALIGNED, KeptWeights
from suptickets.network import SparseNetwork
from suptickets.weight import SparseWeight

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Loop:
    """A training loop with kept weights; what is not kept has an optimizer of its own, on the same state."""

    def __init__(self, network: SparseNetwork, optimizer: torch.optim.Optimizer) -> None:
        self.network, self.optimizer = network, optimizer
        for p in network.model.parameters():
            if p.requires_grad and not optimizer.state[p]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        weights = KeptWeights.suitable(network.weights.values(), cast=False)
        self.kept = KeptWeights(weights, optimizer, next(network.model.parameters()).dtype)
        taken = {id(w.values) for w in weights}
        rest = [p for p in network.model.parameters() if p.requires_grad and id(p) not in taken]
        self.group = optimizer.param_groups[0]
        self.rest = sgd(nn.ParameterList(rest), self.group["lr"]) if rest else None
        for p in rest:
            self.rest.state[p] = optimizer.state[p]
        network.attach(optimizer, hooks=False)
        self.renewed = 0

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        self.network.before_step()
        self.kept.begin()
        self.network.model.zero_grad()
        loss = cross_entropy(self.network.model(batch[0]), batch[1])
        loss.backward()
        rate = loss.new_tensor([self.group["lr"]])
        module.sgd(self.kept, rate, self.group["momentum"], self.group["weight_decay"])
        if self.rest is not None:
            self.rest.step()
        self.network.after_step()
        self.renewed += self.kept.stale and self.kept.take()
        return float(loss.detach())

    def close(self) -> None:
        self.kept.release()
        self.network.attach(self.optimizer)


class Twice(nn.Module):
    """One weight in two places of the forward pass, another in two modules, a third that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.tied, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.other, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        self.other.weight = self.tied.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.twice, self.tied, self.twice, self.frozen, self.other):
            x = torch.tanh(layer(x))
        return self.last(x)


class Recurrent(nn.Module):
    """Recurrent weights and packed projections, which are no convolutions or linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.attention = (
            nn.LSTM(8, 8, batch_first=True),
            nn.MultiheadAttention(8, 2, batch_first=True),
        )
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x)
        return self.last(self.attention(x, x, x)[0].mean(1))


def convolutions(dimensions: int, *, transposed: bool = False, **options: Any) -> nn.Module:
    kinds: dict[tuple[int, bool], type[nn.Module]] = {
        (1, False): nn.Conv1d,
        (2, False): nn.Conv2d,
        (3, False): nn.Conv3d,
        (1, True): nn.ConvTranspose1d,
        (2, True): nn.ConvTranspose2d,
        (3, True): nn.ConvTranspose3d,
    }
    kind = kinds[dimensions, transposed]
    return nn.Sequential(
        kind(2, 6, 3, padding=1),
        nn.Tanh(),
        kind(6, 4, 3, stride=2, **options),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "linear": (mlp, (6,), {}),
    "with batch norm": (tiny_net, (3, 8, 8), {}),
    "channels_last": (tiny_net, (3, 8, 8), {"memory_format": torch.channels_last}),
    "Conv1d": (lambda: convolutions(1), (2, 9), {}),
    "Conv2d, grouped": (lambda: convolutions(2, groups=2), (2, 6, 5), {}),
    "Conv2d, no bias": (lambda: convolutions(2, bias=False), (2, 6, 5), {}),
    "Conv3d": (lambda: convolutions(3), (2, 4, 5, 4), {}),
    "Conv3d, channels_last": (
        lambda: convolutions(3),
        (2, 4, 5, 4),
        {"memory_format": torch.channels_last_3d},
    ),
    "ConvTranspose1d": (lambda: convolutions(1, transposed=True), (2, 5), {}),
    "ConvTranspose2d": (lambda: convolutions(2, transposed=True), (2, 3, 4), {}),
    "twice, tied, frozen": (Twice, (6,), {}),
    "recurrent, attention": (Recurrent, (3, 8), {"include": ["*"]}),
}


def built(name: str, method: st.methods.Method, seed: int = 0) -> tuple[SparseNetwork, torch.optim.Optimizer]:
    """In float64, with its optimizer."""
    make, shape, options = MODELS[name]
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        model(torch.zeros(2, *shape))
    model = model.double()
    if "memory_format" in options:
        conv = model[0] if isinstance(model, nn.Sequential) else model
        conv.to(memory_format=options["memory_format"])
        model[2].to(memory_format=options["memory_format"]) if isinstance(model[2], nn.Conv3d) else None
    optimizer = sgd(model)
    named = {"include": include(model)} if "include" in options else {}
    return st.sparsify(model, method, optimizer, seed=seed, **named), optimizer


def include(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.dim() >= 2]


def data(name: str, classes: int = 5) -> list[tuple[Tensor, Tensor]]:
    classes = 4 if name == "linear" else classes
    return batches(MODELS[name][1], classes, dtype=torch.float64)


def same(ours: SparseNetwork, theirs: SparseNetwork) -> None:
    """The same connections and values, in the state and as they are read; the same momenta."""
    a, b = ours.state_dict()["model"], theirs.state_dict()["model"]
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(
            a[key], b[key], rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
        )
    pairs = zip(ours.weights.values(), theirs.weights.values(), strict=True)
    for weight, other in pairs:
        torch.testing.assert_close(read(weight), read(other), rtol=1e-9, atol=1e-12)
        assert torch.equal(read(other), other.build(other.values.detach(), torch.float64))
        momenta = [
            n.optimizer.state[w.values].get("momentum_buffer") for n, w in ((ours, weight), (theirs, other))
        ]
        if momenta[0] is not None:
            torch.testing.assert_close(*momenta, rtol=1e-9, atol=1e-12)


def read(weight: SparseWeight) -> Tensor:
    owner, attribute = weight.owners[0]
    return getattr(owner, attribute).detach().as_subclass(Tensor)


METHODS: dict[str, Callable[[], Any]] = {
    "rigl": lambda: st.RigL(0.6, interval=2),
    "set": lambda: st.SET(0.6, interval=2),
    "granet": lambda: st.GraNet(0.7, initial_sparsity=0.2, interval=2, prune_end=10),
    "dsr": lambda: st.DSR(0.6, interval=2, threshold=0.02),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_layer_trains_the_same(name: str, method: str) -> None:
    (ours, optimizer), (theirs, other) = (built(name, METHODS[method]()) for _ in range(2))
    loop = Loop(theirs, other)
    assert loop.kept.weights and all(w.values.requires_grad for w in loop.kept.weights)
    for i in range(12):
        batch = data(name)[i % 3]
        assert train_step(ours.model, optimizer, batch) == pytest.approx(loop.step(batch), rel=1e-9)
        same(ours, theirs)
    theirs.check()


# ---- gradients ----


@pytest.mark.parametrize("name", [n for n in MODELS if n != "recurrent, attention"])
def test_gradients_are_those_of_autograd(name: str) -> None:
    """Of the living connections, and on request of all positions, by the definition."""
    network, optimizer = built(name, st.Static(0.5))
    loop, (x, y) = Loop(network, optimizer), data(name)[0]
    plain = network.densify()
    cross_entropy(plain(x), y).backward()
    network.request_gradient()
    for _ in range(2):  # a second backward pass replaces the first
        loop.kept.begin()
        cross_entropy(network.model(x), y).backward()
    for weight in loop.kept.weights:
        expected = weight.flatten(plain.get_submodule(weight.name).weight.grad)
        torch.testing.assert_close(weight.gradient, expected, rtol=1e-9, atol=1e-12)
        slot = weight.slot
        torch.testing.assert_close(
            slot.gradient[: weight.nonzero], expected[weight.positions.long()], rtol=1e-9, atol=1e-12
        )
    network.release_gradient()
    assert all(weight.gradient is None for weight in network.weights.values())


def test_what_is_collected_is_not_left_from_another_step() -> None:
    network, optimizer = built("linear", st.Static(0.5))
    loop = Loop(network, optimizer)
    for batch in data("linear"):
        network.request_gradient()
        plain = network.densify()
        cross_entropy(plain(batch[0]), batch[1]).backward()
        loop.step(batch)
        for weight in loop.kept.weights:
            expected = plain.get_submodule(weight.name).weight.grad.flatten()
            torch.testing.assert_close(weight.gradient, expected, rtol=1e-9, atol=1e-12)
        network.release_gradient()
    for slot in loop.kept.slots:  # and where none is wanted, none is collected
        slot._total.fill_(torch.nan)
    loop.step(batch)
    assert all(slot._total.isnan().all() for slot in loop.kept.slots)


class Sometimes(nn.Module):
    """A layer that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.used = nn.Linear(6, 5), nn.Linear(6, 5), True

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.sometimes(x) if self.used else self.always(x)


def test_a_layer_that_a_step_has_not_used_has_no_gradient_of_it() -> None:
    model = Sometimes().double()
    network = st.sparsify(model, st.Static(0.5), optimizer := sgd(model))
    loop, batch = Loop(network, optimizer), (torch.randn(4, 6).double(), torch.randint(5, (4,)))
    for model.used in (True, False):
        network.request_gradient()
        loop.step(batch)
        assert network.weights["always"].gradient is not None
        assert (network.weights["sometimes"].gradient is not None) == model.used


def test_a_gradient_that_was_released_is_not_used_again() -> None:
    network, optimizer = built("linear", st.RigL(0.5, interval=3))
    loop = Loop(network, optimizer)
    for batch in data("linear"):  # explores after the third
        loop.step(batch)
    with pytest.raises(st.SparsityError, match="needs the gradient of all positions and there is none"):
        network.explore(0.5)


def test_a_gradient_that_has_not_come_is_not_used() -> None:
    network, optimizer = built("linear", st.RigL(0.5, interval=3))
    loop = Loop(network, optimizer)
    for batch in data("linear"):
        loop.step(batch)
    network.request_gradient()
    with pytest.raises(st.SparsityError, match="needs the gradient of all positions and there is none"):
        network.explore(0.5)


def test_reading_computes_nothing() -> None:
    """The dense tensor is the buffer itself; what is read cannot be written to."""
    network, optimizer = built("with batch norm", st.Static(0.5))
    loop = Loop(network, optimizer)
    for weight, slot in zip(loop.kept.weights, loop.kept.slots, strict=True):
        assert read(weight).data_ptr() == slot.dense.data_ptr()
        assert slot.dense.storage_offset() % ALIGNED == 0
    assert sum(slot.dense.numel() for slot in loop.kept.slots) == network.parameters_total
    with pytest.raises(st.SparsityError, match="would be lost"):
        network.model[0].weight.mul_(2)


def test_evaluating_does_not_disturb() -> None:
    (ours, optimizer), (theirs, other) = (built("with batch norm", METHODS["rigl"]()) for _ in range(2))
    loop = Loop(theirs, other)
    for i in range(8):
        batch = data("with batch norm")[i % 3]
        train_step(ours.model, optimizer, batch)
        loop.step(batch)
        for model in (ours.model, theirs.model):
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(ours.model(batch[0]), theirs.model(batch[0]))
        copied = copy.deepcopy(theirs.model)
        torch.testing.assert_close(copied(batch[0]), theirs.densify()(batch[0]))
        for model in (ours.model, theirs.model):
            model.train()
    same(ours, theirs)


# ---- who is kept ----


def test_who_can_be_kept() -> None:
    """Trained weights; under autocast, those of layers that it casts."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("usual", "empty", "still")})
    model["own"] = Own()
    model["still"].requires_grad_(False)
    network = st.sparsify(model, st.Static(0.5), sgd(model), include=include(model), seed=0)
    network.prune({"empty": 0})
    names = {
        cast: [w.name for w in KeptWeights.suitable(network.weights.values(), cast=cast)] for cast in (0, 1)
    }
    assert names == {0: ["usual", "empty", "own"], 1: ["usual", "empty"]}


# ---- connections that change ----


def rewire(network: SparseNetwork, action: str, share: float) -> None:
    """Something that changes connections, values or counts of some layers, other than by a step."""
    counts = {n: w.nonzero for n, w in network.weights.items()}
    sizes = {n: w.size for n, w in network.weights.items()}
    if action == "prune":
        network.prune({n: max(int(c * share), 1) for n, c in counts.items()})
    elif action == "grow":
        network.grow({n: c + int((sizes[n] - c) * share) for n, c in counts.items()}, by="random")
    elif action == "grow one":
        name = list(counts)[int(share * len(counts) * 0.99)]
        network.grow({name: sizes[name]}, by="random")
    elif action == "explore":
        network.explore(share, "magnitude", "random")
    elif action == "assign":
        for name in counts:
            layer = network.model.get_submodule(name)
            layer.weight = torch.sin(torch.arange(layer.weight.numel(), dtype=torch.float64)).view(
                layer.weight.shape
            )


ACTIONS = st_.tuples(
    st_.sampled_from(["prune", "grow", "grow one", "explore", "assign", "step"]), st_.floats(0, 1)
)


@settings(max_examples=60)
@given(
    name=st_.sampled_from(["linear", "channels_last", "Conv3d, channels_last"]),
    actions=st_.lists(ACTIONS, max_size=8),
)
def test_any_sequence_of_changes(name: str, actions: list[tuple[str, float]]) -> None:
    """What changes is seen; after each, everything is what a network that is not kept has."""
    (ours, optimizer), (theirs, other) = (built(name, st.Static(0.5)) for _ in range(2))
    loop, batch = Loop(theirs, other), data(name)[0]
    train_step(ours.model, optimizer, batch)
    loop.step(batch)
    for action, share in actions:
        if action == "step":
            train_step(ours.model, optimizer, batch)
            loop.step(batch)
        else:
            before = [(w.rows().clone(), w.values.detach().clone()) for w in theirs.weights.values()]
            rewire(ours, action, share)
            rewire(theirs, action, share)
            after = [(w.rows(), w.values.detach()) for w in theirs.weights.values()]
            changed = any(
                not (torch.equal(a, c) and torch.equal(b, d))
                for (a, b), (c, d) in zip(before, after, strict=True)
            )
            assert loop.kept.stale or not changed
            loop.kept.take()
        assert not loop.kept.stale
        same(ours, theirs)
        check_buffers(loop.kept)
    loop.close()
    for _ in range(2):
        train_step(ours.model, optimizer, batch)
        train_step(theirs.model, other, batch)
    same(ours, theirs)


def check_buffers(kept: KeptWeights) -> None:
    """Parts that fit, less than half of them tail; a tail repeats its weight's first connection."""
    total = sum(kept.capacities)
    counts = [w.nonzero for w in kept.weights]
    assert len(kept.values) == len(kept.momentum) == len(kept.gradient) == len(kept.positions) == total
    assert total <= 2 * sum(counts)
    start = 0
    for weight, slot, capacity, offset in zip(
        kept.weights, kept.slots, kept.capacities, kept.starts, strict=True
    ):
        n, part = weight.nonzero, slice(start, start + capacity)
        assert n <= capacity <= max(weight.size, n)
        values, positions, momentum = kept.values[part], kept.positions[part], kept.momentum[part]
        assert weight.values.data_ptr() == values.data_ptr()
        assert weight.positions.data_ptr() == slot.positions.data_ptr() == kept.local[part].data_ptr()
        assert torch.equal(positions[:n], weight.positions + offset)
        assert (positions[n:] == positions[0]).all()
        torch.testing.assert_close(values[n:], values[:1].expand(capacity - n), rtol=1e-12, atol=0)
        torch.testing.assert_close(momentum[n:], momentum[:1].expand(capacity - n), rtol=1e-12, atol=0)
        start += capacity


def test_buffers_are_renewed_only_when_they_must_be() -> None:
    """Exact at first; then an eighth to spare, half for what has outgrown its part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)).double()
    network = st.sparsify(model, st.Static(0.5, distribution="uniform"), optimizer := sgd(model), seed=0)
    kept = KeptWeights(network.weights.values(), optimizer, torch.float64)

    def to(first: int, second: int) -> bool:
        for name, count in (("0", first), ("1", second)):
            now = network.weights[name].nonzero
            network.prune({name: count}) if count < now else network.grow({name: count}, by="random")
        return kept.take()

    assert kept.capacities == [1024, 512]
    assert not to(1000, 500) and not to(1024, 512) and not to(600, 168)  # exactly half is tail
    assert kept.capacities == [1024, 512]
    assert to(600, 167) and kept.capacities == [675, 187]
    assert not to(675, 187) and to(676, 187) and kept.capacities == [1014, 210]
    assert to(2048, 1000) and kept.capacities == [2048, 1024]
    assert not to(2048, 1024)


def test_positions_of_all_weights_fit_into_32_bits_or_have_64(monkeypatch: pytest.MonkeyPatch) -> None:
    network, optimizer = built("linear", st.Static(0.5))
    kept = KeptWeights(network.weights.values(), optimizer, torch.float64)
    assert kept.positions.dtype == torch.int32
    kept.dense = torch.zeros(1, dtype=torch.float64).expand(2**31)
    kept._allocate(kept.capacities)
    assert kept.positions.dtype == kept.local.dtype == torch.int64


def test_a_weight_that_has_lost_all_connections_is_zero() -> None:
    network, optimizer = built("linear", st.Static(0.5))
    loop = Loop(network, optimizer)
    loop.step(data("linear")[0])
    network.prune({"4": 0})
    loop.kept.take()
    assert not network.model[4].weight.any()


# ---- giving back ----


@pytest.mark.parametrize("method", METHODS)
def test_release_gives_everything_back(method: str) -> None:
    (ours, optimizer), (theirs, other) = (built("with batch norm", METHODS[method]()) for _ in range(2))
    loop = Loop(theirs, other)
    for i in range(15):
        batch = data("with batch norm")[i % 3]
        train_step(ours.model, optimizer, batch)
        if i < 7:
            loop.step(batch)
        else:
            train_step(theirs.model, other, batch)
        if i == 6:
            kept = loop.kept
            loop.close()
            for weight in theirs.weights.values():
                own = (weight.values, weight.positions, other.state[weight.values]["momentum_buffer"])
                assert weight.slot is None and all(t.untyped_storage().nbytes() == t.nbytes for t in own)
            for buffer in (kept.values, kept.momentum, kept.dense):
                buffer.fill_(torch.nan)
            kept.positions.fill_(0)
            kept.local.fill_(0)
        same(ours, theirs)
    verify(theirs, other)


def test_a_request_for_gradients_outlives_the_release() -> None:
    """Released before a step that explores, the gradient of all positions is collected as before."""
    network, optimizer = built("linear", st.RigL(0.5, interval=3))
    loop, (x, y) = Loop(network, optimizer), data("linear")[0]
    loop.step((x, y))
    loop.step((x, y))
    loop.close()
    assert all(weight.canvas is not None for weight in network.weights.values())
    before = living(network.model)
    train_step(network.model, optimizer, (x, y))
    assert any(not torch.equal(rows, before[name]) for name, rows in living(network.model).items())


def test_slots_do_not_outlive_their_weights() -> None:
    network, optimizer = built("linear", st.Static(0.5))
    before = len(module._slots)
    loop = Loop(network, optimizer)
    assert len(module._slots) == before + 3
    loop.close()
    del loop
    assert len(module._slots) == before


# ---- states ----


def test_a_state_is_that_of_weights_that_are_not_kept() -> None:
    """Also with tails: shapes, row-major positions, and what the optimizer writes."""
    (ours, optimizer), (theirs, other) = (built("channels_last", METHODS["granet"]()) for _ in range(2))
    loop = Loop(theirs, other)
    for i in range(8):
        batch = data("channels_last")[i % 3]
        train_step(ours.model, optimizer, batch)
        loop.step(batch)
    assert any(c > w.nonzero for c, w in zip(loop.kept.capacities, loop.kept.weights, strict=True))
    for a, b in ((ours.state_dict(), theirs.state_dict()), (optimizer.state_dict(), other.state_dict())):
        torch.testing.assert_close(flat(a), flat(b), rtol=1e-9, atol=1e-12)
    assert ours.nonzero == theirs.nonzero and repr(ours) == repr(theirs)
    verify(theirs, other)
    assert per_position(theirs.model, other, "momentum_buffer").keys() == {"0", "4", "6"}


def flat(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a state by their places in it."""
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    found = {k: v for key, value in parts for k, v in flat(value, f"{prefix}/{key}").items()}
    return found | ({prefix: state} if isinstance(state, Tensor) else {})


@pytest.mark.parametrize("change", ["load network", "load model", "assign", "explore", "prune", "grow"])
def test_what_is_changed_from_outside_is_seen(change: str) -> None:
    network, optimizer = built("linear", st.Static(0.5))
    other, _ = built("linear", st.Static(0.7), seed=1)
    loop = Loop(network, optimizer)
    loop.step(data("linear")[0])
    assert not loop.kept.stale
    if change == "load network":
        network.load_state_dict(other.state_dict())
    elif change == "load model":
        network.model.load_state_dict(other.model.state_dict())
    else:
        rewire(network, change, 0.3)
    assert loop.kept.stale
    loop.kept.take()
    for weight in network.weights.values():
        assert torch.equal(read(weight), weight.build(weight.values.detach(), torch.float64))
    if "load" in change:
        assert torch.equal(network.model[0].weight, other.model[0].weight)


def test_momenta_of_other_connections_are_dropped() -> None:
    """A state of other connections starts the optimizer's state of the sparse weights anew."""
    networks, states = [built("linear", METHODS["granet"]()) for _ in range(2)], []
    loop = Loop(*networks[1])
    steps = [lambda batch: train_step(networks[0][0].model, networks[0][1], batch), loop.step]
    for i in range(6):
        for (network, _), step in zip(networks, steps, strict=True):
            if i == 3:
                network.load_state_dict(states[0])
                loop.kept.take()
            step(data("linear")[i % 3])
            states.append(copy.deepcopy(network.state_dict()))
    same(networks[0][0], networks[1][0])


def test_saved_in_the_middle_and_loaded_by_a_network_that_is_not_kept() -> None:
    (ours, optimizer), (theirs, other) = (built("channels_last", METHODS["granet"]()) for _ in range(2))
    loop = Loop(theirs, other)
    for i in range(5):
        batch = data("channels_last")[i % 3]
        train_step(ours.model, optimizer, batch)
        loop.step(batch)
    file = io.BytesIO()
    torch.save([theirs.state_dict(), other.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    again, another = built("channels_last", METHODS["granet"](), seed=5)
    again.load_state_dict(states[0])
    another.load_state_dict(states[1])
    same(ours, again)
    back = Loop(again, another)
    for i in range(5, 12):
        batch = data("channels_last")[i % 3]
        train_step(ours.model, optimizer, batch)
        back.step(batch)
        same(ours, again)


# ---- a GPU ----


SIZES = [0, 1, 2, 31, 1023, 1024, 1025, 4096, 100_001]


def gpu_buffers(count: int, tail: int, dtype: torch.dtype, index: torch.dtype) -> dict[str, Tensor]:
    """Values, momenta and gradients at distinct positions; the tail repeats the first of each."""
    generator = torch.Generator().manual_seed(count)
    positions = torch.randperm(3 * count + 7, generator=generator)[:count].sort().values
    parts = {"positions": positions.to(index), "dense": torch.zeros(3 * count + 7, dtype=dtype)}
    for name in ("values", "momentum"):
        parts[name] = torch.randn(count, generator=generator)
    parts["gradient"] = torch.randn(count, generator=generator).to(dtype)
    for name in ("positions", "values", "momentum", "gradient") if count else ():
        parts[name] = torch.cat([parts[name], parts[name][:1].expand(tail)])
    return {name: part.cuda() for name, part in parts.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.gpu
@needs_gpu
def test_the_kernel_takes_what_gather_takes(index: torch.dtype, dtype: torch.dtype) -> None:
    assert module._kernels() is not None
    for count in SIZES:
        gradient = torch.randn(3 * count + 7, device="cuda").to(dtype)
        positions = torch.randint(len(gradient), (count,), device="cuda", dtype=index)
        room = torch.full((count + 9,), torch.nan, dtype=dtype, device="cuda")
        module.take(gradient, positions, out=room[:count])
        assert torch.equal(room[:count], gradient[positions.long()])
        assert room[count:].isnan().all()


@pytest.mark.parametrize("tail", [0, 1, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.gpu
@needs_gpu
def test_the_kernel_steps_as_sgd_does(index: torch.dtype, dtype: torch.dtype, tail: int) -> None:
    """Three steps against torch's own SGD in float64; positions that do not live stay zero."""
    assert module._kernels() is not None
    for count in SIZES:
        parts = gpu_buffers(count, tail, dtype, index)
        reference = nn.Parameter(parts["values"].double())
        optimizer = sgd(nn.ParameterList([reference]))
        optimizer.state[reference]["momentum_buffer"] = parts["momentum"].double()
        kept: Any = SimpleNamespace(**parts, delivered=lambda: iter([slice(0, None)]))
        for rate in (0.1, 0.05, 0.2):
            parts["gradient"].mul_(-1.5)
            module.sgd(kept, torch.tensor([rate], device="cuda"), 0.9, 5e-4)
            optimizer.param_groups[0]["lr"], reference.grad = rate, parts["gradient"].double()
            optimizer.step()
        check_stepped(parts, reference.detach(), optimizer.state[reference]["momentum_buffer"], count)


def check_stepped(parts: dict[str, Tensor], values: Tensor, momentum: Tensor, count: int) -> None:
    torch.testing.assert_close(parts["values"].double(), values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts["momentum"].double(), momentum, rtol=1e-5, atol=1e-6)
    expected = torch.zeros_like(parts["dense"])
    expected[parts["positions"].long()] = parts["values"].to(expected.dtype)
    assert torch.equal(parts["dense"], expected)
    assert (parts["values"][count:] == parts["values"][:1]).all()


@pytest.mark.parametrize("method", ["rigl", "granet"])
@pytest.mark.parametrize("name", ["linear", "channels_last", "Conv1d", "Conv3d, channels_last"])
@pytest.mark.gpu
@needs_gpu
def test_a_gpu_keeps_what_a_cpu_builds(name: str, method: str) -> None:
    """Begun on the CPU, then trained on both, in float64."""
    (ours, optimizer), (theirs, other) = (built(name, METHODS[method]()) for _ in range(2))
    theirs.model.cuda()
    loop = Loop(theirs, other)
    for i in range(12):
        x, y = data(name)[i % 3]
        loss = train_step(ours.model, optimizer, (x, y))
        assert loop.step((x.cuda(), y.cuda())) == pytest.approx(loss, rel=1e-9)
    for weight, same_weight in zip(ours.weights.values(), theirs.weights.values(), strict=True):
        torch.testing.assert_close(read(weight), read(same_weight).cpu(), rtol=1e-8, atol=1e-10)
