"""Reports on runs: what is read, how runs are grouped, what the page holds, in every format."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean, stdev

import pytest
from report_runs import make_run

from suptickets.errors import SparsityError, TrainingError
from suptickets.report import FORMATS, read_runs, run_page, write_report
from suptickets.report.chart import told_apart
from suptickets.report.html import html
from suptickets.report.looks import looks
from suptickets.report.measures import MEASURES, duration, plain
from suptickets.report.runs import INCIDENTAL, group, repeated, setting_name, varying
from suptickets.report.text import FITTED, latex, markdown
from suptickets.training import settings

EVIL = """<script>alert("1")</script>' onload='x()"""


class Reader(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def count(self, tag: str, **attributes) -> int:
        return sum(t == tag and attributes.items() <= a.items() for t, a in self.elements)


@pytest.fixture(autouse=True)
def _anyhow(monkeypatch) -> None:
    """Where things lie in a plot takes most of the time, and is seen in `test_report_plots.py`."""
    monkeypatch.setattr("suptickets.report.chart.ConstrainedLayoutEngine.execute", lambda *_: None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """RigL with and without Sup-tickets, two seeds each, and a dense one."""
    where = tmp_path_factory.mktemp("runs")
    for booster in ("sup-tickets", "none"):
        for seed in (1, 2):
            make_run(where / f"{booster}-{seed}", booster=booster, seed=seed, data_dir=f"/data/{seed}")
    make_run(where / "dense", method="dense", booster="none")
    return where


def edit(folder: Path, name: str, **changes) -> Path:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def titles(page) -> list[str]:
    return [section.title for section in page.sections]


# ---- one run ----


def test_the_page_of_a_run_has_everything(tmp_path):
    page = run_page(read_runs([make_run(tmp_path / "run")]))
    assert page.title == "RigL + Sup-tickets at 90\N{NO-BREAK SPACE}% sparsity"
    assert page.about == "digits · vgg-small · 20 epochs · recipe digits · seed 1"
    assert titles(page) == [
        "Tickets",
        "Training",
        "Layers",
        "Calibration and diversity",
        "How to run this again",
    ]
    names = [plot.name for plot in page.plots()]
    assert names == [
        *("tickets-accuracy", "tickets-nll", "tickets-ece", "learning-rate", "loss", "accuracy"),
        *("layers-0", "layers-end", "reliability"),
    ]
    read = Reader(html(page))
    assert read.count("figure") == read.count("svg") == len(names)
    assert all(read.count("figure", id=name) == 1 for name in names)
    assert read.count("table") == len(page.tables()) == 3


def test_headline_numbers_come_first_and_are_those_of_the_summary(tmp_path):
    folder = make_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    page = run_page(read_runs([folder]))
    shown = {number.label: number for number in page.numbers}
    assert shown["Accuracy"].text == f"{summary['accuracy']:.2%}".replace("%", "\N{NO-BREAK SPACE}%")
    gain = 100 * (summary["accuracy"] - summary["start"]["accuracy"])
    assert shown["Accuracy"].note == f"{gain:+.2f}\N{NO-BREAK SPACE}points through the cycles"
    assert shown["NLL"].text == f"{summary['nll']:.4f}"
    assert shown["Sparsity"].note == "300 of 3,000 weights live"
    text = html(page)
    assert text.index(shown["Accuracy"].text) < text.index("<section")


def test_scores_of_start_tickets_superposed_and_ensemble_are_in_a_table(tmp_path):
    folder = make_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    (scores,) = [t for t in run_page(read_runs([folder])).tables() if t.name == "scores"]
    rows = {row[0].text: row[1].value for row in scores.rows}
    expected = {"before the cycles": summary["start"]["accuracy"], "superposed": summary["accuracy"]}
    expected |= {f"ticket {n}": t["accuracy"] for n, t in enumerate(summary["tickets"], 1)}
    assert rows == expected | {"ensemble of the tickets": summary["ensemble"]["accuracy"]}


@pytest.mark.parametrize(
    "flags", [{"booster": "none"}, {"method": "dense", "booster": "none"}, {"method": "granet"}]
)
def test_runs_of_all_kinds_have_a_page(tmp_path, flags):
    page = run_page(read_runs([make_run(tmp_path / "run", **flags)]))
    names = {plot.name for plot in page.plots()}
    assert ("tickets-accuracy" in names) == ("booster" not in flags)
    assert ("sparsity" in names) == (flags.get("method") == "granet")  # only there it moves
    assert bool({"layers-0", "layers-end"} & names) == (flags.get("method") != "dense")
    assert Reader(html(page)).count("svg") == len(names)


def test_what_was_not_logged_is_left_out(tmp_path):
    page = run_page(read_runs([make_run(tmp_path / "run", old=True)]))
    assert titles(page) == ["Tickets", "Training", "How to run this again"]
    assert Reader(html(page)).count("figure") == 6
    config = tmp_path / "run" / "config.json"
    assert f"suptickets train --config {config} --out again" in html(page)


def test_how_to_run_it_again(tmp_path):
    text = "".join(Reader(html(run_page(read_runs([make_run(tmp_path / "run")])))).words)
    assert "suptickets train --method rigl --seed 1" in text
    assert "torch 2.13.0" in text
    assert "2 CPU threads" in text
    assert "lr-high" in text  # all settings


def test_a_superposed_ticket_that_is_worse_is_said(tmp_path):
    folder = edit(make_run(tmp_path / "run"), "summary.json", accuracy=0.1)
    assert "worse than the mean of its tickets" in html(run_page(read_runs([folder])))


def test_a_run_that_goes_on_has_a_page(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    for epochs in (0, 1, 3):
        (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in metrics[:epochs]))
        page = run_page(read_runs([folder]))
        assert page.numbers[0].text == f"{epochs} of 20"
        assert Reader(html(page)).count("figure") == (4 if epochs else 0)


def test_a_damaged_line_of_metrics_is_left_out_and_said(tmp_path):
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 21, "lo')
    page = run_page(read_runs([folder]))
    assert "could not be read, and are left out: 1." in html(page)
    assert len(read_runs([folder])[0].metrics) == 20


@pytest.mark.parametrize(("booster", "part"), [("tree-net", "head"), ("batch-ensemble", "member")])
def test_heads_and_members_are_no_tickets(tmp_path, booster, part):
    folder = make_run(tmp_path / "run", booster=booster)
    scores = [{"accuracy": 0.9 + n / 100, "nll": 0.3, "ece": 0.02} for n in range(3)]
    edit(folder, "summary.json", members=scores, tickets=[], start=None, ensemble=None)
    page = run_page(read_runs([folder]))
    assert page.sections[0].title == f"{part.capitalize()}s"
    (table,) = [t for t in page.tables() if t.name == "scores"]
    named = {row[0].text: row[1].value for row in table.rows}
    assert {f"{part} {n}": named.get(f"{part} {n}") for n in (1, 2, 3)} == {
        f"{part} {n}": 0.9 + (n - 1) / 100 for n in (1, 2, 3)
    }
    assert f"all {part}s together" in named and f"{part}s-accuracy" in {p.name for p in page.plots()}
    told = "".join(Reader(html(page)).words)
    assert f"two {part}s disagree" in told
    assert "ticket" not in re.sub(r"suptickets|Settings.*", "", told, flags=re.DOTALL)
    make_run(tmp_path / "other")
    (both,) = [p.title for p in run_page(read_runs([tmp_path])).plots() if p.title.startswith("Disagreement")]
    assert both.split("of the ")[1].split(" or ") in ([f"{part}s", "tickets"], ["tickets", f"{part}s"])


def test_what_was_explored_is_told(tmp_path):
    folder = edit(make_run(tmp_path / "run"), "summary.json", explored=0.4321)
    shown = {number.label: number for number in run_page(read_runs([folder])).numbers}
    assert shown["Explored"].text == "43.21\N{NO-BREAK SPACE}%"
    edit(folder, "summary.json", explored=None)
    assert "Explored" not in {number.label for number in run_page(read_runs([folder])).numbers}


def test_the_marks_in_the_curves_are_explained(tmp_path):
    def text(**flags):
        page = run_page(read_runs([make_run(tmp_path / str(flags), **flags)]))
        return next(section.text for section in page.sections if section.title == "Training")

    marks = "a ring before the cycles, a dot for each ticket, a diamond for"
    assert f"{marks} the superposed one." in text()
    assert f"{marks} the result." in text(booster="free-tickets")
    assert text(booster="none") == ""


# ---- several runs ----


def test_runs_that_differ_in_the_seed_alone_are_one_setting(runs):
    groups = {one.label: one for one in group(read_runs([runs]))}
    assert {label: len(one.runs) for label, one in groups.items()} == {
        "RigL + Sup-tickets": 2,
        "RigL": 2,
        "Dense": 1,
    }
    found = [json.loads((runs / f"none-{seed}" / "summary.json").read_text())["nll"] for seed in (1, 2)]
    assert groups["RigL"].mean("nll") == pytest.approx(mean(found))
    assert groups["RigL"].deviation("nll") == pytest.approx(stdev(found))
    assert groups["Dense"].deviation("nll") is None


def test_a_run_that_is_older_than_a_setting_had_its_default(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    config = tmp_path / "runs" / "none-1" / "config.json"
    older = {key: value for key, value in json.loads(config.read_text()).items() if key != "holdout"}
    config.write_text(json.dumps(older))
    found = read_runs([tmp_path / "runs"])
    assert {one.label: len(one.runs) for one in group(found)}["RigL"] == 2
    assert "holdout" not in varying([run.config for run in found])
    config.write_text(json.dumps({**older, "holdout": 0.1}))
    assert "holdout" in varying([run.config for run in read_runs([tmp_path / "runs"])])


def test_what_may_differ_is_what_does_not_change_a_run():
    assert {"seed", "evaluate_every", "keep_tickets", *settings._PLACE} == INCIDENTAL


def test_a_seed_of_the_same_settings_counts_once(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    shutil.copytree(runs / "none-1", tmp_path / "runs" / "none-1-again")
    shutil.copytree(runs / "none-1", tmp_path / "runs" / "none-1-begun")
    (tmp_path / "runs" / "none-1-begun" / "summary.json").unlink()
    page, once = run_page(read_runs([tmp_path / "runs"])), run_page(read_runs([runs]))
    (table,), (expected,) = ([t for t in p.tables() if t.name == "settings"] for p in (page, once))
    assert table.rows == expected.rows
    text = markdown(page)
    for name in ("none-1", "none-1-begun"):
        assert re.search(rf"{name} has the settings and the seed of \S+none-1-again, and is left out", text)
    kept = edit(shutil.copytree(runs / "none-1", tmp_path / "kept"), "config.json", keep_tickets=True)
    for order in ([kept, runs / "none-1"], [runs / "none-1", kept]):
        assert [*repeated(read_runs(order))] == [runs / "none-1"]
    again = run_page(read_runs([tmp_path / "runs" / name for name in ("none-1", "none-1-again")]))
    assert again.numbers == run_page(read_runs([runs / "none-1"])).numbers


def test_images_of_two_folders_are_two_settings(runs, tmp_path):
    for name in ("a", "b"):
        edit(shutil.copytree(runs / "none-1", tmp_path / name), "config.json", data_dir=f"/{name}")
    assert "left out" in markdown(run_page(read_runs([tmp_path])))
    for name in ("a", "b"):
        edit(tmp_path / name, "config.json", data="folder")
    found = group(read_runs([tmp_path]))
    assert sorted(one.label for one in found) == ["RigL, data dir /a", "RigL, data dir /b"]
    assert "left out" not in markdown(run_page(read_runs([tmp_path])))


def test_names_that_are_cut_are_told_apart():
    names = [f"RigL + Sup-tickets, an option of a long name {value}" for value in (0.5, 0.75)]
    first, second, third = told_apart([*names, "RigL"], 18)
    assert first != second and third == "RigL" and all(s.startswith("…") for s in (first, second))
    assert told_apart([names[0], names[0], "RigL"], 18)[0].startswith("RigL")


def test_names_are_as_short_as_they_can_be(tmp_path):
    for n, flags in enumerate([{}, {"method": "set"}, {"lr": 0.2}, {"lr": 0.2, "cycles": 2}]):
        make_run(tmp_path / str(n), **flags)
    labels = {one.label for one in group(read_runs([tmp_path]))}
    rigl = {"lr 0.1, 3 tickets", "lr 0.2, 3 tickets", "lr 0.2, 2 tickets"}
    assert labels == {"SET + Sup-tickets", *(f"RigL + Sup-tickets, {name}" for name in rigl)}


def test_settings_are_named_as_the_paper_does():
    names = [("cycles", 12), ("cycles", 1), ("cycle_epochs", 2.0), ("epochs", 250), ("beta", 0.9)]
    assert [setting_name(*one) for one in names] == [
        "12 tickets",
        "1 ticket",
        "C = 2",
        "250 epochs",
        "β = 0.9",
    ]
    assert (
        setting_name("criteria", ["a:b", "c:d"])
        == setting_name("criteria", ("a:b", "c:d"))
        == "criteria a:b c:d"
    )


def test_the_page_of_several_settings(runs):
    page = run_page(read_runs([runs]))
    assert page.title == "3 settings compared"
    assert page.about == "digits · vgg-small · 20 epochs · recipe digits · 5 runs"
    (time,) = [number for number in page.numbers if number.label == "Time of all runs"]
    assert (time.text, time.note) == (duration(5 * 754.2), "added up, on 2 CPU threads")
    names = {plot.name for plot in page.plots()}
    assert {
        "settings-nll",
        "test-accuracy",
        "flops-training",
        "flops-inference",
        *(f"reliability-{n}" for n in range(3)),
        "layers-end",
    } <= names
    (settings_table,) = [t for t in page.tables() if t.name == "settings"]
    assert {row[0].text: row[1].text for row in settings_table.rows}["RigL"] == "2"
    (every,) = [t for t in page.tables() if t.name == "runs"]
    assert len(every.rows) == 5
    assert Reader(html(page)).count("svg") == len(page.plots())


def test_the_diversity_of_each_of_several_runs_is_shown(runs):
    page = run_page(read_runs([runs]))
    assert {"diversity-disagreement", "diversity-kl"} <= {plot.name for plot in page.plots()}
    (every,) = [t for t in page.tables() if t.name == "runs"]
    places = [every.header.index(name) for name in ("Disagreement", "KL divergence", "Accuracy (%)")]
    shown = [[row[place].value for place in places] for row in every.rows]
    told = [json.loads((runs / f"sup-tickets-{n}" / "summary.json").read_text()) for n in (1, 2)]
    expected = [[*one["diversity"].values(), one["accuracy"]] for one in told]
    assert [values for values in shown if values[0] is not None] == expected
    tips = html(page)
    for one in told:
        assert f"{one['diversity']['kl']:.3f}, accuracy {one['accuracy']:.2%}".replace("%", "\xa0%") in tips


def test_without_a_booster_lines_are_dashed_in_the_colour_of_their_method(runs):
    groups = group(read_runs([runs]))
    found = {one.label: look for one, look in zip(groups, looks(groups), strict=True)}
    assert found["RigL"].colour == found["RigL + Sup-tickets"].colour != found["Dense"].colour
    assert {label: look.plain for label, look in found.items()} == {
        "RigL + Sup-tickets": False,
        "RigL": True,
        "Dense": False,
    }


def test_two_settings_of_a_method_have_two_colours(tmp_path):
    for n, flags in enumerate([{}, {"lr": 0.2}, {"method": "set"}]):
        make_run(tmp_path / str(n), **flags)
    assert len({look.colour for look in looks(group(read_runs([tmp_path])))}) == 3


def test_more_settings_than_colours(tmp_path):
    for n in range(9):
        make_run(tmp_path / str(n), lr=0.1 + n / 100)
    text = html(run_page(read_runs([tmp_path])))
    assert "var(--series-5)" in text
    assert "lr 0.18" in text


def test_plots_that_are_not_read_with_many_settings_show_some_and_say_so(tmp_path):
    for n in range(9):
        make_run(tmp_path / str(n), lr=0.1 + n / 100)
    runs = read_runs([tmp_path])
    told, first = "Shown: the first 6 of 9 settings.", [one.label for one in group(runs)][:6]
    plots = {plot.name: plot for plot in run_page(runs).plots()}
    shown = [plot for name, plot in plots.items() if name.startswith("reliability")]
    assert [plot.title for plot in shown] == [f"Reliability: {label}" for label in first]
    assert told in shown[0].text and told in plots["layers-end"].text
    assert plots["test-accuracy"].text == "Grey: further settings."
    few = {plot.name: plot.text for plot in run_page(runs[:3]).plots()}
    assert "Shown" not in "".join(few.values()) and "Grey" not in few["test-accuracy"]


def test_no_plot_says_that_more_diversity_is_better(runs):
    read = html(run_page(read_runs([runs])))
    figures = {part.split('"')[0]: part for part in read.split('<figure class="plot" id="')[1:]}
    assert "more is better" in figures["settings-accuracy"]
    for name in ("diversity-disagreement", "diversity-kl"):
        assert "is better" not in figures[name]


# ---- names from outside ----


def evil_run(where: Path) -> Path:
    folder = make_run(where / "<b>run<i>", layers=(EVIL, "$x_1$ & %", "_a"))
    edit(folder, "config.json", model=EVIL, method=EVIL, data=EVIL, recipe=EVIL, label_smoothing=EVIL)
    changes = {
        "command": EVIL,
        "hardware": EVIL,
        "versions": {EVIL: EVIL},
        "layers": [layer(EVIL), layer("$b$")],
    }
    return edit(folder, "summary.json", **changes)


def layer(name: str) -> dict:
    return {"name": name, "shape": [EVIL], "size": 10, "nonzero": 1, "sparsity": 0.9}


def test_names_stay_text(tmp_path):
    make_run(tmp_path / "other")
    for paths in ([evil_run(tmp_path)], [tmp_path]):
        page = run_page(read_runs(paths))
        read = Reader(html(page))
        assert read.count("script") == 1
        assert read.count("b") == read.count("i") == 0
        assert not [a for _, a in read.elements for name in a if name.startswith("on")]
        assert EVIL in "".join(read.words)
        assert any(EVIL in (a.get("data-tip") or "") for _, a in read.elements)


def test_the_page_asks_for_nothing(runs):
    text = html(run_page(read_runs([runs])))
    policy = Reader(text).elements[3][1]
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none'")
    read = Reader(text)
    links = [a[key] for _, a in read.elements for key in ("src", "href", "xlink:href") if key in a]
    assert links
    assert all(link.startswith(("#", "data:image/png")) for link in links)
    assert "http://" not in text.replace("http-equiv", "")
    assert "https://" not in text


@pytest.mark.parametrize("text", ["a\x00b", "\ud800", "x\x1b[1m", "‮evil"])
def test_what_cannot_be_printed_is_replaced(tmp_path, text):
    assert plain(text).isprintable()
    folder = edit(make_run(tmp_path / "run"), "config.json", model=text)
    assert write_report([folder])[0].read_text(encoding="utf-8")


JUNK = [
    1e308,
    -1e308,
    1e13,
    -1e12,
    5e-324,
    None,
    "x",
    [],
    {},
    [1],
    {"a": 1},
    [[]],
    [{"accuracy": "y"}],
    math.nan,
    math.inf,
    -1,
    0,
    10**400,
    True,
]


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk)[:20])
def test_files_may_hold_anything(tmp_path, junk):
    folder = make_run(tmp_path / "run")
    summary, config = (json.loads((folder / name).read_text()) for name in ("summary.json", "config.json"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for key in summary:
        (folder / "summary.json").write_text(json.dumps(summary | {key: junk}))
        markdown(run_page(read_runs([folder])))
    for key in config:
        (folder / "config.json").write_text(json.dumps(config | {key: junk}))
        markdown(run_page(read_runs([folder])))
    half = [{**line, **dict.fromkeys(list(line)[n % 4 :: 4], junk)} for n, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in half))
    (folder / "summary.json").write_text(json.dumps(summary | dict.fromkeys(list(summary)[::2], junk)))
    for part in (0, 1):
        (folder / "config.json").write_text(json.dumps(config | dict.fromkeys(list(config)[part::2], junk)))
        assert "<svg" in html(run_page(read_runs([folder])))


def first_scores(page) -> dict[str, str]:
    return {number.label: number.text for number in page.numbers}


@pytest.mark.parametrize("absurd", [-1e308, 1e308, -0.01, 1.01, 10**400])
@pytest.mark.parametrize("key", ["accuracy", "ece", "sparsity"])
def test_shares_beyond_0_and_1_are_missing(tmp_path, key, absurd):
    folder = edit(make_run(tmp_path / "run"), "summary.json", **{key: absurd})
    tickets = json.loads((folder / "summary.json").read_text())["tickets"]
    edit(folder, "summary.json", tickets=[tickets[0] | {key: absurd}, *tickets[1:]])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[5] |= {f"test_{key}": absurd, key: absurd, "layers": {"conv1": absurd}}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_runs([folder])
    page = run_page([run])
    assert first_scores(page)[MEASURES[key].label] == "\N{EN DASH}"
    assert run.value(key) is None
    assert len(run.curve("test_accuracy")) == (19 if key == "accuracy" else 20)
    assert "<svg" in html(page)


@pytest.mark.parametrize("key", ["nll", "seconds", "train_flops_ratio"])
def test_numbers_beyond_all_measure_are_missing(tmp_path, key):
    folder = make_run(tmp_path / "run")
    for value, known in ((1e12, True), (1.1e12, False), (-1e308, False)):
        (run,) = read_runs([edit(folder, "summary.json", **{key: value})])
        assert (run.value(key) is not None) == known
        assert "<svg" in html(run_page([run]))


# ---- formats ----


def test_markdown_tables_have_as_many_cells_in_every_row(tmp_path):
    edit(evil_run(tmp_path), "config.json", model="a|b\\|c\nd *e* `f`")
    text = markdown(run_page(read_runs([tmp_path])))
    assert text.startswith("# ")
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in table.splitlines()}) == 1
    assert "a\\|b\\\\\\|c d \\*e\\* \\`f\\`" in text
    fenced = re.sub(r"^```text\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "<script" not in fenced.replace("\\<", "") and fenced.count("```") == 0


@pytest.mark.parametrize("line", ["plain", "a ``` b", "`````", "~~~"])
def test_a_command_in_markdown_is_as_it_was(tmp_path, line):
    folder = edit(make_run(tmp_path / "run"), "summary.json", command=line)
    text = markdown(run_page(read_runs([folder])))
    (fence,) = re.findall(rf"^(`+)text\n{re.escape(line)}\n\1$", text, re.MULTILINE)
    assert fence not in line


def test_latex_special_characters_are_escaped(tmp_path):
    text = latex(run_page(read_runs([evil_run(tmp_path)])))
    assert r"\$b\$" in text
    assert r"{[}0.5, 0.75]" in text
    assert r"\textless{}script\textgreater{}alert(''1'')" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 3
    for table in re.findall(r"\\toprule\n(.*?)\\bottomrule", text, re.DOTALL):
        rows = [row for row in table.splitlines() if row != r"\midrule"]
        assert all(row.endswith(r" \\") for row in rows)
        assert len({len(re.findall(r"(?<!\\)&", row)) for row in rows}) == 1
    assert text.count(FITTED) == 3
    text = text.replace(FITTED, "")
    plain_text = re.sub(r"\\[a-z]+\{\}|\\[&%$#_{}]|\$[^$]*\$|^% .*$|tab:[\w-]+", "", text, flags=re.MULTILINE)
    assert not set(plain_text) & set('$#_^~<>|"%')


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_latex_takes_the_tables(tmp_path):
    tables = latex(run_page(read_runs([evil_run(tmp_path)])))
    packages = r"\documentclass{article}\usepackage{booktabs,graphicx}"
    (tmp_path / "x.tex").write_text(rf"{packages}\begin{{document}}{tables}\end{{document}}")
    command = ["pdflatex", "-halt-on-error", "-draftmode", "x.tex"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_file_for_each_plot(runs, tmp_path, kind):
    files = write_report([runs / "none-1"], tmp_path / "new" / "plots", format=kind)
    names = [plot.name for plot in run_page(read_runs([runs / "none-1"])).plots()]
    assert [path.name for path in files] == [f"{name}.{kind}" for name in names]
    start = b"\x89PNG" if kind == "png" else b"<?xml"
    assert all(path.read_bytes().startswith(start) for path in files)
    again = write_report([runs / "none-1"], tmp_path / "again", format=kind)
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in again]


def test_where_a_report_goes(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = make_run(tmp_path / "one")
    assert write_report([one], format="md") == [one / "report.md"]
    assert write_report([one, runs / "none-1"], format="tex") == [Path("report.tex")]
    several = sorted(path for path in runs.iterdir() if path.is_dir())
    assert write_report(several, format="md") == write_report([runs], format="md") == [runs / "report.md"]
    (runs / "report.md").unlink()
    make_run(tmp_path / "two")
    assert write_report(["one", "two"], format="md") == [Path("report.md")]
    assert write_report([one], tmp_path, format="md") == [tmp_path / "report.md"]
    assert write_report([one], tmp_path / "a" / "b.html") == [tmp_path / "a" / "b.html"]
    assert write_report([one], format="svg")[0].parent == one / "plots"
    assert not list(tmp_path.rglob("*.part"))


def test_the_same_run_gives_the_same_page(runs):
    assert html(run_page(read_runs([runs]))) == html(run_page(read_runs([runs])))


def test_a_run_is_counted_once(runs):
    assert len(read_runs([runs, runs / "dense", runs])) == 5


def test_reports_among_the_runs_are_passed_over(runs, tmp_path):
    """As a shell gives them for `suptickets report runs/*`."""
    where = tmp_path / "runs"
    shutil.copytree(runs, where)
    (where / "report.html").write_text("")
    write_report([where / "dense"], where / "plots", format="svg")
    assert len(read_runs(sorted(where.iterdir()))) == 5
    for only in ([where / "report.html"], [where / "plots", where / "report.html"]):
        with pytest.raises(SparsityError, match="reports?: give run folders, or folders that hold some"):
            read_runs(only)
    (where / "notes.txt").write_text("")
    with pytest.raises(SparsityError, match=r"notes.txt is no folder"):
        read_runs(sorted(where.iterdir()))
    (where / "empty").mkdir()
    with pytest.raises(SparsityError, match="there is no run in"):
        read_runs([where / "empty", where / "dense"])


# ---- bad input ----


def test_bad_input_is_said_in_one_line(runs, tmp_path):
    with pytest.raises(SparsityError, match="is no folder"):
        write_report([tmp_path / "missing"])
    with pytest.raises(SparsityError, match="there is no run in"):
        write_report([tmp_path])
    with pytest.raises(SparsityError, match="unknown format 'htm': did you mean 'html'"):
        write_report([runs], format="htm")
    with pytest.raises(SparsityError, match="give run folders"):
        write_report([])
    damaged = make_run(tmp_path / "damaged")
    (damaged / "summary.json").write_text("{")
    with pytest.raises(SparsityError, match=r"summary.json is no valid YAML or JSON"):
        write_report([damaged])
    (tmp_path / "file").write_text("")
    with pytest.raises(SparsityError, match="cannot make the folder"):
        write_report([runs], tmp_path / "file" / "x.html", format="md")


def test_a_report_that_cannot_be_written_leaves_the_old_one(runs, tmp_path, monkeypatch):
    out = tmp_path / "report.md"
    out.write_text("old")
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(TrainingError, match="No space left"):
        write_report([runs], out, format="md")
    assert out.read_text() == "old"


def test_tables_need_no_matplotlib(runs, tmp_path):
    code = (
        "import sys, pathlib, suptickets.report as report\n"
        f"paths, out = [pathlib.Path({str(runs)!r})], pathlib.Path({str(tmp_path / 'x.md')!r})\n"
        "report.write_report(paths, out, format='md')\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- numbers ----


def test_numbers_as_text():
    accuracy, nll = MEASURES["accuracy"], MEASURES["nll"]
    assert accuracy.show(0.98765, 0.00123) == "98.77 ± 0.12\N{NO-BREAK SPACE}%"
    assert accuracy.bare(None) == "\N{EN DASH}"
    assert accuracy.change(-0.0012) == "\N{MINUS SIGN}0.12\N{NO-BREAK SPACE}points"
    assert accuracy.change(-0.00001) == "0.00\N{NO-BREAK SPACE}points"
    assert nll.change(0.02) == "+0.0200"
    assert set(FORMATS) == {"html", "md", "tex", "png", "svg"}
