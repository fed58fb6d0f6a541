"""Weights that are rewired together come out as if each had been rewired by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import suptickets as st
from suptickets import rewiring
from suptickets.layout import marks, remap
from suptickets.network import SparseNetwork
from suptickets.rewiring import Change, best

CPU = torch.device("cpu")
ROW_MAJOR, CHANNELS_LAST = torch.contiguous_format, torch.channels_last


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Rprop, whose initial state depends on the rate: 0.01 for every other parameter, 0.02 for the rest."""
    parameters = list(parameters)
    return torch.optim.Rprop([{"params": parameters[i::2], "lr": 0.01 * (i + 1)} for i in (0, 1)])


OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "two groups": two_groups,
}


class Sensitive(st.RigL):
    """Of products of weights and gradients no two are the same; of Rprop's weights some are."""

    prune = "sensitivity"


def counts(network: SparseNetwork) -> dict[str, int]:
    return {name: weight.nonzero for name, weight in network.weights.items()}


def less(network: SparseNetwork) -> None:
    network.prune({name: count - count // 5 for name, count in counts(network).items()}, by="sensitivity")


def nothing_left(network: SparseNetwork) -> None:
    names = list(network.weights)
    network.prune({names[1]: 0, names[2]: 3, names[5]: counts(network)[names[5]]}, by="sensitivity")


def more(network: SparseNetwork) -> None:
    sizes = {name: weight.size for name, weight in network.weights.items()}
    network.grow({n: min(c + 7 + c // 3, sizes[n]) for n, c in counts(network).items()}, by="gradient")


def other_shares(network: SparseNetwork) -> None:
    kept = {name: count // (i + 1) for i, (name, count) in enumerate(counts(network).items())}
    network.rewire(
        kept, {n: c + (i % 2) * 4 for i, (n, c) in enumerate(kept.items())}, "sensitivity", "gradient"
    )


CHANGES = {"nothing else": lambda _: None, "less": less, "nothing left": nothing_left, "more": more}
CHANGES["other shares"] = other_shares


def trained(
    optimizer_name: str, layout: torch.memory_format, action: str, device: str = "cpu"
) -> dict[tuple[str, str], Tensor]:
    """All that belongs to connections after six steps: the fourth explores, `action` follows the fifth."""
    torch.manual_seed(3)
    convs = [nn.Conv2d(n, m, 3, padding=1) for n, m in ((3, 8), (8, 12), (12, 12), (12, 12))]
    layers = [
        *convs,
        nn.Conv2d(12, 5, (1, 3)),
        nn.Conv2d(5, 7, 1),
        nn.Flatten(),
        nn.Linear(7 * 6 * 4, 30),
        nn.Linear(30, 4),
    ]
    model = nn.Sequential(*layers).double().to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    network = st.sparsify(model, Sensitive(0.7, interval=4), optimizer, seed=1)
    model.to(device)  # with the connections that were drawn on the CPU
    generator = torch.Generator().manual_seed(5)
    for step in range(6):
        x = torch.randn(6, 3, 6, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(4, (6,), generator=generator)
        if step == 4:
            network.request_gradient()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        if step == 4:
            CHANGES[action](network)
            network.release_gradient()
    network.check()
    return {key: tensor for name in network.weights for key, tensor in belongings(network, name).items()}


def belongings(network: SparseNetwork, name: str) -> dict[tuple[str, str], Tensor]:
    weight = network.weights[name]
    assert network.optimizer is not None and weight.values.grad is not None
    found = {"rows": weight.rows(), "values": weight.values.detach(), "gradient": weight.values.grad}
    found |= {key: value for key, value in network.optimizer.state[weight.values].items()}
    return {(name, key): value for key, value in found.items()}


@pytest.mark.parametrize("action", CHANGES)
@pytest.mark.parametrize("layout", [ROW_MAJOR, CHANNELS_LAST], ids=["row-major", "channels_last"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_together_as_alone(
    optimizer: str, layout: torch.memory_format, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = trained(optimizer, layout, action)
    monkeypatch.setattr(rewiring, "ALONE", set())
    for scores in (rewiring.SCORES, 1):  # weights of one size compared at once, or not
        monkeypatch.setattr(rewiring, "SCORES", scores)
        together = trained(optimizer, layout, action)
        assert alone.keys() == together.keys()
        for key in alone:
            torch.testing.assert_close(together[key], alone[key], rtol=0, atol=0, msg=str(key))


def test_neighbours_of_one_size_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(*sizes) for sizes in ((6, 6), (6, 6), (4, 9), (6, 4), (6, 6))))
    network = st.sparsify(model, st.Static(0.5), torch.optim.SGD(model.parameters(), lr=0.1))
    changes = [Change(weight, 2, 5) for weight in network.weights.values()]
    assert [same for _, same in rewiring._Together(changes, network.state)._alike()] == [[0, 1, 2], [3], [4]]
    changes[1] = Change(changes[1].weight, 2, 6)
    assert [same for _, same in rewiring._Together(changes, network.state)._alike()] == [
        [0],
        [1],
        [2],
        [3],
        [4],
    ]
    monkeypatch.setattr(rewiring, "SCORES", 72)
    changes[1] = changes[0]
    assert [same for _, same in rewiring._Together(changes, network.state)._alike()] == [
        [0, 1],
        [2],
        [3],
        [4],
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("action", CHANGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_a_gpu_as_on_a_cpu(optimizer: str, action: str) -> None:
    there, here = (trained(optimizer, CHANNELS_LAST, action, device) for device in ("cuda", "cpu"))
    assert there.keys() == here.keys()
    for key in here:
        torch.testing.assert_close(there[key].to(CPU), here[key], rtol=1e-6, atol=1e-9, msg=str(key))


def test_alike_go_together_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions and linear layers have other dimensions; a list is cut where it holds too many."""
    monkeypatch.setattr(rewiring, "ALONE", set())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(10, 10), nn.Conv2d(4, 4, 1), nn.Linear(10, 5))
    network = st.sparsify(model, st.Static(0.5), torch.optim.SGD(model.parameters(), lr=0.1))
    changes = [Change(weight, 1, weight.nonzero) for weight in network.weights.values()]

    def groups() -> list[list[str]]:
        return [[c.weight.name for c in g] for g in rewiring._alike(changes, network.state)]

    assert groups() == [["0", "2"], ["1", "3"]]
    monkeypatch.setattr(rewiring, "CONNECTIONS", counts(network)["0"])
    assert groups() == [["0"], ["2"], ["1"], ["3"]]
    monkeypatch.setattr(rewiring, "CONNECTIONS", 2**22)
    monkeypatch.setattr(rewiring, "POSITIONS", 120)
    assert groups() == [["0"], ["2"], ["1"], ["3"]]
    monkeypatch.setattr(rewiring, "POSITIONS", 150)
    assert groups() == [["0", "2"], ["1", "3"]]


def test_state_stays_in_its_place_while_its_count_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights that are rewired together, too: who has captured a step knows it by its place."""
    monkeypatch.setattr(rewiring, "ALONE", set())
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    network = st.sparsify(model, st.SET(0.5), optimizer, seed=0)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    before = {n: optimizer.state[w.values]["momentum_buffer"].data_ptr() for n, w in network.weights.items()}
    now = counts(network)
    network.rewire({n: c // 2 for n, c in now.items()}, {**now, "1": now["1"] - 3})
    after = {n: optimizer.state[w.values]["momentum_buffer"].data_ptr() for n, w in network.weights.items()}
    assert {name for name in before if before[name] != after[name]} == {"1"}


def test_the_best_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    for sizes in ((5, 1, 300), (1,), (40, 40), (7, 0, 3)):
        scores = [torch.randn(size, generator=generator) for size in sizes]
        wanted = [size // 2 for size in sizes]
        chosen, start = best(scores, wanted), 0
        expected = []
        for part, count in zip(scores, wanted, strict=True):
            expected += [start + i for i in sorted(range(len(part)), key=lambda i: -float(part[i]))[:count]]
            start += len(part)
        assert sorted(chosen.tolist()) == sorted(expected)


def test_marks() -> None:
    assert marks([2, 0, 3, 1, 0], CPU).tolist() == [0, 0, 2, 2, 2, 3]
    assert marks([0, 0], CPU).tolist() == []


def test_indices_of_tensors_of_other_sizes() -> None:
    """A remap with one size for each index is the one with that size."""
    shapes, order = [(4, 3, 2, 5), (2, 7, 1, 3), (6, 2, 3, 3)], (0, 2, 3, 1)
    sizes = [torch.tensor([shape[d] for shape in shapes for _ in range(12)]) for d in range(4)]
    index = torch.arange(12).repeat(3)
    expected = torch.cat([remap(torch.arange(12), shape, order) for shape in shapes])
    assert remap(index, sizes, order).tolist() == expected.tolist()
