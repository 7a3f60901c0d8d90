"""Digests in stored files, by which damage is noticed: a flipped bit, a torn copy, an editor.

A file of bytes begins with a line, `MARK`, and the SHA-256 of what follows. A model in the format safetensors holds
that of the whole file, with zeros in its place, under `ENTRY` of its metadata; a JSON object that of its other fields
(`json_objects`). A digest shows damage. It does not stop somebody who writes another one.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from fedshift.errors import UserError

MARK = b"fedshift sha256 1\n"
"""What a file of bytes with a digest begins with."""
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
