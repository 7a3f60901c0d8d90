"""Readers of images with masks: grey levels of one mask file, and volumes of NIfTI with a segmentation beside each."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

import numpy as np
from PIL import Image

from fedshift.data.builders.medical import slices_of
from fedshift.data.images import ImageFile, is_image, on_disk
from fedshift.data.published.samples import Location, Part, Samples
from fedshift.errors import UserError
from fedshift.section import Section

_ABOVE_0 = (0.5, 1.0)
"""The window in which whatever is above 0 is white."""


class Levels(Section):
    """Images and, under the same names, masks whose grey levels say the structure."""

    kind: Literal["levels"]
    images: dict[str, str]  # the folder of a domain's images, with ``{part}``, by domain
    masks: dict[str, str]  # that of its masks
    levels: dict[str, int]  # structure → the largest grey level that belongs to it

    def in_words(self) -> str:
        """How the folder looks."""
        first = next(iter(self.images))
        return f"{self.images[first].replace('{part}', 'train')} (and test) with images, " + (
            f"{self.masks[first].replace('{part}', 'train')} with their masks of the same name, for each domain"
        )

    def read(self, location: Location) -> dict[str, Samples]:
        """The images by domain, files of the training part first. UserError if a folder or a mask is missing."""
        domains = {}
        for domain in location.chosen:
            files = list(self._of_domain(domain, location))
            if files:
                images, masks, parts = zip(*files, strict=True)
                by_structure = tuple(
                    tuple(_up_to(mask, self.levels[name]) for mask in masks) for name in location.classes
                )
                domains[domain] = Samples(list(images), np.zeros(len(images), dtype=np.int64), parts, by_structure)
        return domains

    def _of_domain(self, domain: str, location: Location) -> Iterator[tuple[ImageFile, Path, Part]]:
        parts: tuple[Part, ...] = ("train", "test")
        for part in parts:
            folder = location.folder / self.images[domain].replace("{part}", part)
            if not folder.is_dir() and not location.incomplete:
                raise location.missing(f"folder {folder.relative_to(location.folder)}")
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if not is_image(path.name):
                    continue
                mask = location.folder / self.masks[domain].replace("{part}", part) / path.name
                if not mask.exists():
                    raise location.missing(f"mask {mask.relative_to(location.folder)}")
                yield on_disk(path), mask, part


def _up_to(mask: Path, level: int) -> ImageFile:
    """A mask file that is white where the grey level is at most ``level``."""
    file = on_disk(mask)

    def open_mask() -> IO[bytes]:
        written = io.BytesIO()
        with file.open() as stream, Image.open(stream, formats=("PNG", "BMP", "TIFF", "JPEG")) as image:
            image.convert("L").point(lambda grey: 255 if grey <= level else 0).save(written, "PNG")
        written.seek(0)
        return written

    return ImageFile(f"{file.name}, up to {level}", file.stamp, open_mask)


class Volumes(Section):
    """Volumes in NIfTI, one folder for each domain, and beside each its segmentation. Slices are the samples."""

    kind: Literal["volumes"]
    folders: dict[str, str]  # domain → its folder
    endings: tuple[str, ...]  # what a segmentation's name has in place of the volume's ending

    def in_words(self) -> str:
        """How the folder looks."""
        return f"{', '.join(self.folders.values())}, each with <case>.nii.gz and <case>{self.endings[0]}"

    def read(self, location: Location) -> dict[str, Samples]:
        """The slices by domain, in the order of the files.

        UserError if a folder or a segmentation is missing, or has another number of slices.
        """
        domains = {}
        for domain in location.chosen:
            folder = location.folder / self.folders[domain]
            if not folder.is_dir() and not location.incomplete:
                raise location.missing(f"folder {self.folders[domain]}")
            pairs = [pair for case in self.cases(folder) for pair in self._slices(case, location)]
            if pairs:
                images, masks = zip(*pairs, strict=True)
                none: tuple[Part, ...] = tuple("" for _ in images)
                domains[domain] = Samples(list(images), np.zeros(len(images), dtype=np.int64), none, (masks,))
        return domains

    def cases(self, folder: Path) -> list[Path]:
        """The volumes of a folder, without segmentations."""
        names = sorted(folder.glob("*.nii.gz")) if folder.is_dir() else []
        return [path for path in names if not path.name.endswith(self.endings)]

    def _slices(self, case: Path, location: Location) -> list[tuple[ImageFile, ImageFile]]:
        stem = case.name.removesuffix(".nii.gz")
        beside = [case.with_name(f"{stem}{end}") for end in self.endings]
        mask = next((path for path in beside if path.exists()), None)
        if mask is None:
            raise location.missing(f"segmentation of {case.relative_to(location.folder)}")
        images, masks = slices_of(case), slices_of(mask, window=_ABOVE_0)
        if len(images) != len(masks):
            raise UserError(f"{mask} has {len(masks)} slices, its volume {len(images)}: get both again")
        return [(image.image, white.image) for image, white in zip(images, masks, strict=True)]
