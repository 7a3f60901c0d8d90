"""Readers of arrays: the npz files of MedMNIST, the pickles of CIFAR, the MATLAB files of Digits-Five."""

from __future__ import annotations

import csv
import io
import pickle  # nosec B403
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedshift.data import sizes
from fedshift.data.images import as_channels_first
from fedshift.data.locate import load_npz
from fedshift.data.published.samples import Location, Part, Samples
from fedshift.errors import UserError
from fedshift.section import Section

_LARGEST = 1 << 30
"""Bytes of a file; CIFAR's have up to 155 million."""


class _Array:
    """Stands for an array until its content comes. Only plain numbers are taken."""

    def __init__(self, *_: object) -> None:
        self.value: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, content = state
        dtype = np.dtype(kind.name)
        if dtype.kind not in "biuf" or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array holds something else than numbers")
        self.value = np.frombuffer(content, dtype=dtype).reshape(shape, order="F" if by_columns else "C")


class _Kind:
    """Stands for the type of an array's numbers."""

    def __init__(self, name: object, *_: object) -> None:
        self.name = name.decode("ascii") if isinstance(name, bytes) else str(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        self.name = f"{order if order in '<>' else ''}{self.name}"


def _bytes_of(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError("a text of another encoding")
    return text.encode("latin1")


_ALLOWED = {
    **{(module, "_reconstruct"): _Array for module in ("numpy.core.multiarray", "numpy._core.multiarray")},
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _bytes_of,
}
"""The names that a pickle of arrays needs; each stands for something here that runs nothing."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code") from None

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of it")


def read_pickled(path: Path) -> dict[str, Any]:
    """The entries of a pickled dictionary.

    Args:
        path: the file, as Python 2 or 3 wrote it.

    Returns:
        Name → list, number, text (as bytes) or array.

    Raises:
        UserError: it is missing, too large, damaged, or names anything but arrays.
    """
    try:
        size = path.stat().st_size
        sizes.check_size(path, size)
        if size > _LARGEST:
            raise UserError(f"data file {path} is too large for a pickle of arrays: get it again")
        held = _Reader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from None
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"data file {path} is no pickle of plain arrays ({error}): get it again") from None
    if not isinstance(held, dict):
        raise UserError(f"data file {path} holds no dictionary: get it again")
    text = {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in held.items()}
    return {key: value.value if isinstance(value, _Array) else value for key, value in text.items()}


Values = npt.NDArray[Any]
_SIDE = 32
"""Height and width that digits are brought to."""


class Npz(Section):
    """An npz file for each domain, with arrays ``train_images``, ``train_labels``, ``val_images`` and so on."""

    kind: Literal["npz"]
    files: dict[str, str]  # domain → its file
    parts: dict[str, Literal["train", "test"]]  # the prefix of arrays → the part
    labels: Literal["one", "many"] = "one"  # ``many`` where a sample has several

    def in_words(self) -> str:
        """How the folder looks."""
        return ", ".join(self.files.values())

    def read(self, location: Location) -> dict[str, Samples]:
        """The images by domain; those of one part after those of another.

        UserError if a file is missing, damaged, or holds arrays that do not fit.
        """
        domains = {}
        for domain in location.chosen:
            path = location.folder / self.files[domain]
            if path.exists():
                names = [f"{part}_{what}" for part in self.parts for what in ("images", "labels")]
                arrays = load_npz(path, names)
                read = [(arrays[f"{name}_images"], arrays[f"{name}_labels"], part) for name, part in self.parts.items()]
                domains[domain] = _together(path, read, self.labels)
            elif not location.incomplete:
                raise location.missing(f"file {self.files[domain]}")
        return domains


class Pickles(Section):
    """Pickled dictionaries with rows of 3 × 32 × 32 pixels, as CIFAR's authors publish them.

    Attributes:
        files: part → its files.
        folder: where they may be below the data set's folder.
        labels: the entry of class numbers.
    """

    kind: Literal["pickles"]
    files: dict[Literal["train", "test"], tuple[str, ...]]
    labels: str

    def in_words(self) -> str:
        """How the folder looks."""
        return ", ".join(name for names in self.files.values() for name in names)

    def read(self, location: Location) -> dict[str, Samples]:
        """All images, as one domain.

        UserError if a file is missing, damaged, could run code, or holds arrays that do not fit.
        """
        read: list[tuple[Values, Values, Part]] = []
        path = location.folder
        for part, names in self.files.items():
            for name in names:
                path = location.folder / name
                if path.exists():
                    read.append((*_batch(path, self.labels), part))
                elif not location.incomplete:
                    raise location.missing(f"file {name}")
        return {location.domains[0]: _together(path, read, "one")} if read else {}


def _batch(path: Path, labels: str) -> tuple[Values, Values]:
    held = read_pickled(path)
    data, entries = held.get("data"), held.get(labels)
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3 * 32 * 32 or entries is None:
        raise UserError(f"data file {path} has no data of 3 × 32 × 32 pixels and no {labels}: get it again")
    try:
        numbers = np.array([int(entry) for entry in entries], dtype=np.int64)
    except (TypeError, ValueError):
        raise UserError(f"data file {path}: {labels} are no whole numbers: get it again") from None
    return data.reshape(-1, 3, 32, 32), numbers


class MatFile(Section):
    """Where a domain's arrays are: entry names, or an entry and places in its cell, as ``dataset/0/1``."""

    files: dict[Literal["train", "test"], tuple[str, ...]]  # part → its files; one file may hold both parts
    images: dict[Literal["train", "test"], str]  # part → the entry
    labels: dict[Literal["train", "test"], str]  # likewise
    last: bool = False  # whether the images are numbered along the last axis, as SVHN's
    unit: bool = False  # whether pixels are from 0 to 1


class Mat(Section):
    """MATLAB files with images and one-hot or plain labels; label 10 is the digit 0."""

    kind: Literal["mat"]
    domains: dict[str, MatFile]

    def in_words(self) -> str:
        """How the folder looks."""
        return ", ".join(dict.fromkeys(names[0] for about in self.domains.values() for names in about.files.values()))

    def read(self, location: Location) -> dict[str, Samples]:
        """The images by domain, grey ones with their channel three times.

        UserError if a file is missing or damaged, or lacks an entry.
        """
        domains = {}
        for domain in location.chosen:
            about = self.domains[domain]
            paths = {
                part: next((location.folder / name for name in names if (location.folder / name).exists()), None)
                for part, names in about.files.items()
            }
            if None in paths.values():
                if not location.incomplete:
                    raise location.missing(f"file {next(iter(about.files.values()))[0]}")
                continue
            read = [(*_of_mat(path, about, part), part) for part, path in paths.items() if path is not None]
            domains[domain] = _together(location.folder, read, "one")
        return domains


def _of_mat(path: Path, about: MatFile, part: Literal["train", "test"]) -> tuple[Values, Values]:
    from scipy.io import loadmat

    try:
        held: Mapping[str, Any] = loadmat(path)
        images, labels = (_entry(held, name) for name in (about.images[part], about.labels[part]))
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"data file {path} is not the MATLAB file of this data set ({error}): get it again") from None
    if about.last:
        images = np.moveaxis(images, -1, 0)
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim == 4 and images.shape[1] == 1:
        images = np.moveaxis(images, 1, -1)
    if about.unit:
        images = np.rint(images * 255)
    if images.shape[1:3] != (_SIDE, _SIDE):
        images = _resize(images.astype(np.uint8))
    digits = labels.argmax(axis=1) if labels.ndim == 2 and labels.shape[1] > 1 else labels.reshape(-1) % 10
    return np.broadcast_to(images, (*images.shape[:3], 3)).astype(np.uint8), digits.astype(np.int64)


def _resize(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Images (n, h, w, 1 or 3) brought to the side of the others, bilinearly."""
    grey = images.shape[-1] == 1
    sized = [
        Image.fromarray(image[..., 0] if grey else image).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
        for image in images
    ]
    return np.stack([np.asarray(image) for image in sized]).reshape(len(images), _SIDE, _SIDE, -1)


def _entry(held: Mapping[str, Any], name: str) -> Values:
    first, *steps = name.split("/")
    value: Any = held[first]
    for step in steps:
        value = value[int(step)]
    return np.asarray(value)


def _together(path: Path, read: Sequence[tuple[Values, Values, Part]], labels: Literal["one", "many"]) -> Samples:
    for images, numbers, _ in read:
        fit = images.dtype == np.uint8 and images.ndim in (3, 4) and len(images) == len(numbers)
        if not fit or numbers.dtype.kind not in "iub":
            raise UserError(f"data file {path}: its images or labels are not those of this data set: get it again")
    images = np.concatenate([as_channels_first(part) for part, _, _ in read])
    if labels == "many":
        marks: npt.NDArray[Any] = np.concatenate([numbers for _, numbers, _ in read]).astype(np.float32)
    else:
        marks = np.concatenate([numbers.reshape(-1) for _, numbers, _ in read]).astype(np.int64)
    return Samples(images, marks, tuple(part for _, numbers, part in read for _ in range(len(numbers))))


class Rows(Section):
    """FLamby's files of TCGA-BRCA."""

    kind: Literal["rows"]
    table: str  # the features, the event and the time of each row
    split: tuple[str, ...]  # key, part and domain of each row
    key: str  # the column of both that names a row
    side: str  # the column of the split such as ``train_0``: part and number of the domain
    time: str  # the column of times
    event: str  # the column of events

    def in_words(self) -> str:
        """How the folder looks."""
        return f"{self.table} and {self.split[0]}"

    def read(self, location: Location) -> dict[str, Samples]:
        """The rows by domain, in the order of the table. UserError if a file is missing or damaged."""
        listing = next((location.folder / name for name in self.split if (location.folder / name).exists()), None)
        if listing is None or not (location.folder / self.table).exists():
            raise location.missing(f"files {self.table} and {self.split[0]}")
        table = location.folder / self.table
        try:
            sides = {row[self.key]: row[self.side] for row in _rows(listing)}
            rows = [row for row in _rows(table) if row[self.key] in sides]
            features = [name for name in rows[0] if name not in (self.key, self.time, self.event)]
            inputs = np.array([[float(row[name]) for name in features] for row in rows], dtype=np.float32)
            labels = np.array([[float(row[self.time]), float(row[self.event])] for row in rows], dtype=np.float32)
            divided = [sides[row[self.key]].rpartition("_") for row in rows]
            numbers = np.array([int(number) for _, _, number in divided], dtype=np.int64)
        except (OSError, UnicodeDecodeError, KeyError, ValueError, TypeError, IndexError):
            raise UserError(f"{table} or {listing} is not as {self.in_words()} are: get them again") from None
        parts: list[Part] = ["train" if part == "train" else "test" for part, _, _ in divided]
        return {
            domain: Samples(inputs[here], labels[here], tuple(parts[row] for row in here))
            for number, domain in enumerate(location.domains)
            if domain in location.chosen and len(here := np.flatnonzero(numbers == number))
        }


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
