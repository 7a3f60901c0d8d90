"""Which model answers where there are no labels: an adapted one must have gained at sites that have some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from scipy.stats import sem

from fedshift.evaluation.estimate.choice import SPREAD, choose, margin
from fedshift.report import choice


def test_the_margin_and_targets_without_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = [12.0, -3.0, 5.0, 9.0]
    error = np.hypot(sem(gains), SPREAD / np.sqrt(4))
    assert margin(gains) == pytest.approx(np.mean(gains) - error / 2)
    assert margin([9.0, 9.0]) is None
    made = {"a": SimpleNamespace(gains={"recipe": [1.0]}), "b": SimpleNamespace(gains={})}
    monkeypatch.setattr(choice, "choice_at", lambda collected, target, estimates: made[target])
    unmeasured = [SimpleNamespace(result=SimpleNamespace(target=target)) for target in "aba"]
    assert choice.choices(cast(Any, SimpleNamespace(unmeasured=unmeasured)), {}) == (made["a"],)


@pytest.mark.parametrize(
    ("gains", "chosen"),
    [
        ({"recipe": [6.6, -1.7, -18.4]}, None),  # heart disease: classes of unequal size, where adapting did harm
        ({"recipe": [60.0, 2.0, -4.0]}, None),  # harm at one
        ({"recipe": [15.6, 9.4, 19.1], "shot": [3.0, 6.4, 0.5]}, "recipe"),  # PACS
        ({"recipe": [0.5, -0.5, 0.9]}, None),  # chance
        ({"shot": [40.0, 30.0]}, None),
        ({}, None),
    ],
)
def test_an_adapted_model_answers_only_where_it_gained(gains: dict[str, list[float]], chosen: str | None) -> None:
    assert choose(gains) == chosen


def test_where_adapting_gains_nothing_on_average_it_is_seldom_chosen() -> None:
    draw = np.random.default_rng(0)
    taken = [choose({"a": list(draw.normal(-3, 6, 5))}) is not None for _ in range(500)]
    gained = [choose({"a": list(draw.normal(8, 4, 5))}) is not None for _ in range(500)]
    assert np.mean(taken) < 0.1
    assert np.mean(gained) > 0.9
