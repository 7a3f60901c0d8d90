"""``standardise: per_site``: scales beside scikit-learn's StandardScaler, of vectors, images and tables."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler

from fedshift.data.builders.arrays import Arrays
from fedshift.data.builders.own_tables import Table
from fedshift.data.domain import Preprocessing
from fedshift.data.input_guard import table_shift
from fedshift.data.site_data import SiteData
from fedshift.data.site_scale import all_scaled, scale_of
from fedshift.data.tables import encoding_of
from fedshift.errors import FedshiftError, UserError

RNG = np.random.default_rng(5)
ROWS = np.arange(0, 12)


def vectors(folder: Path) -> dict[str, Path]:
    """Two sites in other units; one column of the second is constant, as Switzerland's cholesterol is."""
    for name, factor in (("a", 1.0), ("b", 100.0)):
        x = (factor * RNG.normal(3, 2, (20, 3))).astype(np.float32)
        x[:, 2] = x[:, 2] if name == "a" else 0
        np.savez(folder / f"{name}.npz", x=x, y=np.arange(20) % 2)
    return {name: folder / f"{name}.npz" for name in "ab"}


def read(data: SiteData) -> np.ndarray:
    return np.concatenate([inputs.numpy() for inputs, _, _ in data.all_batches(7)])


def test_each_site_has_the_scale_of_its_training_rows(tmp_path: Path) -> None:
    source = Arrays(sites=vectors(tmp_path), standardise="per_site")
    data = all_scaled(source.build(), {"a": ROWS, "b": ROWS})
    assert source.shares == (), "no site sends a sum"
    assert source.build().warnings == (), "columns of any size train well"
    every = np.arange(20)
    parts = [(data.domains[name], every, number) for number, name in enumerate("ab")]
    expected = []
    for name in "ab":
        x = np.load(tmp_path / f"{name}.npz")["x"].astype(np.float64)
        expected.append(StandardScaler().fit(x[ROWS]).transform(x))
    for part, wanted in zip(parts, expected, strict=True):
        np.testing.assert_allclose(read(SiteData([part], data.preprocessing)), wanted, rtol=1e-4, atol=1e-5)
    pool = SiteData(parts, data.preprocessing)
    np.testing.assert_allclose(read(pool), np.concatenate(expected), rtol=1e-4, atol=1e-5)
    alone = [read(SiteData([part], data.preprocessing)) for part in parts]
    np.testing.assert_array_equal(read(pool), np.concatenate(alone), "the pool has the sites' bits")
    with pytest.raises(FedshiftError, match="no scale"):
        SiteData([(source.build().domains["a"], every, 0)], data.preprocessing)


def test_a_site_where_no_one_trains_has_that_of_all_its_rows(tmp_path: Path) -> None:
    data = all_scaled(Arrays(sites=vectors(tmp_path), standardise="per_site").build(), {"a": ROWS})
    x = np.load(tmp_path / "b.npz")["x"].astype(np.float64)
    wanted = StandardScaler().fit_transform(x)
    found = read(SiteData([(data.domains["b"], np.arange(20), 0)], data.preprocessing))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_images_have_a_scale_for_each_channel_and_a_pool_has_none(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (9, 3, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(9) % 2)
    sites = {"a": tmp_path / "a.npz", "b": tmp_path / "a.npz"}
    data = all_scaled(Arrays(sites=sites, standardise="per_site").build(), {"a": np.arange(5)})
    flat = (x / 255).transpose(0, 2, 3, 1).reshape(-1, 3)
    wanted = StandardScaler().fit(flat[: 5 * 16]).transform(flat).reshape(9, 4, 4, 3).transpose(0, 3, 1, 2)
    parts = [(data.domains[name], np.arange(9), number) for number, name in enumerate("ab")]
    np.testing.assert_allclose(read(SiteData(parts[:1], data.preprocessing)), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="this method pools them"):
        SiteData(parts, data.preprocessing)


def test_numbers_of_a_table_are_scaled_and_its_categories_are_not(tmp_path: Path) -> None:
    for name, unit in (("a", 1), ("b", 18)):
        rows = [[unit * number, "mf"[number % 2], number % 2] for number in range(1, 13)]
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["glucose", "sex", "ill"], *rows])
    sites = {name: tmp_path / f"{name}.csv" for name in "ab"}
    fields = {"sites": sites, "label": "ill", "numeric": ("glucose",), "categorical": ("sex",)}
    source = Table(**fields, standardise="per_site")
    assert "standardise" not in Table(**fields).model_dump(), "records of earlier runs stay theirs"
    data = all_scaled(source.build(), {"a": np.arange(12), "b": np.arange(12)})
    views = [read(SiteData([(data.domains[name], np.arange(12), 0)], data.preprocessing)) for name in "ab"]
    np.testing.assert_allclose(views[0], views[1], atol=1e-5, err_msg="other units are the same inputs")
    wanted = StandardScaler().fit_transform(np.arange(1.0, 13.0)[:, None])
    np.testing.assert_allclose(views[0][:, :1], wanted, atol=1e-5)
    assert set(views[0][:, 1:].ravel().tolist()) == {0.0, 1.0}
    (table,) = (table for site, table in source._tables().items() if site == "b")
    assert table_shift(table, encoding_of(data.preprocessing), own_scale=True).warning is None
    one = data.preprocessing
    assert scale_of(data.domains["a"].inputs[:3], one)[1][1:] == (1.0, 1.0)  # type: ignore[index]


def test_a_single_sample_has_no_scale() -> None:
    with pytest.raises(UserError, match="there is only one: give all samples of the site together"):
        scale_of(np.ones((1, 3), dtype=np.float32), Preprocessing(kind="features", standardise="per_site"))
