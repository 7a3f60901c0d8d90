"""A caution that labels differ in rate compares rates, whatever the sizes of sites."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from fedshift.evaluation.cautions import _one_class, _rates


def told(**support: list[int]) -> list[str]:
    sites = [SimpleNamespace(site=name, support=counts, samples=sum(counts)) for name, counts in support.items()]
    result: Any = SimpleNamespace(classes=("healthy", "ill"), sites=sites)
    return list(_rates([result]))


def test_gaps_in_rates_and_single_classes_are_told() -> None:
    assert told(small=[30, 10], large=[3000, 1000]) == []
    (text,) = told(north=[45, 5], south=[300, 700])
    assert "ill is 10.0 % of the samples at north and 70.0 % at south" in text

    def told_of(baseline: float | None) -> list[str]:
        site = SimpleNamespace(site="north", support=[0, 30], samples=30, baseline=baseline)
        return list(_one_class([cast(Any, SimpleNamespace(classes=("healthy", "ill"), targets=[site]))]))

    (text,) = told_of(None)
    assert text.endswith("tells classes apart: north (ill)")
    assert told_of(4.0) == []
