"""Who goes and who comes, on cases small enough to do by hand."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import batches, counts, living, mlp, sgd, train_step, values, verify
from torch import nn

import suptickets as st
from suptickets.criteria import Criterion, strongest
from suptickets.gradient import scale_like


def one_layer(weights, alive):
    """A linear layer with one output, no bias, these weights and these living connections."""
    model = nn.Sequential(nn.Linear(len(weights), 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    network = st.sparsify(model, st.Static(0.0), optimizer)
    with torch.no_grad():
        values(model)["0"].zero_()
        for row in alive:
            values(model)["0"][row] = 1.0
    network.prune({"0": len(alive)}, by="magnitude")
    model[0].weight = torch.tensor([weights])
    assert living(model)["0"].tolist() == alive
    return model, network, optimizer


def gradient(model, network, optimizer, wanted):
    """The gradient of the layer is `wanted`: the input itself, as the loss is the output."""
    network.request_gradient()
    model(torch.tensor([wanted])).sum().backward()
    optimizer.step()


# weights (row-major), the living rows, gradients, how many stay, prune by, who stays
PRUNE = [
    # magnitudes 3 1 2 4: the two largest are rows 3 and 0
    ("magnitude", [3.0, -1.0, 2.0, -4.0, 0.0], [0, 1, 2, 3], None, 2, [0, 3]),
    ("largest", [3.0, -1.0, 2.0, -4.0, 0.0], [0, 1, 2, 3], None, 2, [1, 2]),
    # half of {1, 2, 3, 4} and half of {-9, -8}: the smallest positive and the largest negative go
    ("signed", [1.0, 2.0, 3.0, 4.0, -9.0, -8.0], [0, 1, 2, 3, 4, 5], None, 3, [2, 3, 4]),
    # |w g|: 3 * 0.1 = 0.3, 1 * 2 = 2, 2 * 0.5 = 1, 4 * 0.1 = 0.4
    ("sensitivity", [3.0, -1.0, 2.0, -4.0], [0, 1, 2, 3], [0.1, 2.0, 0.5, -0.1], 2, [1, 2]),
    # the gradient 9 is that of a connection that does not live
    ("sensitivity", [3.0, -1.0, 0.0, -4.0], [0, 1, 3], [0.1, 2.0, 9.0, -0.1], 1, [1]),
]


@pytest.mark.parametrize(("by", "weights", "alive", "gradients", "count", "stays"), PRUNE)
def test_who_goes(by, weights, alive, gradients, count, stays):
    model, network, optimizer = one_layer(weights, alive)
    if gradients is not None:
        gradient(model, network, optimizer, gradients)
    assert network.prune({"0": count}, by=by)
    assert living(model)["0"].tolist() == stays
    assert values(model)["0"].flatten().tolist() == [weights[row] for row in stays]
    verify(network, optimizer)


# the living rows, gradients, how many in the end, who lives then
GROW = [
    ([0], [9.0, 1.0, -3.0, 2.0], 2, [0, 2]),  # the largest magnitude that does not live yet
    ([0], [9.0, 1.0, -3.0, 2.0], 3, [0, 2, 3]),
    ([2, 3], [0.0, 0.0, 5.0, 5.0], 4, [0, 1, 2, 3]),  # no gradient, but they are asked for
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32])
def test_scores_of_ones_own_are_not_rounded(dtype):
    """In float32 these are all equal."""
    own = Criterion("rows", "the last ones come", lambda w, _: 2**30 + torch.arange(w.size).to(dtype))
    model = nn.Sequential(nn.Linear(100, 1, bias=False))
    network = st.sparsify(model, st.Static(0.9), seed=0)
    network.prune({"0": 1})
    kept = living(model)["0"].tolist()
    network.grow({"0": 4}, by=own)
    expected = [row for row in range(100) if row not in kept][-3:]
    assert living(model)["0"].tolist() == sorted([*kept, *expected])


@pytest.mark.parametrize(("alive", "gradients", "count", "lives"), GROW)
def test_who_comes_by_gradient(alive, gradients, count, lives):
    model, network, optimizer = one_layer([0.5] * 4, alive)
    gradient(model, network, optimizer, gradients)
    assert network.grow({"0": count}, by="gradient")
    assert living(model)["0"].tolist() == lives
    assert values(model)["0"].flatten().tolist() == [0.5 if row in alive else 0.0 for row in lives]


def test_explore_by_hand():
    """Rate 0.5 of three: int(1.5 + 0.5) = 2 go (rows 1, 2); of rows 1, 2, 3, 4 the gradients 5 and 4 come.

    Row 1 goes and comes again: it keeps its value 0.2. Row 4 is new: it starts at 0.
    """
    model, network, optimizer = one_layer([0.9, 0.2, -0.3, 0.0, 0.0], [0, 1, 2])
    gradient(model, network, optimizer, [0.0, 5.0, 1.0, 2.0, -4.0])
    assert network.explore(0.5)
    assert living(model)["0"].tolist() == [0, 1, 4]
    assert values(model)["0"].flatten().tolist() == pytest.approx([0.9, 0.2, 0.0])


def test_growth_by_momentum_takes_the_largest_momentum():
    """Rate 0.5 of two: one goes (the smaller), and the largest of 0.5 * g1 + g2 that does not live comes."""
    model = nn.Sequential(nn.Linear(6, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    network = st.sparsify(model, st.SNFS(2 / 3, interval=2, rate=0.5, momentum=0.5), optimizer, seed=0)
    alive = living(model)["0"].tolist()
    weights = dict(zip(alive, values(model)["0"].abs().flatten().tolist(), strict=True))
    strong = max(weights, key=weights.get)
    first, second, *_ = sorted(set(range(6)) - set(alive))
    for gradients in ({first: 9.0}, {second: 3.0}):  # 0.5 * 9 = 4.5 against 3
        optimizer.zero_grad()
        model(torch.tensor([[gradients.get(row, 0.0) for row in range(6)]])).sum().backward()
        optimizer.step()
    assert living(model)["0"].tolist() == sorted([strong, first])
    assert network.nonzero == 2


@pytest.mark.parametrize("by", ["random", "magnitude", "largest", "signed"])
@pytest.mark.parametrize("value", [0.0, 0.25, -0.25])
def test_ties_give_exact_counts(by, value):
    model = mlp()
    network = st.sparsify(model, st.SET(0.5), sgd(model), seed=0)
    for parameter in values(model).values():
        nn.init.constant_(parameter, value)
    wanted = {"0": 11, "2": 1, "4": 7}
    network.prune(wanted, by=by)
    assert counts(model) == wanted
    verify(network)


def test_ties_give_exact_counts_in_growth_and_over_the_whole_network():
    model = mlp()
    optimizer = sgd(model, lr=0.0)
    network = st.sparsify(model, st.GraNet(0.9, interval=1, prune_end=2), optimizer, seed=0)
    for parameter in values(model).values():
        nn.init.zeros_(parameter)
    for step, total in ((1, 0.9 - 0.4 / 8), (2, 0.9), (3, 0.9)):  # all weights and all gradients are 0
        optimizer.zero_grad()
        (0 * model(torch.ones(2, 6))).sum().backward()
        optimizer.step()
        assert network.nonzero == round((1 - total) * 232), step
        assert min(counts(model).values()) >= 1
        verify(network, optimizer)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_signed_prunes_the_same_share_of_each_sign(rate):
    """80 positive and 20 negative connections: rate r takes 80 r and 20 r, the nearest to zero."""
    torch.manual_seed(0)
    weights = (torch.rand(100) + 0.01) * torch.tensor([1.0] * 80 + [-1.0] * 20)
    order = torch.randperm(100)
    model, network, _ = one_layer(weights[order].tolist(), list(range(100)))
    network.prune({"0": round(100 * (1 - rate))}, by="signed")
    stay = values(model)["0"].detach().flatten()
    assert int((stay > 0).sum()) == round(80 * (1 - rate)) and int((stay < 0).sum()) == round(20 * (1 - rate))
    assert sorted(stay[stay > 0].tolist()) == sorted(weights[:80].tolist())[-int((stay > 0).sum()) :]
    assert sorted(stay[stay < 0].tolist()) == sorted(weights[80:].tolist())[: int((stay < 0).sum())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_signed_ranks_are_exact_in_half_precision(dtype):
    """Ranks above 256 are not told apart in bfloat16."""
    numbers = torch.arange(1, 2001).to(dtype).unique()
    model, network, _ = one_layer(numbers.float().tolist(), list(range(len(numbers))))
    model.to(dtype)
    network.prune({"0": 10}, by="signed")
    assert sorted(values(model)["0"].detach().float().flatten().tolist()) == numbers[-10:].tolist()


def test_gradients_that_are_written_to_zeros_before_the_step_choose_as_they_were():
    """Some loops make a bad step harmless in this way."""
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.7, interval=1), optimizer, seed=0)
    x, y = batches((6,), 4)[0]
    F.cross_entropy(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad.zero_()
    before, gradients = living(model), {n: w.gradient.abs().clone() for n, w in network.weights.items()}
    optimizer.step()
    for name, rows in living(model).items():
        grown = list({*rows.tolist()} - {*before[name].tolist()})
        left = list({*range(len(gradients[name]))} - {*rows.tolist()})
        assert grown and gradients[name][grown].min() >= gradients[name][left].max()


def test_gradients_that_clipping_made_not_finite_are_not_explored_by():
    """What was collected is finite; the optimizer's own gradients are not."""
    model = mlp()
    optimizer = sgd(model)
    st.sparsify(model, st.RigL(0.7, interval=1), optimizer, seed=0)
    x, y = batches((6,), 4)[0]
    F.cross_entropy(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(torch.nan)
    before = living(model)
    with pytest.warns(RuntimeWarning, match="gradients are not finite at an exploration"):
        optimizer.step()
    assert all(torch.equal(before[name], rows) for name, rows in living(model).items())


def test_complex_gradients_are_scaled_like_the_optimizers():
    generator = torch.Generator().manual_seed(0)
    collected = torch.randn(20, dtype=torch.complex128, generator=generator)
    before = collected.clone()
    scale_like([collected], [before[:5]], [before[:5] * 0.25])
    torch.testing.assert_close(collected, before * 0.25)


def test_random_growth_reaches_every_position():
    model, network, _ = one_layer([1.0] * 12, [3, 4])
    seen = set()
    for _ in range(60):
        network.explore(0.5, prune="random", grow="random")
        seen |= set(living(model)["0"].tolist())
    assert seen == set(range(12)) and network.nonzero == 2


def test_global_counts_keep_one_of_each_layer():
    """The layer 0 holds the 72 smallest weights of all; with five to keep, one of it stays all the same."""
    model = mlp()
    network = st.sparsify(model, st.Static(0.0))
    for name, scale in (("0", 0.001), ("2", 1.0), ("4", 10.0)):
        nn.init.constant_(values(model)[name], scale)
    assert network.global_counts(5) == {"0": 1, "2": 1, "4": 3}
    assert network.global_counts(5, at_least=0) == {"0": 0, "2": 0, "4": 5}
    assert network.global_counts(60) == {"0": 1, "2": 19, "4": 40}


# ---- gradients ----


def test_accumulation_counts_backward_passes_in_which_living_connections_have_no_gradient():
    """The living connection sees 0 then 1, the dead one 5 then 0.1: sums 1 and 5.1, the dead one comes."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    st.sparsify(model, st.RigL(0.5, interval=1, rate=1.0), optimizer, seed=0)
    alive = int(living(model)["0"])
    for here, there in ((0.0, 5.0), (1.0, 0.1)):
        x = torch.empty(1, 2)
        x[0, alive], x[0, 1 - alive] = here, there
        model(x).sum().backward()
    optimizer.step()
    assert living(model)["0"].tolist() == [1 - alive]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_zero_grad_threw_away_does_not_count(set_to_none):
    model = nn.Sequential(nn.Linear(3, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    st.sparsify(model, st.RigL(0.6, interval=1, rate=1.0), optimizer, seed=0)
    (alive,) = living(model)["0"].tolist()
    old, new = sorted({0, 1, 2} - {alive})
    for row, size in ((old, 9.0), (new, 2.0)):
        optimizer.zero_grad(set_to_none=set_to_none)
        x = torch.zeros(1, 3)
        x[0, row], x[0, alive] = size, 0.5
        model(x).sum().backward()
    optimizer.step()
    assert living(model)["0"].tolist() == [new]


NOT_FINITE = {
    "rigl": lambda: st.RigL(0.7, interval=2),
    "granet": lambda: st.GraNet(0.7, interval=2, initial_sparsity=0.7, prune_end=1),
    "snfs": lambda: st.SNFS(0.7, interval=2),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NOT_FINITE)
def test_gradients_are_used_whose_norm_is_too_large_for_their_type(name):
    model = nn.Sequential(nn.Linear(6, 12, bias=False)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    network = st.sparsify(model, NOT_FINITE[name](), optimizer, seed=0)
    before = living(model)
    for step in range(4):
        if step == 2:
            model.float().half()
        optimizer.zero_grad()
        (model(torch.ones(1, 6).half()).float() * 4e4).sum().backward()
        optimizer.step()
    assert any(not torch.equal(before[n], rows) for n, rows in living(model).items())
    verify(network, optimizer)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", NOT_FINITE)
def test_an_exploration_with_gradients_that_are_not_finite_is_skipped(name, bad):
    model, data = mlp(), batches((6,), 4)
    optimizer = sgd(model)
    network = st.sparsify(model, NOT_FINITE[name](), optimizer, seed=0)

    def step(scale):
        optimizer.zero_grad()
        (F.cross_entropy(model(data[0][0]), data[0][1]) * scale).backward()
        for parameter in model.parameters():  # what a careful loop does: the weights stay finite
            parameter.grad.nan_to_num_(0, 0, 0)
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # steps 2 and 4 should explore
            step(1.0)
            before = living(model)
            step(bad)
            assert all(torch.equal(before[n], rows) for n, rows in living(model).items())
            verify(network, optimizer)
    assert [str(w.message) for w in caught] == ["gradients are not finite at an exploration: it was skipped"]
    before = living(model)
    step(1.0)
    step(1.0)
    assert any(not torch.equal(before[n], rows) for n, rows in living(model).items())
    verify(network, optimizer)


def test_a_step_that_makes_the_weights_nan_leaves_the_connections_consistent():
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.SET(0.7, interval=1), optimizer, seed=0)
    x, y = batches((6,), 4, 1)[0]
    train_step(model, optimizer, (x * math.nan, y))
    assert network.nonzero == round(0.3 * 232)
    network.check()


@pytest.mark.parametrize("name", ["rigl", "granet"])
def test_the_gradient_of_all_positions_is_that_of_the_dense_weight(name):
    model, data = mlp(), batches((6,), 4)
    optimizer = sgd(model)
    network = st.sparsify(model, NOT_FINITE[name](), optimizer, seed=0)
    network.request_gradient()
    plain = network.densify()
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(plain(x), y).backward()
    for layer, weight in network.weights.items():
        expected = plain.get_submodule(layer).weight.grad.flatten()
        torch.testing.assert_close(weight.gradient, expected)
        torch.testing.assert_close(values(model)[layer].grad.flatten(), expected[living(model)[layer].long()])


@pytest.mark.parametrize("share", [5, 9, 40])
def test_a_sample_that_misleads_costs_nothing(share):
    """Every 61st score, which the sample sees, is larger: its threshold leaves too few of the others."""
    scores = torch.rand(2**17)
    scores[::61] += 1
    count = len(scores) // share
    chosen = strongest(scores, count)
    assert len(chosen) == count
    assert torch.equal(scores[chosen].sort().values, scores.topk(count).values.sort().values)
