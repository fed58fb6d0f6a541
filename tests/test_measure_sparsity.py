"""Zeros of plain models and state dicts, layer by layer and in total."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import suptickets as st
from suptickets.errors import SparsityError
from suptickets.measure.sparsity import LayerSparsity, sparsity
from suptickets.models import build_model


def model() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 10))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1)
        net[0].weight.view(-1)[:27] = 0
        net[0].weight.view(-1)[27] = -0.0
        net[3].weight[0, 0] = torch.nan
        net[3].bias.zero_()
    return net


@pytest.mark.parametrize("state", [False, True])
def test_by_hand(state: bool) -> None:
    found = sparsity(model().state_dict() if state else model())
    assert found.layers == {"0": LayerSparsity((4, 3, 3, 3), 80), "3": LayerSparsity((10, 4), 40)}
    assert (found.parameters, found.nonzero) == (148, 120)
    assert found.sparsity == pytest.approx(28 / 148)
    assert (found.layers["0"].size, found.layers["0"].sparsity) == (108, pytest.approx(28 / 108))


@pytest.mark.parametrize("name", ["mlp", "lenet5", "vgg-small", "resnet50"])
def test_a_plain_copy_has_the_networks_sparsity(name: str) -> None:
    """And so do its state dict and the sparse model itself, while no connection holds the value 0."""
    network = st.sparsify(build_model(name, 10, size=32, width=0.25), st.Static(0.9), seed=0)
    for source in (network.densify(), network.densify().state_dict(), network.model):
        found = sparsity(source)
        assert {n: layer.nonzero for n, layer in found.layers.items()} == {
            n: layer.nonzero for n, layer in network.layers.items()
        }
        assert (found.parameters, found.nonzero) == (network.parameters_total, network.nonzero)
        assert found.sparsity == pytest.approx(network.sparsity)


def test_a_living_connection_of_value_zero_is_a_zero_here() -> None:
    network = st.sparsify(nn.Sequential(nn.Linear(10, 10)), st.Static(0.5))
    with torch.no_grad():
        network.weights["0"].values[0] = 0
    assert (network.nonzero, sparsity(network.model).nonzero) == (50, 49)


def test_a_shared_weight_counts_once() -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    net["b"].weight = net["a"].weight
    assert sparsity(net).parameters == 16


def test_what_has_no_weights_is_refused() -> None:
    network = st.sparsify(nn.Sequential(nn.Linear(4, 4)), st.Static(0.5))
    with pytest.raises(SparsityError, match="state of a sparsified model"):
        sparsity(network.model.state_dict())
    for wrong in (network.state_dict(), {}, nn.BatchNorm2d(3)):
        with pytest.raises(SparsityError, match="no weight of two or more dimensions"):
            sparsity(wrong)
    with pytest.raises(SparsityError, match="not list"):
        sparsity([1])  # type: ignore[arg-type]
