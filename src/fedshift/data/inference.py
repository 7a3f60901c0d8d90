"""Samples to predict, prepared as the training data were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.data.builders.arrays import readable_inputs
from fedshift.data.builders.in_memory import InMemory
from fedshift.data.builders.medical import is_medical, slices_of
from fedshift.data.builders.table_labels import Labelling
from fedshift.data.domain import Dense, Preprocessing
from fedshift.data.images import ImageFile, decode, is_image, on_disk, paged_files, pages_warning, some_sides
from fedshift.data.locate import HDF5, load_arrays
from fedshift.data.table_files import EXCEL, PARQUET, Columns, SiteFormat, from_columns
from fedshift.data.tables import TableEncoding, encode_rows, encoding_of, rows_of
from fedshift.data.text_columns import TextEncoding, text_encoding_of
from fedshift.errors import UserError

_ARRAYS = (".npz", *HDF5)
_TABLES = (".csv", ".tsv", ".txt", ".data", *PARQUET, *EXCEL)
Stored = Dense


def load_for_prediction(path: Path, preprocessing: Preprocessing) -> tuple[list[str], Stored]:
    """Read samples to predict.

    Args:
        path: an image, a folder of images (searched recursively), an ``.npz`` with ``x`` as in data set `arrays`, or a
            table (CSV or Parquet) for a model of tables.

    Returns:
        Names of the samples, and their inputs for `fedshift.data.transforms.to_network`.

    Raises:
        UserError: the path is missing, empty, or not what the model reads.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: give an image, a folder of images, an .npz or a .csv file")
    suffix = path.suffix.lower()
    if path.is_file() and suffix in _TABLES:
        return rows_to_predict(preprocessing, table_to_predict(path, preprocessing) or path)
    if path.is_file() and suffix in _ARRAYS:
        return _arrays(path, preprocessing)
    if path.is_file() and not is_image(path.name) and not is_medical(path):
        raise UserError(f"{path} cannot be predicted: give an image, a folder of images, an .npz or a .csv file")
    return _images(path, preprocessing)


def rows_to_predict(preprocessing: Preprocessing, rows: Path | Columns) -> tuple[list[str], Stored]:
    """Names and inputs of the rows of a table: numbers, or the tokens of its text.

    UserError if the model reads no tables, or the table lacks a column.
    """
    text = text_encoding_of(preprocessing)
    if text is None or isinstance(rows, Path):
        return encode_rows(preprocessing, rows)
    id = None if preprocessing.table is None else encoding_of(preprocessing).id
    names = list(rows.cells.get(id, ())) if id is not None else []
    return names or [f"row {row}" for row in range(1, len(rows) + 1)], text.tokens(rows)


def samples_in_memory(samples: Any, preprocessing: Preprocessing) -> tuple[list[str], Stored]:
    """Names and inputs of samples in memory, prepared as `load_for_prediction` prepares files.

    Args:
        samples: a data frame, or anything that numpy makes an array of: (n, d) numbers, or images as in data set
            `arrays`. A model of tables reads a data frame with the columns of its table.

    Raises:
        UserError: the samples are not what the model reads.
    """
    if preprocessing.kind == "table":
        return encode_rows(preprocessing, _frame(samples, encoding_of(preprocessing)))
    held = InMemory(samples)
    array, mask = held.inputs("X") if held.is_tokenized else np.asarray(samples), held.mask("X")
    if array.ndim == 2 and array.dtype.kind in "iub" and preprocessing.kind != "tokens":
        array = array.astype(np.float64)
    inputs = readable_inputs("X", array, mask)
    _check_shape("X", inputs, preprocessing)
    return [str(row) for row in range(len(inputs))], inputs


def _texts(samples: Any, text: TextEncoding) -> Columns:
    if isinstance(samples, str) or not all(isinstance(sample, str) for sample in samples):
        raise UserError("X: the model reads text: give a list of texts, a data frame, or the path of a .csv")
    return from_columns("X", {text.column: list(samples)})


def _frame(samples: Any, encoding: TableEncoding, site_format: SiteFormat | None = None) -> Columns:
    if not hasattr(samples, "columns"):
        raise UserError("X: the model reads tables: give a data frame with their columns, or the path of a .csv")
    numeric = frozenset(column.name for column in encoding.numeric)
    return rows_of(lambda form: from_columns("X", InMemory(samples).columns(""), form, numeric), encoding, site_format)


def table_to_predict(
    samples: Path | Any, preprocessing: Preprocessing, site_format: SiteFormat | None = None
) -> Columns | None:
    """The table that ``samples`` are, read once for its rows, labels and checks; None if they are none.

    Args:
        samples: as for `load_for_prediction` or `samples_in_memory`.
        site_format: how the table is written, where it differs from those of the training; None: as these.

    Raises:
        UserError: the model reads tables, and the samples cannot be read as one; or they are none, and ``site_format``
            says how they are written.
    """
    text = text_encoding_of(preprocessing)
    is_table = isinstance(samples, Path) and samples.is_file() and samples.suffix.lower() in _TABLES
    if text is not None and (is_table or not isinstance(samples, Path)):
        known = text.columns() if preprocessing.table is None else encoding_of(preprocessing)
        if isinstance(samples, Path):
            return rows_of(samples, known, site_format)
        return _frame(samples, known, site_format) if hasattr(samples, "columns") else _texts(samples, text)
    if preprocessing.kind != "table":
        if site_format is not None:
            raise UserError(f"data.… says how tables are written, but the model reads {preprocessing.kind} inputs")
        return None
    if not isinstance(samples, Path):
        return _frame(samples, encoding_of(preprocessing), site_format)
    if not is_table:
        return None
    return rows_of(samples, encoding_of(preprocessing), site_format)


def known_labels(
    samples: Path | Columns | Any, names: Sequence[str], classes: Sequence[str], by: Labelling | None
) -> list[str | None] | None:
    """The class of each sample where the data say it.

    A table says it in its label column, an ``.npz`` in ``y``, images by folders that are called like the classes.

    Args:
        samples: what `load_for_prediction` or `samples_in_memory` read, of a table what `table_to_predict` gives.
        by: how the training tables said the class of a row.

    Returns:
        A class for each sample, None for one without a label; None if the data hold no labels.

    Raises:
        UserError: ``y`` has another length than the samples.
    """
    if isinstance(samples, Columns):
        return None if by is None else by.row_classes(samples)
    if not isinstance(samples, Path):
        return None
    if samples.suffix.lower() in _ARRAYS and samples.is_file():
        return _array_labels(samples, len(names), classes)
    folders = [Path(name).parent.name for name in names]
    return list(folders) if samples.is_dir() and set(folders) <= set(classes) else None


def _array_labels(path: Path, samples: int, classes: Sequence[str]) -> list[str | None] | None:
    labels = load_arrays(path, [], ["y"]).get("y")
    if labels is None:
        return None
    if labels.shape != (samples,):
        raise UserError(f"data file {path}: x has {samples} samples but y has shape {labels.shape}: mend or remove y")
    if labels.dtype.kind in "iub":
        return [classes[label] if 0 <= label < len(classes) else None for label in map(int, labels.tolist())]
    return [str(label) if str(label) in classes else None for label in labels.tolist()]


def _images(path: Path, preprocessing: Preprocessing) -> tuple[list[str], Stored]:
    if preprocessing.kind != "image":
        tables = preprocessing.kind == "table" or preprocessing.text is not None
        wanted = "a .csv table" if tables else f"{preprocessing.kind} in an .npz file"
        raise UserError(f"the model reads {wanted}: give that in place of {path}")
    channels, height, width = _image_shape(preprocessing)
    files = _image_files(path)
    if not files:
        raise UserError(f"{path} holds no images: give an image or a folder of images")
    names, entries = [], list[ImageFile]()
    for file in files:
        name = path.name if path.is_file() else file.relative_to(path).as_posix()
        result = (
            [item.image for item in slices_of(file, window=preprocessing.window)]
            if is_medical(file)
            else [on_disk(file)]
        )
        names += [name if len(result) == 1 else f"{name}[{number}]" for number in range(len(result))]
        entries += result
    if not entries:
        raise UserError(f"{path} holds DICOM without an image: give an image or a folder of images")
    return names, np.stack([decode(entry, channels, height, width, window=preprocessing.window) for entry in entries])


def _image_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(
        result
        for result in path.rglob("*")
        if not any(part.startswith(".") for part in result.relative_to(path).parts)
        and result.is_file()
        and (is_image(result.name) or is_medical(result))
    )


def stored_sides(path: Path) -> tuple[int, ...]:
    """The shorter sides of some image files in or at a path, in pixels; none of other files."""
    return some_sides([on_disk(file) for file in _image_files(path) if is_image(file.name)])


def further_pages(path: Path) -> str | None:
    """A warning if image files in or at a path have pages or frames after the first, which are not predicted."""
    files = [on_disk(file) for file in _image_files(path) if is_image(file.name)]
    more = paged_files(files)
    return pages_warning([files[number].name for number in more]) if more else None


def _image_shape(preprocessing: Preprocessing) -> tuple[int, int, int]:
    if preprocessing.shape is not None and len(preprocessing.shape) == 3:
        channels, height, width = preprocessing.shape
        return channels, height, width
    if preprocessing.channels is None or preprocessing.size is None:
        raise UserError("the model file does not give the size of its images: use the model.safetensors of a run")
    return preprocessing.channels, preprocessing.size, preprocessing.size


def _arrays(path: Path, preprocessing: Preprocessing) -> tuple[list[str], Stored]:
    if preprocessing.kind == "table":
        raise UserError(f"{path} holds arrays, but the model reads a .csv table: give that")
    held = load_arrays(path, ["x"], ["mask"])
    inputs = readable_inputs(f"data file {path}", held["x"], held.get("mask"))
    if len(inputs) == 0:
        raise UserError(f"data file {path} is empty: give at least one sample")
    _check_shape(f"data file {path}", inputs, preprocessing)
    return [str(row) for row in range(len(inputs))], inputs


def _check_shape(where: str, inputs: Stored, preprocessing: Preprocessing) -> None:
    """Check that samples have the shape that the model reads."""
    if (preprocessing.kind == "tokens") != (inputs.dtype == np.int64):
        wanted = "tokens, integers" if preprocessing.kind == "tokens" else "numbers, and integers are tokens"
        raise UserError(f"{where}: samples are {inputs.dtype}, but the model reads {wanted}: convert them")
    expected = _image_shape(preprocessing) if preprocessing.kind == "image" else preprocessing.shape
    if preprocessing.patch is not None:  # a network that reads parts reads volumes of any size
        sides = inputs.shape[2:]
        if inputs.ndim != 5 or any(side < part for side, part in zip(sides, preprocessing.patch, strict=True)):
            raise UserError(
                f"{where}: samples have shape {inputs.shape[1:]}, smaller than the parts that the model reads"
            )
        return
    if expected is not None and inputs.shape[1:] != tuple(expected):
        raise UserError(
            f"{where}: samples have shape {inputs.shape[1:]}, but the model reads {tuple(expected)}: "
            "bring them to that shape"
        )
