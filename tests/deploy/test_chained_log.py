"""Logs whose lines are chained: every change within is named, and killed writers leave them whole."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest

from fedshift.deploy.chained_log import append_line, checked_lines, lines_of
from fedshift.deploy.json_files import append_event, events_of
from fedshift.errors import FedshiftError


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for number in range(4):
        append_line(tmp_path / "log", {"number": number, "text": "ü" * 40_000})
    return tmp_path / "log"


def test_lines_read_back_in_order(log: Path) -> None:
    assert [json.loads(line)["number"] for line in checked_lines(log)] == [0, 1, 2, 3]
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert checked_lines(log.parent / "absent") == []


def test_the_first_line_that_does_not_fit_is_named(log: Path) -> None:
    lines = lines_of(log)
    other = lines[1].replace('"number": 1', '"number": 7')
    for spoiled, number in (
        ([lines[0], other, *lines[2:]], 2),
        ([*lines[:-1], lines[-1].replace('"number": 3', '"number": 7')], 4),
        ([lines[0], *lines[2:]], 2),
        ([*lines[:2], lines[0], *lines[2:]], 3),
        (["", *lines], 1),
        ([lines[0], "[]", *lines[2:]], 2),
    ):
        log.write_text("\n".join(spoiled) + "\n")
        with pytest.raises(FedshiftError, match=rf"line {number}: "):
            checked_lines(log)


def test_half_a_line_is_no_line(log: Path) -> None:
    """A process was killed while it wrote."""
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"half')
    assert len(checked_lines(log)) == 4
    append_line(log, {"number": 4}, known=len(whole))
    assert [json.loads(line)["number"] for line in checked_lines(log)] == [0, 1, 2, 3, 4]
    log.write_bytes(b'{"half')
    append_line(log, {"number": 0})
    assert len(checked_lines(log)) == 1


@pytest.mark.case("bit flips", "every bit of the last line of a log, and of its line break")
def test_a_flipped_bit_of_the_last_line_is_noticed(tmp_path: Path) -> None:
    """No line behind it has its digest. Without its line break it would count as half a line, and be lost."""
    log = tmp_path / "log"
    for number in range(2):
        append_line(log, {"steps": number})
    whole = log.read_bytes()
    begin = whole.index(b"\n") + 1
    for bit in range(8 * begin, 8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        log.write_bytes(data)
        with pytest.raises(FedshiftError, match="changed"):
            checked_lines(log)
        with pytest.raises(FedshiftError, match="changed"):
            append_line(log, {"steps": 2})
        assert log.read_bytes() == data


@pytest.mark.threat("cut_log")
def test_a_log_that_was_cut_is_not_gone_on_with(log: Path) -> None:
    size = log.stat().st_size
    log.write_text("\n".join(lines_of(log)[:3]) + "\n")
    with pytest.raises(FedshiftError, match="cut off"):
        append_line(log, {"number": 3}, known=size)


def test_writers_do_not_break_the_chain(tmp_path: Path) -> None:
    """Two jobs of a role write at the same time, such as one that ends and the next."""
    log = tmp_path / "log"

    def write(who: int) -> None:
        for number in range(50):
            append_line(log, {"who": who, "number": number})

    threads = [threading.Thread(target=write, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(checked_lines(log)) == 150


@pytest.mark.parametrize("since", [0, 1, 2])
def test_a_damaged_event_is_told_by_its_line_in_the_file(tmp_path: Path, since: int) -> None:
    path = tmp_path / "events.jsonl"
    for number in range(4):
        append_event(path, {"what": "round", "round": number})
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2].replace("round", "rounds", 1), *lines[3:]]))
    told = [event["message"] for event in events_of(path, since) if event["what"] == "warning"]
    assert told == [f"{path}, line 3 is damaged, and not read"]
    assert len(list(events_of(path, since))) == 4 - since
