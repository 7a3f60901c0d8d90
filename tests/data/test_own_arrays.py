"""Data set `arrays`: what works, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedshift.data.builders.arrays import Arrays
from fedshift.data.domain import DataSet
from fedshift.errors import UserError

FEATURES = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
LABELS = np.arange(12) % 3
IMAGES = np.random.default_rng(1).integers(0, 256, (12, 3, 8, 8), dtype=np.uint8)


def saved(folder: Path, name: str, **arrays: object) -> Path:
    path = folder / f"{name}.npz"
    np.savez(path, **arrays)
    return path


def two_sites(folder: Path, b: dict[str, object], a: dict[str, object] | None = None, **options: object) -> DataSet:
    a = a or {"x": FEATURES, "y": LABELS}
    sites = {"a": saved(folder, "a", **a), "b": saved(folder, "b", **b)}
    return Arrays.model_validate({"sites": sites, **options}).build()


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (IMAGES, (3, 8, 8)),
        (IMAGES[:, 0], (1, 8, 8)),
        (IMAGES.transpose(0, 2, 3, 1), (3, 8, 8)),
        (IMAGES[:, :1].transpose(0, 2, 3, 1), (1, 8, 8)),
        (IMAGES[:, :, :, :3], (3, 8, 3)),  # both could be channels: the second axis is
    ],
)
def test_image_layouts(tmp_path: Path, x: np.ndarray, shape: tuple[int, ...]) -> None:
    data = two_sites(tmp_path, {"x": x, "y": LABELS}, {"x": x, "y": LABELS})
    assert data.input_shape == shape == data.preprocessing.shape
    assert data.preprocessing.kind == "image"
    if x.ndim == 4 and shape == (3, 8, 8):
        assert np.array_equal(data.domains["a"].inputs, IMAGES)


def test_features_classes_groups_and_tiny_sites(tmp_path: Path) -> None:
    groups = np.arange(12) // 2
    data = two_sites(tmp_path, {"x": FEATURES.astype(np.float64), "y": LABELS.astype(np.uint8), "groups": groups})
    assert data.classes == ("0", "1", "2")
    assert data.domains["b"].inputs.shape == (12, 4)
    assert data.domains["b"].labels.dtype == np.int64
    assert data.domains["b"].groups is not None
    assert data.domains["a"].groups is None
    assert data.warnings == ()
    named = two_sites(tmp_path, {"x": FEATURES, "y": LABELS.astype(float)}, classes=["x", "y", "z", "w"])
    assert named.classes == ("x", "y", "z", "w")
    assert len(named.warnings) == 2
    data = two_sites(tmp_path, {"x": FEATURES[:1], "y": LABELS[:1]})
    assert any("site 'b' has no sample of class 1, 2" in line for line in data.warnings)
    assert any("only 1 samples" in line for line in data.warnings)


def test_standardising_equals_pooled_moments(tmp_path: Path) -> None:
    other = FEATURES * 3 + 5
    data = two_sites(tmp_path, {"x": other, "y": LABELS}, standardise=True)
    pooled = np.concatenate([FEATURES, other]).astype(np.float64)
    assert data.preprocessing.mean == pytest.approx(pooled.mean(axis=0), rel=1e-6)
    assert data.preprocessing.std == pytest.approx(pooled.std(axis=0), rel=1e-6)
    alone = two_sites(tmp_path, {"x": other, "y": LABELS}, standardise=True, statistics_from=["a"])
    assert alone.preprocessing.mean == pytest.approx(FEATURES.astype(np.float64).mean(axis=0), rel=1e-6)
    images = two_sites(tmp_path, {"x": 255 - IMAGES, "y": LABELS}, {"x": IMAGES, "y": LABELS}, standardise=True)
    both = np.concatenate([IMAGES, 255 - IMAGES]) / 255
    assert images.preprocessing.mean == pytest.approx(both.mean(axis=(0, 2, 3)))
    assert images.preprocessing.std == pytest.approx(both.std(axis=(0, 2, 3)))
    with pytest.raises(UserError, match="no site 'c'; known: a, b"):
        two_sites(tmp_path, {"x": other, "y": LABELS}, standardise=True, statistics_from=["c"])


def test_columns_of_other_sizes_are_warned_of(tmp_path: Path) -> None:
    wide = (FEATURES * np.array([1, 15, 1, 1]) + np.array([0, 130, 0, 0])).astype(np.float32)
    both = ({"x": wide, "y": LABELS}, {"x": wide, "y": LABELS})
    (warning,) = two_sites(tmp_path, *both).warnings
    assert "column 1" in warning
    assert f"{(wide[:, 1].astype(float) ** 2).mean() ** 0.5:.4g}" in warning
    assert "data.standardise=true" in warning
    assert two_sites(tmp_path, *both, standardise=True).warnings == ()
    assert two_sites(tmp_path, *both, mean=[0, 130, 0, 0], std=[1, 15, 1, 1]).warnings == ()


def with_value(value: float) -> np.ndarray:
    x = FEATURES.copy()
    x[3, 2] = value
    return x


@pytest.mark.parametrize(
    ("b", "message"),
    [
        ({"x": FEATURES}, r"b\.npz has no array 'y'; it holds: x"),
        ({"y": LABELS}, r"has no array 'x'"),
        ({"x": FEATURES[:, :3], "y": LABELS}, r"differ in shape.*'a' has \(4,\), 'b' has \(3,\)"),
        ({"x": IMAGES, "y": LABELS}, r"differ in shape"),
        ({"x": with_value(np.nan), "y": LABELS}, r"site 'b'.*NaN or infinite.*row 3, column 2"),
        ({"x": with_value(np.inf), "y": LABELS}, r"NaN or infinite"),
        ({"x": FEATURES.astype(np.float64) * 1e300, "y": LABELS}, r"NaN or infinite"),
        ({"x": FEATURES, "y": LABELS[:5]}, r"x has 12 samples but y has 5"),
        ({"x": FEATURES, "y": LABELS[:, None]}, r"y has shape \(12, 1\)"),
        ({"x": FEATURES[:0], "y": LABELS[:0]}, r"site 'b' is empty"),
        ({"x": FEATURES, "y": LABELS - 1}, r"b\.npz.*label -1 is out of range"),
        ({"x": FEATURES, "y": LABELS + 40}, r"label 42 \(site 'b'\) is out of range"),
        ({"x": FEATURES, "y": LABELS + 0.5}, r"not whole numbers"),
        ({"x": FEATURES, "y": np.array(["a"] * 12)}, r"text at site 'b' and numbers at site 'a'"),
        ({"x": IMAGES.astype(np.float32), "y": LABELS}, r"float32, expected uint8"),
        ({"x": IMAGES.astype(np.int64), "y": LABELS}, r"int64, expected uint8"),
        ({"x": FEATURES.astype(np.int64), "y": LABELS}, r"tokens hold -2: they must be 0 or more"),
        ({"x": np.abs(FEATURES).astype(np.int64), "y": LABELS}, r"differ in type .*'b' has int64"),
        ({"x": FEATURES[:, 0], "y": LABELS}, r"x has shape \(12,\)"),
        ({"x": np.zeros((12, 2, 5, 5), np.uint8), "y": LABELS}, r"1 or 3 channels, found shape \(12, 2, 5, 5\)"),
        ({"x": np.array([None] * 12), "y": LABELS}, r"Python objects"),
    ],
)
def test_one_line_for_each_mistake(tmp_path: Path, b: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        two_sites(tmp_path, b)
    assert "\n" not in str(caught.value)


def test_labels_and_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"site 'a': label 2 is out of range: labels must be 0 to 1"):
        two_sites(tmp_path, {"x": FEATURES, "y": LABELS}, classes=["no", "yes"])
    good = saved(tmp_path, "good", x=FEATURES, y=LABELS)
    with pytest.raises(UserError, match=r"nowhere\.npz does not exist"):
        Arrays(sites={"a": good, "b": tmp_path / "nowhere.npz"}).build()
    content = good.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 5):
        (tmp_path / "cut.npz").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"cut\.npz cannot be read"):
            Arrays(sites={"a": good, "b": tmp_path / "cut.npz"}).build()
    damaged = bytearray(content)
    damaged[200] ^= 0xFF
    (tmp_path / "cut.npz").write_bytes(bytes(damaged))
    with pytest.raises(UserError, match=r"cut\.npz cannot be read"):
        Arrays(sites={"b": tmp_path / "cut.npz"}).build()
    np.save(tmp_path / "plain.npy", FEATURES)
    with pytest.raises(UserError, match=r"plain\.npy is not an \.npz archive"):
        Arrays(sites={"a": tmp_path / "plain.npy"}).build()
    with pytest.raises(UserError, match="does not exist"):
        Arrays(sites={"a": tmp_path}).build()


@pytest.mark.parametrize(("options", "left"), [({}, ("a", "c")), ({"statistics_from": ["a", "b"]}, ("a",))])
def test_quantities_are_scaled_by_the_sites_that_statistics_come_from(
    options: dict[str, object], left: tuple[str, ...]
) -> None:
    sites = {name: (np.zeros((4, 2), np.float32), np.arange(4.0)) for name in "abc"}
    source = Arrays(sites=sites, task="regression", standardise=True, **options)  # type: ignore[arg-type]
    assert source.without_labels("b").label_statistics_from == left  # type: ignore[attr-defined]
