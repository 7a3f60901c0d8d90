"""A small real run of every pooled method of generalization, bounded on both sides: rotated digits (scikit-learn).

120 mini-batches a source, unseen D0. Measured: DeepAll 68.9, EISNet 71.1, MixStyle, CrossGrad and FACT 70.0, JiGen
67.8, DMG, DGER and MASF 62.2, Feature-Critic 61.1, Epi-FCR 54.4; MetaReg 34.4, whose classifier begins anew half-way.
"""

from __future__ import annotations

from pathlib import Path

import fedshift

NAMES = [
    *("deepall", "mixstyle", "crossgrad", "fact", "jigen", "eisnet", "dmg", "dger", "epi_fcr", "masf", "metareg"),
    "feature_critic",
]


def test_they_learn_what_carries_over_to_an_unseen_angle(tmp_path: Path) -> None:
    experiment = {
        "name": "pooled",
        "data": {"name": "rotated_digits", "per_class": 30},
        "protocol": {"targets": ["D0"], "seeds": [0], "test_fraction": 0.3},
        "model": {"name": "mnist_cnn", "channels": [8, 16], "hidden": 32},
        "training": {"rounds": 5, "batch_size": 16, "lr": 0.05, "momentum": 0.5, "mini_batches": 120},
        "methods": [{"name": name} for name in NAMES],
        "engine": {"threads": 1},
        "device": "cpu",
    }
    rows = fedshift.run(experiment, tmp_path).rows()
    found = {row["method"]: row["mean"] for row in rows if row["target"] == "D0"}
    assert found.keys() == set(NAMES)
    for name, accuracy in found.items():
        assert (20 if name == "metareg" else 45) < accuracy < 85, name
