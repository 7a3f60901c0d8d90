"""Small JSON files that the processes of a role share: an object in a file, and a log of events."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.chained_log import append_line


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def append_event(path: Path, event: Mapping[str, Any]) -> None:
    """Add an event to a log, with the time."""
    append_line(path, {"time": time.time(), **event})
