"""Published data sets by name: small folders of the same layouts, counts that differ, and files that lie."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedshift.data.domain import DataSet
from fedshift.data.published.array_files import read_pickled
from fedshift.data.published.manifest import Counts, read_manifest
from fedshift.data.published.source import Published
from fedshift.data.registry import names, parse, source_class
from fedshift.errors import UserError

NAMES = tuple(name for name in names() if issubclass(source_class(name), Published))
Small = Callable[[str, Mapping[str, Mapping[str, int]]], None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Small:
    """Says that a data set has these counts; ``classes`` keeps the first so many."""

    def smaller(name: str, counts: Mapping[str, Mapping[str, int]], classes: int | None = None) -> None:
        about = read_manifest(name)
        domains = {domain: Counts(**numbers) for domain, numbers in counts.items()}
        update = {"domains": domains, "total": None, "size": min(about.size, 32), "classes": about.classes[:classes]}
        monkeypatch.setattr(source_class(name), "about", about.model_copy(update=update))

    return smaller


def image(path: Path, value: int = 100, size: int = 32) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), value, dtype=np.uint8)).save(path)


def built(name: str, folder: Path, **options: object) -> DataSet:
    return parse({"name": name, "folder": str(folder), **options}).build()


def halves(data: DataSet, domain: str) -> tuple[list[int], list[int]]:
    train, test = data.domains[domain].train_rows, data.domains[domain].test_rows
    assert train is not None
    assert test is not None
    return train.tolist(), test.tolist()


# What the manifests say


@pytest.mark.parametrize(
    ("name", "samples", "classes"),
    [
        ("office_home", 15_588, 65),  # Gulrajani & Lopez-Paz, ICLR 2021, section 4
        ("vlcs", 10_729, 5),
        ("domain_net", 586_575, 345),
        ("office_31", 4_110, 31),  # Saenko et al., ECCV 2010
        ("image_clef", 2_400, 12),
        ("camelyon17_wilds", 302_436 + 33_560 + 34_904 + 85_054, 2),  # Koh et al., ICML 2021
        ("fed_isic2019", 23_247, 8),  # du Terrail et al., NeurIPS 2022, table 1
        ("fed_tcga_brca", 1_088, 1),
        ("fed_ixi", 566, 1),
        ("fed_lidc_idri", 1_009, 1),
        ("fed_camelyon16", 399, 2),
        ("pathmnist", 107_180, 9),  # Yang et al., Scientific Data 2023
        ("cifar_10", 60_000, 10),
        ("cifar_100", 60_000, 100),
    ],
)
def test_counts_are_those_of_the_papers(name: str, samples: int, classes: int) -> None:
    """The manifests' counts are of lists and loaders; the sums stand in the papers."""
    about = read_manifest(name)
    assert sum(counts.all or 0 for counts in about.domains.values()) == samples
    assert len(set(about.classes)) == classes


@pytest.mark.parametrize("name", NAMES)
def test_every_manifest_says_what_to_fetch(name: str) -> None:
    about = read_manifest(name)
    assert all((about.title, about.source, about.licence, about.get, about.counts_from))
    with pytest.raises(UserError) as refused:
        parse({"name": name}).build()
    assert "\n" not in str(refused.value)
    assert about.instead or about.get in str(refused.value)


def test_a_folder_below_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Small) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    with pytest.raises(UserError, match="no folder vlcs or VLCS below FEDSHIFT_DATA"):
        parse({"name": "vlcs"}).build()
    small("vlcs", {"Caltech101": {"all": 2}, "SUN09": {"all": 1}})
    for path in ("Caltech101/bird/a.jpg", "Caltech101/car/b.jpg", "SUN09/bird/c.jpg"):
        image(tmp_path / "VLCS" / path)
    assert list(parse({"name": "vlcs"}).build().domains) == ["Caltech101", "SUN09"]


# Folders


def office(folder: Path, small: Small) -> None:
    small("office_home", {"Art": {"all": 3}, "Real World": {"all": 2}})
    for path in ("Art/Alarm_Clock/2.jpg", "Art/Alarm_Clock/1.jpg", "Art/Bed/1.jpg", "Real World/Bed/1.jpg"):
        image(folder / path)
    image(folder / "Real World" / "Bed" / "2.jpg", 200)


def test_folders(tmp_path: Path, small: Small) -> None:
    office(tmp_path, small)
    data = built("office_home", tmp_path)
    assert {name: len(domain) for name, domain in data.domains.items()} == {"Art": 3, "Real World": 2}
    assert [data.classes[label] for label in data.domains["Art"].labels] == ["Alarm_Clock", "Alarm_Clock", "Bed"]
    assert data.domains["Real World"].inputs[1].max() == 200
    assert data.domains["Art"].train_rows is None
    (tmp_path / "Real World").rename(tmp_path / "Real_World")
    assert len(built("office_home", tmp_path, domains=["Real World"]).domains["Real World"]) == 2
    assert len(built("office_home", tmp_path, samples_per_domain=1).domains["Art"]) == 1


def test_both_numbers_where_they_differ(tmp_path: Path, small: Small) -> None:
    office(tmp_path, small)
    (tmp_path / "Art" / "Bed" / "1.jpg").unlink()
    with pytest.raises(UserError, match=r"'Art': 2 samples here, 3 published.*incomplete: allow"):
        built("office_home", tmp_path)
    data = built("office_home", tmp_path, incomplete="allow")
    assert any("'Art': 2 samples here, 3 published" in line for line in data.warnings)
    for number in range(3):
        image(tmp_path / "Art" / "Bed" / f"{number}.jpg")
    for incomplete in ("refuse", "allow"):
        with pytest.raises(UserError, match="'Art': 5 samples here, 3 published: this is another version"):
            built("office_home", tmp_path, incomplete=incomplete)


def test_counts_that_no_source_is_sure_of_are_told_and_not_checked(tmp_path: Path) -> None:
    """DomainBed's paper and public loaders of its copy disagree, so neither number is an error."""
    for place in read_manifest("terra_incognita").domains:
        image(tmp_path / place / "bird" / "1.jpg")
    for domains, text in ((None, "4 samples here (24,330 published): "), (["location_38"], "1 samples here: ")):
        warnings = built("terra_incognita", tmp_path, incomplete="allow", domains=domains).warnings
        assert any(line.startswith(f"{text}this number is not checked, since the paper") for line in warnings)


def test_counts_of_classes(tmp_path: Path, small: Small) -> None:
    """The same number of samples, but one lies in the folder of another class."""
    small("vlcs", {"SUN09": {"all": 2, "classes": (1, 1, 0, 0, 0)}})  # type: ignore[dict-item]
    for path in ("SUN09/bird/1.jpg", "SUN09/bird/2.jpg"):
        image(tmp_path / path)
    with pytest.raises(UserError, match="class 'bird': 2 samples here, 1 published"):
        built("vlcs", tmp_path)


def test_a_domain_that_is_not_there(tmp_path: Path, small: Small) -> None:
    office(tmp_path, small)
    small("office_home", {"Art": {"all": 3}, "Real World": {"all": 2}, "Product": {"all": 1}})
    with pytest.raises(UserError, match="has no folder Product"):
        built("office_home", tmp_path)
    assert list(built("office_home", tmp_path, incomplete="allow").domains) == ["Art", "Real World"]
    assert list(built("office_home", tmp_path, domains=["Real World", "Art"]).domains) == ["Real World", "Art"]
    with pytest.raises(UserError, match=r"no domain 'Artt'.*did you mean 'Art'"):
        built("office_home", tmp_path, domains=["Artt"])
    image(tmp_path / "Art" / "Alarm_Clok" / "1.jpg")
    with pytest.raises(UserError, match=r"'Alarm_Clok' is no class.*Alarm_Clock"):
        built("office_home", tmp_path)


# Lists


def test_lists_have_the_official_split_and_paths_of_elsewhere(tmp_path: Path, small: Small) -> None:
    small("domain_net", {"clipart": {"all": 3, "train": 2, "test": 1}})
    for number in (1, 2, 3):
        image(tmp_path / "clipart" / "aircraft_carrier" / f"{number}.jpg")
    (tmp_path / "clipart_train.txt").write_text("clipart/aircraft_carrier/3.jpg 0\nclipart/aircraft_carrier/1.jpg 0\n")
    (tmp_path / "clipart_test.txt").write_text("clipart/aircraft_carrier/2.jpg 0\n")
    data = built("domain_net", tmp_path)
    assert halves(data, "clipart") == ([0, 1], [2])
    (tmp_path / "clipart_test.txt").write_text("clipart/aircraft_carrier/9.jpg 0\n")
    with pytest.raises(UserError, match=r"has no clipart/aircraft_carrier/9\.jpg, which clipart_test\.txt names"):
        built("domain_net", tmp_path)
    small("image_clef", {"b": {"all": 2}})
    for name in ("252_0446", "113_0001"):
        image(tmp_path / "b" / f"{name}.jpg")
    (tmp_path / "b_list.txt").write_text("/data/image-clef/b/252_0446.jpg 6\n/data/image-clef/b/113_0001.jpg 2\n")
    data = built("image_clef", tmp_path)
    assert [data.classes[label] for label in data.domains["b"].labels] == ["car", "bird"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("b/../../secret.jpg 0", "is no file below"),
        ("b/1.jpg 12", "label 12 is none of the 12 classes"),
        ("b/1.jpg", "is not '<image> <number of the class>'"),
    ],
)
@pytest.mark.case("published data sets", "a list that names files elsewhere, or no class")
def test_a_list_that_lies(line: str, words: str, tmp_path: Path, small: Small) -> None:
    small("image_clef", {"b": {"all": 1}})
    image(tmp_path / "b" / "1.jpg")
    (tmp_path / "bList.txt").write_text(f"{line}\n")
    with pytest.raises(UserError, match=words):
        built("image_clef", tmp_path)


# Tables


def test_tables_of_wilds_and_flamby(tmp_path: Path, small: Small) -> None:
    small("camelyon17_wilds", {"hospital_0": {"all": 2, "train": 1, "test": 1}, "hospital_1": {"all": 1}})
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for number, (patient, tumour, centre, split) in enumerate((("004", 1, 0, 0), ("004", 0, 0, 1), ("020", 1, 1, 0))):
        lines.append(f"{number},{patient},4,{number},7,{tumour},0,{centre},{split}")
        folder = tmp_path / "patches" / f"patient_{patient}_node_4"
        image(folder / f"patch_patient_{patient}_node_4_x_{number}_y_7.png", 10 * number)
    (tmp_path / "metadata.csv").write_text("\n".join(lines) + "\n")
    data = built("camelyon17_wilds", tmp_path)
    assert data.classes == ("normal", "tumour")
    assert data.domains["hospital_0"].labels.tolist() == [1, 0]
    assert halves(data, "hospital_0") == ([0], [1])
    assert data.domains["hospital_1"].inputs.max() == 20
    (tmp_path / "metadata.csv").write_text("\n".join([*lines, "3,a/../../../x,4,1,7,1,0,1,0"]) + "\n")
    with pytest.raises(UserError, match="is no file below"):
        built("camelyon17_wilds", tmp_path)
    (tmp_path / "metadata.csv").write_text("\n".join([*lines, "3,020,4,1,7,1,0,9,0"]) + "\n")
    with pytest.raises(UserError, match="line 5: center '9'"):
        built("camelyon17_wilds", tmp_path)
    (tmp_path / "metadata.csv").write_text("\n".join(lines) + "\n")
    (folder / "patch_patient_020_node_4_x_2_y_7.png").unlink()
    assert len(built("camelyon17_wilds", tmp_path, domains=["hospital_0"]).domains["hospital_0"]) == 2
    small("fed_isic2019", {"BCN": {"all": 1, "train": 1}, "MSK": {"all": 1, "test": 1}})
    (tmp_path / "train_test_split").write_text(
        "image,target,center,fold,fold2\nISIC_1,1,0,train,train_0\nISIC_2,4,4,test,test_4\n"
    )
    for name in ("ISIC_1", "ISIC_2"):
        image(tmp_path / "ISIC_2019_Training_Input" / f"{name}.jpg")
    data = built("fed_isic2019", tmp_path)
    assert {name: data.classes[domain.labels[0]] for name, domain in data.domains.items()} == {
        "BCN": "NV",
        "MSK": "BKL",
    }
    small("fed_tcga_brca", {"Northeast": {"all": 2, "train": 1, "test": 1}, "South": {"all": 1}})
    (tmp_path / "brca.csv").write_text(
        "pid,age,stage,E,T\na,50,1,1.0,300.5\nb,60,0,0.0,20\nc,70,1,0,8\nother,1,1,1,1\n"
    )
    (tmp_path / "train_test_split.csv").write_text("pid,fold,fold2\na,train,train_0\nc,train,train_1\nb,test,test_0\n")
    data = built("fed_tcga_brca", tmp_path)
    assert data.task == "time_to_event"
    assert np.asarray(data.domains["Northeast"].inputs).tolist() == [[50, 1], [60, 0]]
    assert data.domains["Northeast"].labels.tolist() == [[300.5, 1], [20, 0]]
    assert halves(data, "Northeast") == ([0], [1])
    assert list(built("fed_tcga_brca", tmp_path, domains=["South"]).domains) == ["South"]


# Arrays


def test_arrays_of_medmnist(tmp_path: Path, small: Small) -> None:
    small("pathmnist", {"path": {"all": 6, "train": 5, "test": 1}})
    small("chestmnist", {"chest": {"all": 6}})
    rng = np.random.default_rng(0)
    for name, shape, labels in (("pathmnist", (28, 28, 3), 1), ("chestmnist", (28, 28), 14)):
        arrays = {}
        for part, number in (("train", 3), ("val", 2), ("test", 1)):
            arrays[f"{part}_images"] = rng.integers(0, 256, (number, *shape), dtype=np.uint8)
            arrays[f"{part}_labels"] = rng.integers(0, 2, (number, labels))
        np.savez(tmp_path / f"{name}.npz", **arrays)
    data = built("pathmnist", tmp_path)
    assert data.input_shape == (3, 28, 28)
    assert halves(data, "path") == ([0, 1, 2, 3, 4], [5])
    several = built("chestmnist", tmp_path)
    assert several.task == "multi_label"
    assert several.domains["chest"].labels.shape == (6, 14)
    with pytest.raises(UserError, match="have 28 pixels; leave size out"):
        built("pathmnist", tmp_path, size=64)


def cifar(folder: Path, protocol: int = 2) -> None:
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        data = rng.integers(0, 256, (2, 3072), dtype=np.uint8)
        held = {b"data": data, b"labels": [3, 7], b"batch_label": b"x", b"filenames": [b"a", b"b"]}
        (folder / name).write_bytes(pickle.dumps(held, protocol=protocol))


@pytest.mark.parametrize("protocol", [2, 3])
def test_pickles_of_cifar(protocol: int, tmp_path: Path, small: Small) -> None:
    """The arrays are those that Python's own reader gives."""
    small("cifar_10", {"cifar": {"all": 12, "train": 10, "test": 2}})
    cifar(tmp_path, protocol)
    data = built("cifar_10", tmp_path)
    assert halves(data, "cifar") == (list(range(10)), [10, 11])
    expected = pickle.loads((tmp_path / "data_batch_2").read_bytes())[b"data"]  # our own file
    assert np.array_equal(data.domains["cifar"].inputs[2:4].reshape(2, -1), expected)
    assert data.domains["cifar"].labels.tolist() == [3, 7] * 6


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps({"data": Harmful()}), "could run code"),
        (pickle.dumps(np.array([Harmful()], dtype=object)), "could run code|something else than numbers"),
        (pickle.dumps({"data": np.array([{"a": 1}], dtype=object)}), "something else than numbers"),
        (b"\x80\x02}q\x00(U", "no pickle of plain arrays"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "could run code"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(K\x01tRK\x05b.", "no pickle of plain arrays"),
        (pickle.dumps([1, 2]), "holds no dictionary"),
    ],
)
@pytest.mark.case("published data sets", "a pickle that would run code")
def test_a_pickle_runs_nothing(content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_pickled(tmp_path / "data_batch_1")
    assert capsys.readouterr().out == ""


def test_matlab_files_of_digits_five(tmp_path: Path, small: Small) -> None:
    from scipy.io import savemat

    small("digits_five", {"mnist": {"train": 2, "test": 1}, "svhn": {"all": 2}, "usps": {"all": 3}})
    grey, eye = np.full((3, 32, 32), 50, dtype=np.uint8), np.eye(10)
    savemat(
        tmp_path / "mnist_data.mat",
        {"train_32": grey[:2], "test_32": grey[2:], "label_train": eye[[4, 0]], "label_test": eye[[9]]},
    )
    for part in ("train", "test"):
        street = np.arange(32 * 32 * 3, dtype=np.uint32).reshape(32, 32, 3, 1).astype(np.uint8)
        savemat(tmp_path / f"svhn_{part}_32x32.mat", {"X": street, "y": np.array([[10]])})
    cells = np.empty((2, 2), dtype=object)
    cells[0] = [np.ones((2, 1, 28, 28)) * 0.5, np.array([[1], [2]])]
    cells[1] = [np.ones((1, 1, 28, 28)), np.array([[3]])]
    savemat(tmp_path / "usps_28x28.mat", {"dataset": cells})
    data = built("digits_five", tmp_path)
    assert data.domains["mnist"].labels.tolist() == [4, 0, 9]
    assert halves(data, "mnist") == ([0, 1], [2])
    assert data.domains["svhn"].labels.tolist() == [0, 0]
    assert data.domains["svhn"].inputs[0, :, 0, 1].tolist() == [3, 4, 5]
    assert data.domains["usps"].labels.tolist() == [1, 2, 3]
    assert data.domains["usps"].inputs[:, 0, 5, 5].tolist() == [128, 128, 255]
    assert data.input_shape == (3, 32, 32)


# Masks


def test_masks_of_images_and_volumes(tmp_path: Path, small: Small) -> None:
    small("feddg_fundus", {"drishti_gs": {"all": 2, "train": 1, "test": 1}})
    for part, name in (("train", "gdrishtiGS_002.png"), ("test", "gdrishtiGS_001.png")):
        image(tmp_path / "Domain1" / part / "ROIs" / "image" / name)
        levels = np.full((32, 32), 255, dtype=np.uint8)
        levels[8:24, 8:24] = 128
        levels[12:16, 12:16] = 0
        mask = tmp_path / "Domain1" / part / "ROIs" / "mask" / name
        mask.parent.mkdir(parents=True)
        Image.fromarray(levels).save(mask)
    data = built("feddg_fundus", tmp_path)
    masks = data.domains["drishti_gs"].masks
    assert data.task == "segmentation"
    assert masks.sum(axis=(2, 3)).tolist() == [[16, 256], [16, 256]]
    assert halves(data, "drishti_gs") == ([0], [1])
    nibabel = pytest.importorskip("nibabel")
    small("feddg_prostate", {"UCL": {}})
    (tmp_path / "UCL").mkdir()
    values, labels = np.zeros((32, 32, 3)), np.zeros((32, 32, 3), dtype=np.uint8)
    values[:, :, 1], labels[4:8, 4:8, 1] = np.linspace(0, 900, 32)[:, None], 1
    for array, name in ((values, "Case00.nii.gz"), (labels, "Case00_segmentation.nii.gz")):
        nibabel.Nifti1Image(array, np.eye(4)).to_filename(tmp_path / "UCL" / name)
    data = built("feddg_prostate", tmp_path)
    masks = data.domains["UCL"].masks
    assert masks.sum(axis=(1, 2, 3)).tolist() == [0, 16, 0]
    (tmp_path / "UCL" / "Case00_segmentation.nii.gz").unlink()
    with pytest.raises(UserError, match="no segmentation of UCL"):
        built("feddg_prostate", tmp_path)


def test_what_cannot_be_read_and_sources_of_other_processes() -> None:
    with pytest.raises(UserError, match=r"cannot read fed_ixi: its samples are volumes.*mask_folder"):
        parse({"name": "fed_ixi"}).build()
    source = parse({"name": "vlcs", "size": 64})
    assert pickle.loads(pickle.dumps(source)) == source
