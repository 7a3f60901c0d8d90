"""The threat model as tables: who may try what, how it is stopped, how many tests show it, and what remains.

    python docs/list_threats.py            # prints them; the documentation site has them on the page threats.md
    python docs/list_threats.py --tests    # prints the tests and the selftest's attempts of each row

The rows are in ``tests/threats.yaml``. A test that shows how a row is stopped carries ``@pytest.mark.threat("id")``,
with more ids if it shows more. ``tests/test_threat_model.py`` compares rows and marks.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
ROWS = TESTS / "threats.yaml"
REMAINS = "test_what_remains_"
"""How the name of a test begins that shows what remains, and not how it is stopped."""


class Threat(BaseModel):
    """A row.

    Attributes:
        id: what marks of tests name.
        who: the attacker.
        tries: what they try.
        stopped: how it is stopped.
        selftest: the selftest's attempts at it.
        untried: why the selftest does not try it, where it would not come out alike on every machine.
        remains: what an attacker still can do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", str_min_length=1)

    id: str = Field(pattern=r"^[a-z_]+$")
    who: str
    tries: str
    stopped: str
    selftest: tuple[str, ...] = ()
    untried: str = ""
    remains: str = "–"


def threats() -> list[Threat]:
    """Every row, in the order of the file."""
    return [Threat.model_validate(row) for row in yaml.safe_load(ROWS.read_text(encoding="utf-8"))]


@functools.cache
def marked() -> dict[str, list[str]]:
    """The tests that are marked with each id, as ``file.py::name`` below ``tests/``."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "mark.threat" in text else ():
            if isinstance(node, ast.FunctionDef):
                for threat in _ids(node.decorator_list):
                    tests[threat].append(f"{path.relative_to(TESTS).as_posix()}::{node.name}")
    return dict(tests)


def _ids(decorators: Iterable[ast.expr]) -> list[str]:
    marks = [
        mark for mark in decorators if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.threat"
    ]
    return [ast.literal_eval(argument) for mark in marks for argument in mark.args]


def tables() -> str:
    """A table for each attacker. A star: the selftest tries it."""
    rows, tests = threats(), marked()
    parts = [f"{len(rows)} rows, {len({name for names in tests.values() for name in names})} tests.\n"]
    for who, group in groupby(rows, key=lambda row: row.who):
        lines = [_line(row, tests) for row in group]
        parts.append(
            f"## {who[0].upper()}{who[1:]}\n\n"
            "| what they try | how it is stopped | tests | what remains |\n|---|---|---:|---|\n" + "".join(lines)
        )
    return "\n".join(parts)


def _line(row: Threat, tests: Mapping[str, list[str]]) -> str:
    number = len(tests.get(row.id, []))
    return f"| {row.tries} | {row.stopped} | {number}{'*' if row.selftest else ''} | {row.remains} |\n"


def in_full() -> str:
    """Each row with its tests and the selftest's attempts."""
    tests, lines = marked(), []
    for row in threats():
        lines.append(f"{row.who}: {row.tries}")
        for name in tests.get(row.id, []):
            lines.append(f"    tests/{name}" + (" (what remains)" if _remains(name) else ""))
        tried = "; ".join(row.selftest) or (f"no: {row.untried}" if row.untried else "no")
        lines.append(f"    selftest: {tried}")
    return "\n".join(lines)


def _remains(name: str) -> bool:
    return name.partition("::")[2].startswith(REMAINS)


if __name__ == "__main__":
    if sys.argv[1:] == ["--tests"]:
        print(in_full())
    else:
        print(tables())
