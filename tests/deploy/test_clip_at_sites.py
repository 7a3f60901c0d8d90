"""The rows on CLIP, and any frozen backbone, deployed: each site has its own copy of the towers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import Loopback, deploy, options_of, simulate
from outcomes import alike, model, one_line, same
from site_yaml import SITES, UNSEEN, site_file, write_data
from tiny_clip import write_clip

from fedshift.deploy import handshake
from fedshift.deploy.site_requests import check_files
from fedshift.errors import Refused
from fedshift.models import registry

pytest.importorskip("transformers")
ROWS: dict[str, dict[str, Any]] = {
    "zero_shot": {},
    "linear_probe": {},
    "promptfl": {"context": 2},
    "fedclip": {},
    "csac": {"acquisition_epochs": 1, "calibration_epochs": 1},
    "recipe": {},
}
HEAD = {"name": "clip_text", "pretrained": "clip", "class_names": ["dog", "cat", "cup"]}
IMAGES = {"name": "frozen", "scale": "clip", "backbone": {"name": "clip", "pretrained": "clip"}, "head": HEAD}


@pytest.fixture(autouse=True)
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny CLIP where each machine looks for weights."""
    monkeypatch.setenv("FEDSHIFT_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    return write_clip(tmp_path / "weights" / "clip")


def options(name: str, network: dict[str, Any]) -> dict[str, Any]:
    training = {"rounds": 2, "batch_size": 8, "lr": 0.05}
    return options_of({"name": name, **ROWS[name]}, model=network, training=training)


def write_images(folder: Path, side: int = 32) -> dict[str, str]:
    """Images of three classes in the places where `write_data` would put vectors."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for number, (site, samples) in enumerate({**SITES, **UNSEEN}.items()):
        drawn, y = np.random.default_rng(number), np.arange(samples) % 3
        x = drawn.integers(0, 150, (samples, 3, side, side), dtype=np.uint8)
        for index, label in enumerate(y):
            x[index, label] += 100
        files[site] = str(folder / f"{site}.npz")
        np.savez(files[site], x=x, y=y)
    return files


@pytest.mark.slow  # the import of transformers takes seconds
@pytest.mark.parametrize("name", ROWS)
def test_sites_with_images_train_as_in_a_simulation(name: str, tmp_path: Path) -> None:
    write_images(tmp_path / "data")
    deployed, _ = deploy(tmp_path, options(name, IMAGES), exposure=1)
    simulated = simulate(tmp_path, options(name, IMAGES))
    assert alike(deployed, simulated, name, "west", measured=True)


@pytest.mark.slow
def test_sites_that_have_features_already_train_as_in_a_simulation(tmp_path: Path) -> None:
    for number, (site, samples) in enumerate({**SITES, **UNSEEN}.items()):
        (tmp_path / "data").mkdir(exist_ok=True)
        y = np.arange(samples) % 3
        x = np.random.default_rng(number).normal(y[:, None], 1, (samples, 16)).astype(np.float32)
        np.savez(tmp_path / "data" / f"{site}.npz", x=x, y=y)
    deployed, _ = deploy(tmp_path, options("promptfl", HEAD), exposure=1)
    assert same(
        model(deployed, "promptfl", "west"), model(simulate(tmp_path, options("promptfl", HEAD)), "promptfl", "west")
    )


@pytest.mark.slow
def test_the_coordinator_gets_only_what_is_trained(tmp_path: Path) -> None:
    write_images(tmp_path / "data")
    deployed, _ = deploy(tmp_path, options("promptfl", IMAGES), exposure=1)
    assert {key: tuple(tensor.shape) for key, tensor in model(deployed, "promptfl", "west").items()} == {
        "classifier.context": (2, 24)
    }


@pytest.mark.parametrize("network", [HEAD, IMAGES], ids=["texts", "images"])
def test_a_site_with_another_clip_stops_the_experiment(
    network: dict[str, Any], tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here every machine has the same folder, so the weights change behind the coordinator's back."""
    files = write_data(tmp_path / "data", SITES) if network is HEAD else write_images(tmp_path / "data")
    places = Loopback({site: site_file(tmp_path, site, files[site], exposure=1) for site in SITES})
    if network is HEAD:
        monkeypatch.setattr(handshake, "text_towers", lambda _: {"clip": "0" * 32})
    else:
        whole = handshake.features_for

        def other(*asked: Any) -> Any:
            preprocessing, *rest = whole(*asked)
            backbone = {**(preprocessing.backbone or {}), "weights": "0" * 32}
            return preprocessing.model_copy(update={"backbone": backbone}), *rest

        monkeypatch.setattr(handshake, "features_for", other)
    with one_line(r"site '.*FEDSHIFT_WEIGHTS"):
        deploy(tmp_path, options("fedclip", network), transport=places, unseen={} if network is HEAD else UNSEEN)


def test_what_a_tower_says_is_in_its_checksum(tmp_path: Path) -> None:
    def checksum(folder: Path) -> str:
        options: Any = registry.parse({**HEAD, "pretrained": str(folder)})
        return str(options.fingerprint())

    of_first = checksum(write_clip(tmp_path / "one"))
    assert of_first == checksum(write_clip(tmp_path / "two"))
    assert of_first != checksum(write_clip(tmp_path / "three", seed=1))
    changed = write_clip(tmp_path / "four")
    read = json.loads((changed / "tokenizer.json").read_text())
    vocabulary = read["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (changed / "tokenizer.json").write_text(json.dumps(read))
    assert of_first != checksum(changed)


@pytest.mark.threat("files_and_errors")
@pytest.mark.parametrize("name", ["..", ".", "../clip", "/etc", "clip/..", "empty", "absent", ".hidden"])
def test_a_request_opens_no_other_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "weights" / "empty").mkdir()
    write_clip(tmp_path / "weights" / ".hidden")
    check_files("north", registry.parse(HEAD))
    with pytest.raises(Refused, match="must be the plain name"):
        check_files("north", registry.parse({**HEAD, "pretrained": name}))
