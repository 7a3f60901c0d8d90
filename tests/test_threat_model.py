"""The threat model in docs/security.md: every row is whole, and every test that it and docs/privacy.md name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"
HEADER = ["who", "what they try", "how it is stopped", "test that shows it", "what remains"]
NAMED = re.compile(r"tests/[\w/]+\.py::\w+")

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs/ is not beside these tests")


def rows() -> list[list[str]]:
    """The cells of each row of the threat model, the header first."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Threat model\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def functions_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_row_is_whole_and_names_a_test() -> None:
    header, _, *table = rows()
    assert header == HEADER
    assert len(table) >= 20
    for row in table:
        assert len(row) == len(HEADER), row
        assert all(row), row
        assert NAMED.search(row[3]), f"no test shows: {row[1]}"


def test_rows_of_one_attacker_stand_together() -> None:
    who = [row[0] for row in rows()[2:]]
    assert who == sorted(who, key=who.index)


@pytest.mark.parametrize("page", ["security.md", "privacy.md"])
def test_every_test_that_the_page_names_exists(page: str) -> None:
    named = set(NAMED.findall((PAGE.parent / page).read_text(encoding="utf-8")))
    assert len(named) >= 15
    known = {file: functions_in(ROOT / file) for file in {name.partition("::")[0] for name in named}}
    assert [name for name in sorted(named) if name.partition("::")[2] not in known[name.partition("::")[0]]] == []
