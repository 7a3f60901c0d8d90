"""The list of the inputs that are tried has every case that a test carries."""

from __future__ import annotations

from collections import Counter

import list_cases


def test_the_table_lists_every_case_once() -> None:
    cases, lines = list_cases.cases(), list_cases.table().splitlines()
    assert len(cases) > 300
    assert len([line for line in lines if line.startswith("| ")]) == len(cases) + 1
    counts = Counter((case.kind, case.tried) for case in list_cases.cases())
    assert {case: number for case, number in counts.items() if number > 1} == {}
