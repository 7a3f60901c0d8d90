"""Health and metrics of a role: what they say, to whom, and that they say nothing else."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshift.deploy.chained_log import append_line
from fedshift.deploy.health import Health, RoleMetrics, monitor_server
from fedshift.errors import UserError

REASON = "prometheus-client is not installed: pip install -e '.[monitoring]'"


class Role:
    """A role that is watched: its state, its log, and the port of its monitor."""

    def __init__(self, folder: Path, role: str) -> None:
        self.log = folder / "log.jsonl"
        self.health = Health("starting")
        metrics = RoleMetrics(role, lambda: self.health, lambda: [self.log], folder)
        self.server = monitor_server(0, metrics)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        way = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=10)
        way.request(method, path, headers=headers)
        answer = way.getresponse()
        body = answer.read().decode()
        way.close()
        return answer.status, body

    def metrics(self) -> dict[str, float]:
        """By name and labels, as Prometheus' own parser reads them."""
        from prometheus_client.parser import text_string_to_metric_families as parsed

        status, body = self.get("/metrics")
        assert status == 200
        samples = [sample for family in parsed(body) for sample in family.samples]
        return {
            f"{measurement.name}{''.join(f' {value}' for value in measurement.labels.values())}": measurement.value
            for measurement in samples
        }


@pytest.fixture
def role(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Role]:
    pytest.importorskip("prometheus_client", reason=REASON)
    role = Role(tmp_path, getattr(request, "param", "site"))
    yield role
    role.server.shutdown()
    role.server.server_close()


def test_health_is_that_of_the_service(role: Role) -> None:
    status, body = role.get("/healthz")
    assert (status, json.loads(body)["state"]) == (503, "starting")
    role.health = Health("connected")
    status, body = role.get("/healthz")
    assert (status, json.loads(body)["ready"]) == (200, True)
    role.health = Health("retrying")
    assert role.get("/healthz")[0] == 503


def test_requests_and_bytes_of_a_site_are_counted_once(role: Role) -> None:
    for number in range(3):
        append_line(role.log, {"time": 5.0 + number, "do": "call", "sent_bytes": 10, "received_bytes": 7})
    append_line(role.log, {"time": 9.5, "do": "call", "refused": "no", "received_bytes": 7})
    append_line(role.log, {"do": "x" * 40, "failed": "no"})
    for _ in range(2):
        metrics = role.metrics()
    assert metrics["fedshift_requests_total call answered"] == 3
    assert metrics["fedshift_requests_total call refused"] == 1
    assert metrics["fedshift_requests_total other failed"] == 1
    assert (metrics["fedshift_sent_bytes_total"], metrics["fedshift_received_bytes_total"]) == (30, 28)
    assert metrics["fedshift_last_event_timestamp_seconds"] == 9.5
    assert metrics["fedshift_disk_free_bytes"] > 0
    append_line(role.log, {"time": 10.0, "do": "call"})
    role.log.open("a").write('{"do": "call", "half')
    assert role.metrics()["fedshift_requests_total call answered"] == 4
    role.log.unlink()
    append_line(role.log, {"time": 11.0, "do": "hello"})
    assert role.metrics()["fedshift_requests_total hello answered"] == 1


@pytest.mark.parametrize("role", ["coordinator"], indirect=True)
def test_a_coordinator_counts_sites_rounds_and_losses(role: Role) -> None:
    role.health = Health("connected", starts=2, sites=(3, 4))
    for event in (
        {"what": "run", "is": "begun"},
        {"what": "round", "round": 1},
        {"what": "fit", "site": "north", "is": "lost", "reason": "patient 17"},
        {"what": "trained", "site": "north"},
    ):
        append_line(role.log, event)
    metrics = role.metrics()
    assert (metrics["fedshift_sites_connected"], metrics["fedshift_sites"], metrics["fedshift_ready"]) == (3, 4, 1)
    assert (metrics["fedshift_flare_starts_total"], metrics["fedshift_state connected"]) == (2, 1)
    assert (metrics["fedshift_events_total round done"], metrics["fedshift_events_total exchange lost"]) == (1, 1)


@pytest.mark.parametrize("role", ["site", "coordinator"], indirect=True)
def test_no_name_and_no_reason_gets_out(role: Role) -> None:
    secret = "patient17"
    line = {"run": secret, "coordinator": secret, "method": secret, "do": secret, "site": secret, "reason": secret}
    append_line(role.log, {**line, "refused": secret, "what": "fit", "is": "refused"})
    assert secret not in role.get("/metrics")[1] + role.get("/healthz")[1]


def test_only_this_machine_is_answered(role: Role) -> None:
    port = role.server.server_port
    assert role.server.server_address[0] == "127.0.0.1"
    assert role.get("/healthz", Host="evil.example.org")[0] == 403
    assert role.get("/metrics", Host=f"evil.example.org:{port}")[0] == 403
    assert role.get("/metrics", Host=f"localhost:{port}")[0] == 200
    for path, method in (("/", "GET"), ("/metrics", "POST"), ("/metrics/../etc", "GET")):
        assert role.get(path, method)[0] == 404
    with socket.socket() as elsewhere, pytest.raises(OSError, match="refused"):
        elsewhere.connect(("127.0.0.2", port))


def test_a_client_that_says_nothing_keeps_nobody_out(role: Role) -> None:
    with socket.create_connection(("127.0.0.1", role.server.server_port)):
        assert role.get("/healthz")[0] == 503


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics: Any = RoleMetrics("site", lambda: Health("starting"), list, tmp_path)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(UserError, match=r"fedshift\[monitoring\]"):
            monitor_server(0, metrics)
    pytest.importorskip("prometheus_client", reason=REASON)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="choose another"):
        monitor_server(taken.getsockname()[1], metrics)
