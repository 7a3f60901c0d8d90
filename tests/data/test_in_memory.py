"""Samples given in Python: arrays, tensors, data frames and data sets give what files of the same numbers give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.builders.in_memory import InMemory
from fedshift.data.domain import DataSet
from fedshift.errors import UserError
from fedshift.experiment.config.data_section import data_source
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.parallel import parallel_workers

RNG = np.random.default_rng(0)
FEATURES = {site: (RNG.normal(size=(6, 2)).astype(np.float32), np.arange(6) % 2) for site in ("a", "b")}
IMAGES = {site: (RNG.integers(0, 255, (4, 3, 8, 8), dtype=np.uint8), np.arange(4) % 2) for site in ("a", "b")}


def built(data: Any) -> DataSet:
    return data_source(data, Path()).build()


def from_files(folder: Path, sites: dict[str, tuple[Any, Any]]) -> DataSet:
    for name, (x, y) in sites.items():
        np.savez(folder / f"{name}.npz", x=x, y=y)
    return built({"name": "arrays", "sites": {name: folder / f"{name}.npz" for name in sites}})


def same(one: DataSet, other: DataSet) -> bool:
    pairs = [(domain, other.domains[name]) for name, domain in one.domains.items()]
    return one.classes == other.classes and all(
        np.array_equal(own.inputs, theirs.inputs)
        and own.inputs.dtype == theirs.inputs.dtype
        and np.array_equal(own.labels, theirs.labels)
        for own, theirs in pairs
    )


class Photos(torch.utils.data.Dataset[Any]):
    """Images of Pillow."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Any:
        return Image.fromarray(self.images[row].transpose(1, 2, 0)), int(self.labels[row])


def tensors(sites: dict[str, tuple[Any, Any]], scale: float = 1) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {name: (torch.from_numpy(x) / scale, torch.from_numpy(y)) for name, (x, y) in sites.items()}


def test_arrays_tensors_and_data_sets_are_what_files_are(tmp_path: Path) -> None:
    features, images = from_files(tmp_path, FEATURES), from_files(tmp_path, IMAGES)
    assert same(built(FEATURES), features)
    assert same(built(tensors(FEATURES)), features)
    assert same(built({name: (x.tolist(), y.tolist()) for name, (x, y) in FEATURES.items()}), features)
    sets = {name: torch.utils.data.TensorDataset(*pair) for name, pair in tensors(FEATURES).items()}
    assert same(built(sets), features)
    assert same(built(IMAGES), images)
    assert same(built(tensors(IMAGES, scale=255)), images)
    assert same(built({name: Photos(*pair) for name, pair in IMAGES.items()}), images)


def test_masked_values_and_labels_that_are_words(tmp_path: Path) -> None:
    x, y = next(iter(FEATURES.values()))
    for masked in (np.ma.masked_greater(x, np.median(x)), [np.ma.masked_equal(row, row[0]) for row in x]):
        with pytest.raises(UserError, match="masked"):
            built({**FEATURES, next(iter(FEATURES)): (masked, y)})
    whole = np.ma.masked_array(x)  # masks nothing
    assert same(built({**FEATURES, next(iter(FEATURES)): (whole, y)}), built(FEATURES))
    words = {name: (x, np.array(["well", "ill"])[y]) for name, (x, y) in FEATURES.items()}
    data = built(words)
    assert data.classes == ("ill", "well")
    assert data.domains["a"].labels.tolist() == [1, 0, 1, 0, 1, 0]
    ordered = built({"name": "arrays", "sites": words, "classes": ["well", "ill"]})
    assert ordered.domains["a"].labels.tolist() == [0, 1, 0, 1, 0, 1]
    with pytest.raises(UserError, match=r"text at site 'a'.*numbers at site 'b'"):
        built({**words, "b": FEATURES["b"]})


def test_data_frames_are_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [40, 50, None], "sex": ["f", None, "m"], "num": [0, 2, 1]})
    by_condition = built({"sites": {"a": frame, "b": frame}, "positive": "num > 0"})
    assert by_condition.input_shape == (4,)  # age, age is missing, sex f, m
    assert by_condition.domains["a"].labels.tolist() == [0, 1, 1]
    pairs = {name: (frame[["age", "sex"]], (frame["num"] > 0).astype(int)) for name in ("a", "b")}
    given = built(pairs)
    assert np.array_equal(given.domains["b"].inputs, by_condition.domains["b"].inputs)
    assert given.domains["b"].labels.tolist() == [0, 1, 1]
    with pytest.raises(UserError, match="need label"):
        built({"a": frame, "b": frame})


def test_data_sets_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    names = datasets.ClassLabel(names=["no", "yes"])
    held = {
        site: datasets.Dataset.from_dict(
            {"x": x.tolist(), "label": y.tolist()},
            features=datasets.Features({"x": datasets.Sequence(datasets.Value("float32")), "label": names}),
        )
        for site, (x, y) in FEATURES.items()
    }
    data = built(held)
    assert data.classes == ("no", "yes")
    assert np.array_equal(data.domains["a"].inputs, FEATURES["a"][0])
    assert data.domains["a"].labels.tolist() == FEATURES["a"][1].tolist()
    with pytest.raises(UserError, match="no column of labels"):
        built({site: one.remove_columns("label") for site, one in held.items()})


def test_samples_of_this_process_alone() -> None:
    experiment = parse({"data": FEATURES, "model": "linear", "methods": ["fedavg"]})
    with pytest.raises(UserError, match=r"engine\.parallel_runs"), parallel_workers(experiment, Path("runs"), 1, []):
        pass
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert InMemory(rows, None).inputs("site").tolist() == rows


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ((FEATURES["b"][0],), "pair of inputs and labels"),
        (3, "give one file for each site"),
        (torch.zeros(3), "give one file for each site"),
        ((FEATURES["b"][0], FEATURES["b"][1][:3]), "6 samples but y has 3"),
        (([[1.0], [1.0, 2.0]], [0, 1]), "inputs cannot be made one array"),
        (([[object()]], [0]), "neither numbers nor text"),
        ((np.full((2, 3, 8, 8), 1.5), [0, 1]), "values from 0 to 1"),
        ([(1,), (2,), (3,)], "pair of inputs and labels"),
        (torch.utils.data.TensorDataset(torch.zeros(2, 2)), "must be a pair"),
    ],
)
def test_one_line_for_each_mistake(site: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        built({"a": FEATURES["a"], "b": site})
    assert "\n" not in str(caught.value)
