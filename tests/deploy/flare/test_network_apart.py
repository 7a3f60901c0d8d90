"""Machines of their own, as far as one machine can play that, and masks: killed between the two exchanges of a sum."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from loopback import options_of, simulate
from namespaces import COORDINATOR, PORT, Namespaces, why_not
from network import Gates, Network, environment
from outcomes import alike, audit
from site_yaml import SITES
from test_fourth_site import LABELLED, PROTOCOL, SEND, files

import fedshift
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.secure.identity import Identity

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Three sites that send no model but masked, and know each other's certificates; in namespaces where possible."""
    folder = tmp_path_factory.mktemp("network")
    started = Network(folder) if why_not() else Namespaces(folder, SITES)
    peers = {name: Identity.of_kit(kit, name).fingerprint for name, kit in started.made.sites.items()}
    policy: dict[str, Any] = {"smallest_group": 1, "methods": ["slow_method:Slow"], "secure": "required"}
    for name in started.names:
        started.write_site(name, policy={**policy, "peers": peers})
    with environment(started):
        try:
            if isinstance(started, Namespaces):
                started.connect()
            started.start()
            yield started
        finally:
            started.stop()
            if isinstance(started, Namespaces):
                started.disconnect()


def has_happened(deployment: Deployment, what: str, outcome: str, round_number: int, site: str) -> bool:
    wanted = {"what": what, "is": outcome, "round": round_number, "site": site}
    return any(wanted.items() <= event.items() for event in deployment.events())


def halt(network: Network, gates: Gates, deployment: Deployment, round_number: int) -> list[int]:
    """Halt the job of a site that has answered the first exchange of a round, and wait until the second has begun.

    Another site is in the first until this one is halted. The second lasts until `engine.patience` is over, since this
    site confirms nothing.
    """
    network.wait(deployment, lambda: has_happened(deployment, "fit", "answered", round_number, "east"))
    jobs = [process.pid for process in network.jobs(network.made.sites["east"])]
    for job in jobs:
        os.kill(job, signal.SIGSTOP)
    gates.open(round_number)
    network.wait(deployment, lambda: has_happened(deployment, "confirm", "asked", round_number, "east"))
    assert not has_happened(deployment, "confirm", "answered", round_number, "east")
    return jobs


@dataclass
class Played:
    """A run of which a site, then the coordinator was killed between the two exchanges of a sum."""

    options: dict[str, Any]
    deployment: Deployment
    folder: Path
    """Its results."""
    sockets: dict[str, list[tuple[str, str, bool]]] = field(default_factory=dict)
    """What every role's namespace held in the first round: (near, far, whether it listens)."""


@pytest.fixture(scope="module")
def whole_run(network: Network) -> Played:
    gates = Gates(network.folder, "slow", only_at="south")
    options = options_of(gates.method, name="sums")
    deployment = network.deploy(options, aggregation="secure", patience=60.0)
    whole_run = Played(options, deployment, Path())
    assert halt(network, gates, deployment, 1)
    if isinstance(network, Namespaces):
        whole_run.sockets = {name: network.sockets(name) for name in ("coordinator", *network.names)}
    assert network.kill(network.made.sites["east"], only="worker_process") == 1

    jobs = halt(network, gates, deployment, 2)
    assert network.kill(network.coordinator) >= 2
    for job in jobs:
        os.kill(job, signal.SIGCONT)
    gates.open(3)
    network.start("coordinator")
    whole_run.folder = network.finish(deployment)
    return whole_run


def test_killed_between_exchanges_the_bits_are_equal(network: Network, whole_run: Played, tmp_path: Path) -> None:
    assert [event["status"] for event in whole_run.deployment.events() if event.get("is") == "died"] == ["SITE_FAILED"]
    here = simulate(
        tmp_path,
        {**whole_run.options, "methods": [{"name": "slow_method:Slow", "label": "slow"}]},
        aggregation="secure",
    )
    assert alike(here, whole_run.folder, "slow")
    for name in network.names:
        lines = audit(network.made.sites[name])
        calls = [line for line in lines if line["do"] == "call"]
        assert {line["round"] for line in calls if line.get("again")} >= {1, 2}, "kept answers are given again"
        assert {piece["kind"] for line in calls for piece in line["sent"].values()} == {"masked"}


@pytest.mark.threat("another_way_in")
def test_in_network_namespaces_of_their_own(network: Network, whole_run: Played) -> None:
    """As on four machines: no socket of a site but to the coordinator, one port at the coordinator."""
    if not isinstance(network, Namespaces):
        pytest.skip(why_not())
    door = f"{COORDINATOR}:{PORT}"
    for name in network.names:
        held = {(far, listens) for _, far, listens in whole_run.sockets[name]}
        assert held == {(door, False)}, whole_run.sockets[name]
    sockets = whole_run.sockets["coordinator"]
    assert {near for near, _, listens in sockets if listens} == {f"0.0.0.0:{PORT}"}
    assert all(listens or door in (near, far) for near, far, listens in sockets), sockets


@pytest.fixture(scope="module")
def network_without_labels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("network_without_labels")
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


def test_a_fourth_site_without_labels(network_without_labels: Network, tmp_path: Path) -> None:
    options = options_of("fedavg", name="fourth", protocol=PROTOCOL, evaluation={"resamples": 0})
    folder = network_without_labels.finish(network_without_labels.deploy(options, unseen=False))
    held = {name: network_without_labels.files[name] for name in network_without_labels.names}
    data = {"name": "arrays", "sites": held, "classes": ["0", "1", "2"], "site_labels": {"va": "none"}}
    simulated = fedshift.run({**options, "data": data, "engine": {"threads": 1}}, tmp_path)
    for site in network_without_labels.names:
        assert alike(folder, simulated.folder, "fedavg", site)
    kit = network_without_labels.made.sites["va"]
    received = next((kit / "received").iterdir())
    (here,) = simulated.estimates["va"]["fedavg"]
    there = json.loads((received / "estimate.json").read_text())
    assert [there[name] for name in ("estimate", "low", "high")] == pytest.approx([here.estimate, here.low, here.high])
    assert len(pd.read_parquet(received / "predictions.parquet")) == 70
    lines = audit(kit)
    assert {piece["kind"] for line in lines for piece in line.get("sent", {}).values()} == {"numbers"}
    assert yaml.safe_load((kit / "SITE.yaml").read_text())["policy"]["send"] == ["numbers"]
