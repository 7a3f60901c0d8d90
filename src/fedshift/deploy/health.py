"""``/healthz`` and Prometheus' ``/metrics`` of a role's service, on a port that only this machine reaches.

Both are counts and states. No name of a site, run, file or person is a label, and nothing of samples is told.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from fedshift.deploy.chained_log import lines_after, objects_in
from fedshift.errors import UserError
from fedshift.extras import import_extra

ADDRESS = "127.0.0.1"
_WHAT = "monitor"
_ANSWERED = ("hello", "call", "measure", "predict", "estimate", "end")
"""Kinds of requests that have a label of their own."""
_SECONDS = 5
"""Within which a client must ask."""


@dataclass(frozen=True)
class Health:
    """How a role is now. ``sites``: at the coordinator, how many are connected, and of how many."""

    state: str
    starts: int = 0
    sites: tuple[int, int] | None = None

    @property
    def ready(self) -> bool:
        """Whether the role can take part in a run."""
        return self.state == "connected"


@dataclass(eq=False)
class RoleMetrics:
    """What Prometheus is told of a role: a collector of `prometheus_client`."""

    role: str
    health: Callable[[], Health]
    # the logs that there are now: a site's audit log, or the coordinator's deployments'
    logs: Callable[[], Iterable[Path]]
    folder: Path
    _read: dict[Path, int] = field(default_factory=dict, init=False)
    _events: Counter[tuple[str, str]] = field(default_factory=Counter, init=False)
    _bytes: Counter[str] = field(default_factory=Counter, init=False)
    _last: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def collect(self) -> Iterator[Any]:
        """The metrics now."""
        core = import_extra("prometheus_client.core", extra="monitoring", what=_WHAT)

        def gauge(name: str, text: str, value: float) -> Any:
            return core.GaugeMetricFamily(f"fedshift_{name}", text, value=value)

        with self._lock:
            self._read_logs()
            now = self.health()
            yield gauge("ready", "1 if the role is connected and can take part in a run", float(now.ready))
            states = core.GaugeMetricFamily("fedshift_state", "1 for the state of the service", labels=["state"])
            states.add_metric([now.state], 1)
            yield states
            yield core.CounterMetricFamily("fedshift_flare_starts", "starts of FLARE's process", value=now.starts)
            if now.sites is not None:
                yield gauge("sites_connected", "sites that are connected", now.sites[0])
                yield gauge("sites", "sites of the project", now.sites[1])
            yield gauge("disk_free_bytes", "free bytes on the role's disk", shutil.disk_usage(self.folder).free)
            yield gauge("last_event_timestamp_seconds", "time of the last line of the log; 0 = none", self._last)
            events = core.CounterMetricFamily(
                f"fedshift_{'requests' if self.role == 'site' else 'events'}",
                "lines of the role's log, by what was done and what came of it",
                labels=["do", "outcome"],
            )
            for (what, outcome), number in sorted(self._events.items()):
                events.add_metric([what, outcome], number)
            yield events
            for way in ("received", "sent") if self.role == "site" else ():
                yield core.CounterMetricFamily(f"fedshift_{way}_bytes", f"bytes {way}", value=self._bytes[way])

    def describe(self) -> Iterator[Any]:
        """Nothing beforehand: `collect` is then not called when this is registered."""
        return iter(())

    def _read_logs(self) -> None:
        """Count what was added. A log that was begun anew is read from its start; nothing is taken back."""
        for path in filter(Path.exists, self.logs()):
            begin = self._read.get(path, 0)
            self._read[path] = begin if path.stat().st_size >= begin else 0
            for end, line in lines_after(path, self._read[path]):
                self._read[path] = end
                for entry in objects_in([line]):
                    self._count(entry)

    def _count(self, line: dict[str, Any]) -> None:
        when = line.get("time")
        self._last = max(self._last, float(when)) if isinstance(when, int | float) else self._last
        if self.role == "site":
            self._events[_request(line)] += 1
            for way in ("received", "sent"):
                size = line.get(f"{way}_bytes")
                self._bytes[way] += size if isinstance(size, int) and size > 0 else 0
        elif (event := _event(line)) is not None:
            self._events[event] += 1


def _request(line: dict[str, Any]) -> tuple[str, str]:
    outcome = next((name for name in ("refused", "failed") if line.get(name)), "answered")
    return (line["do"] if line.get("do") in _ANSWERED else "other"), outcome


def _event(line: dict[str, Any]) -> tuple[str, str] | None:
    """Of a deployment's progress: runs begun and finished, rounds, losses and refusals, warnings."""
    what, outcome = line.get("what"), line.get("is")
    if what in ("round", "warning"):
        return str(what), "done"
    if what == "run" and outcome in ("begun", "finished"):
        return "run", str(outcome)
    return ("exchange", str(outcome)) if outcome in ("lost", "refused") else None


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    timeout = _SECONDS

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def monitor_server(port: int, metrics: RoleMetrics) -> WSGIServer:
    """A server of ``/healthz`` and ``/metrics`` for this machine alone; call ``serve_forever`` in a thread. UserError
    if the port is taken, or prometheus-client is not installed. ``port``: on 127.0.0.1; 0: any."""
    prometheus = import_extra("prometheus_client", extra="monitoring", what=_WHAT)
    registry = prometheus.CollectorRegistry()
    registry.register(metrics)
    prometheus.ProcessCollector(registry=registry)
    pages = {"/metrics": prometheus.make_wsgi_app(registry, disable_compression=True), "/healthz": _health(metrics)}

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        # A page of a stranger may have a name that leads here; this machine's own names are the only ones answered.
        known = {f"{name}:{server.server_port}" for name in (ADDRESS, "localhost")}
        if environ.get("HTTP_HOST") not in known:
            return _plain(start, "403 Forbidden", "not for this name")
        page = pages.get(environ.get("PATH_INFO", ""))
        if page is None or environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _plain(start, "404 Not Found", "/healthz and /metrics")
        answer: Iterable[bytes] = page(environ, start)
        return answer

    try:
        server = make_server(ADDRESS, port, application, _Server, _Handler)
    except OSError as error:
        raise UserError(f"monitor: port {port} cannot be used ({error.strerror}): choose another one") from None
    return server


def _health(metrics: RoleMetrics) -> Callable[..., Iterable[bytes]]:
    def page(_: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        now = metrics.health()
        body = {"ready": now.ready, "state": now.state, "time": time.time()}
        return _plain(start, "200 OK" if now.ready else "503 Service Unavailable", json.dumps(body), "application/json")

    return page


def _plain(start: Callable[..., Any], status: str, body: str, kind: str = "text/plain") -> Iterable[bytes]:
    start(status, [("Content-Type", f"{kind}; charset=utf-8"), ("Cache-Control", "no-store")])
    return [body.encode()]
