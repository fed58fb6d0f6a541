"""Files: read with what is wrong said in a line, written whole or not at all, locked against others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from suptickets.errors import SparsityError, TrainingError, reason

# ---- reading ----


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """Names and values from a YAML or JSON file."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SparsityError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SparsityError(f"{path} is no valid YAML or JSON: it is no text") from error
    try:
        values = _parsed(path, text)
    except SparsityError:
        raise
    except Exception as error:
        raise SparsityError(f"{path} is no valid YAML or JSON: {reason(error)}") from error
    if not isinstance(values, dict):
        raise SparsityError(f"{path} must hold names and values, not {type(values).__name__}")
    return values


def _parsed(path: str | Path, text: str) -> Any:
    """JSON or YAML, as the name says; by another name whichever it is."""
    if not str(path).endswith((".yaml", ".yml")):
        try:
            return json.loads(text, object_pairs_hook=lambda pairs: once(path, pairs))
        except json.JSONDecodeError:
            if str(path).endswith(".json"):
                raise
    import yaml

    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        where = error.problem_mark or error.context_mark
        line = f"line {where.line + 1} column {where.column + 1}: " if where else ""
        what = ", ".join(filter(None, (error.context, error.problem)))
        raise SparsityError(f"{path} is no valid YAML or JSON: {line}{what}") from error
    if isinstance(node, yaml.MappingNode):
        once(path, [(key.value, None) for key, _ in node.value])
    return yaml.safe_load(text)


def once(path: str | Path, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """The pairs as a mapping; refuses a name that occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise SparsityError(f"{path} has {next(n for n in names if names.count(n) > 1)} twice")
    return values


# ---- writing ----


def write(path: Path, writer: Callable[[Path], Any]) -> None:
    """Write a file beside `path` (or what it links to), flush it to the disk, then move it into place."""
    if path.exists() and (not path.is_file() or _is_output(path)):  # moving would take it from its users
        raise SparsityError(f"cannot write {path}: it is no plain file, choose another --out")
    path = path.resolve()
    part = path.with_name(path.name + ".part")
    try:
        writer(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError, SafetensorError) as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise TrainingError(
            f"cannot write {path} ({reason(error)}): what was there before is unchanged"
        ) from error


def _is_output(path: Path) -> bool:
    """Whether a file is where the output of this process goes, as /dev/stdout may be."""
    with suppress(OSError):
        return any(os.path.samestat(path.stat(), os.fstat(number)) for number in (1, 2))
    return False


def append(file: int, line: bytes) -> None:
    """Append all of a line to an open file, or nothing; after a line that was cut off, begin a new one."""
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        line = b"\n" + line
    if os.write(file, line) < len(line):  # the disk is full
        os.ftruncate(file, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file that others may read, like all files here; `save_file` writes private ones."""
    path.write_bytes(save(dict(tensors), dict(metadata)))


def to_json(value: Any, indent: int | None = None) -> str:
    """Standard JSON: a number that is not finite becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- locking ----


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold a lock if nobody else does; yields whether. The kernel releases it however this process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        yield locked(file.fileno())


def locked(file: int) -> bool:
    """Lock a file if nobody else holds it; gives whether it is ours (always, where there are no locks)."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
