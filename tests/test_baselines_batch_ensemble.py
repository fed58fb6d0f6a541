"""BatchEnsemble: factors of rank one for each member; with all of them at 1 it is the plain network."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import suptickets as st
from suptickets import SparsityError
from suptickets.baselines import BatchEnsemble
from suptickets.baselines.batch_ensemble import RankOne
from suptickets.data import load_data
from suptickets.models import build_model


def kinds() -> nn.Module:
    """Grouped, dilated and transposed convolutions, with and without bias, in one and two dimensions."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1, bias=False),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4),
        nn.Tanh(),
        nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2),
        nn.Flatten(2),
        nn.Conv1d(4, 6, 3),
        nn.Tanh(),
        nn.AdaptiveAvgPool1d(4),
        nn.Linear(4, 3),
        nn.Flatten(),
        nn.Linear(18, 6),
    )


def without_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 15 * 15, 6))


MODELS = {
    "kinds": kinds,
    "vgg16": lambda: build_model("vgg16", 6, 3, 32, 0.05),
    "wrn28-10": lambda: build_model("wrn28-10", 6, 3, 32, 0.07),
    "lenet5": lambda: build_model("lenet5", 6, 3, 32),
}


def data(size=8):
    return torch.randn(size, 3, 32, 32, dtype=torch.float64), torch.randint(6, (size,))


def layers(ensemble):
    return [module for module in ensemble.modules() if isinstance(module, RankOne)]


@torch.no_grad()
def randomise(ensemble):
    """Factors and biases that no two members have in common."""
    for layer in layers(ensemble):
        for factors in (layer.r, layer.s, layer.bias):
            if factors is not None:
                factors.copy_(1 + 0.3 * torch.randn_like(factors))


def member(plain, ensemble, index):
    """The network of one member, built weight by weight."""
    network = copy.deepcopy(plain)
    for layer, factors in zip(plain_layers(network), layers(ensemble), strict=True):
        r, s = factors.r[index], factors.s[index]
        groups = getattr(layer, "groups", 1)
        with torch.no_grad():
            for o in range(len(s)):
                for i in range(len(r)):
                    scale_one(layer, o, i, groups, s[o] * r[i])
            if layer.bias is not None:
                layer.bias.copy_(factors.bias[index])
    return network


def scale_one(layer, o, i, groups, factor):
    """Multiply what leads from input `i` to output `o`, if anything does."""
    if isinstance(layer, nn.Linear):
        layer.weight[o, i] *= factor
        return
    per_input, per_output = layer.in_channels // groups, layer.out_channels // groups
    if i // per_input != o // per_output:
        return
    if isinstance(layer, nn.ConvTranspose2d):
        layer.weight[i, o % per_output] *= factor
    else:
        layer.weight[o, i % per_input] *= factor


def plain_layers(network):
    return [m for m in network.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("members", [1, 2, 4])
def test_with_all_factors_at_one_it_is_the_plain_network(name, members):
    """In training on each member's share of the batch, in a prediction on all of it."""
    plain = MODELS[name]().double()
    ensemble = BatchEnsemble(copy.deepcopy(plain), members)
    with torch.no_grad():
        for layer in layers(ensemble):
            layer.r.fill_(1), layer.s.fill_(1)
    x, y = data()
    predicted, expected = ensemble.eval()(x), F.log_softmax(plain.eval()(x), dim=1)
    assert torch.allclose(predicted, expected, atol=1e-10)
    ours = ensemble.train()(x)
    theirs = torch.cat([plain.train()(share) for share in x.chunk(members)])
    assert torch.allclose(ours, theirs, atol=1e-10)
    F.cross_entropy(ours, y).backward()
    F.cross_entropy(theirs, y).backward()
    for layer, other in zip(layers(ensemble), plain_layers(plain), strict=True):
        assert torch.allclose(layer.layer.weight.grad, other.weight.grad, atol=1e-10)
        assert (layer.bias is None) == (other.bias is None)
        if layer.bias is not None:
            assert torch.allclose(layer.bias.grad.sum(0), other.bias.grad, atol=1e-10)


def norms(network):
    return [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("size, shares", [(8, [4, 4]), (7, [4, 3])])
def test_each_member_has_its_own_batch_norm_over_its_own_samples(size, shares):
    plain = MODELS["kinds"]().double()
    ensemble = BatchEnsemble(copy.deepcopy(plain), 2)
    randomise(ensemble)
    x, _ = data(size)
    ensemble(x)
    for index, share in enumerate(x.split(shares)):
        alone = member(plain, ensemble, index)
        alone(share)
        for norm, other in zip(norms(ensemble)[index::2], norms(alone), strict=True):
            assert torch.allclose(norm.running_mean, other.running_mean, atol=1e-12)
            assert torch.allclose(norm.running_var, other.running_var, atol=1e-12)


def test_a_share_that_cannot_be_normalised_is_refused():
    ensemble = BatchEnsemble(MODELS["vgg16"](), 4)
    with pytest.raises(SparsityError, match="a batch of 5 leaves one of 4 members a single value"):
        ensemble(torch.randn(5, 3, 32, 32))
    assert ensemble.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 6)


@pytest.mark.parametrize("name", ["kinds", "lenet5"])
def test_each_member_has_the_shared_weight_times_its_factors(name):
    plain = MODELS[name]().double().eval()
    ensemble = BatchEnsemble(copy.deepcopy(plain), 3).eval()
    randomise(ensemble)
    x, _ = data()
    members = ensemble.members(x)
    expected = torch.stack([member(plain, ensemble, index)(x) for index in range(3)])
    assert members.shape == (3, 8, 6) and torch.allclose(members, expected, atol=1e-10)
    assert not torch.allclose(members[0], members[1])
    assert torch.allclose(ensemble(x).exp(), F.softmax(expected, dim=2).mean(0), atol=1e-10)


@pytest.mark.parametrize("size, members", [(8, 2), (8, 4), (10, 4), (7, 3), (3, 3), (2, 4), (1, 2)])
def test_training_divides_the_batch_among_the_members(size, members):
    plain = without_norm().double()
    ensemble = BatchEnsemble(copy.deepcopy(plain), members).train()
    randomise(ensemble)
    x, _ = data(size)
    logits, all_of_them = ensemble(x), ensemble.members(x)
    assert logits.shape == (size, 6)
    owners = [
        [m for m in range(members) if torch.allclose(all_of_them[m, i], logits[i], atol=1e-10)]
        for i in range(size)
    ]
    assert all(len(found) == 1 for found in owners)
    shares = [sum(found == [m] for found in owners) for m in range(members)]
    assert sum(shares) == size and max(shares) - min(shares) <= 1
    assert owners == sorted(owners)
    logits.sum().backward()
    for layer in layers(ensemble):
        seen = [bool(row.abs().sum() > 0) for row in layer.bias.grad]
        assert seen == [share > 0 for share in shares]


def test_members_learn_from_their_shares():
    """With batch norm over the whole batch they reach 0.3 to 0.4."""
    digits = load_data("digits")
    torch.manual_seed(1)
    ensemble = BatchEnsemble(build_model("vgg-small", 10, 1, 8, 0.5), 4, seed=1)
    optimizer = torch.optim.SGD(ensemble.groups(5e-4), lr=0.1, momentum=0.9)
    for epoch in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 if epoch < 4 else 0.01
        for x, y in digits.train_batches(64, 1, epoch):
            optimizer.zero_grad()
            F.cross_entropy(ensemble(x), y).backward()
            optimizer.step()
    x, y = next(iter(digits.test_batches(1000)))
    members = ensemble.eval().members(x).argmax(2)
    assert all(float((one == y).float().mean()) > 0.8 for one in members)
    assert float((ensemble(x).argmax(1) == y).float().mean()) > 0.9


def test_factors_start_as_random_signs_of_their_own_generator():
    networks = [without_norm() for _ in range(3)]
    state = torch.get_rng_state()
    first, same, other = (BatchEnsemble(n, 4, seed) for n, seed in zip(networks, (5, 5, 6), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    for layer, twin in zip(layers(first), layers(same), strict=True):
        for name in ("r", "s"):
            factors = getattr(layer, name)
            assert torch.equal(factors.abs(), torch.ones_like(factors))
            assert torch.equal(factors, getattr(twin, name))
    wide = layers(first)[-1].r
    assert 0.4 < float((wide > 0).float().mean()) < 0.6
    assert all(not torch.equal(wide[a], wide[b]) for a in range(4) for b in range(a))
    assert not torch.equal(wide, layers(other)[-1].r)


def test_the_bias_of_a_layer_is_where_each_member_starts():
    plain = without_norm()
    ensemble = BatchEnsemble(copy.deepcopy(plain), 3)
    last = layers(ensemble)[-1]
    assert all(torch.equal(row, plain[-1].bias) for row in last.bias)
    assert last.layer.bias is None


def test_factors_are_not_decayed():
    ensemble = BatchEnsemble(MODELS["vgg16"](), 2)
    decayed, free = ensemble.groups(5e-4)
    assert decayed["weight_decay"] == 5e-4 and free["weight_decay"] == 0
    assert len(free["params"]) == 2 * len(layers(ensemble))
    together = [id(p) for group in (decayed, free) for p in group["params"]]
    assert sorted(together) == sorted(id(p) for p in ensemble.parameters())


def test_a_layer_with_two_names_stays_one():
    shared, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    ensemble = BatchEnsemble(nn.Sequential(shared, norm, shared, norm), 2)
    assert ensemble.network[0] is ensemble.network[2] and ensemble.network[1] is ensemble.network[3]
    assert len(layers(ensemble)) == 1 and len(norms(ensemble)) == 2


def test_a_single_layer_is_a_network_too():
    assert BatchEnsemble(nn.Linear(4, 3), 2)(torch.randn(5, 4)).shape == (5, 3)


def test_under_autocast_the_factors_follow():
    ensemble = BatchEnsemble(without_norm(), 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = ensemble(torch.randn(4, 3, 32, 32))
    assert out.dtype == torch.bfloat16
    assert layers(ensemble)[0].r.dtype == torch.float32


@pytest.mark.parametrize(
    "network, found",
    [
        (nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)), "0.weight"),
        (nn.TransformerEncoderLayer(4, 1), "self_attn.in_proj_weight"),
        (nn.ReLU(), "none"),
    ],
)
def test_other_layers_are_refused(network, found):
    with pytest.raises(SparsityError, match=f"convolutions and linear layers: .*{found}"):
        BatchEnsemble(network, 2)


def test_there_is_at_least_one_member():
    with pytest.raises(SparsityError, match="members must be a whole number, at least 1, not 0"):
        BatchEnsemble(without_norm(), 0)


def test_it_is_made_sparse_like_any_network():
    ensemble = BatchEnsemble(build_model("vgg-small", 6, 3, 32, 0.2), 2)
    optimizer = torch.optim.SGD(ensemble.groups(5e-4), lr=0.05, momentum=0.9)
    network = st.sparsify(ensemble, st.RigL(0.8, interval=1), optimizer, seed=1)
    for _ in range(3):
        x, y = data()
        optimizer.zero_grad()
        F.cross_entropy(ensemble(x.float()), y).backward()
        optimizer.step()
    assert network.nonzero == round(0.2 * network.parameters_total)
    assert all(name.endswith(".layer") for name in network.layers)
    assert ensemble.eval()(data()[0].float()).shape == (8, 6)


@pytest.mark.parametrize("name, parameters", [("vgg16", 1.0054), ("wrn28-10", 1.0036)])
def test_four_members_cost_what_the_page_says(name, parameters):
    with torch.device("meta"):
        plain = sum(p.numel() for p in build_model(name, 10).parameters())
        ensemble = BatchEnsemble(build_model(name, 10), 4)
    assert sum(p.numel() for p in ensemble.parameters()) / plain == pytest.approx(parameters, abs=5e-5)
