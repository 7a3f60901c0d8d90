"""Secure aggregation in deployments: the bits of the local engine, whoever is lost, and nothing single leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loopback import model, result, same

pytest.importorskip("cryptography")
from federations import FOUR, deploy_secure, secure_options, simulate_secure

CSAC = {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}


@pytest.mark.parametrize("method", [{}, CSAC])
def test_same_bits_as_the_local_engine(method: dict[str, Any], tmp_path: Path) -> None:
    options = secure_options(method, model={"name": "mlp", "hidden": [6], "batch_norm": True})
    there, transport = deploy_secure(tmp_path, options)
    here = simulate_secure(tmp_path, options)
    name = options["methods"][0]["name"]
    assert same(model(here, name, "west"), model(there, name, "west"))
    ours, theirs = result(here, name, "west"), result(there, name, "west")
    assert ours["selected"] == theirs["selected"]
    assert set(theirs["bytes_up"]) == {"masked", "accuracy"}
