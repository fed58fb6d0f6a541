"""The end of a run: its networks, what they are worth, what they cost."""

from __future__ import annotations

import math
import os
import platform
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from suptickets.baselines import Ensemble, Members
from suptickets.errors import TrainingError
from suptickets.layers import LayerSparsity
from suptickets.measure.flops import flops
from suptickets.measure.predictions import Tally
from suptickets.measure.sparsity import ModelSparsity
from suptickets.training.boosters import PREDICTION_ENSEMBLES
from suptickets.training.folder import RunFolder
from suptickets.training.panel import Panel, details
from suptickets.training.saved import living

if TYPE_CHECKING:
    from suptickets.training.loop import Trainer


def finish(trainer: Trainer, folder: RunFolder) -> dict[str, Any]:
    """Score the final network and the kept tickets, write everything; returns the summary."""
    singles = _singles(trainer)
    final = _final(trainer, singles)
    summary = _summary(trainer, folder, final, singles)
    if not math.isfinite(summary["nll"]):
        raise TrainingError("the NLL of the trained network is not finite: use a lower --lr")
    about = {"settings": trainer.settings.as_dict(), "parameters": summary["parameters"]}
    alive = _living(trainer, superposed=_superposes(trainer))
    own = {**about, "nonzero": sum(alive.values()), "tickets": summary["tickets"], "living": alive}
    first = trainer.processes.first
    first(lambda: folder.save_ticket(final.state_dict(), own))
    single = {**about, "nonzero": trainer.network.nonzero, "living": _living(trainer)}
    for number, ticket in enumerate(singles, 1):
        first(partial(folder.save_ticket, ticket.state_dict(), single, number))
    first(lambda: folder.save_summary(summary))
    return summary


def _singles(trainer: Trainer) -> list[nn.Module]:
    """The tickets of the cycles, if they are kept; the network before the cycles is not one of them."""
    if trainer.tickets is None or not trainer.settings.keeps:
        return []
    return trainer.tickets.tickets[trainer.settings.include_start :]


def _final(trainer: Trainer, singles: list[nn.Module]) -> nn.Module:
    """The network of `ticket.safetensors`."""
    s, p = trainer.settings, trainer.processes
    if trainer.tickets is None:
        return trainer.network.densify()
    if s.booster == "free-tickets":  # its tickets do not share a basin
        return singles[-1]
    if s.batch_norm != "recompute":
        return trainer.tickets.ticket()
    loader = trainer.data.train_batches(s.batch_size, s.seed, s.epochs, device=p.device, dtype=trainer.dtype)
    return trainer.tickets.ticket(loader)


def _summary(
    trainer: Trainer, folder: RunFolder, final: nn.Module, singles: list[nn.Module]
) -> dict[str, Any]:
    s, total = trainer.settings, trainer.network.parameters_total
    tally, panel = trainer.tally(final), _panel(trainer, final, singles)
    together = s.booster in PREDICTION_ENSEMBLES and panel is not None
    result: Tally = panel.ensemble if together and panel is not None else tally
    superposed = _superposes(trainer)
    layers = _layers(trainer, _living(trainer, superposed=superposed and not together))
    nonzero = sum(layer["nonzero"] for layer in layers)
    names = ("data", "model", "method", "booster", "recipe", "seed", "epochs")
    return {
        "run": str(folder.path),
        **{key: getattr(s, key) for key in names},
        "target_sparsity": s.target,
        "sparsity": 1 - nonzero / total,
        "nonzero": nonzero,
        "parameters": total,
        **result.scores().as_dict(),
        **details(result),
        "before_pruning": trainer.before_pruning and trainer.before_pruning.as_dict(),
        "start": trainer.start and trainer.start.as_dict(),
        "tickets": [ticket.as_dict() for ticket in trainer.scores],
        "members": [] if panel is None or singles else [one.scores().as_dict() for one in panel.each],
        "superposed": tally.scores().as_dict() if superposed else None,
        "ensemble": panel.ensemble.scores().as_dict() if panel is not None and singles else None,
        "diversity": None if panel is None else panel.difference(),
        "explored": trainer.explored.rate,
        "layers": layers,
        "train_flops_ratio": _train_ratio(trainer),
        "test_flops_ratio": _test_ratio(trainer, singles if together else [final], layers),
        "seconds": round(time.monotonic() - trainer.began, 3),
        "command": s.command(trainer.processes.program),
        "versions": versions(),
        "hardware": hardware(trainer.processes.device, trainer.processes.world),
    }


def _panel(trainer: Trainer, final: nn.Module, singles: list[nn.Module]) -> Panel | None:
    """The predictions of the kept tickets, or of the network's members, on the test data."""
    if singles:
        return trainer.panel(Ensemble(singles))
    return trainer.panel(final) if isinstance(final, Members) else None


def _layers(trainer: Trainer, alive: dict[str, int]) -> list[dict[str, Any]]:
    """The layers, with their living connections."""
    layers = trainer.network.layers.items()
    return ModelSparsity({n: LayerSparsity(tuple(w.shape), alive[n]) for n, w in layers}).as_list()


def _superposes(trainer: Trainer) -> bool:
    """Whether the final network is superposed; with `ensemble` it is saved beside the tickets."""
    return trainer.tickets is not None and trainer.settings.booster != "free-tickets"


def _living(trainer: Trainer, *, superposed: bool = False) -> dict[str, int]:
    """The living connections of each layer, in every single ticket or in the superposed one."""
    alive = {name: layer.nonzero for name, layer in trainer.network.layers.items()}
    return alive | (trainer.tickets.counts() if superposed and trainer.tickets is not None else {})


def _train_ratio(trainer: Trainer) -> float:
    """FLOPs of the training, as a share of training the plain dense network.

    In training, a batch is divided among the members of BatchEnsemble; in the pass that was counted, it is
    repeated for each.
    """
    s = trainer.settings
    passes = s.members if s.booster == "batch-ensemble" else 1
    return trainer.cost.ratio * trainer.relative / passes + trainer.teaching


def _test_ratio(trainer: Trainer, networks: list[nn.Module], layers: list[dict[str, Any]]) -> float:
    """FLOPs of a prediction, by living connections, as a share of the plain dense network."""
    final = {layer["name"]: layer["nonzero"] for layer in layers}
    told = final if len(networks) == 1 else _living(trainer)
    each = (flops(one, trainer.example()).living(living(one, told).densities) for one in networks)
    return sum(one.ratio for one in each) * trainer.relative


def versions() -> dict[str, str]:
    """The versions of the software that decides a result."""
    from suptickets import __version__

    known = {"suptickets": __version__, "python": platform.python_version()}
    return {**known, "torch": str(torch.__version__), "numpy": np.__version__}


def hardware(device: torch.device, processes: int = 1) -> str:
    """What the run was done on, in a few words."""
    each = f"{torch.get_num_threads()} of {os.cpu_count()} CPU threads, {platform.machine()}"
    if device.type == "cuda":
        each = torch.cuda.get_device_name(device)
    return each if processes == 1 else f"{processes} processes, each {each}"
