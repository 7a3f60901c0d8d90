"""Sinks: what they get, what happens when they fail, and what a role's own file may say of them."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from outcomes import one_line

from fedshift.deploy.chained_log import append_line, checked_lines, lines_of
from fedshift.deploy.role_file import audit_log_of, role_file
from fedshift.deploy.sinks import FileSink, Forwarder, OtlpSink, SyslogSink

ABSENT = "is not installed: pip install -e '.[monitoring]'"


class Collector:
    """A collector of OpenTelemetry's on loopback, which takes log records by OTLP, and answers with ``status``."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as otlp

        self.got: list[dict[str, Any]] = []
        self.resources: list[dict[str, str]] = []
        self.paths: set[str] = set()
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.paths.add(self.path)
                if outer.status == 200:
                    for resource in otlp.ExportLogsServiceRequest.FromString(body).resource_logs:
                        told = resource.resource.attributes
                        outer.resources.append(
                            {record_of_scope.key: record_of_scope.value.string_value for record_of_scope in told}
                        )
                        for record in (
                            record_of_scope for scope in resource.scope_logs for record_of_scope in scope.log_records
                        ):
                            whole = {
                                record_of_scope.key.removeprefix("fedshift."): record_of_scope.value.int_value
                                or record_of_scope.value.string_value
                                for record_of_scope in record.attributes
                            }
                            outer.got.append({**whole, "line": record.body.string_value})
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/logs"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=f"OpenTelemetry {ABSENT}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # proxies are not used
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def forwarder(folder: Path, sink: Any, messages: list[str] | None = None) -> Forwarder:
    logs = {"audit": folder / "audit.jsonl"}
    return Forwarder(
        "north", sink, lambda: logs, folder / "sent.json", (messages if messages is not None else []).append
    )


def write(folder: Path, *numbers: int) -> None:
    for number in numbers:
        append_line(folder / "audit.jsonl", {"number": number})


def test_each_line_arrives_once_and_whole(collector: Collector, tmp_path: Path) -> None:
    sink = OtlpSink(kind="otlp", url=collector.url)
    write(tmp_path, 0, 1)
    assert forwarder(tmp_path, sink).forward()
    write(tmp_path, 2)
    with open(tmp_path / "audit.jsonl", "a") as log:
        log.write('{"half')
    assert forwarder(tmp_path, sink).forward()  # a service that was started anew
    assert [record["line"] for record in collector.got] == lines_of(tmp_path / "audit.jsonl")
    assert [(record["from"], record["log"], record["number"]) for record in collector.got] == [
        ("north", "audit", number) for number in (1, 2, 3)
    ]
    assert collector.paths == {"/v1/logs"}
    assert all(told == {"service.name": "fedshift"} for told in collector.resources)


@pytest.mark.threat("stopped_sink")
def test_a_sink_that_fails_is_said_once_and_misses_nothing(collector: Collector, tmp_path: Path) -> None:
    messages: list[str] = []
    sent = forwarder(tmp_path, OtlpSink(kind="otlp", url=collector.url), messages)
    collector.status = 503
    for number in range(3):
        write(tmp_path, number)
        assert not sent.forward()
    assert len(messages) == 1
    assert collector.url in messages[0]
    assert len(checked_lines(tmp_path / "audit.jsonl")) == 3
    collector.status = 200
    assert sent.forward()
    assert ([json.loads(record["line"])["number"] for record in collector.got], len(messages)) == ([0, 1, 2], 2)


def test_nobody_listens(tmp_path: Path) -> None:
    messages: list[str] = []
    write(tmp_path, 0)
    for sink in (
        FileSink(kind="file", path=tmp_path / "absent" / "file"),
        SyslogSink(kind="syslog", address=str(tmp_path / "absent")),
    ):
        assert not forwarder(tmp_path, sink, messages).forward()
    assert len(messages) == 2


@pytest.mark.threat("cut_log")
def test_lines_that_were_cut_off_are_told(tmp_path: Path) -> None:
    sink = FileSink(kind="file", path=tmp_path / "copy")
    write(tmp_path, 0, 1)
    forwarder(tmp_path, sink).forward()
    (tmp_path / "audit.jsonl").unlink()
    write(tmp_path, 5)
    forwarder(tmp_path, sink).forward()
    copy = [json.loads(line) for line in (tmp_path / "copy").read_text().splitlines()]
    assert [entry.get("number", f"cut after {entry.get('cut_after')}") for entry in copy] == [1, 2, "cut after 2", 1]
    assert os.stat(tmp_path / "copy").st_mode & 0o777 == 0o600


def test_syslog_gets_a_line_that_it_can_take(tmp_path: Path) -> None:
    """Over its socket and over UDP; a long line without its shapes, with its digest."""
    udp, local = socket.socket(type=socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with udp, local:
        udp.bind(("127.0.0.1", 0))
        local.bind(str(tmp_path / "log"))
        append_line(tmp_path / "audit.jsonl", {"do": "call", "sent": {"shapes": "x" * 100_000}})
        for receiver, address in ((udp, f"127.0.0.1:{udp.getsockname()[1]}"), (local, str(tmp_path / "log"))):
            receiver.settimeout(5)
            (tmp_path / "sent.json").unlink(missing_ok=True)
            assert forwarder(tmp_path, SyslogSink(kind="syslog", address=address)).forward()
            got = receiver.recv(1 << 20).rstrip(b"\0").decode()
            assert got.startswith("<38>fedshift: ")  # authorisation, information
            entry = json.loads(got.partition("fedshift: ")[2])
            assert (entry["short"]["do"], len(entry["digest"])) == ("call", 64)
            assert len(got) < 5000


def test_a_service_sends_until_it_is_told_to_stop(collector: Collector, tmp_path: Path) -> None:
    stopping = threading.Event()
    sent = forwarder(tmp_path, OtlpSink(kind="otlp", url=collector.url))
    thread = threading.Thread(target=sent.run, args=(stopping,))
    thread.start()
    write(tmp_path, 0)
    stopping.set()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert len(collector.got) == 1


def test_without_opentelemetry_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry._logs", None)
    messages: list[str] = []
    write(tmp_path, 0)
    assert not forwarder(tmp_path, OtlpSink(kind="otlp"), messages).forward()
    assert "fedshift[monitoring]" in messages[0]


@pytest.mark.parametrize(
    ("sink", "word"),
    [
        ({"kind": "pigeon"}, "syslog"),
        ({"kind": "http", "url": "http://host/"}, "otlp"),
        ({"kind": "otlp", "url": "ftp://host/"}, "https"),
        ({"kind": "otlp", "url": "http://user:secret@host/"}, "https"),
        ({"kind": "syslog", "address": "host"}, "host:port"),
        ({"kind": "file"}, "required"),
        ({"kind": "file", "path": "a", "more": 1}, "not permitted"),
        ("file", "valid"),
    ],
)
def test_mistakes_in_a_sink_are_one_line(sink: Any, word: str, tmp_path: Path) -> None:
    (tmp_path / "SITE.yaml").write_text(yaml.safe_dump({"sink": sink}))
    with one_line(word):
        role_file(tmp_path / "SITE.yaml")


def test_what_the_service_reads_is_what_the_site_reads(tmp_path: Path) -> None:
    from fedshift.deploy.site_file import load_site

    file = tmp_path / "SITE.yaml"
    options = {"site": "north", "data": {"name": "arrays"}, "memory": "../elsewhere"}
    file.write_text(yaml.safe_dump({**options, "sink": {"kind": "file", "path": "copy"}}))
    site = load_site(file)
    assert audit_log_of(file) == site.audit_log
    assert role_file(file).sink == FileSink(kind="file", path=tmp_path / "copy")
    assert site.file.sink == FileSink(kind="file", path=Path("copy"))
    file.write_text(yaml.safe_dump(options))
    assert role_file(file).sink is None is load_site(file).file.sink
    assert role_file(tmp_path / "COORDINATOR.yaml").sink is None


@pytest.mark.parametrize("role", ["site", "coordinator"])
def test_a_roles_service_forwards_its_logs(role: Any, tmp_path: Path) -> None:
    """What SITE.yaml names, and the file COORDINATOR.yaml in the coordinator's kit; nothing without it."""
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")
    from fedshift.deploy.flare.kits import Kit, Project
    from fedshift.deploy.flare.service import Service

    options = {"name": "p", "contact": "a@example.org", "server": "localhost", "sites": ("north",)}
    kit = Kit(tmp_path, role, "north" if role == "site" else "coordinator", Project.model_validate(options))
    role_file = tmp_path / ("SITE.yaml" if role == "site" else "COORDINATOR.yaml")
    log = tmp_path / ("memory/audit.jsonl" if role == "site" else "deployments/study/progress.jsonl")
    log.parent.mkdir(parents=True)
    service = Service(kit, role_file if role == "site" else None)
    assert service._forward_logs() is None
    role_file.write_text(yaml.safe_dump({"sink": {"kind": "file", "path": "copy"}}))
    thread = service._forward_logs()
    assert thread is not None
    append_line(log, {"number": 0})
    service.stopping.set()
    thread.join(timeout=10)
    (copy,) = [json.loads(line) for line in (tmp_path / "copy").read_text().splitlines()]
    assert (copy["from"], copy["log"]) == (kit.name, "audit" if role == "site" else "study")
    assert json.loads(copy["line"])["number"] == 0
