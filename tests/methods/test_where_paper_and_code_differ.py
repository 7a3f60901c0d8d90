"""What a method's page says of its authors' code can be looked up: every line names a file, or a function of one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fedshift.methods

HEAD = re.compile(r"^Where .*\bdiffer\b.*$", re.MULTILINE)
LINE = re.compile(r"\n(?= ?\d+\. |\* )")
OF_CODE = re.compile(r"\b(codes?|re-implementations?|DomainBed|PFLlib|FL-bench|port|released)\b")
FILE = re.compile(r"\w\.(py|sh|json|yaml)\b")
FUNCTION = re.compile(r"(?<!`)`\w[\w.]*`(?!`)|run_\w+\.sh")


def lists() -> list[tuple[str, str]]:
    """Each module with such a list, and the list."""
    found = []
    for path in sorted(Path(fedshift.methods.__path__[0]).rglob("*.py")):
        page = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found += [(path.stem, page[head.start() :].split("\n\n")[0]) for head in HEAD.finditer(page)]
    return found


def without_a_file(page: str) -> list[str]:
    """The lines about code that name no file, and no function, below a head that names no file either."""
    head, *lines = LINE.split(page)
    if FILE.search(head):
        return []
    return [line for line in lines if OF_CODE.search(line) and not (FILE.search(line) or FUNCTION.search(line))]


@pytest.mark.parametrize(("module", "page"), lists(), ids=[module for module, _ in lists()])
def test_a_line_about_code_says_where(module: str, page: str) -> None:
    assert without_a_file(page) == [], module
    if FUNCTION.search(page):
        assert FILE.search(page), f"{module}: functions of no file"


def test_a_line_that_says_nothing_of_it_is_noticed() -> None:
    page = "Where papers and code differ\n 1. The code has 3.\n 2. Here: 4."
    assert without_a_file(page) == [" 1. The code has 3."]
    assert without_a_file(page.replace("has", "(train.py, `step`) has")) == []
