"""Every builder on the real files: counts, labels and, where they exist, published numbers."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift.data.builders.amazon_reviews import _from_svmlight
from fedshift.data.builders.office_caltech_surf import OfficeCaltechSurf
from fedshift.data.builders.rotated import RotatedMnist, turned_clockwise
from fedshift.data.domain import DataSet, SparseRows
from fedshift.data.locate import sha256_of
from fedshift.data.registry import names, parse, source_class
from fedshift.errors import UserError
from fedshift.experiment.environment import data_fingerprint

ROOT = Path(os.environ["FEDSHIFT_DATA"]) if os.environ.get("FEDSHIFT_DATA") else None


def needs(*files: str) -> pytest.MarkDecorator:
    lacking = [name for name in files if ROOT is None or not (ROOT / name).exists()]
    return pytest.mark.skipif(bool(lacking), reason=f"not below FEDSHIFT_DATA: {', '.join(lacking)}")


def built(**options: object) -> DataSet:
    return parse(options).build()


@pytest.mark.parametrize("name", names())
def test_every_data_set_has_a_manifest(name: str) -> None:
    manifest = source_class(name).manifest()
    assert manifest.title
    assert manifest.source
    assert manifest.licence
    assert manifest.how_to_get
    assert manifest.layout
    assert all(len(digest) == 64 for digest in manifest.sha256.values())


@pytest.mark.parametrize("name", [name for name in names() if source_class(name).manifest().sha256])
def test_checksums_are_those_of_the_files(name: str) -> None:
    known = source_class(name).manifest().sha256
    there = [file for file in known if ROOT and (ROOT / file).exists()]
    if ROOT is None or not there:
        pytest.skip("none of its files is below FEDSHIFT_DATA")
    assert {file: sha256_of(ROOT / file) for file in there} == {file: known[file] for file in there}


def test_rotated_digits() -> None:
    data = built(name="rotated_digits")
    assert list(data.domains) == ["D0", "D15", "D30", "D45", "D60", "D75"]
    assert data.input_shape == (1, 16, 16)
    for domain in data.domains.values():
        assert np.bincount(domain.labels).tolist() == [100] * 10
        assert domain.groups.tolist() == list(range(1000))
    values = data.domains["D0"].inputs
    assert values.max() == 255
    scaled = (values / 255 - data.preprocessing.mean[0]) / data.preprocessing.std[0]
    assert abs(scaled.mean()) < 0.02
    assert abs(scaled.std() - 1) < 0.02
    assert data_fingerprint(built(name="rotated_digits")) == "491af7e2aa6c54f4-f451f3ce"
    data = built(name="rotated_digits", angles=[0, 22.5], per_class=7, size=28, normalise=False)
    assert list(data.domains) == ["D0", "D22.5"]
    assert data.domains["D22.5"].inputs.shape == (70, 1, 28, 28)
    assert data.preprocessing.mean is None
    other = built(name="rotated_digits", per_class=7, base_seed=1, size=28)
    assert not np.array_equal(other.domains["D0"].inputs, data.domains["D0"].inputs)
    with pytest.raises(UserError, match=r"per_class is 175.*at most 174"):
        built(name="rotated_digits", per_class=175)
    with pytest.raises(UserError, match="each angle"):
        built(name="rotated_digits", angles=[0, 0])
    image = np.zeros((1, 8, 8), dtype=np.uint8)
    image[0, 0, 2] = 200  # near the top: a quarter turn clockwise brings it to the right edge
    turned = turned_clockwise(image, 90)
    assert np.array_equal(turned, np.rot90(image, k=-1, axes=(1, 2)))
    assert turned[0, 2, 7] == 200


@pytest.mark.parametrize("angle", [15, 45, 75, -30])
def test_rotation_agrees_with_torchvision(angle: float) -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    bilinear = functional.InterpolationMode.BILINEAR
    expected = functional.rotate(torch.from_numpy(images)[:, None], -angle, interpolation=bilinear)[:, 0].numpy()
    assert np.abs(turned_clockwise(images, angle).astype(int) - expected).max() <= 1


@needs("mnist.npz")
def test_rotated_mnist() -> None:
    assert data_fingerprint(built(name="rotated_mnist")) == "664aeb531f9ee535-f91e36a6"
    data = built(name="rotated_mnist")
    assert list(data.domains) == ["M0", "M15", "M30", "M45", "M60", "M75"]
    assert data.input_shape == (1, 28, 28)
    assert all(np.bincount(domain.labels).tolist() == [100] * 10 for domain in data.domains.values())


def test_mnist_in_torchvisions_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    header = b"\0\0\x08\x03" + np.array([20, 28, 28], dtype=">i4").tobytes()
    (raw / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
    labels = np.repeat(np.arange(10, dtype=np.uint8), 2)
    idx = b"\0\0\x08\x01" + np.array([20], dtype=">i4").tobytes() + labels.tobytes()
    (raw / "train-labels-idx1-ubyte").write_bytes(idx)
    found, classes = RotatedMnist(per_class=2).base()
    assert classes.tolist() == labels.tolist()
    assert sorted(found.sum(axis=(1, 2)).tolist()) == sorted(images.sum(axis=(1, 2), dtype=np.uint64).tolist())
    (raw / "train-labels-idx1-ubyte").write_bytes(idx[:-3])
    with pytest.raises(UserError, match=r"train-labels-idx1-ubyte cannot be read"):
        RotatedMnist().base()


@pytest.mark.slow
@needs("mnist.npz", "usps.npz", "mnist_m_test9001.npz", "chars74k_digits.npz")
def test_five_digits() -> None:
    data = built(name="five_digits")
    counts = {name: len(domain) for name, domain in data.domains.items()}
    assert counts == {"mnist": 70000, "mnist_m": 9001, "usps": 9298, "font": 10160, "natural": 885}
    assert data.input_shape == (3, 32, 32)
    assert np.bincount(data.domains["mnist_m"].labels).tolist() == [878, 1016, 933, 908, 890, 807, 856, 914, 880, 919]
    assert np.bincount(data.domains["font"].labels).tolist() == [1016] * 10
    rows = {name: (domain.train_rows, domain.test_rows) for name, domain in data.domains.items()}
    assert [len(part) for part in rows["mnist"] if part is not None] == [60000, 10000]
    assert [len(part) for part in rows["usps"] if part is not None] == [7291, 2007]
    assert rows["font"] == (None, None)


@needs("usps.npz", "chars74k_digits.npz")
def test_five_digits_parts() -> None:
    data = built(name="five_digits", domains=["usps", "natural"], samples_per_domain=600, natural_good_only=True)
    usps, natural = data.domains["usps"], data.domains["natural"]
    assert (len(usps), len(natural)) == (600, 593)
    assert len(usps.train_rows) + len(usps.test_rows) == 600


@needs("amazon_reviews_5000.npz")
@pytest.mark.parametrize("scaling", ["raw", "log", "tfidf"])
def test_amazon_reviews(scaling: str) -> None:
    data = built(name="amazon_reviews", scaling=scaling)
    sizes = {"books": 6465, "dvd": 5586, "electronics": 7681, "kitchen": 7945}
    assert {name: len(domain) for name, domain in data.domains.items()} == sizes
    for domain in data.domains.values():
        assert np.bincount(domain.labels[domain.train_rows]).tolist() == [1000, 1000]
        assert isinstance(domain.inputs, SparseRows)
        dense = domain.inputs.dense(domain.train_rows[:50])
        if scaling == "raw":
            assert np.array_equal(dense, np.round(dense))
        if scaling == "tfidf":
            assert np.allclose(np.linalg.norm(dense, axis=1), 1, atol=1e-5)


@needs("amazon_reviews_5000.npz")
def test_tfidf_agrees_with_scikit_learn() -> None:
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction.text import TfidfTransformer

    def matrix(data: DataSet, name: str, rows: slice) -> np.ndarray:
        inputs = data.domains[name].inputs
        assert isinstance(inputs, SparseRows)
        return csr_matrix((inputs.data, inputs.indices, inputs.indptr), shape=inputs.shape)[rows]

    raw, scaled = built(name="amazon_reviews"), built(name="amazon_reviews", scaling="tfidf")
    from scipy.sparse import vstack

    training = vstack([matrix(raw, name, slice(0, 2000)) for name in raw.domains])
    reference = TfidfTransformer().fit(training).transform(matrix(raw, "dvd", slice(2000, 2100)))
    assert np.allclose(reference.toarray(), matrix(scaled, "dvd", slice(2000, 2100)).toarray(), atol=1e-5)


@needs("office_caltech10_surf.npz")
@pytest.mark.parametrize(
    ("source", "target", "published"),
    [
        ("amazon", "caltech10", 26.00),
        ("amazon", "dslr", 25.48),
        ("amazon", "webcam", 29.83),
        ("caltech10", "amazon", 23.70),
        ("caltech10", "dslr", 25.48),
        ("caltech10", "webcam", 25.76),
        ("dslr", "amazon", 28.50),
        ("dslr", "caltech10", 26.27),
        ("dslr", "webcam", 63.39),
        ("webcam", "amazon", 22.96),
        ("webcam", "caltech10", 19.86),
        ("webcam", "dslr", 59.24),
    ],
)
def test_office_caltech_nearest_neighbour(source: str, target: str, published: float) -> None:
    data = OfficeCaltechSurf().build()
    known, asked = data.domains[source], data.domains[target]
    distance = torch.cdist(torch.as_tensor(asked.inputs).double(), torch.as_tensor(known.inputs).double())
    accuracy = 100 * np.mean(known.labels[distance.argmin(1).numpy()] == asked.labels)
    assert round(float(accuracy), 2) == published


@needs("heart_disease_uci/heart_disease_uci.csv")
def test_heart_disease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = built(name="heart_disease")
    shares = {name: (len(domain), round(100 * domain.labels.mean(), 1)) for name, domain in data.domains.items()}
    assert shares == {
        "cleveland": (303, 45.9),
        "hungarian": (294, 36.1),
        "switzerland": (123, 93.5),
        "va": (200, 74.5),
    }
    swiss = data.domains["switzerland"].inputs
    assert (swiss[:, 2] == 0).all()  # cholesterol was measured for nobody: the mean of the scale …
    assert (swiss[:, 7] == 1).all()  # … and the column that says it is missing
    cleveland = data.domains["cleveland"].inputs
    assert (cleveland[:, 7] == 0).all()
    assert np.abs(cleveland[:, :6].mean(axis=0)).max() < 0.15
    # The files as UCI publishes them give the same numbers.
    published = Path(os.environ["FEDSHIFT_DATA"]) / "heart_disease_uci"
    for name in data.domains:
        (tmp_path / f"processed.{name}.data").write_bytes((published / f"processed.{name}.data").read_bytes())
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    again = built(name="heart_disease")
    for name, domain in data.domains.items():
        assert np.array_equal(domain.inputs, again.domains[name].inputs)
        assert np.array_equal(domain.labels, again.domains[name].labels)


PACS_COUNTS = {
    "art_painting": (2048, 1840, 208),
    "cartoon": (2344, 2107, 237),
    "photo": (1670, 1499, 171),
    "sketch": (3929, 3531, 398),
}


@needs("pacs_mobilenetv2.npz", "pacs_splits")
def test_pacs_features_and_the_official_split() -> None:
    data = built(name="pacs_features")
    for name, (samples, train, held_out) in PACS_COUNTS.items():
        domain = data.domains[name]
        assert (len(domain), len(domain.train_rows), len(domain.test_rows)) == (samples, train, held_out)
        assert sorted([*domain.train_rows.tolist(), *domain.test_rows.tolist()]) == list(range(samples))
    assert data.input_shape == (1280,)
    assert data.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


@pytest.mark.slow
@needs("pacs_images_128.zip", "pacs_splits", "pacs_mobilenetv2.npz")
def test_pacs_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path))
    data = built(name="pacs", size=32)
    features = built(name="pacs_features")
    assert data.warnings == ()
    assert data.input_shape == (3, 32, 32)
    for name, domain in data.domains.items():  # sorted by path in both, so rows must agree one by one
        assert np.array_equal(domain.labels, features.domains[name].labels)
        assert np.array_equal(domain.train_rows, features.domains[name].train_rows)
        assert isinstance(domain.inputs, np.memmap)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]


@needs("rotated_mnist_ghifary.npz")
def test_ghifarys_digits_turn_counter_clockwise_and_share_base_images() -> None:
    data = built(name="rotated_mnist_ghifary")
    assert list(data.domains) == ["M0", "M15", "M30", "M45", "M60", "M75"]
    assert data.input_shape == (1, 16, 16)
    upright = data.domains["M0"]
    for domain in data.domains.values():
        assert np.bincount(domain.labels).tolist() == [100] * 10
        assert domain.labels.tolist() == upright.labels.tolist()
    images = upright.inputs[:, 0]
    assert isinstance(images, np.ndarray)

    def likeness(angle: float) -> float:
        """Correlation of the file's M30 with the upright images, turned clockwise by ``angle``."""
        turned = turned_clockwise(images, angle).astype(np.float64)
        return float(
            np.corrcoef(turned.ravel(), np.asarray(data.domains["M30"].inputs, dtype=np.float64).ravel())[0, 1]
        )

    assert likeness(-30) > 0.95
    assert likeness(30) < 0.7
    values = np.concatenate([np.asarray(domain.inputs) for domain in data.domains.values()]) / 255
    assert abs(values.mean() - data.preprocessing.mean[0]) < 1e-3
    assert abs(values.std() - data.preprocessing.std[0]) < 1e-3


@pytest.mark.parametrize("negative", ["0", "-1"])
def test_reviews_as_svmlight(tmp_path: Path, negative: str) -> None:
    folder = tmp_path
    for name in ("books", "dvd", "electronics", "kitchen"):
        (folder / f"{name}_train.svmlight").write_text(f"1 1:2 5000:1\n{negative} 3:1\n")
        (folder / f"{name}_test.svmlight").write_text(f"{negative} 2:4\n1 7:1\n1 1:3\n")
    domains = _from_svmlight(folder)
    assert list(domains) == ["books", "dvd", "electronics", "kitchen"]
    books = domains["books"]
    assert books.labels.tolist() == [1, 0, 0, 1, 1]
    assert [np.asarray(rows).tolist() for rows in (books.train_rows, books.test_rows)] == [[0, 1], [2, 3, 4]]
    rows = books.inputs
    assert isinstance(rows, SparseRows)
    assert rows.indptr.tolist() == [0, 2, 3, 4, 5, 6]
    assert rows.indices.tolist() == [0, 4999, 2, 1, 6, 0]
    assert rows.data.tolist() == [2, 1, 1, 4, 1, 3]
