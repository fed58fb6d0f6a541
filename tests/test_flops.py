"""FLOPs: the literature's numbers, formulas written by hand, and a model that is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import suptickets as st
from suptickets.distribution import counts
from suptickets.measure.cost import training_flops
from suptickets.measure.sparsity import sparsity
from suptickets.models import MODELS, build_model


def density(network: st.SparseNetwork, name: str) -> float:
    return 1 - network.layers[name].sparsity


def test_a_matrix_times_a_vector_costs_the_same_in_any_order() -> None:
    class Turned(nn.Module):
        def __init__(self, order: Any) -> None:
            super().__init__()
            self.layer, self.order = nn.Linear(20, 30), order

        def forward(self, x: Tensor) -> Tensor:
            return self.order(self.layer.weight, self.layer.bias, x)

    orders = (lambda w, b, x: x @ w.T, lambda w, b, x: w @ x, lambda w, b, x: torch.addmv(b, w, x))
    for order in orders:
        model = Turned(order)
        st.sparsify(model, st.Static(0.9))
        found = st.flops(model, torch.randn(20))
        assert (found.dense, found.sparse) == (1200, 120)


def test_what_cannot_be_counted_is_told_in_one_line() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention

    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return flex(y, y, y)

    with pytest.raises(st.SparsityError, match="an operation of the model cannot be counted: .*flex_att"):
        st.flops(Flexible(), torch.randn(1, 2, 4, 16))


def test_gpus_that_the_model_is_not_on_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_rng_state", asked.append)
    assert st.flops(nn.Linear(2, 3), torch.zeros(1, 2)).dense == 12 and not asked


# ---- ResNet-50 on ImageNet ----


@pytest.fixture(scope="module")
def resnet50() -> tuple[st.SparseNetwork, Any]:
    """Sparse at 90 %, with its FLOPs: run once, for it takes a while."""
    network = st.sparsify(build_model("resnet50-imagenet", 1000), st.Static(0.9), seed=0)
    return network, st.flops(network.model, torch.zeros(1, 3, 224, 224))


def test_resnet50_dense(resnet50: tuple[st.SparseNetwork, Any]) -> None:
    _, flops = resnet50
    assert flops.dense == 8_178_368_512 == sum(layer.dense for layer in flops.layers.values())
    assert flops.layers["conv1"].dense == 2 * 112**2 * 64 * 3 * 7**2
    assert flops.layers["layer4.2.conv2"].dense == 2 * 7**2 * 512**2 * 3**2
    assert flops.layers["fc"].dense == 2 * 2048 * 1000
    assert len(flops.layers) == 54


def test_resnet50_with_erk(resnet50: tuple[st.SparseNetwork, Any]) -> None:
    network, flops = resnet50
    assert flops.ratio == pytest.approx(0.242, abs=5e-4)
    shapes = [layer.shape for layer in network.layers.values()]
    living = dict(zip(network.layers, counts(shapes, 0.8), strict=True))
    sparse = sum(flops.layers[n].dense * living[n] / network.layers[n].size for n in network.layers)
    assert sparse / flops.dense == pytest.approx(0.414, abs=5e-4)


@pytest.mark.slow
def test_resnet50_with_erk_at_80_percent() -> None:
    network = st.sparsify(build_model("resnet50-imagenet", 1000), st.Static(0.8), seed=0)
    flops = st.flops(network.model, torch.zeros(1, 3, 224, 224))
    assert (flops.dense, round(flops.ratio, 3)) == (8_178_368_512, 0.414)


# ---- formulas ----

LAYERS: dict[str, tuple[nn.Module, Any, int]] = {
    "linear": (nn.Linear(20, 30), torch.randn(4, 20), 2 * 4 * 20 * 30),
    "linear over tokens": (nn.Linear(20, 30, bias=False), torch.randn(4, 7, 20), 2 * 4 * 7 * 20 * 30),
    "conv1d": (nn.Conv1d(6, 8, 5), torch.randn(3, 6, 20), 2 * 3 * 16 * 6 * 8 * 5),
    "conv2d": (nn.Conv2d(6, 8, 3, 2, 1), torch.randn(3, 6, 9, 11), 2 * 3 * 5 * 6 * 6 * 8 * 9),
    "conv3d": (nn.Conv3d(2, 4, (1, 3, 3)), torch.randn(3, 2, 4, 5, 6), 2 * 3 * 4 * 3 * 4 * 2 * 4 * 9),
    "grouped": (nn.Conv2d(6, 12, 3, groups=3), torch.randn(2, 6, 8, 8), 2 * 2 * 36 * 12 * 2 * 9),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6), torch.randn(2, 6, 8, 8), 2 * 2 * 36 * 6 * 9),
    "dilated": (nn.Conv2d(4, 5, 3, dilation=2), torch.randn(2, 4, 9, 9), 2 * 2 * 25 * 4 * 5 * 9),
    "transposed": (nn.ConvTranspose2d(6, 4, 3, 2), torch.randn(2, 6, 5, 5), 2 * 2 * 25 * 6 * 4 * 9),
    "transposed, grouped": (
        nn.ConvTranspose2d(6, 4, 3, groups=2),
        torch.randn(2, 6, 5, 5),
        2 * 2 * 25 * 6 * 2 * 9,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layers(name: str, layout: torch.memory_format) -> None:
    layer, x, expected = LAYERS[name]
    if layout is torch.channels_last and x.dim() != 4:
        pytest.skip("no such layout")
    model = nn.Sequential(copy.deepcopy(layer)).to(memory_format=layout)
    flops = st.flops(model, x)
    assert (flops.dense, flops.sparse, flops.ratio) == (expected, expected, 1.0)
    network = st.sparsify(model, st.Static(0.75))
    flops = st.flops(network.model, x)
    assert (flops.dense, flops.sparse) == (expected, round(expected * network.density))
    assert flops.layers == {"0": type(flops.layers["0"])(expected, round(expected * network.density))}


def test_bilinear() -> None:
    model = nn.Bilinear(4, 5, 6)
    inputs = torch.randn(3, 4), torch.randn(3, 5)
    assert st.flops(model, inputs).dense == 2 * 3 * 4 * 5 * 6
    st.sparsify(model, st.Static(0.75), include=["weight"])
    assert st.flops(model, inputs).sparse == 2 * 3 * 30


@pytest.mark.parametrize("directions", [1, 2])
def test_lstm(directions: int) -> None:
    steps, batch, inputs, hidden = 5, 3, 8, 6
    lstm = nn.LSTM(inputs, hidden, num_layers=2, bidirectional=directions == 2)
    x = torch.randn(steps, batch, inputs)
    each = 2 * steps * batch * 4 * hidden
    second = directions * hidden
    expected = directions * each * (inputs + hidden + second + hidden)
    assert st.flops(lstm, x).dense == expected
    network = st.sparsify(lstm, st.Static(0.5), include=["weight_ih_l0", "weight_hh_l1"])
    flops = st.flops(lstm, x)
    missing = each * (1 - density(network, "weight_ih_l0")) * inputs
    missing += each * (1 - density(network, "weight_hh_l1")) * hidden
    assert (flops.dense, flops.sparse) == (expected, round(expected - missing))
    assert flops.layers["weight_ih_l0"].dense == each * inputs


def attention_flops(batch: int, tokens: int, size: int) -> dict[str, int]:
    return {
        "in": 2 * batch * tokens * size * 3 * size,
        "product": 2 * (2 * batch * tokens * tokens * size),
        "out": 2 * batch * tokens * size * size,
    }


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention(need_weights: bool) -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=need_weights)[0]

    model, x, parts = SelfAttention(), torch.randn(3, 5, 16), attention_flops(3, 5, 16)
    assert st.flops(model, x).dense == sum(parts.values())
    names = ["attention.in_proj_weight", "attention.out_proj"]
    network = st.sparsify(model, st.Static(0.6), include=names)
    flops = st.flops(model, x)
    living = parts["in"] * density(network, names[0]) + parts["out"] * density(network, names[1])
    assert (flops.dense, flops.sparse) == (sum(parts.values()), round(parts["product"] + living))
    assert flops.layers[names[0]].dense == parts["in"] and flops.layers[names[1]].dense == parts["out"]


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layer(norm_first: bool) -> None:
    model = nn.TransformerEncoderLayer(16, 4, 48, batch_first=True, norm_first=norm_first)
    x, parts = torch.randn(3, 5, 16), attention_flops(3, 5, 16)
    feedforward = 2 * 3 * 5 * 16 * 48
    expected = sum(parts.values()) + 2 * feedforward
    assert st.flops(model, x).dense == expected
    network = st.sparsify(model, st.Static(0.7))
    assert set(network.layers) == {"self_attn.out_proj", "linear1", "linear2"}
    living = parts["out"] * density(network, "self_attn.out_proj")
    living += feedforward * (density(network, "linear1") + density(network, "linear2"))
    flops = st.flops(model, x)
    assert (flops.dense, flops.sparse) == (expected, round(parts["in"] + parts["product"] + living))


class Own(nn.Module):
    """Grouped, dilated and transposed convolutions, then attention over the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.down, self.up = nn.Conv2d(8, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.down(self.dilated(self.grouped(x).relu()).relu()).relu())
        tokens = x.flatten(2).transpose(1, 2)
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))


def test_a_model_of_ones_own() -> None:
    model, x, parts = Own(), torch.randn(1, 4, 6, 6), attention_flops(1, 36, 8)
    expected = {
        "grouped": 2 * 36 * 8 * 2 * 9,
        "dilated": 2 * 36 * 8 * 8 * 9,
        "down": 2 * 9 * 16 * 8 * 4,
        "up": 2 * 9 * 16 * 8 * 4,  # every input reaches every weight once
        "attention.in_proj_weight": parts["in"],
        "attention.out_proj": parts["out"],
        "head": 2 * 8 * 5,
    }
    network = st.sparsify(model, st.Static(0.6), seed=0)
    flops = st.flops(model, x)
    assert {n: layer.dense for n, layer in flops.layers.items()} == expected
    assert flops.dense == sum(expected.values()) + parts["product"]
    living = {n: density(network, n) if n in network.layers else 1 for n in expected}
    sparse = sum(expected[n] * living[n] for n in expected) + parts["product"]
    assert flops.sparse == round(sparse)
    shapes = {n: layer.shape for n, layer in network.layers.items()}
    training = training_flops(flops, shapes, network.method, steps=10, samples=100)
    assert training.dense == 300 * flops.dense and training.ratio == pytest.approx(flops.ratio, rel=1e-4)


def test_tied_weights_count_where_they_multiply() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding(x))

    model, x = Tied(), torch.randint(20, (3, 5))
    network = st.sparsify(model, st.Static(0.5))
    flops = st.flops(model, x)
    assert (flops.dense, flops.sparse) == (2 * 15 * 8 * 20, round(2 * 15 * 8 * 20 * network.density))


def test_a_layer_used_twice_counts_twice() -> None:
    layer = nn.Linear(6, 6)
    assert st.flops(nn.Sequential(layer, layer), torch.randn(2, 6)).dense == 2 * (2 * 2 * 6 * 6)


def test_several_inputs_are_a_tuple() -> None:
    class Sum(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + y)

    assert st.flops(Sum(3, 5), (torch.randn(2, 3), torch.randn(2, 3))).dense == 2 * 2 * 3 * 5


# ---- plain models ----


def test_zeros_of_a_plain_model_cost_nothing() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 4))
    with torch.no_grad():
        model[0].weight.view(-1)[:30] = 0
    flops = st.flops(model, torch.randn(1, 10))
    assert (flops.dense, flops.sparse) == (200 + 80, 140 + 80)
    assert (flops.layers["0"].dense, flops.layers["0"].sparse) == (200, 140)


def test_a_living_connection_counts_though_its_value_is_zero() -> None:
    network = st.sparsify(nn.Sequential(nn.Linear(10, 10)), st.Static(0.5))
    with torch.no_grad():
        network.weights["0"].values.zero_()
    assert st.flops(network.model, torch.randn(1, 10)).sparse == 100
    assert st.flops(network.densify(), torch.randn(1, 10)).sparse == 0


@pytest.mark.parametrize("name", ["mlp", "lenet5", "vgg-small", "wrn28-10"])
def test_a_sparse_model_costs_what_its_plain_copy_does(name: str) -> None:
    network = st.sparsify(build_model(name, 10, size=32, width=0.25), st.Static(0.8))
    x = torch.randn(2, 3, 32, 32)
    sparse, plain = st.flops(network.model, x), st.flops(network.densify(), x)
    assert (sparse.dense, sparse.sparse) == (plain.dense, plain.sparse)
    assert set(sparse.layers) == set(network.layers)


# ---- nothing changes ----


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_the_input_and_the_random_state_stay(sparse: bool, training: bool) -> None:
    model = nn.Sequential(build_model("vgg-small", 10, size=8, width=0.25), nn.Dropout(0.5))
    if sparse:
        st.sparsify(model, st.Static(0.8))
    model.train(training)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    before, kept, random = copy.deepcopy(model.state_dict()), x.detach().clone(), torch.get_rng_state()
    modes = [(name, module.training, len(module._forward_hooks)) for name, module in model.named_modules()]
    st.flops(model, x)
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(x, kept) and x.grad is None and x.requires_grad
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert modes == [(n, m.training, len(m._forward_hooks)) for n, m in model.named_modules()]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_draws_random_numbers_leaves_the_random_state_alone() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, training=True))

    model = Noisy(4, 4)
    random = torch.get_rng_state()
    st.flops(model, torch.zeros(1, 4))
    assert torch.equal(random, torch.get_rng_state())


def test_global_settings_stay() -> None:
    def settings() -> tuple[bool, ...]:
        backends = torch.backends
        return backends.mkldnn.enabled, backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()

    before = settings()
    with pytest.raises(RuntimeError):
        st.flops(nn.Linear(3, 3), torch.zeros(1, 4))
    assert settings() == before
    st.flops(nn.Linear(3, 3), torch.zeros(1, 3))
    assert settings() == before


def test_autocast_changes_no_count() -> None:
    network = st.sparsify(build_model("lenet5", 10, size=8), st.Static(0.8))
    x = torch.randn(2, 3, 8, 8)
    plain = st.flops(network.model, x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = st.flops(network.model, x)
    assert (cast.dense, cast.sparse) == (plain.dense, plain.sparse)


def test_a_model_with_autocast_inside_counts_by_its_weights() -> None:
    class Mixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).to(x.dtype)

    network = st.sparsify(nn.Sequential(Mixed(20, 10), nn.ReLU(), nn.Linear(10, 10)), st.Static(0.8))
    flops = st.flops(network.model, torch.randn(1, 20))
    assert (flops.dense, flops.sparse) == (2 * 300, 2 * network.nonzero)


def test_a_model_in_the_middle_of_a_step_can_be_measured() -> None:
    """Gradients of all positions that are being collected are neither lost nor touched."""
    model = build_model("mlp", 10, channels=1, size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    network = st.sparsify(model, st.RigL(0.8, interval=1), optimizer)
    x = torch.randn(4, 1, 8, 8)
    model(x).square().sum().backward()
    before = {name: weight.gradient.clone() for name, weight in network.weights.items()}  # type: ignore[union-attr]
    st.flops(model, x)
    assert all(torch.equal(network.weights[name].gradient, before[name]) for name in before)  # type: ignore[arg-type]
    optimizer.step()
    network.check()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_measured(name: str) -> None:
    flops = st.flops(build_model(name, 10, size=32, width=0.25), torch.zeros(1, 3, 32, 32))
    assert flops.dense == flops.sparse > 0 and flops.ratio == 1


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    prune.random_unstructured(model[0], "weight", 0.9)
    return model


def normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(10, 20)))


@pytest.mark.parametrize("make", [pruned, normed])
@pytest.mark.parametrize("count", [lambda model: st.flops(model, torch.zeros(1, 10)), sparsity])
def test_weights_that_are_made_of_others_are_refused(make, count) -> None:
    model = make()
    with pytest.raises(st.SparsityError, match="remove them first"):
        count(model)


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(st.SparsityError, match="meta device"):
        st.flops(nn.Linear(3, 3, device="meta"), torch.zeros(1, 3))
