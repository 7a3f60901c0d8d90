"""Digests in stored files, by which damage is noticed: a flipped bit, a torn copy, an editor.

A file of bytes begins with a line, `MARK`, and the SHA-256 of what follows. A JSON object holds the SHA-256 of its
other fields under `FIELD`. A digest shows damage. It does not stop somebody who writes another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import UserError
from fedshift.files import write_bytes

MARK = b"fedshift sha256 1\n"
"""What a file of bytes with a digest begins with."""
FIELD = "_sha256"
"""The field of a JSON object that holds the digest of the others. No site can have this name."""
REMEDY = "restore it, or delete it and run again"
_BEGIN = len(MARK) + hashlib.sha256().digest_size


class Damaged(UserError):
    """A stored file is not what was written. The message names the file and the way out."""

    def __init__(self, path: Path, remedy: str = REMEDY) -> None:
        super().__init__(f"{path} is damaged or was not written by fedshift: {remedy}")


def with_digest(data: bytes) -> bytes:
    """Content as a file with its digest holds it.

    Example:
        >>> len(with_digest(b"content"))
        57
    """
    return b"".join((MARK, hashlib.sha256(data).digest(), data))


def without_digest(data: bytes, path: Path, remedy: str = REMEDY) -> bytes:
    """The content that `with_digest` was given.

    Args:
        data: what the file holds.
        path: the file, for the message.
        remedy: what to do about a damaged file, for the message.

    Raises:
        Damaged: it holds something else than what was written.

    Example:
        >>> without_digest(with_digest(b"content"), Path("file"))
        b'content'
    """
    content = memoryview(data)[_BEGIN:]
    if not data.startswith(MARK) or hashlib.sha256(content).digest() != data[len(MARK) : _BEGIN]:
        raise Damaged(path, remedy)
    return bytes(content)


def write_object(path: Path, content: Mapping[str, Any], *, private: bool = False, flush: bool = True) -> None:
    """Write a JSON object with the digest of its content, whole or not at all.

    Args:
        path: the file. Its folder is made if necessary.
        content: plain values by name; none of them is called `FIELD`.
        private: only the user may read it, whatever the umask.
        flush: wait until it is on the disk.

    Raises:
        UserError: it cannot be written.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "state.json"
        >>> write_object(file, {"state": "running"})
        >>> read_object(file)
        {'state': 'running'}
    """
    text = json.dumps({**content, FIELD: _digest_of(content)}, indent=1)
    write_bytes(path, text.encode() + b"\n", private=private, flush=flush)


def read_object(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """What `write_object` wrote; empty if the file does not exist.

    Args:
        path: the file.
        remedy: what to do about a damaged file, for the message.

    Raises:
        Damaged: it holds something else than what was written, or cannot be read.

    Example:
        >>> read_object(Path("no-such-file"))
        {}
    """
    try:
        content = json.loads(path.read_bytes())
        written = content.pop(FIELD)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(path, remedy) from None
    if written != _digest_of(content):
        raise Damaged(path, remedy)
    return dict(content)


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
