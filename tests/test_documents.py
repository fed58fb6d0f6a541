"""The commands that README and docs print are commands that there are."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from suptickets.cli import COMMANDS, main, parser
from suptickets.methods import METHODS
from suptickets.training.settings import BOOSTERS, Settings, resolve

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands() -> list[str]:
    """Every `suptickets ...` in code, on a line of its own or inside a sentence; alternatives one by one."""
    found = []
    for page in PAGES:
        found += re.findall(r"(?:^|`)suptickets ([^`\n#]+)", page.read_text(), re.MULTILINE)
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


@pytest.mark.parametrize("table", ["README.md", "docs/methods/README.md"])
def test_every_method_and_booster_is_in_the_tables_and_has_a_page(table):
    text = (ROOT / table).read_text()
    for name in {*METHODS, *BOOSTERS} - {"none"}:
        assert f"[{name}]" in text, name
        page = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
        assert page.startswith(f"# {name}\n") and "suptickets train" in page


def test_every_page_is_listed():
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/methods/README.md"))
    assert [page.name for page in PAGES[1:] if page.name not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_that_a_page_names_exist(page):
    text = page.read_text()
    named = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"tests/test_\w+\.py", text)
    missing = [n for n in named if not ((page.parent / n).exists() or (ROOT / n).exists())]
    assert not missing
