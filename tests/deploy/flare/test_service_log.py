"""The logs of a role: a line for each event with severity, and what FLARE's processes print in a file of its own."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from fedshift.deploy.flare.service import EVENTS, RAW, ServiceLog

STAMP = "2026-11-26 00:00:38,785"
FORM = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING|ERROR|CRITICAL) \S.*")


def events(folder: Path) -> list[str]:
    """The lines of the log, without their time."""
    file = folder / EVENTS
    lines = file.read_text().splitlines() if file.exists() else []
    assert all(FORM.fullmatch(line) for line in lines)
    return [line[20:] for line in lines]


@pytest.mark.case("logs", "an event: one line with time and severity, whatever its text")
def test_each_event_is_one_line_with_its_severity(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path)
    assert not (tmp_path / EVENTS).exists(), "a service that ends at once writes nothing"
    log.event("connected: listening on port 8002")
    log.event("retrying:\ncannot\x1b[2J reach", logging.WARNING)
    assert events(tmp_path) == ["INFO connected: listening on port 8002", "WARNING retrying: cannot [2J reach"]


@pytest.mark.parametrize(
    ("line", "event"),
    [
        pytest.param(
            f"{STAMP} - conn_manager - INFO - Connector [CH00002] is starting",
            None,
            marks=pytest.mark.case("logs", "what FLARE says of itself: not an event"),
        ),
        pytest.param(
            f"{STAMP} - ServerRunner - WARNING - no site has asked for a task",
            None,
            marks=pytest.mark.case("logs", "a warning of FLARE's: not an event"),
        ),
        pytest.param(
            f"{STAMP} - conn_manager - ERROR - Error processing frame: ValueError",
            "WARNING FLARE says: Error processing frame",
            marks=pytest.mark.case("logs", "an error of FLARE's"),
        ),
        pytest.param(
            f"{STAMP} - listener - ERROR - 'north' is refused for 5 minutes: it sends and reads no answers",
            "ERROR 'north' is refused for 5 minutes",
            marks=pytest.mark.case("logs", "our listener's refusal of a site"),
        ),
        pytest.param(
            f"{STAMP} - fedshift.lockdown - WARNING - refused what server asked for",
            "WARNING refused what server asked for",
            marks=pytest.mark.case("logs", "a refusal of the lock-down"),
        ),
        pytest.param(
            "Traceback (most recent call last):",
            "ERROR a process of FLARE's failed",
            marks=pytest.mark.case("logs", "a traceback of a process"),
        ),
        pytest.param(
            "error: this version of FLARE cannot be locked down",
            "ERROR this version of FLARE cannot be locked down",
            marks=pytest.mark.case("logs", "a process that says why it does not start"),
        ),
        pytest.param(
            "warning: site 'north' refuses to send statistics of so few samples of column 'age': 3 rows have a value",
            "WARNING site 'north' refuses",
            marks=pytest.mark.case("logs", "what a site's program refuses, with column and count"),
        ),
        pytest.param("ERROR", None, marks=pytest.mark.case("logs", "a line that is not FLARE's")),
    ],
)
def test_what_is_an_event_of_what_flare_prints(line: str, event: str | None, tmp_path: Path) -> None:
    ServiceLog(tmp_path).output(f"{line}\n")
    assert (tmp_path / RAW).read_text() == f"{line}\n"
    if event is None:
        assert events(tmp_path) == []
    else:
        (single_event,) = events(tmp_path)
        assert single_event.startswith(event)


@pytest.mark.case("logs", "an error of FLARE's a thousand times: one event")
def test_what_is_repeated_is_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("fedshift.deploy.flare.service.time.monotonic", lambda: now)
    log = ServiceLog(tmp_path)
    for number in range(1000):
        log.output(f"{STAMP} - conn_manager - ERROR - stream {number} failed")
    log.output(f"{STAMP} - conn_manager - ERROR - another fault")
    assert len(events(tmp_path)) == 2
    assert len((tmp_path / RAW).read_text().splitlines()) == 1001
    now += 61
    log.output(f"{STAMP} - conn_manager - ERROR - stream 7 failed")
    assert len(events(tmp_path)) == 3
