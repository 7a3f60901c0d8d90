"""Samples to predict are compared with what a model file says of its training data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedshift.data.domain import Preprocessing
from fedshift.data.input_guard import (
    ImageStatistics,
    InputShift,
    feature_shift,
    image_shift,
    image_statistics,
    overlap,
    table_shift,
)
from fedshift.data.table_files import from_columns
from fedshift.data.tables import CategoricalColumn, NumericColumn, TableEncoding
from fedshift.errors import UserError
from tried import case, cases

ENCODING = TableEncoding(
    numeric=(
        NumericColumn(name="age", mean=54.0, std=9.0, can_be_missing=False),
        NumericColumn(name="chol", mean=247.0, std=52.0, can_be_missing=True),
    ),
    categorical=(CategoricalColumn(name="sex", categories=("female", "male")),),
)


def patients(rows: int = 60, **changed: Any) -> dict[str, list[Any]]:
    draws = np.random.default_rng(0)
    return {
        "age": draws.normal(54, 9, rows).round().tolist(),
        "chol": draws.normal(247, 52, rows).round().tolist(),
        "sex": ["female", "male"] * (rows // 2) + ["male"] * (rows % 2),
        **changed,
    }


def shift_of(cells: dict[str, list[Any]]) -> InputShift:
    return table_shift(from_columns("t", cells), ENCODING)


def test_patients_of_the_same_kind_pass_without_a_word() -> None:
    found = shift_of(patients())
    assert (found.warning, found.refusal) == (None, None)
    assert {column.name: column.unknown + column.outside + column.missing for column in found.columns} == dict.fromkeys(
        ("age", "chol", "sex"), 0.0
    )


@pytest.mark.parametrize(
    ("column", "change", "share"),
    [
        case("units of new data", "age in months, the model read years", "age", lambda value: value * 12, "100 %"),
        case(
            "units of new data",
            "cholesterol in mmol/L, all within five deviations of mg/dL",
            "chol",
            lambda value: value / 38.67,
            "overlap 0.0",
        ),
        case(
            "categories of new data",
            "M and F, the model knows male and female",
            "sex",
            lambda value: value[0].upper(),
            "'F', 'M'",
        ),
        case("categories of new data", "all categories in upper case", "sex", str.upper, "'FEMALE', 'MALE'"),
        case(
            "categories of new data",
            "1 and 2 in place of names",
            "sex",
            lambda value: "12"[value == "male"],
            "'1', '2'",
        ),
        case("units of new data", "the year of birth in place of the age", "age", lambda value: 2026 - value, "100 %"),
        case(
            "units of new data",
            "a decimal sign read as a sign of thousands",
            "chol",
            lambda value: value * 1000,
            "100 %",
        ),
        case("missing in new data", "a column that every training row had", "age", lambda value: "", "no value"),
        case("missing in new data", "a code for missing", "age", lambda value: -999, "100 %"),
    ],
)
def test_usual_mistakes_are_refused_by_column(column: str, change: Any, share: str) -> None:
    cells = patients()
    cells[column] = [change(value) for value in cells[column]]
    found = shift_of(cells)
    assert f"column '{column}'" in found.refusal
    assert share in found.refusal
    assert sum(f"'{name}':" in found.refusal for name in ("age", "chol", "sex")) == 1
    with pytest.raises(UserError, match="accept_shift"):
        found.check(accept=False)
    found.check(accept=True)


@pytest.mark.case("shares of new data", "a tenth of the rows in another coding: said, and not refused")
@pytest.mark.case("shares of new data", "3 of 100 rows are unusual, as in any hospital: not a word")
@pytest.mark.case("shares of new data", "one patient, in months: said, and not refused")
@pytest.mark.case("shares of new data", "healthy: one patient six deviations from the mean")
def test_few_rows_are_said_and_not_refused() -> None:
    found = shift_of(patients(sex=["M"] * 6 + ["male"] * 54))
    assert found.refusal is None
    assert "10 % of the rows" in found.warning
    cells = patients(100)
    cells["age"][:3], cells["sex"][3] = [105, 0, 110], "unknown"
    assert shift_of(cells).warning is None
    found = shift_of({"age": [650], "chol": [250], "sex": ["M"]})
    assert found.refusal is None
    assert "'age'" in found.warning
    assert "'sex'" in found.warning
    assert shift_of({"age": [54], "chol": [247 + 6 * 52], "sex": ["male"]}).warning is None
    assert "'chol'" in (shift_of({"age": [54], "chol": [247 + 11 * 52], "sex": ["male"]}).warning or "")


@pytest.mark.case("missing in new data", "a code for missing at five of the deviations: 0 in all rows")
@pytest.mark.case("missing in new data", "a column without any value, of which training missed some")
@pytest.mark.case("groups of new data", "a ward of women: one known category, and a sign that is 0 for all")
def test_columns_of_one_value() -> None:
    found = shift_of(patients(chol=[0] * 60))
    assert "0 ± 0, in training 247 ± 52" in found.warning
    assert shift_of(patients(chol=[250] * 60)).warning is None  # constant, and plausible
    assert shift_of(patients(60, chol=[""] * 60)).warning is None
    assert "no row has a value" in (shift_of(patients(100, chol=["?"] * 100)).warning or "")
    encoding = TableEncoding(
        numeric=(NumericColumn(name="woman", mean=0.3, std=0.458, can_be_missing=False),), categorical=()
    )
    assert shift_of(patients(sex=["female"] * 60)).warning is None
    assert table_shift(from_columns("t", {"woman": [1] * 50}), encoding).warning is None


def test_no_training_data_lie_outside_their_own_range() -> None:
    """Chebyshev: at most 1 in 25 values is more than five deviations from the mean, here exactly so many."""
    values = np.array([0.0] * 48 + [1.0, -1.0])
    mean, std = float(values.mean()), float(values.std())  # deviation 0.2: both ends are five of it away
    encoding = TableEncoding(
        numeric=(NumericColumn(name="x", mean=mean, std=std * 0.999, can_be_missing=False),), categorical=()
    )
    found = table_shift(from_columns("t", {"x": values.tolist()}), encoding)
    assert found.columns[0].outside == pytest.approx(0.04)
    assert found.warning is None


def test_overlap_is_the_integral_of_the_root_of_both_densities() -> None:
    grid = np.linspace(-60, 60, 400_001)

    def density(mean: float, std: float) -> Any:
        return np.exp(-((grid - mean) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))

    for mean, std, other, deviation in ((0.0, 1.0, 2.0, 3.0), (5.0, 0.5, -4.0, 6.0), (1.0, 2.0, 1.0, 2.0)):
        integral = float(np.sqrt(density(mean, std) * density(other, deviation)).sum() * (grid[1] - grid[0]))
        assert overlap(mean, std, other, deviation) == pytest.approx(integral, abs=1e-6)
    assert overlap(3, 0, 3, 0) == 1.0
    assert overlap(3, 0, 4, 0) == 0.0


@pytest.mark.case("shares of new data", "healthy: a sign that 1 of 50 training patients had, 3 of 25 here")
@pytest.mark.case("shares of new data", "healthy: 25 patients without the few high values of a skewed column")
def test_rare_and_skewed_columns() -> None:
    rare = NumericColumn(name="rare", mean=0.02, std=math.sqrt(0.02 * 0.98), can_be_missing=False)
    encoding = TableEncoding(numeric=(rare,), categorical=())
    assert table_shift(from_columns("t", {"rare": [1] * 3 + [0] * 22}), encoding).warning is None
    assert table_shift(from_columns("t", {"rare": [2] * 3 + [1] * 22}), encoding).warning is not None
    skewed = NumericColumn(name="troponin", mean=300.0, std=1300.0, can_be_missing=False)
    encoding = TableEncoding(numeric=(skewed,), categorical=())
    low = np.random.default_rng(0).exponential(5, 200).tolist()
    assert table_shift(from_columns("t", {"troponin": low[:25]}), encoding).warning is None
    assert table_shift(from_columns("t", {"troponin": low}), encoding).warning is not None


@pytest.mark.case("units of new data", "a column of an array without names, times a thousand")
@pytest.mark.case("units of new data", "numbers near the largest one: said, without an error")
def test_columns_of_arrays_and_extreme_numbers() -> None:
    rows = np.random.default_rng(0).normal([5, 1], [2, 1], (40, 2)).astype(np.float32)
    known = Preprocessing(kind="features", mean=(5.0, 1.0), std=(2.0, 1.0))
    assert feature_shift(rows, known).warning is None
    other = rows * np.array([1, 1000], dtype=np.float32)
    assert "'1'" in (feature_shift(other, known).refusal or "")
    assert feature_shift(other, Preprocessing(kind="features")).warning is None
    found = shift_of(patients(age=[1e300] * 30 + [-1e300] * 30))
    assert "'age'" in (found.refusal or "")
    assert overlap(1e308, 1e308, -1e308, 1e308) < 0.9
    assert overlap(math.inf, 1, 0, 1) == 0.0
    wrong = Preprocessing(kind="features", mean=(0.0, math.nan), std=(0.0, 1.0))  # a stranger's file
    assert feature_shift(np.ones((40, 2), dtype=np.float32), wrong).warning is None


# Images ---------------------------------------------------------------------------------------------------------------


def colour(number: int = 30, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (number, 3, 8, 8), dtype=np.uint8)


TRAINED = image_statistics([colour(40, 1), colour(40, 2)])


@pytest.mark.case("images to predict", "grey ones, where some training images were grey, or it is not known")
@pytest.mark.case("images to predict", "grey ones of a lossy file, whose channels differ by rounding")
@pytest.mark.case("images to predict", "files of another size: 8 times smaller said, half not")
def test_statistics_of_images() -> None:
    images = colour(30)
    found = image_statistics([images[:10], images[10:]])
    assert found.mean == pytest.approx(images.mean() / 255)
    assert found.std == pytest.approx(images.std() / 255)
    assert found.grey == 0.0
    assert image_statistics([images[:10]]) is None
    grey = np.repeat(colour()[:, :1], 3, axis=1)
    assert image_shift(grey, ImageStatistics(mean=0.5, std=0.29, grey=0.97)).warning is None
    assert image_shift(grey, None).warning is None
    grey = np.repeat(np.clip(colour()[:, :1], 2, 250), 3, axis=1)
    grey[:, 1] += 1
    assert "grey" in (image_shift(grey, TRAINED).refusal or "")
    trained = image_statistics([colour(40)], [1000, 1024] * 20)
    assert trained.side == pytest.approx(math.sqrt(1000 * 1024))
    assert "about 128 pixels on their shorter side, in training 1012" in (
        image_shift(colour(), trained, [128] * 12).warning or ""
    )
    assert image_shift(colour(), trained, [500] * 12).warning is None
    assert image_shift(colour(), trained).warning is None
    few = image_statistics([colour(40)], [1000] * 3)
    assert few.side is None


@cases(
    "images to predict",
    "images word refused",
    {
        "images of the same kind": (colour(), "", False),
        "grey ones, training had colour": (np.repeat(colour()[:, :1], 3, axis=1), "grey", True),
        "numbers from 0 to 1 as whole numbers": ((colour() / 255).round().astype(np.uint8), "multiply", True),
        "nearly black, as of 12 bits in 16": ((colour() // 20).astype(np.uint8), "overlap", False),
        "black ones": (np.zeros((12, 3, 8, 8), dtype=np.uint8), "black", False),
    },
)
def test_images_are_compared(images: Any, word: str, refused: bool) -> None:
    found = image_shift(images, TRAINED)
    assert (found.refusal is not None) == refused
    assert word in (found.warning or "")
    assert (found.warning is None) == (word == "")
