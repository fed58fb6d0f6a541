"""In-time over-parameterisation: the share of weights that ever lived, against a set of positions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import suptickets as st
from suptickets.errors import SparsityError
from suptickets.measure.explored import Explored


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10))


def training(method: st.Method, steps: int = 24, *, layout: Any = torch.contiguous_format) -> Any:
    """The network before each step and after the last."""
    torch.manual_seed(0)
    net = model().to(memory_format=layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    network = st.sparsify(net, method, optimizer, seed=0)
    yield network
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 3, 6, 6)).square().mean().backward()
        optimizer.step()
        yield network


METHODS = {
    "static": st.Static(0.8),
    "set": st.SET(0.8, interval=3),
    "rigl": st.RigL(0.9, interval=4),
    "granet": st.GraNet(0.9, interval=4, prune_end=12),
    "snfs": st.SNFS(0.8, interval=5),
    "dsr": st.DSR(0.8, interval=5, threshold=0.05),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", METHODS)
def test_a_set_of_positions(name: str, layout: torch.memory_format) -> None:
    explored, lived = None, {}
    for network in training(copy.deepcopy(METHODS[name]), layout=layout):
        explored = explored or Explored(network)
        explored.update()
        for n, weight in network.weights.items():
            lived.setdefault(n, set()).update(weight.rows().tolist())
    sizes = {n: layer.size for n, layer in network.layers.items()}
    assert explored.layers == pytest.approx({n: len(lived[n]) / sizes[n] for n in sizes})
    assert explored.rate == pytest.approx(sum(map(len, lived.values())) / sum(sizes.values()))


@pytest.mark.parametrize("name", METHODS)
def test_a_network_tells_that_connections_have_changed(name: str) -> None:
    """Whoever looks at them only when `changes` has risen sees them all."""
    known, changes, rises = {}, -1, 0
    for network in training(copy.deepcopy(METHODS[name])):
        now = {n: weight.rows().tolist() for n, weight in network.weights.items()}
        assert network.changes > changes or now == known
        rises += network.changes > changes
        known, changes = now, network.changes
    assert rises == 1 if name == "static" else 1 < rises < 24
    network.model.load_state_dict(network.model.state_dict())
    assert network.changes > changes


def test_what_a_static_network_explores_is_its_density() -> None:
    for network in training(st.Static(0.8)):
        assert Explored(network).rate == pytest.approx(network.density)


def test_the_rate_only_rises() -> None:
    rates: list[float] = []
    explored = None
    for network in training(st.SET(0.9, interval=2)):
        explored = explored or Explored(network)
        explored.update()
        rates.append(explored.rate)
    assert rates == sorted(rates) and rates[0] == pytest.approx(network.density)
    assert 2 * rates[0] < rates[-1] < 1


def test_dense_layers_count_as_lived() -> None:
    network = st.sparsify(model(), st.Dense())
    assert Explored(network).rate == 1 and set(Explored(network).layers.values()) == {1.0}


def test_while_nothing_changes_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    network = st.sparsify(model(), st.SET(0.8))
    explored, calls, mark = Explored(network), [], Explored._mark
    monkeypatch.setattr(Explored, "_mark", lambda self, names: (calls.extend(names), mark(self, names))[1])
    explored.update()
    assert not calls
    network.explore(0.5)
    explored.update()
    assert sorted(calls) == ["0", "3"]
    network.prune({"3": 5}, by="magnitude")
    explored.update()
    explored.update()
    assert sorted(calls) == ["0", "0", "3", "3"]


def test_a_layout_that_changes_on_the_way() -> None:
    network = st.sparsify(model(), st.Static(0.8))
    explored = Explored(network)
    before = explored.state_dict()
    network.model.to(memory_format=torch.channels_last)
    explored.update()
    assert all(torch.equal(mask, before[n]) for n, mask in explored.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_network_that_is_moved_to_a_gpu() -> None:
    network = st.sparsify(model(), st.SET(0.8))
    explored = Explored(network)
    network.explore(0.5)
    explored.update()
    before = explored.state_dict()
    network.model.cuda()
    assert all(torch.equal(lived.cpu(), before[n]) for n, lived in explored.state_dict().items())
    network.explore(0.5)
    explored.update()
    after = explored.state_dict()
    assert all(after[n].is_cuda and torch.equal(after[n].cpu() & before[n], before[n]) for n in before)
    assert any(not torch.equal(after[n].cpu(), before[n]) for n in before)


def test_stopping_and_going_on() -> None:
    networks = training(st.SET(0.9, interval=1), steps=6)
    explored = Explored(next(networks))
    for _ in networks:
        explored.update()
    state = explored.state_dict()
    fresh = st.sparsify(model(), st.SET(0.9, interval=1), seed=1)
    other = Explored(fresh)
    drawn = other.state_dict()
    other.load_state_dict(state)
    assert all(torch.equal(mask, state[n] | drawn[n]) for n, mask in other.state_dict().items())
    fresh.load_state_dict(explored.network.state_dict())
    again = Explored(fresh)
    again.load_state_dict(state)
    assert again.rate == explored.rate and again.layers == explored.layers
    fresh.explore(1.0)
    again.update()
    assert again.rate > explored.rate  # a copy: the one it came from is not touched
    assert all(torch.equal(mask, state[n]) for n, mask in explored.state_dict().items())


def test_bits_are_in_the_order_of_numpy() -> None:
    """Checkpoints of older versions hold what `packbits` makes of a mask."""
    network = st.sparsify(model(), st.SET(0.8, interval=1), seed=1)
    masks = {name: np.zeros(weight.size, dtype=bool) for name, weight in network.weights.items()}
    for name, weight in network.weights.items():
        masks[name][weight.rows().numpy()] = True
    state = Explored(network).state_dict()
    assert all(np.array_equal(np.packbits(masks[name]), bits.numpy()) for name, bits in state.items())


def test_a_state_of_another_network_is_refused() -> None:
    explored = Explored(st.sparsify(model(), st.Static(0.8)))
    state: dict[str, Tensor] = explored.state_dict()
    for wrong in ({}, {**state, "0": state["0"][:-1]}, {**state, "more": state["0"]}, {**state, "0": None}):
        with pytest.raises(SparsityError, match="not the state of Explored"):
            explored.load_state_dict(wrong)
