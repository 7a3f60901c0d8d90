"""The threat model in docs/security.md and the attacks in docs/privacy.md: rows are whole, what they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"
SHOWN = ["test that shows it", "tried by the selftest", "what remains"]
HEADER = ["who", "what they try", "how it is stopped", *SHOWN]
TABLES = {"security.md": "Threat model", "privacy.md": "Attacks"}
NAMED = re.compile(r"tests/[\w/]+\.py::\w+")

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs/ is not beside these tests")


def rows(page: str = "security.md") -> list[list[str]]:
    """The cells of each row of a page's table, the header first."""
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    section = text.partition(f"\n## {TABLES[page]}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")] for line in lines]


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


def test_the_selftest_tries_what_the_rows_say_and_nothing_else() -> None:
    """A row that nothing tries says why, and names the test that tries it. Two rows may name one attempt."""
    pytest.importorskip("nvflare", reason="the selftest needs NVIDIA FLARE")
    from fedshift.deploy.playground.selftest import PROMISES

    named: set[str] = set()
    for page in TABLES:
        header, _, *table = rows(page)
        assert header[-3:] == SHOWN
        for row in table:
            assert NAMED.search(row[-3]), f"no test shows: {row}"
            found = re.findall(r"`([^`]+)`", row[-2])
            assert found or re.fullmatch(r"no: .{10,}", row[-2]), row
            named |= set(found)
    # An honest run shows that what is refused to attackers would have worked.
    tried = {promise.tries for promise in PROMISES if promise.who != "an honest coordinator"}
    assert named == tried
