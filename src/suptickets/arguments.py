"""The arguments that each command takes, and the names that they may have as values."""

from __future__ import annotations

import argparse
import difflib
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from suptickets import __version__
from suptickets.bench import BENCHMARKS
from suptickets.data import DATA
from suptickets.distribution import DISTRIBUTIONS
from suptickets.errors import SparsityError, unknown
from suptickets.experiments import EXPERIMENTS
from suptickets.methods import METHODS
from suptickets.models import MODELS
from suptickets.report import FORMATS
from suptickets.training.boosters import BOOSTERS
from suptickets.training.export import FORMATS as EXPORTS
from suptickets.training.settings import Settings, flag, recipes

OWN = "package.module:function of networks that are not the library's: what a file names is not imported"
LISTS: dict[str, dict[str, str]] = {
    "methods": {name: method.summary for name, method in METHODS.items()},
    "models": {name: entry.summary for name, entry in MODELS.items()},
    "data": {name: entry.summary for name, entry in DATA.items()},
    "recipes": {name: recipe["summary"] for name, recipe in recipes().items()},
    "boosters": BOOSTERS,
    "experiments": {name: experiment.summary for name, experiment in EXPERIMENTS.items()},
}


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong; options must be written in full."""

    commands: Mapping[str, Parser] = {}

    def __init__(self, **options: Any) -> None:
        """Takes the options of argparse's own parser."""
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Raise bad input as a `SparsityError`."""
        raise SparsityError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise unknown((action.metavar or action.dest).lower(), value, action.choices)  # type: ignore[union-attr]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments, naming the nearest known one."""
        args = sys.argv[1:] if args is None else list(args)
        first = args[0].split("=")[0] if args else ""
        if first.startswith("-") and first not in self._option_string_actions:
            command = next((a for a in args if a in self.commands), "COMMAND")
            raise SparsityError(f"{first} comes after the command: suptickets {command} {first}")
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            raise self.commands[parsed.command].stray(rest[0])
        for name in ("out", "data_dir", "config"):
            if getattr(parsed, name, None) == "":
                raise SparsityError(f"{flag(name)} is empty: name a place, or leave it out")
        return parsed

    def stray(self, argument: str) -> SparsityError:
        """The error for an argument that this command does not take."""
        several = any(action.nargs == "+" for action in self._get_positional_actions())
        if several and not argument.startswith("-"):
            return SparsityError(f"{argument} comes after an option: give all paths before the options")
        flags, given = self._option_string_actions, argument.split("=")[0]
        nearest = difflib.get_close_matches(given, flags, n=1, cutoff=0.7)
        return SparsityError(
            f"unknown argument {argument}" + (f": did you mean {nearest[0]}?" if nearest else "")
        )


def parser() -> Parser:
    """The parser of all commands."""
    top = Parser(prog="suptickets", description="Sparse training, and Sup-tickets, in PyTorch.")
    top.add_argument("--version", action="version", version=f"suptickets {__version__}")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    _train_parser(commands.add_parser("train", help="train a sparse network (no options: digits, on a CPU)"))
    _evaluate_parser(
        commands.add_parser("evaluate", help="what networks of runs, or ticket files, are worth")
    )
    _export_parser(commands.add_parser("export", help="a ticket for use elsewhere"))
    listing = commands.add_parser("list", help="what there is, a line each")
    listing.add_argument("kind", choices=[*LISTS], help="what to list")
    _flops_parser(
        commands.add_parser("flops", help="the cost of a forward pass and of a training, beforehand")
    )
    _report_parser(commands.add_parser("report", help="one self-contained page for runs"))
    _reproduce_parser(commands.add_parser("reproduce", help="tables and figures of the paper, and ours"))
    _bench_parser(commands.add_parser("bench", help="the project's own measurements"))
    top.commands = commands.choices
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    return top


def _evaluate_parser(command: argparse.ArgumentParser) -> None:
    paths = "a run folder, or a ticket file; several are compared"
    command.add_argument("paths", type=Path, nargs="+", metavar="path", help=paths)
    command.add_argument("--tickets", action="store_true", help="the single tickets of runs that kept them")
    command.add_argument("--model", default=None, help=OWN)
    command.add_argument("--data", default=None, help="data set, if not that of the run")
    command.add_argument("--data-dir", default=None, help="folder with the data set's published files")
    command.add_argument("--device", default="auto", help="cpu, cuda or auto")


def _export_parser(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=Path, help="a run folder, or a ticket file")
    kinds = "a plain state dict, one without its zeros, or the whole network (default: compact)"
    command.add_argument("--format", default="compact", choices=[*EXPORTS], help=kinds)
    command.add_argument("--out", default=None, help="file (default: beside the ticket)")
    command.add_argument("--model", default=None, help=f"onnx: {OWN}")
    command.add_argument("--data-dir", default=None, help="onnx: folder with the images of class folders")


def _flops_parser(command: argparse.ArgumentParser) -> None:
    models = "see `suptickets list models`, or package.module:function"
    command.add_argument("--model", default=None, help=f"{models} (default: the --recipe's, else vgg16)")
    command.add_argument("--sparsity", type=float, default=0.9, help="fraction of the weights that are zero")
    command.add_argument("--distribution", default="erk", choices=[*DISTRIBUTIONS], help="over the layers")
    command.add_argument("--method", default="static", choices=[*METHODS], help="sparse training method")
    command.add_argument("--booster", default="none", choices=[*BOOSTERS], help="of the training")
    command.add_argument("--recipe", default=None, choices=[*recipes()], help="of the training")
    command.add_argument("--epochs", type=int, default=None, help="of the training (default: the recipe's)")
    command.add_argument("--classes", type=int, default=None, help="number of classes (default: the data's)")
    command.add_argument("--size", type=int, default=None, help="pixels a side of an image (likewise)")
    final = "snip, granet, gmp, snfs, dsr: forward cost of a trained network, as a share of the dense one "
    final += "(test_flops_ratio of a run without a booster), for the weights decide where its layers end"
    command.add_argument("--final", type=float, default=None, metavar="SHARE", help=final)


def _report_parser(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=Path, nargs="+", help="run folders, or folders that hold some")
    command.add_argument("--out", default=None, help="file, or folder for several (default: in the runs')")
    command.add_argument("--format", default="html", choices=[*FORMATS], help="page, tables, or plots")
    command.add_argument("--experiment", nargs="+", default=[], help="of a store: only these pages")
    command.add_argument("--scale", type=float, default=None, help="of a store: results of this scale")
    forks = "of a store: results of runs of their own, or of forks"
    command.add_argument("--separate", action=argparse.BooleanOptionalAction, default=None, help=forks)


def _reproduce_parser(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="+", help="see `suptickets list experiments`")
    command.add_argument("--data-dir", default=None, help="folder with the data (ImageNet: or in imagenet/)")
    command.add_argument("--seeds", type=int, default=None, help="runs of each cell (default: the paper's)")
    command.add_argument("--cells", action="append", default=[], help="only some: sparsity=0.95,method=rigl")
    jobs = "processes at a time (default: 3 on a GPU, 1 elsewhere)"
    command.add_argument("--jobs", type=int, default=None, help=jobs)
    command.add_argument("--executor", default="local", help="local, slurm, or debug: in this process")
    command.add_argument("--scale", type=float, default=1.0, help="shorten the training, for a trial")
    command.add_argument("--separate", action="store_true", help="no forks: every cell has its own runs")
    other = "a setting other than the paper's, for all runs (several times: several): a trial"
    command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=other)
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and what it costs")
    command.add_argument("--out", default="results", help="folder of the results (default: results)")


def _bench_parser(command: argparse.ArgumentParser) -> None:
    summaries = "; ".join(f"{name}: {entry.summary}" for name, entry in BENCHMARKS.items())
    command.add_argument("name", choices=[*BENCHMARKS], help=summaries.replace("%", "%%"))
    models = "vgg16, resnet50 and wrn28-10 on a GPU, vgg16 on a CPU; inference: vgg16 and resnet50"
    command.add_argument("--model", default=None, help=f"the one model to measure (default: {models})")
    devices = "cpu, cuda or auto; loop and inference always run on the CPU"
    command.add_argument("--device", default="auto", help=devices)
    command.add_argument("--sparsity", type=float, default=0.95, help="fraction of the weights that are zero")
    command.add_argument("--rounds", type=int, default=5, help="turns that each contender gets")
    command.add_argument("--compile", action="store_true", help="step, inference: torch.compile on a CPU too")
    largest = "scale: the largest network, in millions of weights (default: 500 on a GPU, 10 on a CPU)"
    command.add_argument("--largest", type=float, default=None, help=largest)


def _train_parser(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", default=None, help="YAML or JSON file with settings; flags override it")
    command.add_argument(
        "--out", default=None, help="folder of the run (default: runs/, by a hash of the settings)"
    )
    resume = "go on with the run in this folder (without one: in that of --out, or of these settings)"
    command.add_argument("--resume", nargs="?", const="", default=None, metavar="FOLDER", help=resume)
    command.add_argument("--force", action="store_true", help="start over, though the folder holds a run")
    command.add_argument("--seeds", type=int, default=1, help="train so many seeds, from --seed on")
    jobs = "seeds that are trained at a time, each in its own process (default: 3 on a GPU, 1 elsewhere)"
    command.add_argument("--jobs", type=int, default=None, help=jobs)
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
