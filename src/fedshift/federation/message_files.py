"""Content as files: checkpoints and site memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError, UserError
from fedshift.federation.messages import Content, decode, encode
from fedshift.files import write_bytes


def write_message(path: Path, content: Mapping[str, Content], header: Mapping[str, object] | None = None) -> None:
    """Write content as a safetensors file, atomically."""
    write_bytes(path, encode(content, header))


def read_message(path: Path) -> tuple[dict[str, Content], dict[str, Any]]:
    """Read the content and header that `write_message` wrote.

    Raises:
        UserError: the file is missing, damaged, or of another program.
    """
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except FedshiftError:
        raise UserError(f"{path} is damaged or was not written by fedshift: delete it and run again") from None
