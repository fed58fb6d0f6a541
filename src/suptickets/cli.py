"""The command line. Exit status: 0 done, 2 bad input (one line on stderr), 1 anything else."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from suptickets.arguments import LISTS, parser
from suptickets.bench import bench
from suptickets.bench import show as show_measured
from suptickets.errors import SparsityError, TrainingError, reason
from suptickets.experiments.reproduction import reproduce
from suptickets.experiments.reproduction import show as show_reproduced
from suptickets.experiments.results import write_pages
from suptickets.experiments.store import Store
from suptickets.report import FORMATS, write_report
from suptickets.training.evaluate import evaluate
from suptickets.training.export import export
from suptickets.training.files import to_json
from suptickets.training.folder import RunFolder
from suptickets.training.price import price
from suptickets.training.processes import deserted, disconnect, first_alone, is_main, leave, speaks
from suptickets.training.progress import print_plain
from suptickets.training.settings import Settings, resolve
from suptickets.training.shown import result_table, show, show_evaluation, show_flops
from suptickets.training.train import default_folder, train, train_seeds
from suptickets.training.verdict import SUPERPOSING, verdict


def _train(
    config: str | None,
    out: str | None,
    resume: str | None,
    seeds: int,
    jobs: int | None,
    force: bool,
    **given: Any,
) -> dict[str, Any]:
    if resume is not None:
        if config or seeds != 1 or (resume and out):
            raise SparsityError(
                "--resume takes the settings from its folder: leave out --config, --out, --seeds"
            )
        folder = RunFolder(resume or out or default_folder(resolve(given)))
        out = str(folder.path)
        settings = first_alone(given.get("device", "auto"), lambda: _resumed(folder, given))
    else:
        settings = resolve(given, config)
    for name, count in (("--seeds", seeds), ("--jobs", jobs)):
        if count is not None and count < 1:
            raise SparsityError(f"{name} must be at least 1, not {count}")
    if seeds > 1:
        result = train_seeds(settings, seeds, out, force=force, jobs=jobs)
    else:
        moved = resume is not None and "data_dir" in given
        result = train(settings, out, force=force, moved=moved)
    for summary in result.get("runs", [result]) if is_main() else ():
        write_run_page(Path(summary["run"]))
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


def _worse(summary: dict[str, Any]) -> list[str]:
    """A line if averaging did not help."""
    superposed = summary["booster"] in SUPERPOSING
    worse = verdict(summary, summary["tickets"] if superposed else [], summary["booster"])
    return [] if worse is None else [worse]


def _say_worse(result: dict[str, Any]) -> None:
    """Say beside the JSON what stands below the table otherwise."""
    for summary in result.get("runs", [result]):
        for worse in _worse(summary):
            print_plain(f"{summary['run']}: {worse}" if "runs" in result else worse)


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
        for worse in _worse(summary):
            console.out(worse)
        console.out(f"everything is in {summary['run']}")
    if "mean" in result:
        mean, deviation = result["mean"], result["deviation"]
        forms = {"accuracy": ".2%", "ece": ".2%"}
        scores = (f"{k} {mean[k]:{(f := forms.get(k, '.4f'))}} ({deviation[k]:{f}})" for k in mean)
        console.out(f"mean (deviation) of the seeds: {', '.join(scores)}")


def _reproduce(name: list[str], cells: list[str], set: list[str], **options: Any) -> dict[str, Any]:
    changes = dict(_changed(setting) for setting in set)
    return reproduce(name, cells=",".join(cells), changes=changes, **options)


def _changed(setting: str) -> tuple[str, Any]:
    """Split NAME=VALUE; the value is read as JSON, or as text if it is not JSON."""
    name, equals, value = setting.partition("=")
    if not equals:
        raise SparsityError(f"{setting!r} changes no setting: write NAME=VALUE, as in --set prune=layer")
    with contextlib.suppress(ValueError, RecursionError):
        return name.replace("-", "_"), json.loads(value)
    return name.replace("-", "_"), value


def _report(
    path: list[Path], out: str | None, format: str, experiment: list[str], **which: Any
) -> dict[str, Any]:
    ending = Path(out or "").suffix.removeprefix(".")
    if ending in FORMATS and ending != format and not Path(out or "").is_dir():
        raise SparsityError(f"{out} is no name for {format}: add --format {ending}")
    store = Store(path[0])
    if experiment and len(path) > 1:
        raise SparsityError("--experiment needs one store: give one folder of results")
    found = store.read_aloud() if len(path) == 1 else []
    if store.damaged and not found:
        raise SparsityError(f"all results in {store.folder} are damaged: run suptickets reproduce again")
    if found or experiment:
        written = write_pages(store.folder, experiment, out, format=format, **which)
    elif any(value is not None for value in which.values()):
        raise SparsityError("--scale and --separate choose among the results of one store: leave them out")
    else:
        written = write_report(path, out, format=format)
    if not written:
        raise SparsityError("there is nothing to draw: --format html tells what there is")
    together = os.path.commonpath([file.parent for file in written]) or "."
    return {"path": str(written[0] if len(written) == 1 else out or together)}


def _list(kind: str) -> dict[str, Any]:
    return {kind: [{"name": name, "summary": summary} for name, summary in LISTS[kind].items()]}


def _flops(
    recipe: str | None, classes: int | None, size: int | None, final: float | None, **options: Any
) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    if recipe is None:
        given = {"model": "vgg16", **given}
        recipe = "paper-imagenet" if given["model"].endswith("imagenet") else "paper-cifar"
    return price(resolve({**given, "recipe": recipe}), classes=classes, size=size, final=final)


COMMANDS: dict[str, Any] = {
    "train": _train,
    "evaluate": evaluate,
    "export": export,
    "list": _list,
    "flops": _flops,
    "report": _report,
    "reproduce": _reproduce,
    "bench": bench,
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


def _result(command: str, options: dict[str, Any]) -> dict[str, Any]:
    try:
        result: dict[str, Any] = COMMANDS[command](**options)
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
        options = vars(parser().parse_args(arguments))
        command, as_json = options.pop("command"), options.pop("json")
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):  # a model may print
            result = _result(command, options)
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
    if as_json and command == "train":
        _say_worse(result)
    unwritten = _write(f"{to_json(result)}\n" if as_json else _shown(command, result))
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
