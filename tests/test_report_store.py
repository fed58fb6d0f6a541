"""Pages of experiments from a store: alone, and with the folders of its runs."""

import re
import shlex
import shutil
from pathlib import Path
from statistics import mean, stdev

import pytest
from report_store import LAYERS, MADE, make_folder, make_record, make_store

from suptickets.errors import SparsityError
from suptickets.experiments import EXPERIMENTS, experiment
from suptickets.experiments.errata import ERRATA
from suptickets.experiments.numbers import spent
from suptickets.experiments.plan import Mode, readings, run_of
from suptickets.experiments.results import notes, page, write_pages
from suptickets.experiments.store import Store
from suptickets.report import stored_runs
from suptickets.report.chart import drawn
from suptickets.report.document import Listing
from suptickets.report.html import html
from suptickets.report.runs import grouped
from suptickets.report.stored import trained
from suptickets.report.text import latex

RIGL = "data=cifar10,method=rigl,sparsity=0.9"
DOCS = Path(__file__).parent.parent / "docs"


def pages(where: Path, name: str, mode: Mode | None = None):
    return page(name, Store(where).read(), mode or Mode(), where)


def names(one) -> set[str]:
    return {plot.name for plot in one.plots()}


def reading_of(name: str, cells: str):
    (cell, *_) = experiment(name).cells(cells)
    return readings(cell)[0]


# ---- from results to runs ----


def test_a_store_alone_shows_all_that_it_knows(tmp_path):
    make_store(tmp_path, "vgg16", cells=RIGL)
    one = pages(tmp_path, "vgg16")
    where = "cifar10-vgg16"
    for kind in ("settings-accuracy", "settings-nll", "settings-ece", "flops-training", "flops-inference"):
        assert f"{kind}-{where}" in names(one)
    for kind in ("test-accuracy", "layers-end", "reliability-0", "reliability-1"):
        assert f"{kind}-{where}-90" in names(one)
    assert {f"diversity-kl-{where}", f"diversity-disagreement-{where}"} <= names(one)
    assert not [name for name in names(one) if name.startswith(("learning-rate", "train-", "layers-0"))]


def test_the_table_of_settings_is_the_mean_over_the_seeds(tmp_path):
    make_store(tmp_path, "vgg16", cells="method=rigl,sparsity=0.9")
    (table,) = [t for t in pages(tmp_path, "vgg16").tables() if t.name == "settings"]
    shown = {row[0].text: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert len(shown) == 4
    for data in ("cifar10", "cifar100"):
        own = [r["measures"] for r in Store(tmp_path).read() if r["cell"]["data"] == data]
        boosted = [one for one in own if one["booster"] == "sup-tickets"]
        row = shown[f"{data}, RigL + Sup-tickets"]
        accuracies = [one["accuracy"] for one in boosted]
        assert row["Accuracy (%)"].text == f"{100 * mean(accuracies):.2f} ± {100 * stdev(accuracies):.2f}"
        assert row["Runs"].text == "3"
        tickets = [ticket["accuracy"] for one in boosted for ticket in one["tickets"]]
        assert row["Mean of its tickets (%)"].value == pytest.approx(mean(tickets))
        assert row["KL divergence"].value == pytest.approx(mean(one["diversity"]["kl"] for one in boosted))
        assert shown[f"{data}, RigL"]["KL divergence"].value is None


def test_of_two_results_for_a_seed_the_later_one_counts(tmp_path):
    reading = reading_of("vgg16", RIGL)
    for accuracy in (0.1, 0.7):
        record = make_record(reading, 1, Mode())
        Store(tmp_path).add({**record, "measures": {**record["measures"], "accuracy": accuracy}})
    (run,) = stored_runs(Store(tmp_path).read())
    assert run.value("accuracy") == 0.7


def test_curves_come_from_the_folders_that_are_still_there(tmp_path):
    make_store(tmp_path, "vgg16", cells=RIGL, folders=True)
    one = pages(tmp_path, "vgg16")
    where = "cifar10-vgg16-90"
    expected = {
        f"{kind}-{where}" for kind in ("learning-rate", "train-accuracy", "test-accuracy", "layers-0")
    }
    assert expected <= names(one)
    folders = sorted((tmp_path / "runs" / "forked").iterdir())
    assert len(folders) == 6  # three seeds, with a booster and without
    (folders[0] / "config.json").write_text("{")  # damaged: others are shown
    assert expected <= names(pages(tmp_path, "vgg16"))
    shutil.rmtree(tmp_path / "runs")
    assert not expected & names(pages(tmp_path, "vgg16")) - {f"test-accuracy-{where}"}


def test_the_curves_of_a_setting_are_those_of_one_seed(tmp_path):
    make_store(tmp_path, "vgg16", cells=RIGL, folders=True)
    runs = stored_runs(Store(tmp_path).read(), tmp_path / "runs" / "forked")
    assert len(runs) == 6 and all(run.path.is_dir() for run in runs)
    shown = trained(runs)
    assert [run.seed for run in shown] == ["1", "1"]
    assert [len(run.metrics) for run in shown] == [250, 250]


@pytest.mark.parametrize("folders", [False, True])
def test_a_run_that_is_read_in_several_ways_is_drawn_once(tmp_path, folders):
    filter_ = "model=vgg16,sparsity=0.9"
    reading, mode = reading_of("averaging", filter_), Mode()
    tickets = make_record(reading, 1, mode)["measures"]["tickets"]
    for cell in experiment("averaging").cells(filter_):
        record = make_record(readings(cell)[0], 1, mode)
        Store(tmp_path).add({**record, "measures": {**record["measures"], "tickets": tickets}})
    if folders:
        make_folder(tmp_path, run_of(reading, 1, mode), mode)
    runs = stored_runs(Store(tmp_path).read(), tmp_path / "runs" / "forked")
    assert len(grouped(runs)) == 7 and len(trained(runs)) == 1
    labels = [one.label for one in grouped(runs)]
    assert labels[:3] == [
        "RigL + Sup-tickets, CIA",
        "RigL + Sup-tickets, CAA",
        "RigL + Sup-tickets, CIMA, β = 0.9",
    ]
    (plot,) = [p for p in pages(tmp_path, "averaging").plots() if "accuracy-cifar100-vgg16-90" in p.name]
    with drawn(plot) as chart:
        tips = [tip for each in chart.tips.values() for tip in each]
    assert sum(tip.startswith("ticket 1\n") for tip in tips) == 1


def test_tickets_are_marked_where_their_cycles_end_without_any_folder(tmp_path):
    make_store(tmp_path, "vgg16", cells=f"{RIGL},booster=sup-tickets", seeds=(1,))
    (record,) = Store(tmp_path).read()
    (run,) = stored_runs([record])
    assert run.cycles == [226, 234, 242, 250]
    others = "data=cifar10,sparsity=0.9,method=set,booster=sup-tickets"
    for name, label in (("accuracy", ""), ("test-accuracy", "RigL + Sup-tickets: ")):
        found = pages(tmp_path, "vgg16").plots()
        (plot,) = [p for p in found if p.name == f"{name}-cifar10-vgg16-90"]
        with drawn(plot) as chart:
            tips = [tip for each in chart.tips.values() for tip in each]
            assert chart.axes.get_xlim() == (226, 250)
        for n, ticket in enumerate(record["measures"]["tickets"], 1):
            assert f"{label}ticket {n}\n{ticket['accuracy']:.2%}".replace("%", "\xa0%") in tips
        make_store(tmp_path, "vgg16", cells=others, seeds=(1,))


def test_a_trial_is_drawn_as_it_was_trained(tmp_path):
    mode = Mode(scale=0.1)
    make_store(tmp_path, "vgg16", cells=RIGL, seeds=(1,), folders=True, mode=mode)
    boosted = [r for r in stored_runs(Store(tmp_path).read()) if r.config["booster"] == "sup-tickets"]
    settings = run_of(reading_of("vgg16", f"{RIGL},booster=sup-tickets"), 1, mode)
    last, length = settings.epochs, settings.cycle_epochs
    assert last < 50 and length < 8
    assert boosted[0].cycles == [last - 3 * length, last - 2 * length, last - length, last]
    assert "learning-rate-cifar10-vgg16-90" in names(pages(tmp_path, "vgg16", mode=mode))


def test_runs_of_their_own_are_found_in_their_own_place(tmp_path):
    mode = Mode(separate=True)
    make_store(tmp_path, "vgg16", cells=RIGL, seeds=(1,), folders=True, mode=mode)
    assert (tmp_path / "runs" / "separate").is_dir()
    assert "learning-rate-cifar10-vgg16-90" in names(pages(tmp_path, "vgg16", mode=mode))


def test_networks_of_several_seeds_are_a_setting_of_their_own(tmp_path):
    make_store(tmp_path, "diversity")
    one = pages(tmp_path, "diversity")
    (table,) = [t for t in one.tables() if t.name == "settings"]
    rows = [row[0].text.split(",")[0] for row in table.rows]
    assert rows == [
        *("Dense + TreeNet", "Dense + BatchEnsemble", "SET + Sup-tickets", "RigL + Sup-tickets"),
        *("Dense", "Dense ensemble"),
    ]
    titles = {plot.title for plot in one.plots()}
    assert "KL divergence of the heads, members, tickets or networks" in titles


@pytest.mark.parametrize(
    "measures", [{}, {"start": {}, "ensemble": None, "layers": [{}], "reliability": [{}]}]
)
def test_a_line_with_hardly_anything_in_it_has_a_page(tmp_path, measures):
    reading = reading_of("vgg16", RIGL)
    line = {"cell": reading.key, "seed": 1, **Mode().as_dict(), "measures": {"accuracy": 0.8} | measures}
    Store(tmp_path).add(line)
    for format in ("html", "md", "tex"):
        assert write_pages(tmp_path, ["vgg16"], tmp_path / format, format=format)


@pytest.mark.parametrize("absurd", [-1e308, 1e308, -1.0])
def test_absurd_numbers_in_a_store_are_missing(tmp_path, absurd):
    make_store(tmp_path, "vgg16", cells=RIGL, seeds=(1,))
    lines = Store(tmp_path).read()
    changed = lines[0]["measures"] | {"accuracy": absurd, "ece": absurd, "diversity": {"kl": absurd}}
    Store(tmp_path).add({**lines[0], "measures": changed})
    one = pages(tmp_path, "vgg16")
    assert one.numbers[0].text.split()[0] == str(len(lines) - 1)
    assert "<svg" in html(one)


def test_a_page_of_many_runs_is_small(tmp_path):
    """Six settings with their curves, layers and reliability; an experiment has six times as many."""
    make_store(tmp_path, "vgg16", cells="data=cifar10,sparsity=0.95", seeds=(1,), folders=True)
    (file,) = write_pages(tmp_path, ["vgg16"])
    assert file.read_text().count("<figure") > 12
    assert file.stat().st_size < 380_000


# ---- hours ----


def test_a_trunk_counts_once_in_the_hours(tmp_path):
    make_store(tmp_path, "vgg16", cells=RIGL, seeds=(1, 2))
    records = Store(tmp_path).read()
    assert len(records) == 4  # each 150 seconds, of which 226 of 250 epochs are the trunk's
    assert spent(records) == pytest.approx(2 * (150 * 226 / 250 + 2 * 150 * 24 / 250))
    assert spent([{**record, "separate": True} for record in records]) == pytest.approx(600)
    assert spent(records + records) == spent(records)
    other = {**records[0], "revision": "other"}  # whose trunk was trained another time
    assert spent([other, *records[1:]]) == pytest.approx(spent(records) + 150 * 226 / 250)
    assert spent([]) is None


def test_readings_of_one_run_count_once_in_the_hours(tmp_path):
    make_store(tmp_path, "averaging", cells="model=vgg16,sparsity=0.9", seeds=(1,))
    records = Store(tmp_path).read()
    assert len(records) == 7 and spent(records) == pytest.approx(150)
    shorter = [{**record, "seconds": 100.0 + n} for n, record in enumerate(records)]
    assert spent(shorter) == pytest.approx(106)


# ---- where files go ----


def test_plots_are_in_a_folder_for_each_experiment(tmp_path, capsys):
    make_store(tmp_path / "r", "vgg16", cells=RIGL, seeds=(1,))
    chosen = ["vgg16", "schedule"]
    for out, place in ((None, tmp_path / "r" / "plots"), (tmp_path / "o", tmp_path / "o")):
        files = write_pages(tmp_path / "r", chosen, out, format="svg")
        assert {file.parent for file in files} == {place / "vgg16", place / "schedule"}
        assert len(set(files)) == len(files) and all(file.is_file() for file in files)
        told = capsys.readouterr().err
        assert f"vgg16: {len(files) - 1} plots in {place / 'vgg16'}\n" in told
        assert f"schedule: 1 plots in {place / 'schedule'}\n" in told


def test_a_scale_without_results_names_those_that_there_are(tmp_path):
    reading = reading_of("vgg16", RIGL)
    for mode in (Mode(0.1), Mode(0.1, separate=True), Mode()):
        Store(tmp_path).add(make_record(reading, 1, mode))
    with pytest.raises(SparsityError) as refused:
        write_pages(tmp_path, scale=0.3)
    found = "forked at scale 0.1; forked at scale 1; separate at scale 0.1"
    assert str(refused.value) == f"there are no results yet at scale 0.3: those in {tmp_path} are {found}"
    with pytest.raises(SparsityError, match="no results yet separate at scale 1: those"):
        write_pages(tmp_path, scale=1.0, separate=True)
    with pytest.raises(SparsityError, match="there are no results yet: run suptickets reproduce"):
        write_pages(tmp_path / "none")


@pytest.mark.parametrize(
    "name, some",
    [
        ("vgg16", ["method=rigl", "method=dense", "data=cifar100,method=set,method=granet,sparsity=0.95"]),
        ("averaging", ["model=vgg16", "model=resnet50,sparsity=0.95,rule=cia"]),
        ("cycle-length", ["model=resnet50,sparsity=0.8,cycle_epochs=8"]),
        ("significance", ["method=rigl", "data=cifar10,method=set,sparsity=0.9"]),
        ("large-lr", ["model=vgg16,lr_high=0.1"]),
        ("lr-schedules", ["sparsity=0.8,schedule=swa", "sparsity=0.95", "schedule=triangle"]),
        ("uncertainty", [""]),
        (
            "batch-norm",
            ["data=cifar10,model=vgg16,method=set,sparsity=0.95,batch_norm=average,booster=sup-tickets"],
        ),
    ],
)
def test_the_commands_train_what_there_is_and_nothing_else(tmp_path, name, some):
    for number, cells in enumerate(some, start=1):
        make_store(tmp_path, name, cells=cells, seeds=range(1, number + 1))
    listings = [part for part in pages(tmp_path, name).sections[-1].blocks if isinstance(part, Listing)]
    shown = [shlex.split(line) for listing in listings for line in listing.lines]
    lines = [line for line in shown if line[:3] == ["suptickets", "reproduce", name]]
    trained = set()
    for line in lines:
        options = dict(zip(line[3::2], line[4::2], strict=True))
        selected = experiment(name).cells(options.get("--cells", ""))
        trained |= {(str(r.key), options["--seeds"]) for cell in selected for r in readings(cell)}
    there = {
        str(r.key): str(number)
        for number, cells in enumerate(some, start=1)
        for cell in experiment(name).cells(cells)
        for r in readings(cell)
    }
    assert trained == {*there.items()} and len(lines) <= 3 * len(some)


def test_the_commands_go_up_to_the_last_seed_that_there_is(tmp_path):
    make_store(tmp_path, "vgg16", cells=RIGL, seeds=(1, 3))
    (command,) = next(b for b in pages(tmp_path, "vgg16").sections[-1].blocks if isinstance(b, Listing)).lines
    assert "--seeds 3" in command


def test_the_commands_of_the_gains_train_the_pairs_and_nothing_else(tmp_path):
    make_store(tmp_path, "vgg16", cells=RIGL, seeds=(1, 2))
    make_store(tmp_path, "vgg16", cells="method=dense", seeds=(1,))
    make_store(tmp_path, "cycle-length", cells="model=vgg16,sparsity=0.8", seeds=(1,))
    write_pages(tmp_path, ["gains"], tmp_path / "gains.md", format="md")
    lines = [line for line in (tmp_path / "gains.md").read_text().splitlines() if "reproduce " in line]
    (made,) = (line for line in lines if not line.startswith("|"))
    assert made == (
        "suptickets reproduce vgg16 --cells data=cifar10,method=rigl,sparsity=0.9 --seeds 2 --data-dir DATA "
        "--out again"
    )


# ---- Markdown ----


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("book")
    make_store(where / "r", "vgg16", cells="method=rigl,sparsity=0.9")
    make_store(where / "r", "averaging", cells="model=vgg16,sparsity=0.9")
    write_pages(where / "r", ["vgg16"], where / "one", format="md")
    write_pages(where / "r", ["vgg16", "averaging"], where / "docs" / "results.md", format="md")
    return where


def test_markdown_has_what_a_reader_wants(book):
    text = (book / "one" / "vgg16.md").read_text()
    assert text.startswith(f"# {EXPERIMENTS['vgg16'].title}\n\nTable 1 of the paper\n\n")
    assert "- **Seeds:** 3 of each cell; ± is their standard deviation\n" in text
    hours = spent([r for r in Store(book / "r").read() if r["cell"]["rule"] == "cia"])
    assert f"- **Time of all runs:** {hours / 60:.0f}\xa0min added up, on NVIDIA H200\n" in text
    lines = text.splitlines()
    row = next(n for n, line in enumerate(lines) if line.startswith("| RigL + Sup-tickets | "))
    assert re.search(r"\| \*\*\d\d\.\d\d\xa0±\xa00\.\d\d\*\* \|", lines[row])
    assert lines[row + 1].startswith("| paper | ") and "93.81\xa0±\xa00.11" in lines[row + 1]
    again = (
        "suptickets reproduce vgg16 --cells method=rigl,sparsity=0.9 --seeds 3 --data-dir DATA --out again"
    )
    assert f"```text\n{again}\n```" in text and f"| {MADE['command']} | " in text
    assert "torch 2.13.0" in text and f"revision {MADE['revision']}" in text
    assert text.count("<details>") == text.count("</details>") > 1
    assert not re.search(r"\n\n\n", text)


@pytest.mark.parametrize("file", ["one/vgg16.md", "docs/results.md"])
def test_pictures_are_beside_the_markdown(book, file):
    text = (book / file).read_text()
    places = re.findall(r'<img src="([^"]+)" alt="[^"]+" width="\d+%">', text)
    assert len(places) == text.count("<img") > 5
    assert all(place.startswith("plots/") for place in places)
    for place in places:
        assert (book / file).parent.joinpath(place).read_text().startswith("<?xml")
    drawn_ = {f"plots/{path.name}" for path in (book / file).parent.glob("plots/*")}
    assert drawn_ == set(places)


def test_several_experiments_in_one_file(book):
    text = (book / "docs" / "results.md").read_text()
    assert text.startswith("# Results\n\n- [")
    links = re.findall(r"\]\(#([\w-]+)\)", text)
    assert links == ["vgg16", "averaging"]
    assert all(f'<a id="{link}"></a>\n\n## ' in text for link in links)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    assert levels.count(1) == 1 and levels.count(2) == 2
    assert "plots/averaging-figure-accuracy-cifar100-vgg16.svg" in text


def test_the_files_that_are_given_back_exist_and_begin_with_the_pages(book, tmp_path):
    files = write_pages(book / "r", ["vgg16", "averaging"], tmp_path, format="md")
    assert [file.name for file in files[:2]] == ["vgg16.md", "averaging.md"]
    assert all(file.is_file() for file in files) and {f.parent for f in files[2:]} == {tmp_path / "plots"}


# ---- errata ----


def test_errata_stand_where_the_numbers_do(tmp_path):
    assert set(ERRATA) <= set(EXPERIMENTS)
    make_store(tmp_path, "swa", cells="sparsity=0.9,measure=accuracy", seeds=(1,))
    for format, anchor in (("html", "#dense-flops"), ("md", r"\#dense-flops"), ("tex", r"\#dense-flops")):
        (text, *_) = (p.read_text() for p in write_pages(tmp_path, ["swa"], tmp_path / "o", format=format))
        assert "9.735e16, not 9.74e18" in text and f"See docs/errata.md{anchor} in the sources" in text
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "errata.md").write_text("here")
    (file, *_) = write_pages(tmp_path, ["swa"], tmp_path / "docs" / "results.md", format="md")
    assert " not 0.11, 0.18 and 0.30. See the [errata](errata.md#dense-flops).\n" in file.read_text()
    told = notes(Mode(), [*EXPERIMENTS["swa"].table, *EXPERIMENTS["variance"].table])
    assert [*map(str, told[1:])] == [f"{name}: {ERRATA[name]}" for name in ("swa", "variance")]


@pytest.mark.parametrize("name", ERRATA)
def test_the_errata_have_the_place_that_is_named(name):
    text, anchor = (DOCS / "errata.md").read_text(), ERRATA[name].more.removeprefix("errata.md#")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    headings = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert f'<a id="{anchor}"></a>' in text or anchor in headings


# ---- names from outside ----


def test_names_in_a_store_stay_text(tmp_path):
    evil = "<script>alert(1)</script>"
    record = make_record(reading_of("vgg16", RIGL), 1, Mode(), hardware=evil, command=evil, revision=evil)
    layers = [{**layer, "name": evil} for layer in record["measures"]["layers"]]
    Store(tmp_path).add({**record, "measures": {**record["measures"], "layers": layers}})
    (file,) = write_pages(tmp_path, ["vgg16"])
    text = file.read_text()
    assert text.count("<script>") == 1 and "&lt;script&gt;alert(1)" in text
    assert len(LAYERS) == len(layers)


def test_tables_of_all_experiments_go_into_one_document():
    """Each table has a label of its own."""
    texts = [latex(page(name, [], Mode())) for name in EXPERIMENTS]
    labels = [label for text in texts for label in re.findall(r"\\label\{([^}]*)\}", text)]
    assert len(labels) == len(set(labels)) > len(EXPERIMENTS)
