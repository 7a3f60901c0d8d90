"""Weights of the sites over rounds: read from the records, drawn where they move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedshift.evaluation.records import RoundRecord
from fedshift.report.collect import collect
from fedshift.report.page import page
from fedshift.report.plots import site_weights
from fedshift.report.report import whole_report
from fedshift.report.run_means import mean_weights, moving, weights_over_rounds


def run(*weights: Mapping[str, Any]) -> list[RoundRecord]:
    return [
        RoundRecord(round=number, target_accuracy={}, aggregation_weights=dict(each), seconds=1.0, mini_batches=number)
        for number, each in enumerate(weights, 1)
    ]


def test_weights_over_rounds_by_hand() -> None:
    first, second = run({"a": 0.5, "b": 0.5}, {"a": 0.9, "b": 0.1}), run({"a": 0.3, "b": 0.7}, {"a": 0.7, "b": 0.3})
    curves = weights_over_rounds([first, second])
    rounds, mean, spread = curves["a"]
    assert (rounds, mean) == ([1, 2], pytest.approx([0.4, 0.8]))
    assert spread == pytest.approx([0.2 / 2**0.5] * 2)
    assert curves["b"][1] == pytest.approx([0.6, 0.2])
    assert weights_over_rounds([first])["a"] == ([1, 2], [0.5, 0.9], None)
    assert mean_weights([first, second], "b", 2) == pytest.approx(0.2)
    assert mean_weights([first, second], "c", 2) is None
    curves = weights_over_rounds(
        [run({"a": 0.5, "b": 0.5}, {"a": 1.0}, {"a": 1.0}), run({"a": 0.5, "b": 0.5}, {"a": 1.0})]
    )
    assert curves["a"][0] == [1, 2]
    assert curves["b"][1] == [0.5, 0.0]
    assert weights_over_rounds([run({"a": [0.5, 0.5]}), run({"a": [0.5, 0.5]})]) == {}
    assert weights_over_rounds([run({"a": 1.0}), run()]) == {}
    assert weights_over_rounds([]) == {}
    assert not moving(weights_over_rounds([run({"a": 0.5}, {"a": 0.5})]).values())
    assert moving(weights_over_rounds([run({"a": 0.5}, {"a": 0.1})]).values())


@pytest.mark.slow
def test_the_page_shows_them_only_where_they_move(write_part: Callable[..., Path]) -> None:
    write_part("fedavg", "t", 0, 70.0, 80.0, weights=[{"a": 0.5, "b": 0.5}] * 2)
    folder = write_part("kd3a", "t", 0, 70.0, 80.0, weights=[{"a": 0.5, "b": 0.5}, {"a": 0.9, "b": 0.1}]).parents[2]
    section = page(whole_report(collect(folder))).partition('<section id="weights">')[2].partition("</section>")[0]
    assert "<h3>kd3a</h3>" in section
    assert "<h3>fedavg</h3>" not in section
    assert section.count("<svg") == 1
    assert '<section id="weights">' not in page(whole_report(collect(folder / "fedavg")))


def test_one_legend_and_one_colour_for_a_site_in_all_panels() -> None:
    here = {"a": ([1, 2], [0.5, 0.4], None), "b": ([1, 2], [0.5, 0.6], [0.1, 0.9])}
    there = {"b": ([1, 2], [0.5, 0.6], None), "c": ([1, 2], [0.5, 0.4], None)}
    figure = site_weights({"x": here, "y": there})
    left, right = figure.axes
    colours = [{line.get_label(): line.get_color() for line in axes.get_lines()} for axes in (left, right)]
    assert colours[0]["b"] == colours[1]["b"]
    assert len({**colours[0], **colours[1]}) == len(set({**colours[0], **colours[1]}.values())) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    band = left.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() >= 0
    assert band[:, 1].max() <= 1
