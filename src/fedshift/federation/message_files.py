"""Content as files: checkpoints and site memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.encryption import present_key, read_private, write_private
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.messages import Content, decode, decode_file, encode


def write_message(path: Path, content: Mapping[str, Content], header: Mapping[str, object] | None = None) -> None:
    """Write content as a safetensors file, atomically; encrypted if a key is set, and for its user only."""
    write_private(path, encode(content, header))


def mapped_message(path: Path) -> dict[str, Content]:
    """The content that `write_message` wrote to a file of this process.

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
    try:
        return decode(data)
    except FedshiftError:
        raise UserError(f"{path} is damaged or was not written by fedshift: delete it and run again") from None
