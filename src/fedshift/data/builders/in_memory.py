"""A site's samples as objects of this process: arrays, tensors, data frames and data sets of other libraries.

They are recognised by what they can do, so none of these libraries is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import PlainSerializer, PlainValidator

from fedshift.data.databases import Database, database, is_address
from fedshift.errors import UserError, nearest

Array = npt.NDArray[np.generic]
INPUTS = ("image", "img", "input_ids", "x", "features")
LABELS = ("label", "labels", "y", "target")
"""Names that the columns of inputs and of labels usually have in data sets of Hugging Face."""
TOKENS, MASK = "input_ids", "attention_mask"
"""What tokenizers of Hugging Face call tokens, and where there are some."""


class InMemory:
    """One site's samples. Two are equal only if they are the same object."""

    def __init__(self, samples: Any, labels: Any = None) -> None:
        """``labels`` is None where ``samples`` hold them: a data frame with a label column, or a data set."""
        self.samples = samples
        self.labels = labels

    def __str__(self) -> str:
        return f"{type(self.samples).__name__} in memory"

    @property
    def is_frame(self) -> bool:
        """Whether the samples are a data frame."""
        return hasattr(self.samples, "columns") and hasattr(self.samples, "dtypes")

    @property
    def is_named(self) -> bool:
        """Whether the samples are a data set of Hugging Face, which has named columns."""
        return hasattr(self.samples, "column_names") and hasattr(self.samples, "features")

    def columns(self, label: str) -> dict[str, Sequence[Any]]:
        """The columns of a data frame or of a Hugging Face data set, and the labels under the name ``label``.

        UserError if the samples have no columns.
        """
        if not (self.is_frame or self.is_named):
            raise UserError(
                f"data.sites: data set table was given a {type(self.samples).__name__}: give a data frame, or write "
                "name: arrays"
            )
        names = self.samples.columns if self.is_frame else self.samples.column_names
        result: dict[str, Sequence[Any]] = {str(name): as_list(self.samples[name]) for name in names}
        return result if self.labels is None else {**result, label: as_list(self.labels)}

    def arrays(self, where: str) -> tuple[Array, Array]:
        """Inputs and labels as arrays, with a row for each sample.

        UserError if samples differ in shape, have no labels, or cannot be read.
        """
        if self.labels is not None:
            return _array(f"{where}: inputs", self._plain), _array(f"{where}: labels", self.labels)
        if self.is_named:
            return self._column(where, INPUTS, "inputs"), self._column(where, LABELS, "labels")
        if self.is_frame:
            raise UserError(f"{where}: a data frame without labels is a table: write name: table and label: COLUMN")
        try:
            pairs = [self.samples[row] for row in range(len(self.samples))]
        except Exception as error:  # the user's own code
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise UserError(f"{where}: the data set cannot be read ({text}): mend its __getitem__") from error
        if not all(isinstance(pair, Sequence) and len(pair) >= 2 for pair in pairs):
            raise UserError(f"{where}: each sample of a data set must be a pair of an input and a label")
        inputs, labels = ([pair[index] for pair in pairs] for index in (0, 1))
        return _array(f"{where}: inputs", inputs), _array(f"{where}: labels", labels)

    @property
    def _plain(self) -> Any:
        """The samples; of what a tokenizer gives its tokens."""
        return self.samples[TOKENS] if self.is_tokenized else self.samples

    @property
    def is_tokenized(self) -> bool:
        """Whether the samples are what a tokenizer of Hugging Face gives."""
        return not self.is_frame and hasattr(self.samples, "keys") and TOKENS in self.samples

    def mask(self, where: str) -> Array | None:
        """Where tokens are, 1, and where there are none, 0; None if nothing says so."""
        named = self.is_named and {TOKENS, MASK} <= set(self.samples.column_names)
        if named or (self.is_tokenized and MASK in self.samples):
            held = self.samples[MASK]
            return _array(f"{where}: mask", as_list(held) if named else held)
        return None

    def inputs(self, where: str) -> Array:
        """The inputs of samples whose labels are not read, with a row for each. UserError as for `arrays`."""
        plain = (
            self.labels is not None
            or self.is_tokenized
            or hasattr(self.samples, "dtype")
            or hasattr(self.samples, "detach")
        )
        if plain or isinstance(self.samples, list):
            return _array(f"{where}: inputs", self._plain)
        if self.is_named:
            return self._column(where, INPUTS, "inputs")
        return self.arrays(where)[0]

    def _column(self, where: str, usual: Sequence[str], what: str) -> Array:
        names = [name for name in usual if name in self.samples.column_names]
        if not names:
            raise UserError(
                f"{where}: the data set has no column of {what}; rename one to '{usual[0]}'; "
                f"{nearest(usual[0], self.samples.column_names)}"
            )
        values = as_list(self.samples[names[0]])
        classes = getattr(self.samples.features[names[0]], "names", None)
        return _array(f"{where}: {what}", [classes[value] for value in values] if classes else values)


def held_at(value: Any) -> Path | Database:
    """A path or, where it reads like one, the address of a database.

    ValueError if it is neither. UserError if the address cannot be used.
    """
    if isinstance(value, str):
        return database(value) if is_address(value) else Path(value)
    if isinstance(value, Path | Database):
        return value
    raise ValueError("give the path of a file, or the address of a database")


def samples_in(value: Any) -> Path | Database | InMemory:
    """What a site's entry under ``data.sites`` stands for.

    ValueError if it is neither a path nor samples. UserError if it is the address of a database that cannot be used.
    """
    if isinstance(value, InMemory):
        return value
    if isinstance(value, str | Path | Database):
        return held_at(value)
    if isinstance(value, tuple | list):
        if len(value) != 2 or any(isinstance(part, str) for part in value):
            raise ValueError("give one file for each site; in Python, also a pair of inputs and labels")
        return InMemory(*value)
    held = InMemory(value)
    is_set = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not hasattr(value, "dtype")
    if held.is_frame or (is_set and not isinstance(value, Mapping)):
        return held
    raise ValueError("give one file for each site; in Python, also (inputs, labels), a data frame or a data set")


SiteSamples = Annotated[Path | Database | InMemory, PlainValidator(samples_in), PlainSerializer(str)]
"""A site's entry under ``data.sites``. Written down, objects in memory are named by their type only."""
Held = Annotated[Path | Database, PlainValidator(held_at), PlainSerializer(str)]
"""A file or a database, as written in an experiment file."""


def as_list(values: Any) -> list[Any]:
    """A column as a list of Python values."""
    for method in ("tolist", "to_list"):
        if hasattr(values, method):
            result: list[Any] = getattr(values, method)()
            return result
    return list(values)


def _array(what: str, values: Any) -> Array:
    """Values of other libraries as one array: a tensor, a column, a list of images or of arrays."""
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu()
        if any(np.ma.is_masked(part) for part in (values if isinstance(values, list | tuple) else [values])):
            raise UserError(f"{what} has masked values: fill or drop such rows")
        if isinstance(values, list | tuple):
            values = np.stack([np.asarray(value) for value in values]) if len(values) else np.empty(0)
        array: Array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{what} cannot be made one array ({error}): bring all samples to one shape") from error
    if array.dtype == object and all(isinstance(value, str) for value in array.ravel()):
        array = array.astype(str)
    if array.dtype.kind not in "biufUS":
        raise UserError(f"{what} are neither numbers nor text ({array.dtype}): convert them")
    return array
