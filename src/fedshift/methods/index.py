"""The methods with facts about each that can be read without importing torch, from ``index.json``.

The file is made from the classes by ``python docs/list_methods.py``, and a test compares it with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedshift.data.domain import Task

Reads = Literal["sums", "norms", "models"]
"""What a server reads of the models that sites send."""
Group = Literal["unseen", "unlabelled", "both", "pooled", "rivals", "personal"]

GROUPS: Mapping[Group, str] = {
    "unseen": "unseen site: the model is for a site that took no part",
    "unlabelled": "unlabelled site: the model is for one site that has no labels",
    "both": "both: sites with labels and sites without, both measured",
    "pooled": "pooled references: all samples in one place, not private",
    "rivals": "rivals: other federated methods, for comparison",
    "personal": "personal: every site that takes part gets a model of its own, in part or whole",
}
"""The lists of ``fedshift methods`` and their titles."""


@dataclass(frozen=True)
class Entry:
    """One line of ``fedshift methods``: what `fedshift.methods.traits` says of the class, and what follows from it.

    Attributes:
        place: ``module:Class``.
        group: the list that it stands in.
        advice: what it is for, and what was measured.
        scenario: what sites there are, and whether their data are pooled.
        sends: what leaves a site, in words.
        shares: kinds of content that leave a site.
        citation: where it was published.
        settings: named settings beside the paper's.
        reads: what the server reads of the sites' models. Secure aggregation needs ``sums``.
        reads_sealed: what it still reads with ``engine.routing: sealed``; "" where nothing can be sealed.
        rules: the rules of robust aggregation that the method takes.
        server: whether it takes a server's optimiser.
        local: whether it takes plug-ins of local training.
        tasks: what its equations can learn.
        needs_classes: why it is for classification alone.
    """

    class_path: str
    group: Group
    advice: str
    scenario: str
    sends: str
    shares: tuple[str, ...]
    citation: str
    settings: tuple[str, ...]
    reads: Reads
    reads_sealed: str
    rules: tuple[str, ...]
    server: bool
    local: bool
    tasks: tuple[Task, ...]
    needs_classes: str


def _read(entry: Mapping[str, Any]) -> Entry:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Entry(**fields)


_INDEX: Mapping[str, Any] = json.loads(Path(__file__).with_name("index.json").read_text(encoding="utf-8"))

RULES: tuple[str, ...] = tuple(_INDEX["rules"])
"""The rules of robust aggregation."""
ENTRIES: Mapping[str, Entry] = {name: _read(entry) for name, entry in _INDEX["methods"].items()}
"""By name, a group after the other, and in each the oldest first."""


def of_group(group: Group) -> tuple[str, ...]:
    """The names of a group's methods, the oldest first."""
    return tuple(name for name, entry in ENTRIES.items() if entry.group == group)


def with_sums() -> tuple[str, ...]:
    """The methods whose server reads only sums of the sites' models, so that secure aggregation hides each of them."""
    return tuple(name for name, entry in ENTRIES.items() if entry.reads == "sums")


def with_sealed() -> tuple[str, ...]:
    """Those whose server hands models on or keeps them unread, so that they can be sealed."""
    return tuple(name for name, entry in ENTRIES.items() if entry.reads_sealed)
