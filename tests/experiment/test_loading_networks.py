"""What trains can be loaded: networks of users, whatever their ends, constructors and form, after a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import strange_ends
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import experiment, features, save, sites
from torch import nn

import fedshift
from fedshift.errors import UserError
from fedshift.evaluation.predictions import PREDICTIONS
from fedshift.experiment.predict import load_model

FILE = strange_ends.__file__


def run(folder: Path, model: Any, **changes: Any) -> tuple[fedshift.Results, Path]:
    """A run, and its folder."""
    found = fedshift.run(experiment(sites(folder / "data"), model=model, **changes), folder / "runs")
    return found, next((folder / "runs").rglob("seed-0"))


def check_predictions(model: fedshift.Model, folder: Path, inputs: Any = None) -> None:
    """A loaded model says of the target's samples, bit for bit, what the run's own table of predictions says."""
    table = parquet.read_table(folder / PREDICTIONS).to_pydict()
    rows = [row for row, part in zip(table["row"], table["part"], strict=True) if part == "target"]
    assert rows
    probabilities = model.predict_proba((features(1)["x"] if inputs is None else inputs)[rows])
    for number, name in enumerate(model.classes_):
        kept = [one for one, part in zip(table[f"score_{name}"], table["part"], strict=True) if part == "target"]
        assert np.array_equal(np.asarray(kept, dtype=np.float32), probabilities[:, number])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("log_softmax", marks=pytest.mark.case("network ends", "log softmax")),
        pytest.param("softmax", marks=pytest.mark.case("network ends", "softmax")),
        pytest.param("sigmoid", marks=pytest.mark.case("network ends", "sigmoid")),
        pytest.param("tanh", marks=pytest.mark.case("network ends", "tanh")),
        pytest.param("relu", marks=pytest.mark.case("network ends", "relu")),
        pytest.param("scale", marks=pytest.mark.case("network ends", "scale")),
        pytest.param("learned_scale", marks=pytest.mark.case("network ends", "learned scale")),
        pytest.param("clamp", marks=pytest.mark.case("network ends", "clamp")),
        pytest.param("in_place_relu", marks=pytest.mark.case("network ends", "in place relu")),
        pytest.param("in_place_scale", marks=pytest.mark.case("network ends", "in place scale")),
        pytest.param("in_place_shift", marks=pytest.mark.case("network ends", "in place shift")),
        pytest.param("view", marks=pytest.mark.case("network ends", "view")),
        pytest.param("chunk", marks=pytest.mark.case("network ends", "chunk")),
        pytest.param("flip", marks=pytest.mark.case("network ends", "flip")),
        pytest.param("norm", marks=pytest.mark.case("network ends", "norm")),
        pytest.param("prior", marks=pytest.mark.case("network ends", "prior")),
        pytest.param("dropout", marks=pytest.mark.case("network ends", "dropout")),
        pytest.param("contiguous", marks=pytest.mark.case("network ends", "contiguous")),
        pytest.param("bfloat16", marks=pytest.mark.case("network ends", "bfloat16")),
    ],
)
def test_whatever_its_end_a_loaded_model_predicts_as_the_run_did(kind: str, tmp_path: Path) -> None:
    found, folder = run(tmp_path, {"name": f"{FILE}:End", "kind": kind})
    check_predictions(found.model(), folder)
    by_name = fedshift.Model.load(folder, network=f"{FILE}:End")
    check_predictions(by_name, folder)
    for to in ("torchscript", "safetensors"):
        by_name.export(to, tmp_path / to)  # refuses if its outputs differ
    check_predictions(
        fedshift.Model.load(tmp_path / "safetensors" / "model.safetensors", network=f"{FILE}:End"), folder
    )
    by_name.save(tmp_path / "again.safetensors")
    check_predictions(fedshift.Model.load(tmp_path / "again.safetensors", network=f"{FILE}:End"), folder)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("item", marks=pytest.mark.case("constructors that read tensors", "item")),
        pytest.param("tolist", marks=pytest.mark.case("constructors that read tensors", "tolist")),
        pytest.param("numpy", marks=pytest.mark.case("constructors that read tensors", "numpy")),
        pytest.param("branch", marks=pytest.mark.case("constructors that read tensors", "branch")),
        pytest.param("nonzero", marks=pytest.mark.case("constructors that read tensors", "nonzero")),
        pytest.param("cpu", marks=pytest.mark.case("constructors that read tensors", "cpu")),
    ],
)
def test_a_constructor_may_read_tensors(kind: str, tmp_path: Path) -> None:
    found, folder = run(tmp_path, {"name": f"{FILE}:Reads", "kind": kind})
    check_predictions(found.model(), folder)
    check_predictions(fedshift.Model.load(folder, network=f"{FILE}:Reads"), folder)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("log_softmax", marks=pytest.mark.case("model files without parts", "log softmax")),
        pytest.param("scale", marks=pytest.mark.case("model files without parts", "scale")),
        pytest.param("relu", marks=pytest.mark.case("model files without parts", "relu")),
        pytest.param("dropout", marks=pytest.mark.case("model files without parts", "dropout")),
        pytest.param("in_place_scale", marks=pytest.mark.case("model files without parts", "in place scale")),
    ],
)
def test_a_file_that_says_nothing_of_its_parts_loads(kind: str, tmp_path: Path) -> None:
    """Files of earlier versions do not say what the parts are."""
    _, folder = run(tmp_path, {"name": f"{FILE}:End", "kind": kind})
    file = folder / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        metadata = json.loads(opened.metadata()["fedshift"])
    assert metadata.pop("parts")["classifier"] is None
    save_file(load_file(file), file, {"fedshift": json.dumps(metadata)})
    (folder / "SHA256SUMS").unlink()
    check_predictions(fedshift.Model.load(folder, network=f"{FILE}:End"), folder)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3), nn.LogSoftmax(1))


def test_a_network_given_as_an_object_predicts_after_the_run(tmp_path: Path) -> None:
    module = net()
    found, folder = run(tmp_path, module)
    check_predictions(found.model(), folder)
    assert len(found.predict(features(1)["x"])) == 30
    check_predictions(fedshift.Model.load(folder, network=module), folder)
    with pytest.warns(UserWarning, match="may differ"):  # its start weights are others, and do not matter
        check_predictions(fedshift.Model.load(folder, network=net()), folder)
    later = fedshift.results(tmp_path / "runs", experiment(sites(tmp_path / "data"), model=module))
    check_predictions(later.model(), folder)
    with pytest.raises(UserError, match=r"Model\.load"):
        fedshift.results(tmp_path / "runs").predict(features(1)["x"])
    with pytest.warns(UserWarning, match="may differ"), pytest.raises(UserError, match="does not fit the network"):
        fedshift.Model.load(folder, network=nn.Linear(5, 3))
    assert found.model().export("torchscript", tmp_path / "out").difference < 1e-4


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(strange_ends.End, marks=pytest.mark.case("network objects", "a class with options")),
        pytest.param(lambda shape, classes: nn.Linear(*shape, classes), marks=pytest.mark.case("network objects", "λ")),
        pytest.param(
            nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(3)), marks=pytest.mark.case("network objects", "lazy")
        ),
        pytest.param(nn.Linear(5, 3), marks=pytest.mark.case("network objects", "a layer")),
    ],
)
def test_objects_of_every_form_predict_after_the_run(model: Any, tmp_path: Path) -> None:
    found, folder = run(tmp_path, {"name": model, "kind": "softmax"} if model is strange_ends.End else model)
    check_predictions(found.model(), folder)
    check_predictions(fedshift.Model.load(folder, network=model), folder)


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "feddyn", "alone"])
def test_a_network_without_a_classifier_loads_after_every_kind_of_method(method: str, tmp_path: Path) -> None:
    found, folder = run(tmp_path, {"name": f"{FILE}:End", "kind": "scale"}, methods=[method])
    check_predictions(found.model(), folder)


# A file of a stranger ------------------------------------------------------------------------------------------------

WIDE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes, width=6, how="linear"):
        super().__init__()
        if how == "rand":
            torch.rand(width)
        if how == "many":
            self.more = [torch.zeros(1_000_000) for _ in range(width // 1_000_000)]
        self.first, self.last = nn.Linear(input_shape[0], width if how == "linear" else 6), nn.LazyLinear(classes)

    def forward(self, x):
        return self.last(self.first(x)).log_softmax(1)
"""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"width": 10**11}, marks=pytest.mark.case("sizes in a model file", "a wide layer")),
        pytest.param({"width": 10**12, "how": "rand"}, marks=pytest.mark.case("sizes in a model file", "a large draw")),
        pytest.param({"width": 10**9, "how": "many"}, marks=pytest.mark.case("sizes in a model file", "many buffers")),
    ],
)
def test_options_in_a_file_do_not_take_the_memory(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WIDE)
    _, folder = run(tmp_path, {"name": f"{tmp_path}/own.py:Net"})
    file = folder / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        metadata = json.loads(opened.metadata()["fedshift"])
    metadata["model"] |= options
    save_file(load_file(file), file, {"fedshift": json.dumps(metadata)})
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match="much larger than the file"):
        load_model(folder, own_network=f"{tmp_path}/own.py:Net")


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"classifier": "first"}, marks=pytest.mark.case("parts in a model file", "another layer")),
        pytest.param({"classifier": "gone"}, marks=pytest.mark.case("parts in a model file", "no such layer")),
        pytest.param({"classifier": ""}, marks=pytest.mark.case("parts in a model file", "the whole network")),
        pytest.param({"stages": {"a": "x.y"}}, marks=pytest.mark.case("parts in a model file", "no such stage")),
        pytest.param({"aligned": ["a"]}, marks=pytest.mark.case("parts in a model file", "a stage without a path")),
        pytest.param({"embedding_size": -1}, marks=pytest.mark.case("parts in a model file", "a negative width")),
        pytest.param({"more": 1}, marks=pytest.mark.case("parts in a model file", "an unknown field")),
        pytest.param("text", marks=pytest.mark.case("parts in a model file", "no mapping")),
    ],
)
def test_wrong_parts_in_a_file_are_told_in_one_line(parts: Any, tmp_path: Path) -> None:
    _, folder = run(tmp_path, {"name": f"{FILE}:End", "kind": "scale"})
    file = folder / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        metadata = json.loads(opened.metadata()["fedshift"])
    metadata["parts"] = metadata["parts"] | parts if isinstance(parts, dict) else parts
    save_file(load_file(file), file, {"fedshift": json.dumps(metadata)})
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match="does not fit the network") as told:
        load_model(folder, own_network=f"{FILE}:End")
    assert "\n" not in str(told.value)


def test_parts_are_those_that_the_run_stored(tmp_path: Path) -> None:
    """A module with other weights may look otherwise: here it is the file that says where the classifier is."""
    found, folder = run(tmp_path, net()[:3])
    with safe_open(str(folder / "model.safetensors"), framework="pt") as opened:
        assert json.loads(opened.metadata()["fedshift"])["parts"]["classifier"] == "2"
        assert "classifier.weight" in opened.keys()  # noqa: SIM118
    zeros = net()[:3]
    for parameter in zeros.parameters():
        nn.init.zeros_(parameter)
    with pytest.warns(UserWarning, match="may differ"):
        check_predictions(fedshift.Model.load(folder, network=zeros), folder)
    assert found.model().trained.network.classifier.in_features == 6


# Before training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(
            "complex", r"complex64 \('weight'\)", marks=pytest.mark.case("networks that cannot train", "complex")
        ),
        pytest.param(
            "sparse",
            r"sparse gradients \('embedding.weight'\).*sparse=False",
            marks=pytest.mark.case("networks that cannot train", "sparse"),
        ),
        pytest.param(
            "tuple",
            "returns tuple while it trains.*scores alone",
            marks=pytest.mark.case("networks that cannot train", "tuple"),
        ),
        pytest.param(
            "features_tuple",
            "returns tuple while it trains",
            marks=pytest.mark.case("networks that cannot train", "features tuple"),
        ),
        pytest.param(
            "dict", "returns dict while it trains", marks=pytest.mark.case("networks that cannot train", "dict")
        ),
        pytest.param(
            "list", "returns list while it trains", marks=pytest.mark.case("networks that cannot train", "list")
        ),
        pytest.param(
            "none", "returns NoneType while it trains", marks=pytest.mark.case("networks that cannot train", "none")
        ),
        pytest.param("sum", r"shape \(\) while it trains", marks=pytest.mark.case("networks that cannot train", "sum")),
        pytest.param(
            "raises",
            r"strange_ends\.py, line \d+\): KeyError",
            marks=pytest.mark.case("networks that cannot train", "raises"),
        ),
        pytest.param(
            "in_place", "RuntimeError: .*inplace", marks=pytest.mark.case("networks that cannot train", "in place")
        ),
        pytest.param("detached", "RuntimeError", marks=pytest.mark.case("networks that cannot train", "detached")),
    ],
)
def test_a_network_that_cannot_train_is_told_in_one_line_before(kind: str, words: str, tmp_path: Path) -> None:
    options = experiment(sites(tmp_path / "data"), model={"name": f"{FILE}:Unfit", "kind": kind})
    for call in (fedshift.check, lambda one: fedshift.run(one, tmp_path / "runs")):
        with pytest.raises(UserError, match=rf"model 'strange_ends\.py:Unfit'.*{words}") as told:
            call(options)
        assert "\n" not in str(told.value)
    assert not list((tmp_path / "runs").rglob("rounds.jsonl"))


@pytest.mark.case("networks that cannot train", "tokens beyond the vocabulary")
def test_tokens_beyond_the_vocabulary_are_told_in_one_line(tmp_path: Path) -> None:
    def tokens(seed: int) -> dict[str, Any]:
        x = np.random.default_rng(seed).integers(0, 3, (30, 4)).astype(np.float32)
        x[20, 1] = 7
        return {"x": x, "y": np.arange(30) % 3}

    where = save(tmp_path / "data", a=tokens(1), b=tokens(2), c=tokens(3))
    options = experiment(where, model={"name": f"{FILE}:Unfit", "kind": "tokens"})
    for call in (fedshift.check, lambda one: fedshift.run(one, tmp_path / "runs")):
        with pytest.raises(
            UserError, match=r"training with it fails \(strange_ends\.py, line \d+\): IndexError"
        ) as told:
            call(options)
        assert "\n" not in str(told.value)


@pytest.mark.case("networks that cannot train", "auxiliary classifiers of torchvision")
def test_auxiliary_classifiers_are_told_in_one_line(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (6, 64, 64, 3)).astype(np.uint8)
    where = save(tmp_path / "data", **{site: {"x": x, "y": np.arange(6) % 2} for site in "abc"})
    named = {"name": "torchvision:googlenet", "init_weights": False}
    whole = experiment(where, model=named)
    with pytest.raises(UserError, match=r"GoogLeNetOutputs while it trains.*aux_logits: false"):
        fedshift.check(whole)


STATE = """
import itertools
from torch import nn

COUNT = itertools.count()

class Net(nn.Module):
    def __init__(self, input_shape, classes, kind):
        super().__init__()
        self.kind, self.number = kind, next(COUNT)
        self.last = nn.Linear(input_shape[0] , classes)
        if kind == "shape" and self.number > 2:
            self.more = nn.Linear(2, 2)
        if kind == "ends":
            assert self.number < 3, "only once"

    def forward(self, x):
        scores = self.last(x)
        return (scores * (1 + self.number)).log_softmax(1) if self.kind == "values" else scores
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(
            "shape", "could not be loaded|loading state_dict", marks=pytest.mark.case("unlike twins", "another layer")
        ),
        pytest.param("values", "predicts something else", marks=pytest.mark.case("unlike twins", "another factor")),
        pytest.param("ends", "only once", marks=pytest.mark.case("unlike twins", "made only a few times")),
    ],
)
def test_check_tries_to_load_and_to_predict(kind: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STATE)
    model = {"name": f"{tmp_path}/own.py:Net", "kind": kind}
    with pytest.raises(UserError, match=words) as told:
        fedshift.check(experiment(sites(tmp_path / "data"), model=model))
    assert "\n" not in str(told.value)


@pytest.mark.case("exports", "a branch on values")
def test_check_says_what_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.last(x)
            return scores if x.sum() > x.numel() else 2 * scores

    pytest.importorskip("onnxscript")
    found = fedshift.check(experiment(sites(tmp_path / "data"), model=Branch()))
    assert any("export --to onnx will fail" in warning for warning in found.warnings)
