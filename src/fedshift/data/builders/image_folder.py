"""Your own images: ``root/<domain>/<class>/<image>``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveFloat

from fedshift.data.builders.medical import Which, can_read, is_medical, slices_of
from fedshift.data.checks import agreed_classes, checked
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest, Preprocessing
from fedshift.data.images import ImageFile, decoded, has_colour, is_image, on_disk, unreadable
from fedshift.errors import UserError

_LAYOUT = "root/<domain>/<class>/<image>: one folder per site, in it one folder per class; other files are ignored"


class ImageFolder(DataSource):
    """One folder per site, with one folder per class inside. Images are resized to one size."""

    name: Literal["image_folder"] = "image_folder"
    root: Path = Field(description="the folder that holds one folder per site")
    size: int = Field(
        64, ge=8, le=1024, description="height and width: the shorter side is scaled to it, the centre kept"
    )
    colour: bool | None = Field(None, description="three channels or one; unset: three if any image has colour")
    slices: Which = Field(
        "all", description="of DICOM and NIfTI files: all slices, or the middle one (needs fedshift[medical])"
    )
    window: tuple[float, PositiveFloat] | None = Field(
        None,
        description="of DICOM and NIfTI files: centre and width of the values that become black to white, such as "
        "[40, 400]; unset: the file's own window, else the range of its values",
    )
    on_corrupt: Literal["stop", "skip"] = Field(
        "stop", description="an image that does not decode: stop, or leave it out and list it among the warnings"
    )
    missing_classes: Literal["check", "allow"] = Field(
        "check", description="check: refuse when two sites each have a class that the other lacks; allow: warn only"
    )

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Your own folders of images",
            source="yours",
            licence="yours",
            how_to_get="collect images as described by the layout and give data.root",
            layout=_LAYOUT,
            notes="Decoded once into the cache folder (FEDSHIFT_CACHE); scaled to cover size × size, centre cut out; "
            "grey images are repeated to three channels when any image has colour; values scaled to [-1, 1].",
        )

    def build(self) -> DataSet:
        """Domains of images (n, 1 or 3, size, size), memory-mapped.

        Raises:
            UserError: a folder or site is missing or empty, an image does not decode, or classes differ between sites.
        """
        found = self._images()
        warnings: tuple[str, ...] = ()
        if self.on_corrupt == "skip":
            found, warnings = _without_corrupt(found)
        held = {site: [label for label, files in classes.items() if files] for site, classes in found.items()}
        empty = next((site for site, labels in held.items() if not labels), None)
        if empty is not None:
            raise UserError(f"site '{empty}' is empty: no images in {self.root / empty}/<class>/; expected {_LAYOUT}")
        classes = agreed_classes(held, what="class folders", allow_missing=self.missing_classes == "allow")
        files = {site: [(label, file) for label in classes for file in found[site].get(label, [])] for site in found}
        flat = [one for pairs in files.values() for _, one in pairs]
        channels = 3 if (_any_colour(flat) if self.colour is None else self.colour) else 1
        images = decoded([one.file for one in flat], channels, self.size, self.size, "image_folder")
        groups = _groups(flat)
        domains, begin = {}, 0
        for site, pairs in files.items():
            labels = np.array([classes.index(label) for label, _ in pairs], dtype=np.int64)
            own = None if groups is None else groups[begin : begin + len(pairs)]
            domains[site] = Domain(site, images[begin : begin + len(pairs)], labels, own)
            begin += len(pairs)
        half = (0.5,) * channels
        preprocessing = Preprocessing(
            kind="image", channels=channels, size=self.size, mean=half, std=half, window=self.window
        )
        return checked(DataSet(self.name, domains, classes, preprocessing, self.manifest(), warnings))

    def _images(self) -> Found:
        """Images by site and class folder, sorted. Ignores hidden folders and other files."""
        return {
            site.name: {
                label.name: [one for path in sorted(label.iterdir()) if path.is_file() for one in self._in(path, site)]
                for label in folders(site)
            }
            for site in site_folders(self.root, _LAYOUT)
        }

    def _in(self, path: Path, site: Path) -> list[_Image]:
        """The images in a file, of which a medical one has several; none if it is another file."""
        if is_image(path.name):
            return [_Image(on_disk(path))]
        if not is_medical(path.name):
            return []
        try:
            found = slices_of(path, self.slices, self.window)
        except UserError:
            if self.on_corrupt == "stop" or not can_read(path):
                raise
            return [_Image(on_disk(path))]  # which does not decode, so it is left out and listed
        return [_Image(one.image, f"{site.name}/{one.patient}", one.colour) for one in found]


class _Image(NamedTuple):
    """An image, for medical ones with the patient, and whether it has colour."""

    file: ImageFile
    patient: str | None = None
    colour: bool | None = None


Found = dict[str, dict[str, list[_Image]]]
"""Site → class folder → its images."""


def _any_colour(images: Sequence[_Image]) -> bool:
    """Whether any image has colour. Medical ones say it in their header."""
    plain = [one.file for one in images if one.colour is None]
    return any(one.colour for one in images) or has_colour(plain)


def _groups(images: Sequence[_Image]) -> npt.NDArray[np.int64] | None:
    """A number for each patient and for each other image; None if no image is of a known patient."""
    if all(one.patient is None for one in images):
        return None
    numbers: dict[str, int] = {}
    names = [f"patient {one.patient}" if one.patient is not None else f"file {one.file.name}" for one in images]
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _without_corrupt(found: Found) -> tuple[Found, tuple[str, ...]]:
    """The images that decode, and a warning that lists the others."""
    corrupt = unreadable([one.file for classes in found.values() for images in classes.values() for one in images])
    if not corrupt:
        return found, ()
    kept = {
        site: {label: [one for one in images if one.file.name not in corrupt] for label, images in classes.items()}
        for site, classes in found.items()
    }
    said = "1 image does not decode and was" if len(corrupt) == 1 else f"{len(corrupt)} images do not decode and were"
    return kept, (f"{said} left out: {', '.join(corrupt)}",)


def site_folders(root: Path, layout: str) -> list[Path]:
    """The folders of sites in ``root``, sorted.

    Args:
        root: the option ``data.root``.
        layout: what is expected there, for the message.

    Raises:
        UserError: there is no such folder, or it holds no folders.
    """
    if not root.is_dir():
        raise UserError(f"data.root: folder {root} does not exist; expected {layout}")
    found = folders(root)
    if not found:
        raise UserError(f"data.root: {root} holds no folder of a site; expected {layout}")
    return found


def folders(place: Path) -> list[Path]:
    """The folders in ``place`` that are not hidden, sorted; none if ``place`` does not exist."""
    if not place.is_dir():
        return []
    return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
