"""One site's replies, broken in every field, to every call of every method: its own loss, and nobody else's."""

from __future__ import annotations

import random

import pytest
import torch
from broken_replies import broken
from replay import METHODS, Attack, recorded
from run import REPLIES, read_report

from tried import slow_after

MESSAGES = 40
"""Broken replies for each method; `run.py` tries a hundred thousand."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.threat("broken_field")
@pytest.mark.parametrize("name", slow_after(8, METHODS))
def test_no_reply_of_one_site_harms_the_others(name: str) -> None:
    attack = Attack(recorded(name), broken, random.Random(f"quick {name}"))
    for _ in range(MESSAGES):
        attack.one()
    attack.end()
    assert 0 < attack.taken < MESSAGES / 2


def test_the_committed_report_is_of_the_promised_size() -> None:
    report = read_report()
    assert report["replies"] >= REPLIES
    assert (set(report["methods"]), report["errors_that_are_not_declared"]) == (set(METHODS), 0)
    assert report["megabytes_grown"] <= 50
    assert report["longest_seconds"] <= 0.5
