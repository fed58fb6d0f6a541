"""What a sparse network occupies: its living connections, and nothing of a dense weight's size."""

import gc
import warnings
import weakref

import pytest
import torch
from helpers import sgd, train_step, vgg16
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import suptickets as st


def persistent_bytes(model, optimizer):
    """Bytes of the storages of parameters, buffers and optimizer state, each storage once."""
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    storages = {}
    for tensor in (*model.parameters(), *model.buffers(), *state):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def trained_bytes(method):
    model = vgg16()
    optimizer = sgd(model)
    network = st.sparsify(model, method, optimizer, seed=0)
    for _ in range(2):
        train_step(model, optimizer, (torch.randn(2, 3, 32, 32), torch.tensor([0, 1])))
    return persistent_bytes(model, optimizer), network


def test_a_sparse_vgg16_occupies_its_living_connections():
    """Dense: 4 bytes of value and 4 of momentum. Sparse: 4 more of position, so 12 / 8 * 0.05 = 0.075.

    The rest is biases and batch norm: 4,234 + 2 * 4,224 parameters with momentum, 2 * 4,224 buffers.
    """
    dense, network = trained_bytes(st.Dense())
    assert network.parameters_total == 14_715_584
    rest = (8 * (4_234 + 2 * 4_224) + 4 * 2 * 4_224) + 13 * 8
    assert dense == 8 * 14_715_584 + rest
    for method in (st.Static(0.95), st.RigL(0.95, interval=1)):
        sparse, network = trained_bytes(method)
        assert network.nonzero == 735_779  # 0.05 * 14,715,584 = 735,779.2
        assert sparse == 12 * 735_779 + rest
        assert sparse <= 0.08 * dense


# ---- nothing at all once it is no longer used ----


ALL = {
    "dense": st.Dense,
    "static": lambda: st.Static(0.5),
    "snip": lambda: st.SNIP(0.5, backward=lambda model: model(torch.randn(4, 8)).sum().backward()),
    **{kind.name: lambda kind=kind: kind(0.5, interval=2) for kind in (st.SET, st.RigL, st.SNFS, st.DSR)},
    **{kind.name: lambda kind=kind: kind(0.5, interval=2, prune_end=4) for kind in (st.GraNet, st.GMP)},
}


def used(method, cycles):
    """Train a network and drop it; gives weak references to what it was made of."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = sgd(model)
    network = st.sparsify(model, method(), optimizer, seed=0)
    parts = [model, optimizer, network, *network.weights.values()]
    if cycles:
        tickets = st.SupTickets(network, 12, 2, 3, (0.001, 0.01), keep=True)
        parts += [tickets]
    for _ in range(12 if cycles else 3):
        train_step(model, optimizer, (torch.randn(4, 8), torch.arange(4)))
    if cycles:
        parts += [tickets.ticket(), *tickets.tickets]
    network.request_gradient()
    model(torch.randn(4, 8)).sum().backward()
    return [weakref.ref(part) for part in parts]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cycles", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_what_is_no_longer_used_is_freed(name, cycles):
    parts = used(ALL[name], cycles)
    gc.collect()
    assert [type(part()).__name__ for part in parts if part() is not None] == []


# ---- nothing dense between explorations ----

WIDTH = 128


def wide_net():
    """Two weights of 16,384 elements; activations have 4 * 128."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def conv_net():
    """A weight of 32 * 32 * 16 = 16,384 elements; activations have 4 * 32 * 6."""
    return nn.Sequential(nn.Conv1d(32, 32, 16), nn.Tanh(), nn.Conv1d(32, 32, 4), nn.Flatten())


def snip(model):
    model(INPUT[len(model)]).square().mean().backward()


INPUT = {3: torch.randn(4, WIDTH), 4: torch.randn(4, 32, 21)}
METHODS = {
    "static": lambda: st.Static(0.9),
    "snip": lambda: st.SNIP(0.9, backward=snip),
    "set": lambda: st.SET(0.9, interval=3),
    "rigl": lambda: st.RigL(0.9, interval=3),
    "granet": lambda: st.GraNet(0.9, interval=3, prune_end=6),
    "dsr": lambda: st.DSR(0.9, interval=3),
}


class Large(TorchDispatchMode):
    """Remembers, weakly, the storage of every tensor of at least `size` elements that any operation made."""

    def __init__(self, size):
        super().__init__()
        self.size, self.seen = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= 4 * self.size:
                self.seen.append(StorageWeakRef(tensor.untyped_storage()))
        return result

    def alive(self):
        return len({ref.cdata for ref in self.seen if not ref.expired()})


@pytest.fixture
def only_new():
    """`visible` is not to look through all that other tests have left behind."""
    gc.freeze()
    yield
    gc.unfreeze()


def visible(size):
    """Tensors of at least `size` elements that Python can see (without a collection: garbage counts)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some lazy objects complain about being looked at
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return [t for t in tensors if t.untyped_storage().nbytes() >= 4 * size]


def test_what_is_visible(only_new):
    large, small = torch.empty(100), torch.empty(99)
    assert [t is large for t in visible(100)] == [True] and len(small) == 99


@pytest.mark.parametrize("build", [wide_net, conv_net])
@pytest.mark.parametrize("name", METHODS)
def test_no_dense_tensor_outlives_the_backward_pass(name, build, only_new):
    size = 16_384
    model = build()
    optimizer = sgd(model)
    network = st.sparsify(model, METHODS[name](), optimizer, seed=0)
    x = INPUT[len(model)]
    for step in range(1, 9):
        with Large(size) as large:
            loss = model(x).square().mean()
            assert large.seen  # the dense weights were there
            optimizer.zero_grad()
            loss.backward()
            due = step % 3 == 0 and name in ("rigl", "granet")
            assert bool(large.alive()) == due, step  # the gradient of all positions, when it is due
            assert step not in (3, 4) or bool(visible(size)) == due, step
            optimizer.step()
        assert not large.alive(), step
        assert step not in (3, 4) or not visible(size), step
    network.check()


def test_snfs_keeps_one_dense_momentum_for_each_weight(only_new):
    """The documented exception: between steps, one momentum per weight."""
    model = wide_net()
    optimizer = sgd(model)
    network = st.sparsify(model, st.SNFS(0.9, interval=3), optimizer, seed=0)
    for _ in range(4):
        optimizer.zero_grad()
        model(INPUT[3]).square().mean().backward()
        optimizer.step()
    assert len(visible(16_384)) == len(network.layers)
