"""How large a checkpoint is: what is in it has the size of the sparse network, and nothing is in it twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from suptickets.data.base import ArrayData
from suptickets.training.folder import RunFolder
from suptickets.training.loop import Trainer
from suptickets.training.plain import PlainStep
from suptickets.training.processes import Processes
from suptickets.training.settings import resolve


def images(count: int) -> ArrayData:
    x, y = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (count,))
    return ArrayData("images", 10, x, y, x, y, (0.5,) * 3, (0.5,) * 3)


def size(path: Path, method: str, steps: int) -> int:
    """Bytes of the checkpoint after so many steps; the first cycle of four begins after four."""
    given = {
        "model": "vgg16",
        "method": method,
        "sparsity": 0.95,
        "batch_size": 2,
        "epochs": 6,
        "interval": 50,
    }
    settings = resolve({**given, "cycles": 2, "cycle_epochs": 2, "evaluate_every": 0})
    trainer = Trainer(settings, images(4), Processes(0, 1, torch.device("cpu")))
    step = PlainStep(trainer)
    for x, y in list(trainer.data.train_batches(2, 1, 0)) * (steps // 2):
        step.step(x, y)
    folder = RunFolder(path)
    folder.checkpoint.parent.mkdir(parents=True)
    folder.save_checkpoint({**trainer.state_dict(), "seconds": 0.0}, trainer.settings)
    state = torch.load(folder.checkpoint, weights_only=True)
    assert state["settings"]["sparsity"] == settings.sparsity
    check(state, len(trainer.network.weights), inside=steps > 4)
    return folder.checkpoint.stat().st_size


def check(state: dict[str, Any], sparse: int, *, inside: bool) -> None:
    positions = [value for key, value in state["network"]["model"].items() if key.endswith(".positions")]
    assert len(positions) == sparse and all(rows.dtype == torch.int32 for rows in positions)
    assert state["tickets"]["kept"] == []
    assert (state["tickets"]["average"] is not None) == inside
    if inside:
        rows = [connections["rows"] for connections in state["tickets"]["average"]["sparse"].values()]
        assert all(each.dtype == torch.int32 for each in rows)


@pytest.mark.slow
def test_checkpoint_of_a_sparse_vgg16(tmp_path: Path) -> None:
    """95 % sparse with momentum: under 0.09 of the dense one's bytes, under 0.14 inside the cycles."""
    dense = size(tmp_path / "dense", "dense", 2)
    assert dense > 2 * 4 * 14_990_000  # weights and momentum
    assert size(tmp_path / "sparse", "rigl", 2) < 0.09 * dense
    assert size(tmp_path / "inside", "rigl", 10) < 0.14 * dense
