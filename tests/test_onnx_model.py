"""An exported model over HTTP says what fedshift says, with the same guard, and without torch."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

import fedshift
from fedshift.cli.serve import LARGEST_BODY, PredictServer
from fedshift.data.domain import Preprocessing
from fedshift.errors import UserError
from fedshift.onnx_model import LEFT_OUT, OnnxModel, TooUnlike

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
SITES = ("north", "south", "east", "west")
CONTAINER = Path(__file__).parents[1] / "examples" / "deploy" / "predict" / "Containerfile"
Row = dict[str, Any]


def patients(seed: int, n: int = 90) -> list[Row]:
    """Patients whose illness depends on age and pressure; some are exceptions."""
    rng = np.random.default_rng(seed)
    age, pressure = rng.normal(55 + 2 * (seed % 4), 10, n), rng.normal(120 + seed % 4, 15, n)
    ill = (age - 55) / 10 + (pressure - 120) / 15 + 0.8 * rng.normal(size=n) > 0
    return [
        {"age": round(float(a), 1), "pressure": round(float(p), 1), "sex": "fm"[row % 2], "outcome": "ny"[int(y)]}
        for row, (a, p, y) in enumerate(zip(age, pressure, ill, strict=True))
    ]


def written(path: Path, rows: list[Row]) -> Path:
    path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[fedshift.Model, Path]:
    """A model whose runs beside it left other sites out, and the folder of its export. The sites' data are gone."""
    place = tmp_path_factory.mktemp("served")
    files = {name: written(place / f"{name}.csv", patients(at)) for at, name in enumerate(SITES)}
    data = {"name": "table", "sites": {name: str(file) for name, file in files.items()}, "label": "outcome"}
    results = fedshift.run(
        {
            "name": "served",
            "data": {**data, "numeric": ["age", "pressure"], "categorical": ["sex"]},
            "protocol": {"targets": "all", "seeds": [0]},
            "model": "linear",
            "training": {"rounds": 8, "batch_size": 16, "lr": 0.1},
            "methods": ["fedavg"],
            "engine": {"threads": 1},
            "evaluation": {"resamples": 0},
            "device": "cpu",
        },
        place / "runs",
    )
    for file in files.values():
        file.unlink()
    model = fedshift.Model.load(results.folder / "fedavg" / "east" / "seed-0")
    model.export("onnx", place / "exported")
    return model, place / "exported"


@pytest.fixture(scope="module")
def port(exported: tuple[fedshift.Model, Path]) -> Iterator[int]:
    with PredictServer(OnnxModel.load(exported[1]), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """The status and the JSON of an answer; ``body`` as JSON, or as bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request("GET" if body is None else "POST", path, data, sent)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def without_labels(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "outcome"} for row in rows]


def test_rows_are_predicted_as_fedshift_predicts_their_file(
    exported: tuple[fedshift.Model, Path], port: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = patients(9, 60)
    rows[3]["sex"] = ""
    status, said = ask(port, "/predict", {"rows": without_labels(rows)})
    assert (status, said["warning"]) == (200, None)
    file = written(tmp_path / "new.csv", rows)
    wanted = exported[0].predict_proba(file)
    found = [[prediction["probabilities"][name] for name in exported[0].classes_] for prediction in said["predictions"]]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert [prediction["predicted"] for prediction in said["predictions"]] == exported[0].predict(file).tolist()
    assert capfd.readouterr() == ("", "")  # no sample, no address in any log
    model, rows = OnnxModel.load(exported[1]), without_labels(patients(9, 5))
    del rows[0]["sex"]
    forwards, backwards = (model.predict(order)["predictions"] for order in (rows, rows[::-1]))
    assert [forward["probabilities"] for forward in forwards] == [
        backward["probabilities"] for backward in backwards[::-1]
    ]


def test_a_batch_that_looks_too_unlike_is_refused_in_the_words_of_fedshift(
    exported: tuple[fedshift.Model, Path], port: int, tmp_path: Path
) -> None:
    rows = [{**row, "age": row["age"] * 12} for row in patients(9, 60)]  # months
    status, said = ask(port, "/predict", {"rows": without_labels(rows)})
    assert status == 422
    refusal = exported[0].shift(written(tmp_path / "new.csv", rows)).refusal
    assert refusal is not None
    assert said["error"].startswith(refusal)
    status, said = ask(port, "/predict", {"rows": without_labels(rows), "accept_shift": True})
    assert (status, len(said["predictions"])) == (200, 60)
    assert "column 'age'" in said["warning"]


def test_the_estimate_is_that_of_fedshift_from_the_same_scores(
    exported: tuple[fedshift.Model, Path], port: int, tmp_path: Path
) -> None:
    rows = patients(9, 200)
    status, said = ask(port, "/estimate", {"rows": without_labels(rows)})
    wanted = exported[0].estimate(written(tmp_path / "new.csv", rows)).plain()
    assert (status, wanted["abstain"], wanted["sites"]) == (200, False, 4)
    assert said["reasons"] == wanted["reasons"]
    for name in ("estimate", "low", "high", "usual"):
        assert said[name] == pytest.approx(wanted[name], abs=0.01)
    right = 100 * np.mean([one == row["outcome"] for one, row in zip(_answers(exported[1], rows), rows, strict=True)])
    assert said["low"] < right < said["high"]
    harmed = [{**row, "age": row["age"] * 12} for row in rows]
    assert ask(port, "/estimate", {"rows": without_labels(harmed)})[1]["abstain"]


def _answers(folder: Path, rows: list[Row]) -> list[str]:
    return [
        prediction["predicted"] for prediction in OnnxModel.load(folder).predict(without_labels(rows))["predictions"]
    ]


def test_what_is_no_request_is_refused(port: int) -> None:
    good = {"rows": without_labels(patients(9, 1))}
    assert ask(port, "/healthz") == (200, {"status": "ok", "task": "classification", "classes": ["n", "y"]})
    assert ask(port, "/predict", good)[0] == 200
    assert ask(port, "/predict", b"[" * 10_000)[0] == 400
    assert "rows" in ask(port, "/predict", {})[1]["error"]
    assert "rows" in ask(port, "/predict", {"rows": []})[1]["error"]
    assert ask(port, "/predict", {**good, "accept": True})[0] == 400
    for cell in ([1], {"a": 1}, "old"):
        assert ask(port, "/predict", {"rows": [{"age": cell, "pressure": 120, "sex": "f"}]})[0] == 400
    assert "pressure" in ask(port, "/predict", {"rows": [{"age": 50, "sex": "f"}]})[1]["error"]
    assert ask(port, "/predict", {"rows": [[1, 2, 3]]})[0] == 400
    assert ask(port, "/elsewhere", good)[0] == 404
    assert ask(port, "/")[0] == 404
    assert ask(port, "/predict", good, Content_Type="text/plain")[0] == 415
    assert ask(port, "/predict", good, Host="evil.example")[0] == 403
    assert ask(port, "/predict", b"{}", Content_Length=str(LARGEST_BODY + 1))[0] == 413
    assert ask(port, "/predict", b"{}", Content_Length="9" * 30)[0] == 413


def test_sums_of_another_model_are_refused(exported: tuple[fedshift.Model, Path], tmp_path: Path) -> None:
    for file in exported[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    sums = json.loads((tmp_path / LEFT_OUT).read_text())
    assert set(sums["sites"]) == set(SITES)
    (tmp_path / LEFT_OUT).write_text(json.dumps({**sums, "model": "0" * 64}))
    with pytest.raises(UserError, match="of another model"):
        OnnxModel.load(tmp_path)
    (tmp_path / LEFT_OUT).write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        OnnxModel.load(tmp_path)
    (tmp_path / LEFT_OUT).unlink()
    (reason, *_) = OnnxModel.load(tmp_path).estimate(without_labels(patients(9, 60))).reasons
    assert reason.startswith("too few sites")
    (tmp_path / "model.onnx").write_bytes(b"none")
    with pytest.raises(UserError, match="model of fedshift export"):
        OnnxModel.load(tmp_path)


def test_arrays_and_other_tasks_are_told_as_they_are(exported: tuple[fedshift.Model, Path]) -> None:
    model = OnnxModel.load(exported[1])
    features = model.preprocessing.model_copy(update={"kind": "features", "table": None, "shape": None})
    of_features = replace(model, preprocessing=features)
    width = model.metadata["input_shape"][0]
    assert len(of_features.predict(np.zeros((3, width)).tolist())["predictions"]) == 3
    for rows in ([[0.0] * (width + 1)], [[0.0] * width, [0.0]], [["a"] * width], [[float("nan")] * width]):
        with pytest.raises(UserError, match="rows"):
            of_features.predict(rows)
    rows = [[0.0] * width]
    (one,) = replace(of_features, task="regression").predict(rows)["predictions"]
    assert isinstance(one["predicted"], float)
    (one,) = replace(of_features, task="multi_label").predict(rows)["predictions"]
    assert one["predicted"] == ", ".join(name for name, share in one["probabilities"].items() if share > 0.5)


def test_images_are_compared_with_those_of_the_training(exported: tuple[fedshift.Model, Path]) -> None:
    class Session:
        def run(self, _: None, inputs: dict[str, Any]) -> list[Any]:
            assert inputs["samples"].dtype == np.float32
            return [np.full((len(inputs["samples"]), 2), 0.5)]

    stored = Preprocessing(kind="image", channels=1, size=4, shape=(1, 4, 4))
    model = replace(OnnxModel.load(exported[1]), session=Session(), preprocessing=stored)
    images = np.random.default_rng(0).integers(0, 256, (12, 1, 4, 4))
    assert len(model.predict(images.tolist())["predictions"]) == 12
    with pytest.raises(TooUnlike, match="multiply images"):
        model.predict((images > 128).astype(int).tolist())
    for rows in (images + 1, images[0], images / 255):
        with pytest.raises(UserError, match="0 to 255"):
            model.predict(rows.tolist())


def installed_with(names: set[str]) -> set[str]:
    """These packages and those that they need."""
    found: set[str] = set()
    while names:
        name = names.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            needed = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
        except importlib.metadata.PackageNotFoundError:
            continue
        names |= {one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
    return found


PROGRAM = """
import importlib.abc, json, sys
hidden = set(json.loads(sys.argv[1]))
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Hidden())
from fedshift.cli.app import command
command()
from fedshift.cli.serve import OnnxModel
model, rows = OnnxModel.load(sys.argv[2]), json.loads(sys.argv[3])
assert "torch" not in sys.modules
print(json.dumps([model.predict(rows), model.estimate(rows).plain()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not CONTAINER.is_file(), reason="examples/ is not beside these tests")
def test_it_runs_with_what_the_container_installs(exported: tuple[fedshift.Model, Path], port: int) -> None:
    """Every other package is hidden, torch among them."""
    (line,) = re.findall(r"pip install --no-cache-dir -c \S+ (.*)", CONTAINER.read_text())
    there = installed_with({*line.split()}) | {"fedshift"}
    assert "torch" not in there
    modules = importlib.metadata.packages_distributions()
    hidden = [name for name, by in modules.items() if not {one.lower().replace("_", "-") for one in by} & there]
    assert {"torch", "onnx", "pandas", "sklearn", "safetensors"} & set(modules) <= set(hidden)
    rows = without_labels(patients(9, 60))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(hidden), str(exported[1]), json.dumps(rows)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ask(port, "/predict", {"rows": rows})[1],
        ask(port, "/estimate", {"rows": rows})[1],
    ]
