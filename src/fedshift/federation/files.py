"""Files that are whole or not there: written to the side, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError, UserError
from fedshift.federation.messages import Content, decode, encode


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically. Raises UserError, naming file and reason, when the disk is full or read-only."""
    side = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(side, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(side, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            side.unlink()
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
        ) from error


def write_message(path: Path, content: Mapping[str, Content], header: Mapping[str, object] | None = None) -> None:
    """Write content as a safetensors file, atomically."""
    write_bytes(path, encode(content, header))


def read_message(path: Path) -> tuple[dict[str, Content], dict[str, Any]]:
    """Read what `write_message` wrote. Raises UserError for a missing, damaged or foreign file."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except FedshiftError:
        raise UserError(f"{path} is damaged or was not written by fedshift: delete it and run again") from None
