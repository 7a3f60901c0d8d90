"""A sentence below a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "average",
    "baseline",
    "below",
    "choice",
    "estimate",
    "explained",
    "few",
    "gain",
    "harmonic",
    "measure",
    "none",
    "partial",
    "privacy",
    "progress",
    "repeats",
    "scale",
    "seeds",
    "selection",
    "sent",
    "settings",
    "steps",
    "trained",
    "used",
    "warning",
    "work",
]


@dataclass(frozen=True)
class Note:
    """A sentence below a table, with what it is about."""

    kind: Kind  # what it is about
    text: str  # the sentence
    parts: tuple[str, ...] = ()  # what it is made of, for a page that says the same in fewer words
