"""Your own images: ``root/<domain>/<class>/<image>``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from fedshift.data.checks import agreed_classes, checked
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest, Preprocessing
from fedshift.data.images import ImageFile, decoded, has_colour, is_image, on_disk
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
        found = self._files()
        held = {site: [label for label, files in classes.items() if files] for site, classes in found.items()}
        empty = next((site for site, labels in held.items() if not labels), None)
        if empty is not None:
            raise UserError(f"site '{empty}' is empty: no images in {self.root / empty}/<class>/; expected {_LAYOUT}")
        classes = agreed_classes(held, what="class folders", allow_missing=self.missing_classes == "allow")
        files = {site: [(label, file) for label in classes for file in found[site].get(label, [])] for site in found}
        flat = [file for pairs in files.values() for _, file in pairs]
        channels = 3 if (has_colour(flat) if self.colour is None else self.colour) else 1
        images = decoded(flat, channels, self.size, self.size, "image_folder")
        domains, begin = {}, 0
        for site, pairs in files.items():
            labels = np.array([classes.index(label) for label, _ in pairs], dtype=np.int64)
            domains[site] = Domain(site, images[begin : begin + len(pairs)], labels)
            begin += len(pairs)
        preprocessing = Preprocessing(
            kind="image", channels=channels, size=self.size, mean=(0.5,) * channels, std=(0.5,) * channels
        )
        return checked(DataSet(self.name, domains, classes, preprocessing, self.manifest()))

    def _files(self) -> dict[str, dict[str, list[ImageFile]]]:
        """Image files by site and class folder, sorted. Ignores hidden folders and other files."""
        return {
            site.name: {
                label.name: [
                    on_disk(path) for path in sorted(label.iterdir()) if is_image(path.name) and path.is_file()
                ]
                for label in folders(site)
            }
            for site in site_folders(self.root, _LAYOUT)
        }


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
