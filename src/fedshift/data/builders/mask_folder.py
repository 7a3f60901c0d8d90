"""Your own images with masks: ``root/<site>/images/<image>`` and ``root/<site>/masks/<structure>/<image>``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, FiniteFloat

from fedshift.data.builders.image_folder import LeftOut, Width, folders, image_warnings, root_hint, site_folders
from fedshift.data.checks import agreed_classes, check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest, Preprocessing
from fedshift.data.images import ImageFile, decode_all, has_colour, is_image, on_disk, size_of
from fedshift.errors import UserError

_LAYOUT = (
    "root/<site>/images/<name>.png and root/<site>/masks/<structure>/<name>.png: for every image one mask of each "
    "structure, of the same name (endings may differ) and the same size; what is not black in a mask is the structure"
)


class MaskFolder(DataSource):
    """One folder per site, with images and, for each structure, masks. All are resized to one size."""

    name: Literal["mask_folder"] = "mask_folder"
    root: Path = Field(description="the folder that holds one folder per site")
    size: int = Field(
        384, ge=8, le=1024, description="height and width: the shorter side is scaled to it, the centre kept"
    )
    colour: bool | None = Field(None, description="three channels or one; unset: as the images are stored")
    window: tuple[FiniteFloat, Width] | None = Field(
        None,
        description="of grey images of more than 8 bits: centre and width of the values that become black to white; "
        "unset: as the file says",
    )

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Your own folders of images with masks (segmentation)",
            source="yours",
            licence="yours",
            how_to_get="collect images and masks as described by the layout and give data.root",
            layout=_LAYOUT,
            notes="Decoded once into the cache folder (FEDSHIFT_CACHE); image and mask are scaled to cover size × "
            "size, the centre cut out; values scaled to [-1, 1]. An all-black mask says that the structure is absent.",
        )

    def build(self) -> DataSet:
        """Domains of images (n, 1 or 3, size, size) and masks (n, structures, size, size), memory-mapped.

        Raises:
            UserError: an image lacks a mask, a mask lacks its image, or their sizes differ (names the file). Or sites
                have different structures, or some have grey and some colour images (names the sites).
        """
        left_out = LeftOut()
        sites = site_folders(self.root, _LAYOUT)
        hint = root_hint(self.root, lambda root: (root / "images").is_dir())
        result = {site.name: _of_site(site, left_out, hint) for site in sites}
        for folder in (self.root, *sites, *(site / "masks" for site in sites)):
            left_out.note_misplaced(folder)
        structures = agreed_classes(
            {site: list(masks) for site, (_, masks) in result.items()}, what="folders of masks", allow_missing=False
        )
        for site, (_, masks) in result.items():
            missing = next((name for name in structures if name not in masks), None)
            if missing is not None:
                raise UserError(
                    f"site '{site}' has no masks of '{missing}': expected {self.root / site}/masks/{missing}"
                )
        channels = 3 if self._in_colour({site: list(images.values()) for site, (images, _) in result.items()}) else 1
        domains, warnings = {}, list(left_out.warnings(self.root))
        for site, (images, masks) in result.items():
            files = list(images.values())
            made = decode_all(files, channels, self.size, self.size, "mask_folder", window=self.window)
            warnings += image_warnings(made, {site: files})
            flat = [masks[structure][name] for name in images for structure in structures]
            cut = decode_all(flat, 1, self.size, self.size, "mask_folder-masks", mask=True).pixels
            domains[site] = Domain(
                site,
                made.pixels,
                np.zeros(len(images), dtype=np.int64),
                masks=cut.reshape(len(images), len(structures), self.size, self.size),
            )
        preprocessing = Preprocessing(
            kind="image",
            channels=channels,
            size=self.size,
            mean=(0.5,) * channels,
            std=(0.5,) * channels,
            window=self.window,
        )
        return check_dataset(DataSet(self.name, domains, structures, preprocessing, self.manifest(), tuple(warnings)))

    def _in_colour(self, images: dict[str, list[ImageFile]]) -> bool:
        if self.colour is not None:
            return self.colour
        stored = {site: has_colour(files) for site, files in images.items()}
        if len(set(stored.values())) > 1:
            colour, grey = (next(site for site in stored if stored[site] is kind) for kind in (True, False))
            raise UserError(
                f"site '{colour}' has images in colour, site '{grey}' in grey: set data.colour=true to repeat grey to "
                "three channels, or data.colour=false to read all in grey"
            )
        return all(stored.values())


Files = dict[str, ImageFile]


def _of_site(site: Path, left_out: LeftOut, hint: str) -> tuple[Files, dict[str, Files]]:
    """The files of one site: images by name, and masks by structure and name, in the order of the images."""
    images = _images(site / "images", left_out)
    if not images:
        raise UserError(f"site '{site.name}' is empty: no images in {site / 'images'}; {hint}expected {_LAYOUT}")
    masks = {folder.name: _images(folder, left_out) for folder in folders(site / "masks")}
    if not masks:
        raise UserError(f"site '{site.name}' has no masks: no folder in {site / 'masks'}; expected {_LAYOUT}")
    for structure, files in masks.items():
        for name, file in images.items():
            if name not in files:
                raise UserError(f"image {file.name} has no mask: expected {site / 'masks' / structure / name}.png")
            wide, high = size_of(file)
            if size_of(files[name]) != (wide, high):
                across, down = size_of(files[name])
                raise UserError(
                    f"mask {files[name].name} is {across}×{down} pixels, its image {wide}×{high}: masks must have the "
                    "size of their images"
                )
        lone = next((file for name, file in files.items() if name not in images), None)
        if lone is not None:
            raise UserError(
                f"mask {lone.name} has no image of that name in {site / 'images'}: add the image or remove it"
            )
    return images, {structure: {name: files[name] for name in images} for structure, files in masks.items()}


def _images(folder: Path, left_out: LeftOut) -> Files:
    """Image files by name without ending, sorted."""
    images: Files = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not is_image(path.name) or not path.is_file():
            left_out.other(path)
            continue
        if path.stem in images:
            raise UserError(f"{path} and {images[path.stem].name} have the same name: rename one of them")
        images[path.stem] = on_disk(path)
    return images


def mask_file(folder: Path, structure: str, name: str) -> Path:
    """The path of a predicted mask.

    A structure's name comes from the model file, which may not be trustworthy. So it must be a plain file name.

    UserError if the path is not below the folder.
    """
    if structure in ("", "..") or structure != Path(structure).name or set(structure) & {"/", "\\", "\0", "\n", "\r"}:
        raise UserError(
            f"the model file has a structure {structure!r}, which cannot be the name of a folder: use another model"
        )
    try:
        file = (folder / structure / name).with_suffix(".png")
        # Resolved, because one of the two may be a symbolic link.
        below = file.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        below = False
    if not below or ".." in Path(name).parts:
        raise UserError(f"the mask {structure!r} of {name!r} would be written outside of {folder}: rename the image")
    return file
