"""The small experiment with a target that takes part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from small import experiment

from fedshift.data.domain import DataSet, Domain, Manifest, Preprocessing

FOLDER = Manifest("", "", "", "", "")
METHODS: list[Any] = [
    "source_only",
    "fedavg",
    {"name": "kd3a", "gate_start": 0.5, "gate_end": 0.6},
    "oracle",
]
NETWORK: dict[str, Any] = {"name": "mlp", "hidden": [6], "batch_norm": True}


def data_of(**domains: Domain) -> DataSet:
    return DataSet("x", domains, ("0", "1", "2"), Preprocessing(kind="features"), FOLDER)


def domain(name: str, samples: int, groups: Any = None, **official: Any) -> Domain:
    inputs = np.random.default_rng(samples).normal(size=(samples, 2)).astype(np.float32)
    return Domain(name, inputs, np.arange(samples) % 3, groups, **official)


def adapting(where: dict[str, str], protocol: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The small experiment with a target that takes part."""
    kind = {"kind": "adapt_to_one", "targets": ["a"], "seeds": [0], "test_fraction": 0.3, **(protocol or {})}
    return experiment(where, protocol=kind, **{"methods": METHODS, "model": NETWORK, **changes})


def model_of(runs: Path, method: str, target: str = "a", seed: int = 0) -> Mapping[str, Any]:
    path = runs / "small" / method / target / f"seed-{seed}" / "model.safetensors"
    return {name: tensor.tobytes() for name, tensor in load_file(path).items()}
