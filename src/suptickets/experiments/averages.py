"""What is read off a finished run without training: its own result, and other ways to combine its tickets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from suptickets import given
from suptickets.batch_norm import recompute
from suptickets.data import Data
from suptickets.experiments.plan import AVERAGING, Reading
from suptickets.measure.predictions import SCORES
from suptickets.superpose import Superposition
from suptickets.training import build, saved
from suptickets.training.evaluate import evaluate
from suptickets.training.files import read_mapping
from suptickets.training.folder import RunFolder, read_ticket
from suptickets.training.processes import connect
from suptickets.training.settings import Settings, place

Measures = dict[str, Any]
TRUNK = "trunk.json"  # in the folder of a fork
# Measures that all ways to combine the tickets of a run have in common.
SHARED = (
    *("data", "model", "method", "recipe", "seed", "epochs", "target_sparsity", "sparsity", "nonzero"),
    *("parameters", "start", "train_flops_ratio", "seconds"),
)


class Finished:
    """A finished run."""

    def __init__(self, folder: RunFolder, settings: Settings) -> None:
        """`settings` say where the data are, too."""
        self.folder, self.settings = folder, settings
        self._together: dict[int, Measures] = {}

    @cached_property
    def summary(self) -> Measures:
        """The summary that the run has written."""
        return self.folder.load_summary() or {}

    @cached_property
    def trunk(self) -> Measures | None:
        """The summary of the trunk that the run was forked from, if it was."""
        file = self.folder.path / TRUNK
        return read_mapping(file) if file.exists() else None

    def read(self, reading: Reading) -> Measures:
        """All measures of a reading."""
        wanted, own = reading.settings, self.settings
        differing = any(getattr(wanted, n) != getattr(own, n) for n in ("booster", "cycles", *AVERAGING))
        if not own.cyclic or not differing:
            return self.summary
        kept = {key: self.summary[key] for key in SHARED}
        several = self.together(wanted.cycles)
        both = {
            "ensemble": {key: several["ensemble"][key] for key in SCORES},
            "diversity": several["diversity"],
        }
        tickets = self.summary["tickets"][: wanted.cycles]
        combined = self._predicted(several) if wanted.booster == "ensemble" else self._superposed(wanted)
        own_name = {"booster": wanted.booster, "tickets": tickets}
        return {**kept, **own_name, **both, **self._costs(wanted.cycles), **combined}

    def together(self, cycles: int) -> Measures:
        """The first `cycles` tickets: each alone, how different they are, what they predict together."""
        if cycles not in self._together:
            self._together[cycles] = _evaluated(self.folder.singles()[:cycles], self.settings)
        return self._together[cycles]

    def _predicted(self, several: Measures) -> Measures:
        """The measures of the prediction ensemble, which runs all tickets."""
        ratios = [one["test_flops_ratio"] for one in several["networks"]]
        layers = several["networks"][0]["layers"]  # of a single ticket, as `evaluate` tells them
        return {**several["ensemble"], "test_flops_ratio": sum(ratios), "layers": layers}

    def _superposed(self, wanted: Settings) -> Measures:
        """The measures of the tickets superposed in another way than the run did it."""
        with TemporaryDirectory() as folder:
            into = RunFolder(folder)
            self._superpose(wanted, into)
            found = _evaluated([into.ticket], self.settings)
        scores = {key: found[key] for key in SCORES}
        judged = {key: value for key, value in found.items() if key not in ("diversity", "explored")}
        return {**judged, "superposed": scores}

    def _superpose(self, wanted: Settings, into: RunFolder) -> None:
        """Superpose to the counts that the tickets state: living connections that hold 0 are not seen."""
        files, s = self.folder.singles()[: wanted.cycles], self.settings
        tensors, told = read_ticket(files[0])
        about = {key: value for key, value in told.items() if key != "living"}
        alive = told.get("living", {})
        targets = {key: n for key in tensors if (n := alive.get(key.removesuffix(".weight"))) is not None}
        superposition = Superposition(
            wanted.rule, wanted.beta, s.prune, s.prune_when, about["nonzero"], targets
        )
        for file in files:
            superposition.add(given.read_ticket(file, [*targets] or None, superposition.average))
        into.save_ticket(superposition.result().state_dict(), about)
        if wanted.batch_norm == "recompute":
            into.save_ticket(self._recomputed(wanted, into.ticket), about)

    def _recomputed(self, wanted: Settings, ticket: Path) -> dict[str, Any]:
        """The ticket with batch norms recomputed as in a run: on the data of the epoch after its last."""
        s, device = self.settings, connect(self.settings.device).device
        dtype, last = build.DTYPES[build.precision(s, device)], self._epochs(wanted.cycles)
        model = saved.result(ticket).named(s.model).load(self.data, device)
        recompute(model, self.data.train_batches(s.batch_size, s.seed, last, device=device, dtype=dtype))
        return model.state_dict()

    @cached_property
    def data(self) -> Data:
        """What the run was trained on."""
        return build.data_of(self.settings)

    def _epochs(self, cycles: int) -> int:
        """The epochs of the run that has so many cycles."""
        return round(self.settings.epochs - (self.settings.cycles - cycles) * self.settings.cycle_epochs)

    def _costs(self, cycles: int) -> Measures:
        """The cost of a run that ends after so many of its equal cycles; after all, what it has explored."""
        whole, trunk, epochs = self.summary, self.trunk, self._epochs(cycles)
        if cycles == self.settings.cycles:
            return {"explored": whole["explored"]}
        if trunk is None:
            return {}
        begin, end = (one["train_flops_ratio"] * one["epochs"] for one in (trunk, whole))
        spent = begin + (end - begin) * cycles / self.settings.cycles
        seconds = trunk["seconds"] + (whole["seconds"] - trunk["seconds"]) * cycles / self.settings.cycles
        return {"epochs": epochs, "train_flops_ratio": spent / epochs, "seconds": seconds}


def together(folders: list[Path], settings: Settings) -> Measures:
    """Networks of several seeds: how different they are, and what they predict together."""
    found = _evaluated(folders, settings)
    return {**found["ensemble"], "diversity": found["diversity"]}


def _evaluated(paths: Sequence[Path], settings: Settings) -> Measures:
    """Evaluate networks of runs with these settings on the data that the runs were evaluated on."""
    own = settings.model if ":" in settings.model else None
    return evaluate(
        paths, data_dir=settings.data_dir, device=settings.device, model=own, holdout=settings.holdout
    )


def located(settings: Settings, data_dir: str | None) -> Settings:
    """The settings with the folder of their data; ImageNet may lie beside others, in `imagenet`."""
    if data_dir is None:
        return replace(settings, data_dir=None)
    beside = Path(place(data_dir), "imagenet")
    chosen = beside if settings.data == "imagenet" and beside.is_dir() else beside.parent
    return replace(settings, data_dir=str(chosen))
