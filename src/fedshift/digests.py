"""Digests in stored files, by which damage is noticed: a flipped bit, a torn copy, an editor.

A file of bytes begins with a line, `MARK`, and the SHA-256 of what follows. A JSON object holds the SHA-256 of its
other fields under `FIELD`. A model in the format safetensors holds that of the whole file, with zeros in its place,
under `ENTRY` of its metadata. A digest shows damage. It does not stop somebody who writes another one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import UserError
from fedshift.files import write_bytes

MARK = b"fedshift sha256 1\n"
"""What a file of bytes with a digest begins with."""
FIELD = "_sha256"
"""The field of a JSON object that holds the digest of the others. No site can have this name."""
ENTRY, BLANK = "sha256", "0" * 64
"""The entry of a safetensors file's metadata that holds its digest, and what stands there while the digest is made."""
REMEDY = "restore it, or delete it and run again"
_IN_HEADER = re.compile(f'"{ENTRY}":"(.{{{len(BLANK)}}})"'.encode())
_LARGEST_HEADER = 100_000_000
"""Bytes of a header that the library safetensors reads."""
_PIECE = 1 << 20
_BEGIN = len(MARK) + hashlib.sha256().digest_size


class Damaged(UserError):
    """A stored file is not what was written. The message names the file and the way out."""

    def __init__(self, path: Path, remedy: str = REMEDY) -> None:
        super().__init__(f"{path} is damaged or was not written by this version of fedshift: {remedy}")


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
        path: the file.
        remedy: what to do about a damaged file, for the message.
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


def fill_digest(data: bytes) -> bytes:
    """A file in the format safetensors with its digest, for which its metadata has `BLANK` under `ENTRY`.

    The library writes entries of the metadata in any order; here they are sorted, so that equal models are equal files.

    Example:
        >>> from safetensors.numpy import save
        >>> data = fill_digest(save({}, {ENTRY: BLANK}))
        >>> BLANK.encode() in data
        False
    """
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = bytearray(b"".join((len(text).to_bytes(8, "little"), text, data[begin:])))
    index = whole.index(f'"{ENTRY}":"{BLANK}"'.encode()) + len(f'"{ENTRY}":"')
    whole[index : index + len(BLANK)] = hashlib.sha256(whole).hexdigest().encode()
    return bytes(whole)


def check_filled(path: Path, remedy: str = REMEDY) -> None:
    """Compare a file with the digest in its header, if it has one: other programs' files have none.

    Args:
        path: the file, which `fill_digest` made.
        remedy: what to do about a damaged file, for the message.

    Raises:
        Damaged: it holds something else than what was written, or cannot be read.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "of-another-program"
        >>> _ = file.write_bytes(b"")
        >>> check_filled(file)
    """
    try:
        with open(path, "rb") as file:
            head = bytearray(file.read(8))
            head += file.read(min(int.from_bytes(head, "little"), _LARGEST_HEADER))
            match = _IN_HEADER.search(head)
            if match is None:
                return
            written = bytes(match[1])
            head[match.start(1) : match.end(1)] = BLANK.encode()
            digest = hashlib.sha256(head)
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError:
        raise Damaged(path, remedy) from None
    if digest.hexdigest().encode() != written:
        raise Damaged(path, remedy)


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
