"""What only shows when sites are compared: samples that two hold, columns in other units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedshift.data.checks import agreed_classes
from fedshift.data.codings import count_columns
from fedshift.data.domain import DataSet, Domain, Manifest, Preprocessing
from fedshift.data.site_differences import site_differences
from fedshift.data.table_files import from_columns
from fedshift.errors import UserError


def data(kind: Any = "features", table: dict[str, object] | None = None, **inputs: np.ndarray[Any, Any]) -> DataSet:
    domains = {name: Domain(name, values, np.zeros(len(values), dtype=np.int64)) for name, values in inputs.items()}
    return DataSet("x", domains, ("n", "y"), Preprocessing(kind=kind, table=table), Manifest(*[""] * 5))


def table(
    numeric: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    categorical: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> DataSet:
    """A table of columns that are given as column → site → cells, with inputs that do not repeat."""
    numeric, categorical = numeric or {}, categorical or {}
    sites = next(iter([*numeric.values(), *categorical.values()]))
    columns = {
        site: count_columns(
            from_columns(site, {name: by_site[site] for name, by_site in [*numeric.items(), *categorical.items()]}),
            list(numeric),
            list(categorical),
        )
        for site in sites
    }
    inputs = {site: rows(number, len(sites[site])) for number, site in enumerate(sites)}
    return replace(data("table", {}, **inputs), columns=columns)


def warnings_of(
    numeric: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    categorical: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> tuple[str, ...]:
    return site_differences(table(numeric, categorical))


def rows(seed: int, n: int = 40) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(5, 1, (n, 3)).astype(np.float32)


def images(seed: int, n: int = 4) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 255, (n, 1, 6, 6), dtype=np.uint8)


def test_samples_and_units_of_sites() -> None:
    assert site_differences(data(a=rows(0), b=rows(1))) == ()
    assert site_differences(data("image", a=images(0), b=images(1))) == ()
    (said,) = site_differences(data(a=rows(0), b=rows(1), c=rows(0)))
    assert "'a' and 'c'" in said
    both = images(1)
    both[2] = images(0)[3]
    (said,) = site_differences(data("image", a=images(0), b=both))
    assert "share 1 " in said
    shared = rows(1)
    shared[2] = rows(0)[3]
    assert site_differences(data(a=rows(0), b=shared)) == ()
    shared[:25] = rows(0)[:25]
    assert "share 25 " in site_differences(data(a=rows(0), b=shared))[0]
    other = rows(1)
    other[:, 1] = 0
    other[:3, 1] = 0.1
    assert site_differences(data(a=rows(0), b=other)) == ()
    many, other = (np.tile(rows(seed), (1, 40)) for seed in (0, 1))
    assert site_differences(data(a=many[:, :90], b=18 * other[:, :90])) != ()
    assert site_differences(data(a=many, b=18 * other)) == ()


@pytest.mark.parametrize(("factor", "shift"), [(18.0, 0.0), (1.0, 12.0), (0.05, 4.75)])
def test_other_units(factor: float, shift: float) -> None:
    other = rows(1)
    other[:, 1] = other[:, 1] * factor + shift
    (said,) = site_differences(data(a=rows(0), b=other))
    assert "column 1 is" in said
    assert "column 0" not in said
    assert site_differences(data(a=rows(0)[:20], b=other[:20])) == ()  # too few to tell


def test_a_table_names_the_column_as_it_is_in_the_file() -> None:
    """250 ± 50 at one site, with missing cells, and 6.5 ± 1.3 at the other."""
    draws = np.random.default_rng(0)
    cells = {
        "a": ["?"] * 20 + [f"{value:.1f}" for value in draws.normal(250, 50, 60)],
        "b": [f"{value:.2f}" for value in draws.normal(6.5, 1.3, 80)],
    }
    (said,) = [text for text in warnings_of(numeric={"cholesterol": cells}) if "scale" in text]
    assert "'cholesterol' is 2" in said
    assert " at a and 6." in said


def days(count: int, start: int = 0) -> list[str]:
    return [str(number) for number in range(start, start + count)]


@pytest.mark.parametrize(
    "found",
    [
        {"a": ["36.6", *days(12)], "b": ["37.1", *days(12)]},  # a temperature
        {"a": days(40), "b": days(45)},  # a length of stay
    ],
)
def test_a_quantity_is_asked_about(found: dict[str, list[str]]) -> None:
    with pytest.raises(UserError, match="quantity"):
        agreed_classes(found, what="labels in column 'stay'", allow_missing=False)


@pytest.mark.parametrize(
    ("found", "allow"),
    [
        ({"a": days(65), "b": days(65)}, False),  # codes of 65 classes
        ({"a": days(65), "b": days(60)}, True),
        ({"a": ["0.5", "1.0"], "b": ["0.5", "1.0"]}, False),
        ({"a": ["1.0", "2.0"], "b": ["1.0"]}, False),
        ({"a": ["ill", *days(40)], "b": ["ill"]}, False),
    ],
)
def test_numbers_may_name_classes(found: dict[str, list[str]], allow: bool) -> None:
    assert len(agreed_classes(found, what="labels", allow_missing=allow)) == len(
        {n for one in found.values() for n in one}
    )


def test_of_ten_thousand_sites_only_those_of_other_classes_are_compared() -> None:
    sites = {f"s{number}": ("no", "yes")[: 1 + number % 2] for number in range(10_000)}
    assert agreed_classes(sites, what="classes", allow_missing=False) == ("no", "yes")
    with pytest.raises(UserError, match=r"'s1' has .*yes.*; 'odd' has .*yess"):
        agreed_classes({**sites, "odd": ("no", "yess")}, what="classes", allow_missing=False)
