"""A federation whose sites reach the coordinator only through a proxy; health and metrics of its roles meanwhile."""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from connect_proxy import ConnectProxy
from loopback import options_of, simulate
from network import Network
from outcomes import model, same

from fedshift.deploy.flare import roles

pytestmark = pytest.mark.slow
MONITORED = importlib.util.find_spec("prometheus_client") is not None


def fetch(port: int, page: str) -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://127.0.0.1:{port}/{page}", timeout=10) as answer:
        return str(answer.read().decode())


def ready(port: int) -> bool:
    try:
        return bool(json.loads(fetch(port, "healthz"))["ready"])
    except urllib.error.URLError:
        return False


def test_a_run_through_a_proxy_ends_in_the_same_bits(tmp_path: Path) -> None:
    """TLS of both ends runs inside the tunnel; a monitor says that the roles are ready, and what they did."""
    network, proxy = Network(tmp_path), ConnectProxy("site:secret")
    ports = {"coordinator": roles.free_port(), "north": roles.free_port()} if MONITORED else {}
    (network.coordinator / "COORDINATOR.yaml").write_text(yaml.safe_dump({"monitor": ports.get("coordinator")}))
    for name in network.names:
        network.write_site(name, proxy=proxy.url, monitor=ports.get(name))
    options = options_of({}, name="proxied", methods=["fedavg"])
    try:
        network.start()
        folder = network.finish(network.deploy(options))
        assert same(model(simulate(tmp_path / "here", options), "fedavg", "west"), model(folder, "fedavg", "west"))
        port = roles.load_kit(network.coordinator, "coordinator").project.port
        assert set(proxy.asked) == {f"localhost:{port}"}
        assert len(proxy.asked) >= 2 * len(network.names), "each site's client, and its job"
        for word in (b"fedavg", b"north", b"weights"):
            assert word not in proxy.seen
        for port in ports.values():
            assert ready(port)
        if ports:
            assert 'fedshift_requests_total{do="call",outcome="answered"} ' in fetch(ports["north"], "metrics")
            assert "fedshift_sites_connected 3.0" in fetch(ports["coordinator"], "metrics")
    finally:
        network.stop()
        proxy.close()


def test_a_site_with_grpc_connects_through_a_proxy(tmp_path: Path) -> None:
    network, proxy = Network(tmp_path, {"north": 30}, scheme="grpc"), ConnectProxy()
    network.write_site("north", proxy=proxy.url)
    try:
        network.start("coordinator", "north")
        network.until(lambda: roles.status(roles.load_kit(network.coordinator, "coordinator")).sites == ("north",))
        assert len(proxy.asked) >= 2, "the check of the way, and FLARE's client"
        proxy.close()
        network.until(lambda: roles.status(roles.load_kit(network.made.sites["north"], "site")).state == "retrying")
    finally:
        network.stop()
        proxy.close()
