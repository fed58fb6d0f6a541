"""The commands that README and docs print are commands that there are."""

import re
import shlex
from pathlib import Path

import pytest

from suptickets.cli import main, parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Every `suptickets ...` in code, on a line of its own or inside a sentence; alternatives one by one."""
    found = []
    for page in PAGES:
        found += re.findall(r"(?:^|`)suptickets ([^`\n#]+)", page.read_text(), re.MULTILINE)
    single = []
    for command in found:
        first, *others = [part.strip() for part in command.split("|")]
        single += [first, *(f"{first.rsplit(' ', 1)[0]} {other}" for other in others)]
    return sorted({command for command in single if "--help" not in command and command != "evaluate"})


@pytest.mark.parametrize("command", commands())
def test_a_command_in_the_documents_is_one(command, capsys):
    arguments = shlex.split(command)
    parsed = parser().parse_args(arguments)
    if parsed.command in ("list", "flops"):
        assert main(arguments) == 0
        assert len(capsys.readouterr().out.splitlines()) > 2


def test_there_are_some():
    assert {command.split()[0] for command in commands()} >= {"train", "list", "flops", "evaluate"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_exist(page):
    text = page.read_text()
    named = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"tests/test_\w+\.py", text)
    missing = [n for n in named if not ((page.parent / n).exists() or (ROOT / n).exists())]
    assert not missing
