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
from tried import case, cases, slow_after

FILE = strange_ends.__file__


def run(folder: Path, model: Any, **changes: Any) -> tuple[fedshift.Results, Path]:
    """A run, and its folder."""
    found = fedshift.run(experiment(sites(folder / "data"), model=model, **changes), folder / "runs")
    return found, next((folder / "runs").rglob("seed-0"))


def alter(folder: Path, change: Any) -> None:
    """Write the description in a run's model file anew, as a stranger may."""
    file = folder / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        metadata = json.loads(opened.metadata()["fedshift"])
    change(metadata)
    save_file(load_file(file), file, {"fedshift": json.dumps(metadata)})
    (folder / "SHA256SUMS").unlink()


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
    slow_after(
        4,
        [
            "scale_where_it_predicts",
            case("network ends", "log softmax", "log_softmax"),
            case("network ends", "softmax", "softmax"),
            case("network ends", "sigmoid", "sigmoid"),
            case("network ends", "tanh", "tanh"),
            case("network ends", "relu", "relu"),
            case("network ends", "scale", "scale"),
            case("network ends", "learned scale", "learned_scale"),
            case("network ends", "clamp", "clamp"),
            case("network ends", "in place relu", "in_place_relu"),
            case("network ends", "in place scale", "in_place_scale"),
            case("network ends", "in place shift", "in_place_shift"),
            case("network ends", "view", "view"),
            case("network ends", "chunk", "chunk"),
            case("network ends", "flip", "flip"),
            case("network ends", "norm", "norm"),
            case("network ends", "prior", "prior"),
            case("network ends", "dropout", "dropout"),
            case("network ends", "contiguous", "contiguous"),
            case("network ends", "bfloat16", "bfloat16"),
        ],
    ),
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
        case("constructors that read tensors", "item", "item"),
        case("constructors that read tensors", "tolist", "tolist"),
        case("constructors that read tensors", "numpy", "numpy"),
        case("constructors that read tensors", "branch", "branch"),
        case("constructors that read tensors", "nonzero", "nonzero"),
        case("constructors that read tensors", "cpu", "cpu"),
    ],
)
def test_a_constructor_may_read_tensors(kind: str, tmp_path: Path) -> None:
    found, folder = run(tmp_path, {"name": f"{FILE}:Reads", "kind": kind})
    check_predictions(found.model(), folder)
    check_predictions(fedshift.Model.load(folder, network=f"{FILE}:Reads"), folder)


@pytest.mark.parametrize(
    "kind",
    [
        case("model files without parts", "log softmax", "log_softmax"),
        case("model files without parts", "scale", "scale"),
        case("model files without parts", "relu", "relu"),
        case("model files without parts", "dropout", "dropout"),
        case("model files without parts", "in place scale", "in_place_scale"),
    ],
)
def test_a_file_that_says_nothing_of_its_parts_loads(kind: str, tmp_path: Path) -> None:
    """Files of earlier versions do not say what the parts are."""
    _, folder = run(tmp_path, {"name": f"{FILE}:End", "kind": kind})
    parts: list[Any] = []
    alter(folder, lambda metadata: parts.append(metadata.pop("parts")))
    assert parts[0]["classifier"] is None
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
        case("network objects", "a class with options", strange_ends.End),
        case("network objects", "λ", lambda shape, classes: nn.Linear(*shape, classes)),
        case("network objects", "lazy", nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(3))),
        case("network objects", "a layer", nn.Linear(5, 3)),
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
        case("sizes in a model file", "a wide layer", {"width": 10**11}),
        case("sizes in a model file", "a large draw", {"width": 10**12, "how": "rand"}),
        case("sizes in a model file", "many buffers", {"width": 10**9, "how": "many"}),
    ],
)
def test_options_in_a_file_do_not_take_the_memory(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(WIDE)
    _, folder = run(tmp_path, {"name": f"{tmp_path}/own.py:Net"})
    alter(folder, lambda metadata: metadata["model"].update(options))
    with pytest.raises(UserError, match="much larger than the file"):
        load_model(folder, own_network=f"{tmp_path}/own.py:Net")


@pytest.mark.parametrize(
    "parts",
    [
        case("parts in a model file", "another layer", {"classifier": "first"}),
        case("parts in a model file", "no such layer", {"classifier": "gone"}),
        case("parts in a model file", "the whole network", {"classifier": ""}),
        case("parts in a model file", "no such stage", {"stages": {"a": "x.y"}}),
        case("parts in a model file", "a stage without a path", {"aligned": ["a"]}),
        case("parts in a model file", "a negative width", {"embedding_size": -1}),
        case("parts in a model file", "an unknown field", {"more": 1}),
        case("parts in a model file", "no mapping", "text"),
    ],
)
def test_wrong_parts_in_a_file_are_told_in_one_line(parts: Any, tmp_path: Path) -> None:
    _, folder = run(tmp_path, {"name": f"{FILE}:End", "kind": "scale"})
    alter(folder, lambda about: about.update(parts=about["parts"] | parts if isinstance(parts, dict) else parts))
    with pytest.raises(UserError, match="does not fit the network") as caught:
        load_model(folder, own_network=f"{FILE}:End")
    assert "\n" not in str(caught.value)


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


@cases(
    "networks that cannot train",
    "kind words",
    {
        "complex": ("complex", r"complex64 \('weight'\)"),
        "sparse": ("sparse", r"sparse gradients \('embedding.weight'\).*sparse=False"),
        "tuple": ("tuple", "returns tuple while it trains.*scores alone"),
        "features tuple": ("features_tuple", "returns tuple while it trains"),
        "dict": ("dict", "returns dict while it trains"),
        "list": ("list", "returns list while it trains"),
        "none": ("none", "returns NoneType while it trains"),
        "sum": ("sum", r"shape \(\) while it trains"),
        "raises": ("raises", r"strange_ends\.py, line \d+\): KeyError"),
        "in place": ("in_place", "RuntimeError: .*inplace"),
        "detached": ("detached", "RuntimeError"),
    },
)
def test_a_network_that_cannot_train_is_told_in_one_line_before(kind: str, words: str, tmp_path: Path) -> None:
    options = experiment(sites(tmp_path / "data"), model={"name": f"{FILE}:Unfit", "kind": kind})
    for call in (fedshift.check, lambda one: fedshift.run(one, tmp_path / "runs")):
        with pytest.raises(UserError, match=rf"model 'strange_ends\.py:Unfit'.*{words}") as caught:
            call(options)
        assert "\n" not in str(caught.value)
    assert not list((tmp_path / "runs").rglob("rounds.jsonl"))


@pytest.mark.slow
@pytest.mark.case("networks that cannot train", "tokens beyond the vocabulary")
@pytest.mark.case("networks that cannot train", "auxiliary classifiers of torchvision")
def test_networks_that_only_some_data_break(tmp_path: Path) -> None:
    def tokens(seed: int) -> dict[str, Any]:
        x = np.random.default_rng(seed).integers(0, 3, (30, 4)).astype(np.float32)
        x[20, 1] = 7
        return {"x": x, "y": np.arange(30) % 3}

    where = save(tmp_path / "data", a=tokens(1), b=tokens(2), c=tokens(3))
    options = experiment(where, model={"name": f"{FILE}:Unfit", "kind": "tokens"})
    for call in (fedshift.check, lambda one: fedshift.run(one, tmp_path / "runs")):
        with pytest.raises(
            UserError, match=r"training with it fails \(strange_ends\.py, line \d+\): IndexError"
        ) as caught:
            call(options)
        assert "\n" not in str(caught.value)
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
        case("unlike twins", "another layer", "shape", "could not be loaded|loading state_dict"),
        case("unlike twins", "another factor", "values", "predicts something else"),
        case("unlike twins", "made only a few times", "ends", "only once"),
    ],
)
def test_check_tries_to_load_and_to_predict(kind: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STATE)
    model = {"name": f"{tmp_path}/own.py:Net", "kind": kind}
    with pytest.raises(UserError, match=words) as caught:
        fedshift.check(experiment(sites(tmp_path / "data"), model=model))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
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
