"""TreeNet: one trunk, several heads; with one head it is the plain network."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import sgd
from torch import nn

import suptickets as st
from suptickets import SparsityError
from suptickets.baselines import TreeNet, as_one_batch
from suptickets.baselines.tree_net import chain
from suptickets.models import build_model

# model, width, first module of the heads, last of the trunk
MODELS = [
    ("vgg16", 0.05, "conv5_1", "relu4_3"),
    ("wrn28-10", 0.07, "block3_1", "block2_4"),
    ("resnet50", 0.05, "layer3_4", "layer3_3"),
    ("vgg-small", 0.2, "conv3_2", "relu3_1"),
    ("lenet5", 1.0, "fc2", "relu3"),
    ("mlp", 0.2, "fc3", "relu2"),
]
SMALL = [model for model in MODELS if model[0] != "resnet50"]


def build(name, width):
    return build_model(name, 6, 3, 32, width).double()


def data(size=6):
    return torch.randn(size, 3, 32, 32, dtype=torch.float64), torch.randint(6, (size,))


@pytest.mark.parametrize("name, width, first, last", MODELS)
def test_one_head_is_the_plain_network(name, width, first, last):
    plain = build(name, width)
    tree = TreeNet([copy.deepcopy(plain)])
    x, y = data()
    ours, theirs = tree(x), plain(x)
    assert torch.equal(ours, theirs[None])
    F.cross_entropy(*as_one_batch(ours, y)).backward()
    F.cross_entropy(theirs, y).backward()
    parameters, expected = list(tree.parameters()), list(plain.parameters())
    assert len(parameters) == len(expected)
    for parameter, other in zip(parameters, expected, strict=True):
        assert torch.equal(parameter, other) and torch.equal(parameter.grad, other.grad)
    for buffer, other in zip(tree.buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, other)
    predicted = tree.eval()(x)
    assert torch.allclose(predicted, F.log_softmax(plain.eval()(x), dim=1), atol=1e-12)


@pytest.mark.parametrize("name, width, first, last", MODELS)
def test_the_heads_hold_the_last_third_of_the_layers(name, width, first, last):
    tree = TreeNet([build(name, width) for _ in range(2)])
    assert [next(iter(head._modules)) for head in tree.heads] == [first, first]
    assert list(tree.trunk._modules)[-1] == last


@pytest.mark.parametrize("name, width, first, last", SMALL)
@pytest.mark.parametrize("training", [True, False])
def test_a_head_is_its_network_on_the_trunk_of_the_first(name, width, first, last, training):
    networks = [build(name, width) for _ in range(3)]
    expected = copy.deepcopy(networks)
    for network in expected[1:]:
        theirs, trunk = chain(network), chain(expected[0])
        at = list(theirs._modules).index(first)
        theirs[:at].load_state_dict(trunk[:at].state_dict())
    x, _ = data()
    members = TreeNet(networks).train(training).members(x)
    assert members.shape == (3, 6, 6)
    for ours, network in zip(members, expected, strict=True):
        assert torch.equal(ours, network.train(training)(x))
    assert not torch.allclose(members[0], members[1])


def test_the_trunk_learns_from_the_mean_of_the_heads_losses():
    tree = TreeNet([build("vgg-small", 0.2) for _ in range(3)])
    x, y = data()
    parts = [
        torch.autograd.grad(F.cross_entropy(out, y), tree.trunk.conv1_1.weight)[0] for out in _each(tree, x)
    ]
    F.cross_entropy(*as_one_batch(tree(x), y)).backward()
    assert torch.allclose(tree.trunk.conv1_1.weight.grad, sum(parts) / 3, atol=1e-12)


def _each(tree, x):
    for i in range(len(tree.heads)):
        yield tree.heads[i](tree.trunk(x))


def test_the_prediction_is_the_mean_of_probabilities():
    tree = TreeNet([build("mlp", 0.2) for _ in range(3)]).eval()
    x, _ = data()
    mean = F.softmax(tree.members(x), dim=2).mean(0)
    assert tree(x).shape == (6, 6) and torch.allclose(tree(x).exp(), mean, atol=1e-12)


def test_the_split_may_be_named():
    networks = [build("lenet5", 1.0) for _ in range(2)]
    tree = TreeNet(networks, split="conv2")
    assert list(tree.trunk._modules) == ["conv1", "relu1", "pool1"]
    with pytest.raises(SparsityError, match="did you mean 'conv2'"):
        TreeNet([build("lenet5", 1.0)], split="conv_2")


class Doubled(nn.Module):
    def forward(self, x):
        return x.mul_(2)


def test_a_head_that_begins_in_place_does_not_reach_the_others():
    def network():
        return nn.Sequential(nn.Linear(4, 4), Doubled(), nn.Linear(4, 3))

    networks = [network() for _ in range(3)]
    shared = networks[0][0]
    expected = [n[2](2 * shared(torch.ones(2, 4))) for n in networks]
    members = TreeNet(networks, split="1").members(torch.ones(2, 4))
    assert all(torch.allclose(ours, theirs) for ours, theirs in zip(members, expected, strict=True))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(F.relu(self.body(x)))

    def chain(self):
        return nn.Sequential(self.body, nn.ReLU(), self.last)


def test_a_model_may_say_what_it_is_a_chain_of():
    network, x = Named(), torch.randn(2, 4)
    expected = network(x)
    assert torch.equal(TreeNet([network])(x)[0], expected)


class Other(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("network", [nn.TransformerEncoderLayer(4, 1), Other(nn.Linear(4, 3))])
def test_what_is_no_chain_is_refused(network):
    with pytest.raises(SparsityError, match="is no chain of modules: make it an nn.Sequential"):
        TreeNet([network])


def test_what_cannot_be_heads_is_refused():
    network = nn.Linear(4, 3)
    with pytest.raises(SparsityError, match="at least one network"):
        TreeNet([])
    with pytest.raises(SparsityError, match="build a network for each"):
        TreeNet([nn.Sequential(network)] * 2)
    with pytest.raises(SparsityError, match="one architecture"):
        TreeNet([nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 2))])
    with pytest.raises(SparsityError, match="name a module with split"):
        TreeNet([nn.Sequential(nn.ReLU())])


def test_a_tree_is_made_sparse_like_any_network():
    tree = TreeNet([build("vgg-small", 0.2).float() for _ in range(2)])
    optimizer = sgd(tree)
    network = st.sparsify(tree, st.RigL(0.8, interval=1), optimizer, seed=1)
    for _ in range(3):
        x, y = data()
        loss = F.cross_entropy(*as_one_batch(tree(x.float()), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert network.nonzero == round(0.2 * network.parameters_total)
    assert {name.split(".")[0] for name in network.layers} == {"trunk", "heads"}


@pytest.mark.parametrize("name, flops, parameters", [("vgg16", 1.18, 1.98), ("wrn28-10", 1.68, 2.53)])
def test_three_heads_cost_what_the_page_says(name, flops, parameters):
    tree = TreeNet([build_model(name, 10)])
    counted = st.flops(tree, torch.zeros(1, 3, 32, 32))
    heads = sum(layer.dense for name, layer in counted.layers.items() if name.startswith("heads"))
    assert 1 + 2 * heads / counted.dense == pytest.approx(flops, abs=0.005)
    sizes = [sum(p.numel() for p in part.parameters()) for part in (tree.heads, tree)]
    assert 1 + 2 * sizes[0] / sizes[1] == pytest.approx(parameters, abs=0.005)
