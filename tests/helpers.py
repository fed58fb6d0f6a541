"""Small things that several tests share: models, data, loops, and slow but obvious computations."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import suptickets as st

# ---- models and data ----


def tiny_net() -> nn.Module:
    """A convolution, a batch norm and two linear layers: 108 + 512 + 40 = 660 weights to make sparse."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16 * 4, 8),
        nn.Tanh(),
        nn.Linear(8, 5),
    )


def mlp() -> nn.Module:
    """Three linear layers: 6 * 12 + 12 * 10 + 10 * 4 = 232 weights to make sparse."""
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4))


def vgg16(classes: int = 10) -> nn.Module:
    """VGG-16 for 32 x 32 images: thirteen convolutions with batch norm, one classifier."""
    layers: list[nn.Module] = []
    channels = 3
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, classes))


def batches(shape=(3, 8, 8), classes=5, count=3, size=6, dtype=torch.float32):
    """`count` batches of noise with random classes, the same for every call."""
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(size, *shape, generator=generator, dtype=dtype),
            torch.randint(classes, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def train_step(model, optimizer, batch):
    """The loop that a user writes."""
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def sgd(model, lr=0.05, momentum=0.9, weight_decay=5e-4, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay, **options)


# ---- reading a sparse model from outside ----


def living(model) -> dict[str, torch.Tensor]:
    """Row-major positions of the living connections, as the state dict has them."""
    end = ".weight_connections.positions"
    return {key.removesuffix(end): p.clone() for key, p in model.state_dict().items() if key.endswith(end)}


def values(model) -> dict[str, nn.Parameter]:
    """The parameters that hold the values of the living connections."""
    parameters = dict(model.named_parameters())
    return {name: parameters[f"{name}.weight"] for name in living(model)}


def counts(model) -> dict[str, int]:
    return {name: len(rows) for name, rows in living(model).items()}


def dense_weights(model) -> dict[str, torch.Tensor]:
    return {name: model.get_submodule(name).weight.detach().clone() for name in living(model)}


def verify(network, optimizer=None) -> None:
    """Positions unique and in range, zero elsewhere, state shaped like the values, and `check` agrees."""
    model = network.model
    for name, rows in living(model).items():
        dense, parameter = model.get_submodule(name).weight.detach(), values(model)[name]
        size = math.prod(network.layers[name].shape)
        assert tuple(dense.shape) == tuple(network.layers[name].shape)
        assert parameter.shape == (len(rows), *[1] * (dense.dim() - 1))
        assert network.layers[name].nonzero == len(rows) == len(set(rows.tolist()))
        assert all(0 <= row < size for row in rows.tolist())
        expected = torch.zeros(size, dtype=dense.dtype)
        expected[rows.long()] = parameter.detach().flatten()
        assert torch.equal(dense.reshape(-1), expected)
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for value in state.values():
            shaped = isinstance(value, torch.Tensor) and value.dim() > 0
            assert not shaped or value.shape == parameter.shape
    if optimizer is not None:
        network.check()


def per_position(model, optimizer, key) -> dict[str, dict[int, float]]:
    """Optimizer state by layer and position."""
    return {
        name: dict(
            zip(rows.tolist(), optimizer.state[values(model)[name]][key].flatten().tolist(), strict=True)
        )
        for name, rows in living(model).items()
    }


# ---- what the library computes, once more and slowly ----


def largest_remainder(total, shares, caps):
    """`total` in proportion to `shares`, whole numbers of at most `caps`; ties (nine digits) to the first."""
    result = [0] * len(caps)
    while True:
        open_ = [i for i in range(len(caps)) if result[i] < caps[i]]
        left, weight = total - sum(result), sum(shares[i] for i in open_)
        ideal = {i: left * (shares[i] / weight if weight else 1 / len(open_)) for i in open_}
        over = [i for i in open_ if ideal[i] >= caps[i]]
        if over:
            for i in over:
                result[i] = caps[i]
            continue
        for i in open_:
            result[i] = int(ideal[i])
        order = sorted(open_, key=lambda i: -round(ideal[i] - int(ideal[i]), 9))
        for i in order[: total - sum(result)]:
            result[i] += 1
        return result


def assigned(shapes, sparsity, distribution="erk"):
    """Connections per layer, by the definition of the distribution."""
    raw = {
        "uniform": lambda s: 1.0,
        "er": lambda s: (s[0] + s[1]) / (s[0] * s[1]),
        "erk": lambda s: sum(s) / math.prod(s),
    }[distribution]
    sizes = [math.prod(shape) for shape in shapes]
    full: set[int] = set()
    while True:
        rest = [i for i in range(len(shapes)) if i not in full]
        budget = (1 - sparsity) * sum(sizes) - sum(sizes[i] for i in full)
        scale = budget / sum(raw(shapes[i]) * sizes[i] for i in rest) if rest else 0
        over = [i for i in rest if scale * raw(shapes[i]) > 1]
        if not over:
            break
        full.add(max(over, key=lambda i: raw(shapes[i])))
    shares = [sizes[i] if i in full else scale * raw(shapes[i]) * sizes[i] for i in range(len(shapes))]
    return largest_remainder(round((1 - sparsity) * sum(sizes)), shares, sizes)


class Stream:
    """The library's convention: each draw is a stream of its own, seeded by the network's generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> torch.Tensor:
        seed = int(torch.randint(2**62, (), generator=self.generator))
        return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def top(scores, count, among=None) -> list[int]:
    """Indices of the `count` largest scores, by a plain sort."""
    among = range(len(scores)) if among is None else among
    return sorted(sorted(among, key=lambda i: -float(scores[i]))[:count])


def same_state(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same names and values, to the bit."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# ---- bad input ----


@contextmanager
def refused(*fragments: str) -> Iterator[None]:
    """A `SparsityError` of one line that contains all fragments."""
    with pytest.raises(st.SparsityError) as raised:
        yield
    message = str(raised.value)
    assert "\n" not in message
    assert all(fragment in message for fragment in fragments), message
