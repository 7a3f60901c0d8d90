"""PACS: photographs, art paintings, cartoons and sketches of seven kinds of objects.

Source: Li, Yang, Song, Hospedales, *Deeper, Broader and Artier Domain Generalization*, ICCV 2017.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from pydantic import Field

from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest, Preprocessing, Rows
from fedshift.data.images import ImageFile, decode_all, in_zip, is_image, on_disk
from fedshift.data.locate import find, load_npz, require
from fedshift.errors import UserError

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
COUNTS = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
_CANDIDATES = (
    "PACS/art_painting",
    "PACS/kfold/art_painting",
    "pacs/art_painting",
    "kfold/art_painting",
    "pacs_images_128.zip",
)
_SCALES = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}
_SPLITS = ("pacs_splits", "PACS/splits", "pacs/splits", "PACS")
_HOW = (
    "Put pacs_images_128.zip below FEDSHIFT_DATA, or the folders PACS/<domain>/<class>/*, and for the official split "
    "pacs_splits/<domain>_train_kfold.txt and <domain>_crossval_kfold.txt"
)


class Pacs(DataSource):
    """PACS images, decoded once into the cache."""

    name: Literal["pacs"] = "pacs"
    size: int = Field(128, ge=16, le=512, description="height and width in pixels")
    scale: Literal["imagenet", "half"] = Field(
        "imagenet", description="what networks read: values scaled by ImageNet's mean and deviation, or in [-1, 1]"
    )
    samples_per_domain: int | None = Field(None, ge=1, description="at most this many images of each domain, at random")
    base_seed: int = Field(0, ge=0, description="seed of the draw when samples_per_domain is given")

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="PACS (photo, art painting, cartoon, sketch)",
            source="Li, Yang, Song, Hospedales, ICCV 2017",
            licence="research use; no explicit licence; the images belong to their owners",
            how_to_get=_HOW,
            layout="pacs_images_128.zip, PACS/<domain>/<class>/*, PACS/kfold/<domain>/<class>/*; pacs_splits/*.txt",
            sha256={"pacs_images_128.zip": "9de7f269c6f8f2049d1a99f6cc7ecfaebfef3aca7e67ba41a3305a8f8ac7f750"},
            counts=COUNTS,
            notes="Official split: training rows are the published train lists; test rows are the crossval lists, the "
            "part of a source that is held out (an unseen target is tested on all its images). The zip holds "
            "128-pixel JPEG copies; the folders, at 227 pixels, are in "
            "github.com/MachineLearning2020/Homework3-PACS.",
        )

    def build(self) -> DataSet:
        """Four domains of images (n, 3, size, size), memory-mapped, with the official split if its lists are there."""
        folder = require("PACS", _CANDIDATES, _HOW)
        files = _list_zip(folder) if folder.is_file() else _in_folders(folder.parent)
        names = [name for name in DOMAINS if name in files]
        if len(names) < len(DOMAINS):
            raise UserError(f"{folder}: no images of {', '.join(set(DOMAINS) - set(names))}. {_HOW}")
        rows = {name: self._choose_rows(number, len(files[name])) for number, name in enumerate(names)}
        chosen = [files[name][row][1] for name in names for row in rows[name]]
        images = decode_all(chosen, 3, self.size, self.size, "pacs").pixels
        domains, warnings, begin = {}, [], 0
        for name in names:
            paths, domain_rows = [path for path, _ in files[name]], rows[name]
            labels = np.array([CLASSES.index(paths[row].split("/")[1]) for row in domain_rows], dtype=np.int64)
            train_rows, test_rows = (
                None if listed is None else np.flatnonzero(np.isin(domain_rows, listed))
                for listed in official_rows(name, paths)
            )
            domains[name] = Domain(name, images[begin : begin + len(domain_rows)], labels, None, train_rows, test_rows)
            begin += len(domain_rows)
            if len(paths) != COUNTS[name]:
                warnings.append(
                    f"'{name}' has {len(paths)} images, published are {COUNTS[name]}: the copy is not complete"
                )
        mean, std = _SCALES[self.scale]
        preprocessing = Preprocessing(kind="image", channels=3, size=self.size, mean=mean, std=std)
        return check_dataset(DataSet(self.name, domains, CLASSES, preprocessing, self.manifest(), tuple(warnings)))

    def _choose_rows(self, number: int, samples: int) -> Rows:
        """The rows of a domain that are used, sorted: all, or ``samples_per_domain`` drawn at random."""
        if self.samples_per_domain is None or self.samples_per_domain >= samples:
            return np.arange(samples, dtype=np.int64)
        draws = np.random.default_rng([self.base_seed, number])
        return np.sort(draws.choice(samples, self.samples_per_domain, replace=False))


Listing = Mapping[str, Sequence[tuple[str, ImageFile]]]


def _list_zip(path: Path) -> Listing:
    try:
        archive = zipfile.ZipFile(path)  # stays open while images are read from it
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"data file {path} cannot be read (truncated or not a zip): get it again") from error
    return _sort_by_domain(
        {"/".join(PurePosixPath(name).parts[-3:]): in_zip(archive, name) for name in archive.namelist()}
    )


def _in_folders(root: Path) -> Listing:
    return _sort_by_domain(
        {
            f"{name}/{label}/{path.name}": on_disk(path)
            for name in DOMAINS
            for label in CLASSES
            for path in (root / name / label).glob("*")
            if is_image(path.name)
        }
    )


def _sort_by_domain(files: Mapping[str, ImageFile]) -> Listing:
    """Files by domain as (domain/class/name, file), sorted. Ignores files of no known domain or class."""
    out: dict[str, list[tuple[str, ImageFile]]] = {}
    for path in sorted(files):
        parts = path.split("/")
        if len(parts) == 3 and parts[0] in DOMAINS and parts[1] in CLASSES and is_image(parts[2]):
            out.setdefault(parts[0], []).append((path, files[path]))
    return out


def official_rows(name: str, paths: Sequence[str]) -> tuple[Rows | None, Rows | None]:
    """The official split of a domain.

    Args:
        paths: domain/class/file of each row. Endings are ignored: sketches are .png in one copy and .jpg in another.

    Returns:
        Rows of the train list and of the crossval list, or (None, None) if the lists are not below FEDSHIFT_DATA.

    Raises:
        UserError: a list names a missing file, or a label that does not fit the file's folder.
    """
    folder = next((result for index in _SPLITS if (result := find([f"{index}/{name}_train_kfold.txt"]))), None)
    if folder is None:
        return None, None
    row_of = {_stem(path): row for row, path in enumerate(paths)}
    train, held_out = (_read_list(folder.parent / f"{name}_{part}_kfold.txt", row_of) for part in ("train", "crossval"))
    return train, held_out


def _stem(path: str) -> str:
    return path.rpartition(".")[0]


def _read_list(path: Path, row_of: Mapping[str, int]) -> Rows:
    """The rows of one list, sorted. Labels in the file run from 1 to 7."""
    try:
        lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
        entries = [(file, int(label) - 1) for file, label in lines]
    except (OSError, ValueError) as error:
        raise UserError(
            f"split list {path} is missing or not lines of '<domain>/<class>/<file> <label>': get it again"
        ) from error
    rows = []
    for file, label in entries:
        row = row_of.get(_stem(file))
        if row is None:
            raise UserError(f"split list {path} names {file}, which is not among the images: complete the copy of PACS")
        if not 0 <= label < len(CLASSES) or CLASSES[label] != file.split("/")[1]:
            raise UserError(f"split list {path}: label {label + 1} of {file} does not fit its folder")
        rows.append(row)
    return np.array(sorted(rows), dtype=np.int64)


_FEATURES = ("pacs_mobilenetv2.npz",)
_HOW_FEATURES = (
    "Put pacs_mobilenetv2.npz below FEDSHIFT_DATA (x, y, domain, path: pooled ImageNet MobileNetV2 features of PACS)"
)


class PacsFeatures(DataSource):
    """The global-average-pooled output (≥ 0) of an ImageNet MobileNetV2 for every PACS image."""

    name: Literal["pacs_features"] = "pacs_features"

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="PACS, frozen MobileNetV2 features (1280)",
            source="Li, Yang, Song, Hospedales, ICCV 2017; features: Sandler et al., CVPR 2018, ImageNet weights",
            licence="as PACS (research use); weights Apache-2.0",
            how_to_get=_HOW_FEATURES,
            layout=", ".join(_FEATURES) + "; pacs_splits/*.txt for the official split",
            sha256={"pacs_mobilenetv2.npz": "d4d664ca1f3145b60dec4600c278010699db05c0768c71abfad92e4b9ade5344"},
            counts=COUNTS,
            notes="Computed at 224 pixels from the 227-pixel images. Rows are sorted by path; the split lists are the "
            "same as for the images. `model: {name: frozen, backbone: …}` makes its own from data set pacs.",
        )

    def build(self) -> DataSet:
        """Four domains of float features (n, 1280)."""
        path = require("PACS features", _FEATURES, _HOW_FEATURES)
        arrays = load_npz(path, ["x", "y", "domain", "path"])
        features, labels, numbers, paths = (arrays[key] for key in ("x", "y", "domain", "path"))
        if features.ndim != 2 or not len(features) == len(labels) == len(numbers) == len(paths):
            raise UserError(f"data file {path}: x has shape {features.shape}, y {labels.shape}, domain {numbers.shape}")
        domains = {}
        for number, name in enumerate(DOMAINS):
            rows = np.flatnonzero(numbers == number)
            train_rows, test_rows = official_rows(name, [str(entry) for entry in paths[rows]])
            inputs = features[rows].astype(np.float32)
            domains[name] = Domain(name, inputs, labels[rows].astype(np.int64), None, train_rows, test_rows)
        return check_dataset(DataSet(self.name, domains, CLASSES, Preprocessing(kind="features"), self.manifest()))
