"""JSON objects in files, each with the digest of its content under `FIELD`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.digests import REMEDY, Damaged
from fedshift.files import write_bytes

FIELD = "_sha256"
"""The field of a JSON object that holds the digest of the others. No site can have this name."""


def write_object(
    path: Path, content: Mapping[str, Any], *, private: bool = False, flush: bool = True, indent: int | None = 1
) -> None:
    """Write a JSON object with the digest of its content, whole or not at all.

    Args:
        path: the file. Its folder is made if necessary.
        content: plain values by name; none of them is called `FIELD`.
        private: only the user may read it, whatever the umask.
        flush: wait until it is on the disk.
        indent: as in `json.dumps`; None: all on one line.

    Raises:
        UserError: it cannot be written.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "state.json"
        >>> write_object(file, {"state": "running"})
        >>> read_object(file)
        {'state': 'running'}
    """
    text = json.dumps({**content, FIELD: _digest_of(content)}, indent=indent)
    write_bytes(path, text.encode() + b"\n", private=private, flush=flush)


def read_object(path: Path, remedy: str = REMEDY, *, older: bool = False) -> dict[str, Any]:
    """What `write_object` wrote; empty if the file does not exist.

    Args:
        older: whether an object without a digest is read, as earlier versions wrote it. A damaged name of a digest does
            not pass for none.

    Raises:
        Damaged: it holds something else than what was written, or cannot be read.

    Example:
        >>> read_object(Path("no-such-file"))
        {}
    """
    try:
        content = json.loads(path.read_bytes())
        if older and isinstance(content, dict) and not any(map(_like_field, content)):
            return dict(content)
        written = content.pop(FIELD)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(path, remedy) from None
    if written != _digest_of(content):
        raise Damaged(path, remedy)
    return dict(content)


def _like_field(name: str) -> bool:
    """Whether a name is `FIELD`, or was it before a letter of it changed."""
    return len(name) == len(FIELD) and sum(map(str.__ne__, name, FIELD)) < 2


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
