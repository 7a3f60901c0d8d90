"""Files that are whole or not there: written to the side, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fedshift.errors import UserError


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
