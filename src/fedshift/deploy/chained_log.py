"""A log whose lines are chained: each is JSON and carries the digest of the line before it, and at last its own.

A line that was changed, removed or added in the middle breaks the chain, and a damaged last one does not fit its own
digest. Lines cut off the end do not show in the file itself: `fedshift security export` signs the digests of all lines,
and a sink has a copy of each.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from fedshift.errors import FedshiftError
from fedshift.federation.plain_values import Frozen

START = "0" * 64
"""What the first line carries as the digest of the line before it."""
_OWN = ', "sha256": "'
"""What a line's digest of itself stands behind."""
_OLDER = re.compile(r', "previous": "[0-9a-f]{64}"\}$')
"""How a line of an earlier version ends, which no damage to a line with a digest of its own brings about."""
_TAIL = 1 << 16
_REMEDY = "keep it, and start a new one"


class _Link(Frozen):
    """What chains a line to the one before it."""

    previous: str


def append_line(
    path: Path, entry: Mapping[str, Any], *, known: int = 0, flush: bool = False, remedy: str = _REMEDY
) -> tuple[str, int]:
    """Add an entry to a log. Processes that write the same log wait for each other.

    Returns the line, and the log's size afterwards. OSError if the line cannot be written; FedshiftError if the log is
    shorter than ``known``, or its last line is damaged. ``path``: the log; readable by its user only. Its folder
    exists. ``known``: bytes that the log had when this process last looked.
    """
    with open(path, "ab+", opener=private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        last, size, rest = _last_line(file)
        if (size and not is_undamaged(last)) or _lacks_its_end(rest):
            raise FedshiftError(f"{path}: the last line of the log was changed; {remedy}")
        if size < known:
            raise FedshiftError(f"{path}: lines were cut off the end of the log; {remedy}")
        file.truncate(size)  # half a line, of a process that was killed while it wrote
        previous = digest_of(last) if size else START
        text = json.dumps({**entry, "previous": previous})  # ASCII: any text can be written
        line = f'{text[:-1]}{_OWN}{digest_of(text)}"}}'
        file.write(line.encode() + b"\n")
        file.flush()
        if flush:
            os.fsync(file.fileno())
        return line, size + len(line) + 1


def checked_lines(path: Path, remedy: str = f"{_REMEDY} in its place") -> list[str]:
    """The whole lines of a log, none without a file; FedshiftError names the first that breaks the chain."""
    (lines, rest), last = _split(path), START
    for number, line in enumerate(lines, 1):
        try:
            chained = _Link.model_validate_json(line).previous == last
        except ValidationError:
            chained = False
        if not (chained and is_undamaged(line)):
            raise FedshiftError(f"{path}, line {number}: the log was changed here; {remedy}")
        last = digest_of(line)
    if _lacks_its_end(rest):
        raise FedshiftError(f"{path}, line {len(lines) + 1}: the log was changed here; {remedy}")
    return lines


def lines_of(path: Path) -> list[str]:
    """The whole lines of a log, whether their chain is whole or not."""
    return _split(path)[0]


def lines_after(path: Path, begin: int) -> Iterator[tuple[int, str]]:
    """The whole lines of a log from a byte on, each behind the byte at which it ends. Half a line is being written."""
    with open(path, "rb") as file:
        file.seek(begin)
        for data in file:
            if not data.endswith(b"\n"):
                return
            begin += len(data)
            yield begin, data[:-1].decode(errors="replace")


def objects_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The lines that can be read, whether their chain is whole or not."""
    for text in lines:
        with contextlib.suppress(ValueError):
            if isinstance(line := json.loads(text), dict):
                yield line


def has_damaged_end(path: Path) -> bool:
    """Whether the last line of a log lost its line break to damage, and would count as half a line."""
    return _lacks_its_end(_split(path)[1])


def digest_of(line: str) -> str:
    """The digest that the next line carries."""
    return hashlib.sha256(line.encode(errors="replace")).hexdigest()


def is_undamaged(line: str) -> bool:
    """Whether a line is the one that was written, by its own digest alone. Lines of earlier versions have none."""
    if _OLDER.search(line):
        return True
    text, result, ending = line.rpartition(_OWN)
    return bool(result) and ending == f'{digest_of(text + "}")}"}}'


def _split(path: Path) -> tuple[list[str], bytes]:
    """The whole lines of a log, and what stands behind them: half a line, or one whose line break was damaged."""
    if not path.exists():
        return [], b""
    whole, _, rest = path.read_bytes().rpartition(b"\n")
    return whole.decode(errors="replace").split("\n") if whole else [], rest


def _lacks_its_end(rest: bytes) -> bool:
    """Whether what stands behind the last line break is a whole line, whose own was changed into something else."""
    return is_undamaged(rest[:-1].decode(errors="replace"))


def text_at_end(path: Path, most: int) -> str:
    """The text at the end of a file, of so many bytes at most; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _last_line(file: BinaryIO) -> tuple[str, int, bytes]:
    """The last whole line; where it ends, with its line break; and what stands behind."""
    end = file.seek(0, os.SEEK_END)
    begin, tail = end, b""
    while begin and tail.count(b"\n") < 2:
        begin = max(0, begin - _TAIL)
        file.seek(begin)
        tail = file.read(end - begin)
    whole, result, rest = tail.rpartition(b"\n")
    line = whole.rpartition(b"\n")[2]
    return line.decode(errors="replace"), end - len(rest) if result else 0, rest


def private(path: str, flags: int) -> int:
    """Open a file that only its user reads."""
    return os.open(path, flags, 0o600)
