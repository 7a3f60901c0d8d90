"""Columns that sites code otherwise, codes for missing values, copies of rows: said, and silent where all is well."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift.data.agreement import differences, table_given
from fedshift.data.builders.own_tables import Table
from fedshift.data.codings import missing_cells
from fedshift.data.domain import DataSet
from fedshift.data.site_differences import shared_groups, site_differences
from fedshift.data.tables import site_statistics
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import Plan
from tried import case, cases

ROWS = 60


def patients(seed: int, rows: int = ROWS, **changed: Sequence[object]) -> dict[str, list[object]]:
    draws = np.random.default_rng(seed)
    return {
        "age": [f"{value:.1f}" for value in draws.normal(60, 9, rows)],
        "bp": [f"{value:.1f}" for value in draws.normal(130, 15, rows)],
        "sex": draws.choice(["m", "f"], rows).tolist(),
        "smoker": draws.choice(["0", "1"], rows, p=[0.7, 0.3]).tolist(),
        "y": draws.choice(["0", "1"], rows).tolist(),
        **{name: list(values) for name, values in changed.items()},
    }


def write(folder: Path, **sites: dict[str, list[object]]) -> dict[str, str]:
    files = {}
    for name, cells in sites.items():
        lines = [",".join(cells), *(",".join(map(str, row)) for row in zip(*cells.values(), strict=True))]
        files[name] = folder / f"{name}.csv"
        files[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {name: str(file) for name, file in files.items()}


def table(folder: Path, sites: dict[str, dict[str, list[object]]], **options: Any) -> DataSet:
    columns = {"numeric": ["age", "bp", "smoker"], "categorical": ["sex"], "label": "y", **options}
    return Table.model_validate({"sites": write(folder, **sites), **columns}).build()


def warnings_of(folder: Path, sites: dict[str, dict[str, list[object]]], **options: Any) -> tuple[str, ...]:
    return site_differences(table(folder, sites, **options))


def three(c: dict[str, list[object]]) -> dict[str, dict[str, list[object]]]:
    return {"a": patients(1), "b": patients(2), "c": c}


def respelt(how: Any) -> list[object]:
    return [how(cell) for cell in patients(3)["sex"]]


@pytest.mark.case("copies of rows", "healthy: a table of three signs, whose rows must repeat")
@pytest.mark.case("copies of rows", "healthy: every site counts its rows from 1 on")
def test_healthy_sites_give_no_warning(tmp_path: Path) -> None:
    assert warnings_of(tmp_path, three(patients(3))) == ()
    draws = np.random.default_rng(0)
    sites = {name: {column: draws.choice(["0", "1"], 80).tolist() for column in ("p", "q", "r", "y")} for name in "abc"}
    assert warnings_of(tmp_path, sites, numeric=["p"], categorical=["q", "r"]) == ()
    counted = [str(number) for number in range(1, ROWS + 1)]
    assert warnings_of(tmp_path, {"a": patients(1, who=counted), "b": patients(2, who=counted)}, id="who") == ()


@cases(
    "categories between sites",
    "cells words",
    {
        "M and F for m and f": (respelt(str.upper), ["'M' at 'c'", "is 'm' at 'a', 'b'"]),
        "1 and 2 for m and f": (
            respelt(lambda cell: "12"[cell == "f"]),
            ["'1', '2' of 'c' (100 % of its rows)", "'f', 'm'"],
        ),
        "male and female for m and f": (
            respelt(lambda cell: {"m": "male", "f": "female"}[cell]),
            ["'female', 'male' of 'c' (100 %"],
        ),
        "a full stop behind": (respelt(lambda cell: f"{cell}."), ["'m.'", "is 'm'"]),
        "one row in capitals": (["M", *patients(3)["sex"][1:]], ["'M' at 'c' (1.67 % of its rows)"]),
        "a category that only one site has, in a fifth of its rows": (
            [*["divers"] * 12, *patients(3)["sex"][12:]],
            ["'divers' of 'c' (20 % of its rows)"],
        ),
    },
)
def test_categories_that_no_other_site_has(tmp_path: Path, cells: list[object], words: list[str]) -> None:
    (said,) = warnings_of(tmp_path, three(patients(3, sex=cells)))
    assert "column 'sex'" in said
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("here", "there"),
    [
        case("categories between sites", "a leading zero", "1", "01"),
        case("categories between sites", "a decomposed umlaut", "ärztin", unicodedata.normalize("NFD", "ärztin")),
        case("categories between sites", "a hyphen for a space", "type 2", "type-2"),
        case("categories between sites", "a ligature", "ﬁne", "fine"),
        case("categories between sites", "ß and SS", "STRASSE", "straße"),
        case("categories between sites", "a full-width letter", "A", "Ａ"),
    ],
)
def test_spellings_that_look_alike(tmp_path: Path, here: str, there: str) -> None:
    usual, other = ([name, "none"] * (ROWS // 2) for name in (here, there))
    sites = {"a": patients(1, sex=usual), "b": patients(2, sex=usual), "c": patients(3, sex=other)}
    (said,) = warnings_of(tmp_path, sites)
    assert "spells a category in more than one way" in said
    assert "at 'c' (50 % of its rows)" in said


@pytest.mark.case("categories between sites", "two sites of four each way: every category is known elsewhere")
@pytest.mark.case(
    "categories between sites", "genotypes AA, Aa, aa, which all sites have, and a rare category of one site"
)
def test_categories_of_groups_of_sites(tmp_path: Path) -> None:
    sites = {name: patients(number) for number, name in enumerate("abcd")}
    for name in "cd":
        sites[name]["sex"] = ["12"[cell == "f"] for cell in sites[name]["sex"]]
    (said,) = warnings_of(tmp_path, sites)
    assert "'a', 'b' have 'f', 'm'; 'c', 'd' have '1', '2'" in said
    for name in "cd":
        sites[name]["sex"] = ["FM"[cell == "1"] for cell in sites[name]["sex"]]
    (said,) = warnings_of(tmp_path, sites)
    assert "spells" in said
    draws = np.random.default_rng(0)
    sites = {
        name: patients(number, sex=draws.choice(["AA", "Aa", "aa"], ROWS).tolist()) for number, name in enumerate("abc")
    }
    sites["c"]["sex"][:4] = ["A0"] * 4  # of 60 rows
    assert warnings_of(tmp_path, sites) == ()


@pytest.mark.case("categories between sites", "one site, site check: a slip in 2 of 60 rows")
@pytest.mark.case("categories between sites", "one site, site check: -999 in three rows, without any other site")
def test_one_site_alone(tmp_path: Path) -> None:
    (said,) = warnings_of(tmp_path, {"a": patients(1, sex=["M", "M", *patients(1)["sex"][2:]])})
    assert "'M' (2 rows) and 'm' at 'a'" in said
    other = patients(3)
    other["bp"][:3] = ["-999"] * 3
    (said,) = warnings_of(tmp_path, {"c": other})
    assert "column 'bp' has -999 in 5 % of the rows of 'c'" in said
    assert warnings_of(tmp_path, {"c": other}, missing_values={"bp": -999}) == ()


@pytest.mark.case("categories between sites", "a sign of 1 and 2 at one site, 0 and 1 at the others")
def test_a_sign_in_other_digits(tmp_path: Path) -> None:
    other = patients(3)
    other["smoker"] = [str(int(str(cell)) + 1) for cell in other["smoker"]]
    (said,) = warnings_of(tmp_path, three(other))
    assert "column 'smoker' is coded otherwise" in said
    assert "1 and 2 at 'c'" in said
    sites = {**three(other), "d": patients(4, smoker=["0"] * ROWS)}
    (said,) = warnings_of(tmp_path, sites)
    assert "1 and 2 at 'c'" in said


@pytest.mark.case("categories between sites", "data frames: the same columns as in files")
@pytest.mark.case("categories between sites", "arrays without names of columns: -999 in a column of one site")
def test_frames_and_arrays_are_compared_as_files_are(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    sites = three(patients(3, sex=respelt(str.upper)))
    sites["c"]["bp"][:6] = ["-99"] * 6
    frames = {name: pandas.DataFrame(cells) for name, cells in sites.items()}
    for frame in frames.values():
        for column in ("age", "bp", "smoker"):
            frame[column] = frame[column].astype(float)
    options = {"numeric": ["age", "bp", "smoker"], "categorical": ["sex"], "label": "y"}
    data = parse({"data": {"sites": frames, **options}, "model": "linear", "methods": ["fedavg"]}).data.build()
    categories, codes = site_differences(data)
    assert "'M' at 'c'" in categories
    assert "column 'bp' has -99 in 10 %" in codes
    files = {}
    for number, name in enumerate("ab"):
        x = np.random.default_rng(number).normal(5, 1, (60, 3))
        x[: 10 * number, 1] = -999
        files[name] = str(tmp_path / f"{name}.npz")
        np.savez(files[name], x=x, y=np.tile([0, 1], 30))
    data = parse({"data": {"name": "arrays", "sites": files}, "model": "linear", "methods": ["fedavg"]}).data.build()
    (said,) = site_differences(data)
    assert "column 1 has -999 in 16.7 % of the rows of 'b'" in said


# Codes for missing values ---------------------------------------------------------------------------------------------


@cases(
    "categories between sites",
    "column value rows share",
    {
        "age 999 in all rows": ("age", "999", ROWS, "999 in all of the rows of 'c'"),
        "pressure 0 in all rows": ("bp", "0", ROWS, "0 in all of the rows of 'c'"),
        "pressure 0 in a tenth": ("bp", "0", 6, "0 in 10 % of the rows of 'c'"),
        "age -1 in four rows": ("age", "-1", 4, "-1 in 6.67 %"),
        "age -9 in four rows": ("age", "-9", 4, "-9 in 6.67 %"),
        "pressure 9999 in three rows": ("bp", "9999", 3, "9999 in 5 %"),
        "age 99, just above the oldest patient": ("age", "99", 12, "99 in 20 %"),
        "a number of no usual code, far beyond the range": ("bp", "5000", 5, "5000 in 8.33 %"),
    },
)
def test_codes_for_missing(tmp_path: Path, column: str, value: str, rows: int, share: str) -> None:
    other = patients(3)
    other[column][:rows] = [value] * rows
    (said,) = warnings_of(tmp_path, three(other))
    assert f"column '{column}' has {share}" in said
    assert "missing_values" in said


@cases(
    "categories between sites",
    "draw",
    {
        "healthy: a count with many zeros": lambda rng, n: rng.poisson(1.0, n),
        "healthy: cigarettes a day": lambda rng, n: rng.choice([0, 0, *np.arange(1, 41)], n),
        "healthy: ST depression, half 0": lambda rng, n: np.maximum(0, rng.normal(0.5, 1, n)).round(1),
        "healthy: vessels 0 to 3": lambda rng, n: rng.choice([0, 1, 2, 3], n),
        "healthy: codes 3, 6, 7": lambda rng, n: rng.choice([3, 6, 7], n),
        "healthy: base excess, with -1": lambda rng, n: rng.normal(0, 2, n).round(),
        "healthy: Apgar": lambda rng, n: rng.choice([7, 8, 9, 10], n, p=[0.1, 0.2, 0.6, 0.1]),
        "healthy: a skewed laboratory value": lambda rng, n: rng.lognormal(1, 1.2, n).round(1),
        "healthy: saturation": lambda rng, n: np.minimum(100, rng.normal(97, 2, n)).round(),
        "healthy: a sign that is rare": lambda rng, n: (rng.random(n) < 0.01).astype(int),
    },
)
def test_healthy_columns_give_no_warning(tmp_path: Path, draw: Any) -> None:
    rng = np.random.default_rng(0)
    sites = {name: patients(number, bp=draw(rng, ROWS).tolist()) for number, name in enumerate("abcd")}
    assert warnings_of(tmp_path, sites) == ()


# Missing, constant ----------------------------------------------------------------------------------------------------


def test_missing_cells_are_counted_before_they_are_filled(tmp_path: Path) -> None:
    other = patients(3)
    other["bp"][:7], other["sex"][:2], other["age"][:3] = ["?"] * 7, [""] * 2, ["-1"] * 3
    for impute in ("mean", "drop", {"bp": 120.0, "sex": "m"}):
        data = table(tmp_path, three(other), missing_values={"age": -1}, impute=impute)
        assert {name: at["c"] for name, at in missing_cells(data.columns).items()} == {
            "age": (3, ROWS),
            "bp": (7, ROWS),
            "sex": (2, ROWS),
        }


@pytest.mark.case("categories between sites", "a column without a value at one site")
@pytest.mark.case("categories between sites", "a column with one value at one site, and by chance with a rare sign")
def test_a_column_without_values_or_with_one(tmp_path: Path) -> None:
    (said,) = warnings_of(tmp_path, three(patients(3, bp=[""] * 58 + ["120", "130"])))
    assert "'bp' has no value, or almost none, at 'c' (2 of 60 rows)" in said
    (said,) = warnings_of(tmp_path, three(patients(3, bp=["120.5"] * ROWS)))
    assert "'bp' never changes at some sites: 120.5 in all 60 rows" in said
    (said,) = warnings_of(tmp_path, three(patients(3, sex=["f"] * ROWS)))
    assert "column 'sex' never changes at some sites: 'f'" in said
    rare = {name: patients(number, smoker=["0"] * 59 + ["1"]) for number, name in enumerate("ab")}
    assert warnings_of(tmp_path, {**rare, "c": patients(3, smoker=["0"] * ROWS)}) == ()
    alone = {name: patients(number, bp=[""] * ROWS) for number, name in enumerate("ab")}
    told = warnings_of(tmp_path, {**alone, "c": patients(3, bp=["120.5"] * ROWS)})
    assert not any("never changes" in line for line in told)  # nothing says what chance would have


def test_real_hospitals() -> None:
    """Published: cholesterol is 0 for all Swiss patients, and ca was hardly measured outside of Cleveland."""
    from fedshift.data.locate import find

    file = find(("heart_disease_uci/heart_disease_uci.csv",))
    if file is None:
        pytest.skip("no heart disease data")
    numbers = ["age", "trestbps", "chol", "thalach", "oldpeak", "ca"]
    names = ["sex", "cp", "fbs", "restecg", "exang", "slope", "thal"]
    chosen = {"file": str(file), "site_column": "hospital", "positive": "num > 0"}
    for numeric, categorical in ((numbers, names), ([*numbers, *names], [])):
        data = Table.model_validate({**chosen, "numeric": numeric, "categorical": categorical}).build()
        missing, codes = site_differences(data)
        assert "column 'ca' has no value, or almost none, at 'hungarian' (3 of 294 rows)" in missing
        assert "column 'chol' has 0 in all of the rows of 'switzerland', 0 in 25" in codes
        assert missing_cells(data.columns)["ca"]["switzerland"] == (118, 123)


# Copies ---------------------------------------------------------------------------------------------------------------


def planned(data: dict[str, Any], **protocol: Any) -> Plan:
    cut = {"targets": ["c"], "seeds": [0], "test_fraction": 0.3, **protocol}
    experiment = parse({"data": data, "protocol": cut, "model": "linear", "methods": ["fedavg"]})
    return Plan(experiment, experiment.data.build())


@pytest.mark.case("copies of rows", "every row twice: half of the held-out rows train")
def test_rows_that_repeat_within_a_site(tmp_path: Path) -> None:
    twice = {name: [*cells, *cells] for name, cells in patients(1).items()}
    sites = write(tmp_path, a=twice, b=patients(2), c=patients(3))
    columns = {"label": "y", "numeric": ["age", "bp"], "categorical": ["sex"]}
    plan = planned({"name": "table", "sites": sites, **columns})
    (said,) = plan.site_differences
    split = plan.split("c", 0)
    held_out, train = ({row % ROWS for row in rows["a"].tolist()} for rows in (split.held_out, split.train))
    both = sum(row % ROWS in train for row in split.held_out["a"].tolist())
    assert both == len(held_out & train) > 0
    assert f"60 of 120 samples of 'a' repeat another one, and {both} of its 36 held-out samples also train" in said


@pytest.mark.case("copies of rows", "50 of 110 patients appended once more, in another order")
@pytest.mark.case("copies of rows", "the ids of rows repeat within a site and between sites")
def test_copies_are_counted(tmp_path: Path) -> None:
    again = {name: [*cells, *cells[49::-1]] for name, cells in patients(1).items()}
    (said,) = warnings_of(tmp_path, {"a": again, "b": patients(2)})
    assert "50 of 110 samples of 'a'" in said
    names = [f"P{number:04}" for number in range(200)]
    sites = {"a": patients(1, who=[*names[:30], *names[:30]]), "b": patients(2, who=names[25:85])}
    within, between = warnings_of(tmp_path, sites, id="who")
    assert "60 of 60 rows of 'a'" in within
    assert "5 of 'a' and 'b'" in between
    assert not any(name in text for name in names for text in (within, between))


def arrays(folder: Path, offset: int) -> dict[str, str]:
    files = {}
    for number, name in enumerate("abc"):
        draws = np.random.default_rng(number)
        files[name] = str(folder / f"{name}.npz")
        groups = np.repeat(np.arange(100), 2) + offset * number
        np.savez(files[name], x=draws.normal(size=(200, 3)), y=np.tile([0, 1], 100), groups=groups)
    return files


@pytest.mark.case("numbers of patients", "every site numbers its patients from 0: 60 of 200 rows are measured")
def test_groups_that_sites_share(tmp_path: Path) -> None:
    def plan(offset: int, **protocol: Any) -> Plan:
        return planned({"name": "arrays", "sites": arrays(tmp_path, offset)}, **protocol)

    common, fewer = plan(0).site_differences
    assert "100 of 'a' and 'b'" in common
    assert f"{len(plan(0).split('c', 0).measured['c'])} of 200 of 'c'" in fewer
    assert "base_images: shared" in fewer
    (fewer,) = plan(1000).site_differences
    assert "of 200 of 'c'" in fewer
    assert plan(1000, base_images="shared").site_differences == ()
    assert shared_groups(plan(1000).data) == {}


# Across machines ------------------------------------------------------------------------------------------------------


def given(folder: Path, sites: dict[str, dict[str, list[object]]]) -> dict[str, Any]:
    numeric, categorical = ["age", "bp", "smoker"], ["sex"]
    found = {}
    for name, file in write(folder, **sites).items():
        (whole,) = (
            Table.model_validate({"sites": {name: file}, "label": "y", "numeric": numeric, "categorical": categorical})
            ._tables()
            .values()
        )
        found[name] = table_given(site_statistics(whole, numeric, categorical), numeric, categorical)
    return found


@cases(
    "categories between sites",
    "column cells word",
    {
        "deployed: M and F": ("sex", respelt(str.upper), "'M' at 'c' is 'm'"),
        "deployed: 1 and 2": ("sex", respelt(lambda cell: "12"[cell == "f"]), "'1', '2' of 'c',"),
        "deployed: pressure 0 in all rows": ("bp", ["0"] * ROWS, "0 in all 60 rows"),
        "deployed: age in months": (
            "age",
            [float(str(value)) * 12 for value in patients(3)["age"]],
            "in other units: column 'age'",
        ),
    },
)
def test_the_coordinator_compares_what_sites_send(tmp_path: Path, column: str, cells: list[object], word: str) -> None:
    (said,) = differences(given(tmp_path, three({**patients(3), column: cells})))
    assert word in said
    assert "%" not in said  # how many rows have a category is not known here


@pytest.mark.case(
    "categories between sites",
    "deployed, healthy: equal coding, a rare category at one site, a sign that nobody has at one site",
)
@pytest.mark.case("categories between sites", "deployed: a column of arrays in other units, and one that never changes")
def test_the_coordinator_compares_arrays_and_passes_healthy_sites(tmp_path: Path) -> None:
    assert list(differences(given(tmp_path, three(patients(3))))) == []
    other = patients(3, smoker=["0"] * ROWS)
    other["sex"][:2] = ["x"] * 2
    assert list(differences(given(tmp_path, three(other)))) == []
    sparse = {name: patients(number, bp=["0"] * 55 + ["1", "2", "1", "3", "1"]) for number, name in enumerate("ab")}
    many = patients(3, bp=[str(number % 5) for number in range(ROWS)])
    assert list(differences(given(tmp_path, {**sparse, "c": many}))) == []

    def sums(seed: int, factor: float) -> dict[str, Any]:
        x = np.random.default_rng(seed).normal([5, 50, 1], [1, 10, 1], (60, 3)) * [1, factor, 1]
        x[:, 2] = 7 if seed == 2 else x[:, 2]
        return {"kind": "moments", "count": 60, "total": x.sum(0).tolist(), "squares": (x**2).sum(0).tolist()}

    constant, scale = differences({"a": sums(0, 1), "b": sums(1, 12), "c": sums(2, 1)})
    assert "column 2 never changes at some sites: 7 in all 60 rows" in constant
    assert "in other units: column 1 is 6" in scale
    assert list(differences({"a": sums(0, 1), "b": sums(1, 1)})) == []


@pytest.mark.case("sites that lie", "a hundred thousand categories, or a constant in each of many columns")
def test_what_a_hostile_site_sends_takes_no_time_and_few_lines(tmp_path: Path) -> None:
    honest = given(tmp_path, three(patients(3)))
    many = {**honest, "c": {**honest["c"], "categories": [[f"c{number}" for number in range(100_000)]]}}
    assert list(differences(many)) == []
    wide = 500
    sums = {"kind": "table", "numeric": [f"n{number}" for number in range(wide)], "categorical": [], "categories": []}
    sites = {
        "a": {**sums, "count": [50] * wide, "total": [50.0] * wide, "squares": [90.0] * wide},
        "b": {**sums, "count": [50] * wide, "total": [100.0] * wide, "squares": [-1e150] * wide},
    }
    names = [f"n{number}" for number in range(10_001)]
    assert list(differences({site: {**one, "numeric": names} for site, one in sites.items()})) == []
    said = list(differences(sites))
    assert len(said) == 11
    assert "490 more columns" in said[-1]
