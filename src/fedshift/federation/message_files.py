"""Content as files: checkpoints and site memory.

Each file is a message (`messages.encode`) behind its digest, and holds its own name. So a damaged file is noticed, and
another one in its place: an older one, or that of another site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedshift.digests import REMEDY
from fedshift.encryption import present_key, read_private, read_scratch, write_private
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.messages import Content, decode, decode_file, encode

_NAME = "file"
"""The entry of a message's header that holds the file's name."""


def write_message(
    path: Path,
    content: Mapping[str, Content],
    header: Mapping[str, object] | None = None,
    before: Callable[[], None] | None = None,
) -> None:
    """Write content as a message with its digest, atomically; encrypted if a key is set, and for its user only.

    ``before`` is called last before the file takes its name, and raises an error if it may not.
    """
    write_private(path, encode(content, {**(header or {}), _NAME: path.name}), before=before)


def mapped_message(path: Path) -> dict[str, Content]:
    """The content of a file of this process, which holds a message alone.

    Tensors are read from the file when they are used, so a rule that compares pieces of many models reads only these
    pieces. An encrypted file is read as a whole.
    """
    return decode(read_scratch(path))[0] if present_key() is not None else decode_file(path)


def read_message(path: Path) -> tuple[dict[str, Content], dict[str, Any]]:
    """Read the content and header that `write_message` wrote.

    Raises UserError: the file is missing, damaged, of another program, encrypted with another key, or was written under
    another name.
    """
    try:
        content, header = decode(read_private(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UserError:
        raise
    except FedshiftError:
        raise UserError(f"{path} was not written by this version of fedshift: delete it and run again") from None
    name = header.pop(_NAME, None)
    if name is None:  # as before files held their names
        raise UserError(f"{path} was not written by this version of fedshift: delete it and run again")
    if name != path.name:
        raise UserError(f"{path} was written under another name: {REMEDY}")
    return content, header
