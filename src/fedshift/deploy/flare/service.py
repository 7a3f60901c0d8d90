"""The service of a role: it keeps FLARE's process running and, at the coordinator, runs the deployments.

``python -m fedshift.deploy.flare.service KIT [SITE.yaml]`` runs until it is told to stop (SIGTERM, Ctrl-C). It
writes its status to ``service.json`` in the kit.

The service holds a lock as long as it lives, which says whether it runs, and lets no second one run. A process number
in a file says less: after a kill it may be another process's, and in a container it is always 1.

Its logs are in the kit. ``service.log`` is for people: a line for each event, with time, severity, what happened and
what to do. ``flare.log`` holds whatever FLARE's processes print. Of these lines those of our own listener and
lock-down, FLARE's errors, and that there was a traceback, are events, too; equal ones once a minute.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import logging.handlers
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from fedshift.deploy.flare import kit_checks, lockdown
from fedshift.deploy.flare.jobs import Attendance, Deployments
from fedshift.deploy.flare.kits import Kit, empty_channel, load_kit
from fedshift.deploy.health import Health, RoleMetrics, monitor_server
from fedshift.deploy.proxy import proxy_address, proxy_for, proxy_variables
from fedshift.deploy.role_file import COORDINATOR_FILE, audit_log_of, role_file
from fedshift.deploy.sinks import Forwarder
from fedshift.errors import FedshiftError, UserError
from fedshift.extras import runs_program
from fedshift.files import opened_lock
from fedshift.json_objects import write_object
from fedshift.text import printable

if TYPE_CHECKING:
    from fedshift.deploy.flare.kits import Kit

LOCK = "service.lock"
_SECONDS = 2.0
"""How long a service waits for the lock: whoever looks whether one runs has it for a moment, as has one that ends."""


@contextmanager
def only_service(kit: Kit) -> Iterator[None]:
    """Let no other service of the kit run inside the block, nor what this process starts keep the lock."""
    with opened_lock(kit.folder / LOCK) as file:
        deadline = time.monotonic() + _SECONDS
        while not _take(file):
            if time.monotonic() > deadline:
                number = _number(file)
                who = f" (process {number})" if number else ""
                raise UserError(f"{kit.role} '{kit.name}' runs already{who}; stop it first")
            time.sleep(0.05)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield


def holder(kit: Kit) -> int | None:
    """The number of the service's process, in its own container if it has one; None if no service runs."""
    if not (kit.folder / LOCK).exists():
        return None
    with opened_lock(kit.folder / LOCK) as file:
        return None if _take(file) else _number(file)


def _take(file: int) -> bool:
    """Take the lock, unless somebody has it. It is given back when the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _number(file: int) -> int:
    text = os.pread(file, 20, 0)
    return int(text) if text.isdigit() else 0


EVENTS, RAW = "service.log", "flare.log"
_LARGEST, _KEPT = 20 << 20, 3
"""Bytes of a log, and how many older ones are kept."""
_LINE = re.compile(r"[\d-]+ [\d:,]+ - ([\w.]+) - (WARNING|ERROR|CRITICAL) - (.*)")
"""A line as FLARE's processes log it."""
_OURS = ("listener", "lockdown")
_NUMBERS = re.compile(r"\d+")
_QUIET = 60.0
"""Seconds in which an event of FLARE's processes is not said again."""
_MOST_REMEMBERED = 500


class ServiceLog:
    """Writes both logs. ``folder``: the kit's."""

    def __init__(self, folder: Path) -> None:
        self._events = _logger(folder / EVENTS, "%(asctime)s %(levelname)s %(message)s")
        self._raw = _logger(folder / RAW, "%(message)s")
        self._last_events: dict[str, float] = {}

    def event(self, text: str, level: int = logging.INFO) -> None:
        """Write an event. ``level``: a severity of `logging`."""
        self._events.log(level, " ".join(printable(text).split()))

    def output(self, line: str) -> None:
        """Write a line that a process of FLARE's printed."""
        line = printable(line.rstrip())
        self._raw.info(line)
        level, text = _event_in(line)
        if text and self._is_new(text):
            self.event(text, level)

    def _is_new(self, text: str) -> bool:
        key, now = _NUMBERS.sub("", text)[:300], time.monotonic()
        if now - self._last_events.get(key, -_QUIET) < _QUIET:
            return False
        if len(self._last_events) >= _MOST_REMEMBERED:
            self._last_events.clear()
        self._last_events[key] = now
        return True


def _event_in(line: str) -> tuple[int, str]:
    """The severity and text of the event that a line of FLARE's processes tells; an empty text if of none."""
    if line.startswith("Traceback (most recent call last)"):
        return logging.ERROR, f"a process of FLARE's failed: see the traceback in {RAW}"
    if line.startswith("error: "):
        return logging.ERROR, line.removeprefix("error: ")
    if line.startswith("warning: "):  # what a site's program refuses
        return logging.WARNING, line.removeprefix("warning: ")
    match = _LINE.fullmatch(line)
    if match is None:
        return logging.INFO, ""
    name, level, text = match.groups()
    if name.rpartition(".")[2] in _OURS:
        return logging.getLevelNamesMapping()[level], text
    if level == "WARNING":  # FLARE warns of much that is as it should be
        return logging.INFO, ""
    return logging.WARNING, f"FLARE says: {text[:300]} (nothing to do unless a run stops; see {RAW})"


def _logger(path: Path, form: str) -> logging.Logger:
    # A second service of the kit, which ends at once, opens nothing.
    handler = logging.handlers.RotatingFileHandler(path, "a", _LARGEST, _KEPT, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))
    logger = logging.Logger(path.name, logging.INFO)  # of this service alone: no other part of the process adds to it
    logger.addHandler(handler)
    return logger


_BACKOFF = (1.0, 60.0)
"""Shortest and longest wait before another try, in seconds."""
_HEARTBEAT = 2
"""Seconds between a site's messages to FLARE's server. With one of them a site registers at a server that was started
again, and learns which jobs are over; FLARE's default is 10."""
_LARGE = 1 << 20
"""Bytes of a tensor, or of a part of a message, whose memory the coordinator gives back as soon as it is free (glibc's
malloc). Otherwise what many replies took stays with the process. For smaller ones that takes too much time."""
_LOOK_AT_LINE, _BROKEN = 5.0, 3
"""Seconds between looks at a site's connection, and how many times in a row there was none when it counts as broken."""
_REGISTERED = "Successfully registered client"
_SERVER = "nvflare.private.fed.app.server.server_train"


@dataclass
class Service:
    """Keeps the FLARE process of one role running. ``tick``: seconds between checks."""

    kit: Kit
    site_file: Path | None = None
    tick: float = 0.25
    stopping: threading.Event = field(default_factory=threading.Event)
    child: subprocess.Popen[str] | None = None
    _log: ServiceLog = field(init=False)
    _begun: float = field(default_factory=time.time)
    _attendance: Attendance = field(default_factory=Attendance)
    _connected: bool = False
    _next_look: float = 0.0
    _without: int = 0
    _starts: int = 0
    _line: str = ""
    _state: str = "starting"

    def __post_init__(self) -> None:
        self._log = ServiceLog(self.kit.folder)

    @functools.cached_property
    def _proxy(self) -> str | None:
        """The proxy on a site's way to the coordinator."""
        try:
            return proxy_for(self.kit.project.server, role_file(self._file).proxy) if self.site_file else None
        except ValueError as error:
            raise UserError(f"https_proxy in the environment {error}") from None

    def run(self) -> None:
        """Run until told to stop; UserError if another service of the kit runs, or the kit cannot be used."""
        with only_service(self.kit):
            try:
                self._run()
            except UserError as error:
                self.say("failed", str(error), logging.ERROR)
                raise

    def _run(self) -> None:
        kit_checks.check_certificates(self.kit)
        self.say("starting", "")  # what one with the same number said last, as in a container, holds no more
        self._end_strays()
        forwarding = self._forward_logs()
        monitor = self._monitor()
        wait = _BACKOFF[0]
        try:
            while not self.stopping.is_set():
                try:
                    begun = time.monotonic()
                    self._once()
                    if time.monotonic() - begun > _BACKOFF[1]:
                        wait = _BACKOFF[0]
                except _Unreachable as error:
                    self.say(
                        "retrying",
                        f"cannot reach the coordinator at {error}; trying again in {wait:g} s; {self._if_it_moved}",
                        logging.WARNING,
                    )
                    wait = self._pause(wait)
                    continue
                if not self.stopping.is_set():
                    self.say(
                        "restarting",
                        f"FLARE's process ended; starting it again in {wait:g} s; if that happens again, see {RAW}",
                        logging.WARNING,
                    )
                    wait = self._pause(wait)
        finally:
            self._end_child()
            self.stopping.set()
            if forwarding is not None:
                forwarding.join(timeout=10)
            if monitor is not None:
                monitor.shutdown()
                monitor.server_close()
            self.say("stopped", "")

    @property
    def _file(self) -> Path:
        return self.site_file or self.kit.folder / COORDINATOR_FILE

    def _logs(self) -> dict[str, Path]:
        """The logs that others may get: a site's audit log, the coordinator's of each deployment."""
        if self.site_file is not None:
            return {"audit": audit_log_of(self.site_file)}
        return {path.parent.name: path for path in (self.kit.folder / "deployments").glob("*/progress.jsonl")}

    def _forward_logs(self) -> threading.Thread | None:
        """Send a copy of the role's logs to the sink that its own file names, in a thread of its own."""
        sink = role_file(self._file).sink
        if sink is None:
            return None
        sent = self.kit.folder / "sent.json"
        forwarder = Forwarder(
            self.kit.name, sink, self._logs, sent, lambda text: self._log.event(text, logging.WARNING)
        )
        thread = threading.Thread(target=forwarder.run, args=(self.stopping,), daemon=True)
        thread.start()
        return thread

    def _monitor(self) -> WSGIServer | None:
        """Serve ``/healthz`` and ``/metrics`` on the port that the role's own file names, in a thread of its own."""
        port = role_file(self._file).monitor
        if port is None:
            return None
        metrics = RoleMetrics(self.kit.role, self._health, lambda: self._logs().values(), self.kit.folder)
        server = monitor_server(port, metrics)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def _health(self) -> Health:
        connected = len(self._attendance.connected), len(self.kit.project.sites)
        return Health(self._state, self._starts, connected if self.kit.role == "coordinator" else None)

    def _pause(self, wait: float) -> float:
        self.stopping.wait(wait)
        return min(2 * wait, _BACKOFF[1])

    def _once(self) -> None:
        """Start FLARE's process and watch it until it ends."""
        kit_checks.check_certificates(self.kit)
        kit_checks.check_settings(self.kit)
        if self.kit.role == "coordinator":
            if self._starts == 0:
                kit_checks.check_port(self.kit)
        else:
            kit_checks.check_launcher(self.kit)
            reason = kit_checks.check_reachable(self.kit, self._proxy)
            if reason:
                raise _Unreachable(reason)
        self._start_child()
        assert self.child is not None
        deployments = Deployments(self.kit, self._attendance, self.say) if self.kit.role == "coordinator" else None
        try:
            while self.child.poll() is None and not self.stopping.is_set():
                if deployments is not None:
                    deployments.look()
                elif self._connected:
                    self._look_at_line()
                self.stopping.wait(self.tick)
            if deployments is None and self.child.poll() == lockdown.UNLOCKABLE:
                raise UserError(f"FLARE cannot be locked down here; see the end of {self.kit.folder / RAW}")
        finally:
            if deployments is not None:
                deployments.close()
            self._end_child()

    # FLARE's process --------------------------------------------------------------------------------------------------

    def _start_child(self) -> None:
        empty_channel(self.kit.folder)
        kind = "server" if self.kit.role == "coordinator" else "client"
        who = [] if kind == "server" else [f"uid={self.kit.name}", f"heart_beat_interval={_HEARTBEAT}"]
        # At a site, our module starts FLARE's: it removes what a coordinator could abuse.
        module = [lockdown.MODULE, lockdown.CLIENT] if kind == "client" else [_SERVER]
        command = [
            *(sys.executable, "-u", "-m", *module),
            *("-m", str(self.kit.flare), "-s", f"fed_{kind}.json"),
            *("--set", "secure_train=true", *who, "org=fedshift", "config_folder=config"),
        ]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "FEDSHIFT_KIT": str(self.kit.folder)}
        if kind == "server":
            environment = {"MALLOC_MMAP_THRESHOLD_": str(_LARGE), "MALLOC_ARENA_MAX": "2", **environment}
        if self.site_file is not None:
            environment["FEDSHIFT_SITE"] = str(self.site_file.resolve())
            if self._proxy is not None:
                environment |= proxy_variables(self._proxy, self.kit.project.scheme)
        self._connected = False
        self._starts += 1
        self.child = subprocess.Popen(
            command,
            cwd=self.kit.flare,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read_output, args=(self.child,), daemon=True).start()
        self.say("starting", "")

    def _look_at_line(self) -> None:
        """Say whether the site is connected. FLARE's process reconnects by itself, for ever, and does not tell."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_AT_LINE
        port = self.kit.project.port if self._proxy is None else proxy_address(self._proxy)[1]
        self._without = 0 if _has_connection(self.child, port) else self._without + 1
        address = f"{self.kit.project.server} port {self.kit.project.port}"
        if self._without < _BROKEN:
            self.say("connected", f"to {address}")
            return
        self.say(
            "retrying",
            f"no connection to the coordinator at {address}; FLARE tries again by itself; {self._if_it_moved}",
            logging.WARNING,
        )

    @property
    def _if_it_moved(self) -> str:
        return f"if it has moved, ask {self.kit.project.contact} for the new kit.json of this site, and start it again"

    def _read_output(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self._connected = self._connected or _REGISTERED in line
            self._attendance.read_line(line)
            self._log.output(line)

    def _end_child(self) -> None:
        if self.child is None:
            return
        with contextlib.suppress(OSError):
            self.child.terminate()
        for process in (*_processes_of(self.kit), self.child):
            with contextlib.suppress(Exception):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=10)
        self.child = None

    def _end_strays(self) -> None:
        """End processes of this kit that an earlier service left behind when it was killed."""
        for process in _processes_of(self.kit):
            self._log.event(f"ending process {process.pid}, which was left behind")
            with contextlib.suppress(Exception):
                process.kill()

    # Status -----------------------------------------------------------------------------------------------------------

    def say(self, state: str, message: str, level: int = logging.INFO) -> None:
        """Write the status to ``service.json``, and the message to the log, unless nothing has changed."""
        self._state = state
        whole = {
            "pid": os.getpid(),
            "child": self.child.pid if self.child else None,
            "state": state,
            "message": message,
            "starts": self._starts,
            "begun": self._begun,
            "sites": list(self._attendance.connected),
        }
        if whole == getattr(self, "_last_status", None):
            return
        self._last_status = whole
        if (line := f"{state}: {message}".removesuffix(": ")) != self._line:
            self._log.event(line, level)
        self._line = line
        write_object(self.kit.folder / "service.json", {**whole, "time": time.time()})


class _Unreachable(FedshiftError):
    """The coordinator does not answer."""


def _has_connection(child: subprocess.Popen[str] | None, port: int) -> bool:
    """Whether a process has a TCP connection to a port elsewhere; True also where the system does not tell."""
    import psutil

    try:
        result = psutil.Process(child.pid).net_connections(kind="tcp") if child is not None else []
    except (psutil.Error, OSError):
        return True
    return any(item.status == psutil.CONN_ESTABLISHED and item.raddr and item.raddr.port == port for item in result)


def _processes_of(kit: Kit) -> Iterator[Any]:
    """FLARE's processes in this kit's folder, including those of jobs."""
    import psutil

    folder = str(kit.flare)
    for process in psutil.process_iter(["cmdline", "pid"]):
        words: Sequence[str] = process.info["cmdline"] or []
        if folder in words and any(word.startswith("nvflare.") for word in words):
            yield process


def main() -> None:
    """Run a service in this process."""
    runs_program("service")
    os.umask(0o077)  # whatever a role writes is its user's alone; FLARE's processes inherit this
    kit = load_kit(Path(sys.argv[1]))
    service = Service(kit, Path(sys.argv[2]) if len(sys.argv) > 2 else None)

    def stop(*_: object) -> None:
        service.stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        service.run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
