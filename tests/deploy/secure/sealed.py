"""Runs whose trained models have sealed parts. For tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from federations import Between, write_kits
from loopback import ADAPT, deploy, options_of
from site_yaml import SITES, site_file, write_data

SEALED_ONLY = ["sealed", "numbers", "accuracy", "metrics"]
KD3A: dict[str, Any] = {"name": "kd3a"}
SHOT: dict[str, Any] = {"name": "shot", "bottleneck": 4}
COPA: dict[str, Any] = {"name": "copa", "local_epochs": 1}
UNSEEN_SITE = {"targets": ["east"], "seeds": [0], "test_fraction": 0.3}
SEED = "seed-0"
SOURCES = ("north", "south")


def between(folder: Path, source: Mapping[str, Any] | None = None, **policy: Any) -> Between:
    """Sites with kits; ``source``: what the policy of the sources says besides."""
    write_kits(folder, list(SITES))
    files = write_data(folder / "data", SITES)
    more = {name: {**policy, **(source or {} if name in SOURCES else {})} for name in SITES}
    return Between({name: site_file(folder, name, files[name], **more[name]) for name in SITES})


def options(method: Mapping[str, Any] = KD3A, rounds: int = 2) -> dict[str, Any]:
    protocol = ADAPT if method["name"] in ("shot", "kd3a", "fada") or method.get("adaptation") else UNSEEN_SITE
    whole = options_of(dict(method), protocol=protocol)
    return {**whole, "training": {**whole["training"], "rounds": rounds}}


def run(folder: Path, transport: Between, method: Mapping[str, Any] = KD3A, rounds: int = 2, **engine: Any) -> Path:
    engine = {"routing": "sealed", **engine}
    return deploy(folder, options(method, rounds), unseen={}, transport=transport, engine=engine)[0]
