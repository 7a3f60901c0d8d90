"""A site that is unseen must not shape the encoding of the inputs either."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import fedshift
from fedshift.data.registry import parse
from fedshift.errors import UserError


def _site(path: Path, shift: float) -> str:
    rng = np.random.default_rng(0)
    labels = np.arange(20) % 2
    features = rng.normal(size=(20, 3)) + labels[:, None] + shift
    np.savez(path, x=features.astype(np.float32), y=labels)
    return str(path)


def _preprocessing(folder: Path, method: str, target: str) -> dict[str, object]:
    with safe_open(str(folder / method / target / "seed-0" / "model.safetensors"), framework="pt") as file:
        found: dict[str, object] = json.loads(file.metadata()["fedshift"])["preprocessing"]
    return found


def test_the_unseen_site_gives_no_statistics(tmp_path: Path) -> None:
    sites = {name: _site(tmp_path / f"{name}.npz", shift) for name, shift in (("a", 0.0), ("b", 0.0), ("far", 1000.0))}
    experiment = {
        "name": "unseen",
        "data": {"name": "arrays", "sites": sites, "standardise": True},
        "protocol": {"targets": ["far", "a"], "seeds": [0]},
        "model": "linear",
        "training": {"rounds": 1},
        "methods": ["fedavg"],
    }
    results = fedshift.run(experiment, tmp_path / "runs")
    mean_without_far = _preprocessing(results.folder, "fedavg", "far")["mean"]
    mean_with_far = _preprocessing(results.folder, "fedavg", "a")["mean"]
    assert max(mean_without_far) < 5  # type: ignore[call-overload]
    assert min(mean_with_far) > 400  # type: ignore[call-overload]
    sites = {name: _site(tmp_path / f"{name}.npz", 0.0) for name in "ab"}
    source = parse({"name": "arrays", "sites": sites, "standardise": True, "statistics_from": ["a"]})
    with pytest.raises(UserError, match="no site is left"):
        source.without("a").build()
