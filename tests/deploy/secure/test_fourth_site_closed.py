"""A site without labels beside sites whose models leave masked, and as the reader of sealed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from federations import write_kits
from loopback import model, same
from test_fourth_site import LABELLED, PROTOCOL, both

ADAPT = {"kind": "adapt_to_one", "targets": ["va"], "seeds": [0], "test_fraction": 0.3}


@pytest.mark.parametrize(
    ("method", "protocol", "engine"),
    [
        ("fedavg", {**PROTOCOL, "targets": ["va"]}, {"aggregation": "secure"}),
        ({"name": "shot", "bottleneck": 4}, ADAPT, {"routing": "sealed"}),
    ],
)
def test_it_gets_the_model_of_the_simulation(
    method: Any, protocol: dict[str, Any], engine: dict[str, Any], tmp_path: Path
) -> None:
    write_kits(tmp_path, [*LABELLED, "va"])
    deployed, simulated, _ = both(tmp_path, method, protocol, **engine)
    name = method if isinstance(method, str) else method["name"]
    run = next((tmp_path / "va" / "received").iterdir())
    here = model(simulated.folder, name, "va")
    if "routing" not in engine:
        assert same(model(deployed, name, "va"), here)
    assert len(pd.read_parquet(run / "predictions.parquet")) == 70
    assert "too few sites" in json.loads((run / "estimate.json").read_text())["reasons"][0]
