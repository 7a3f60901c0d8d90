"""fedshift from Python: results as data frames, trained models that predict."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import fedshift
from fedshift.api import Results
from fedshift.data.domain import Preprocessing
from fedshift.data.inference import load_for_prediction, samples_in_memory
from fedshift.errors import FedshiftError, UserError
from fedshift.evaluation.records import SiteMetric
from fedshift.experiment.export import export
from fedshift.experiment.predict import TrainedModel, from_weights
from fedshift.methods import registry
from fedshift.models import registry as models
from fedshift.weights import Weights

SITES = {"north": 12, "south": 9, "east": 10}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small table at each of three hospitals; some ages are missing."""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    for site, rows in SITES.items():
        lines = [
            f"{'' if row == 3 else rng.integers(30, 90)},{'fm'[row % 2]},{'ill' if row % 3 else 'well'}"
            for row in range(rows)
        ]
        (folder / f"{site}.csv").write_text("\n".join(["age,sex,outcome", *lines]) + "\n")
    return {site: folder / f"{site}.csv" for site in SITES}


@pytest.fixture(scope="module")
def results(tables: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two targets and two seeds of one method on `tables`."""
    experiment = {
        "name": "small",
        "data": {"name": "table", "sites": tables, "label": "outcome", "numeric": ["age"], "categorical": ["sex"]},
        "protocol": {"targets": ["east", "south"], "seeds": [0, 1]},
        "model": {"name": "linear"},
        "training": {"rounds": 2, "batch_size": 8, "lr": 0.1},
        "methods": [{"name": "fedavg"}],
        "engine": {"threads": 1},
        "device": "cpu",
    }
    return fedshift.run(experiment, tmp_path_factory.mktemp("runs"))


def test_a_data_frame_has_a_row_per_run_and_one_per_round(results: Results) -> None:
    pytest.importorskip("pandas")
    frame = results.to_frame()
    assert frame[["method", "target", "seed"]].values.tolist() == [
        ["fedavg", target, seed] for target in ("east", "south") for seed in (0, 1)
    ]
    assert frame["score"].tolist() == [run.score() for run in results.runs]
    assert frame["accuracy"].tolist() == [run.accuracy() for run in results.runs]
    assert results.to_frame("source")["score"].tolist() == [run.score("source") for run in results.runs]
    assert frame["bytes_up"].tolist() == [sum(run.bytes_up.values()) for run in results.runs]
    for metric in get_args(SiteMetric):
        values = frame[metric].tolist()
        assert values == [run.site_metric(metric) for run in results.runs]
        assert results.to_frame("source")[metric].isna().all() or metric == "accuracy"
    known = [run.targets[0].intervals["auroc"] for run in results.runs]
    assert list(zip(frame["auroc_low"], frame["auroc_high"], strict=True)) == known
    assert frame["majority"].tolist() == [run.targets[0].majority for run in results.runs]
    sites = results.sites_to_frame()
    held_out = sites[(sites["target"] == "east") & (sites["seed"] == 1) & (sites["site"] == "north")]
    said = next(site for site in results.runs[1].sites if site.site == "north")
    assert held_out[["part", "samples", "brier"]].values.tolist() == [["held_out", said.samples, said.values["brier"]]]
    assert held_out[["samples_ill", "samples_well"]].values.tolist() == [said.support]
    rounds = results.rounds_to_frame()
    assert rounds.groupby(["target", "seed"])["round"].apply(list).tolist() == [[1, 2]] * 4
    last = rounds[(rounds["target"] == "east") & (rounds["round"] == 2)]
    assert last["target_accuracy/east"].tolist() == frame[frame["target"] == "east"]["accuracy"].tolist()


def test_a_model_predicts_a_file_and_the_same_rows_in_memory(results: Results, tables: dict[str, Path]) -> None:
    pandas = pytest.importorskip("pandas")
    model = fedshift.Model.load(results.folder / "fedavg" / "east" / "seed-0")
    from_file = model.predict_proba(tables["east"])
    frame = pandas.read_csv(tables["east"])
    assert frame["age"].isna().any()
    assert np.array_equal(model.predict_proba(frame), from_file)
    assert np.array_equal(model.predict_proba(frame[["sex", "age"]][::-1]), from_file[::-1])
    assert list(model.classes_) == ["ill", "well"]
    assert np.array_equal(model.predict(frame), model.classes_[from_file.argmax(axis=1)])
    right = 100 * np.mean(model.predict(frame) == frame["outcome"])
    assert right == pytest.approx(results.runs[0].accuracy())
    with pytest.raises(UserError, match="age"):
        model.predict(frame[["sex"]])
    with pytest.raises(UserError, match="data frame"):
        model.predict(np.zeros((2, 3)))


def test_predictions_keep_ids_scores_and_labels(tables: dict[str, Path], tmp_path: Path) -> None:
    """A model of a table with an id column, and of a condition: what a file with these columns gives back."""
    pandas = pytest.importorskip("pandas")
    for site, file in tables.items():
        patients = pandas.read_csv(file, dtype=str, keep_default_na=False)
        patients["patient"] = [f"{site}-{row}" for row in range(len(patients))]
        patients["grade"] = (patients["outcome"] == "ill").astype(int) * 2
        patients.to_csv(tmp_path / f"{site}.csv", index=False)
    run = fedshift.run(
        {
            "data": {
                "name": "table",
                "sites": {site: tmp_path / f"{site}.csv" for site in tables},
                "positive": "grade > 0",
                "numeric": ["age"],
                "id": "patient",
            },
            "protocol": {"targets": ["east"], "seeds": [0]},
            "model": {"name": "linear"},
            "training": {"rounds": 1},
            "methods": ["fedavg"],
        },
        tmp_path / "runs",
    )
    model, east = run.model(), pandas.read_csv(tmp_path / "east.csv")
    found = model.predictions(tmp_path / "east.csv")
    assert list(found) == ["id", "label", "predicted", "score_negative", "score_positive"]
    assert found["id"].tolist() == east["patient"].tolist()
    assert found["label"].tolist() == np.where(east["grade"] > 0, "positive", "negative").tolist()
    assert np.array_equal(found[["score_negative", "score_positive"]].to_numpy(np.float32), model.predict_proba(east))
    assert model.predictions(east).equals(found)
    kept = pandas.read_parquet(run.collected.runs[0].folder / "predictions.parquet").query("part == 'target'")
    assert kept["label"].tolist() == found["label"].tolist()
    assert "label" not in model.predictions(east[["age", "sex"]])
    east["grade"] = east["grade"].astype(object).where(east.index > 0, "?")
    assert model.predictions(east)["label"].tolist()[:2] == [None, found["label"][1]]


@pytest.mark.parametrize("labels", [np.array([1, 0, 7]), np.array(["two", "one", "three"])])
def test_labels_of_arrays_and_of_folders_are_kept(labels: np.ndarray, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    model, images = fedshift.Model(untrained({"name": "linear"}, (1, 4, 4))), np.zeros((3, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "new.npz", x=images, y=labels)
    assert model.predictions(tmp_path / "new.npz")["label"].tolist() == ["two", "one", None]
    for number, folder in enumerate(("two", "one")):
        (tmp_path / folder).mkdir()
        Image.fromarray(images[0]).save(tmp_path / folder / f"{number}.png")
    assert model.predictions(tmp_path)[["id", "label"]].values.tolist() == [["one/1.png", "one"], ["two/0.png", "two"]]
    assert "label" not in model.predictions(tmp_path / "one")
    np.savez(tmp_path / "short.npz", x=images, y=labels[:2])
    with pytest.raises(UserError, match="y has shape"):
        model.predictions(tmp_path / "short.npz")


def test_results_find_the_model_of_a_run(results: Results, tables: dict[str, Path]) -> None:
    for seed, target in ((None, "south"), (1, "east")):
        folder = results.folder / "fedavg" / target / f"seed-{seed or 0}"
        found, there = results.model(target=target, seed=seed), load_file(folder / "model.safetensors")
        assert all(np.array_equal(found.trained.network.state_dict()[name], there[name]) for name in there)
        assert f"target {target}" in repr(found)
    assert len(results.predict(tables["north"], target="east")) == SITES["north"]
    with pytest.raises(UserError, match=r"target=.*east, south"):
        results.model()
    for wrong in ({"target": "west"}, {"target": "east", "seed": 7}, {"target": "east", "method": "fedavgg"}):
        with pytest.raises(UserError, match=r"east|0, 1|fedavg"):
            results.model(**wrong)
    assert "4 runs" in repr(results)
    verdict = results.verdict()
    assert verdict["method"] == "fedavg"
    assert all(why in str(verdict) for why in verdict["unknown"])
    assert "fedavg" in repr(results)
    page = results._repr_html_()
    assert all(f'<th scope="col">{target}</th>' in page for target in ("east", "south", "average"))


IMAGES = Preprocessing(kind="image", channels=1, size=4, shape=(1, 4, 4))
FEATURES = Preprocessing(kind="features", shape=(2,))


@pytest.mark.parametrize(
    ("preprocessing", "given"),
    [
        (FEATURES, np.array([[0.5, 1], [2, 3]])),
        (IMAGES, np.arange(32, dtype=np.uint8).reshape(2, 4, 4)),
        (IMAGES, np.arange(32, dtype=np.uint8).reshape(2, 4, 4, 1)),
    ],
)
def test_arrays_are_read_like_those_of_a_file(preprocessing: Preprocessing, given: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=given)
    names, read = samples_in_memory(given, preprocessing)
    assert names == ["0", "1"]
    assert np.array_equal(read, load_for_prediction(tmp_path / "new.npz", preprocessing)[1])
    assert np.array_equal(samples_in_memory(torch.from_numpy(given), preprocessing)[1], read)
    with pytest.raises(UserError, match="shape"):
        samples_in_memory(given[:, :1], preprocessing)


def test_features_may_be_integers_a_list_or_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    for given in (np.array([[1, 2]]), [[1, 2]], pandas.DataFrame({"a": [1], "b": [2]})):
        assert samples_in_memory(given, FEATURES)[1].tolist() == [[1.0, 2.0]]


@pytest.fixture(scope="module")
def run(results: Results) -> Path:
    return results.folder / "fedavg" / "east" / "seed-0"


@pytest.mark.slow
def test_an_onnx_file_gives_the_probabilities_of_the_run(run: Path, tables: dict[str, Path], tmp_path: Path) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import onnx
    import onnxruntime

    model = fedshift.Model.load(run)
    written = model.export("onnx", tmp_path)
    file = onnx.load(written.file)
    said = {entry.key: json.loads(entry.value) for entry in file.metadata_props}
    assert said["classes"] == ["ill", "well"]
    encoded = load_for_prediction(tables["north"], Preprocessing.model_validate(said["preprocessing"]))[1]
    (found,) = onnxruntime.InferenceSession(written.file).run(None, {"samples": encoded})
    assert np.allclose(found, model.predict_proba(tables["north"]), atol=1e-6)


@pytest.mark.parametrize("to", ["torchscript", "safetensors"])
def test_an_exported_file_gives_the_probabilities_of_the_run(
    to: str, run: Path, tables: dict[str, Path], tmp_path: Path
) -> None:
    model = fedshift.Model.load(run)
    written = model.export(to, tmp_path)
    wanted = model.predict_proba(tables["north"])
    if to == "safetensors":
        assert np.array_equal(fedshift.Model.load(written.file).predict_proba(tables["north"]), wanted)
    else:
        encoded = load_for_prediction(tables["north"], model.trained.stored)[1]
        assert np.allclose(torch.jit.load(written.file)(torch.from_numpy(encoded)).numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "shape"),
    [({"name": "mnist_cnn"}, (1, 12, 12)), ({"name": "unet", "width": 2, "levels": 2}, (3, 8, 8))],
)
def test_images_and_masks_are_exported_with_their_preprocessing(
    model: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    trained = untrained(model, shape)
    images = np.random.default_rng(0).integers(0, 256, (4, *shape), dtype=np.uint8)
    exported = torch.jit.load(export(trained, "torchscript", tmp_path).file)
    found = exported(torch.from_numpy(images).float()).numpy()
    if trained.segments:
        assert np.array_equal(found > trained.options.threshold, np.stack(list(trained.masks(images))))
    else:
        assert np.allclose(found, trained.probabilities(images), atol=1e-6)


def untrained(model: dict[str, Any], shape: tuple[int, ...]) -> TrainedModel:
    method = registry.parse({"name": "fedavg"})
    scale = {"mean": [0.4] * shape[0], "std": [0.2] * shape[0]}
    options = {"largest_component": False} if model["name"] == "unet" else {}
    metadata = {
        "method": {"name": "fedavg"},
        "model": {**model, **options},
        "input_shape": shape,
        "classes": ["one", "two"],
        "preprocessing": {"kind": "image", "channels": shape[0], "size": shape[1], "shape": shape, **scale},
        "sources": ["a"],
    }
    parsed = models.parse(metadata["model"])
    return from_weights(Weights(models.build(parsed, shape, 2, 0).state_dict()), metadata, method, parsed)


def test_a_model_whose_outputs_differ_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fedshift.Model.load(run)
    monkeypatch.setattr(torch.jit, "load", lambda _file: lambda samples: torch.full((len(samples), 2), 0.5))
    with pytest.raises(FedshiftError, match="differ"):
        model.export("torchscript", tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="onnx"):
        model.export("onx", tmp_path)


def test_model_cards_say_what_was_recorded(run: Path, results: Results, tmp_path: Path) -> None:
    model = fedshift.Model.load(run)
    model.export("safetensors", tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text == model.card()
    result = model.result
    assert result == results.runs[0]
    _, head, body = text.split("---\n", 2)
    (measured,) = yaml.safe_load(head)["model-index"][0]["results"]
    assert measured["dataset"]["split"] == "east"
    assert measured["metrics"][0]["value"] == pytest.approx(result.accuracy() / 100)
    said = result.data
    for site in ("north", "south", "east"):
        counts = [said[f"{part}_samples"].get(site, 0) for part in ("training", "unlabelled", "held_out", "measured")]
        assert "| " + " | ".join(map(str, [site, *counts])) + " |" in body
    assert set(result.bytes_up) == {"weights", "numbers"}
    assert all(f"| {kind} |" in body for kind in result.bytes_up)
    assert f"{result.accuracy():.2f}" in body
    assert all(f"* Warning of the run: {warning}" in body.replace("\\", "") for warning in result.warnings)
    hub = pytest.importorskip("huggingface_hub")
    (found,) = hub.ModelCard(text).data.eval_results
    assert (found.dataset_split, found.metric_value) == ("east", measured["metrics"][0]["value"])
    card = fedshift.Model.load(run / "model.safetensors").card()
    assert "model-index" not in card
    assert "## Measures" not in card
    assert "not measured" in card


@pytest.mark.case(
    "images to predict", "from Python: inverted colours said, grey refused; private training tells nothing"
)
def test_a_model_compares_images_with_those_of_its_training(tmp_path: Path) -> None:
    def model(**training: Any) -> fedshift.Model:
        draws = np.random.default_rng(0)
        sites = {name: ((draws.integers(0, 80, (40, 6, 6, 3))).astype(np.uint8), np.tile([0, 1], 20)) for name in "abc"}
        experiment = {
            "name": "private" if training else "plain",
            "data": {"sites": sites},
            "protocol": {"targets": ["c"], "seeds": [0]},
            "model": "linear",
            "training": {"rounds": 1, **training},
            "methods": ["fedavg"],
            "engine": {"threads": 1},
            "device": "cpu",
        }
        return fedshift.run(experiment, tmp_path).model()

    trained = model()
    images = np.random.default_rng(1).integers(0, 80, (20, 3, 6, 6)).astype(np.uint8)
    known = trained.metadata["training_images"]
    assert set(known) == {"mean", "std", "grey", "side"}  # of all images together; of no single one
    assert known["mean"] == pytest.approx(39.5 / 255, abs=0.005)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained.predict(images)
    with pytest.warns(UserWarning, match="pixels are 2[01]"):
        trained.predict(255 - images)
    grey = np.repeat(images[:, :1], 3, axis=1)
    with pytest.raises(UserError, match="100 % of the images are grey, in training 0 %"):
        trained.predict(grey)
    with pytest.warns(UserWarning, match="grey"):
        assert len(trained.predict(grey, accept_shift=True)) == 20
    pytest.importorskip("opacus")
    private = model(batch_size=8, privacy={"noise_multiplier": 4.0, "delta": 0.01})
    assert "training_images" not in private.metadata
    with pytest.raises(UserError, match="multiply images"):
        private.predict(images // 79)


@pytest.mark.case("files left out", "predict says which files have pages that it does not read")
def test_pages_that_are_not_predicted_are_named(tmp_path: Path) -> None:
    model = fedshift.Model(untrained({"name": "linear"}, (1, 4, 4)))
    page = Image.new("L", (4, 4), 7)
    page.save(tmp_path / "a.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(model.predict(tmp_path)) == 1
    page.save(tmp_path / "b.tif", save_all=True, append_images=[page, page])
    with pytest.warns(UserWarning, match=r"1 file has more than one page.*b\.tif"):
        assert len(model.predict(tmp_path)) == 2
