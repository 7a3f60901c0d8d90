"""A new command, metric, equation, protocol, network or feature fails here until a test and a page name it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fedshift.cli.app import app
from fedshift.data.registry import names as data_sets
from fedshift.data.registry import source_class
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.experiment.protocols.index import PROTOCOLS
from fedshift.methods.composition.averages import AVERAGES
from fedshift.methods.composition.local import PLUG_INS
from fedshift.methods.composition.prepare import PREPARATIONS
from fedshift.methods.robust import RULES
from fedshift.methods.server import OPTIMIZERS
from fedshift.models.registry import names as networks

ROOT = Path(__file__).parents[1]
FUNCTIONAL = ROOT / "src" / "fedshift" / "functional"
REFERENCES = ("sklearn", "scipy", "lifelines", "monai", "torchmetrics")
"""Whose metrics tests compare with."""
BY_NAME = (*PROTOCOLS, *PLUG_INS, *PREPARATIONS, *AVERAGES, *RULES, *OPTIMIZERS, *networks())
"""What an experiment file chooses by name, beside methods and data sets."""
BY_ROUND = {"dice", "hausdorff", "hd95"}
"""Metrics of segmentation, which `tests/evaluation/test_mask_metrics.py` tries by their functions."""


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


CALLERS = ("cli", "fedshift", "command", "prints", "mistake")
"""What tests call the command line by."""


@functools.cache
def words_of_tests() -> frozenset[tuple[object, ...]]:
    """What tests begin the command line with, or a list in a file that calls it: one to three words."""
    rows: set[tuple[object, ...]] = set()
    for tree in trees(ROOT / "tests").values():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        asked = [call.args for call in calls if isinstance(call.func, ast.Name) and call.func.id in CALLERS]
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
def names_of_tests() -> frozenset[str]:
    """The names that tests use."""
    return frozenset().union(*(names_in(tree) for tree in trees(ROOT / "tests").values()))


@functools.cache
def texts_in(folder: Path, beside: tuple[str, ...] = ()) -> set[str]:
    """All texts in the code of a folder, or of those files there that import one of the packages ``beside``."""
    nodes = (
        node
        for tree in trees(folder).values()
        if not beside or not imports(tree).isdisjoint(beside)
        for node in ast.walk(tree)
    )
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def name_of(function: ast.expr) -> str | None:
    """The last word of what is called."""
    return getattr(function, "attr", getattr(function, "id", None))


def imports(tree: ast.AST) -> set[str]:
    """The packages that a file imports."""
    froms = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    skips = {ast.unparse(call.args[0]).strip("'") for call in calls if name_of(call.func) == "importorskip"}
    return {name.partition(".")[0] for name in froms | plain | skips}


@functools.cache
def words_of_pages() -> frozenset[str]:
    """All words of README and docs."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    return frozenset(word for page in pages for word in re.findall(r"\w+", page.read_text(encoding="utf-8")))


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
    compared = metric in texts_in(ROOT / "tests", REFERENCES)
    assert compared, f"compare it in tests/evaluation with that of {' or '.join(REFERENCES)}"


@pytest.mark.parametrize("name", BY_NAME)
def test_what_a_file_names_has_a_test_and_a_line_of_docs(name: str) -> None:
    assert (name in texts_in(ROOT / "tests")) is True, f"no test tries '{name}'"
    assert (name in words_of_pages()) is True, f"no page in docs names '{name}'"


@pytest.mark.parametrize("name", [name for name in data_sets() if "builders" in source_class(name).__module__])
def test_a_data_set_has_a_test(name: str) -> None:
    """One of its own file; a manifest is read by ``tests/data/test_published_by_name.py``."""
    tried = name in texts_in(ROOT / "tests") or source_class(name).__name__ in names_of_tests()
    assert tried, "add its counts and shapes to tests/data"


def test_an_equation_has_a_test_and_an_example() -> None:
    """Tests name it, or an equation that they name and that uses it."""
    tried = set(names_of_tests())
    known = definitions()
    assert len(known) > 100
    while more := {name for other in tried & known.keys() for name in names_in(known[other])} - tried:
        tried |= more
    public = {name: node for name, node in known.items() if not name.startswith("_")}
    assert sorted(public.keys() - tried) == [], "add a test to tests/functional"
    functions = {name: node for name, node in public.items() if isinstance(node, ast.FunctionDef)}
    silent = [name for name, node in functions.items() if "Example" not in (ast.get_docstring(node) or "")]
    assert silent == []
