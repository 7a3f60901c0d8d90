"""Finds and reads data files.

``FEDSHIFT_DATA`` names the folder of the data sets. ``FEDSHIFT_CACHE`` names the folder of decoded images and downloads
(default ``~/.cache/fedshift``).
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedshift.data import sizes
from fedshift.data.domain import Manifest
from fedshift.errors import UserError
from fedshift.extras import import_extra
from fedshift.files import write_bytes

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


DATA_VARIABLE = "FEDSHIFT_DATA"
CACHE_VARIABLE = "FEDSHIFT_CACHE"
_LARGEST_DOWNLOAD = 512 << 20


def data_root() -> Path | None:
    """The folder that ``FEDSHIFT_DATA`` names, or None if it is not set. UserError if it is not a folder."""
    named = os.environ.get(DATA_VARIABLE)
    if not named:
        return None
    root = Path(named).expanduser()
    if not root.is_dir():
        raise UserError(
            f"{DATA_VARIABLE} is {root}, which is not a folder: set it to the folder that holds the data sets"
        )
    return root


def cache_dir() -> Path:
    """The folder for decoded images and downloads; created if it is missing. UserError if it cannot be created."""
    named = os.environ.get(CACHE_VARIABLE)
    folder = Path(named).expanduser() if named else Path.home() / ".cache" / "fedshift"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the cache folder {folder} ({error.strerror}): set {CACHE_VARIABLE} to a folder you can write"
        ) from error
    return folder


def find(candidates: Sequence[str]) -> Path | None:
    """The first of ``candidates`` that exists below ``FEDSHIFT_DATA``, or None."""
    root = data_root()
    if root is None:
        return None
    return next((root / name for name in candidates if (root / name).exists()), None)


def not_found(what: str, candidates: Sequence[str], how_to_get: str) -> UserError:
    """The error for a data set that was not found: what was searched, where, and how to get it."""
    root = data_root()
    text = f"not below {DATA_VARIABLE} ({root})" if root else f"{DATA_VARIABLE} is not set"
    return UserError(f"{what} not found: {text}; looked for {', '.join(candidates)}. {how_to_get}")


def require(what: str, candidates: Sequence[str], how_to_get: str) -> Path:
    """Like `find`, for data that must be there.

    Args:
        candidates: paths below ``FEDSHIFT_DATA``.
        how_to_get: a sentence that says how to get the data.

    Raises:
        UserError: none of the paths exists.
    """
    result = find(candidates)
    if result is None:
        raise not_found(what, candidates, how_to_get)
    return result


def load_arrays(
    path: Path, required: Sequence[str] | None = None, optional: Sequence[str] = ()
) -> dict[str, npt.NDArray[np.generic]]:
    """Read arrays of an ``.npz`` or an HDF5 file, by its ending: `load_npz`, `fedshift.data.locate.load_hdf5`."""
    return (load_hdf5 if path.suffix.lower() in HDF5 else load_npz)(path, required, optional)


def load_npz(
    path: Path, required: Sequence[str] | None = None, optional: Sequence[str] = ()
) -> dict[str, npt.NDArray[np.generic]]:
    """Read arrays of an ``.npz`` file.

    Args:
        required: names of arrays that must be there; None: all that are there.
        optional: names of arrays that are read if they are there.

    Returns:
        Name → array.

    Raises:
        UserError: the file is missing, truncated or not an npz, lacks an array, holds Python objects, or declares
            more numbers than fit.
    """
    if not path.is_file():
        raise UserError(f"data file {path} does not exist: copy it there, or correct the path")
    try:
        # Opened here: np.load leaves a damaged archive open when it gives up.
        with path.open("rb") as opened, sizes.reading(path):
            archive = np.load(opened, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UserError(f"data file {path} is not an .npz archive: save it with numpy.savez")
            with archive:
                wanted = list(archive.files) if required is None else list(required)
                lacking = [key for key in wanted if key not in archive.files]
                if lacking:
                    held = ", ".join(archive.files) or "nothing"
                    raise UserError(f"data file {path} has no array '{lacking[0]}'; it holds: {held}")
                wanted += [key for key in optional if key in archive.files and key not in wanted]
                assert archive.zip is not None  # it is open
                sizes.check_arrays(path, archive.zip, wanted)
                return {key: archive[key] for key in wanted}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if "Object arrays" in str(error):
            raise UserError(
                f"data file {path} holds Python objects, which are not read: save plain number arrays"
            ) from error
        raise UserError(f"data file {path} cannot be read (truncated or not an .npz): copy or make it again") from error


def fetch(what: str, manifest: Manifest) -> list[Path]:
    """Download a data set's files to ``FEDSHIFT_DATA``. Files that are there stay as they are.

    Args:
        manifest: says what is where, and the checksum of each file.

    Returns:
        The files that were written.

    Raises:
        UserError: the data set names no address, ``FEDSHIFT_DATA`` is not set, an address cannot be reached, or a file
            has another checksum. Nothing is written then.
    """
    if not manifest.downloads:
        raise UserError(f"data set {what} cannot be fetched: {manifest.how_to_get}")
    root = data_root()
    if root is None:
        raise UserError(f"{DATA_VARIABLE} is not set: set it to the folder that shall hold the data sets")
    fetched: dict[Path, bytes] = {}
    for address, names in manifest.downloads.items():
        missing = [name for name in names if not (root / name).exists()]
        content = _download(address) if missing else b""
        for name in missing:
            data = _member(content, Path(name).name, address)
            if hashlib.sha256(data).hexdigest() != manifest.sha256[name]:
                raise UserError(f"{Path(name).name} at {address} is not the version that fedshift knows: not written")
            fetched[root / name] = data
    for path, data in fetched.items():
        write_bytes(path, data)
    return list(fetched)


def _download(address: str) -> bytes:
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(address, timeout=60) as answer:
            data: bytes = answer.read(_LARGEST_DOWNLOAD + 1)
    except (URLError, OSError, ValueError) as error:
        text = getattr(error, "reason", None) or error
        raise UserError(f"{address} cannot be fetched ({text}): try again later, or get it by hand") from error
    if len(data) > _LARGEST_DOWNLOAD:
        raise UserError(f"{address} is larger than {_LARGEST_DOWNLOAD >> 20} MiB: get it by hand")
    return data


def _member(content: bytes, name: str, address: str) -> bytes:
    """A file of an archive, or the content itself if it is none."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return content
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            result = next(info for info in archive.infolist() if Path(info.filename).name == name)
            if result.file_size > _LARGEST_DOWNLOAD:
                raise UserError(f"{name} at {address} is too large: get it by hand")
            return archive.read(result)
    except (StopIteration, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise UserError(f"the archive at {address} is damaged or holds no {name}: get it by hand") from error


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
