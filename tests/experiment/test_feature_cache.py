"""The cache of frozen features: what recomputes it and what does not, cut-off files, mistakes, prediction."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calling import Cli
from safetensors import safe_open
from safetensors.torch import load_file
from small import Stop, write

import fedshift
from fedshift import encryption
from fedshift.data.locate import cache_dir
from fedshift.errors import UserError
from fedshift.experiment import features as cache
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.features import build_data
from fedshift.experiment.predict import load_model
from fedshift.models import registry as models
from tried import slow

SIDE = 32


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two files of MobileNetV2 weights, drawn instead of trained."""
    found = {}
    for number, name in enumerate(("one", "two")):
        network = models.build(models.parse({"name": "mobilenet_v2"}), (3, SIDE, SIDE), 1000, number)
        backbone = network.features.backbone
        assert isinstance(backbone, torch.nn.Module)
        state = {key: value.numpy() for key, value in backbone.state_dict().items()}
        found[name] = tmp_path_factory.mktemp("weights") / f"{name}.npz"
        np.savez(found[name], **state)
    return found


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


def pictures(folder: Path, **changes: Any) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    out = {}
    for number, (name, samples) in enumerate({"a": 70, "b": 12, **changes}.items()):
        rng = np.random.default_rng(number)
        x, y = rng.integers(0, 255, (samples, 3, SIDE, SIDE), dtype=np.uint8), np.arange(samples) % 3
        np.savez(folder / f"{name}.npz", x=x, y=y)
        out[name] = str(folder / f"{name}.npz")
    return out


def experiment(where: dict[str, str], file: Path, **changes: Any) -> dict[str, Any]:
    model = {"name": "frozen", "backbone": {"name": "mobilenet_v2", "pretrained": str(file)}, "head": "linear"}
    return {
        "name": "frozen",
        "data": {"name": "arrays", "sites": where},
        "protocol": {"kind": "source_target", "pairs": [["a", "b"]], "splits": 1},
        "training": {"rounds": 1, "batch_size": 16},
        "methods": ["fedavg"],
        "engine": {"threads": 1},
        "device": "cpu",
        **changes,
        "model": {**model, **changes.get("model", {})},
    }


class Counting(cache.Watcher):
    def __init__(self, stop_after: int | None = None) -> None:
        self.images = 0
        self.warnings: list[str] = []
        self._stop_after = stop_after

    def on_extracted(self, images: int) -> None:
        self.images += images
        if self._stop_after is not None and self.images >= self._stop_after:
            raise Stop

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def computed(options: dict[str, Any]) -> int:
    watcher = Counting()
    build_data(parse(options), watcher=watcher)
    assert not watcher.warnings
    return watcher.images


def files() -> list[Path]:
    return sorted(cache_dir().glob("features-*.safetensors"))


def test_features_are_those_of_the_backbone_in_half_precision(tmp_path: Path, weights: dict[str, Path]) -> None:
    where = pictures(tmp_path)
    data = build_data(parse(experiment(where, weights["one"])))
    inputs = data.domains["b"].inputs
    assert inputs.shape == (12, 1280)  # type: ignore[union-attr]
    assert data.preprocessing.kind == "features"
    network = models.build(
        models.parse({"name": "mobilenet_v2", "pretrained": str(weights["one"])}), (3, SIDE, SIDE), 2, 0
    )
    images = torch.from_numpy(np.load(where["b"])["x"]).float() / 255
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        expected = network.features.eval()((images - mean) / std)
    torch.testing.assert_close(torch.from_numpy(inputs), expected, atol=1e-3, rtol=2e-3)
    assert all(load_file(file)["features"].dtype == torch.float16 for file in files())


@pytest.mark.slow
def test_what_recomputes_and_what_does_not(tmp_path: Path, weights: dict[str, Path]) -> None:
    """Images, weights and transform do; a site's name, labels, head, method, seed and the place of files do not."""
    where = pictures(tmp_path / "data")
    options = experiment(where, weights["one"])
    assert computed(options) == 82
    assert computed(options) == 0
    moved = tmp_path / "moved.npz"
    moved.write_bytes(weights["one"].read_bytes())
    relabelled = pictures(tmp_path / "again")
    arrays = dict(np.load(relabelled["a"]))
    np.savez(relabelled["a"], x=arrays["x"], y=(arrays["y"] + 1) % 3)
    renamed = {"z": relabelled["a"], "y": relabelled["b"]}
    same = experiment(renamed, moved, methods=["fedprox"], model={"head": {"name": "mlp", "hidden": [4]}}, name="other")
    assert computed({**same, "protocol": {"kind": "leave_one_out", "targets": "z"}}) == 0
    assert len(files()) == 2

    changed = dict(np.load(where["b"]))
    changed["x"] = changed["x"].copy()
    changed["x"][3, 0, 0, 0] ^= 1
    np.savez(where["b"], **changed)
    assert computed(options) == 12  # that site alone
    assert computed(experiment(where, weights["two"])) == 82
    assert computed(experiment(where, weights["one"], model={"scale": "half"})) == 82
    assert computed(experiment(where, weights["one"], model={"size": 40})) == 82
    assert computed(options) == 0


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, weights: dict[str, Path]) -> None:
    where = pictures(tmp_path / "data", a=200)
    options = experiment(where, weights["one"])
    whole = build_data(parse(options)).domains["a"].inputs
    for file in files():
        file.unlink()
    with pytest.raises(Stop):
        build_data(parse(options), watcher=Counting(stop_after=128))
    assert not files()
    (part,) = cache_dir().glob("features-*.part")
    with open(part, "ab") as stream:
        stream.write(b"half a row")
    watcher = Counting()
    found = build_data(parse(options), watcher=watcher).domains["a"].inputs
    assert watcher.images == 200 - 128 + 12
    assert np.array_equal(found, whole)  # type: ignore[arg-type]
    assert not list(cache_dir().glob("*.part"))


@pytest.mark.parametrize("damage", ["cut", slow("bit"), slow("other")])
def test_a_damaged_file_is_made_again(tmp_path: Path, weights: dict[str, Path], damage: str) -> None:
    options = experiment(pictures(tmp_path / "data"), weights["one"])
    build_data(parse(options))
    file = max(files(), key=lambda path: path.stat().st_size)
    raw = bytearray(file.read_bytes())
    if damage == "bit":
        raw[-5] ^= 1
    file.write_bytes({"cut": raw[: len(raw) // 2], "bit": raw, "other": b"nonsense"}[damage])
    watcher = Counting()
    build_data(parse(options), watcher=watcher)
    assert watcher.images == 70
    (warning,) = watcher.warnings
    assert "computed again" in warning
    assert "\n" not in warning
    assert computed(options) == 0


def test_features_are_encrypted_where_a_key_is_set(
    tmp_path: Path, weights: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    options = experiment(pictures(tmp_path / "data"), weights["one"])
    plain = build_data(parse(options)).domains["a"].inputs
    monkeypatch.setenv(encryption.KEY, encryption.new_key())
    watcher = Counting()
    assert np.array_equal(build_data(parse(options), watcher=watcher).domains["a"].inputs, plain)  # type: ignore[arg-type]
    assert watcher.images == 82
    assert all("another key" in warning for warning in watcher.warnings)
    assert all(file.read_bytes().startswith(encryption.MAGIC) for file in files())
    watcher = Counting()
    assert np.array_equal(build_data(parse(options), watcher=watcher).domains["a"].inputs, plain)  # type: ignore[arg-type]
    assert (watcher.images, watcher.warnings) == (0, [])


def test_with_a_key_a_half_done_extraction_leaves_nothing(
    tmp_path: Path, weights: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv(encryption.KEY, encryption.new_key())
    with pytest.raises(Stop):
        build_data(parse(experiment(pictures(tmp_path / "data", a=200), weights["one"])), watcher=Counting(64))
    assert not [file for file in cache_dir().iterdir() if "claim" not in file.name and file.stat().st_size]


@pytest.mark.case("bit flips", "features of a frozen backbone, 20 flips")
def test_flipped_bits_of_features(tmp_path: Path, weights: dict[str, Path]) -> None:
    """Wherever they are in the file: in its header, its description or the features."""
    options = experiment(pictures(tmp_path / "data"), weights["one"])
    expected = build_data(parse(options)).domains["a"].inputs
    file = max(files(), key=lambda path: path.stat().st_size)
    features, whole = load_file(file)["features"], file.read_bytes()
    header, draws = json.loads(safe_metadata(file)), random.Random("features")
    for number in range(20):
        raw = bytearray(whole)
        raw[draws.randrange(len(raw) - 2 * features.numel() if number % 2 else len(raw))] ^= 1 << draws.randrange(8)
        file.write_bytes(raw)
        watcher = Counting()
        found = cache._read(file, {name: value for name, value in header.items() if name != "sha256"}, watcher)
        assert (found is None and len(watcher.warnings) == 1) or np.array_equal(found, features.numpy())
    file.write_bytes(raw)
    assert np.array_equal(build_data(parse(options), watcher=Counting()).domains["a"].inputs, expected)


def safe_metadata(file: Path) -> str:
    with safe_open(str(file), "pt") as opened:
        return str(opened.metadata()["fedshift"])


@pytest.mark.slow
@pytest.mark.case("bit flips", "half of the features of a run that was cut off, 20 flips")
def test_flipped_bits_of_half_the_features(tmp_path: Path, weights: dict[str, Path]) -> None:
    where = pictures(tmp_path / "data", a=200)
    options = experiment(where, weights["one"])
    whole = build_data(parse(options)).domains["a"].inputs
    (file,) = (file for file in files() if load_file(file)["features"].shape[0] == 200)
    file.unlink()
    with pytest.raises(Stop):
        build_data(parse(options), watcher=Counting(stop_after=128))
    (part,) = cache_dir().glob("features-*.part")
    half, draws = part.read_bytes(), random.Random("half")
    for _ in range(20):
        raw = bytearray(half)
        raw[draws.randrange(len(raw))] ^= 1 << draws.randrange(8)
        part.write_bytes(raw)
        watcher = Counting()
        with open(part, "a+b") as stream:
            found = cache._batches_before(stream, 1280, watcher)
        assert len(watcher.warnings) == 1
        assert len(found) in (0, 1)
        assert all(np.array_equal(batch, whole[:64]) for batch in found)  # type: ignore[index]
    watcher = Counting()
    assert np.array_equal(build_data(parse(options), watcher=watcher).domains["a"].inputs, whole)  # type: ignore[arg-type]
    assert watcher.images in (200, 200 - 64)


@pytest.mark.slow
def test_features_of_another_backbone(tmp_path: Path, weights: dict[str, Path]) -> None:
    where = pictures(tmp_path / "data")
    build_data(parse(experiment(where, weights["one"])))
    first = set(files())
    build_data(parse(experiment(where, weights["two"])))
    second = set(files()) - first
    for one, other in zip(
        sorted(first, key=lambda p: p.stat().st_size), sorted(second, key=lambda p: p.stat().st_size), strict=True
    ):
        one.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match=r"another backbone than the experiment's \(other weights\)"):
        build_data(parse(experiment(where, weights["one"])))


def test_data_that_a_frozen_backbone_does_not_read(tmp_path: Path, weights: dict[str, Path]) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 4), np.float32), y=np.arange(9) % 3)
    where = {"a": str(tmp_path / "a.npz"), "b": str(tmp_path / "a.npz")}
    with pytest.raises(UserError, match="mobilenet_v2 reads images, but arrays gives features of 4 numbers"):
        fedshift.check(experiment(where, weights["one"]))
    where = pictures(tmp_path / "data")
    data = {"name": "arrays", "sites": where, "standardise": "per_site"}
    with pytest.raises(UserError, match="model frozen reads images in the scale of its backbone"):
        fedshift.check(experiment(where, weights["one"], data=data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"backbone": {"name": "mobilenet_v2"}}}, r"model\.backbone: .*needs pre-trained weights"),
        ({"model": {"backbone": "mnist_cnn"}}, r"model\.backbone: .*needs pre-trained weights"),
        ({"model": {"backbone": "resnet5"}}, r"model\.backbone: .*unknown model 'resnet5'; did you mean"),
        ({"model": {"head": {"name": "mlp", "hiden": [3]}}}, r"model\.head: .*hiden"),
        ({"training": {"augmentation": "kd3a"}}, r"training\.augmentation: a frozen backbone"),
    ],
)
def test_mistakes(tmp_path: Path, weights: dict[str, Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse(experiment({"a": "a.npz"}, weights["one"], **changes))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_command_the_run_and_a_prediction_from_images(tmp_path: Path, weights: dict[str, Path], cli: Cli) -> None:
    where = pictures(tmp_path / "data")
    file = write(tmp_path / "e.json", experiment(where, weights["one"]))
    first = cli("features", str(file))
    assert first.code == 0
    assert "1280" in first.out
    assert "images/s" in first.out
    assert len(files()) == 2
    assert cli("features", str(file)).out.count("–") == 2
    assert cli("run", str(file), "--runs", str(tmp_path / "runs")).code == 0
    assert len(files()) == 2
    folder = tmp_path / "runs/frozen/fedavg/a-b/seed-0"
    assert "frozen" in json.dumps(load_model(folder).metadata)
    predicted = load_model(folder).predict(Path(where["b"]))
    data = build_data(parse(experiment(where, weights["one"])))
    with torch.no_grad():
        scores = load_model(folder).network(torch.from_numpy(data.domains["b"].inputs))
    assert [one.predicted for one in predicted] == [data.classes[int(row.argmax())] for row in scores]
    weights_of_another = np.load(weights["two"])
    kept = weights["one"].read_bytes()
    try:
        np.savez(weights["one"], **weights_of_another)
        with pytest.raises(UserError, match=r"mobilenet_v2.*other weights"):
            load_model(folder).predict(Path(where["b"]))
    finally:
        weights["one"].write_bytes(kept)
    plain = {**experiment(where, weights["one"]), "model": {"name": "linear"}}
    assert "only model frozen has features" in cli("features", str(write(tmp_path / "p.json", plain))).err
