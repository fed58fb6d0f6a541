"""What a person sees of results: values as lines, lists as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from suptickets.training.progress import score_table


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print lists as tables, values as lines."""
    for key, value in result.items():
        if isinstance(value, list) and value:
            console.print(table(value))
        elif not isinstance(value, list):
            console.print(f"{key:<20} {text(value)}", highlight=False, soft_wrap=True)


def show_flops(result: Mapping[str, Any], console: Console) -> None:
    """Print the cost layer by layer, the whole of it, and what it is relative to."""
    show({"layers": result["layers"]}, console)
    show({key: value for key, value in result.items() if key not in ("notes", "layers")}, console)
    for note in result["notes"]:
        console.print(note, highlight=False, soft_wrap=True)


def show_evaluation(result: Mapping[str, Any], console: Console) -> None:
    """Print scores, costs, calibration and layers; several networks are numbered."""
    networks = result.get("networks", [result])
    several = {f"{n}  {one['path']}": one for n, one in enumerate(networks, 1) if "path" in one}
    together = result.get("ensemble", result)
    rows = {**several, "together": together} if several else {"": result}
    console.print(score_table(rows))
    console.print(table([{"network": n, **_costs(one)} for n, one in enumerate(networks, 1)]))
    show({"top5": together["top5"], **(result["diversity"] or {})}, console)
    console.print(table([bin_ for bin_ in together["reliability"] if bin_["samples"]], "reliability"))
    console.print(table(_layers(networks), "sparsity of the layers"))


def _costs(network: Mapping[str, Any]) -> dict[str, Any]:
    names = ("nonzero", "forward_flops_dense", "forward_flops", "test_flops_ratio", "explored")
    return {name: network[name] for name in names}


def _layers(networks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each layer, a column for each network."""
    known = [{layer["name"]: layer for layer in network["layers"]} for network in networks]
    names = {name: layer for layers in known for name, layer in layers.items()}
    return [
        {
            "name": name,
            "shape": layer["shape"],
            **{str(n): _sparsity(k, name) for n, k in enumerate(known, 1)},
        }
        for name, layer in names.items()
    ]


def _sparsity(layers: Mapping[str, Any], name: str) -> float | None:
    return layers[name]["sparsity"] if name in layers else None


def table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> Table:
    """A table of these rows, with the columns of the first."""
    made = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for column in rows[0] if rows else ():
        made.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        made.add_row(*(text(cell) for cell in row.values()))
    return made


def text(value: Any) -> str:
    """A value in a few characters; nothing for None and False."""
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
