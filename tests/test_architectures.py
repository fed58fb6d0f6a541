"""Models of many kinds train with RigL, SET and GraNet, and the network is right after every step."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import suptickets as st

CLASSES = 5
STEPS = 30
METHODS: dict[str, Callable[[], st.Method]] = {
    "rigl": lambda: st.RigL(0.6, interval=4),
    "set": lambda: st.SET(0.6, interval=4),
    "granet": lambda: st.GraNet(0.8, interval=4, prune_end=20, initial_sparsity=0.4),
}


# ---- models ----


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    """Two blocks; the output layer and the embedding share their weight."""

    def __init__(self, words: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        block = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.embedding(x)).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x).mean(1))


class Convolutions(nn.Module):
    """Every kind of convolution, between views of the right number of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv2d = nn.Conv2d(1, 4, 3)
        self.grouped = nn.Conv2d(4, 6, 3, groups=2, bias=False)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.transposed2d = nn.ConvTranspose2d(6, 4, 3, groups=2)
        self.conv3d = nn.Conv3d(1, 3, 2)
        self.transposed3d = nn.ConvTranspose3d(3, 2, (1, 2, 1))
        self.conv1d = nn.Conv1d(2, 4, 5, stride=3)
        self.transposed1d = nn.ConvTranspose1d(4, 2, 3)
        self.out = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transposed2d(self.depthwise(torch.tanh(self.grouped(self.conv2d(x)))))
        x = self.transposed3d(torch.tanh(self.conv3d(x.unsqueeze(1))))
        return self.out(torch.tanh(self.transposed1d(self.conv1d(x.flatten(2)))).flatten(1))


class Twice(nn.Module):
    """One module, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Unused(Twice):
    """With a layer that the forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 6)


class Frozen(nn.Module):
    """The first two layers were frozen before the model became sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)
        self.layer = nn.Linear(8, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(self.stem(x))))


class Named(nn.Module):
    """An encoder of three layers and a head, to choose from by name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def single() -> nn.Module:
    return nn.Linear(6, CLASSES)


# ---- the table: how to build it, its input, what to name, what becomes sparse ----

ROWS, WORDS = (7, 6), (7,)
LSTM = [f"lstm.weight_{kind}_l{layer}" for layer in (0, 1) for kind in ("ih", "hh")]
BLOCKS = [
    f"blocks.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.out_proj", "linear1", "linear2")
]


@dataclass
class Case:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sparse: list[str]
    include: Any = None
    exclude: Any = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build()
        model(self.batch(0)[0])  # gives lazy layers their shape
        return model

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = self.build in (Transformer, Words)
        x = (
            torch.randint(11, (8, *self.shape), generator=generator)
            if words
            else torch.randn(8, *self.shape, generator=generator)
        )
        return x, torch.randint(CLASSES, (8,), generator=generator)


CASES: dict[str, Case] = {
    "LSTM, dense by default": Case(Recurrent, ROWS, ["out"]),
    "LSTM, named by pattern": Case(Recurrent, ROWS, LSTM, include="lstm.*"),
    "LSTM, one weight and the rest": Case(Recurrent, ROWS, [LSTM[1], "out"], include=[LSTM[1], "out"]),
    "transformer": Case(Transformer, WORDS, ["embedding", *BLOCKS]),
    "transformer, attention's projection": Case(
        Transformer,
        WORDS,
        [f"blocks.layers.{i}.self_attn.in_proj_weight" for i in (0, 1)],
        include="*.in_proj_weight",
    ),
    "attention's projection": Case(
        Attention, ROWS, ["attention.in_proj_weight", "out"], include=["attention.in_proj_weight", "out"]
    ),
    "embedding, dense by default": Case(Words, WORDS, ["out"]),
    "embedding": Case(Words, WORDS, ["embedding"], include="embedding"),
    "convolutions": Case(
        Convolutions,
        (1, 9, 9),
        ["conv2d", "grouped", "depthwise", "transposed2d", "conv3d", "transposed3d", "conv1d", "transposed1d"]
        + ["out"],
    ),
    "root": Case(single, (6,), ["weight"]),
    "used twice": Case(Twice, (6,), ["layer", "out"]),
    "unused": Case(Unused, (6,), ["layer", "out", "unused"]),
    "frozen before": Case(Frozen, (6,), ["layer", "out"]),
    "include a module": Case(Named, (6,), ["encoder.0", "encoder.2", "encoder.4"], include="encoder"),
    "include a weight": Case(Named, (6,), ["encoder.2"], include="encoder.2.weight"),
    "include a pattern": Case(Named, (6,), ["encoder.4", "head"], include=["*.4", "he*"]),
    "exclude a layer": Case(Named, (6,), ["encoder.0", "encoder.2", "encoder.4"], exclude="head"),
    "exclude a module": Case(Named, (6,), ["head"], exclude="encoder"),
    "exclude a pattern": Case(Named, (6,), ["encoder.2", "head"], exclude=["encoder.0", "*.4"]),
    "include and exclude": Case(
        Named, (6,), ["encoder.0", "encoder.4"], include="encoder", exclude="encoder.2"
    ),
}


def sparse(case: Case, method: str) -> tuple[nn.Module, torch.optim.Optimizer, st.SparseNetwork]:
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    network = st.sparsify(
        model, METHODS[method](), optimizer, include=case.include, exclude=case.exclude, seed=0
    )
    return model, optimizer, network


def step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> float:
    x, y = case.batch(index)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def assert_right(network: st.SparseNetwork, total: int | None) -> None:
    """The network's own check, and from outside: zeros where nothing lives, the right total."""
    network.check()
    for weight in network.weights.values():
        for module, attribute in weight.owners:
            dense = getattr(module, attribute)
            living = torch.zeros(weight.size, dtype=torch.bool).index_fill(0, weight.rows().long(), True)
            assert dense.shape == weight.shape
            assert not dense.detach().reshape(-1)[~living].any(), weight.name
    if total is not None:
        assert network.nonzero == total


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_trains_and_stays_right(case: Case, method: str) -> None:
    model, optimizer, network = sparse(case, method)
    assert list(network.layers) == case.sparse
    target = round((1 - network.method.sparsity) * network.parameters_total)
    first = {name: weight.rows().clone() for name, weight in network.weights.items()}
    losses = []
    for index in range(STEPS):
        losses.append(step(case, model, optimizer, index % 2))
        assert_right(network, None if method == "granet" and index < 19 else target)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert any(not torch.equal(weight.rows(), first[name]) for name, weight in network.weights.items())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_trained_one_densifies_copies_and_saves(case: Case, method: str) -> None:
    original, (model, optimizer, network) = case.model(), sparse(case, method)
    for index in range(9):
        step(case, model, optimizer, index)
    x, y = case.batch(0)
    plain, twin, file = network.densify(), copy.deepcopy(model), io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert list(plain.state_dict()) == list(original.state_dict())
    assert [type(m) for m in plain.modules()] == [type(m) for m in original.modules()]
    original.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for other in (plain, twin, loaded, original):
            torch.testing.assert_close(other(x), model(x), rtol=1e-5, atol=1e-6)
    F.cross_entropy(plain(x), y).backward()
    assert all(
        (p.grad is None) == (not p.requires_grad or "unused" in n) for n, p in plain.named_parameters()
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_evaluation_is_that_of_the_plain_model(case: Case) -> None:
    """In evaluation mode some layers (attention, transformers) take another path through torch."""
    model, optimizer, network = sparse(case, "rigl")
    step(case, model, optimizer, 0)
    x, _ = case.batch(1)
    plain = network.densify().eval()
    model.eval()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


# ---- what is particular ----


class Owner(nn.Module):
    """A model that holds its optimizer, network and tickets, as a LightningModule may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(20, 30), nn.Linear(30, 4)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.network: Any = st.sparsify(self, st.RigL(0.8, interval=2), self.optimizer)
        self.tickets: Any = st.SupTickets(self.network, 6, 2, 2, (0.01, 0.02))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).relu())


def test_a_copy_of_a_model_that_holds_its_network_goes_without_it() -> None:
    model = Owner()
    for _ in range(6):
        model.optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 20)), torch.arange(8) % 4).backward()
        model.optimizer.step()
    twin, plain, ticket = copy.deepcopy(model), model.network.densify(), model.tickets.ticket()
    x = torch.randn(3, 20)
    assert twin(x).equal(model(x)) and not torch.equal(ticket(x), model(x))
    torch.testing.assert_close(plain(x), model(x), rtol=1e-5, atol=1e-6)
    for other in (twin, plain, ticket, copy.deepcopy(nn.ModuleList([model]))[0]):
        assert type(other) is Owner and other.network is None and other.tickets is None
    assert model.network.model is model and model.tickets.network is model.network
    for alone in (model.network, model.tickets, {"tickets": model.tickets}):
        with pytest.raises(st.SparsityError, match="copy the model, or sparsify another"):
            copy.deepcopy(alone)


def test_tied_weights_stay_tied_and_count_once() -> None:
    case = CASES["transformer"]
    model, optimizer, network = sparse(case, "rigl")
    assert network.parameters_total == 11 * 8 + 2 * (8 * 8 + 2 * 8 * 16)
    values = model.embedding._parameters["weight"]
    for index in range(STEPS):
        step(case, model, optimizer, index)
        assert model.out._parameters["weight"] is model.embedding._parameters["weight"] is values
        assert torch.equal(model.out.weight, model.embedding.weight)
    assert sum(parameter is values for parameter in model.parameters()) == 1
    plain = network.densify()
    assert plain.out.weight is plain.embedding.weight
    assert isinstance(plain.embedding.weight, nn.Parameter)


def test_the_gradient_of_a_tied_weight_is_that_of_both_uses() -> None:
    case = CASES["transformer"]
    model, _, network = sparse(case, "rigl")
    network.request_gradient()
    plain = network.densify()
    x, y = case.batch(0)
    for one in (model, plain):
        F.cross_entropy(one(x), y).backward()
    weight = network.weights["embedding"]
    dense = plain.embedding.weight.grad.flatten()
    torch.testing.assert_close(weight.gradient, dense)
    torch.testing.assert_close(weight.values.grad.flatten(), dense[weight.rows().long()])


@pytest.mark.parametrize("method", METHODS)
def test_layers_frozen_before_are_left_alone(method: str) -> None:
    case = CASES["frozen before"]
    model, optimizer, network = sparse(case, method)
    before = {name: tensor.clone() for name, tensor in model.stem.state_dict().items()}
    for index in range(STEPS):
        step(case, model, optimizer, index)
    assert before.keys() == model.stem.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.stem.state_dict().items())
    assert type(model.stem[0]) is nn.Linear and type(model.stem[0].weight) is nn.Parameter


@pytest.mark.parametrize("method", ["rigl", "set"])
def test_a_layer_frozen_after_stays_as_it_is(method: str) -> None:
    case = CASES["exclude a layer"]
    model, optimizer, network = sparse(case, method)
    for index in range(6):
        step(case, model, optimizer, index)
    for parameter in model.encoder[0].parameters():
        parameter.requires_grad_(False)
    optimizer.zero_grad()
    frozen, other = model.encoder[0].weight.detach().clone(), network.weights["encoder.2"].rows().clone()
    for index in range(6, STEPS):
        step(case, model, optimizer, index)
        assert_right(network, round(0.4 * network.parameters_total))
    assert torch.equal(model.encoder[0].weight.detach(), frozen)
    assert not torch.equal(network.weights["encoder.2"].rows(), other)


def test_granet_reaches_its_target_with_a_layer_frozen_after() -> None:
    case = CASES["exclude a layer"]
    model, optimizer, network = sparse(case, "granet")
    for parameter in model.encoder[0].parameters():
        parameter.requires_grad_(False)
    for index in range(STEPS):
        step(case, model, optimizer, index)
        assert_right(network, None)
    assert network.nonzero == round(0.2 * network.parameters_total)


@pytest.mark.parametrize("method", METHODS)
def test_an_unused_layer_keeps_its_values(method: str) -> None:
    """There is no gradient to grow it by; without one the optimizer leaves it alone too."""
    case = CASES["unused"]
    model, optimizer, network = sparse(case, method)
    dense = case.model().unused.weight.detach()
    for index in range(STEPS):
        step(case, model, optimizer, index)
    living = model.unused.weight.detach()
    assert torch.equal(living, torch.where(living == 0, 0.0, dense))


def test_grouped_and_transposed_convolutions_count_their_own_weights() -> None:
    _, _, network = sparse(CASES["convolutions"], "rigl")
    sizes = {name: layer.size for name, layer in network.layers.items()}
    assert sizes["grouped"] == 6 * (4 // 2) * 9
    assert sizes["depthwise"] == 6 * 1 * 9
    assert sizes["transposed2d"] == 6 * (4 // 2) * 9
    assert sizes["transposed3d"] == 3 * 2 * 2
    assert sizes["transposed1d"] == 4 * 2 * 3
    shapes = [layer.shape for layer in network.layers.values()]
    for layer, density in zip(network.layers.values(), st.erk(shapes, 0.6), strict=True):
        assert layer.nonzero == pytest.approx(density * layer.size, abs=1)


def test_a_dense_lstm_weight_does_not_outlive_the_step() -> None:
    """Recurrent layers keep their weights in a list, beside the attributes."""
    case = CASES["LSTM, named by pattern"]
    model, optimizer, _ = sparse(case, "set")
    step(case, model, optimizer, 0)
    kept = [value for value in vars(model.lstm).values() if isinstance(value, list)]
    assert not [t for one in kept for t in one if isinstance(t, Tensor) and t.dim() > 1 and t.shape[1] > 1]


def test_a_sparse_lstm_computes_with_its_connections() -> None:
    """With a weight of zeros the input has no say."""
    case = CASES["LSTM, named by pattern"]
    model, _, _ = sparse(case, "rigl")
    model.lstm.weight_ih_l0 = torch.zeros(32, 6)
    x, _ = case.batch(0)
    assert torch.equal(model(x), model(-x))
