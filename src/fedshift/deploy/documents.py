"""Documents that a role of a deployment keeps for itself, as frozen models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from fedshift.digests import REMEDY, Damaged, read_object
from fedshift.federation.plain_values import Unreadable, parse_json

M = TypeVar("M", bound=BaseModel)


def read_stored(kind: type[M], path: Path, remedy: str = REMEDY, *, older: bool = False) -> M | None:
    """The document in a file; None if there is no file.

    Args:
        kind: of the document.
        path: the file, which `write_object` wrote.
        remedy: what to do about a damaged file, for the message.
        older: as in `read_object`.

    Raises:
        Damaged: it holds something else than was written.
    """
    content = read_object(path, remedy, older=older)
    if not content and not path.exists():
        return None
    try:
        return parse_json(kind, json.dumps(content), path.name)
    except Unreadable:
        raise Damaged(path, remedy) from None
