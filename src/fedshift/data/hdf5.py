"""Arrays of HDF5 files, by h5py: plain numbers and texts that lie in the file itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedshift.data import sizes
from fedshift.errors import UserError
from fedshift.extras import import_extra

HDF5 = (".h5", ".hdf5")


def load_hdf5(
    path: Path, required: Sequence[str] | None = None, optional: Sequence[str] = ()
) -> dict[str, npt.NDArray[np.generic]]:
    """Read data sets at the top of an HDF5 file, as `fedshift.data.locate.load_npz` reads arrays.

    A data set whose values lie in other files, by a link, as external storage or as a virtual data set, is refused: a
    file that somebody sent must not make this machine open others.

    Args:
        required: names of data sets that must be there; None: all that are there.
        optional: names of data sets that are read if they are there.

    Raises:
        UserError: the file is missing, damaged, lacks a data set, points to other files, holds other things than
            numbers and texts, or declares more numbers than fit.
    """
    h5py = import_extra("h5py", extra="databases", what=f"{path.name}, an HDF5 file,")
    if not path.is_file():
        raise UserError(f"data file {path} does not exist: copy it there, or correct the path")
    try:
        with sizes.reading(path), h5py.File(path, "r") as file:
            names = list(file)
            wanted = names if required is None else list(required)
            lacking = [name for name in wanted if name not in names]
            if lacking:
                held = ", ".join(names) or "nothing"
                raise UserError(f"data file {path} has no array '{lacking[0]}'; it holds: {held}")
            wanted += [name for name in optional if name in names and name not in wanted]
            chosen = {name: _inside(h5py, path, file, name) for name in wanted}
            sizes.check_size(path, sum(math.prod(item.shape) * item.dtype.itemsize for item in chosen.values()))
            return {name: _values(h5py, path, name, item) for name, item in chosen.items()}
    except UserError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"data file {path} cannot be read (truncated or not HDF5): copy or make it again") from error


def _inside(h5py: Any, path: Path, file: Any, name: str) -> Any:
    """A data set whose values lie in this file."""
    if isinstance(file.get(name, getlink=True), h5py.HardLink):
        dataset = file[name]
        if (
            isinstance(dataset, h5py.Dataset)
            and dataset.shape is not None
            and not dataset.external
            and not dataset.is_virtual
        ):
            return dataset
    raise UserError(f"data file {path}: '{name}' is no array in this file: copy its values into it, without links")


def _values(h5py: Any, path: Path, name: str, stored: Any) -> npt.NDArray[np.generic]:
    if h5py.check_string_dtype(stored.dtype) is not None:
        result: npt.NDArray[np.generic] = np.asarray(stored.asstr()[()], dtype=np.str_)
        return result
    if stored.dtype.kind not in "biuf":
        raise UserError(f"data file {path}: '{name}' holds values of type {stored.dtype}: save numbers or texts")
    plain: npt.NDArray[np.generic] = stored[()]
    return np.asarray(plain)
