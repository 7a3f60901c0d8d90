"""Four processes and a coordinator with mutual TLS: the fourth site has no labels, and gets model and estimate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml
from loopback import model, options_of, same

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")

from network import Network, environment
from test_fourth_site import LABELLED, PROTOCOL, SEND, files

import fedshift
from fedshift.deploy.remote.policy import AuditLog

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("network")
    held = files(folder / "data")
    started = Network(folder, {**LABELLED, "va": 70})
    for name in started.names:
        lacks = {"site_labels": {"va": "none"}} if name == "va" else {}
        data = {"name": "arrays", "sites": {name: held[name]}, **lacks}
        policy = {"smallest_group": 1, "exposure": 1, "models": "all", "splits": "all"}
        started.write_site(name, data=data, policy={**policy, "send": ["numbers"] if lacks else SEND})
    with environment(started):
        try:
            started.start()
            yield started
        finally:
            started.stop()


def test_a_fourth_site_without_labels(network: Network, tmp_path: Path) -> None:
    options = options_of("fedavg", name="fourth", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    folder = network.finish(network.deploy(options, unseen=False))
    held = {name: network.files[name] for name in network.names}
    data = {"name": "arrays", "sites": held, "classes": ["0", "1", "2"], "site_labels": {"va": "none"}}
    simulated = fedshift.run({**options, "data": data, "engine": {"threads": 1}}, tmp_path)
    for site in network.names:
        assert same(model(folder, "fedavg", site), model(simulated.folder, "fedavg", site))
    kit = network.made.sites["va"]
    received = next((kit / "received").iterdir())
    (here,) = simulated.estimates["va"]["fedavg"]
    there = json.loads((received / "estimate.json").read_text())
    assert [there[name] for name in ("estimate", "low", "high")] == pytest.approx([here.estimate, here.low, here.high])
    assert len(pd.read_parquet(received / "predictions.parquet")) == 70
    lines, _ = AuditLog.check(kit / "memory" / "audit.jsonl")
    assert {piece["kind"] for line in lines for piece in line.get("sent", {}).values()} == {"numbers"}
    assert yaml.safe_load((kit / "SITE.yaml").read_text())["policy"]["send"] == ["numbers"]
