"""The threat model: every row of threats.yaml has a test, every mark has a row, and the tables are made from both."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
list_threats = pytest.importorskip("list_threats", reason="docs/ is not beside these tests")


def test_every_row_has_a_test_and_every_mark_is_read() -> None:
    rows, marked = list_threats.threats(), list_threats.marked()
    assert [name for name, number in Counter(row.id for row in rows).items() if number > 1] == []
    assert len(rows) >= 80
    assert {row.id for row in rows} ^ marked.keys() == set(), "rows without a marked test, or marks without a row"
    for name, tests in marked.items():
        assert any(not test.partition("::")[2].startswith(list_threats.REMAINS) for test in tests), name
    # A mark where `list_threats` does not look, as in a class or in `pytestmark`, is missing on the page.
    read = sum(len(tests) for tests in marked.values())
    texts = [path.read_text(encoding="utf-8") for path in sorted(list_threats.TESTS.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts if "mark.threat" in text]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert sum(len(node.args) for node in nodes if ast.unparse(node.func) == "pytest.mark.threat") == read
    who = [row.who for row in rows]
    assert who == sorted(who, key=who.index)


def test_the_tables_have_every_row_and_its_tests() -> None:
    lines = re.findall(r"^\|.*", list_threats.tables(), flags=re.M)
    rows, marked = list_threats.threats(), list_threats.marked()
    for row in rows:
        assert any(line.startswith(f"| {row.tries} | {row.stopped} | {len(marked[row.id])}") for line in lines), row.id
    for line in lines:
        assert line.count("|") == 5, line
    printed = list_threats.in_full()
    for tests in marked.values():
        assert all(f"    tests/{name}" in printed for name in tests)


def test_the_selftest_tries_what_the_rows_say_and_nothing_else() -> None:
    """Two rows may name one attempt."""
    pytest.importorskip("nvflare", reason="the selftest needs NVIDIA FLARE")
    from fedshift.deploy.playground.selftest import PROMISES

    # An honest run shows that what is refused to attackers would have worked.
    tried = {promise.tries for promise in PROMISES if promise.who != "an honest coordinator"}
    assert {attempt for row in list_threats.threats() for attempt in row.selftest} == tried
