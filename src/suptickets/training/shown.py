"""What a person sees of results: values as lines, lists as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from suptickets.training.boosters import part_names


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print lists as tables, values as lines."""
    for key, value in result.items():
        if isinstance(value, list) and value:
            console.print(table(value))
        elif not isinstance(value, list):
            console.out(f"{key:<20} {text(value)}")


def show_flops(result: Mapping[str, Any], console: Console) -> None:
    """Print the cost layer by layer, the whole of it, and what it is relative to."""
    show({"layers": result["layers"]}, console)
    show({key: value for key, value in result.items() if key not in ("notes", "layers")}, console)
    for note in result["notes"]:
        console.out(note)


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


def score_table(networks: Mapping[str, Mapping[str, Any]]) -> Table:
    """A table with a row for each of the named networks; numbers that are missing are left blank."""
    formats = {"accuracy": ".2%", "nll": ".4f", "ece": ".2%", "sparsity": ".2%"}
    rows = [
        [name, *(_number(scores.get(key), form) for key, form in formats.items())]
        for name, scores in networks.items()
    ]
    return grid({"": False, **dict.fromkeys(("accuracy", "NLL", "ECE", "sparsity"), True)}, rows)


def _number(value: float | None, form: str) -> str:
    """A number as text, empty if it does not exist."""
    return "" if value is None else format(value, form)


def result_table(summary: Mapping[str, Any]) -> Table:
    """The network before the cycles, every ticket, and their result; else the network, and any members.

    Summaries of older versions have neither `before_pruning` nor `members`.
    """
    dense, tickets, members = summary.get("before_pruning"), summary["tickets"], summary.get("members", ())
    part, combined = part_names(summary["booster"])
    rows = [("before pruning", dense and {**dense, "sparsity": 0.0})]
    rows += [("before the cycles", summary["start"])]
    rows += [(f"{part} {n}", scores) for n, scores in enumerate(tickets or members, 1)]
    rows += [(combined, summary["superposed"]), ("ensemble", summary["ensemble"])]
    rows += [] if tickets else [(combined if members else "final network", summary)]
    shown = {name: scores for name, scores in rows if scores}
    return score_table({name: {"sparsity": summary["sparsity"], **scores} for name, scores in shown.items()})


def table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> Table:
    """A table of these rows, with the columns of the first."""
    columns = dict.fromkeys(rows[0], False) if rows else {}
    return grid(columns, (map(text, row.values()) for row in rows), title)


def grid(columns: Mapping[str, bool], rows: Iterable[Iterable[str]], title: str | None = None) -> Table:
    """A table of texts, as all of them look; `columns` says which stand at the right, as numbers do."""
    made = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for name, right in columns.items():
        justify: Literal["left", "right"] = "right" if right else "left"
        made.add_column(name, justify=justify, overflow="fold", no_wrap=name == "name")
    for row in rows:
        made.add_row(*row)
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
