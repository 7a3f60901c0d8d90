"""Print the inputs that once went wrong and their kinds, read from the marks of the tests.

    python tests/list_cases.py

A test that tries such an input carries `@pytest.mark.case("kind", "what was tried")`; a parameter is
`case("kind", "what was tried", ...)` of `tried.py`; `cases` are many of one kind. These texts are literals.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent


class Case(NamedTuple):
    """One input that a test tries."""

    kind: str
    tried: str
    file: str


@functools.cache
def cases() -> list[Case]:
    """Every case of the tests, by kind, then in the order of the files."""
    every = [case for path in sorted(TESTS.rglob("test_*.py")) for case in cases_of(path)]
    return sorted(every, key=lambda case: case.kind)


def cases_of(path: Path) -> Iterator[Case]:
    """The marks of one file, in the order of its lines."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text if "case" in text else "")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        name, arguments = ast.unparse(call.func), call.args
        if name == "cases" and len(arguments) == 3 and isinstance(arguments[2], ast.Dict):
            pairs = [(arguments[0], tried) for tried in arguments[2].keys]
        else:
            pairs = [(arguments[0], arguments[1])] if name in ("pytest.mark.case", "case") and arguments[1:] else []
        for kind, tried in pairs:
            if isinstance(kind, ast.Constant) and isinstance(tried, ast.Constant):
                yield Case(str(kind.value), str(tried.value), path.relative_to(TESTS).as_posix())


def table() -> str:
    """How many there are, and a row for each."""
    every = cases()
    lines = [
        f"{len(every)} cases of {len({case.kind for case in every})} kinds, each tried by a test.",
        "",
        "| kind | tried | held by |",
        "|---|---|---|",
        *(f"| {case.kind} | {case.tried} | `{case.file}` |" for case in every),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
