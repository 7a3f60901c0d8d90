"""A report is computed once, and what renders it computes nothing."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import pytest
from rich.console import Console

import fedshift
from fedshift.report.advice.words import VerdictValues, two_sentences
from fedshift.report.collect import collect
from fedshift.report.page import page, table_html
from fedshift.report.report import Report, whole_report
from fedshift.report.table_formats import FORMATS, terminal
from fedshift.report.table_picture import picture

SOURCE = Path(fedshift.__file__).parent
RENDERERS = (
    "report/advice/words.py",
    "report/differences.py",
    "report/folding.py",
    "report/html.py",
    "report/page.py",
    "report/plots.py",
    "report/sections/",
    "report/table_formats.py",
    "report/table_picture.py",
    "report/templates/",
    "text.py",
)
"""What turns a report into text and drawings; all other modules compute."""
FORMATTERS = ("evaluation/records.py:shown", "evaluation/metric_entries.py:metrics_of")
"""How a metric prints a number, and what metrics a task has."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls of functions of the package, ``module.py:function``, and of the library `statistics`."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code: CodeType = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            calls[f"{path.relative_to(SOURCE).as_posix()}:{code.co_qualname}"] += 1
        elif event == "call" and path.name == "statistics.py":
            calls[f"statistics:{code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def rendered(report: Report) -> list[str]:
    """The report in every form."""
    assert report.verdict is not None
    console = Console(file=io.StringIO())
    console.print(terminal(report.table))
    texts = [form(report.table) for form in FORMATS.values()]
    verdict = [str(VerdictValues(report.verdict)), two_sentences(report.verdict)]
    return [*texts, *verdict, table_html(report.table), picture(report), page(report)]


@pytest.fixture
def report(experiment: Path) -> Report:
    return whole_report(collect(experiment))


@pytest.mark.slow
def test_nothing_is_computed_while_a_report_is_rendered(report: Report) -> None:
    with counted() as calls:
        texts = rendered(report)
    assert all(texts)
    elsewhere = {call for call in calls if not call.startswith(RENDERERS) and call not in FORMATTERS}
    assert {call for call in elsewhere if "." not in call.partition(":")[2] or "statistics:" in call} == set()
    assert rendered(report) == texts


def test_a_report_computes_each_thing_once(experiment: Path) -> None:
    collected = collect(experiment)
    with counted() as calls:
        whole_report(collected)
    once = ("conditions.py:conditions", "estimates.py:estimates_of", "choice.py:choices", "advice/verdict.py:verdict")
    assert [calls[f"report/{name}"] for name in once] == [1] * len(once)
    assert calls["report/table.py:table_of"] == 3  # of the last round, and of the other rules
    with counted() as calls:
        collect(experiment)
    assert "report/collect.py:collect" in calls
