"""The command line. Exit status: 0 done, 2 bad input (one line on stderr), 1 anything else."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import sys
import types
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from rich.console import Console

from suptickets.bench import BENCHMARKS, bench
from suptickets.bench import show as show_measured
from suptickets.data import DATA
from suptickets.distribution import DISTRIBUTIONS
from suptickets.errors import SparsityError, reason, unknown
from suptickets.experiments import EXPERIMENTS
from suptickets.experiments.reproduction import reproduce
from suptickets.experiments.reproduction import show as show_reproduced
from suptickets.experiments.results import write_pages
from suptickets.experiments.store import Store
from suptickets.methods import METHODS
from suptickets.models import MODELS
from suptickets.report import FORMATS, write_report
from suptickets.training.evaluate import evaluate
from suptickets.training.export import FORMATS as EXPORTS
from suptickets.training.export import export
from suptickets.training.folder import RunFolder, TrainingError, to_json
from suptickets.training.price import price
from suptickets.training.processes import deserted, disconnect, is_main, leave, speaks
from suptickets.training.progress import print_plain, result_table
from suptickets.training.settings import BOOSTERS, Settings, flag, recipes, resolve
from suptickets.training.shown import show, show_evaluation, show_flops
from suptickets.training.train import default_folder, train, train_seeds
from suptickets.training.verdict import SUPERPOSING, verdict


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
    evaluating = commands.add_parser("evaluate", help="what networks of runs, or ticket files, are worth")
    evaluating.add_argument("path", nargs="+", help="a run folder, or a ticket file; several are compared")
    evaluating.add_argument(
        "--tickets", action="store_true", help="the single tickets of runs that kept them"
    )
    own = "package.module:function of networks that are not the library's: what a file names is not imported"
    evaluating.add_argument("--model", default=None, help=own)
    evaluating.add_argument("--data", default=None, help="data set, if not that of the run")
    evaluating.add_argument("--data-dir", default=None, help="folder with the data set's published files")
    evaluating.add_argument("--device", default="auto", help="cpu, cuda or auto")
    exporting = commands.add_parser("export", help="a ticket for use elsewhere")
    exporting.add_argument("path", help="a run folder, or a ticket file")
    kinds = "a plain state dict, one without its zeros, or the whole network (default: compact)"
    exporting.add_argument("--format", default="compact", choices=[*EXPORTS], help=kinds)
    exporting.add_argument("--out", default=None, help="file (default: beside the ticket)")
    exporting.add_argument("--model", default=None, help=f"onnx: {own}")
    exporting.add_argument("--data-dir", default=None, help="onnx: folder with the images of class folders")
    listing = commands.add_parser("list", help="what there is, a line each")
    listing.add_argument("kind", choices=[*LISTS], help="what to list")
    counting = commands.add_parser("flops", help="the cost of a forward pass and of a training, beforehand")
    models = "see `suptickets list models`, or package.module:function"
    counting.add_argument("--model", default="vgg16", help=models)
    counting.add_argument("--sparsity", type=float, default=0.9, help="fraction of the weights that are zero")
    counting.add_argument("--distribution", default="erk", choices=[*DISTRIBUTIONS], help="over the layers")
    counting.add_argument("--method", default="static", choices=[*METHODS], help="sparse training method")
    counting.add_argument("--booster", default="none", choices=[*BOOSTERS], help="of the training")
    counting.add_argument("--recipe", default=None, choices=[*recipes()], help="of the training")
    counting.add_argument("--epochs", type=int, default=None, help="of the training (default: the recipe's)")
    counting.add_argument("--classes", type=int, default=None, help="number of classes (default: the data's)")
    counting.add_argument("--size", type=int, default=None, help="pixels a side of an image (likewise)")
    final = "snip, granet, gmp, snfs, dsr: forward cost of a trained network, as a share of the dense one "
    final += "(test_flops_ratio of a run without a booster), for the weights decide where its layers end"
    counting.add_argument("--final", type=float, default=None, metavar="SHARE", help=final)
    reporting = commands.add_parser("report", help="one self-contained page for runs")
    reporting.add_argument("path", nargs="+", help="run folders, or folders that hold some")
    reporting.add_argument("--out", default=None, help="file, or folder for several (default: in the runs')")
    reporting.add_argument("--format", default="html", choices=[*FORMATS], help="page, tables, or plots")
    reporting.add_argument("--experiment", nargs="+", default=[], help="of a store: only these pages")
    reporting.add_argument("--scale", type=float, default=None, help="of a store: results of this scale")
    forks = "of a store: results of runs of their own, or of forks"
    reporting.add_argument("--separate", action=argparse.BooleanOptionalAction, default=None, help=forks)
    _reproduce_parser(commands.add_parser("reproduce", help="tables and figures of the paper, and ours"))
    _bench_parser(commands.add_parser("bench", help="the project's own measurements"))
    for name, command in commands.choices.items():
        command.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
        command.set_defaults(
            run=COMMANDS[name], flags=[s for a in command._actions for s in a.option_strings]
        )
    return top


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
    models = "the one model to measure (default: vgg16, resnet50 and wrn28-10 on a GPU, vgg16 on a CPU)"
    command.add_argument("--model", default=None, help=models)
    command.add_argument("--device", default="auto", help="cpu, cuda or auto")
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
        if "data_dir" in given:
            given["data_dir"] = os.path.abspath(given["data_dir"])
    settings = resolve(given, config)
    if arguments.seeds < 1:
        raise SparsityError(f"--seeds must be at least 1, not {arguments.seeds}")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise SparsityError(f"--jobs must be at least 1, not {arguments.jobs}")
    if arguments.seeds > 1:
        result = train_seeds(settings, arguments.seeds, out, force=arguments.force, jobs=arguments.jobs)
    else:
        result = train(settings, out, force=arguments.force, moved=arguments.resume is not None)
    for summary in result.get("runs", [result]) if is_main() else ():
        write_run_page(Path(summary["run"]))
    return result


def write_run_page(run: Path) -> None:
    """The page of a run that is done; whatever goes wrong with it, the run stays done."""
    folder = RunFolder(run)
    if folder.report.exists() and folder.report.stat().st_mtime >= folder.summary.stat().st_mtime:
        return
    try:
        write_report([run])
    except Exception as error:
        print_plain(f"the report of {run} could not be written: {reason(error)}")


def _show_train(result: dict[str, Any], console: Console) -> None:
    for summary in result.get("runs", [result]):
        console.print(result_table(summary))
        explored = f"{summary['explored']:.2%} of the possible connections have lived"
        console.print(explored, highlight=False, soft_wrap=True)
        superposed = summary["booster"] in SUPERPOSING
        worse = verdict(summary, summary["tickets"] if superposed else [], summary["booster"])
        if worse is not None:
            console.print(worse, highlight=False, soft_wrap=True)
        console.print(f"everything is in {summary['run']}", highlight=False, soft_wrap=True)
    if "mean" in result:
        mean, deviation = result["mean"], result["deviation"]
        forms = {"accuracy": ".2%", "ece": ".2%"}
        scores = (f"{k} {mean[k]:{(f := forms.get(k, '.4f'))}} ({deviation[k]:{f}})" for k in mean)
        console.print(f"mean (deviation) of the seeds: {', '.join(scores)}", highlight=False, soft_wrap=True)


def _bench(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("model", "device", "sparsity", "rounds", "compile", "largest")
    return bench(arguments.name, **{name: getattr(arguments, name) for name in names})


def _evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    paths = [Path(path) for path in arguments.path]
    where = arguments.data, arguments.data_dir, arguments.device
    return evaluate(paths, *where, tickets=arguments.tickets, model=arguments.model)


def _reproduce(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("data_dir", "seeds", "cells", "jobs", "executor", "scale", "dry_run", "separate", "out")
    changes = dict(_changed(setting) for setting in arguments.set)
    arguments.cells = ",".join(arguments.cells)
    return reproduce(arguments.name, **{name: getattr(arguments, name) for name in names}, changes=changes)


def _changed(setting: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON has it, or else text."""
    name, equals, value = setting.partition("=")
    if not equals:
        raise SparsityError(f"{setting!r} changes no setting: write NAME=VALUE, as in --set prune=layer")
    with contextlib.suppress(json.JSONDecodeError):
        return name.replace("-", "_"), json.loads(value)
    return name.replace("-", "_"), value


def _report(arguments: argparse.Namespace) -> dict[str, Any]:
    store, names = Store(arguments.path[0]), arguments.experiment
    if names and len(arguments.path) > 1:
        raise SparsityError("--experiment needs one store: give one folder of results")
    found = store.read_aloud() if len(arguments.path) == 1 else []
    if store.damaged and not found:
        raise SparsityError(f"all results in {store.folder} are damaged: run suptickets reproduce again")
    if found or names:
        which = {"scale": arguments.scale, "separate": arguments.separate, "format": arguments.format}
        written = write_pages(store.folder, names, arguments.out, **which)
    else:
        written = write_report(arguments.path, arguments.out, format=arguments.format)
    together = os.path.commonpath([path.parent for path in written]) or "."
    return {"path": str(written[0] if len(written) == 1 else arguments.out or together)}


def _export(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("format", "out", "model", "data_dir")
    return export(Path(arguments.path), **{name: getattr(arguments, name) for name in names})


def _list(arguments: argparse.Namespace) -> dict[str, Any]:
    entries = LISTS[arguments.kind]() if callable(LISTS[arguments.kind]) else LISTS[arguments.kind]
    return {arguments.kind: [{"name": name, "summary": summary} for name, summary in entries.items()]}


def _flops(arguments: argparse.Namespace) -> dict[str, Any]:
    usual = "paper-imagenet" if arguments.model.endswith("imagenet") else "paper-cifar"
    names = ("model", "method", "booster", "sparsity", "distribution", "epochs")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    settings = resolve({**given, "recipe": arguments.recipe or usual})
    return price(settings, classes=arguments.classes, size=arguments.size, final=arguments.final)


LISTS: dict[str, Any] = {
    "methods": {name: method.summary for name, method in METHODS.items()},
    "models": {name: entry.summary for name, entry in MODELS.items()},
    "data": {name: entry.summary for name, entry in DATA.items()},
    "recipes": lambda: {name: recipe["summary"] for name, recipe in recipes().items()},
    "boosters": BOOSTERS,
    "experiments": lambda: {name: experiment.summary for name, experiment in EXPERIMENTS.items()},
}
COMMANDS: dict[str, Any] = {
    "train": _train,
    "evaluate": _evaluate,
    "export": _export,
    "list": _list,
    "flops": _flops,
    "report": _report,
    "reproduce": _reproduce,
    "bench": _bench,
}
SHOWN: dict[str, Any] = {
    "train": _show_train,
    "evaluate": show_evaluation,
    "flops": show_flops,
    "reproduce": show_reproduced,
    "bench": show_measured,
}

WIDTH = 160  # where there is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Whoever reads its output may stop reading: that is no error."""
    try:
        status = _main(arguments)
    except SystemExit as left:  # help has not left the buffer
        raise SystemExit(_write("") or left.code) from None
    return status or _write("")


def program() -> NoReturn:
    """What the shell starts, maybe with its output closed; a warning is one line."""
    sys.stdout, usual = sys.stdout or io.StringIO(), warnings.formatwarning
    warnings.formatwarning = lambda message, category, *where: (
        f"suptickets: {message}\n" if category is RuntimeWarning else usual(message, category, *where)
    )
    leave(main())


def _write(text: str) -> int:
    """The exit status: 1 if there is no place for it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer
        if not isinstance(error, BrokenPipeError):
            print_plain(f"suptickets: cannot write the output: {error.strerror}")
            return 1
    return 0


def _main(arguments: Sequence[str] | None) -> int:
    try:
        parsed = parser().parse_args(arguments)
        with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):  # a model may print
            result = parsed.run(parsed)
    except (SparsityError, TrainingError, KeyboardInterrupt) as error:
        message = " ".join(str(error).splitlines()) or "stopped"
        alone = isinstance(error, SparsityError)  # the others stop all processes for one reason
        if speaks(message) if alone else is_main():
            print_plain(f"suptickets: {message}")
        return 2 if alone else 1
    except RuntimeError as error:
        if not deserted(error):
            raise
        print_plain(f"suptickets: another process has ended, or does not answer: {reason(error)}")
        return 1
    finally:
        disconnect()
    if not is_main():
        return 0
    unwritten = _write(f"{to_json(result)}\n" if parsed.json else _shown(parsed.command, result))
    return unwritten or int(bool(result.get("missing") or result.get("failed")))


def _shown(command: str, result: dict[str, Any]) -> str:
    """What a person sees; a pipe or a file folds no cells."""
    terminal, text = sys.stdout.isatty(), io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else WIDTH)
    SHOWN.get(command, show)(result, console)
    return text.getvalue()


if __name__ == "__main__":
    program()
