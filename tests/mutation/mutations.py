"""The list of deliberate mistakes: what a mutation is, how the files of ``lists/`` are read, how one is applied."""

from __future__ import annotations

import ast
import fnmatch
import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Mutation:
    """One mistake: in ``module``, ``old`` (which occurs once) becomes ``new``, and one of ``tests`` should fail.

    ``tests`` are names of test files without their folder, ``test_`` and ``.py``, so that a file can move: ``copa``, or
    ``kd3a*`` for all that begin so. ``contract*::test_it_keeps_what_every_method_promises`` is a single test.
    """

    name: str
    area: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]

    def file(self, source: Path = SOURCE) -> Path:
        """The module's file below ``source``, which holds the package."""
        return source.joinpath(*self.module.split(".")).with_suffix(".py")

    def applied(self, text: str) -> str:
        """The module's text with the mistake in it.

        Raises ValueError when the original is not there exactly once.
        """
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: the original occurs {found} times in {self.module}, not once:\n{self.old}")
        return text.replace(self.old, self.new)

    def digest(self) -> str:
        """Changes with the mistake and with the function that it is in, and with nothing else."""
        text = self.file().read_text(encoding="utf-8")
        self.applied(text)
        place = _function_around(text, text.index(self.old), text.index(self.old) + len(self.old))
        return hashlib.sha256(f"{self.old}\x1f{self.new}\x1f{place}".encode()).hexdigest()[:16]

    def targets(self) -> list[str]:
        """What pytest is to run.

        Raises ValueError when a name in ``tests`` is that of no test file.
        """
        found: dict[str, None] = {}
        for target in self.tests:
            name, separator, test = target.partition("::")
            files = fnmatch.filter(_test_files(), f"*/test_{name}.py")
            if test:
                files = [file for file in files if f"def {test.partition('[')[0]}(" in _text(file)]
            if not files:
                raise ValueError(f"{self.name}: there is no {target}")
            found |= dict.fromkeys(f"{file}{separator}{test}" for file in files)
        return list(found)

    def is_current(self, result: Mapping[str, Any] | None, known_tests: set[str]) -> bool:
        """Whether ``result`` is of the present text, and the test that noticed is still there."""
        if result is None or result.get("digest") != self.digest():
            return False
        by = result.get("by")
        return by is None or by.split("::")[-1].split("[")[0] in known_tests


def _function_around(text: str, begin: int, end: int) -> str:
    """The smallest function that holds the characters from ``begin`` to ``end``; outside of functions, all of it."""
    first, last = text.count("\n", 0, begin) + 1, text.count("\n", 0, end) + 1
    if text[end - 1] == "\n":
        last -= 1
    around = [
        node
        for node in _functions(text)
        if node.end_lineno is not None and node.lineno <= first and last <= node.end_lineno
    ]
    if not around:
        return text
    node = max(around, key=lambda node: node.lineno)
    return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])


@functools.cache
def _test_files() -> list[str]:
    return sorted(str(file.relative_to(ROOT)) for file in TESTS.rglob("test_*.py"))


@functools.cache
def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@functools.cache
def _functions(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]


def named_tests() -> set[str]:
    """The names of all test functions of the repository."""
    return {name for file in _test_files() for name in re.findall(r"^ *def (test_\w+)", _text(file), re.MULTILINE)}


def read_list(path: Path) -> list[Mutation]:
    """The mutations of one file: groups of a module, its tests, and the mistakes in it."""
    found: list[Mutation] = []
    groups: list[dict[str, Any]] = yaml.load(
        path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    for group in groups:
        short = group["module"].removeprefix("fedshift.")
        for entry in group["mutations"]:
            found.append(
                Mutation(
                    name=f"{short}: {entry['name']}",
                    area=path.stem,
                    module=group["module"],
                    old=entry["from"],
                    new=entry["to"],
                    tests=tuple(entry.get("tests", group["tests"])),
                )
            )
    return found


def all_mutations() -> list[Mutation]:
    """Every mutation of every file of ``lists/``."""
    return [mutation for path in sorted((HERE / "lists").glob("*.yaml")) for mutation in read_list(path)]
