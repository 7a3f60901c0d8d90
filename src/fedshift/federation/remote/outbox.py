"""What the coordinator sends: content as bytes, and what rounding took from what each site was sent before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedshift.errors import FedshiftError
from fedshift.federation.message_files import read_message, write_message
from fedshift.federation.messages import Content, Statistics
from fedshift.federation.remote.wire import Body, Residuals, Wire, body_of


@dataclass(frozen=True)
class Written:
    """Content as bytes, and what its receivers are owed after it. The rest is kept, or its ids could come again."""

    body: Body
    owed: Residuals
    content: Mapping[str, Content]
    owed_before: Residuals


class Outbox:
    """Content for sites, written once for all that get the same and are owed the same.

    A site gets what it is owed for a step with the step's next request (error feedback, see `wire`).
    """

    def __init__(self, wire: Wire) -> None:
        self.wire: Wire = wire
        self._written: dict[tuple[tuple[int, ...], tuple[int, ...]], Written] = {}
        self._owed: dict[tuple[str, str], Residuals] = {}

    def write(self, step: str, site: str, content: Mapping[str, Content]) -> Written:
        """``content`` for a site's step."""
        owed = self._owed.get((site, step), {})
        key = (tuple(id(value) for value in content.values()), tuple(id(tensor) for tensor in owed.values()))
        if key not in self._written:
            after = dict(owed)
            body = body_of(content, self.wire, None if self.wire == "float32" else after)
            self._written[key] = Written(body, after, dict(content), owed)
        return self._written[key]

    def clear(self) -> None:
        """Forget what was written; what is owed stays."""
        self._written.clear()

    def taken(self, step: str, site: str, owed: Residuals) -> None:
        """The site did the step with what was sent, and is owed this now."""
        if owed:
            self._owed[site, step] = owed

    def save(self, folder: Path, exchange: int) -> dict[str, str]:
        """Write what sites are owed below ``folder``; returns entry → file name. Sites owed the same share a file."""
        alike: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        for whose, owed in self._owed.items():
            alike.setdefault(tuple(id(tensor) for tensor in owed.values()), []).append(whose)
        files: dict[str, str] = {}
        for number, group in enumerate(alike.values()):
            name = files[str(number)] = f"owed-{number}-{exchange}.safetensors"
            write_message(folder / name, {"owed": Statistics(self._owed[group[0]])}, {"to": group})
        return files

    def load(self, folder: Path, files: Mapping[str, str]) -> None:
        """Restore what `save` wrote. Raises FedshiftError for files that hold something else."""
        self._owed = {}
        for name in files.values():
            content, header = read_message(folder / name)
            owed = content.get("owed")
            if not isinstance(owed, Statistics):
                raise FedshiftError(f"{folder / name} does not say what sites are owed")
            for site, step in header["to"]:
                self._owed[site, step] = dict(owed)
