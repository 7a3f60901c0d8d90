"""A caution that labels differ in rate compares rates, whatever the sizes of sites."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fedshift.evaluation.cautions import _rates


def told(**support: list[int]) -> list[str]:
    sites = [SimpleNamespace(site=name, support=counts, samples=sum(counts)) for name, counts in support.items()]
    result: Any = SimpleNamespace(classes=("healthy", "ill"), sites=sites)
    return list(_rates([result]))


def test_large_and_small_sites_of_one_rate_are_alike() -> None:
    assert told(small=[30, 10], large=[3000, 1000]) == []


def test_the_largest_gap_is_told() -> None:
    (text,) = told(north=[45, 5], south=[300, 700])
    assert "ill is 10.0 % of the samples at north and 70.0 % at south" in text
