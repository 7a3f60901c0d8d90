"""What is known of each published data set, as its file in ``manifests/`` says it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import Field, PositiveInt, model_validator

from fedshift.data.domain import Task
from fedshift.data.published.array_files import Mat, Npz, Pickles, Rows
from fedshift.data.published.image_files import Folders, Lists, Table
from fedshift.data.published.mask_files import Levels, Volumes
from fedshift.section import Section

Layout = Annotated[Folders | Lists | Table | Npz | Pickles | Mat | Levels | Volumes | Rows, Field(discriminator="kind")]
_FOLDER = Path(__file__).with_name("manifests")


class Counts(Section):
    """What its source says of a domain; nothing is compared where it says nothing."""

    all: PositiveInt | None = None  # samples
    train: PositiveInt | None = None  # those of the official training part
    test: PositiveInt | None = None  # those of the official test part
    classes: tuple[Annotated[int, Field(ge=0)], ...] | None = None  # samples of each class, in the order of the classes

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.classes is not None and self.all is not None and sum(self.classes) != self.all:
            raise ValueError(f"the classes have {sum(self.classes)} samples, not {self.all}")
        if None not in (self.train, self.test, self.all) and (self.train or 0) + (self.test or 0) != self.all:
            raise ValueError("train and test are not all")
        return self


class PublishedSet(Section):
    """A published data set."""

    title: str  # its name in words
    source: str  # who published it
    licence: str  # its terms
    get: str  # what to fetch
    counts_from: str  # where the counts stand
    folders: tuple[str, ...] = ()  # usual names of its folder below ``FEDSHIFT_DATA``, besides its own name
    task: Task = "classification"  # what is predicted
    classes: tuple[str, ...]  # in the order of their numbers; structures of masks; for times to an event their column
    domains: dict[str, Counts]  # name → counts
    total: PositiveInt | None = None  # samples of all domains, where only that is known
    unverified: str = ""  # why its counts are not sure; then another number is a warning and no error
    channels: Literal[1, 3] = 3  # of images
    size: PositiveInt = 224  # height and width; images of files are brought to it, those of arrays have it
    layout: Layout | None = None  # how its files lie; None if fedshift cannot read it
    instead: str = ""  # what to do where it cannot
    notes: str = ""  # what else to know

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, counts in self.domains.items():
            if counts.classes is not None and len(counts.classes) != len(self.classes):
                raise ValueError(f"{name} has counts of {len(counts.classes)} classes, not of {len(self.classes)}")
        if self.total is None and not self.unverified and Counts() in self.domains.values():
            raise ValueError("a domain without counts: say in unverified why")
        if (self.layout is None) == (not self.instead):
            raise ValueError("either a layout, or what to do instead")
        return self

    @property
    def fixed_size(self) -> bool:
        """Whether the files hold images of one size."""
        return isinstance(self.layout, Npz | Pickles | Mat)


@cache
def read_manifest(name: str) -> PublishedSet:
    """What is known of a published data set, from the file of its name."""
    return PublishedSet.model_validate(yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))
