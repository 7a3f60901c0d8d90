"""Published data sets by name. What each holds, and how its files lie, says its file in ``published/manifests/``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field, create_model

from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Inputs, Manifest, Preprocessing, Rows
from fedshift.data.images import ImageFile, decode_all
from fedshift.data.locate import DATA_VARIABLE, data_root
from fedshift.data.published.manifest import Counts, PublishedSet, read_manifest
from fedshift.data.published.samples import Location, Samples
from fedshift.errors import UserError, nearest

SCALES = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}
"""Mean and deviation of channels, of values in [0, 1]."""


class Published(DataSource):
    """A published data set. Its counts are compared with those of its source, and its own split is read."""

    about: ClassVar[PublishedSet]

    folder: Path | None = Field(
        None, description="the folder of its files; unset: the folder of its name below FEDSHIFT_DATA"
    )
    domains: tuple[str, ...] | None = Field(
        None, min_length=1, description="which domains, in which order; others need not be there; unset: all"
    )
    size: int | None = Field(
        None, ge=8, le=1024, description="height and width of images of files; unset: as its page says"
    )
    scale: Literal["imagenet", "half"] = Field(
        "half", description="what networks read: values in [-1, 1], or scaled by ImageNet's mean and deviation"
    )
    incomplete: Literal["refuse", "allow"] = Field(
        "refuse", description="a copy with fewer domains or samples than published: refuse, or allow and warn"
    )
    samples_per_domain: int | None = Field(None, ge=1, description="at most this many of each domain, at random")
    base_seed: int = Field(0, ge=0, description="seed of the draw when samples_per_domain is given")

    @classmethod
    def manifest(cls) -> Manifest:
        about = cls.about
        counts = {name: counts.all for name, counts in about.domains.items() if counts.all is not None}
        return Manifest(
            title=about.title,
            source=about.source,
            licence=about.licence,
            how_to_get=about.get,
            layout=about.layout.in_words() if about.layout else f"fedshift cannot read it: {about.instead}",
            counts=counts,
            notes=f"Counts: {about.counts_from}. {about.notes}".strip(),
        )

    def build(self) -> DataSet:
        """The domains, with the official split where the files say it.

        UserError if the folder or a file is missing or damaged, or the counts are not the published ones.
        """
        about, chosen = self.about, self._chosen_domains()
        if about.layout is None:
            raise UserError(f"data.name: fedshift cannot read {self.name}: {about.instead}")
        if self.size not in (None, about.size) and about.fixed_size:
            raise UserError(f"data.size: the images of {self.name} have {about.size} pixels; leave size out")
        how = f"{about.get}. It must hold {about.layout.in_words()}"
        part = self.incomplete == "allow"
        location = Location(self._folder(how), tuple(about.domains), chosen, about.classes, part, how)
        samples = about.layout.read(location)
        warnings = tuple(compare_counts(about, samples, location))
        domains = {name: self._domain(name, samples[name]) for name in chosen if name in samples}
        objective = None if about.task in ("classification", "segmentation") else {"task": about.task}
        preprocessing = self._preprocessing(domains).model_copy(update={"objective": objective})
        return check_dataset(DataSet(self.name, domains, about.classes, preprocessing, self.manifest(), warnings))

    def _folder(self, how: str) -> Path:
        if self.folder is not None:
            if not self.folder.is_dir():
                raise UserError(f"data.folder: {self.folder} is no folder. {how}")
            return self.folder
        root, names = data_root(), (self.name, *self.about.folders)
        folder = next((root / name for name in names if (root / name).is_dir()), None) if root else None
        if folder is None:
            where = (
                f"no folder {' or '.join(names)} below {DATA_VARIABLE} ({root})"
                if root
                else (f"{DATA_VARIABLE} is not set, nor data.folder")
            )
            raise UserError(f"{self.name} not found: {where}. {how}")
        return folder

    def _chosen_domains(self) -> tuple[str, ...]:
        known = tuple(self.about.domains)
        for name in self.domains or ():
            if name not in known:
                raise UserError(f"data.domains: {self.name} has no domain '{name}'; {nearest(name, known)}")
        if self.domains is not None and len(set(self.domains)) < len(self.domains):
            raise UserError("data.domains: each domain may appear once")
        return self.domains or known

    def _domain(self, name: str, samples: Samples) -> Domain:
        rows = np.arange(len(samples), dtype=np.int64)
        if self.samples_per_domain is not None and self.samples_per_domain < len(samples):
            number = list(self.about.domains).index(name)
            drawn = np.random.default_rng([self.base_seed, number]).choice(len(samples), self.samples_per_domain, False)
            rows = np.sort(drawn)
        parts = np.array(samples.parts)[rows]
        split = {side: np.flatnonzero(parts == side) for side in ("train", "test")} if parts.any() else {}
        masks = None
        if samples.masks:
            flat = [masks_of[row] for row in rows for masks_of in samples.masks]
            pixels = self._decode(flat, 1, f"{name}-masks", mask=True)
            masks = pixels.reshape(len(rows), len(samples.masks), *pixels.shape[2:])
        inputs = self._inputs(name, samples, rows)
        return Domain(name, inputs, samples.labels[rows], None, split.get("train"), split.get("test"), masks)

    def _inputs(self, name: str, samples: Samples, rows: Rows) -> Inputs:
        if isinstance(samples.inputs, np.ndarray):
            return cast(Inputs, samples.inputs[rows])
        files: Inputs = self._decode([samples.inputs[row] for row in rows], self.about.channels, name)
        return files

    def _decode(self, files: Sequence[ImageFile], channels: int, name: str, *, mask: bool = False) -> Any:
        size = self.size or self.about.size
        return decode_all(files, channels, size, size, f"{self.name}-{name}", mask=mask).pixels

    def _preprocessing(self, domains: Mapping[str, Domain]) -> Preprocessing:
        first = next(iter(domains.values())).inputs
        if len(first.shape) == 2:
            return Preprocessing(kind="features")
        channels = first.shape[1]
        mean, std = SCALES[self.scale if channels == 3 else "half"]
        return Preprocessing(
            kind="image", channels=channels, size=first.shape[2], mean=mean[:channels], std=std[:channels]
        )


def compare_counts(about: PublishedSet, samples: Mapping[str, Samples], location: Location) -> Iterator[str]:
    """Warnings about what an incomplete copy lacks.

    UserError if there is another number than published: more, or less where this is not allowed. Or nothing is left.
    """
    if not samples:
        raise location.missing("sample of any domain")
    if about.unverified:
        yield from _warn_unverified(about, samples, location)
        return
    for name in location.chosen:
        numbers = _numbers(name, about.domains[name], samples.get(name), location.classes)
        differences = (line for number in numbers for line in _difference(*number, location))
        if (first := next(differences, None)) is not None:  # what else differs in this domain follows from it
            yield first
    if about.total is not None and set(location.chosen) == set(location.domains):
        yield from _difference("all domains", about.total, sum(map(len, samples.values())), location)


def _warn_unverified(about: PublishedSet, samples: Mapping[str, Samples], location: Location) -> Iterator[str]:
    """That the counts are not sure, with the number there is, and the published one if it is another."""
    there, whole = sum(map(len, samples.values())), set(location.chosen) == set(location.domains)
    other = f" ({about.total:,} published)" if about.total is not None and whole and about.total != there else ""
    yield f"{there:,} samples here{other}: this number is not checked, since {about.unverified}"


def _difference(what: str, should: int, there: int, location: Location) -> Iterator[str]:
    if there == should:
        return
    text = f"{what}: {there:,} samples here, {should:,} published"
    if there > should:
        raise UserError(
            f"data.folder: {location.folder}: {text}: this is another version; remove what does not belong to it"
        )
    if not location.incomplete:
        raise UserError(
            f"data.folder: {location.folder}: {text}. Complete the copy, or write incomplete: allow. {location.how}"
        )
    yield f"{text}: the copy is not complete"


def _numbers(
    name: str, expected: Counts, samples: Samples | None, classes: Sequence[str]
) -> Iterator[tuple[str, int, int]]:
    """What, how many there should be, and how many there are; the largest units first."""
    if expected.all is not None:
        yield f"domain '{name}'", expected.all, len(samples) if samples else 0
    for part, should in (("train", expected.train), ("test", expected.test)):
        if should is not None:
            yield f"domain '{name}', {part}", should, samples.parts.count(part) if samples else 0
    if expected.classes is not None and samples is not None and samples.labels.ndim == 1:
        there = np.bincount(samples.labels.astype(np.int64), minlength=len(classes))
        for label, should in enumerate(expected.classes):
            yield f"domain '{name}', class '{classes[label]}'", should, int(there[label])


@cache
def _source_of(name: str) -> type[Published]:
    its_name: Any = Literal.__getitem__(name)
    made = create_model(name, __base__=Published, __module__=__name__, name=(its_name, name))
    made.about = read_manifest(name)
    made.__doc__ = Published.__doc__
    return made


def __getattr__(name: str) -> type[Published]:
    """The builder of a published data set, by its name."""
    try:
        return _source_of(name)
    except FileNotFoundError:
        raise AttributeError(name) from None
