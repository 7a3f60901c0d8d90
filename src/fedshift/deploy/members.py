"""Which sites of a project take part in a deployed experiment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fedshift.json_objects import read_object

CARDS = "cards.json"
"""A file of a deployment: the card of each of its sites, written when its first run begins."""
REMEDY = "delete it, and the sites send their cards again"


def read_cards(folder: Path) -> dict[str, Any]:
    """The content of the file, by site; empty if there is none. `site_cards.cards_of` parses it."""
    return read_object(folder / CARDS, REMEDY, older=True)


def members(folder: Path, sites: Sequence[str], drop: Collection[str]) -> list[str]:
    """The sites of an experiment: those that it began with, since other sites would make it another experiment.

    Args:
        sites: those of the project that are not revoked; an experiment that has not begun is for them.
    """
    return [site for site in read_cards(folder) or sites if site not in drop]
