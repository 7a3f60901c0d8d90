"""Drift is called no more often than is stated where nothing changed, and is called where something did."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2_contingency, fisher_exact, ttest_ind

from fedshift.evaluation.estimate.drift import ColumnSums, answers_differ, columns_differ


@pytest.mark.slow
def test_answers_are_called_different_as_often_as_is_stated() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(10) * 0.3)  # many cells are rare
    found = [answers_differ(rng.multinomial(120, shares), rng.multinomial(40, shares), at) for at in range(400)]
    for level in (0.01, 0.05, 0.2):
        assert np.mean(np.array(found) <= level) <= level + 2.6 * np.sqrt(level * (1 - level) / 400)


def test_p_agrees_with_others() -> None:
    before, now = np.array([60, 90, 50, 30]), np.array([30, 30, 25, 20])
    asymptotic = chi2_contingency([before, now], correction=False).pvalue
    assert answers_differ(before, now) == pytest.approx(asymptotic, abs=0.02)
    assert answers_differ([9, 1], [2, 8]) == pytest.approx(fisher_exact([[9, 1], [2, 8]]).pvalue, abs=0.005)
    assert answers_differ([5, 5], [0, 0]) == 1.0


def test_columns_are_compared_by_their_sums_as_by_their_values() -> None:
    rng = np.random.default_rng(1)
    old, new = rng.normal(60, 10, (3, 50)), rng.normal(63, 14, 80)
    sums = sum(
        (ColumnSums(50, part.mean(), part.std()) for part in old[1:]), ColumnSums(50, old[0].mean(), old[0].std())
    )
    assert (sums.mean, sums.std) == pytest.approx((old.mean(), old.std()))
    found = columns_differ({"age": sums}, {"age": ColumnSums(80, new.mean(), new.std()), "new": sums})
    assert found == {"age": pytest.approx(ttest_ind(old.ravel(), new, equal_var=False).pvalue)}
    same = {"c": ColumnSums(9, 1.0, 0.0)}
    assert columns_differ(same, same) == {"c": 1.0}
    assert columns_differ(same, {"c": ColumnSums(9, 2.0, 0.0)}) == {"c": 0.0}
