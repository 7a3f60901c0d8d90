"""Names, files that are not there, checks that hold for every data set, and data to predict."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from fedshift.data.builders.rotated import RotatedDigits
from fedshift.data.checks import agreed_classes, check_dataset, natural_order
from fedshift.data.domain import DataSet, Domain, Manifest, Preprocessing
from fedshift.data.inference import load_for_prediction
from fedshift.data.locate import cache_dir, fetch, sha256_of
from fedshift.data.registry import names, parse, source_class
from fedshift.errors import UserError
from fedshift.experiment.environment import data_fingerprint


def test_names_and_fields() -> None:
    for name in names():
        assert source_class(name).model_fields["name"].default == name
    with pytest.raises(UserError, match="'rotated_digit'; did you mean 'rotated_digits'"):
        parse({"name": "rotated_digit"})
    with pytest.raises(UserError, match=r"data\.name: .*known: amazon_reviews, "):
        parse({"size": 3})
    with pytest.raises(ValidationError):
        parse({"name": "rotated_digits", "sizes": 16})
    with pytest.raises(ValidationError):
        parse({"name": "rotated_digits", "size": 4})
    source = parse({"name": "rotated_digits", "angles": [0, 30], "per_class": 5})
    assert parse(source.model_dump(mode="json")) == source


@pytest.mark.parametrize("name", ["amazon_reviews", "office_caltech_surf", "pacs", "pacs_features", "heart_disease"])
def test_data_that_are_nowhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    with pytest.raises(UserError, match="FEDSHIFT_DATA is not set") as caught:
        parse({"name": name}).build()
    assert source_class(name).manifest().how_to_get in str(caught.value)
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    with pytest.raises(UserError, match="not below FEDSHIFT_DATA"):
        parse({"name": name}).build()
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="not a folder"):
        parse({"name": name}).build()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("amazon_reviews", "amazon_reviews_5000.npz"),
        ("office_caltech_surf", "office_caltech10_surf.npz"),
        ("pacs", "pacs_images_128.zip"),
        ("pacs_features", "pacs_mobilenetv2.npz"),
        ("rotated_mnist", "mnist.npz"),
        ("five_digits", "mnist.npz"),
    ],
)
def test_a_truncated_file_is_named(name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    (tmp_path / file).write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(UserError, match=f"{file} cannot be read"):
        parse({"name": name}).build()


def test_mnist_that_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path))

    def offline(*_: object, **__: object) -> None:
        raise RuntimeError("Error downloading")

    monkeypatch.setattr(datasets, "MNIST", offline)
    with pytest.raises(UserError, match=r"MNIST not found: FEDSHIFT_DATA is not set.*mnist\.npz"):
        parse({"name": "rotated_mnist"}).build()


def test_pacs_in_folders_with_a_split_list_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        for label in ("dog", "person"):
            folder = tmp_path / "PACS" / "kfold" / domain / label
            folder.mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (20, 20), (number, 0, 0)).save(folder / f"{number}.png")
    data = parse({"name": "pacs", "size": 16}).build()
    assert data.domains["sketch"].labels.tolist() == [0] * 5 + [6] * 5
    assert sum("not complete" in line for line in data.warnings) == 4
    lists = tmp_path / "pacs_splits"
    lists.mkdir()
    (lists / "photo_train_kfold.txt").write_text("photo/dog/0.jpg 1\nphoto/person/4.jpg 7\n")
    (lists / "photo_crossval_kfold.txt").write_text("photo/dog/1.jpg 1\n")
    photo = parse({"name": "pacs", "size": 16}).build().domains["photo"]
    assert photo.train_rows.tolist() == [0, 9]
    some = parse({"name": "pacs", "size": 16, "samples_per_domain": 7}).build()
    chosen = some.domains["photo"]
    rows = [int(image.max()) + 5 * int(label) // 6 for image, label in zip(chosen.inputs, chosen.labels, strict=True)]
    assert rows == sorted(set(rows))
    assert len(rows) == 7
    assert [rows[row] for row in chosen.train_rows] == [row for row in (0, 9) if row in rows], "the lists follow"
    again = parse({"name": "pacs", "size": 16, "samples_per_domain": 7}).build()
    other = parse({"name": "pacs", "size": 16, "samples_per_domain": 7, "base_seed": 1}).build()
    assert data_fingerprint(some) == data_fingerprint(again)
    assert len({data_fingerprint(found) for found in (some, other, data)}) == 3
    moved = replace(chosen, train_rows=chosen.train_rows + 1)
    assert data_fingerprint(replace(some, domains={**some.domains, "photo": moved})) != data_fingerprint(some)
    assert parse({"name": "pacs", "scale": "half"}).scale == "half"
    (lists / "photo_crossval_kfold.txt").write_text("photo/dog/9.jpg 1\n")
    with pytest.raises(UserError, match=r"names photo/dog/9\.jpg, which is not among"):
        parse({"name": "pacs", "size": 16}).build()
    (lists / "photo_crossval_kfold.txt").write_text("photo/dog/1.jpg 2\n")
    with pytest.raises(UserError, match="does not fit its folder"):
        parse({"name": "pacs", "size": 16}).build()


def test_checksums_and_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert sha256_of(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "a" / "b"))
    assert cache_dir() == tmp_path / "a" / "b"
    assert cache_dir().is_dir()


def data_set(**domains: Domain) -> DataSet:
    manifest = Manifest("t", "s", "l", "h", "f")
    return DataSet("d", domains, ("x", "y"), Preprocessing(kind="features"), manifest)


GOOD = Domain("good", np.zeros((12, 2), dtype=np.float32), np.arange(12) % 2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(GOOD, labels=GOOD.labels + 1), r"site 'bad': label 2 is out of range: labels must be 0 to 1"),
        (replace(GOOD, labels=GOOD.labels - 1), r"label -1 is out of range"),
        (replace(GOOD, labels=GOOD.labels[:3]), r"12 samples but 3 labels"),
        (replace(GOOD, labels=GOOD.labels.astype(np.int32)), r"int32, expected int64"),
        (replace(GOOD, groups=np.arange(3)), r"12 samples but 3 groups"),
        (replace(GOOD, train_rows=np.array([12])), r"training rows go beyond"),
        (replace(GOOD, inputs=GOOD.inputs.astype(np.float64)), r"float64, expected"),
        (replace(GOOD, inputs=np.zeros((12, 2), dtype=np.uint8)), r"differ in type.*float32.*uint8"),
        (replace(GOOD, inputs=np.zeros((0, 2), dtype=np.float32), labels=GOOD.labels[:0]), r"site 'bad' is empty"),
    ],
)
def test_what_every_data_set_must_hold(bad: Domain, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_dataset(data_set(good=GOOD, bad=bad))


def test_classes_of_data_sets() -> None:
    with pytest.raises(UserError, match="no domain"):
        check_dataset(data_set())
    with pytest.raises(UserError, match="fewer than two classes"):
        check_dataset(replace(data_set(good=GOOD), classes=("x",)))
    assert check_dataset(data_set(good=GOOD)).warnings == ()
    data = data_set(good=GOOD)
    names = ("ill", "Ill ", "well", "ILL")[: len(data.classes)]
    found = check_dataset(replace(data, classes=names)).warnings
    assert "'ill' and 'Ill '" in found[0]
    assert agreed_classes({"a": ["2", "10"], "b": ["10"]}, what="c", allow_missing=False) == ("2", "10")
    with pytest.raises(UserError, match=r"'a' has \[cat, dog\]; 'c' has \[cat, dogs\]"):
        agreed_classes({"a": ["dog", "cat"], "b": ["cat"], "c": ["dogs", "cat"]}, what="c", allow_missing=False)
    assert natural_order(["b", "10", "-1", "9", "a"]) == ("-1", "9", "10", "a", "b")


def test_samples_to_predict(tmp_path: Path) -> None:
    preprocessing = Preprocessing(kind="image", channels=3, size=8, shape=(3, 8, 8))
    for name, level in (("b/2.png", 20), ("a.png", 10), (".hidden/x.png", 0)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (30, 20), level).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("x")
    found, inputs = load_for_prediction(tmp_path, preprocessing)
    assert found == ["a.png", "b/2.png"]
    assert inputs.shape == (2, 3, 8, 8)
    assert inputs[:, 0, 0, 0].tolist() == [10, 20]
    assert load_for_prediction(tmp_path / "a.png", preprocessing)[0] == ["a.png"]
    with pytest.raises(UserError, match="the model reads features"):
        load_for_prediction(tmp_path, Preprocessing(kind="features"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no images"):
        load_for_prediction(tmp_path / "empty", preprocessing)
    with pytest.raises(UserError, match="does not exist"):
        load_for_prediction(tmp_path / "nowhere", preprocessing)
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros((2, 8, 8, 3), dtype=np.uint8))
    preprocessing = Preprocessing(kind="image", channels=3, size=8, shape=(3, 8, 8))
    assert load_for_prediction(path, preprocessing)[1].shape == (2, 3, 8, 8)
    with pytest.raises(UserError, match=r"samples have shape \(3, 8, 8\), but the model reads \(1, 8, 8\)"):
        load_for_prediction(path, Preprocessing(kind="image", channels=1, size=8))
    with pytest.raises(UserError, match=r"the model reads \(5,\)"):
        load_for_prediction(path, Preprocessing(kind="features", shape=(5,)))
    with pytest.raises(UserError, match=r"the model reads a \.csv"):
        load_for_prediction(path, Preprocessing(kind="table"))
    np.savez(path, x=np.full((2, 5), np.nan, dtype=np.float32))
    with pytest.raises(UserError, match="NaN"):
        load_for_prediction(path, Preprocessing(kind="features", shape=(5,)))
    data = RotatedDigits(per_class=2).build()
    image = data.domains["D15"].inputs
    Image.fromarray(image[3, 0]).save(tmp_path / "digit.png")
    _, inputs = load_for_prediction(tmp_path / "digit.png", data.preprocessing)
    assert np.array_equal(inputs[0], image[3])


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which its files are served."""
    (tmp_path / "web").mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "web")))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield tmp_path / "web", f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_data_are_fetched_only_as_they_are_known(
    web: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = web
    contents = {"set/a.data": b"first", "set/b.data": b"second"}
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"inside/{Path(name).name}", content)
    (folder / "a.data").write_bytes(b"first")
    known = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}

    def manifest(file: str, names: Sequence[str] = tuple(contents), **changes: Any) -> Manifest:
        about = dict.fromkeys(("title", "source", "licence", "layout"), "")
        return Manifest(
            **about, how_to_get="by hand", downloads={f"{address}/{file}": tuple(names)}, sha256={**known, **changes}
        )

    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    with pytest.raises(UserError, match="FEDSHIFT_DATA is not set"):
        fetch("set", manifest("all.zip"))
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("FEDSHIFT_DATA", str(root))
    for wrong, said in (
        (manifest("none.zip"), "cannot be fetched"),
        (manifest("all.zip", **{"set/b.data": "0"}), r"b\.data .*not the version"),
        (manifest("all.zip", ["set/c.data"], **{"set/c.data": "0"}), r"no c\.data"),
        (replace(manifest("all.zip"), downloads={}), "by hand"),
        (replace(manifest("all.zip"), downloads={"http://127.0.0.1:9/x": ("set/a.data",)}), "cannot be fetched"),
    ):
        with pytest.raises(UserError, match=said):
            fetch("set", wrong)
        assert not list(root.iterdir()), "nothing is written"
    (root / "set").mkdir()
    (root / "set" / "b.data").write_bytes(b"my own")
    assert fetch("set", manifest("all.zip")) == [root / "set" / "a.data"]
    assert (root / "set" / "b.data").read_bytes() == b"my own"
    assert fetch("set", manifest("all.zip")) == []
    (root / "set" / "a.data").unlink()
    assert fetch("set", manifest("a.data", ["set/a.data"])) == [root / "set" / "a.data"]


def test_what_can_be_fetched_has_a_checksum_and_a_licence() -> None:
    found = {name: source_class(name).manifest() for name in names()}
    fetched = {name: manifest for name, manifest in found.items() if manifest.downloads}
    assert "heart_disease" in fetched
    for manifest in fetched.values():
        assert manifest.licence.startswith("CC ")
        for address, files in manifest.downloads.items():
            assert address.startswith("https://")
            assert set(files) <= set(manifest.sha256)
