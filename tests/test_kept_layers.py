"""Layers that are kept dense or frozen keep their connections, in every method and in the ticket."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import suptickets as st

X, Y = torch.randn(40, 20, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10
METHODS = {
    "static": lambda **o: st.Static(0.5, **o),
    "set": lambda **o: st.SET(0.5, interval=2, **o),
    "rigl": lambda **o: st.RigL(0.5, interval=2, **o),
    "granet": lambda **o: st.GraNet(0.5, interval=2, prune_end=6, initial_sparsity=0.3, **o),
    "gmp": lambda **o: st.GMP(0.5, interval=2, prune_end=6, **o),
    "snfs": lambda **o: st.SNFS(0.5, interval=2, **o),
    "dsr": lambda **o: st.DSR(0.5, interval=2, threshold=0.05, **o),
    "snip": lambda **o: st.SNIP(0.5, data=[(X, Y)], loss=cross_entropy, **o),
}


def trained(method, freeze=None, **options):
    """20 steps with two cycles of strong rates, after which the layers' counts differ from the start's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10))
    if freeze is not None:
        model[freeze].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    network = (
        st.sparsify(model, METHODS[method](), optimizer, seed=0, **options)
        if freeze is not None
        else (st.sparsify(model, METHODS[method](**options), optimizer, seed=0))
    )
    before = {name: weight.rows().clone() for name, weight in network.weights.items()}
    tickets = st.SupTickets(network, 20, 6, 2, (0.05, 0.3))
    for _ in range(20):
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        optimizer.step()
        network.check()
    return network, tickets, before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("option", "layer", "size"), [("dense_first", 0, 600), ("dense_last", 4, 200)])
def test_a_layer_kept_dense(method, option, layer, size):
    network, tickets, _ = trained(method, **{option: True})
    assert network.layers[str(layer)].nonzero == size
    assert network.nonzero == round(0.5 * 1400)
    ticket = tickets.ticket()
    assert int(ticket[layer].weight.count_nonzero()) == size
    assert tickets.summary()["nonzero"] == network.nonzero


@pytest.mark.parametrize("method", [name for name in METHODS if name != "snip"])
def test_a_frozen_layer_that_is_named(method):
    network, tickets, before = trained(method, freeze=4, include=["0", "2", "4"])
    weight = network.weights["4"]
    if method in ("granet", "gmp"):
        assert weight.nonzero == len(before["4"])
    assert torch.equal(weight.rows(), before["4"])
    alive = tickets.ticket()[4].weight.flatten().nonzero().flatten()
    assert torch.equal(alive, before["4"].long())


def test_a_target_that_the_frozen_layers_do_not_leave_room_for():
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))
    model[0].weight.requires_grad_(False)
    with pytest.raises(st.SparsityError, match="lose all its connections: use at most"):
        st.sparsify(model, st.GraNet(0.9, interval=2, prune_end=10), include=["0", "2"])
    assert type(model[0]) is nn.Linear
