"""Your own images: ``root/<domain>/<class>/<image>``."""

from __future__ import annotations

import difflib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, FiniteFloat

from fedshift.data.builders.medical import Patient, Which, can_read, is_medical, slices_of
from fedshift.data.checks import agreed_classes, check_dataset
from fedshift.data.domain import UNKNOWN, DataSet, Domain, Manifest, Preprocessing
from fedshift.data.images import (
    Decoded,
    Deep,
    ImageFile,
    NotYetReadable,
    Window,
    decode_all,
    first_names,
    has_colour,
    is_image,
    on_disk,
    pages_warning,
    some_sides,
    unreadable,
)
from fedshift.data.site_labels import SiteLabels
from fedshift.errors import UserError, nearest
from fedshift.files import read_text
from fedshift.text import join_names

_LAYOUT = "root/<domain>/<class>/<image>: one folder per site, in it one folder per class; other files are left out"
Width = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_MOST_NAMED = 3
_MOST_TRIED = 20
"""Folders, and files of each, that are looked at where the root may be a wrong one."""
_MADE_BY_SYSTEMS = frozenset({"thumbs.db", "desktop.ini", "icon\r"})
_MOSTLY = 0.9
"""From this share of a site's images with one patient ID on, it is taken for a placeholder."""
_NO_CLASS = ""
"""Stands for the class folder of images without a label."""


class ImageFolder(SiteLabels):
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
    window: tuple[FiniteFloat, Width] | None = Field(
        None,
        description="of DICOM, NIfTI and other grey images of more than 8 bits: centre and width of the values that "
        "become black to white, such as [40, 400]; unset: as the file says, else the range of its values",
    )
    patient: Patient = Field(
        "id",
        description="what images of one patient have in common in DICOM files: the patient's ID; or the study, "
        "series or file, where an export gave one ID to all",
    )
    on_corrupt: Literal["stop", "skip"] = Field(
        "stop", description="an image that does not decode: stop, or leave it out and list it among the warnings"
    )
    split: Path | None = Field(
        None,
        description="a text file with the images of a fixed test set, one a line, as <domain>/<class>/<image>; the "
        "others train",
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

        UserError if a folder or site is missing or empty, an image does not decode, or classes differ between sites.
        """
        left_out = LeftOut()
        result = self._images(left_out)
        tested = None if self.split is None else _read_listing(self.split, self.root, result)
        warnings: tuple[str, ...] = ()
        if self.on_corrupt == "skip":
            result, warnings = _without_corrupt(result, self.window)
        held = {site: [label for label, files in classes.items() if files] for site, classes in result.items()}
        empty = next((site for site, labels in held.items() if not labels), None)
        if empty is not None:
            others = "".join(f"; {text}" for text in left_out.warnings(self.root / empty))
            if _images_in(self.root / empty):
                others += f"; if it has no labels, write data.site_labels: {{{empty}: none}}"
            hint = root_hint(self.root, lambda root: any(_images_in(folder) for folder in folders(root)))
            raise UserError(
                f"site '{empty}' is empty: no images in {self.root / empty}/<class>/{others}; {hint}expected {_LAYOUT}"
            )
        labelled = {site: held[site] for site in self.labelled_sites(held)}
        classes = self._elsewhere or agreed_classes(
            labelled, what="class folders", allow_missing=self.missing_classes == "allow"
        )
        self._check_known(held, classes)
        in_order = (*classes, _NO_CLASS)
        files = {site: [(label, file) for label in in_order for file in result[site].get(label, [])] for site in result}
        flat = [image for pairs in files.values() for _, image in pairs]
        channels = 3 if (_any_colour(flat) if self.colour is None else self.colour) else 1
        made = decode_all(
            [image.file for image in flat], channels, self.size, self.size, "image_folder", window=self.window
        )
        groups = _groups(flat)
        domains, begin = {}, 0
        for site, pairs in files.items():
            number_of = {_NO_CLASS: UNKNOWN} | {label: number for number, label in enumerate(classes)}
            labels = np.array([number_of[label] for label, _ in pairs], dtype=np.int64)
            site_groups = None if groups is None else groups[begin : begin + len(pairs)]
            domain = Domain(site, made.pixels[begin : begin + len(pairs)], labels, site_groups)
            domains[site] = (
                domain if tested is None else _fix_split(domain, [image.path in tested for _, image in pairs])
            )
            begin += len(pairs)
        half = (0.5,) * channels
        preprocessing = Preprocessing(
            kind="image", channels=channels, size=self.size, mean=half, std=half, window=self.window
        )
        by_site = {site: [image.file for _, image in pairs] for site, pairs in files.items()}
        patients = {site: [image.patient for _, image in pairs] for site, pairs in files.items()}
        warnings += (*left_out.warnings(self.root), *image_warnings(made, by_site), *_one_patient(patients))
        warnings += tuple(_patients_at_two_sites(patients)) if self.patient == "id" else ()
        sides = {
            site: some_sides([image for image in images if is_image(image.name)]) for site, images in by_site.items()
        }
        domains = self.by_labels(domains)
        return check_dataset(
            DataSet(self.name, domains, classes, preprocessing, self.manifest(), warnings, sides=sides)
        )

    def _check_known(self, held: Mapping[str, Sequence[str]], classes: Sequence[str]) -> None:
        """Raise UserError for a class folder of a site of few labels that no site of labels has."""
        for site in self.site_labels:
            if unknown := next((name for name in held[site] if name not in (*classes, _NO_CLASS)), None):
                raise UserError(
                    f"folder {self.root / site / unknown}: '{unknown}' is none of the classes of the sites that train; "
                    f"{nearest(unknown, classes)}"
                )

    def _images(self, left_out: LeftOut) -> ImageTree:
        """Images by site and class folder, sorted."""
        sites = site_folders(self.root, _LAYOUT)
        self.check_site_labels({site.name: site for site in sites})
        left_out.note_misplaced(self.root)
        for site in sites:
            if site.name not in self.site_labels:
                left_out.note_misplaced(site)
        return {site.name: self._of_site(site, left_out) for site in sites}

    def _of_site(self, site: Path, left_out: LeftOut) -> dict[str, list[_Image]]:
        """A site's images by class folder. Where labels may be missing, those in no class folder have none."""
        by_class = {label.name: self._of_class(label, site, left_out) for label in folders(site)}
        text = self.site_labels.get(site.name)
        if text is None:
            return by_class
        unplaced = self._of_class(site, site, LeftOut())
        if text == "none":  # folders do not name classes there
            return {_NO_CLASS: [*unplaced, *(image for images in by_class.values() for image in images)]}
        return {**by_class, _NO_CLASS: unplaced}

    def _of_class(self, label: Path, site: Path, left_out: LeftOut) -> list[_Image]:
        result = []
        for path in sorted(label.iterdir()):
            if is_image(path.name) and path.is_file():
                result.append(_Image(on_disk(path), path))
            elif path.is_file() and is_medical(path):
                result += self._slices(path, site, left_out)
            else:
                left_out.other(path)
        return result

    def _slices(self, path: Path, site: Path, left_out: LeftOut) -> list[_Image]:
        try:
            slices = slices_of(path, self.slices, self.window, self.patient)
        except NotYetReadable:
            raise
        except UserError:
            if self.on_corrupt == "stop" or not can_read(path):
                raise
            return [_Image(on_disk(path), path)]  # which does not decode, so it is left out and listed
        if not slices:
            left_out.without_pixels.append(path)
        return [_Image(item.image, path, f"{site.name}/{item.patient}", item.colour) for item in slices]


class _Image(NamedTuple):
    """An image and its file, for medical ones with the patient, and whether it has colour."""

    file: ImageFile
    path: Path
    patient: str | None = None
    colour: bool | None = None


ImageTree = dict[str, dict[str, list[_Image]]]
"""Site → class folder → its images."""


def _read_listing(listing: Path, root: Path, images: ImageTree) -> set[Path]:
    """The images that a file names, one a line."""
    lines = read_text(listing, "data.split: ").splitlines()
    every = (item.path for classes in images.values() for of_class in classes.values() for item in of_class)
    known = {path.relative_to(root).as_posix(): path for path in every}
    result = set()
    for number, line in enumerate(lines, 1):
        name = line.strip().replace("\\", "/").removeprefix("./")
        if name and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "write <domain>/<class>/<image>, as the files are called"
            raise UserError(f"data.split: line {number} of {listing} names no image below {root}: {hint}")
        result.update([known[name]] if name else [])
    return result


def _fix_split(domain: Domain, tested: Sequence[bool]) -> Domain:
    test = np.array(tested, dtype=bool)
    return replace(domain, train_rows=np.flatnonzero(~test), test_rows=np.flatnonzero(test), fixed_split=True)


def _any_colour(images: Sequence[_Image]) -> bool:
    """Whether any image has colour. Medical ones say it in their header."""
    plain = [image.file for image in images if image.colour is None]
    return any(image.colour for image in images) or has_colour(plain)


def _groups(images: Sequence[_Image]) -> npt.NDArray[np.int64] | None:
    """A number for each patient and for each other image; None if no image is of a known patient."""
    if all(image.patient is None for image in images):
        return None
    numbers: dict[str, int] = {}
    names = [f"patient {image.patient}" if image.patient is not None else f"file {image.file.name}" for image in images]
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _without_corrupt(tree: ImageTree, window: Window | None) -> tuple[ImageTree, tuple[str, ...]]:
    """The images that decode, and a warning that lists the others."""
    corrupt = unreadable(
        [image.file for classes in tree.values() for images in classes.values() for image in images], window
    )
    if not corrupt:
        return tree, ()
    kept = {
        site: {
            label: [image for image in images if image.file.name not in corrupt] for label, images in classes.items()
        }
        for site, classes in tree.items()
    }
    text = "1 image does not decode and was" if len(corrupt) == 1 else f"{len(corrupt)} images do not decode and were"
    return kept, (f"{text} left out: {', '.join(corrupt)}",)


def _one_patient(patients: Mapping[str, Sequence[str | None]]) -> Iterator[str]:
    """A warning for each site of which nearly all images have one patient's ID. It shows no ID."""
    for site, names in patients.items():
        most = max(Counter(name for name in names if name is not None).values(), default=0)
        if most > 1 and most >= _MOSTLY * len(names):
            share = f"all {most}" if most == len(names) else f"{most} of {len(names)}"
            yield (
                f"{share} images of site '{site}' have the same patient ID, so they all train or are all held out: if "
                "the export gave one ID to all, set data.patient to study, series or file"
            )


def _patients_at_two_sites(patients: Mapping[str, Sequence[str | None]]) -> Iterator[str]:
    """A warning where images of different sites have the same patients' IDs. It shows no ID."""
    ids = {
        site: {name.removeprefix(f"{site}/") for name in names if name is not None} for site, names in patients.items()
    }
    pairs = [(item, other, len(ids[item] & ids[other])) for item, other in combinations(ids, 2)]
    shared = [f"{count} of '{item}' and '{other}'" for item, other, count in pairs if count]
    if shared:
        why = "if they are the same patients, what trains at one is measured at the other"
        yield f"sites have patient IDs in common: {join_names(shared, _MOST_NAMED)}: {why}"


@dataclass
class LeftOut:
    """Files below a root that are not read, but for hidden ones and those that operating systems make."""

    outside: list[Path] = field(default_factory=list)  # images that do not lie in a folder of images
    other_kinds: list[Path] = field(default_factory=list)  # other files that do
    deeper: list[Path] = field(default_factory=list)  # files in folders below one of images
    without_pixels: list[Path] = field(default_factory=list)  # DICOM files that hold no image

    def note_misplaced(self, folder: Path) -> None:
        """Note the images that lie directly in a folder of folders."""
        for path in sorted(folder.iterdir()):
            if not _is_hidden(path.name) and path.is_file() and (is_image(path.name) or is_medical(path)):
                self.outside.append(path)

    def other(self, path: Path) -> None:
        """Note what lies in a folder of images and is none: a file, or all files of a folder."""
        if _is_hidden(path.name):
            return
        if not path.is_dir():
            self.other_kinds.append(path)
            return
        for index, inner, names in os.walk(path):
            inner[:] = sorted(name for name in inner if not _is_hidden(name))
            self.deeper += [Path(index) / name for name in sorted(names) if not _is_hidden(name)]

    def warnings(self, root: Path) -> tuple[str, ...]:
        """One line that counts and names what is left out below ``root``; none if nothing is."""
        kinds = {
            "in deeper folders": self.deeper,
            "that lie outside of a folder of images": self.outside,
            "of other kinds": self.other_kinds,
            "of DICOM without an image": self.without_pixels,
        }
        below = {kind: [path for path in paths if path.is_relative_to(root)] for kind, paths in kinds.items()}
        parts = [
            f"{len(paths)} {kind} ({first_names(path.relative_to(root) for path in paths)})"
            for kind, paths in below.items()
            if paths
        ]
        total = sum(map(len, below.values()))
        return (f"{total} {'file is' if total == 1 else 'files are'} left out: {', '.join(parts)}",) if total else ()


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__")) or name.lower() in _MADE_BY_SYSTEMS


def image_warnings(made: Decoded, files: Mapping[str, Sequence[ImageFile]]) -> Iterator[str]:
    """What decoded images do not show: values that fill a small part of their range, and pages that were not read.

    ``made``: the images of all sites, in the order of ``files``.
    """
    flat = [file.name for of_site in files.values() for file in of_site]
    begin = 0
    for site, of_site in files.items():
        deep = {row: made.deep[row] for row in range(begin, begin + len(of_site)) if row in made.deep}
        begin += len(of_site)
        yield from _dark(site, {flat[row]: item for row, item in deep.items() if not item.colour}, colour=False)
        yield from _dark(site, {flat[row]: item for row, item in deep.items() if item.colour}, colour=True)
    if made.paged:
        yield pages_warning([flat[row] for row in made.paged])


def _dark(site: str, deep: Mapping[str, Deep], *, colour: bool) -> Iterator[str]:
    """A warning if all values of a site's images of more than 8 bits fill less than half of their range."""
    low, high = (
        min((item.low for item in deep.values()), default=0),
        max((item.high for item in deep.values()), default=0),
    )
    white = max((item.white for item in deep.values()), default=0)
    if 2 * (high - low) >= white:
        return
    top = 2 ** max(int(high), 1).bit_length() - 1
    advice = (
        "save these colours with 8 bits"
        if colour
        else f"set data.window to centre and width of what they hold at all sites, such as [{top / 2:g}, {top:g}]"
    )
    yield (
        f"images of more than 8 bits at site '{site}' have values from {low:g} to {high:g} where white is {white:g}, "
        f"so they are dark or flat (such as {max(deep, key=lambda name: deep[name].high)}): {advice}"
    )


def site_folders(root: Path, layout: str) -> list[Path]:
    """The folders of sites in ``root``, sorted.

    ``root``: the option ``data.root``. UserError if there is no such folder, or it holds no folders.
    """
    if not root.is_dir():
        raise UserError(f"data.root: folder {root} does not exist; expected {layout}")
    result = folders(root)
    if not result:
        raise UserError(f"data.root: {root} holds no folder of a site; expected {layout}")
    return result


def root_hint(root: Path, is_site: Callable[[Path], bool]) -> str:
    """A question about the root where the folders of the sites lie one folder above or below it; else empty.

    ``root``: the option ``data.root``, below which a site's folder has no images; ``is_site``: whether a folder is laid
    out as a site's.
    """
    root = root.resolve()
    for candidate in (*folders(root)[:_MOST_TRIED], *([root.parent] if is_site(root) else [])):
        if sum(map(is_site, folders(candidate)[:_MOST_TRIED])) > 1:
            return f"did you mean root: {candidate}? "
    return ""


def _images_in(folder: Path) -> bool:
    """Whether a folder holds an image, by the first files' names or content."""
    files = (path for path in itertools.islice(folder.iterdir(), _MOST_TRIED) if path.is_file())
    return any(is_image(path.name) or is_medical(path) for path in files)


def folders(parent: Path) -> list[Path]:
    """The folders in ``parent`` that are not hidden, sorted; none if ``parent`` does not exist."""
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
