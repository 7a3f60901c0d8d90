"""Arrays in a pickle, read so that it can run no code: only names, numbers, lists and arrays of plain numbers."""

from __future__ import annotations

import io
import pickle  # nosec B403
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.data import sizes
from fedshift.errors import UserError

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
