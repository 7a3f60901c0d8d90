"""KD3A when one source's model predicts nothing: what the others' shares are, and from whose value they follow."""

from __future__ import annotations

import math

import pytest
from test_kd3a import FIRST, SECOND, STUDENT, focus_of, of_first, told

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
