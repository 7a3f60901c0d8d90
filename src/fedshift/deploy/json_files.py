"""JSON files of a role: documents as frozen models, what others write there, a log of events, and who takes part."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from fedshift.deploy.chained_log import append_line, has_damaged_end, is_undamaged, lines_of
from fedshift.digests import REMEDY, Damaged
from fedshift.errors import FedshiftError
from fedshift.federation.plain_values import Unreadable, parse_json
from fedshift.files import set_aside
from fedshift.json_objects import read_object

DEPLOY_AGAIN = "deploy the experiment again"
"""What to do about damaged settings of a deployment."""
M = TypeVar("M", bound=BaseModel)


def read_stored(kind: type[M], path: Path, remedy: str = REMEDY, *, older: bool = False) -> M | None:
    """The document that `write_object` wrote to a file; None if there is no file."""
    content = read_object(path, remedy, older=older)
    if not content and not path.exists():
        return None
    try:
        return parse_json(kind, json.dumps(content), path.name)
    except Unreadable:
        raise Damaged(path, remedy) from None


def plain_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of FLARE's or of a person; empty if the file is missing or holds something else."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def append_event(path: Path, event: Mapping[str, Any]) -> None:
    """Add an event to a log, with the time. A log that is damaged gets another name, and a new one says so. OSError if
    the log cannot be written."""
    try:
        append_line(path, {"time": time.time(), **event})
    except FedshiftError as error:
        aside = set_aside(path)
        message = f"{error}: it is kept as {aside.name if aside else path.name}, and this one is new"
        append_line(path, {"time": time.time(), "what": "warning", "message": message})
        append_line(path, {"time": time.time(), **event})


def events_of(path: Path, since: int = 0) -> Iterator[dict[str, Any]]:
    """The events of a log from number ``since`` on; a warning in place of each that is damaged."""
    for number, line in enumerate(lines_of(path)[since:], since + 1):
        if is_undamaged(line):
            event = json.loads(line)
            yield {name: value for name, value in event.items() if name not in ("previous", "sha256")}
        else:
            yield {"what": "warning", "message": f"{path}, line {number} is damaged, and not read"}
    if has_damaged_end(path):
        yield {"what": "warning", "message": f"{path}: the last line is damaged, and not read"}


CARDS = "cards.json"
"""A file of a deployment: the card of each of its sites, written when its first run begins."""
SEND_AGAIN = "delete it, and the sites send their cards again"


def read_cards(folder: Path) -> dict[str, Any]:
    """The content of the file, by site; empty if there is none. `site_cards.cards_of` parses it."""
    return read_object(folder / CARDS, SEND_AGAIN, older=True)


def members(folder: Path, sites: Sequence[str], drop: Collection[str]) -> list[str]:
    """The sites of an experiment: those that it began with, since other sites would make it another experiment.
    ``sites``: those of the project that are not revoked; an experiment that has not begun is for them."""
    return [site for site in read_cards(folder) or sites if site not in drop]
