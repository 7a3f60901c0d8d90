"""The page of the inputs that are tried lists every case that a test carries."""

from __future__ import annotations

from collections import Counter

import list_cases


def test_the_page_lists_every_case() -> None:
    assert list_cases.PAGE.read_text(encoding="utf-8") == list_cases.page(), "run: python tests/list_cases.py"


def test_no_case_is_listed_twice() -> None:
    counts = Counter((case.kind, case.tried) for case in list_cases.cases())
    assert {case: number for case, number in counts.items() if number > 1} == {}
