"""What each process of the distributed tests in test_tickets.py does; the results in a JSON file per rank.

Usage: python -m torch.distributed.run --standalone --nproc-per-node 2 tickets_worker.py FOLDER
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import suptickets as st

STEPS = 16  # four, then three cycles of four
SCENARIOS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rigl cia": (lambda: st.RigL(0.8, interval=2), {}),
    "rigl caa end": (lambda: st.RigL(0.8, interval=2), {"rule": "caa", "prune_when": "end"}),
    "set cima": (lambda: st.SET(0.8, interval=2), {"rule": "cima", "explore_at": "end"}),
    "static cia": (lambda: st.Static(0.8), {"prune": "layer"}),
    "snfs caa": (lambda: st.SNFS(0.8, interval=2), {"rule": "caa"}),
    "dense cia": (lambda: st.Dense(), {}),
}
MODELS = {
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 16), nn.Linear(16, 4)
    ),
    "no batch norm": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 20), nn.Tanh(), nn.Linear(20, 4)
    ).double(),
}


def batch(rank: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The samples that a rank sees at a step; a rank's have a mean of their own."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = rank + torch.randn(6, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(4, (6,), generator=generator)


def train(scenario: str, kind: str, rank: int | None) -> st.SupTickets:
    """One training; `rank=None` sees the data of both ranks."""
    method, options = SCENARIOS[scenario]
    torch.manual_seed(0 if rank is None else rank)  # DistributedDataParallel lets rank 0 decide
    model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    network = st.sparsify(model, method(), optimizer, seed=rank or 0)
    tickets = st.SupTickets(network, STEPS, 4, 3, (0.005, 0.05), **options)
    wrapped = model if rank is None else DistributedDataParallel(model)
    dtype = next(model.parameters()).dtype
    for step in range(STEPS):
        halves = [batch(r, step, dtype) for r in ((0, 1) if rank is None else (rank,))]
        x, y = (torch.cat(part) for part in zip(*halves, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return tickets


def report(tickets: st.SupTickets, rank: int) -> dict[str, Any]:
    ticket = tickets.ticket()
    state = ticket.state_dict()
    dtype = next(ticket.parameters()).dtype
    return {
        "data": digest(batch(rank, 0, dtype)[0]),
        "explored": tickets.explored,
        "collected": tickets.collected,
        "nonzero": sum(int(p.count_nonzero()) for p in ticket.parameters() if p.dim() > 1),
        "target": tickets.network.nonzero,
        "ticket": {key: digest(value) for key, value in state.items()},
        "values": {key: value.flatten().tolist() for key, value in state.items()},
    }


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    reports = {}
    for scenario, kind in itertools.product(SCENARIOS, MODELS):
        try:
            reports[f"{scenario}, {kind}"] = report(train(scenario, kind, rank), rank)
        except Exception:  # the same on both ranks, or the other one waits until it is stopped
            reports[f"{scenario}, {kind}"] = {"error": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
