"""KD3A when one source's model predicts nothing: what the others' shares are, and from whose value they follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kd3a_written import focus_of
from test_kd3a_worked import FIRST, SECOND, STUDENT, of_first, told
from tiny import LINEAR, federation

from fedshift.data.domain import Domain
from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods.federated.kd3a_teachers import Teachers
from fedshift.weights import Weights

NOTHING = (math.nan,) * 3
THIRD = ((0.05, 0.93, 0.02), (0.02, 0.92, 0.06), (0.04, 0.92, 0.04))
TEACHERS = (FIRST, SECOND, THIRD)
COUNTS = {"south": 100, "north": 200, "east": 300, "west": 50}


@pytest.mark.parametrize("sick", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", ["shapley", "leave_one_out"])
def test_the_shares_of_the_others_are_by_their_own_focus(sick: int, rule: str) -> None:
    """Four sources of different value; the sick one says that all classes are alike, which passes no gate."""
    rows = [list(teacher) for teacher in (FIRST, SECOND, THIRD)]
    rows.insert(sick, [NOTHING] * 3)
    names = list(COUNTS)
    found = told(of_first(focus=rule), rows, 9, numbers=COUNTS, student=STUDENT)
    assert set(found.shares) == set(names) - {names[sick]}
    alike = (1 / 3,) * 3
    samples = [[alike if k == sick else rows[k][kind] for k in range(4)] for kind in range(3)]
    value = focus_of(samples, 0.9, "rows", rule)
    products = {name: COUNTS[name] * value[k] for k, name in enumerate(names) if k != sick}
    assert len({round(product, 3) for product in products.values()}) == 3, "a mix-up would not show"
    kept = sum(COUNTS[name] for name in products)
    target = 9 / (kept + 9)
    assert found.target_share == pytest.approx(target, abs=1e-6)
    expected = {name: (1 - target) * product / sum(products.values()) for name, product in products.items()}
    assert dict(found.shares) == pytest.approx(expected, abs=1e-4)


def test_a_model_is_sound_if_it_predicts_for_every_sample() -> None:
    """Samples are 1, 2 and 1000: three models overflow at none, at the largest, and at all of them."""
    inputs = np.repeat(np.array([[1.0], [2.0], [1000.0]], np.float32), 3, axis=0)
    target = Domain("target", inputs, np.zeros(9, np.int64))
    sources = [Domain(name, inputs[:2], np.zeros(2, np.int64)) for name in ("a", "b", "c")]
    where = federation(of_first(), [*sources, target], LINEAR, roles={"target": "target"})
    assert isinstance(where, LocalFederation)
    site = where._runners["target"].site
    models = {
        name: Weights(
            {"classifier.weight": torch.tensor([[slope], [0.0], [-slope]]), "classifier.bias": torch.zeros(3)}
        )
        for name, slope in (("a", 0.01), ("b", 1e36), ("c", math.inf))
    }
    teachers = Teachers(site, list(models.values()), 0.9, own_statistics=True, whole_epoch=True, tally=None)
    assert teachers.finite(models) == ["a"]
