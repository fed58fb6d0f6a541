"""Made-up run folders and cells of experiments, as `suptickets train` and `reproduce` would leave them."""

import json
import random
from pathlib import Path

from suptickets.report import CellResult, Ours, Paper
from suptickets.schedules import cycles, step_drops
from suptickets.training.settings import resolve

VERSIONS = {"suptickets": "0.1.0", "python": "3.11.8", "torch": "2.13.0", "numpy": "2.4.6"}


def make_run(where: Path, *, layers=("conv1", "conv2", "fc"), old: bool = False, **flags) -> Path:
    """A folder of a finished run; `old` ones lack what is logged of layers, rates and predictions."""
    settings = resolve(flags).as_dict()
    rng = random.Random(str(sorted(flags.items())))
    lines = _metrics(settings, layers, rng)
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps(settings))
    summary = _summary(settings, layers, rng, where)
    if old:
        lines = [{k: v for k, v in line.items() if k not in ("layers", "lrs")} for line in lines]
        new = ("layers", "reliability", "diversity", "ensemble", "versions", "hardware", "command")
        summary = {key: value for key, value in summary.items() if key not in new}
    (where / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (where / "summary.json").write_text(json.dumps(summary))
    return where


def _cycle_start(settings) -> float:
    none = settings["booster"] == "none"
    return settings["epochs"] - (0 if none else settings["cycles"] * settings["cycle_epochs"])


def _rate(settings, steps: int):
    normal = round(_cycle_start(settings) * steps)
    drops = step_drops(settings["lr"], [round(normal * m) for m in settings["milestones"]])
    length = round(settings["cycle_epochs"] * steps)
    up = cycles(settings["schedule"], length, settings["lr_low"], settings["lr_high"])
    return lambda step: drops(step) if step <= normal else up(step - normal)


def _sparsity(settings, share: float) -> float:
    if settings["method"] == "dense":
        return 0.0
    grown = min(share * 2, 1) if settings["method"] == "granet" else 1
    return settings["sparsity"] - (settings["sparsity"] - 0.5) * (1 - grown) ** 3 * (grown < 1)


def _layer(settings, place: int, count: int, share: float) -> float:
    """Thin layers are denser; connections wander while it trains."""
    total, tilt = _sparsity(settings, share), (place + 1) / (count + 1) - 0.5
    return min(max(total + (1 - total) * total * (2 * tilt + 0.5 * share * tilt), 0.0), 0.999)


def _metrics(settings, layers, rng) -> list[dict]:
    steps, epochs, lines = 8, settings["epochs"], []
    rate, start = _rate(settings, steps), _cycle_start(settings)
    for epoch in range(1, epochs + 1):
        share = epoch / epochs
        error = 0.3 * (1 - share) ** 2 + 0.04 + rng.gauss(0, 0.004) + 0.9 * (0.4 ** (30 * share))
        rates = [rate((epoch - 1) * steps + n) for n in range(1, steps + 1)]
        cycle = int((epoch - start - 1e-9) // settings["cycle_epochs"]) + 1
        line = {"epoch": epoch, "step": epoch * steps, "lr": rates[-1]}
        line["phase"] = "normal" if epoch <= start else f"cycle {cycle} of {settings['cycles']}"
        line |= {"loss": 2 * error, "train_accuracy": 1 - error, "sparsity": _sparsity(settings, share)}
        line |= {"test_accuracy": 0.96 - error, "test_nll": 2 * error + 0.2, "test_ece": 0.03}
        line["layers"] = {name: _layer(settings, n, len(layers), share) for n, name in enumerate(layers)}
        lines.append(line | {"lrs": rates})
    return lines


def _scores(rng, accuracy: float) -> dict[str, float]:
    accuracy += rng.gauss(0, 0.002)
    return {
        "accuracy": accuracy,
        "nll": 1.1 - accuracy + rng.gauss(0, 0.003),
        "ece": abs(rng.gauss(0.03, 0.003)),
    }


def make_summary(settings, layers, seed: str, where: Path = Path("run")) -> dict:
    """What a run says of itself."""
    return _summary(settings, layers, random.Random(seed), where)


def _summary(settings, layers, rng, where: Path) -> dict:
    boosted, dense = settings["booster"] != "none", settings["method"] == "dense"
    tickets = [_scores(rng, 0.915) for _ in range(settings["cycles"] if boosted else 0)]
    total, sparsity = 1000 * len(layers), 0.0 if dense else settings["sparsity"]
    shown = ("data", "model", "method", "booster", "recipe", "seed", "epochs")
    return {
        "run": str(where),
        **{key: settings[key] for key in shown},
        "target_sparsity": sparsity,
        "sparsity": sparsity,
        "nonzero": round(total * (1 - sparsity)),
        "parameters": total,
        **_scores(rng, 0.92 if boosted else 0.913),
        "start": _scores(rng, 0.91) if boosted else None,
        "tickets": tickets,
        "train_flops_ratio": 1.0 if dense else 1.2 * (1 - sparsity) + 0.03,
        "test_flops_ratio": 1.0 if dense else 1.1 * (1 - sparsity),
        "seconds": 754.2,
        "layers": [_final_layer(settings, n, name, len(layers)) for n, name in enumerate(layers)],
        "reliability": _reliability(rng),
        "diversity": {"disagreement": rng.uniform(0.01, 0.03), "kl": rng.uniform(0.01, 0.02)}
        if boosted
        else None,
        "ensemble": _scores(rng, 0.921) if boosted else None,
        "versions": VERSIONS,
        "hardware": "2 CPU threads",
        "command": f"suptickets train --method {settings['method']} --seed {settings['seed']}",
    }


def _final_layer(settings, place: int, name: str, count: int) -> dict:
    sparsity = _layer(settings, place, count, 1)
    return {
        "name": name,
        "shape": [64, 3, 3, 3],
        "size": 1000,
        "nonzero": round(1000 * (1 - sparsity)),
        "sparsity": sparsity,
    }


def _reliability(rng) -> list[dict]:
    bins = []
    for place in range(15):
        confidence = (place + 0.5) / 15
        samples = 0 if place < 2 else 3 * place**2
        accuracy = min(max(confidence - 0.04 + rng.gauss(0, 0.01), 0), 1) if samples else 0.0
        bins.append({"samples": samples, "confidence": confidence if samples else 0.0, "accuracy": accuracy})
    return bins


def resnet50_layers() -> list[str]:
    """The names of the 54 layers."""
    names = ["conv1"]
    for stage, blocks in enumerate((3, 4, 6, 3), 1):
        for block in range(blocks):
            names += [f"layer{stage}.{block}.conv{n}" for n in (1, 2, 3)]
            names += [f"layer{stage}.{block}.downsample.0"] if block == 0 else []
    return [*names, "fc"]


def make_cells(done: float = 1.0) -> list[CellResult]:
    """As of a table with and without Sup-tickets; of `done` of them there is a result of ours."""
    rng, cells = random.Random(0), []
    for data, base in (("cifar10", 0.935), ("cifar100", 0.72)):
        for method in ("set", "rigl", "granet"):
            for booster in ("none", "sup-tickets"):
                for sparsity in (0.95, 0.9, 0.8):
                    settings = {"data": data, "model": "vgg16", "method": method, "booster": booster}
                    mean = base + (booster != "none") * 0.004 - 0.05 * (sparsity - 0.8)
                    paper = Paper(mean, rng.uniform(0.0005, 0.004))
                    ours = Ours(mean + rng.gauss(0, 0.003), rng.uniform(0.0005, 0.004), 3)
                    known = ours if rng.random() < done else None
                    cells.append(CellResult(settings | {"sparsity": sparsity}, "", "accuracy", paper, known))
    return cells


def figure_cells(name: str) -> list[CellResult]:
    """As of a figure: the paper has no numbers there."""
    rng = random.Random(1)

    def cell(sparsity: float, variation: str, measure: str, mean: float, **settings) -> CellResult:
        shared = {"data": "cifar100", "model": "vgg16", "method": "rigl", "booster": "sup-tickets"}
        ours = Ours(mean + rng.gauss(0, 0.002), abs(rng.gauss(0.002, 0.0005)), 3)
        return CellResult(shared | {"sparsity": sparsity} | settings, variation, measure, None, ours)

    levels = (0.95, 0.9, 0.8)
    if name == "averaging":
        rules = ("CIA", "CAA", *(f"CIMA {beta}" for beta in (0.9, 0.8, 0.5, 0.2, 0.1)))
        return [cell(s, rule, "accuracy", 0.8 - 0.08 * s) for s in levels for rule in rules]
    if name == "uncertainty":
        means = {"nll": 0.9, "ece": 0.08}
        boosters = ("none", "sup-tickets")
        return [
            cell(s, "", m, means[m] * (1 - 0.2 * (b != "none")), booster=b)
            for m in means
            for s in levels
            for b in boosters
        ]
    measures = ("accuracy", "ticket_accuracy")
    return [cell(s, f"{n} tickets", m, 0.82 - 0.03 * s) for m in measures for s in levels for n in (2, 4, 7)]
