"""What each process of test_distributed.py does: every scenario once, the results in a JSON file per rank.

Usage: python -m torch.distributed.run --standalone --nproc-per-node 2 distributed_worker.py FOLDER

Each scenario has a process group of its own, so that one that fails or hangs leaves the others alone.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import suptickets as st

RANKS = 2
STEPS = 12
HALF = 6  # samples of one rank in one batch
METHODS: dict[str, Callable[[int], st.Method]] = {
    "dense": lambda rank: st.Dense(),
    "static": lambda rank: st.Static(0.8),
    "snip": lambda rank: st.SNIP(0.8, data=[batch(rank, 99, float32=True)], loss=F.cross_entropy),
    "set": lambda rank: st.SET(0.8, interval=3),
    "rigl": lambda rank: st.RigL(0.8, interval=3),
    "granet": lambda rank: st.GraNet(0.9, interval=3, prune_end=9),
    "gmp": lambda rank: st.GMP(0.9, interval=3, prune_end=9),
    "snfs": lambda rank: st.SNFS(0.8, interval=3),
    "dsr": lambda rank: st.DSR(0.8, interval=3, threshold=0.05),
}


# ---- models, data, training: also used by the single process of the tests ----


def convnet() -> nn.Module:
    """With batch norm, in float32."""
    layers = (nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 16), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(16, 4))


def mlp(bias: bool = True) -> nn.Module:
    """Without batch norm, in float64: a batch and its halves give the same gradient."""
    layers = (nn.Flatten(), nn.Linear(36, 20, bias=bias), nn.Tanh(), nn.Linear(20, 4, bias=bias))
    return nn.Sequential(*layers).double()


def batch(rank: int, step: int, *, float32: bool = False) -> tuple[Tensor, Tensor]:
    """The samples that a rank sees at a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(HALF, 1, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (HALF,), generator=generator)
    return (x.float() if float32 else x), y


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    """The samples that all ranks together see at a step."""
    xs, ys = zip(*[batch(rank, step) for rank in range(RANKS)], strict=True)
    return torch.cat(xs), torch.cat(ys)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def build(method: st.Method, model: nn.Module) -> tuple[st.SparseNetwork, torch.optim.Optimizer]:
    optimizer = sgd(model)
    return st.sparsify(model, method, optimizer), optimizer


def train(
    network: st.SparseNetwork,
    optimizer: torch.optim.Optimizer,
    data: Callable[[int], tuple[Tensor, Tensor]],
    forward: nn.Module | None = None,
    steps: int = STEPS,
) -> list[int]:
    """Train; returns the number of living connections after each step."""
    counts = []
    for step in range(steps):
        x, y = data(step)
        optimizer.zero_grad()
        F.cross_entropy((network.model if forward is None else forward)(x), y).backward()
        optimizer.step()
        counts.append(network.nonzero)
    return counts


def train_accumulating(
    network: st.SparseNetwork,
    optimizer: torch.optim.Optimizer,
    data: Callable[[int], tuple[Tensor, Tensor]],
    forward: nn.Module | None = None,
    closure: bool = False,
) -> list[int]:
    """Two backward passes a step, the first in `no_sync`, then clipping; the rest in a closure, or not."""
    counts = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with forward.no_sync() if isinstance(forward, DDP) else contextlib.nullcontext():
            _backward(network, data(2 * step), forward)

        def rest(step: int = step) -> None:
            _backward(network, data(2 * step + 1), forward)
            nn.utils.clip_grad_norm_(network.model.parameters(), 0.5)

        optimizer.step(rest) if closure else (rest(), optimizer.step())
        counts.append(network.nonzero)
    return counts


def _backward(network: st.SparseNetwork, batch: tuple[Tensor, Tensor], forward: nn.Module | None) -> None:
    F.cross_entropy((network.model if forward is None else forward)(batch[0]), batch[1]).backward()


def contents(network: st.SparseNetwork, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that ranks must agree on."""
    return {
        "positions": {name: w.rows().tolist() for name, w in network.weights.items()},
        "parameters": {n: p.detach().flatten().tolist() for n, p in network.model.named_parameters()},
        "momentum": [s["momentum_buffer"].flatten().tolist() for s in optimizer.state.values()],
    }


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of all tensors that are averaged, or that the wrapper hands out, inside."""
    sizes: list[int] = []
    average, hand_out = dist.all_reduce, dist._broadcast_coalesced

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return average(tensor, *args, **kwargs)

    def broadcast(group: Any, tensors: list[Tensor], *args: Any) -> Any:
        sizes.extend(tensor.numel() for tensor in tensors)
        return hand_out(group, tensors, *args)

    dist.all_reduce, dist._broadcast_coalesced = all_reduce, broadcast
    try:
        yield sizes
    finally:
        dist.all_reduce, dist._broadcast_coalesced = average, hand_out


# ---- the scenarios: what they return is the result; an exception is one too ----


def method(name: str, rank: int, group: Any) -> dict[str, Any]:
    """Train with a method, with other initial weights, other connections and other data on each rank."""
    torch.manual_seed(rank)
    network, optimizer = build(METHODS[name](rank), convnet())
    before = contents(network, optimizer)["positions"]
    ddp = DDP(network.model, process_group=group)
    train(network, optimizer, lambda step: batch(rank, step, float32=True), ddp, steps=1)
    first = contents(network, optimizer)["positions"]
    counts = train(network, optimizer, lambda step: batch(rank, step + 1, float32=True), ddp)
    network.check()
    return {"before": before, "first": first, "counts": counts, **contents(network, optimizer)}


def halves(name: str, rank: int, group: Any, wrap: Callable[..., nn.Module] = DDP, bias: bool = True) -> Any:
    """Each rank has its half of every batch."""
    torch.manual_seed(0)
    network, optimizer = build(METHODS[name](rank), mlp(bias))
    train(network, optimizer, lambda step: batch(rank, step), wrap(network.model, process_group=group))
    network.check()
    return contents(network, optimizer)


def thawed(rank: int, group: Any) -> dict[str, Any]:
    """A layer that is frozen when it is made sparse, and trained later."""
    torch.manual_seed(0)
    model = mlp()
    model[1].weight.requires_grad_(False)
    optimizer = sgd(model)
    network = st.sparsify(model, METHODS["rigl"](rank), optimizer, include=["1", "3"])
    model[1].weight_connections.values.requires_grad_()
    train(network, optimizer, lambda step: batch(rank, step), DDP(model, process_group=group))
    network.check()
    return contents(network, optimizer)


def compiled_inside(model: nn.Module, **options: Any) -> nn.Module:
    return DDP(torch.compile(model, backend="aot_eager"), **options)


def compiled_outside(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(DDP(model, **options), backend="aot_eager")


def accumulation(rank: int, group: Any, closure: bool = False) -> dict[str, Any]:
    """GraNet with no_sync, accumulation and clipping."""
    torch.manual_seed(0)
    network, optimizer = build(METHODS["granet"](rank), mlp())
    ddp = DDP(network.model, process_group=group)
    with counted() as sizes:
        counts = train_accumulating(network, optimizer, lambda step: batch(rank, step), ddp, closure)
    network.check()
    return {"counts": counts, "sent": sum(sizes), **contents(network, optimizer)}


def traffic(rank: int, group: Any) -> dict[str, Any]:
    """Numbers sent in each of four steps; GraNet explores, and shrinks, after the third."""
    torch.manual_seed(0)
    network, optimizer = build(METHODS["granet"](rank), mlp())
    ddp = DDP(network.model, process_group=group)
    ddp.register_comm_hook(group, allreduce_hook)  # so that the dense parameters are counted too
    steps = []
    for step in range(4):
        living = sum(parameter.numel() for parameter in network.model.parameters())
        x, y = batch(rank, step)
        with counted() as sizes:
            train(network, optimizer, lambda _, now=(x, y): now, ddp, steps=1)
        steps.append({"living": living, "sent": sum(sizes)})
    return {"steps": steps, "dense": sum(w.size for w in network.weights.values())}


def overflow(rank: int, group: Any) -> dict[str, Any]:
    """One rank's gradient overflows at the third step, after which RigL would explore."""
    torch.manual_seed(0)
    network, optimizer = build(METHODS["rigl"](rank), mlp())
    ddp, scaler = DDP(network.model, process_group=group), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        x, y = batch(rank, step)
        factor = float("inf") if (rank, step) == (1, 2) else 1.0
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(ddp(x), y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    network.check()
    return {"step": network.step, **contents(network, optimizer)}


def outer(rank: int, group: Any) -> None:
    """The wrapper is given a module around the sparse model."""
    network, optimizer = build(METHODS["rigl"](rank), mlp())
    ddp = DDP(nn.Sequential(network.model), process_group=group)
    train(network, optimizer, lambda step: batch(rank, step), ddp)


def late(rank: int, group: Any) -> None:
    """The model is made sparse inside a wrapper that exists already."""
    model = mlp()
    ddp = DDP(model, process_group=group)
    network, optimizer = build(METHODS["rigl"](rank), model)
    train(network, optimizer, lambda step: batch(rank, step), ddp)


def joined(rank: int, group: Any) -> None:
    """Ranks with different numbers of batches."""
    network, optimizer = build(METHODS["rigl"](rank), mlp())
    ddp = DDP(network.model, process_group=group)
    with ddp.join():
        train(network, optimizer, lambda step: batch(rank, step), ddp)


def no_wrapper(rank: int, group: Any) -> dict[str, Any]:
    """A process group, but no wrapper."""
    torch.manual_seed(0)
    network, optimizer = build(METHODS["rigl"](rank), mlp())
    with counted() as sizes, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(network, optimizer, lambda step: batch(rank, step))
    network.check()
    said = [str(one.message) for one in told if "there are several processes" in str(one.message)]
    return {"sent": sum(sizes), "told": said, **contents(network, optimizer)}


def copied(rank: int, group: Any) -> dict[str, Any]:
    """A copy of a sparse model, which has no network, in a wrapper."""
    torch.manual_seed(rank)
    model = copy.deepcopy(build(METHODS["static"](rank), mlp())[0].model)
    optimizer, ddp = sgd(model), DDP(model, process_group=group)
    for step in range(3):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return {"weight": model[1].weight.flatten().tolist(), "bias": model[1].bias.tolist()}


class Checkpointed(nn.Module):
    """A layer that is used three times, each in a backward pass of its own within the outer one."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.nested = nested
        self.first, self.shared, self.last = nn.Linear(36, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=True) if self.nested else self.block(x)
        return self.last(x)


def checkpointed(rank: int, group: Any) -> float:
    """How far the gradient of the shared layer is from that of the whole batch."""
    torch.manual_seed(0)
    network, _ = build(METHODS["static"](rank), Checkpointed(nested=True).double())
    x, y = batch(rank, 0)
    ddp = DDP(network.model, process_group=group, static_graph=True)
    F.cross_entropy(ddp(x), y).backward()
    plain = network.densify()
    plain.nested = False
    x, y = whole_batch(0)
    F.cross_entropy(plain(x), y).backward()
    weight = network.weights["shared"]
    expected = plain.shared.weight.grad.flatten()[weight.rows().long()]
    return float((weight.values.grad.flatten() - expected).abs().max() / expected.abs().max())


def differing(what: str, rank: int, group: Any) -> None:
    """One rank's values or positions are changed behind the network's back."""
    torch.manual_seed(0)
    network, optimizer = build(METHODS["rigl"](rank), mlp())
    train(network, optimizer, lambda step: batch(rank, step), DDP(network.model, process_group=group))
    network.check()
    weight = network.weights["1"]
    rows, values = weight.rows().clone(), weight.values.detach().clone()
    if rank == 1 and what == "values":
        values[5] += 1e-12
    if rank == 1 and what == "positions":
        free = sorted(set(range(weight.size)) - set(rows.tolist()))[0]
        rows = rows.index_fill(0, torch.tensor(3), free).sort().values
    weight.connect(rows, values)
    network.check()


OPTIONS: dict[str, dict[str, Any]] = {
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "no buffers": {"broadcast_buffers": False},
}
SCENARIOS: dict[str, Callable[[int, Any], Any]] = {
    **{f"method {name}": partial(method, name) for name in METHODS},
    **{f"halves {name}": partial(halves, name) for name in METHODS},
    **{f"option {o}": partial(halves, "rigl", wrap=partial(DDP, **OPTIONS[o])) for o in OPTIONS},
    "no bias": partial(halves, "rigl", bias=False),
    "accumulation": accumulation,
    "accumulation closure": partial(accumulation, closure=True),
    "thawed": thawed,
    "traffic": traffic,
    "overflow": overflow,
    "outer": outer,
    "late": late,
    "joined": joined,
    "no wrapper": no_wrapper,
    "copied": copied,
    "checkpointed": checkpointed,
    "differing values": partial(differing, "values"),
    "differing positions": partial(differing, "positions"),
    "unused": partial(halves, "rigl", wrap=partial(DDP, find_unused_parameters=True)),
    "unused dense": partial(halves, "dense", wrap=partial(DDP, find_unused_parameters=True)),
    "compiled inside": partial(halves, "rigl", wrap=compiled_inside),
    "compiled outside": partial(halves, "rigl", wrap=compiled_outside),
}


def main(folder: Path) -> None:
    """Run all scenarios, each in a process group of its own; write what is known after each of them."""
    limit = timedelta(seconds=10)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=limit)
    rank, results = dist.get_rank(), {}
    for name, scenario in SCENARIOS.items():
        group = dist.new_group(timeout=limit)
        try:
            results[name] = {"returned": scenario(rank, group)}
        except Exception as error:
            results[name] = {"raised": type(error).__name__, "message": str(error)}
            results[name]["where"] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
