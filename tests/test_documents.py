"""What README and docs print is so: commands, links, tables of methods, where the paper's numbers stand."""

import ast
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import suptickets as st
from suptickets.cli import COMMANDS, main, parser
from suptickets.data import load_data
from suptickets.experiments import EXPERIMENTS
from suptickets.experiments.results import write_pages
from suptickets.methods import METHODS
from suptickets.training.boosters import BOOSTERS
from suptickets.training.settings import Settings, resolve

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
METHOD_PAGES = [page for page in sorted((ROOT / "docs" / "methods").glob("*.md")) if page.stem != "README"]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands() -> list[str]:
    """Every `suptickets ...` in code, on a line of its own or inside a sentence; alternatives one by one."""
    found = []
    for page in PAGES:
        found += re.findall(r"(?:^|`)suptickets ([^\d`\n#][^`\n#]*)", page.read_text(), re.MULTILINE)
    single = []
    for command in found:
        first, *others = [part.strip() for part in command.split("|")]
        single += [first, *(f"{first.rsplit(' ', 1)[0]} {other}" for other in others)]
    named = {command for command in COMMANDS if command != "train"}  # not called: they need arguments
    return sorted({command for command in single if "--help" not in command and command not in named})


@pytest.mark.parametrize("command", commands())
def test_a_command_in_the_documents_is_one(command, capsys):
    arguments = shlex.split(command)
    parsed = parser().parse_args(arguments)
    if parsed.command == "train" and parsed.config is None and parsed.resume is None:
        resolve({f.name: getattr(parsed, f.name) for f in fields(Settings) if hasattr(parsed, f.name)})
    if parsed.command in ("list", "flops"):
        assert main(arguments) == 0
        assert len(capsys.readouterr().out.splitlines()) > 2


def test_there_are_some():
    assert {command.split()[0] for command in commands()} >= {"train", "list", "flops", "evaluate", "report"}


# ---- pages of methods, boosters and baselines ----


def test_every_method_and_booster_has_a_page():
    assert {page.stem for page in METHOD_PAGES} >= {*METHODS, *BOOSTERS} - {"none"}


@pytest.mark.parametrize("table", ["README.md", "docs/methods/README.md"])
@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_every_page_of_a_method_is_a_row_of_the_tables(table, page):
    link = page.relative_to((ROOT / table).parent)
    (row,) = re.findall(rf"^\| \[{page.stem}\]\({link}\) \|(.+)\|$", (ROOT / table).read_text(), re.MULTILINE)
    what, paper = (
        [cell.strip() for cell in row.split("|")][-2:] if table == "README.md" else row.split("|")[:2]
    )
    assert len(what) > 10 and (re.search(r"et al\. \d{4}|and \w+ \d{4}", paper) or page.stem == "dense")


ROWS = ("from", "settings", "training FLOPs", "memory", "result")


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_from_whom_with_what_settings_at_what_cost_and_when(page):
    text = page.read_text()
    heading, what, *_ = text.split("\n\n")
    assert heading == f"# {page.stem}" and len(what) > 80 and not what.startswith("|")
    cells = dict(re.findall(r"^\| ([\w ]+) \| (.+) \|$", text, re.MULTILINE))
    assert [row for row in ROWS if len(cells.get(row, "")) < 10] == []
    assert re.search(r"\b(19|20)\d\d\b", cells["from"]) or page.stem == "dense"
    assert "**Use it** " in text and "**Not** " in text
    assert re.search(r"```sh\nsuptickets train ", text)


def test_every_page_is_listed():
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/methods/README.md"))
    assert [page.name for page in PAGES[1:] if page.name not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_files_that_a_page_names_exist(page):
    text = page.read_text()
    named = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"tests/test_\w+\.py", text)
    missing = [n for n in named if not ((page.parent / n).exists() or (ROOT / n).exists())]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them, and those that it names."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([\w-]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_places_in_pages_that_a_page_links_to_exist(page):
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    pages = [(page if file == "" else page.parent / file, place) for file, place in links]
    missing = [f"{there}#{place}" for there, place in pages if place not in anchors(there.resolve())]
    assert not missing


TRIALS = [path.name for path in sorted((ROOT / "results/trials").iterdir())]


@pytest.mark.parametrize(
    ("store", "written"),
    [("results", "results.md"), *((f"results/trials/{name}", f"trials/{name}/README.md") for name in TRIALS)],
)
def test_the_page_of_results_is_that_of_the_store(store, written, tmp_path, monkeypatch):
    """`make results` writes it, with its plots; drawing is left out here."""
    monkeypatch.setattr(
        "suptickets.report.write._draw",
        lambda plots, folder, kind, prefix: {p.name: folder / f"{prefix}{p.name}.{kind}" for p in plots},
    )
    (tmp_path / "errata.md").touch()  # what lies beside a page is linked
    monkeypatch.chdir(ROOT)
    page, *plots = write_pages(store, out=tmp_path / written, format="md")
    assert page.read_text() == (ROOT / "docs" / written).read_text()
    drawn = {path.name for path in (ROOT / "docs" / written).parent.joinpath("plots").iterdir()}
    assert drawn == {plot.name for plot in plots}


# ---- Python in pages ----


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_in_a_page_can_be_parsed(page):
    for code in snippets(name(page)):
        ast.parse(code)


@pytest.mark.parametrize("method", ["granet", "gmp"])
def test_the_snippet_of_gradual_pruning_ends_at_its_sparsity_and_not_before(method):
    (code,) = snippets(f"docs/methods/{method}.md")
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names = {"st": st, "model": model, "optimizer": optimizer, "loader": range(3)}
    exec(code, names)
    sparsities = []
    for x in torch.randn(400, 8, 20, generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        sparsities.append(names["network"].sparsity)
    assert sparsities[-2] < 0.9 and sparsities[-1] == pytest.approx(0.9)


def test_the_snippet_that_reads_a_ticket_gives_the_network_of_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--epochs", "1", "--booster", "none", "--out", "run", "--json"]) == 0
    summary, names = json.loads(capsys.readouterr().out), {}
    exec(snippets("docs/train.md")[0], names)
    model = names["model"].eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in load_data("digits").test_batches(360))
    assert right / 360 == pytest.approx(summary["accuracy"])


# ---- the paper's numbers, and its errata ----

ERRATA = ROOT / "docs" / "errata.md"
MEASURED = ("accuracy", "ticket_accuracy", "disagreement", "kl", "train_flops")
PRINTED = {
    cell.printed.split("±")[0]
    for experiment in EXPERIMENTS.values()
    for cell in experiment.cells()
    if cell.printed is not None and cell.measure in MEASURED
}
RATES = {"0.001", "0.005"}  # of a cycle, in a table whose columns are swapped
QUOTING = ("sup-tickets", "swa", "granet", "distillation", "static", "ensemble", "snip", "tree-net")


def quoted(text: str) -> set[str]:
    """Numbers in a text that the paper prints."""
    numbers = set(re.findall(r"(?<![\d.])\d+\.\d+(?:e\d+)?(?![\d.])", text))
    return numbers & PRINTED | (RATES if numbers >= RATES else set())


@pytest.mark.parametrize("page", [page for page in PAGES if page != ERRATA], ids=name)
def test_a_page_with_numbers_of_the_paper_links_to_its_errata(page):
    """Unless it says at its top that it has none: then a number that the paper prints too is chance."""
    text = page.read_text()
    assert not quoted(text) or "errata.md" in text or text.splitlines()[2] == "Not in the paper"


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_where_a_number_of_the_paper_stands_is_the_place_of_its_erratum(page):
    """In the same paragraph, or the same row of a table; accuracies, diversities and FLOPs."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    blocks = [
        row
        for block in text.split("\n\n")
        for row in (block.split("\n") if block.startswith("|") else [block])
    ]
    bare = [block for block in blocks if quoted(block) - RATES and "errata.md#" not in block]
    assert not bare


@pytest.mark.parametrize("page", ["sup-tickets", "train", *(f"methods/{one}" for one in QUOTING)])
def test_a_page_names_the_erratum_that_touches_it(page):
    assert re.search(r"\]\((\.\./)?errata\.md#[\w-]+\)", (ROOT / "docs" / f"{page}.md").read_text())


def test_there_are_numbers_to_look_for():
    assert len(PRINTED) > 200 and quoted("73.07 against 72.57 % (0.90)") == {"73.07", "72.57"}
    assert quoted("from 0.001 to 0.005") == RATES and not quoted("half at 0.001")
