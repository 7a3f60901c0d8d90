"""The logs of a role's service, in its kit.

``service.log`` is for people: a line for each event, with time, severity, what happened and what to do. ``flare.log``
holds whatever FLARE's processes print. Of these lines those of our own listener and lock-down, FLARE's errors, and that
there was a traceback, are events, too; equal ones once a minute.
"""

from __future__ import annotations

import logging
import logging.handlers
import re
import time
from pathlib import Path

from fedshift.text import printable

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
