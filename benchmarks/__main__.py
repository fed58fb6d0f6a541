"""`python -m benchmarks [name...] [--json]`: a table, or JSON; exit status 1 if a requirement was missed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from benchmarks import build, explore, loop, step, superpose
from benchmarks.timing import Row

BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "explore": explore.run,
    "step": step.run,
    "build": build.run,
    "loop": loop.run,
    "superpose": superpose.run,
}


def main() -> int:
    """Run the named benchmarks, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="The project's own measurements."
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"any of {', '.join(BENCHMARKS)}; default: all"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}: there are {', '.join(BENCHMARKS)}")
    results = {}
    for name in options.names or BENCHMARKS:
        results[name] = BENCHMARKS[name]()
        if not options.json:
            show(name, results[name])
    if options.json:
        listed = [{"name": name, "rows": [row.as_json() for row in rows]} for name, rows in results.items()]
        print(json.dumps({"benchmarks": listed}, indent=2))
    return int(any(row.met is False for rows in results.values() for row in rows))


def show(name: str, rows: list[Row]) -> None:
    """One table."""
    print(f"{name:42}{'ms':>10}{rows[0].ratio_name:>16}{'required':>10}")
    for row in rows:
        verdict = "" if row.met is None else "met" if row.met else "MISSED"
        label = f"  {row.model}, {row.variant}"
        print(
            f"{label:42}{row.milliseconds:>10.1f}{row.ratio:>16.3f}{row.requirement:>10}  {verdict}".rstrip()
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
