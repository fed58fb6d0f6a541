"""What nobody should pass, and somebody will: one line each, never somebody else's exception."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.nn.functional import cross_entropy

import suptickets as st
from suptickets import schedules
from suptickets.criteria import GROW, PRUNE

X, Y = torch.randn(8, 20), torch.arange(8)


def mlp():
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 10))


def network():
    model = mlp()
    return st.sparsify(model, st.RigL(0.5), torch.optim.SGD(model.parameters(), lr=0.1))


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        optimizer.step()


def tickets(**options):
    return st.SupTickets(network(), 10, 2, 2, (0.1, 0.2), **options)


def load(**changes):
    one = network()
    one.load_state_dict({**one.state_dict(), **changes})


def pruned_the_old_way():
    model = mlp()
    torch.nn.utils.prune.random_unstructured(model[0], "weight", 0.5)
    return model


def values_for_dense():
    """What FSDP does."""
    layer = network().model[0]
    return layer, "weight", layer._parameters["weight"].detach().clone()


def snip(**options):
    return st.sparsify(mlp(), st.SNIP(0.9, loss=cross_entropy, **options))


NASTY = {
    "no model": lambda: st.sparsify(None, st.RigL(0.5)),
    "a class": lambda: st.sparsify(nn.Linear, st.RigL(0.5)),
    "a script": lambda: st.sparsify(torch.jit.script(mlp()), st.RigL(0.5)),
    "meta device": lambda: st.sparsify(mlp().to("meta"), st.RigL(0.5)),
    "averaged": lambda: st.sparsify(torch.optim.swa_utils.AveragedModel(mlp()), st.RigL(0.5)),
    "pruned the old way": lambda: st.sparsify(pruned_the_old_way(), st.RigL(0.5)),
    "seed": lambda: st.sparsify(mlp(), st.RigL(0.5), seed="a"),
    "half a seed": lambda: st.sparsify(mlp(), st.RigL(0.5), seed=1.5),
    "include a number": lambda: st.sparsify(mlp(), st.RigL(0.5), include=5),
    "include numbers": lambda: st.sparsify(mlp(), st.RigL(0.5), include=[3]),
    "total_steps": lambda: st.RigL(0.5, stop=0.5, total_steps="a"),
    "no steps": lambda: st.RigL(0.9, decay="cosine", total_steps=0),
    "interval": lambda: st.RigL(0.9, interval=True),
    "prune_end": lambda: st.GraNet(0.9, prune_end="x"),
    "half a step": lambda: st.GraNet(0.9, prune_end=2.5),
    "threshold": lambda: st.DSR(0.9, threshold="a"),
    "endless threshold": lambda: st.DSR(0.9, threshold=math.inf),
    "snip's batches": lambda: snip(data=[(X, Y)], batches=-1),
    "snip's data": lambda: snip(data=5),
    "snip's pairs": lambda: snip(data=[X]),
    "snip's nothing": lambda: snip(data=[]),
    "tickets of a model": lambda: st.SupTickets(mlp(), 10, 2, 2, (0.1, 0.2)),
    "rule": lambda: tickets(rule=[]),
    "schedule": lambda: tickets(schedule=[]),
    "three criteria": lambda: tickets(criteria=[("a", "b", "c")] * 2),
    "criteria": lambda: tickets(criteria="abc"),
    "tickets' state": lambda: tickets().load_state_dict({}),
    "state of other tickets": lambda: tickets().load_state_dict(tickets(rule="caa").state_dict()),
    "loader": lambda: (lambda t: (t.collect(), t.ticket(5)))(tickets(batch_norm="recompute")),
    "empty batch": lambda: (lambda t: (t.collect(), t.ticket([(X[:0],)])))(tickets(batch_norm="recompute")),
    "half a count": lambda: network().prune({"0": 5.5}),
    "a list of counts": lambda: network().prune([1]),
    "one of two counts": lambda: network().rewire({"0": 1}, {}),
    "explore too much": lambda: network().explore(2.5),
    "explore by": lambda: network().explore(0.5, "zzz"),
    "generator": lambda: load(generator=torch.zeros(5056)),
    "generator of zeros": lambda: load(generator=torch.zeros(5056, dtype=torch.uint8)),
    "no state of the method": lambda: load(method={"name": "rigl"}),
    "state of the method": lambda: load(method={"name": "rigl", "state": None}),
    "counts": lambda: network().grow(3),
    "prune the old way": lambda: torch.nn.utils.prune.l1_unstructured(network().model[0], "weight", 0.5),
    "a kind of first layer": lambda: st.RigL(0.9, dense_first="yes"),
    "two last layers": lambda: st.RigL(0.9, dense_last=2),
    "fewer than none in each layer": lambda: network().global_counts(50, at_least=-1),
    "half a connection": lambda: network().global_counts(1.5),
    "no weight": lambda: setattr(network().model[0], "weight", None),
    "values for the dense weight": lambda: setattr(*values_for_dense()),
    "format": lambda: load(format=99),
    "step": lambda: load(step=-4),
    "copied network": lambda: copy.deepcopy(network()),
    "no optimizer": lambda: st.sparsify(mlp(), st.SET(0.8)).before_step(),
    "empty shape": lambda: st.erk([()], 0.9),
    "shape of size 0": lambda: st.erk([(0, 3)], 0.9),
    "no shapes": lambda: st.erk((10, 10), 0.9),
    "superpose nothing": lambda: st.superpose(None),
    "superpose one": lambda: st.superpose(mlp().state_dict()),
    "superpose models": lambda: st.superpose([mlp()]),
    "superpose no such layer": lambda: st.superpose([mlp().state_dict()], layers="zz"),
    "superpose layer 5": lambda: st.superpose([mlp().state_dict()], layers=5),
    "superpose meta tensors": lambda: st.superpose([mlp().to("meta").state_dict()]),
    "superpose an empty state": lambda: st.superpose([{}]),
    "superpose values": lambda: st.superpose([network().model.state_dict()]),
    "endless loader": lambda: st.epochs_to_steps(3, iter([])),
    "epochs": lambda: st.epochs_to_steps(-3, 10),
    "batches": lambda: st.epochs_to_steps(3, -10),
    "a training of no steps": lambda: schedules.cosine_decay(0.1, 0),
    "cycles": lambda: schedules.cycles("x", 3, 0.1, 0.2),
    "cycles of nothing": lambda: schedules.cycles("swa", 0, 0.1, 0.2),
    "flops of nothing": lambda: st.flops(None, X),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NASTY)
def test_it_is_refused_in_one_line(name):
    with pytest.raises(st.SparsityError) as caught:
        NASTY[name]()
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    assert st.epochs_to_steps(np.float32(2.5), np.int64(4)) == 10
    one = st.SupTickets(network(), 10, 2, 2, (np.float32(0.25), np.int64(1)))
    assert (one.low, one.high) == (0.25, 1.0)


def test_a_loader_without_a_length_is_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(st.SparsityError, match="the loader has no length"):
        st.epochs_to_steps(1, torch.utils.data.DataLoader(Stream()))


def test_criteria_of_ones_own_may_be_one_pair():
    own = PRUNE["magnitude"], GROW["random"]
    assert tickets(criteria=own).criteria == tickets(criteria=[own, own]).criteria == [own, own]
    with pytest.raises(st.SparsityError, match="use the method SNFS"):
        tickets(criteria=(PRUNE["magnitude"], GROW["momentum"]))


def test_a_stop_before_the_first_step_is_one():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = st.GraNet(0.9, interval=2, prune_end=4, decay="cosine", total_steps=40, stop=0.01)
    ours = st.sparsify(model, method, optimizer)
    train(model, optimizer, 8)
    assert abs(ours.sparsity - 0.9) < 1e-3


@pytest.mark.parametrize("method", [st.DSR, st.SNFS])
def test_a_layer_without_connections_stays_so(method):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = st.sparsify(model, method(0.5, interval=2), optimizer)
    ours.prune({"3": 0})
    total = ours.nonzero
    train(model, optimizer, 8)
    assert ours.nonzero == total
    ours.check()


@pytest.mark.parametrize("wrong", [torch.zeros(3, 3), torch.zeros(5), "text"])
def test_momenta_of_another_shape_are_refused_and_nothing_is_loaded(wrong):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = st.sparsify(model, st.SNFS(0.5, interval=2), optimizer)
    train(model, optimizer, 3)
    before = copy.deepcopy(ours.state_dict()["method"]["state"])
    spoiled = {**ours.state_dict(), "method": {"name": "snfs", "state": {"0": before["0"] + 1, "3": wrong}}}
    with pytest.raises(st.SparsityError, match="SNFS's momentum of 3 has another shape"):
        ours.load_state_dict(spoiled)
    after = ours.state_dict()["method"]["state"]
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_small_dense_tells_of_a_network_of_full_width():
    with pytest.warns(RuntimeWarning, match="was not narrowed"):
        st.sparsify(mlp(), st.SmallDense(0.5))
    method = st.SmallDense(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        narrow = method.narrow(lambda width: nn.Sequential(nn.Linear(20, max(int(30 * width), 1))))
        st.sparsify(nn.Sequential(nn.Flatten(), *narrow), method)


def test_a_method_that_never_explores_is_told_of():
    for interval, told in ((1000, True), (7, True), (6, False)):
        model = mlp()
        ours = st.sparsify(
            model, st.RigL(0.5, interval=interval), torch.optim.SGD(model.parameters(), lr=0.1)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            st.SupTickets(ours, 10, 2, 2, (0.1, 0.2))
        assert bool(caught) is told
        assert all(
            f"every {interval} steps, and the cycles begin after 6" in str(one.message) for one in caught
        )
