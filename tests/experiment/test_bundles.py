"""A bundle of MONAI: its network and transforms, and that nothing of it runs unasked."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedshift
from fedshift import trust
from fedshift.data.builders.volume_folder import VolumeFolder
from fedshift.data.monai_bundle import checksum
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.predict import load_model
from fedshift.models import registry

nibabel = pytest.importorskip("nibabel")
ALLOW = trust.allow
SCRIPT = """
from pathlib import Path
Path(__file__).with_name("ran").write_text("")

class Twice:
    def __init__(self, keys):
        self.keys = keys
    def __call__(self, item):
        return {**item, **{key: 2 * item[key] for key in self.keys}}
"""
BOTH = ["image", "label"]
NETWORK = {
    "_target_": "UNet",
    "spatial_dims": 3,
    "in_channels": 9,
    "out_channels": 9,
    "channels": [4, 8],
    "strides": [2],
}
STEPS: list[dict[str, Any]] = [
    {"_target_": "LoadImaged", "keys": BOTH},
    {"_target_": "EnsureChannelFirstd", "keys": BOTH},
    {"_target_": "Orientationd", "keys": BOTH, "axcodes": "RAS"},
    {"_target_": "Spacingd", "keys": BOTH, "pixdim": [2, 2, 2], "mode": ["bilinear", "nearest"]},
    {
        "_target_": "ScaleIntensityRanged", "keys": "image",
        "a_min": 0, "a_max": "$500 * 2", "b_min": 0, "b_max": 1, "clip": True,
    },
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def monai_networks() -> Any:
    """Imported where a test runs: it takes seconds, in every process that collects tests."""
    return pytest.importorskip("monai.networks.nets")


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who has trusted nothing, and a cache of their own."""
    monkeypatch.setenv("FEDSHIFT_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trust, "allow", ALLOW)
    monkeypatch.setattr(trust, "_passed", {})


def write_bundle(folder: Path, steps: list[dict[str, Any]] = STEPS, **network: Any) -> Path:
    (folder / "configs").mkdir(parents=True)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "__init__.py").write_text("")
    (folder / "scripts" / "steps.py").write_text(SCRIPT)
    random = [{"_target_": "RandFlipd", "keys": BOTH, "prob": 1.0}, {"_target_": "EnsureTyped", "keys": BOTH}]
    config = {
        "network_def": {**NETWORK, **network},
        "steps": steps,
        "train": {"preprocessing": {"_target_": "Compose", "transforms": [*steps, *random]}},
    }
    (folder / "configs" / "train.json").write_text(json.dumps(config))
    return folder


def write_scans(root: Path, side: int = 32) -> Path:
    """Balls in noise, with the mask of each; stored with another order of axes than most, 1 mm apart."""
    affine = np.array([[0, -1.0, 0, 0], [0, 0, 1.0, 0], [1.0, 0, 0, 0], [0, 0, 0, 1.0]])
    for number, (site, name) in enumerate(itertools.product(("north", "east", "south"), "abcd")):
        drawn = np.random.default_rng(number)
        at = drawn.integers(12, 20, 3)
        ball = np.linalg.norm(np.indices([side] * 3) - at[:, None, None, None], axis=0) < 8
        values = drawn.integers(0, 400, [side] * 3) + 700 * ball
        for place, array in ((root / site / "images", values), (root / site / "masks" / "ball", ball)):
            place.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array.astype(np.float32), affine), place / f"{name}.nii.gz")
    return root


@pytest.fixture
def trusted() -> Any:
    with trust.asks(lambda code: True):
        yield


def built(folder: Path, **section: Any) -> Any:
    options = registry.parse({"name": f"bundle:{folder}", **section}, permit=registry.any_code)
    return registry.build(options, (1, 16, 16, 16), 2, 0)


@pytest.mark.usefixtures("trusted")
def test_the_network_is_the_one_that_monai_makes_of_the_config(tmp_path: Path, monai_networks: Any) -> None:
    """With the channels and structures of the data; the same weights from the same draws."""
    found = built(write_bundle(tmp_path / "spleen"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = monai_networks.UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=[4, 8], strides=[2])
    volumes = torch.rand(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.eval()(volumes), plain.eval()(volumes))
    assert built(tmp_path / "spleen", act="relu").features is not None


@pytest.mark.usefixtures("trusted")
def test_weights_of_a_bundle_are_all_but_those_of_other_channels(tmp_path: Path, monai_networks: Any) -> None:
    folder = write_bundle(tmp_path / "spleen")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        theirs = monai_networks.UNet(3, in_channels=1, out_channels=5, channels=[4, 8], strides=[2]).state_dict()
    (folder / "models").mkdir()
    torch.save({"model": theirs}, folder / "models" / "model.pt")
    plain, loaded = (built(folder, pretrained=given).state_dict() for given in (False, True))
    plain, loaded = (dict(zip(theirs, state.values(), strict=True)) for state in (plain, loaded))
    other = {name for name in theirs if theirs[name].shape != loaded[name].shape}
    assert 0 < len(other) < len(theirs) / 2
    assert all(torch.equal(loaded[name], (plain if name in other else theirs)[name]) for name in theirs)
    torch.save({"other": torch.zeros(2)}, folder / "models" / "model.pt")
    with pytest.raises(UserError, match="weights of another network"):
        built(folder, pretrained=True)
    (folder / "models" / "model.pt").write_bytes(b"no archive")
    with pytest.raises(UserError, match="cannot be read as weights"):
        built(folder, pretrained=True)


@pytest.mark.usefixtures("trusted")
def test_volumes_are_what_monais_own_pipeline_makes_of_the_files(tmp_path: Path) -> None:
    """MONAI loads the file itself and does every step but the random one; ours are these in 8 bits."""
    transforms = __import__("monai.transforms", fromlist=["Compose"])
    root, folder = write_scans(tmp_path / "scans"), write_bundle(tmp_path / "spleen")
    data = VolumeFolder(root=root, size=(16, 16, 16), bundle=folder).build()
    north = data.domains["north"]
    made = transforms.Compose(
        [getattr(transforms, step["_target_"])(**{**{key: value for key, value in step.items() if key != "_target_"},
                                                  **({"a_max": 1000} if "a_max" in step else {})}) for step in STEPS]
    )  # fmt: skip
    assert north.masks is not None
    for row, name in enumerate("abcd"):
        item = made({kind: str(root / "north" / place / f"{name}.nii.gz")
                     for kind, place in (("image", "images"), ("label", "masks/ball"))})  # fmt: skip
        image, label = (np.asarray(item[kind])[0].transpose(2, 1, 0) for kind in BOTH)
        assert image.shape == (16, 16, 16)
        assert np.abs(np.asarray(north.inputs)[row, 0] - 255 * image).max() <= 1
        assert np.array_equal(north.masks[row, 0], label > 0.5)
        assert label.sum() > 100


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
def test_an_experiment_on_a_bundle_gives_the_same_bits_in_a_pool(tmp_path: Path) -> None:
    write_scans(tmp_path / "scans")
    write_bundle(tmp_path / "spleen")
    experiment = {
        "name": "bundle",
        "data": {"name": "volume_folder", "root": "scans", "size": [16, 16, 16], "bundle": "spleen"},
        "protocol": {"targets": ["east"], "seeds": [0], "test_fraction": 0.3},
        "model": {"name": "bundle:spleen"},
        "training": {"rounds": 1, "batch_size": 2, "optimizer": "adam", "lr": 0.01},
        "methods": ["fedavg", "recipe"],
        "device": "cpu",
    }
    weights = []
    for workers in (1, 2):
        with trust.asks(lambda code: True):
            read = parse({**experiment, "engine": {"threads": 1, "workers": workers}}, folder=tmp_path)
            results = fedshift.run(read, tmp_path / f"runs-{workers}")
        weights.append([load_file(results.folder / run.method / "east" / "seed-0" / "model.safetensors")
                        for run in results.runs])  # fmt: skip
        assert str(tmp_path) not in json.dumps(read.model.record())
    for one, two in zip(*weights, strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    run = results.folder / "fedavg" / "east" / "seed-0"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is the bundle of the training
        assert load_model(run, own_network=f"bundle:{tmp_path / 'spleen'}").segments
    with pytest.raises(UserError, match="does not come with fedshift"):
        load_model(run)


@pytest.mark.threat("code_or_method")
@pytest.mark.parametrize("asked", ["model", "data"])
def test_nothing_of_a_bundle_runs_unasked(asked: str, tmp_path: Path) -> None:
    steps = [{"_target_": "scripts.steps.Twice", "keys": ["image"]}]
    folder, root = write_bundle(tmp_path / "spleen", steps), write_scans(tmp_path / "scans")
    uses: dict[str, Callable[[], object]] = {
        "model": lambda: built(folder),
        "data": lambda: VolumeFolder(root=root, size=(16, 16, 16), bundle=folder).build(),
    }
    with pytest.raises(UserError, match="nobody has trusted") as caught:
        uses[asked]()
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert not (folder / "scripts" / "ran").exists()
    with trust.asks(lambda code: code.sha256 == checksum(folder)):
        uses[asked]()
    assert (folder / "scripts" / "ran").exists() == (asked == "data")


@pytest.mark.threat("code_or_method")
@pytest.mark.parametrize("file", ["configs/train.json", "scripts/steps.py", "scripts/new.py", "configs/inference.yaml"])
def test_a_bundle_that_changed_is_asked_for_again(file: str, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen")
    with trust.asks(lambda code: True):
        options = registry.parse({"name": f"bundle:{folder}"}, permit=registry.any_code)
    registry.build(options, (1, 16, 16, 16), 2, 0)
    (folder / "README.md").write_text("no code")
    registry.build(options, (1, 16, 16, 16), 2, 0)
    with open(folder / file, "a") as stream:
        stream.write(" ")
    with pytest.raises(UserError, match="has changed since it was trusted"):
        registry.build(options, (1, 16, 16, 16), 2, 0)
    with pytest.raises(UserError, match="nobody has trusted"):
        built(folder)


@pytest.mark.usefixtures("trusted")
def test_mistakes_are_one_line(tmp_path: Path) -> None:
    def scans(name: str, steps: list[dict[str, Any]]) -> Callable[[], object]:
        folder = write_bundle(tmp_path / name, steps)
        return lambda: VolumeFolder(root=root, size=(16, 16, 16), bundle=folder).build()

    root = write_scans(tmp_path / "scans")
    bare = write_bundle(tmp_path / "bare")
    (bare / "configs" / "train.json").write_text("{}")
    linked = write_bundle(tmp_path / "linked")
    (linked / "scripts" / "more").symlink_to(tmp_path)
    uses: dict[str, Callable[[], object]] = {
        "is no bundle of MONAI": lambda: built(tmp_path / "nowhere"),
        "no config of .* has network_def": lambda: built(bare),
        "is a link to a folder": lambda: built(linked),
        "cannot be made .*no_such_option": lambda: built(write_bundle(tmp_path / "odd", no_such_option=1)),
        "transforms cannot be made: .*NoSuch": scans("unknown", [{"_target_": "NoSuchTransformd", "keys": BOTH}]),
        "transforms fail on .*ghost": scans("ghost", [{"_target_": "ScaleIntensityd", "keys": "ghost"}]),
        "its transforms leave of": scans(
            "apart", [{"_target_": "SpatialPadd", "keys": "image", "spatial_size": [40, 40, 40]}]
        ),
        "leave these out": lambda: VolumeFolder(root=root, size=(16, 16, 16), bundle=bare, window=(0, 1)),
    }  # fmt: skip
    for message, use in uses.items():
        with pytest.raises((UserError, ValueError), match=message) as caught:
            use()
        assert "\n" not in str(caught.value) or message == "leave these out"
