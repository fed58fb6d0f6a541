"""What a result depends on beside its settings: versions, hardware, revision of the library."""

from __future__ import annotations

import os
import re
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from suptickets.errors import SparsityError
from suptickets.training.processes import connect
from suptickets.training.result import hardware, versions

PACKAGE = Path(__file__).parent.parent
TOLD = "SUPTICKETS_REVISION"  # the variable that states the revision where git cannot


def provenance(device: str) -> dict[str, Any]:
    """The provenance of a result that is made now, on this device."""
    return {
        "versions": versions(),
        "hardware": hardware(connect(device).device),
        "revision": revision(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def revision() -> str:
    """The git revision of the library, `-dirty` if its own files differ from it.

    Without git, or if the library is no checkout, it is what `SUPTICKETS_REVISION` says, or else `unknown`.
    """
    return _from_git() or _told() or "unknown"


def _from_git() -> str | None:
    """The revision as git knows it; results that are written into the same checkout do not make it dirty."""
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")
        head, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _told() -> str | None:
    told = os.environ.get(TOLD, "").strip()
    if told and not re.fullmatch("[0-9a-f]{40}(-dirty)?", told):
        raise SparsityError(f"{TOLD} must be what `git rev-parse HEAD` prints, not {told!r}")
    return told or None
