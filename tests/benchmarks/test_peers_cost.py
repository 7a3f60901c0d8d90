"""The page's lines and seconds are those of the committed files."""

from __future__ import annotations

import sys

import pytest

import peers_cost


def test_lines_of_yaml_and_python() -> None:
    assert peers_cost.lines_of("# head\n\nname: e\n  # inner\ndata: {}  # kept\n") == 2
    assert peers_cost.lines_table()[2].startswith("| [peers_heart.yaml](experiments/peers_heart.yaml) | 6 | 13 | ")


def test_the_page_has_what_is_committed() -> None:
    assert peers_cost.PAGE.read_text(encoding="utf-8") == peers_cost.fill_page()


@pytest.mark.slow
def test_seconds_of_a_command() -> None:
    busy = f"{sys.executable} -c 'sum(range(3_000_000))'"
    assert 0.01 < peers_cost.seconds_beside(busy) < 30
