"""Progress without a terminal: what is said, when, and that the time left is that of the pace so far."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from rich.progress import Progress

from fedshift.cli import show
from fedshift.cli.run import Bars
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.lines import EVERY, FIRST, Lines
from fedshift.methods.federated.fedavg import FedAvg


class Watched:
    """`Lines` with a clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0
        self.said: list[str] = []
        self.lines = Lines(self.said.append, lambda: self.now)

    def train(self, seconds: float, mini_batches: int) -> None:
        self.now += seconds
        self.lines.on_trained("site", mini_batches)


def part(seed: int) -> Any:
    return SimpleNamespace(method=SimpleNamespace(display="fedavg"), target="west", seed=seed)


RESULT: Any = SimpleNamespace(metric="accuracy", score=lambda: 81.5)


def test_lines_in_between_come_at_intervals_and_estimate_the_rest() -> None:
    watched = Watched()
    watched.lines.begin(4)
    watched.lines.run(part(0), 100, 0)
    watched.train(FIRST - 1, 5)
    assert not watched.said
    watched.train(1, 5)  # a tenth of one of four runs in three seconds: 39 tenths are left
    assert len(watched.said) == 1
    assert "10 %" in watched.said[0]
    assert "0 of 4" in watched.said[0]
    assert "0:03" in watched.said[0]
    assert "1:57" in watched.said[0]
    watched.train(EVERY - 1, 20)
    assert len(watched.said) == 1
    watched.train(1, 20)
    assert len(watched.said) == 2


def test_each_finished_run_has_a_line_and_those_done_before_do_not_count() -> None:
    watched = Watched()
    watched.lines.begin(5)
    for seed in range(2):
        watched.lines.on_finished(part(seed), RESULT, resumed=True)
    assert not watched.said
    watched.lines.run(part(2), 10, 0)
    watched.now += 60
    watched.lines.on_finished(part(2), RESULT, resumed=False)
    assert "81.50" in watched.said[0]
    assert "3 of 5" in watched.said[0]
    assert "2:00" in watched.said[0]  # two more at a minute each
    watched.lines.run(part(3), 10, 0)
    watched.now += 3600
    watched.lines.on_diverged(part(3))
    assert "1:01:00" in watched.said[1]
    watched.lines.on_skipped(part(4))
    assert watched.lines.left == 0, "a helper may have it, and be done when all is"
    assert len(watched.said) == 2
    watched.lines.elsewhere(1, ["process 7 on here"])
    assert watched.lines.left == 1
    assert "process 7 on here" in watched.said[2]
    watched = Watched()
    watched.lines.begin(2)
    watched.lines.on_skipped(part(0))
    for seed in (1, 0):  # the other process is gone, and its run is taken over
        watched.lines.run(part(seed), 10, 0)
        watched.lines.on_finished(part(seed), RESULT, resumed=False)
    assert ["2 of 2 runs" in text for text in watched.said] == [True, True]


def test_a_run_that_goes_on_has_its_bar_where_it_ended() -> None:
    progress = Progress(console=Console(file=io.StringIO()))
    Bars(progress).run(Run(FedAvg(), "a", 0), 100, 40)
    assert [(task.completed, task.total) for task in progress.tasks if task.visible][-1] == (40, 100)


def test_every_line_of_a_verdict_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "paragraphs", lambda answer: [("Why", ("one", "two", "three")), ("More", ("four",))])
    show.print_paragraphs(cast(Any, SimpleNamespace(question="Which?")))
    assert capsys.readouterr().out.split() == ["Which?", "Why", "one", "two", "three", "More", "four"]
