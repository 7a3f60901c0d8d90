"""A split that the data have: test rows that nothing is made of, and that every protocol measures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score
from typer.testing import CliRunner

import fedshift
from fedshift.cli.app import app
from fedshift.data.builders.arrays import Arrays
from fedshift.data.builders.image_folder import ImageFolder
from fedshift.data.builders.own_tables import Table
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.environment import data_fingerprint

SIZES = {"north": 40, "south": 30, "east": 26}
PROTOCOLS: list[dict[str, Any]] = [
    {"targets": ["east"], "seeds": [3]},
    {"targets": ["sites"], "seeds": [3]},
    {"kind": "adapt_to_one", "targets": ["east"], "seeds": [3]},
    {"kind": "source_target", "pairs": [[["north", "south"], "east"]], "splits": 4},
]


def rows_of(site: str) -> list[dict[str, Any]]:
    """Made-up rows; every third is of the test set."""
    draws = np.random.default_rng(SIZES[site])
    return [
        {
            "age": f"{draws.normal(50 + SIZES[site], 9):.3f}",
            "sex": "mf"[int(draws.integers(2))],
            "ill": str(int(draws.integers(2))),
            "part": "test" if row % 3 == 0 else "train",
        }
        for row in range(SIZES[site])
    ]


def write(folder: Path, tables: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    files = {}
    for site, rows in tables.items():
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        (folder / f"{site}.csv").write_text("\n".join(lines) + "\n")
        files[site] = str(folder / f"{site}.csv")
    return files


def section(folder: Path, tables: dict[str, list[dict[str, Any]]] | None = None, **options: Any) -> dict[str, Any]:
    files = write(folder, tables or {site: rows_of(site) for site in SIZES})
    fields = {"label": "ill", "numeric": ["age"], "categorical": ["sex"], "split": "part"}
    return {"name": "table", "sites": files, **fields, **options}


def experiment(data: dict[str, Any], protocol: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "fixed",
        "data": data,
        "protocol": protocol,
        "model": {"name": "mlp", "hidden": [6]},
        "training": {"rounds": 2, "batch_size": 8, "lr": 0.1},
        "methods": [{"name": "fedavg"}],
        "device": "cpu",
        **changes,
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("fraction", [{}, {"test_fraction": 0.5}])
def test_every_protocol_trains_on_the_training_rows_and_measures_the_test_rows(
    protocol: dict[str, Any], fraction: dict[str, float], tmp_path: Path
) -> None:
    named = {"labelled_test_fraction": 0.5} if protocol.get("kind") == "source_target" and fraction else {}
    given_fraction = {} if protocol.get("kind") == "source_target" else fraction
    whole = parse(experiment(section(tmp_path), {**protocol, **given_fraction, **named}))
    data = Table.model_validate({key: value for key, value in section(tmp_path).items() if key != "name"}).build()
    target = "north+south-east" if protocol.get("kind") == "source_target" else protocol["targets"][0]
    split = whole.protocol.split_of(data, target, 3)
    for site, size in SIZES.items():
        test = np.arange(0, size, 3)
        train = np.setdiff1d(np.arange(size), test)
        for chosen, right in ((split.train, train), (split.held_out, test), (split.measured, test)):
            if site in chosen:
                assert chosen[site].tolist() == right.tolist()
        if split.unlabelled and site in split.unlabelled:
            assert split.unlabelled[site].tolist() == train.tolist()
    assert set(split.measured) == (set(SIZES) if target == "sites" else {"east"})


def trained(folder: Path, data: dict[str, Any]) -> dict[str, NDArray[Any]]:
    fedshift.run(experiment(data, PROTOCOLS[1]), runs=folder / "runs")
    (file,) = (folder / "runs").rglob("model.safetensors")
    return {name: tensor.numpy() for name, tensor in load_file(file).items()}


@settings(max_examples=5, deadline=None)
@given(st.floats(-1e6, 1e6, allow_nan=False), st.sampled_from(["m", "f", "", "unheard of"]), st.booleans())
def test_no_cell_of_a_test_row_moves_a_weight(
    tmp_path_factory: pytest.TempPathFactory, age: float, sex: str, missing: bool
) -> None:
    """Neither training nor encoding, imputation or standardisation reads the test rows."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    changed = {site: rows_of(site) for site in SIZES}
    for rows in changed.values():
        for row in rows:
            if row["part"] == "test":
                row |= {"age": "" if missing else repr(age), "sex": sex}
    one, other = trained(first, section(first)), trained(second, section(second, changed))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_the_reported_accuracy_is_that_of_the_test_rows(tmp_path: Path) -> None:
    """Counted by scikit-learn from a model's predictions of the file."""
    results = fedshift.run(experiment(section(tmp_path), PROTOCOLS[0]), runs=tmp_path / "runs")
    (file,) = (tmp_path / "runs").rglob("model.safetensors")
    predicted = fedshift.Model.load(file).predictions(tmp_path / "east.csv")
    said, rows = predicted["predicted"].astype(str).tolist(), rows_of("east")
    test = [row for row in range(len(rows)) if rows[row]["part"] == "test"]
    right = accuracy_score([rows[row]["ill"] for row in test], [said[row] for row in test])
    assert results.rows()[0]["mean"] == pytest.approx(100 * right)


def test_statistics_and_scales_are_of_the_training_rows(tmp_path: Path) -> None:
    """What a site tells for a common encoding, of inputs and of a label that is a quantity."""
    fields = section(tmp_path, categorical=[], label="age", numeric=["ill"], task="regression")
    table = Table.model_validate({**fields, "sites": {"north": fields["sites"]["north"]}})
    told = table.gives()
    ages = [float(row["age"]) for row in rows_of("north") if row["part"] == "train"]
    assert told["count"] == [len(ages)]
    assert told["label"]["count"] == len(ages)
    assert told["label"]["total"] == pytest.approx(sum(ages), rel=1e-6)
    (domain,) = table.build().domains.values()
    assert domain.described.tolist() == [row for row in range(40) if row % 3]


@pytest.mark.parametrize("standardise", [True, False])
def test_arrays_have_a_split_too(standardise: bool, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    x, y = draws.normal(3, 2, (12, 2)), np.arange(12) % 2
    side = np.array(["test" if row < 4 else "Train " for row in range(12)])
    x[:4] = 1e6
    np.savez(tmp_path / "north.npz", x=x, y=y, split=side)
    data = Arrays(sites={"north": tmp_path / "north.npz"}, standardise=standardise).build()
    domain = data.domains["north"]
    assert domain.test_rows.tolist() == [0, 1, 2, 3]
    if standardise:
        assert data.preprocessing.mean == pytest.approx(x[4:].mean(axis=0), rel=1e-6)
    np.savez(tmp_path / "other.npz", x=x, y=y, split=side[::-1])
    other = Arrays(sites={"north": tmp_path / "other.npz"}, standardise=standardise).build()
    assert data_fingerprint(data) != data_fingerprint(other)


@pytest.mark.case("fixed splits", "another word, an empty cell, one side only, the column missing at a site")
@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["train", "test", "valid"], ["line 4", "neither train nor test"]),
        (["train", "", "test"], ["line 3", "empty"]),
        (["train", "train", "train"], ["'north'", "no row of test"]),
        (None, ["'part'"]),
    ],
)
def test_a_split_that_is_none_is_one_line(cells: list[str] | None, said: list[str], tmp_path: Path) -> None:
    rows = rows_of("north")[:3]
    for row, cell in zip(rows, cells or ["", "", ""], strict=True):
        if cells is None:
            del row["part"]
        else:
            row["part"] = cell
    fields = section(tmp_path, {"north": rows, "south": rows_of("south")})
    with pytest.raises(UserError) as caught:
        Table.model_validate(fields).build()
    assert all(part in str(caught.value) for part in said)
    assert "valid" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.case("fixed splits", "patients with images on both sides; an array of numbers; of another length")
@pytest.mark.parametrize(
    ("split", "said"),
    [
        (["train", "test"] * 3, "3 groups"),
        ([0, 1] * 3, "expected train or test"),
        (["train", "test"], "expected train or test"),
    ],
)
def test_arrays_whose_split_is_none_are_one_line(split: list[Any], said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((6, 2)), y=np.arange(6) % 2, groups=[7, 7, 8, 8, 9, 9], split=split)
    with pytest.raises(UserError, match=said):
        Arrays(sites={"a": tmp_path / "a.npz"}).build()


def photos(folder: Path, tested: list[str]) -> dict[str, Any]:
    """Eight grey images a site and class, of which a file lists some for testing."""
    draws = np.random.default_rng(0)
    for site, label, number in itertools.product(SIZES, ("cat", "dog"), range(8)):
        path = folder / "photos" / site / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 255, (8, 8), dtype=np.uint8)).save(path)
    (folder / "test.txt").write_text("\n".join(tested) + "\n")
    return {"name": "image_folder", "root": str(folder / "photos"), "size": 8, "split": str(folder / "test.txt")}


LISTED = [f"{site}/{label}/{number}.png" for site in SIZES for label in ("cat", "dog") for number in (0, 5)]


@pytest.mark.case("fixed splits", "folders of images: a list of the test images")
@pytest.mark.parametrize("protocol", PROTOCOLS[:3], ids=["unseen", "sites", "unlabelled"])
def test_folders_of_images_have_a_list(
    protocol: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    options = photos(tmp_path, LISTED)
    experiment = parse({"name": "e", "data": options, "protocol": protocol, "model": "linear", "methods": ["fedavg"]})
    data = experiment.data.build()
    split = experiment.protocol.split_of(data, protocol["targets"][0], 3)
    test = {site: [0, 5, 8, 13] for site in SIZES}
    for site, rows in {**split.train, **split.unlabelled}.items():
        assert sorted(rows) == [row for row in range(16) if row not in test[site]]
    for site, rows in split.measured.items():
        assert sorted(rows) == test[site]


@pytest.mark.case("fixed splits", "a list that names no image, all images, none, or cannot be read")
@pytest.mark.parametrize(
    ("tested", "said"),
    [
        ([*LISTED, "north/cat/80.png"], ["line 13", "north/cat/0.png"]),
        (["../other/cat/0.png"], ["line 1", "names no image"]),
        (LISTED[4:], ["'north'", "no row of test"]),
        (
            [f"{site}/{label}/{n}.png" for site in SIZES for label in ("cat", "dog") for n in range(8)],
            ["no row of train"],
        ),
    ],
    ids=["a wrong name", "outside", "none of a site", "all"],
)
def test_a_list_that_is_none_is_one_line(
    tested: list[str], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    options = photos(tmp_path, tested)
    with pytest.raises(UserError) as caught:
        ImageFolder.model_validate(options).build()
    assert all(word in str(caught.value) for word in said), caught.value
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"no-such-list.* cannot be read"):
        ImageFolder.model_validate(options | {"split": str(tmp_path / "no-such-list")}).build()


@pytest.mark.case("fixed splits", "an image of the list that does not decode is left out as any other")
def test_a_listed_image_may_be_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    options = photos(tmp_path, LISTED)
    (tmp_path / "photos" / "north" / "cat" / "5.png").write_bytes(b"no image")
    north = ImageFolder.model_validate(options | {"on_corrupt": "skip"}).build().domains["north"]
    assert (len(north), north.test_rows.tolist()) == (15, [0, 7, 12])  # type: ignore[union-attr]


def test_a_fixed_split_is_shown_and_goes_with_no_other(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(json.dumps(experiment(section(tmp_path), PROTOCOLS[0])))
    said = CliRunner().invoke(app, ["check", str(tmp_path / "e.yaml")], env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    assert "fixed by data.split" in said.output
    with pytest.raises(UserError, match=r"protocol\.split: random"):
        fedshift.check(experiment(section(tmp_path), {**PROTOCOLS[0], "split": "random"}))
    with pytest.raises(ValidationError, match="is the split"):
        Table.model_validate(section(tmp_path, numeric=["age", "part"]))
