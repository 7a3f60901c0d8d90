"""Small real runs of the family of federated generalization, bounded on both sides: handwritten digits (scikit-learn).

Angles: the data, network and batches of `test_small_real_run`, 10 rounds of 2 epochs, unseen D0, seed 1.
Measured: FedAvg 45.6, FedADG 53.3; at D45 85.6 and 88.9.
FedSR, FedL2R and FedCMI with one epoch or 5 mini-batches a round are within noise of FedAvg there (seeds 0 to 2: FedAvg
58.2, FedSR 58.7, FedL2R 54.8, FedCMI 57.0).

Looks: four sites of 200 digits, 16×16 pixels, that differ in contrast and brightness; 20 rounds of 2 epochs, seed 0.
Measured, unseen dim and bright: FedAvg 89.5 and 82.5, CCST 92.5 and 90.5, with single styles 90.5 and 91.0. The test
looks at bright, where there is more to gain. With one epoch, seed 0: FedAvg 72.5, StableFDG 81.0 (73.5 without sharing
and exploration), PARDON 75.5, and 79.0 with the styles of pixels and λ₂ = 0.01. FedCCRL with half the learning rate has
89.5 to 90.0 under four instruction sets. With the whole one rounding decides (64.5 to 84.5), with a third it is slower
(69.0).

Adaptation: the options of `test_small_real_adaptation`, D0 and D75. Measured, seeds 0 and 1: FedAvg 43.1, COPA without
the target 43.5, with it 48.1 (threshold 0.8: 49.3), KD3A 48.9. The test looks at D75 with seed 1: FedAvg 29.4, COPA
41.7; at D0 they are equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from test_small_real_adaptation import averages, options

import fedshift

pytestmark = pytest.mark.slow

LOOKS = {"plain": (0.9, 0.0), "dim": (0.45, 0.0), "bright": (0.45, 0.5), "middle": (0.45, 0.25)}


def test_fedadg_beats_fedavg(tmp_path: Path) -> None:
    experiment: dict[str, Any] = {
        "name": "angles",
        "data": {"name": "rotated_digits", "per_class": 30},
        "protocol": {"targets": ["D0"], "seeds": [1], "test_fraction": 0.3},
        "model": {"name": "mnist_cnn", "channels": [8, 16], "hidden": 32},
        "training": {"rounds": 10, "batch_size": 16, "lr": 0.1, "momentum": 0.5},
        "methods": [
            {"name": "fedavg", "local_epochs": 2},
            {"name": "fedadg", "task_epochs": 1, "adversarial_epochs": 1},
        ],
        "engine": {"threads": 1},
        "device": "cpu",
    }
    rows = averages(fedshift.run(experiment, tmp_path))
    assert rows["fedavg"]["D0"] + 2 < rows["fedadg"]["D0"] < 90
    assert rows["fedavg"]["D0"] > 30


def in_looks(folder: Path, methods: list[Any]) -> dict[str, dict[str, float]]:
    """Accuracy at the site bright, which is unseen, of these methods."""
    digits, draws = load_digits(), np.random.default_rng(0)
    images = np.kron(digits.images / 16, np.ones((2, 2)))
    order, sites = draws.permutation(len(images))[:800], {}
    for number, (name, (contrast, brightness)) in enumerate(LOOKS.items()):
        rows = order[200 * number : 200 * (number + 1)]
        pixels = (images[rows] * contrast + brightness) * 255 + draws.normal(0, 6, images[rows].shape)
        np.savez(folder / f"{name}.npz", x=np.clip(pixels, 0, 255).astype(np.uint8), y=digits.target[rows])
        sites[name] = str(folder / f"{name}.npz")
    experiment = {
        "name": "looks",
        "data": {"name": "arrays", "sites": sites},
        "protocol": {"targets": ["bright"], "seeds": [0], "test_fraction": 0.2},
        "model": {"name": "mnist_cnn", "channels": [8, 16], "hidden": 32},
        "training": {"rounds": 20, "batch_size": 16, "lr": 0.1, "momentum": 0.5},
        "methods": methods,
        "engine": {"threads": 1},
        "device": "cpu",
    }
    return averages(fedshift.run(experiment, folder / "runs"))


def test_styles_bridge_looks(tmp_path: Path) -> None:
    rows = in_looks(tmp_path, [{"name": "fedavg", "local_epochs": 2}, {"name": "ccst", "local_epochs": 2}])
    assert rows["fedavg"]["bright"] + 3 < rows["ccst"]["bright"] < 98
    assert rows["fedavg"]["bright"] > 75


def test_styles_of_others_bridge_looks(tmp_path: Path) -> None:
    pardon = {"name": "pardon", "style_space": "pixel", "norm_weight": 0.01}
    fedccrl = {"name": "fedccrl", "training": {"lr": 0.05}}
    rows = in_looks(tmp_path, ["fedavg", fedccrl, "stablefdg", pardon])
    assert rows["fedavg"]["bright"] + 5 < rows["fedccrl"]["bright"] < 98
    assert rows["fedavg"]["bright"] + 3 < rows["stablefdg"]["bright"] < 98
    assert rows["fedavg"]["bright"] + 3 < rows["pardon"]["bright"] < 98
    assert rows["fedavg"]["bright"] > 55


def test_classifiers_of_others_bridge_looks(tmp_path: Path) -> None:
    mcgdm = {"name": "mcgdm", "view": {"brightness": 0.5, "contrast": 0.8}, "intra_weight": 0.1}
    methods = ["fedavg", mcgdm, {"name": "mcsad", "training": {"lr": 0.05}}]
    rows = in_looks(tmp_path, [{**({"name": m} if isinstance(m, str) else m), "local_epochs": 2} for m in methods])
    assert rows["fedavg"]["bright"] + 3 < rows["mcgdm"]["bright"] < 98
    assert rows["fedavg"]["bright"] + 3 < rows["mcsad"]["bright"] < 98
    assert rows["fedavg"]["bright"] > 70


def test_copa_adapts(tmp_path: Path) -> None:
    methods = ["fedavg", {"name": "copa", "local_epochs": 1, "adaptation": True}]
    rows = averages(fedshift.run(options(methods, ["D75"], seeds=[1]), tmp_path))
    assert rows["fedavg"]["D75"] + 6 < rows["copa"]["D75"] < 75
