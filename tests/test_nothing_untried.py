"""A new command, metric or equation fails here until a test calls it and a page names it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fedshift.cli.app import app
from fedshift.evaluation.metric_entries import ENTRIES

ROOT = Path(__file__).parents[1]
FUNCTIONAL = ROOT / "src" / "fedshift" / "functional"
BY_ROUND = {"hausdorff", "hd95"}
"""Metrics of segmentation, which `tests/evaluation/test_segmentation.py` tries by their functions."""


def commands(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command that ``--help`` lists, such as ``("site", "check")``."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))
        else:
            yield (*before, name)


@functools.cache
def trees(folder: Path) -> dict[Path, ast.Module]:
    return {
        file: ast.parse(file.read_text(encoding="utf-8")) for file in folder.rglob("*.py") if file != Path(__file__)
    }


CALLERS = ("cli", "fedshift", "command")
"""What tests call the command line by."""


@functools.cache
def words_of_tests() -> frozenset[tuple[object, ...]]:
    """What tests begin the command line with, or a list in a file that calls it: one to three words."""
    rows: set[tuple[object, ...]] = set()
    for tree in trees(ROOT / "tests").values():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        asked = [call.args for call in calls if ast.unparse(call.func) in CALLERS]
        if any(isinstance(argument, ast.Starred) for arguments in asked for argument in arguments):
            asked += [node.elts for node in ast.walk(tree) if isinstance(node, ast.List | ast.Tuple)]
        runners = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "invoke"]
        asked += [call.args[1].elts for call in runners if isinstance(call.args[1], ast.List)]
        for arguments in asked:
            words = [item.value if isinstance(item, ast.Constant) else None for item in arguments]
            rows |= {tuple(words[:length]) for length in (1, 2, 3)}
    return frozenset(rows)


def names_in(tree: ast.AST) -> set[str]:
    """The names that code uses."""
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    }


@functools.cache
def texts_in(folder: Path) -> set[str]:
    """All texts in the code of a folder."""
    nodes = (node for tree in trees(folder).values() for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def definitions() -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """The functions and classes of ``functional/``."""
    nodes = (node for tree in trees(FUNCTIONAL).values() for node in tree.body)
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("words", [*commands(typer.main.get_command(app))], ids=" ".join)
def test_a_command_has_a_test_and_a_line_of_docs(words: tuple[str, ...]) -> None:
    called = words in words_of_tests()  # apart, as pytest would write out all of them
    assert called, "no test calls it: add one to tests/cli or tests/deploy/cli"
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    text = f"fedshift {' '.join(words)}"
    assert any(text in page.read_text(encoding="utf-8") for page in pages), f"no page in docs names '{text}'"


@pytest.mark.parametrize("metric", sorted(ENTRIES.keys() - BY_ROUND))
def test_a_metric_has_a_test(metric: str) -> None:
    """A line of docs is asked for by ``tests/cli/test_tools.py``."""
    compared = metric in texts_in(ROOT / "tests")
    assert compared, "compare it with somebody else's in tests/evaluation"


def test_an_equation_has_a_test_and_an_example() -> None:
    """Tests name it, or an equation that they name and that uses it."""
    tried = set().union(*(names_in(tree) for tree in trees(ROOT / "tests").values()))
    known = definitions()
    assert len(known) > 100
    while more := {name for other in tried & known.keys() for name in names_in(known[other])} - tried:
        tried |= more
    public = {name: node for name, node in known.items() if not name.startswith("_")}
    assert sorted(public.keys() - tried) == [], "add a test to tests/functional"
    functions = {name: node for name, node in public.items() if isinstance(node, ast.FunctionDef)}
    silent = [name for name, node in functions.items() if "Example" not in (ast.get_docstring(node) or "")]
    assert silent == []
