"""The command line. Exit status: 0 done, 2 bad input (one line on stderr), 1 anything else."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from suptickets.arguments import LISTS, parser
from suptickets.bench import bench
from suptickets.bench import show as show_measured
from suptickets.errors import SparsityError, reason
from suptickets.experiments.reproduction import reproduce
from suptickets.experiments.reproduction import show as show_reproduced
from suptickets.experiments.results import write_pages
from suptickets.experiments.store import Store
from suptickets.report import FORMATS, write_report
from suptickets.training.evaluate import evaluate
from suptickets.training.export import export
from suptickets.training.folder import RunFolder, TrainingError, to_json
from suptickets.training.price import price
from suptickets.training.processes import deserted, disconnect, first_alone, is_main, leave, speaks
from suptickets.training.progress import print_plain
from suptickets.training.settings import Settings, resolve
from suptickets.training.shown import result_table, show, show_evaluation, show_flops
from suptickets.training.train import default_folder, train, train_seeds
from suptickets.training.verdict import SUPERPOSING, verdict


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {f.name: getattr(arguments, f.name) for f in fields(Settings) if hasattr(arguments, f.name)}
    config, out = arguments.config, arguments.out
    if arguments.resume is not None:
        if config or arguments.seeds != 1 or (arguments.resume and out):
            raise SparsityError(
                "--resume takes the settings from its folder: leave out --config, --out, --seeds"
            )
        out = arguments.resume or out or default_folder(resolve(given))
        settings = first_alone(given.get("device", "auto"), lambda: _resumed(RunFolder(out), given))
    else:
        settings = resolve(given, config)
    if arguments.seeds < 1:
        raise SparsityError(f"--seeds must be at least 1, not {arguments.seeds}")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise SparsityError(f"--jobs must be at least 1, not {arguments.jobs}")
    if arguments.seeds > 1:
        result = train_seeds(settings, arguments.seeds, out, force=arguments.force, jobs=arguments.jobs)
    else:
        moved = arguments.resume is not None and "data_dir" in given
        result = train(settings, out, force=arguments.force, moved=moved)
    for summary in result.get("runs", [result]) if is_main() else ():
        write_run_page(Path(summary["run"]))
        worse = _worse(summary) if arguments.json else None  # otherwise it stands below the table
        if worse is not None:
            print_plain(f"{summary['run']}: {worse}" if arguments.seeds > 1 else worse)
    return result


def _resumed(folder: RunFolder, given: dict[str, Any]) -> Settings:
    """The settings of the run in a folder, with those that are given anew."""
    old = folder.settings()
    if old is None:
        raise SparsityError(f"{folder.path} holds no run to resume: it has no config.json")
    settings = resolve(given, folder.config)
    if "data_dir" in given:
        return settings
    return replace(settings, data_dir=old.data_dir)  # as saved, whatever the working directory is


def _worse(summary: dict[str, Any]) -> str | None:
    """A line if averaging did not help."""
    superposed = summary["booster"] in SUPERPOSING
    return verdict(summary, summary["tickets"] if superposed else [], summary["booster"])


def write_run_page(run: Path) -> None:
    """Write the page of a finished run; if that fails, the run still counts as finished."""
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
        console.out(f"{summary['explored']:.2%} of the possible connections have lived")
        worse = _worse(summary)
        if worse is not None:
            console.out(worse)
        console.out(f"everything is in {summary['run']}")
    if "mean" in result:
        mean, deviation = result["mean"], result["deviation"]
        forms = {"accuracy": ".2%", "ece": ".2%"}
        scores = (f"{k} {mean[k]:{(f := forms.get(k, '.4f'))}} ({deviation[k]:{f}})" for k in mean)
        console.out(f"mean (deviation) of the seeds: {', '.join(scores)}")


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
    """Split NAME=VALUE; the value is read as JSON, or as text if it is not JSON."""
    name, equals, value = setting.partition("=")
    if not equals:
        raise SparsityError(f"{setting!r} changes no setting: write NAME=VALUE, as in --set prune=layer")
    with contextlib.suppress(ValueError, RecursionError):
        return name.replace("-", "_"), json.loads(value)
    return name.replace("-", "_"), value


def _report(arguments: argparse.Namespace) -> dict[str, Any]:
    ending = Path(arguments.out or "").suffix.removeprefix(".")
    if ending in FORMATS and ending != arguments.format and not Path(arguments.out).is_dir():
        raise SparsityError(f"{arguments.out} is no name for {arguments.format}: add --format {ending}")
    store, names = Store(arguments.path[0]), arguments.experiment
    if names and len(arguments.path) > 1:
        raise SparsityError("--experiment needs one store: give one folder of results")
    found = store.read_aloud() if len(arguments.path) == 1 else []
    if store.damaged and not found:
        raise SparsityError(f"all results in {store.folder} are damaged: run suptickets reproduce again")
    if not (found or names) and (arguments.scale is not None or arguments.separate is not None):
        raise SparsityError("--scale and --separate choose among the results of one store: leave them out")
    if found or names:
        which = {"scale": arguments.scale, "separate": arguments.separate, "format": arguments.format}
        written = write_pages(store.folder, names, arguments.out, **which)
    else:
        written = write_report(arguments.path, arguments.out, format=arguments.format)
    if not written:
        raise SparsityError("there is nothing to draw: --format html tells what there is")
    together = os.path.commonpath([path.parent for path in written]) or "."
    return {"path": str(written[0] if len(written) == 1 else arguments.out or together)}


def _export(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("format", "out", "model", "data_dir")
    return export(Path(arguments.path), **{name: getattr(arguments, name) for name in names})


def _list(arguments: argparse.Namespace) -> dict[str, Any]:
    entries = LISTS[arguments.kind]() if callable(LISTS[arguments.kind]) else LISTS[arguments.kind]
    return {arguments.kind: [{"name": name, "summary": summary} for name, summary in entries.items()]}


def _flops(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.model is None and arguments.recipe is None:
        arguments.model = "vgg16"
    usual = "paper-imagenet" if (arguments.model or "").endswith("imagenet") else "paper-cifar"
    names = ("model", "method", "booster", "sparsity", "distribution", "epochs")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    settings = resolve({**given, "recipe": arguments.recipe or usual})
    return price(settings, classes=arguments.classes, size=arguments.size, final=arguments.final)


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

WIDTH = 160  # of the output, where there is no terminal
_interrupts: list[int] = []  # signals that ended the program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. It is no error if the reader of its output stops reading."""
    try:
        status = _main(arguments)
    except SystemExit as left:  # the help text may still be in the buffer
        raise SystemExit(_write("") or left.code) from None
    return status or _write("")


def program() -> NoReturn:
    """The entry point for the shell; stdout may be closed, and a RuntimeWarning is printed as one line."""
    sys.stdout, usual = sys.stdout or io.StringIO(), warnings.formatwarning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    warnings.formatwarning = lambda message, category, *where: (
        f"suptickets: {message}\n" if category is RuntimeWarning else usual(message, category, *where)
    )
    if not is_main():
        warnings.simplefilter("ignore", RuntimeWarning)  # the first process gives them
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:  # of several, one may wait for another without end
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is to be ignored
            signal.signal(signal.SIGINT, _interrupt)
    leave(main())


def _interrupt(number: int, _: object) -> None:
    """SIGTERM ends the program as Ctrl-C does, where nothing that is more careful waits for either."""
    _interrupts.append(number)
    raise KeyboardInterrupt


def _result(parsed: argparse.Namespace) -> dict[str, Any]:
    try:
        result: dict[str, Any] = COMMANDS[parsed.command](parsed)
    except Exception as error:
        if _interrupts:  # which a library has taken for an error of its own
            raise KeyboardInterrupt from error
        raise
    return result


def _write(text: str) -> int:
    """Write to stdout; returns the exit status: 1 if that fails, 0 also if the reader has gone."""
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
            result = _result(parsed)
    except (SparsityError, TrainingError, KeyboardInterrupt) as error:
        message = " ".join(str(error).splitlines()) or "stopped"
        alone = isinstance(error, SparsityError)  # the others stop all processes for one reason
        if speaks(message) if alone else is_main():
            print_plain(f"suptickets: {message}")
        return 2 if alone else 1
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM) or error.filename is None:
            raise
        print_plain(f"suptickets: {error.strerror}: {error.filename}")
        return 2
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
    """The result as a person sees it, names as they are; in a pipe or a file, no cells are folded."""
    terminal, text = sys.stdout.isatty(), io.StringIO()
    width = None if terminal else WIDTH
    console = Console(
        file=text, force_terminal=terminal, width=width, markup=False, emoji=False, highlight=False
    )
    SHOWN.get(command, show)(result, console)
    return text.getvalue()


if __name__ == "__main__":
    program()
