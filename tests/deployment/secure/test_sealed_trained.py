"""Trained models that have sealed parts: the coordinator carries, keeps and saves them, and only their readers open them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import ADAPT, SITES, deploy, model, options_of, result, same, simulate, site_file, write_data

pytest.importorskip("cryptography")
pytest.importorskip("cryptography.hazmat.primitives.hpke")
from federations import Between, write_kits

from fedshift.federation.remote.transport import Lost
from fedshift.federation.remote.wire import Message, unseal

SEALED_ONLY = ["sealed", "numbers", "accuracy", "metrics"]
SHOT = {"name": "shot", "bottleneck": 4}
COPA = {"name": "copa", "local_epochs": 1}
UNSEEN_SITE = {"targets": ["east"], "seeds": [0], "test_fraction": 0.3}


def between(folder: Path, **policy: Any) -> Between:
    write_kits(folder, list(SITES))
    files = write_data(folder / "data", SITES)
    return Between({name: site_file(folder, name, files[name], **policy) for name in SITES})


def options(method: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    protocol = ADAPT if method["name"] == "shot" or method.get("adaptation") else UNSEEN_SITE
    whole = options_of(dict(method), protocol=protocol, **changes)
    return {**whole, "training": {**whole["training"], "rounds": 2, **changes.get("training", {})}}


def run(folder: Path, transport: Between, method: Mapping[str, Any], **engine: Any) -> Path:
    engine = {"routing": "sealed", **engine}
    return deploy(folder, options(method), unseen={}, transport=transport, engine=engine)[0]


def test_shot_no_model_crosses_in_clear(tmp_path: Path) -> None:
    transport = between(tmp_path, send=SEALED_ONLY)
    there = run(tmp_path, transport, SHOT)
    here = simulate(tmp_path, options(SHOT), unseen={}, routing="sealed")
    ours, theirs = result(here, "shot", "east"), result(there, "shot", "east")
    assert ours["selected"] == theirs["selected"]
    print(theirs["bytes_up"], theirs["bytes_down"])
    print(list((there/"shot/east/seed-0").iterdir()))


def test_copa(tmp_path: Path) -> None:
    transport = between(tmp_path)
    there = run(tmp_path, transport, COPA)
    here = simulate(tmp_path, options(COPA), unseen={}, routing="sealed")
    ours, theirs = result(here, "copa", "east"), result(there, "copa", "east")
    assert ours["selected"] == theirs["selected"]
    print(theirs["bytes_up"], theirs["bytes_down"])
