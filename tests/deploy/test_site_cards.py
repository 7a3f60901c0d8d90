"""What a site's card may hold."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedshift.deploy import site_cards
from fedshift.deploy.site_cards import GivenTable


def test_the_categories_of_all_columns_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_cards, "MOST_CATEGORIES", 3)

    def given(*categories: tuple[str, ...]) -> GivenTable:
        none: tuple[float, ...] = ()
        return GivenTable(
            kind="table",
            numeric=(),
            categorical=("a", "b"),
            count=(),
            total=none,
            squares=none,
            any_missing=(),
            categories=categories,
        )

    assert given(("x", "y"), ("z",)).categories == (("x", "y"), ("z",))
    with pytest.raises(ValidationError, match="more than 3 categories"):
        given(("x", "y"), ("z", "w"))
