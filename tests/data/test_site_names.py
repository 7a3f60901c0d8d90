"""Two sites of one name, but for capitals, spaces and Unicode forms, are refused wherever sites are named."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedshift.data.builders.own import data_section
from fedshift.data.checks import names_alike
from fedshift.data.domain import Domain
from fedshift.data.registry import parse
from fedshift.errors import UserError
from fedshift.estimator import FederatedClassifier
from fedshift.experiment.config.experiment import parse as parse_experiment
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut
from tried import case

pandas = pytest.importorskip("pandas")
X, Y = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32), np.arange(12) % 2
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "Zürich") for form in ("NFC", "NFD"))


def arrays(folder: Path, names: tuple[str, str]) -> Any:
    files = {name: folder / f"{number}.npz" for number, name in enumerate(names)}
    for file in files.values():
        np.savez(file, x=X, y=Y)
    return parse({"name": "arrays", "sites": files}).build()


def frames(folder: Path, names: tuple[str, str]) -> Any:
    return parse(data_section({name: (pandas.DataFrame({"x": X[:, 0]}), Y) for name in names})).build()


def one_table(folder: Path, names: tuple[str, str]) -> Any:
    file = folder / "all.csv"
    pandas.DataFrame({"x": X[:, 0], "ill": Y, "site": [names[row // 2 % 2] for row in range(12)]}).to_csv(
        file, index=False
    )
    fields = {"name": "table", "file": file, "site_column": "site", "label": "ill", "numeric": ["x"]}
    return parse(fields).build()


def image_folder(folder: Path, names: tuple[str, str]) -> Any:
    for number, name in enumerate(names):
        for label in ("0", "1"):
            place = folder / "root" / name / label
            place.mkdir(parents=True)
            pixels = np.full((8, 8), 9 * number + int(label), np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")
    return parse({"name": "image_folder", "root": folder / "root", "size": 8}).build()


def estimator(folder: Path, names: tuple[str, str]) -> Any:
    return FederatedClassifier(rounds=1).fit(X, Y, sites=[names[row // 2 % 2] for row in range(12)])


@pytest.mark.parametrize("build", [arrays, frames, one_table, image_folder, estimator])
@pytest.mark.parametrize(
    "names",
    [
        case("site names", "a and A", ("a", "A")),
        case("site names", "two Unicode forms of one name", (COMPOSED, DECOMPOSED)),
        case("site names", "a no-break space for a space", ("St Mary", "St\u00a0Mary")),
        case("site names", "sharp s and SS", ("Straße", "STRASSE")),
    ],
)
def test_names_alike_are_refused(tmp_path: Path, build: Any, names: tuple[str, str]) -> None:
    with pytest.raises(UserError, match="have one name") as caught:
        build(tmp_path, names)
    assert "\n" not in str(caught.value)
    shown = [name if name != DECOMPOSED else ascii(name).strip("'") for name in names]
    assert all(name in str(caught.value) for name in shown)


@pytest.mark.case("site names", "1 and '1' in Python")
@pytest.mark.case("site names", "labels of methods that differ in capitals only")
@pytest.mark.case("site names", "a part of a cut source that is called as another site is")
def test_other_names_numbers_methods_and_parts(tmp_path: Path) -> None:
    assert list(arrays(tmp_path, ("a", "b")).domains) == ["a", "b"]
    assert names_alike(["a1", "a2", "à", "a"]) is None
    with pytest.raises(UserError, match="same name"):
        data_section({1: (X, Y), "1": (X, Y)})
    methods = ["fedavg", {"name": "fedavg", "label": "FedAvg", "local_epochs": 2}]
    with pytest.raises(UserError, match="'fedavg' and 'FedAvg'"):
        parse_experiment({"data": {"name": "rotated_digits"}, "model": "mnist_cnn", "methods": methods})
    data = arrays(tmp_path, ("a", "b"))
    data.domains["a.1"] = Domain("a.1", X, Y)
    with pytest.raises(UserError, match=r"'a\.1'"):
        LeaveOneOut(targets=("b",), sites_each=2).taking_part(data)
