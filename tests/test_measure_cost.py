"""FLOPs of a training: the formula against steps that are added up one by one, and the paper's figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import suptickets as st
from suptickets.measure.cost import TrainingCost, TrainingFlops, training_flops
from suptickets.measure.flops import Flops, LayerFlops
from suptickets.models import build_model

STEPS = 40


def mlp() -> nn.Module:
    """All weights cost the same, so that it does not matter in which layer connections are."""
    return nn.Sequential(
        nn.Linear(20, 40, bias=False), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 10)
    )


def images() -> nn.Module:
    return build_model("vgg-small", 10, size=8, width=0.25)


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {"mlp": (mlp, (20,)), "images": (images, (3, 8, 8))}


def backward(shape: tuple[int, ...]) -> Any:
    return lambda model: model(torch.randn(4, *shape)).square().sum().backward()


def by_steps(name: str, method: st.Method, sup: dict[str, Any]) -> tuple[float, TrainingFlops]:
    """A training's cost as its steps tell it, and as the formula does before."""
    build, shape = MODELS[name]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    network = st.sparsify(model, method, optimizer, seed=0)
    if sup:
        st.SupTickets(network, STEPS, lr=(0.001, 0.002), **sup)
    forward = st.flops(model, torch.zeros(1, *shape))
    shapes = {n: tuple(layer.shape) for n, layer in network.layers.items()}
    final = forward.ratio if isinstance(method, st.SNIP) else None
    formula = training_flops(forward, shapes, method, STEPS, STEPS * 4, final=final, **sup)
    cost = TrainingCost(forward, network)
    for _ in range(STEPS):
        cost.step(dense_gradient=any(w.collector is not None for w in network.weights.values()))
        optimizer.zero_grad()
        backward(shape)(model)
        optimizer.step()
    assert formula.dense == 3 * forward.dense * 4 * STEPS
    return cost.ratio, formula


PRUNING = {"interval": 4, "prune_end": 14}
METHODS: dict[str, tuple[Any, bool]] = {  # whether layers keep their counts
    "dense": (lambda: st.Dense(), True),
    "static": (lambda: st.Static(0.8), True),
    "uniform": (lambda: st.Static(0.4, distribution="uniform", dense_first=True, dense_last=True), True),
    "snip": (lambda: st.SNIP(0.8, backward=backward((20,))), True),
    "set": (lambda: st.SET(0.8, interval=7), True),
    "rigl": (lambda: st.RigL(0.8, interval=7), True),
    "rigl, every step": (lambda: st.RigL(0.9, interval=1), True),
    "rigl, stopped": (lambda: st.RigL(0.8, interval=3, stop=0.5, total_steps=STEPS), True),
    "granet": (lambda: st.GraNet(0.9, **PRUNING), False),
    "granet, later": (lambda: st.GraNet(0.9, interval=3, prune_start=7, prune_end=16), False),
    "gmp": (lambda: st.GMP(0.9, **PRUNING), False),
    "snfs": (lambda: st.SNFS(0.8, interval=5), False),
    "dsr": (lambda: st.DSR(0.8, interval=5, threshold=0.05), False),
}
SUP: dict[str, dict[str, Any]] = {
    "alone": {},
    "cycles": {"cycles": 3, "cycle_steps": 5},
    "at the end": {"cycles": 2, "cycle_steps": 8, "explore_at": "end"},
}


@pytest.mark.parametrize("sup", SUP)
@pytest.mark.parametrize("method", METHODS)
def test_the_formula_is_the_sum_of_the_steps(method: str, sup: str) -> None:
    summed, formula = by_steps("mlp", METHODS[method][0](), SUP[sup])
    assert formula.ratio == pytest.approx(summed, abs=1e-4)  # counts are whole numbers


@pytest.mark.parametrize("sup", SUP)
@pytest.mark.parametrize("method", [m for m, (_, keeps) in METHODS.items() if keeps and m != "snip"])
def test_weights_that_cost_differently(method: str, sup: str) -> None:
    summed, formula = by_steps("images", METHODS[method][0](), SUP[sup])
    assert formula.ratio == pytest.approx(summed, rel=1e-9)


# ---- by hand ----

#: "c" is not made sparse, and 60 have no weight.
FORWARD = Flops(1000, 1000, {n: LayerFlops(f, f) for n, f in {"a": 600, "b": 300, "c": 40}.items()})
SHAPES = {"a": (10, 10), "b": (10, 10)}
HALF = (100 + 0.5 * 900) / 1000


def cost(method: st.Method, steps: int = 100, **options: Any) -> float:
    found = training_flops(FORWARD, SHAPES, method, steps, 700, **options)
    assert found.dense == 3 * 1000 * 700
    return found.ratio


def test_dense_and_static_by_hand() -> None:
    assert cost(st.Dense()) == cost(st.SmallDense(0.5)) == 1
    assert cost(st.Static(0.5)) == pytest.approx(HALF)
    assert cost(st.Static(0.25, dense_first=True)) == pytest.approx((100 + 600 + 0.5 * 300) / 1000)


def test_dense_gradients_by_hand() -> None:
    """One of three passes is dense at every tenth step (RigL), at every step (SNFS), at none (SET)."""
    dense_step = (2 * HALF + 1) / 3
    assert cost(st.SET(0.5, interval=10)) == pytest.approx(HALF)
    assert cost(st.RigL(0.5, interval=10)) == pytest.approx(0.9 * HALF + 0.1 * dense_step)
    assert cost(st.SNFS(0.5, interval=10)) == pytest.approx(dense_step)
    cycles = cost(st.RigL(0.5, interval=10), cycles=2, cycle_steps=20)  # 6 updates, then 2 explorations
    assert cycles == pytest.approx(0.92 * HALF + 0.08 * dense_step)
    assert cost(st.Static(0.5), cycles=2, cycle_steps=20) == pytest.approx(0.98 * HALF + 0.02 * dense_step)


def test_a_falling_density_by_hand() -> None:
    """Sparsity 0, 0.4375, 0.5 (cubic, to the half) for 10, 10 and 80 steps."""
    shares = [1 - 0.9 * sparsity for sparsity in (0, 0.4375, 0.5)]
    gmp = st.GMP(0.5, interval=10, prune_end=20)
    assert cost(gmp) == pytest.approx(0.1 * shares[0] + 0.1 * shares[1] + 0.8 * shares[2])
    ended = 0.3  # known from a run
    shares = [1 + (ended - 1) * sparsity / 0.5 for sparsity in (0, 0.4375, 0.5)]
    assert cost(gmp, final=ended) == pytest.approx(0.1 * shares[0] + 0.1 * shares[1] + 0.8 * shares[2])


def test_bad_input_is_refused() -> None:
    for wrong, message in (
        ({"cycles": 3, "cycle_steps": 40}, "do not fit into 100 steps"),
        ({"explore_at": "middle"}, "unknown explore_at 'middle'"),
        ({"final": 24}, "final is a fraction"),
        ({"steps": 0}, "steps must be a whole number"),
    ):
        with pytest.raises(st.SparsityError, match=message):
            cost(st.Static(0.5), **wrong)


def test_a_model_without_counted_operations_costs_the_same() -> None:
    nothing = Flops(0, 0, {"a": LayerFlops(0, 0)})
    assert training_flops(nothing, {"a": (2, 2)}, st.Static(0.5), 5, 5) == TrainingFlops(0, 0)
    assert TrainingFlops(0, 0).ratio == 1


def test_a_layer_that_there_is_not_is_refused() -> None:
    with pytest.raises(st.SparsityError, match="unknown layer 'layer1.conv3': did you mean 'layer1.conv1'"):
        forward = Flops(9, 9, {"layer1.conv1": LayerFlops(9, 9), "fc": LayerFlops(0, 0)})
        training_flops(forward, {"layer1.conv3": (2, 2)}, st.Static(0.5), 5, 5)


def test_a_layer_that_the_pass_does_not_use_costs_nothing() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(10, 10), nn.Linear(10, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    network = st.sparsify(Spare(), st.Static(0.5), seed=0)
    forward = st.flops(network.model, torch.zeros(1, 10))
    assert forward.layers == {"used": LayerFlops(200, 100), "spare": LayerFlops(0, 0)}
    shapes = {name: layer.shape for name, layer in network.layers.items()}
    assert training_flops(forward, shapes, st.Static(0.5), 5, 5).ratio == 0.5


def test_cycles_that_never_explore_need_no_gradient() -> None:
    cycles = {"cycles": 2, "cycle_steps": 20, "explore_at": "never"}
    assert cost(st.Static(0.5), **cycles) == pytest.approx(HALF)


# ---- the paper's figures ----

Counted = tuple[Flops, dict[str, tuple[int, ...]]]


def counted(model: nn.Module, size: int) -> Counted:
    weights = {n.removesuffix(".weight"): tuple(p.shape) for n, p in model.named_parameters() if p.dim() > 1}
    return st.flops(model, torch.zeros(1, 3, size, size)), weights


@pytest.fixture(scope="module")
def imagenet() -> Counted:
    return counted(build_model("resnet50-imagenet", 1000), 224)


@pytest.fixture(scope="module")
def cifar() -> Counted:
    return counted(build_model("resnet50", 100), 32)


EPOCH = -(-1_281_167 // 128)  # steps
CYCLES = {"cycles": 4, "cycle_steps": 2 * EPOCH}


def on_imagenet(imagenet: Counted, method: st.Method, **options: Any) -> TrainingFlops:
    return training_flops(*imagenet, method, 100 * EPOCH, 100 * 1_281_167, **options)


def test_dense_on_imagenet(imagenet: Counted) -> None:
    """The paper's 3.2e18 is RigL's: 32,000 steps of 4096; 100 epochs are 3.14e18."""
    assert imagenet[0].dense == 8_178_368_512
    found = on_imagenet(imagenet, st.Dense())
    assert found == TrainingFlops(3 * 8_178_368_512 * 128_116_700, found.dense)
    assert found.dense == pytest.approx(3.14e18, rel=1e-2 / 3.14)
    assert found.dense / 128_116_700 * 32_000 * 4096 == pytest.approx(3.2e18, rel=1e-2)


@pytest.mark.parametrize("options", [{}, CYCLES], ids=["alone", "sup-tickets"])
@pytest.mark.parametrize(("sparsity", "paper", "ours"), [(0.8, 0.42, 0.4138), (0.9, 0.25, 0.2419)])
def test_rigl_on_imagenet(
    imagenet: Counted, sparsity: float, paper: float, ours: float, options: dict[str, Any]
) -> None:
    ratio = on_imagenet(imagenet, st.RigL(sparsity, interval=4000), **options).ratio
    assert ratio == pytest.approx(paper, abs=0.01) and ratio == pytest.approx(ours, abs=1e-4)


@pytest.mark.parametrize(("sparsity", "paper"), [(0.8, 0.61), (0.9, 0.50)])
def test_snfs_on_imagenet(imagenet: Counted, sparsity: float, paper: float) -> None:
    assert on_imagenet(imagenet, st.SNFS(sparsity)).ratio == pytest.approx(paper, abs=0.01)


def granet_in_test(forward: Flops) -> float:
    """By the sparsities of the paper's layer table, at 90 %; printed 0.20."""
    rows = json.loads((Path(__file__).parent / "data/paper_resnet50_layers.json").read_text())["layers"]
    return sum(forward.layers[row[0]].dense * (1 - row[4] / 100) for row in rows) / forward.dense


@pytest.mark.parametrize("options", [{}, CYCLES], ids=["alone", "sup-tickets"])
@pytest.mark.parametrize(("sparsity", "paper", "ours"), [(0.8, 0.37, 0.3781), (0.9, 0.25, 0.2427)])
def test_granet_on_imagenet(
    imagenet: Counted, sparsity: float, paper: float, ours: float, options: dict[str, Any]
) -> None:
    """From the paper's own test FLOPs (0.35 at 80 %), for the weights decide where the layers end."""
    final = granet_in_test(imagenet[0]) if sparsity == 0.9 else 0.35
    method = st.GraNet(sparsity, interval=4000, prune_end=30 * EPOCH)
    ratio = on_imagenet(imagenet, method, final=final, **options).ratio
    assert ratio == pytest.approx(paper, abs=0.01) and ratio == pytest.approx(ours, abs=1e-4)
    start = on_imagenet(imagenet, st.Static(0.5)).ratio
    assert (start, final) == pytest.approx((0.714, 0.35 if sparsity == 0.8 else 0.203), abs=5e-4)
    assert ratio == pytest.approx(final + 0.3 * (start - final) / 4, abs=2e-3)  # the arithmetic of the docs


def test_granet_on_imagenet_if_its_layers_ended_at_erk(imagenet: Counted) -> None:
    """They do not: this is what the formula gives that knows no trained network."""
    methods = [st.GraNet(sparsity, interval=4000, prune_end=30 * EPOCH) for sparsity in (0.8, 0.9)]
    assert [on_imagenet(imagenet, m).ratio for m in methods] == pytest.approx([0.437, 0.278], abs=5e-4)


def test_uniform_on_imagenet(imagenet: Counted) -> None:
    """0.23 and 0.10 in the paper: at 80 % with a dense first layer in addition, at 90 % without."""
    first = imagenet[0].layers["conv1"].dense / imagenet[0].dense
    alone = [on_imagenet(imagenet, st.Static(s, distribution="uniform")).ratio for s in (0.8, 0.9)]
    assert alone == pytest.approx([0.2, 0.1], abs=1e-5)
    assert [0.2 + 0.8 * first, 0.1 + 0.9 * first] == pytest.approx([0.223, 0.126], abs=5e-4)


def on_cifar(cifar: Counted, method: st.Method, epochs: int = 250, **options: Any) -> TrainingFlops:
    return training_flops(*cifar, method, epochs * 391, epochs * 50_000, **options)


def test_resnet50_on_cifar(cifar: Counted) -> None:
    """The paper prints 9.74e18, and 0.11, 0.18, 0.30."""
    assert on_cifar(cifar, st.Dense()).sparse == pytest.approx(9.735e16, rel=1e-4)
    cycles = {"cycles": 3, "cycle_steps": 8 * 391}
    ratios = [on_cifar(cifar, st.RigL(s, interval=1000), **cycles).ratio for s in (0.95, 0.9, 0.8)]
    assert ratios == pytest.approx([0.114, 0.225, 0.385], abs=5e-4)


def test_the_papers_first_swa_baseline(cifar: Counted) -> None:
    """Dense for 226 epochs, then sparse for 24: 0.91, 0.92, 0.93 follow from its 0.11, 0.18, 0.30."""
    assert [(226 + 24 * r) / 250 for r in (0.11, 0.18, 0.30)] == pytest.approx([0.91, 0.92, 0.93], abs=5e-3)
    dense = on_cifar(cifar, st.Dense(), 226).sparse
    ours = [dense + on_cifar(cifar, st.Static(s), 24).sparse for s in (0.95, 0.9, 0.8)]
    total = on_cifar(cifar, st.Dense()).dense
    assert [one / total for one in ours] == pytest.approx([0.915, 0.926, 0.941], abs=5e-4)
