"""Readers of image files: folders of classes, lists of files, and a table that names them."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from fedshift.data.images import is_image, on_disk
from fedshift.data.published.samples import Location, Part, Samples
from fedshift.errors import UserError
from fedshift.files import read_text
from fedshift.section import Section

_DEEPEST = 5
"""Parts of a path that are looked at where a list's paths begin elsewhere."""


class _Image(NamedTuple):
    path: Path
    label: int
    part: Part


class Folders(Section):
    """``folder/<domain>/<class>/<image>``."""

    kind: Literal["folders"]
    path: str = "{domain}/{class}"  # of a class's folder, with ``{domain}`` and ``{class}``
    also: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # other names of the folder of a domain or class

    def in_words(self) -> str:
        """How the folder looks."""
        return f"{self.path.replace('{domain}', '<domain>').replace('{class}', '<class>')}/<image>"

    def read(self, location: Location) -> dict[str, Samples]:
        """The images by domain, classes in order, files sorted.

        UserError if the folder of a domain is missing, or one is of no class.
        """
        before, _, _ = self.path.partition("{class}")
        domains = {}
        for domain in location.chosen:
            above = _first(location.folder, [before.replace("{domain}", name) for name in self._names(domain)])
            if above is None and not location.incomplete:
                raise location.missing(f"folder {before.replace('{domain}', domain).rstrip('/')}")
            if above is not None:
                domains[domain] = _samples(list(self._of_domain(above, location)))
        return domains

    def _of_domain(self, above: Path, location: Location) -> Iterator[_Image]:
        known = {name: label for label in location.classes for name in self._names(label)}
        inside = [folder for folder in above.iterdir() if folder.is_dir() and not folder.name.startswith((".", "__"))]
        numbers = {folder: location.class_number(known.get(folder.name, folder.name), above) for folder in inside}
        for folder in sorted(inside, key=lambda folder: (numbers[folder], folder.name)):
            for path in sorted(folder.iterdir()):
                if is_image(path.name):
                    yield _Image(path, numbers[folder], "")

    def _names(self, name: str) -> tuple[str, ...]:
        return (name, *self.also.get(name, ()))


class Lists(Section):
    """Text files with a line ``path label`` for each image, as ``clipart_train.txt``."""

    kind: Literal["lists"]
    # part → where its list may be, with ``{domain}``; part ``all`` has no split
    files: dict[Literal["train", "test", "all"], tuple[str, ...]]

    def in_words(self) -> str:
        """How the folder looks."""
        names = ", ".join(forms[0].replace("{domain}", "<domain>") for forms in self.files.values())
        return f"{names} with lines of '<image> <number of the class>', and the images at these paths"

    def read(self, location: Location) -> dict[str, Samples]:
        """The images by domain, in the order of the lists.

        UserError if a list is missing or damaged, or names an image that is not there.
        """
        domains = {}
        for domain in location.chosen:
            images: list[_Image] = []
            for part, names in self.files.items():
                listing = _first(location.folder, [name.replace("{domain}", domain) for name in names])
                if listing is None and not location.incomplete:
                    raise location.missing(f"list {names[0].replace('{domain}', domain)}")
                if listing is not None:
                    images += _read_list(listing, location, "" if part == "all" else part)
            if images:
                domains[domain] = _samples(images)
        return domains


def _read_list(listing: Path, location: Location, part: Part) -> list[_Image]:
    """The images of a list. Its paths may begin above the folder, as ``/data/office/amazon/…``."""
    entries = [
        _entry(listing, number, line) for number, line in enumerate(read_text(listing).splitlines(), 1) if line.strip()
    ]
    if wrong := next((label for _, label in entries if not 0 <= label < len(location.classes)), None):
        raise UserError(f"{listing}: label {wrong} is none of the {len(location.classes)} classes: get this list again")
    paths = [name.replace("\\", "/").removeprefix("./").strip("/").split("/") for name, _ in entries]
    deep = next((deep for deep in range(_DEEPEST, 0, -1) if _there(paths[:1], deep, location, listing)), _DEEPEST)
    images = []
    for parts, (_, label) in zip(paths, entries, strict=True):
        path = location.inside("/".join(parts[-deep:]), listing)
        if path.exists():
            images.append(_Image(path, label, part))
        elif not location.incomplete:
            raise location.missing(f"{'/'.join(parts[-deep:])}, which {listing.name} names")
    return images


def _there(paths: Sequence[Sequence[str]], deep: int, location: Location, listing: Path) -> bool:
    return all(location.inside("/".join(parts[-deep:]), listing).exists() for parts in paths)


def _entry(listing: Path, number: int, line: str) -> tuple[str, int]:
    name, _, label = line.strip().rpartition(" ")
    if not name.strip() or not label.isdecimal():
        raise UserError(f"{listing}, line {number}: '{line.strip()[:60]}' is not '<image> <number of the class>'")
    return name.strip(), int(label)


class Table(Section):
    """A CSV with a row for each image, such as the ``metadata.csv`` of WILDS."""

    kind: Literal["table"]
    files: tuple[str, ...]  # where the CSV may be
    image: tuple[str, ...]  # path of an image, with columns in braces; the first path that is there is taken
    domain: str  # the column of domains
    domains: dict[str, str]  # what stands in that column → the name of the domain
    label: str  # the column of class numbers
    split: str  # the column of the official split
    parts: dict[str, Literal["train", "test"]]  # what stands in that column → its part

    def in_words(self) -> str:
        """How the folder looks."""
        return f"{self.files[0]} with columns {self.domain}, {self.label}, {self.split}; images {self.image[0]}"

    def read(self, location: Location) -> dict[str, Samples]:
        """The images by domain, in the order of the table.

        UserError if the table is missing or damaged, or names an image that is not there.
        """
        table = _first(location.folder, self.files)
        if table is None:
            raise location.missing(f"file {self.files[0]}")
        rows = list(csv.DictReader(read_text(table).splitlines()))
        images: dict[str, list[_Image]] = {domain: [] for domain in location.chosen}
        form = self._form(rows, location, table)
        for number, row in enumerate(rows, 2):
            domain, image = self._image(row, form, location, f"{table}, line {number}")
            if domain not in images:
                continue
            if image.path.exists():
                images[domain].append(image)
            elif not location.incomplete:
                raise location.missing(
                    f"{image.path.relative_to(location.folder)}, which line {number} of {table.name} names"
                )
        return {domain: _samples(listed) for domain, listed in images.items() if listed}

    def _form(self, rows: Sequence[Mapping[str, str]], location: Location, table: Path) -> str:
        """The form of the paths of which the first row's image is there; else the first form."""
        if not rows or any(name not in rows[0] for name in (self.domain, self.label, self.split)):
            raise UserError(f"{table} lacks a column of {self.domain}, {self.label}, {self.split}: get it again")
        return next(
            (form for form in self.image if (location.inside(_fill(form, rows[0]), table)).exists()), self.image[0]
        )

    def _image(self, row: Mapping[str, str], form: str, location: Location, where: str) -> tuple[str, _Image]:
        cells = {name: _whole(row[name] or "") for name in (self.domain, self.label, self.split)}
        domain, part, label = self.domains.get(cells[self.domain]), self.parts.get(cells[self.split]), cells[self.label]
        if domain is None or part is None or not (label.isdecimal() and int(label) < len(location.classes)):
            shown = ", ".join(f"{name} {value[:40]!r}" for name, value in cells.items())
            raise UserError(f"{where}: {shown} is not what this data set has: get the file again")
        return domain, _Image(location.inside(_fill(form, row), Path(where)), int(label), part)


def _fill(form: str, row: Mapping[str, str]) -> str:
    for name, value in row.items():
        form = form.replace(f"{{{name}}}", value or "")
    return form


def _whole(cell: str) -> str:
    """A whole number without decimals, as pandas may have written 1.0."""
    return cell.removesuffix(".0")


def _samples(images: Sequence[_Image]) -> Samples:
    return Samples(
        [on_disk(image.path) for image in images],
        np.array([image.label for image in images], dtype=np.int64),
        tuple(image.part for image in images),
    )


def _first(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).exists()), None)
