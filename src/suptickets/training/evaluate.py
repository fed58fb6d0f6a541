"""`evaluate`: how good networks of runs, or of ticket files, are on some data, each alone and together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from suptickets.baselines import Members
from suptickets.data import Data, load_data
from suptickets.data.folder import FolderData
from suptickets.errors import SparsityError, reason
from suptickets.measure.flops import flops
from suptickets.measure.predictions import Tally
from suptickets.measure.sparsity import ModelSparsity
from suptickets.training import build, saved
from suptickets.training.panel import Panel, details
from suptickets.training.processes import connect, is_main
from suptickets.training.progress import print_plain
from suptickets.training.saved import Saved
from suptickets.training.verdict import SUPERPOSING, verdict

TEST_BATCH = 1000
Predict = Callable[[Tensor], list[Tensor]]


def evaluate(
    paths: Sequence[Path],
    data: str | None = None,
    data_dir: str | None = None,
    device: str = "auto",
    *,
    tickets: bool = False,
    model: str | None = None,
    holdout: float = 0.0,
) -> dict[str, Any]:
    """Scores, calibration, sparsity and FLOPs of networks; of several, also how they differ and do together.

    A path is a run's folder (with `tickets`: its single tickets) or a ticket file. `model` names the function
    that makes networks which are not the library's own: one that a file names is never imported. With a
    `holdout`, networks are evaluated on that share of the training data instead of on the test data.
    """
    found = _found(paths, tickets, model)
    name = data or _common([one.settings.data for one in found])
    source = _data(name, data_dir or found[0].settings.data_dir, holdout)
    where = connect(device).device
    models = [one.load(source, where) for one in found]
    if len(found) > 1:
        return _compared(found, models, source, where)
    one, own = found[0], found[0].settings
    tally, result = _alone(one, models[0], source, where)
    elsewhere = isinstance(source, FolderData) and not _same(data_dir, own.data_dir)
    if (name, holdout) == (own.data, own.holdout) and not elsewhere:
        _judge(one, tally)
    return result


def _found(paths: Sequence[Path], tickets: bool, model: str | None) -> list[Saved]:
    """What is in these places."""
    read = saved.singles if tickets else lambda path: [saved.result(path)]
    found = [one for path in paths for one in read(path)]
    if model is not None and not any(":" in one.settings.model for one in found):
        raise SparsityError("--model is for networks that are not the library's own: leave it out")
    return [one.named(model) for one in found]


def _alone(one: Saved, model: nn.Module, data: Data, device: torch.device) -> tuple[Tally, dict[str, Any]]:
    """What is counted of one network, and all that is reported of it: of members, how they differ too."""
    if isinstance(model, Members):
        predict = _in_precision(one, model.members, device)
        panel = _panel(lambda x: list(predict(x).unbind()), model.size, one, data, device)
        tally = panel.ensemble
    else:
        panel = _panel(_each([one], [model], device), 1, one, data, device)
        (tally,) = panel.each
    return tally, {**_network(one, model, tally, data), "diversity": panel.difference()}


def _compared(
    found: Sequence[Saved], models: Sequence[nn.Module], data: Data, device: torch.device
) -> dict[str, Any]:
    """Several networks: each of them, how they differ, what they predict together."""
    panel = _panel(_each(found, models, device), len(found), found[0], data, device)
    return {
        "networks": [
            {"path": str(one.path), **_network(one, network, tally, data)}
            for one, network, tally in zip(found, models, panel.each, strict=True)
        ],
        "diversity": panel.difference(),
        "ensemble": {**panel.ensemble.scores().as_dict(), **details(panel.ensemble)},
    }


@torch.no_grad()
def _panel(predict: Predict, size: int, first: Saved, data: Data, device: torch.device) -> Panel:
    """Count what so many predictors predict on all test images."""
    panel, dtype = Panel(size, device), build.DTYPES[build.precision(first.settings, device)]
    for x, y in data.test_batches(TEST_BATCH, device=device, dtype=dtype):
        panel.add(predict(x), y)
    return panel


def _data(name: str, folder: str | None, holdout: float) -> Data:
    try:
        return load_data(name, folder, holdout=holdout)
    except SparsityError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # such as a name that no folder can have
        raise SparsityError(f"cannot read {name} from {folder!r}: {reason(error)}") from error


def _common(names: Sequence[str]) -> str:
    if len(set(names)) > 1:
        known = ", ".join(sorted(set(names)))
        raise SparsityError(f"these networks were trained on different data ({known}): say which with --data")
    return names[0]


def _each(found: Sequence[Saved], models: Sequence[nn.Module], device: torch.device) -> Predict:
    """The logits of each network, each in the precision that it was trained in."""
    single = [_in_precision(one, model, device) for one, model in zip(found, models, strict=True)]
    return lambda x: [predict(x) for predict in single]


def _in_precision(
    one: Saved, function: Callable[[Tensor], Tensor], device: torch.device
) -> Callable[[Tensor], Tensor]:
    precision = build.precision(one.settings, device)

    def predict(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            return function(x.to(build.DTYPES[precision]))

    return predict


def _network(one: Saved, model: nn.Module, tally: Tally, data: Data) -> dict[str, Any]:
    """All that is reported of a network; for several that predict together, `nonzero` is their mean."""
    alive = one.living(model)
    first = {name.removeprefix("networks.0."): layer for name, layer in alive.layers.items()}
    layers = {n: layer for n, layer in first.items() if not (one.together and n.startswith("networks."))}
    return {
        **tally.scores().as_dict(),
        "sparsity": alive.sparsity,
        "nonzero": round(alive.nonzero / len(one.files)),
        **details(tally),
        **_forward(one, model, data, alive),
        "explored": one.explored,
        "layers": ModelSparsity(layers).as_list(),
    }


def _forward(one: Saved, model: nn.Module, data: Data, alive: ModelSparsity) -> dict[str, Any]:
    """FLOPs of a prediction, and their share of those of the plain dense network of full width."""
    example = next(model.parameters()).new_zeros(1, *data.shape)
    counted, networks = flops(model, example).living(alive.densities), len(one.files)
    dense = counted.dense // networks
    plain = round(dense / build.relative(one.settings, data, dense))
    ratio = counted.sparse / plain if plain else 1.0
    return {"forward_flops_dense": plain, "forward_flops": counted.sparse, "test_flops_ratio": ratio}


def _same(folder: str | None, own: str | None) -> bool:
    """Whether `folder` is that of the run's own data; None stands for it."""
    return folder is None or (own is not None and Path(folder).resolve() == Path(own).resolve())


def _judge(one: Saved, tally: Tally) -> None:
    """Say so if superposing did not help on the data that the run's tickets were evaluated on."""
    tickets = one.tickets if one.settings.booster in SUPERPOSING else []
    worse = verdict(tally.scores().as_dict(), tickets, one.settings.booster)
    if worse is not None and is_main():
        print_plain(worse)
