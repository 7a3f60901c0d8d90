"""Runs whose trained models have sealed parts. For tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from federations import Between, write_kits
from loopback import ADAPT, SITES, deploy, options_of, site_file, write_data

SEALED_ONLY = ["sealed", "numbers", "accuracy", "metrics"]
SHOT: dict[str, Any] = {"name": "shot", "bottleneck": 4}
COPA: dict[str, Any] = {"name": "copa", "local_epochs": 1}
UNSEEN_SITE = {"targets": ["east"], "seeds": [0], "test_fraction": 0.3}
RUN = "seed-0"


def between(folder: Path, **policy: Any) -> Between:
    """Sites with kits."""
    write_kits(folder, list(SITES))
    files = write_data(folder / "data", SITES)
    return Between({name: site_file(folder, name, files[name], **policy) for name in SITES})


def options(method: Mapping[str, Any], rounds: int = 2) -> dict[str, Any]:
    protocol = ADAPT if method["name"] in ("shot", "kd3a") or method.get("adaptation") else UNSEEN_SITE
    whole = options_of(dict(method), protocol=protocol)
    return {**whole, "training": {**whole["training"], "rounds": rounds}}


def run(folder: Path, transport: Between, method: Mapping[str, Any], rounds: int = 2, **engine: Any) -> Path:
    engine = {"routing": "sealed", **engine}
    return deploy(folder, options(method, rounds), unseen={}, transport=transport, engine=engine)[0]


class Killed(Exception):
    """The coordinator died here."""
