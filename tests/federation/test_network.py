"""Three sites and a coordinator as processes, with mutual TLS: the bits of the local engine, whatever dies."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import SITES, options_of, simulate
from safetensors.torch import load_file

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'fedshift[deploy]'")

from network import Network, asked, rounds

pytestmark = pytest.mark.slow
ADAPT = {"kind": "adapt_to_one", "targets": ["east"], "seeds": [0], "test_fraction": 0.3}
THREE = [{"name": "fedavg"}, {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}, {"name": "kd3a"}]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    here = Path(__file__).parent
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), *([before] if before else [])])
    started = Network(tmp_path_factory.mktemp("network"))
    try:
        started.start()
        yield started
    finally:
        started.stop()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def model(folder: Path, method: str, target: str) -> dict[str, torch.Tensor]:
    return load_file(folder / method / target / "seed-0" / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_fedavg_csac_and_kd3a_end_in_the_bits_of_the_local_engine(network: Network, tmp_path: Path) -> None:
    options: dict[str, Any] = options_of({}, name="three", protocol=ADAPT, methods=THREE)
    deployment = network.deploy(options, unseen=False)
    there = network.finish(deployment)
    here = simulate(tmp_path, options, unseen={})
    for method in THREE:
        name = str(method["name"])
        assert same(model(here, name, "east"), model(there, name, "east")), name
    assert (there / "order.json").read_text() == (here / "order.json").read_text()


def test_only_the_coordinator_listens_to_others(network: Network) -> None:
    """FLARE's processes of a role speak to each other over a loopback port; none is open to other machines."""
    import psutil

    for kit in (network.coordinator, *network.made.sites.values()):
        for process in network.processes(kit):
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip.startswith("127."), (process.cmdline(), connection)


def test_a_run_survives_whatever_is_killed(network: Network, tmp_path: Path) -> None:
    """A site's job in mid-step, a whole site, the whole coordinator: each killed with -9, two of them started again."""
    method = {"name": "slow_method:Slow", "label": "slow", "seconds": 0.6}
    options = options_of(method, name="faults")
    options["training"] = {**options["training"], "rounds": 5}
    deployment = network.deploy(options)

    network.wait(deployment, lambda: asked(deployment, 2))
    time.sleep(0.3)
    assert network.kill(network.made.sites["north"], only="worker_process") == 1

    network.wait(deployment, lambda: rounds(deployment) >= 2 and asked(deployment, 3))
    assert network.kill(network.made.sites["south"]) >= 2
    network.start("south")

    network.wait(deployment, lambda: rounds(deployment) >= 3 and asked(deployment, 4))
    assert network.kill(network.coordinator) >= 2
    network.start("coordinator")

    there = network.finish(deployment)
    options["methods"] = [{**method, "seconds": 0.0}]
    here = simulate(tmp_path, options)
    assert same(model(here, "slow", "west"), model(there, "slow", "west"))
    events = list(deployment.events())
    jobs = [event["is"] for event in events if event.get("what") == "job"]
    assert "died" in jobs
    assert any(event.get("what") == "site" and event["site"] == "south" for event in events)
    lines = [json.loads(line) for line in (there / "slow/west/seed-0/rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, 6))
    for name in SITES:
        assert not list((network.made.sites[name] / "memory").glob("faults-*")), "a finished run is forgotten at sites"
