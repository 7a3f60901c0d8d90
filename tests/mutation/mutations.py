"""The list of deliberate mistakes: what a mutation is, how the files of ``lists/`` are read, how one is applied."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Mutation:
    """One mistake: in ``module``, ``old`` (which occurs once) becomes ``new``, and one of ``tests`` should fail."""

    name: str
    area: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]

    def file(self, source: Path) -> Path:
        """The module's file below ``source``, which holds the package."""
        return source.joinpath(*self.module.split(".")).with_suffix(".py")

    def applied(self, text: str) -> str:
        """The module's text with the mistake in it.

        Raises ValueError when the original is not there exactly once.
        """
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: the original occurs {found} times in {self.module}, not once:\n{self.old}")
        return text.replace(self.old, self.new)

    def digest(self, source: Path, tests: Path) -> str:
        """Changes with the mutation, with the module, and with the files of its tests."""
        digest = hashlib.sha256(repr(self).encode())
        for path in (self.file(source), *(tests / target.split("::")[0] for target in self.tests)):
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()


def read_list(path: Path) -> list[Mutation]:
    """The mutations of one file: groups of a module, its tests, and the mistakes in it."""
    found: list[Mutation] = []
    groups: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group in groups:
        short = group["module"].removeprefix("fedshift.")
        for entry in group["mutations"]:
            found.append(
                Mutation(
                    name=f"{short}: {entry['name']}",
                    area=path.stem,
                    module=group["module"],
                    old=entry["from"],
                    new=entry["to"],
                    tests=tuple(entry.get("tests", group["tests"])),
                )
            )
    return found


def all_mutations() -> list[Mutation]:
    """Every mutation of every file of ``lists/``."""
    return [mutation for path in sorted((HERE / "lists").glob("*.yaml")) for mutation in read_list(path)]
