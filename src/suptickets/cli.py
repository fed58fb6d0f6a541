"""The command line. Exit status: 0 done, 2 bad input (one line on stderr), 1 anything else."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import types
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import torch
from rich.console import Console
from rich.table import Table

from suptickets.data import DATA
from suptickets.distribution import DISTRIBUTIONS
from suptickets.errors import SparsityError, unknown
from suptickets.measure.flops import flops
from suptickets.methods import METHODS, Static
from suptickets.models import MODELS, build_model
from suptickets.sparsify import sparsify
from suptickets.training.evaluate import evaluate
from suptickets.training.folder import RunFolder, TrainingError
from suptickets.training.processes import disconnect, is_main
from suptickets.training.progress import print_plain, result_table
from suptickets.training.settings import BOOSTERS, Settings, flag, recipes, resolve
from suptickets.training.train import default_folder, train, train_seeds
from suptickets.training.verdict import verdict


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; names are given in full."""

    def __init__(self, **options: Any) -> None:
        """As argparse does."""
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Bad input."""
        raise SparsityError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise unknown((action.metavar or action.dest).lower(), value, action.choices)  # type: ignore[union-attr]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """All arguments must be known; the nearest one is named."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            nearest = difflib.get_close_matches(rest[0].split("=")[0], parsed.flags, n=1)
            raise SparsityError(
                f"unknown argument {rest[0]}" + (f": did you mean {nearest[0]}?" if nearest else "")
            )
        return parsed


def parser() -> Parser:
    """All commands."""
    top = Parser(prog="suptickets", description="Sparse training, and Sup-tickets, in PyTorch.")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    _train_parser(commands.add_parser("train", help="train a sparse network (no options: digits, on a CPU)"))
    evaluating = commands.add_parser("evaluate", help="accuracy, NLL and ECE of a run or a ticket file")
    evaluating.add_argument("path", help="a run folder, or a ticket file")
    evaluating.add_argument("--data", default=None, help="data set, if not that of the run")
    evaluating.add_argument("--data-dir", default=None, help="folder with the data set's published files")
    evaluating.add_argument("--device", default="auto", help="cpu, cuda or auto")
    listing = commands.add_parser("list", help="what there is, a line each")
    listing.add_argument("kind", choices=[*LISTS], help="what to list")
    counting = commands.add_parser("flops", help="the cost of a forward pass, before training")
    counting.add_argument("--model", default="vgg16", help="see `suptickets list models`")
    counting.add_argument("--sparsity", type=float, default=0.9, help="fraction of the weights that are zero")
    counting.add_argument("--distribution", default="erk", choices=[*DISTRIBUTIONS], help="over the layers")
    counting.add_argument("--classes", type=int, default=None, help="number of classes")
    counting.add_argument("--size", type=int, default=None, help="pixels a side of an image")
    for name, command in commands.choices.items():
        command.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
        command.set_defaults(
            run=COMMANDS[name], flags=[s for a in command._actions for s in a.option_strings]
        )
    return top


def _train_parser(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", default=None, help="YAML or JSON file with settings; flags override it")
    command.add_argument(
        "--out", default=None, help="folder of the run (default: runs/, by a hash of the settings)"
    )
    resume = "go on with the run in this folder (without one: in that of --out, or of these settings)"
    command.add_argument("--resume", nargs="?", const="", default=None, metavar="FOLDER", help=resume)
    command.add_argument("--force", action="store_true", help="start over, though the folder holds a run")
    command.add_argument("--seeds", type=int, default=1, help="train so many seeds, from --seed on")
    hints = get_type_hints(Settings)
    for setting in fields(Settings):
        help_text = setting.metadata["help"]
        default = "from the recipe" if setting.default is MISSING else setting.default
        kind = get_args(hints[setting.name])[0] if get_origin(hints[setting.name]) else hints[setting.name]
        options: dict[str, Any] = {"help": f"{help_text} (default: {default})", "default": argparse.SUPPRESS}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": kind, "metavar": kind.__name__.upper()}
            options |= (
                {"nargs": "*"} if get_origin(hints[setting.name]) not in (None, types.UnionType) else {}
            )
        command.add_argument(flag(setting.name), **options)


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {f.name: getattr(arguments, f.name) for f in fields(Settings) if hasattr(arguments, f.name)}
    config, out = arguments.config, arguments.out
    if arguments.resume is not None:
        if config or arguments.seeds != 1 or (arguments.resume and out):
            raise SparsityError(
                "--resume takes the settings from its folder: leave out --config, --out, --seeds"
            )
        out = arguments.resume or out or default_folder(resolve(given))
        folder = RunFolder(out)
        if folder.settings() is None:
            raise SparsityError(f"{out} holds no run to resume: it has no config.json")
        config = folder.config
    settings = resolve(given, config)
    if arguments.seeds < 1:
        raise SparsityError(f"--seeds must be at least 1, not {arguments.seeds}")
    if arguments.seeds > 1:
        return train_seeds(settings, arguments.seeds, out, force=arguments.force)
    return train(settings, out, force=arguments.force)


def _show_train(result: dict[str, Any], console: Console) -> None:
    for summary in result.get("runs", [result]):
        console.print(result_table(summary))
        worse = verdict(summary, summary["tickets"])
        if worse is not None:
            console.print(worse, highlight=False, soft_wrap=True)
        console.print(f"everything is in {summary['run']}", highlight=False, soft_wrap=True)
    if "mean" in result:
        mean, deviation = result["mean"], result["deviation"]
        scores = (f"{key} {mean[key]:.4f} ({deviation[key]:.4f})" for key in mean)
        console.print(f"mean (deviation) of the seeds: {', '.join(scores)}", highlight=False, soft_wrap=True)


def _evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    return evaluate(Path(arguments.path), arguments.data, arguments.data_dir, arguments.device)


def _list(arguments: argparse.Namespace) -> dict[str, Any]:
    entries = LISTS[arguments.kind]() if callable(LISTS[arguments.kind]) else LISTS[arguments.kind]
    return {arguments.kind: [{"name": name, "summary": summary} for name, summary in entries.items()]}


def _flops(arguments: argparse.Namespace) -> dict[str, Any]:
    classes = arguments.classes or (1000 if arguments.model.endswith("imagenet") else 100)
    model = build_model(arguments.model, classes, size=arguments.size)
    size = arguments.size or MODELS[arguments.model].size
    network = sparsify(model, Static(arguments.sparsity, distribution=arguments.distribution), seed=0)
    counted = flops(model, torch.zeros(1, 3, size, size))
    layers = [
        {
            "name": n,
            "shape": list(w.shape),
            "nonzero": w.nonzero,
            "sparsity": w.sparsity,
            "flops": counted.layers[n].dense,
        }
        for n, w in network.layers.items()
    ]
    return {
        "parameters": network.parameters_total,
        "nonzero": network.nonzero,
        "forward_flops_dense": counted.dense,
        "forward_flops": counted.sparse,
        "ratio": counted.ratio,
        "layers": layers,
    }


def _show(result: dict[str, Any], console: Console) -> None:
    """Lists as tables, values as lines."""
    for key, value in result.items():
        if isinstance(value, list) and value:
            table = Table(box=None, pad_edge=False)
            for column in value[0]:
                table.add_column(column, overflow="fold")
            for row in value:
                table.add_row(*(_text(cell) for cell in row.values()))
            console.print(table)
        elif not isinstance(value, list):
            console.print(f"{key:<20} {_text(value)}", highlight=False, soft_wrap=True)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


LISTS: dict[str, Any] = {
    "methods": {name: method.summary for name, method in METHODS.items()},
    "models": {name: entry.summary for name, entry in MODELS.items()},
    "data": {name: entry.summary for name, entry in DATA.items()},
    "recipes": lambda: {name: recipe["summary"] for name, recipe in recipes().items()},
    "boosters": BOOSTERS,
}
COMMANDS: dict[str, Any] = {"train": _train, "evaluate": _evaluate, "list": _list, "flops": _flops}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    try:
        parsed = parser().parse_args(arguments)
        result = parsed.run(parsed)
    except (SparsityError, TrainingError, KeyboardInterrupt) as error:
        if is_main():
            print_plain(f"suptickets: {str(error) or 'stopped'}")
        return 2 if isinstance(error, SparsityError) else 1
    finally:
        disconnect()
    if not is_main():
        return 0
    if parsed.json:
        print(json.dumps(result))
    else:
        (_show_train if parsed.command == "train" else _show)(result, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
