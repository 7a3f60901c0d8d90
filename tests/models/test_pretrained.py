"""Weights from files: what is loaded, what is refused and how it is told."""

from __future__ import annotations

import io
import os
import sys
import urllib.error
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.models import registry
from fedshift.models.network import Network
from fedshift.models.pretrained import find_file, load_pretrained

MOBILENET = "mobilenet_v2_imagenet_tf2_int8.npz"


def network(classes: int = 7, seed: int = 0, size: int = 64, **options: object) -> Network:
    return registry.build(registry.parse(options), (3, size, size), classes, seed)


@pytest.fixture(scope="module")
def resnet_state() -> dict[str, Tensor]:
    models = pytest.importorskip("torchvision.models")
    state: dict[str, Tensor] = models.resnet18(weights=None, num_classes=5).state_dict()
    # Running statistics that an untrained network would not have.
    return {key: value + 0.5 if key.endswith("running_mean") else value for key, value in state.items()}


def test_backbone_is_loaded_and_the_classifier_kept_new(resnet_state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(resnet_state, tmp_path / "r.safetensors")
    model = network(7, name="resnet18", pretrained=tmp_path / "r.safetensors")
    scratch = network(7, name="resnet18")
    state = model.state_dict()
    for key, value in resnet_state.items():
        if not key.startswith("fc."):
            assert torch.equal(state[f"features.backbone.{key}"], value), key
    assert torch.equal(model.classifier.weight, scratch.classifier.weight)
    same_classes = network(5, name="resnet18", pretrained=tmp_path / "r.safetensors")
    assert torch.equal(same_classes.classifier.weight, resnet_state["fc.weight"])
    narrow = network(5, name="resnet18", pretrained=tmp_path / "r.safetensors", bottleneck=16)
    assert narrow.classifier.weight.shape == (5, 16)


def test_counters_and_the_last_layer_may_be_absent(resnet_state: dict[str, Tensor], tmp_path: Path) -> None:
    kept = {
        key: value.half().numpy()
        for key, value in resnet_state.items()
        if not key.endswith("num_batches_tracked") and not key.startswith("fc.")
    }
    np.savez(tmp_path / "r.npz", **kept)
    state = network(5, name="resnet18", pretrained=tmp_path / "r.npz").state_dict()
    assert state["features.backbone.conv1.weight"].dtype == torch.float32
    assert torch.equal(state["features.backbone.conv1.weight"], resnet_state["conv1.weight"].half().float())


def test_folded_batch_norm_adds_its_bias_and_nothing_else(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    small = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).eval()
    kernels = torch.randn(4, 3, 3, 3, generator=generator)
    bias = torch.randn(4, generator=generator)
    np.savez(tmp_path / "folded.npz", **{"0.weight": kernels.numpy(), "1.bias": bias.numpy()})
    load_pretrained(small, tmp_path / "folded.npz", model="resnet18", head="3")
    inputs = torch.randn(2, 3, 4, 4, generator=generator)
    assert torch.allclose(small[:2](inputs), functional.conv2d(inputs, kernels, bias), atol=1e-5)


def refusal(source: Path, **options: object) -> str:
    with pytest.raises(UserError) as told:
        network(5, **{"name": "resnet18", "pretrained": source, **options})
    assert "\n" not in str(told.value)
    return str(told.value)


def test_keys_and_shapes_that_do_not_fit_are_named(resnet_state: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "r.safetensors"
    save_file({f"net.{key}": value for key, value in resnet_state.items()}, file)
    message = refusal(file)
    assert f"weights file {file} does not fit model 'resnet18'" in message
    assert "missing conv1.weight (64, 3, 7, 7)" in message
    assert "not known to the model net." in message
    assert "more" in message
    save_file({**resnet_state, "conv1.weight": torch.zeros(64, 1, 7, 7)}, file)
    assert "conv1.weight is (64, 1, 7, 7), model has (64, 3, 7, 7)" in refusal(file)
    # As many classes, but other features: not a new layer, a misfit.
    save_file({**resnet_state, "fc.weight": torch.zeros(5, 100)}, file)
    assert "fc.weight is (5, 100), model has (5, 512)" in refusal(file)
    # One BatchNorm entry gone is a misfit, not a folded BatchNorm.
    save_file({key: value for key, value in resnet_state.items() if key != "bn1.running_var"}, file)
    assert "missing bn1.running_var (64,)" in refusal(file)


def test_weights_that_are_not_finite_are_refused(resnet_state: dict[str, Tensor], tmp_path: Path) -> None:
    spoiled = resnet_state["layer2.0.conv1.weight"].clone()
    spoiled[3, 1, 0, 2] = float("nan")
    save_file({**resnet_state, "layer2.0.conv1.weight": spoiled}, tmp_path / "r.safetensors")
    assert "layer2.0.conv1.weight holds NaN or infinite values" in refusal(tmp_path / "r.safetensors")


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    opened = tmp_path / "opened"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (opened,)

    for name in ("w.pth", "w.pt", "w.ckpt", "w.bin"):
        torch.save({"conv1.weight": Trap()}, tmp_path / name)
        message = refusal(tmp_path / name)
        assert "safetensors" in message
        assert "weights_only=True" in message
    # An object array inside an .npz is a pickle too.
    np.savez(tmp_path / "w.npz", **{"conv1.weight": np.array([Trap()], dtype=object)})
    assert "cannot be read" in refusal(tmp_path / "w.npz")
    assert not opened.exists()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_damaged_files_are_refused(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"w.{suffix}"
    if suffix == "npz":
        np.savez(file, **{"conv1.weight": np.zeros((64, 3, 7, 7), np.float32)})
    else:
        save_file({"conv1.weight": torch.zeros(64, 3, 7, 7)}, file)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no weights at all"):
        file.write_bytes(content)
        assert f"{file} cannot be read" in refusal(file)
    text = tmp_path / "w.txt"
    text.write_text("?")
    assert "only .safetensors and .npz" in refusal(text)


def test_where_files_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, here = tmp_path / "weights", tmp_path / "here"
    for place in (folder, here):
        place.mkdir()
    (folder / "both.npz").touch()
    (here / "both.npz").touch()
    (here / "local.npz").touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("FEDSHIFT_WEIGHTS", str(folder))
    assert find_file(Path("both.npz")) == folder / "both.npz"
    assert find_file(Path("local.npz")).resolve() == here / "local.npz"
    with pytest.raises(UserError, match=r"no weights file at .*weights/none\.npz and .*here/none\.npz"):
        find_file(Path("none.npz"))
    monkeypatch.delenv("FEDSHIFT_WEIGHTS")
    assert find_file(folder / "both.npz") == folder / "both.npz"
    with pytest.raises(UserError, match="FEDSHIFT_WEIGHTS, which is not set"):
        find_file(Path("none.npz"))


@pytest.mark.parametrize(
    ("pretrained", "weights"), [(True, "IMAGENET1K_V1"), ("IMAGENET1K_V1", "IMAGENET1K_V1"), ("true", "IMAGENET1K_V1")]
)
def test_torchvision_is_asked_for_tensors_only(
    pretrained: bool | str, weights: str, resnet_state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = pytest.importorskip("torchvision.models._api")
    asked: list[tuple[str, dict[str, object]]] = []

    def answer(url: str, **options: object) -> dict[str, Tensor]:
        asked.append((url, options))
        return resnet_state

    monkeypatch.setattr(api, "load_state_dict_from_url", answer)
    model = network(7, name="resnet18", pretrained=pretrained)
    url, options = asked[0]
    assert url == pytest.importorskip("torchvision.models").ResNet18_Weights[weights].url
    assert options["weights_only"] is True
    assert options["check_hash"] is True
    assert torch.equal(model.state_dict()["features.backbone.bn1.running_mean"], resnet_state["bn1.running_mean"])


def test_a_failed_download_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = pytest.importorskip("torchvision.models._api")

    def fail(*_arguments: object, **_options: object) -> None:
        print("Downloading: https://…", file=sys.stderr)  # as torch does
        raise urllib.error.URLError("no route\nto host")

    monkeypatch.setattr(api, "load_state_dict_from_url", fail)
    with pytest.raises(
        UserError, match=r"'resnet18' cannot be downloaded .*no route to host.*; give the path of"
    ) as told:
        network(7, name="resnet18", pretrained=True)
    assert capsys.readouterr().err == ""
    assert "\n" not in str(told.value)


@pytest.fixture
def mobilenet_file() -> str:
    folder = os.environ.get("FEDSHIFT_WEIGHTS")
    if not folder or not (Path(folder) / MOBILENET).is_file():
        pytest.skip(f"FEDSHIFT_WEIGHTS holds no {MOBILENET}")
    return MOBILENET


@pytest.mark.slow
def test_mobilenet_reproduces_stored_features(mobilenet_file: str) -> None:
    """The stored features are of images of 227 pixels; here the images have 128, so only nearly the same come out."""
    image = pytest.importorskip("PIL.Image")
    folder = Path(os.environ.get("FEDSHIFT_DATA") or "unset")
    for needed in ("pacs_mobilenetv2.npz", "pacs_images_128.zip"):
        if not (folder / needed).is_file():
            pytest.skip(f"FEDSHIFT_DATA holds no {needed}")
    with np.load(folder / "pacs_mobilenetv2.npz", allow_pickle=False) as stored:
        rows = np.random.default_rng(0).choice(len(stored["path"]), 12, replace=False)
        names, features = stored["path"][rows], torch.from_numpy(stored["x"][rows]).float()
    pictures = []
    with zipfile.ZipFile(folder / "pacs_images_128.zip") as archive:
        for name in names:
            content = archive.read(f"PACS/{Path(str(name)).with_suffix('.jpg')}")
            picture = image.open(io.BytesIO(content)).convert("RGB").resize((224, 224), image.Resampling.BILINEAR)
            pictures.append(np.asarray(picture))
    inputs = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
    similarity = {}
    for padding in ("tensorflow", "torchvision"):
        model = network(7, size=224, name="mobilenet_v2", pretrained=mobilenet_file, padding=padding).eval()
        with torch.no_grad():
            similarity[padding] = functional.cosine_similarity(model.features(inputs), features)
    assert float(similarity["tensorflow"].min()) > 0.8
    assert float(similarity["tensorflow"].mean()) > float(similarity["torchvision"].mean()) + 0.05


def test_mobilenet_keeps_its_classifier_for_its_own_classes(mobilenet_file: str) -> None:
    with np.load(Path(os.environ["FEDSHIFT_WEIGHTS"]) / mobilenet_file, allow_pickle=False) as arrays:
        expected = torch.from_numpy(arrays["classifier.1.weight"]).float()
    assert torch.equal(network(1000, name="mobilenet_v2", pretrained=mobilenet_file).classifier.weight, expected)
    assert network(7, name="mobilenet_v2", pretrained=mobilenet_file).classifier.weight.shape == (7, 1280)
