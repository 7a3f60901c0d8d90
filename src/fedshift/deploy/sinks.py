"""Sinks: where a role's service sends a copy of each line of its logs: syslog, a collector of OpenTelemetry, a file.

The service reads the logs and remembers how far it got. So a sink that is slow, full or gone delays no exchange, and
gets what it missed when it works again. A line may arrive twice, if the service was killed in between.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import logging.handlers
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedshift.deploy.chained_log import digest_of, lines_after, private
from fedshift.errors import UserError
from fedshift.extras import import_extra
from fedshift.json_objects import read_object, write_object

_PATIENCE = 5.0
_BACKOFF = (0.5, 60.0)
_MOST_OF_SYSLOG = 4096
"""Longest line that is sent to syslog as it is. Of a longer one go its digest and its plain values."""


class _Sink(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileSink(_Sink):
    """Appends to a file, such as one on a disk that only takes additions."""

    kind: Literal["file"]
    path: Path

    def send(self, line: str) -> None:
        with open(self.path, "a", encoding="utf-8", opener=private) as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


class SyslogSink(_Sink):
    """Sends to syslog: a socket of this machine, or host:port (UDP)."""

    kind: Literal["syslog"]
    address: str = "/dev/log"

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not address.startswith("/") and not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError("must be the path of a socket, or host:port")
        return address

    def send(self, line: str) -> None:
        host, _, port = self.address.rpartition(":")
        address = self.address if self.address.startswith("/") else (host, int(port))
        handler = logging.handlers.SysLogHandler(address, logging.handlers.SysLogHandler.LOG_AUTH)
        handler.ident = "fedshift: "
        failures: list[bool] = []
        handler.handleError = lambda record: failures.append(True)  # type: ignore[method-assign]
        try:
            handler.emit(logging.LogRecord("fedshift", logging.INFO, "", 0, _short(line), None, None))
        finally:
            handler.close()
        if failures:
            raise OSError(f"syslog at {self.address} takes no messages")


class OtlpSink(_Sink):
    """Sends each line as a log record to a collector of OpenTelemetry, by OTLP over HTTP. Proxies are not used."""

    kind: Literal["otlp"]
    url: str = "http://127.0.0.1:4318/v1/logs"

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError("must be http://host/… or https://host/…")
        return url

    def send(self, line: str) -> None:
        records = import_extra("opentelemetry._logs", extra="monitoring", what="sink: {kind: otlp}")
        whole = json.loads(line)
        body = whole.pop("line", "")
        logger, exporter = _collector(self.url)
        exporter.failed = False
        logger.emit(
            records.LogRecord(
                timestamp=time.time_ns(),
                severity_number=records.SeverityNumber.INFO,
                body=body,
                attributes={f"fedshift.{name}": value for name, value in whole.items()},
            )
        )
        if exporter.failed:
            raise OSError(f"the collector at {self.url} takes no records")


@functools.cache
def _collector(url: str) -> tuple[Any, Any]:
    """OpenTelemetry's logger for a collector, and its exporter, which remembers in ``failed`` whether that took all."""
    what = "sink: {kind: otlp}"
    provider = import_extra("opentelemetry.sdk._logs", extra="monitoring", what=what).LoggerProvider
    export = import_extra("opentelemetry.sdk._logs.export", extra="monitoring", what=what)
    http = import_extra("opentelemetry.exporter.otlp.proto.http._log_exporter", extra="monitoring", what=what)
    base: Any = http.OTLPLogExporter
    resource = import_extra("opentelemetry.sdk.resources", extra="monitoring", what=what).Resource
    session = import_extra("requests", extra="monitoring", what=what).Session()
    session.trust_env = False  # neither proxies nor passwords of the environment

    class Exporter(base):  # type: ignore[misc]
        failed = False

        def export(self, batch: Any) -> Any:
            result = super().export(batch)
            self.failed = result is not export.LogRecordExportResult.SUCCESS
            return result

    # One record at a time, and no retries beside those of `Forwarder`, which knows what has arrived.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter = Exporter(url, timeout=_PATIENCE, session=session)
    # Only a name: by default the resource would tell this process and its machine.
    logs = provider(resource=resource({"service.name": "fedshift"}), shutdown_on_exit=False)
    logs.add_log_record_processor(export.SimpleLogRecordProcessor(exporter))
    return logs.get_logger("fedshift"), exporter


AnySink = FileSink | SyslogSink | OtlpSink
Sink = Annotated[AnySink, Field(discriminator="kind")]


@dataclass
class Forwarder:
    """Sends what is added to some logs to a sink."""

    name: str
    sink: AnySink
    logs: Callable[[], Mapping[str, Path]]  # the logs that there are now, by name
    position_file: Path  # the file that remembers how far each log was sent
    say: Callable[[str], None]  # is told when the sink fails, and when it works again
    _failing: bool = field(default=False, init=False)

    def run(self, stopping: threading.Event) -> None:
        """Send until told to stop, then once more."""
        wait = _BACKOFF[0]
        while not stopping.wait(wait):
            wait = _BACKOFF[0] if self.forward() else min(2 * wait, _BACKOFF[1])
        self.forward()

    def forward(self) -> bool:
        """Send what is new; return whether the sink took it all. It raises nothing."""
        try:
            sent = read_object(self.position_file, "delete it, and all lines are sent again")
            for log, path in self.logs().items():
                self._forward(log, path, sent)
        except Exception as error:  # a sink that fails must not stop the role's own log
            if not self._failing:
                self.say(
                    f"the sink of the log fails ({error}): the log here is complete, and the rest is sent once it works"
                )
            self._failing = True
            return False
        if self._failing:
            self.say("the sink of the log works again")
        self._failing = False
        return True

    def _forward(self, log: str, path: Path, sent: dict[str, Any]) -> None:
        begin, number = sent.get(log, (0, 0))
        if not path.exists():
            return
        if begin > path.stat().st_size:
            self.sink.send(json.dumps({"from": self.name, "log": log, "cut_after": number}))
            begin = number = 0
        try:
            for end, line in lines_after(path, begin):
                self.sink.send(json.dumps({"from": self.name, "log": log, "number": number + 1, "line": line}))
                begin, number = end, number + 1
        finally:
            if sent.get(log) != [begin, number]:
                sent[log] = [begin, number]
                with contextlib.suppress(UserError):
                    write_object(self.position_file, sent, private=True)


def _short(line: str) -> str:
    """A line short enough for syslog: a long one is cut down to its digest and its plain values."""
    if len(line) <= _MOST_OF_SYSLOG:
        return line
    whole = json.loads(line)
    text = whole.pop("line", "")
    entry = json.loads(text)
    plain = {name: value for name, value in entry.items() if not isinstance(value, list | dict)}
    return json.dumps({**whole, "digest": digest_of(text), "short": plain})[:_MOST_OF_SYSLOG]
