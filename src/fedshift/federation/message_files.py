"""Content as files: checkpoints and site memory, each with a digest by which a damaged one is noticed.

A file begins with a line, ``fedshift sha256 1``, and the SHA-256 of what follows: a message (`messages.encode`). A
message without them is of an older version, and is read as it is. The digest shows damage, not an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.encryption import present_key, read_private, write_private
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.messages import Content, decode, decode_file, encode

_MARK = b"fedshift sha256 1\n"
_BEGIN = len(_MARK) + hashlib.sha256().digest_size


def write_message(path: Path, content: Mapping[str, Content], header: Mapping[str, object] | None = None) -> None:
    """Write content as a message with its digest, atomically; encrypted if a key is set, and for its user only."""
    data = encode(content, header)
    write_private(path, b"".join((_MARK, hashlib.sha256(data).digest(), data)))


def mapped_message(path: Path) -> dict[str, Content]:
    """The content of a file of this process, which holds a message alone.

    Tensors are read from the file when they are used, so a rule that compares pieces of many models reads only these
    pieces. An encrypted file is read as a whole.
    """
    return read_message(path)[0] if present_key() is not None else decode_file(path)


def read_message(path: Path) -> tuple[dict[str, Content], dict[str, Any]]:
    """Read the content and header that `write_message` wrote.

    Raises:
        UserError: the file is missing, damaged, of another program, or encrypted with another key.
    """
    try:
        data = read_private(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if data.startswith(_MARK):
        digest, data = data[len(_MARK) : _BEGIN], data[_BEGIN:]
        if hashlib.sha256(data).digest() != digest:
            raise UserError(f"{path} is damaged: it is not what was written; restore it, or delete it and run again")
    try:
        return decode(data)
    except FedshiftError:
        raise UserError(f"{path} is damaged or was not written by fedshift: delete it and run again") from None
