"""The coordinator's outgoing content as bytes, with the rounding residuals of what each site was sent before."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedshift.deploy.remote.wire import Body, Residuals, Wire, body_of
from fedshift.errors import FedshiftError
from fedshift.federation.message_files import read_message, write_message
from fedshift.federation.messages import Content, Statistics
from fedshift.federation.plain_values import Frozen

HERE = "coordinator"
"""The coordinator's own entry in a checkpoint; no site may have this name."""


class _Receivers(Frozen):
    """What stands beside residuals in a file: whose they are, each a site and a call."""

    to: list[list[str]]


@dataclass(frozen=True)
class Written:
    """Content as bytes, and the residuals that its receivers have afterwards.

    ``content`` and ``residuals_before`` are kept so that their ids, which the outbox uses as a key, stay unique.
    """

    body: Body
    residuals: Residuals
    content: Mapping[str, Content]
    residuals_before: Residuals


class Outbox:
    """Writes content for sites, once for all sites that get the same content and have the same residuals.

    The rounding residual of a request is added to the site's next request of the same call (error feedback, see
    `wire`).
    """

    def __init__(self, wire: Wire) -> None:
        self.wire: Wire = wire
        self._written: dict[tuple[tuple[int, ...], tuple[int, ...]], Written] = {}
        self._residuals: dict[tuple[str, str], Residuals] = {}
        """By site and call."""

    def write(self, call: str, site: str, content: Mapping[str, Content]) -> Written:
        """Write ``content`` for a call at a site."""
        before = self._residuals.get((site, call), {})
        key = (tuple(id(value) for value in content.values()), tuple(id(tensor) for tensor in before.values()))
        if key not in self._written:
            after = dict(before)
            body = body_of(content, self.wire, None if self.wire == "float32" else after)
            self._written[key] = Written(body, after, dict(content), before)
        return self._written[key]

    def clear(self) -> None:
        """Forget what was written, but not the residuals."""
        self._written.clear()

    def note_delivery(self, call: str, site: str, residuals: Residuals) -> None:
        """The site did the call: add these residuals to its next request (error feedback)."""
        if residuals:
            self._residuals[site, call] = residuals

    def save(self, folder: Path, exchange: int) -> dict[str, str]:
        """Write the residuals below ``folder``; return entry → file name. Sites with equal residuals share a file."""
        alike: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        for receiver, residuals in self._residuals.items():
            alike.setdefault(tuple(id(tensor) for tensor in residuals.values()), []).append(receiver)
        files: dict[str, str] = {}
        for number, group in enumerate(alike.values()):
            name = files[str(number)] = f"owed-{number}-{exchange}-{secrets.token_hex(4)}.safetensors"
            write_message(folder / name, {"owed": Statistics(self._residuals[group[0]])}, {"to": group})
        return files

    def load(self, folder: Path, files: Mapping[str, str]) -> None:
        """Restore what `save` wrote; FedshiftError if a file holds something else."""
        self._residuals = {}
        for name in files.values():
            content, header = read_message(folder / name)
            residuals = content.get("owed")
            if not isinstance(residuals, Statistics):
                raise FedshiftError(f"{folder / name} does not hold rounding residuals")
            for site, call in _Receivers.model_validate(header).to:
                self._residuals[site, call] = dict(residuals)
