"""Made-up stores of results, as `suptickets reproduce` would leave them, with run folders or without."""

from dataclasses import replace
from pathlib import Path

from report_runs import VERSIONS, make_run, make_summary

from suptickets.experiments import experiment
from suptickets.experiments.plan import TOGETHER, Mode, Reading, readings, run_of, together_key
from suptickets.experiments.store import Store
from suptickets.training.settings import Settings
from suptickets.training.train import default_folder

LAYERS = tuple(f"features.{n}" for n in range(15)) + ("classifier",)
USUAL = Mode()
USUAL = Mode()
MADE = {"versions": VERSIONS, "hardware": "NVIDIA H200", "revision": "5" * 40, "command": "suptickets x"}


def make_store(
    where: Path, name: str, *, seeds=(1, 2, 3), folders: bool = False, cells="", mode=USUAL, **changes
) -> Path:
    """A result of every reading of an experiment, for each seed; `changes` are made in each line."""
    store, how = Store(where), mode
    for cell in experiment(name).cells(cells):
        for reading in readings(cell):
            for seed in seeds:
                store.add(make_record(reading, seed, how, **changes))
                if folders:
                    make_folder(where, run_of(reading, seed, how), how)
        if cell.booster == TOGETHER:
            key, one = together_key(readings(cell)[0], seeds), make_record(readings(cell)[0], 0, how)
            found = {**one["measures"], "diversity": {"disagreement": 0.03, "kl": 0.08}}
            store.add({**one, "cell": key, "measures": found})
    return where


def make_record(reading: Reading, seed: int, mode: Mode, **changes) -> dict:
    """One line."""
    run = run_of(reading, seed, mode)
    own = {"booster": reading.settings.booster, "cycles": reading.settings.cycles}
    measures = make_summary({**run.as_dict(), **own}, LAYERS, str(reading.key) + str(seed))
    settings = {key: value for key, value in run.as_dict().items() if key != "data_dir"}
    about = {"cell": reading.key, "seed": seed, **mode.as_dict(), "settings": settings}
    return {**about, "measures": measures, "seconds": 150.0, **MADE, "time": "2026-01-01", **changes}


def make_folder(where: Path, run: Settings, mode: Mode) -> Path:
    """The folder of a run, where the runner puts it; the data were elsewhere."""
    folder = where / "runs" / ("separate" if mode.separate else "forked") / default_folder(run).name
    if folder.exists():
        return folder
    return make_run(folder, layers=LAYERS, **replace(run, data_dir="/elsewhere").as_dict())
