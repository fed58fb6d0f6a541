"""`evaluate`: what a run's ticket, or a ticket file, is worth on data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from suptickets.data import load_data
from suptickets.errors import SparsityError
from suptickets.measure.predictions import Tally
from suptickets.training import build
from suptickets.training.folder import RunFolder, read_ticket
from suptickets.training.loop import TEST_BATCH
from suptickets.training.processes import connect
from suptickets.training.progress import print_plain
from suptickets.training.settings import build as settings_from
from suptickets.training.verdict import verdict


def evaluate(
    path: Path, data: str | None = None, data_dir: str | None = None, device: str = "auto"
) -> dict[str, Any]:
    """Accuracy, NLL, ECE and sparsity of the final network of a run."""
    file = RunFolder(path).ticket if path.is_dir() else path
    if not file.exists():
        raise SparsityError(f"there is no ticket at {file}: give a finished run's folder, or a ticket file")
    state, about = read_ticket(file)
    if not {"settings", "nonzero", "parameters"} <= about.keys() or not isinstance(about["settings"], dict):
        raise SparsityError(f"{file} does not say which model it is: it was not written by suptickets train")
    settings = settings_from(about["settings"])
    settings = replace(settings, data=data or settings.data, data_dir=data_dir or settings.data_dir)
    processes, source = connect(device), load_data(settings.data, settings.data_dir)
    precision = build.precision(settings, processes.device)
    dtype = build.DTYPES[precision]
    model = build.model(settings, source).to(processes.device, dtype).eval()
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise SparsityError(
            f"{file} does not fit {settings.model} on {settings.data}: {str(error).splitlines()[-1].strip()}"
        ) from error
    tally = Tally(processes.device)
    with torch.no_grad(), torch.autocast(processes.device.type, torch.bfloat16, enabled=precision == "bf16"):
        for x, y in source.test_batches(TEST_BATCH, device=processes.device, dtype=dtype):
            tally.add(model(x), y)
    same = settings.data == about["settings"]["data"]
    worse = verdict(tally.scores().as_dict(), about.get("tickets", []) if same else [])
    if worse is not None:
        print_plain(worse)
    sparsity = 1 - about["nonzero"] / about["parameters"]
    return {**tally.scores().as_dict(), "sparsity": sparsity, "nonzero": about["nonzero"]}
