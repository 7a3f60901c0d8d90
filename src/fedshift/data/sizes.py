"""How much memory the data of one file may take. What a file's header declares is compared with it before it is read.

A small file can declare, or expand to, more than any machine has: a compressed array of zeros, an image of 60,000 by
60,000 pixels, a deflated DICOM file. ``FEDSHIFT_LARGEST_DATA`` sets the limit in GiB; by default it is half of the
machine's memory, or of what its container may use.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile

from fedshift.errors import UserError

VARIABLE = "FEDSHIFT_LARGEST_DATA"
_CONTAINER = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CELL = 120
"""Bytes of a cell of a table while it is read: a Python value and its text."""
_PIXEL, _VALUE = 4, 8
"""Bytes of a pixel of an image, and of a value of a medical image, which is read as a float64."""
_DEFLATE = 1032
"""The most bytes that one byte of deflate expands to."""
_PIECE = 1 << 20
_GIB = 1 << 30


@lru_cache
def _memory() -> int:
    """Bytes of memory that this machine has, or that its container may use."""
    bounds = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CONTAINER:
        try:
            bounds.append(int(path.read_text()))
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
    return min(bounds)


def largest() -> int:
    """Bytes that the data of one file may take in memory.

    UserError if the environment's setting is no number of GiB.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return _memory() // 2
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise UserError(
            f"{VARIABLE} is '{text[:50]}': set it to a number of GiB, or leave it out for half of the memory"
        )
    return int(size * _GIB)


def check_size(path: object, size: int) -> None:
    """Refuse a file that declares more data than one may have.

    ``size``: bytes that its data take in memory. UserError if they are too many.
    """
    if size > (most := largest()):
        raise UserError(
            f"{path} declares {_gib(size)} of data, and one file may have {_gib(most)}: check the file, split it, or "
            f"set {VARIABLE} (in GiB)"
        )


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB" if size >= _GIB else f"{size / (1 << 20):,.1f} MiB"


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Say in one line which file there was not enough memory for.

    UserError if reading it took more memory than there was.
    """
    try:
        yield
    except MemoryError as error:
        raise no_memory(path) from error


def no_memory(path: object) -> UserError:
    """The error for a file that there was not enough memory to read."""
    return UserError(
        f"there is not enough memory to read {path}: end other programs, or use a smaller file or a larger machine"
    )


def check_table(path: object, rows: int, columns: int) -> None:
    """Refuse a table that declares more cells than fit, as `check_size` does."""
    check_size(path, rows * columns * _CELL)


def check_image(path: object, width: int, height: int) -> None:
    """Refuse an image that declares more pixels than fit, as `check_size` does."""
    check_size(path, width * height * _PIXEL)


def check_volume(path: object, sizes: Iterable[int]) -> None:
    """Refuse a medical image whose sizes declare more values than fit, as `check_size` does."""
    check_size(path, math.prod(max(0, int(size)) for size in sizes) * _VALUE)


def check_dicom(path: object, header: Any) -> None:
    """Refuse a DICOM file that declares more values than fit, as `check_size` does. ``header``: pydicom's data set."""
    names = ("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel")
    check_volume(path, [int(header.get(name) or 1) for name in names])


def check_arrays(path: object, archive: ZipFile, names: Iterable[str]) -> None:
    """Refuse an ``.npz`` file whose arrays declare more numbers than fit, as `check_size` does.

    Args:
        names: of the arrays that are to be read.

    Raises:
        UserError: they declare too many.
        ValueError: a header is damaged.
    """
    total = 0
    for name in names:
        members = [member for member in (f"{name}.npy", name) if member in archive.NameToInfo]
        with archive.open(members[0]) as stream:
            total += _declared_bytes(stream)  # type: ignore[arg-type]
    check_size(path, total)


def _declared_bytes(stream: BinaryIO) -> int:
    """Bytes of the array whose ``.npy`` file this is; 0 if it is none."""
    import numpy as np

    try:
        version = np.lib.format.read_magic(stream)
    except ValueError:
        return 0
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(stream)
    return math.prod(shape) * kind.itemsize


def check_deflated(path: Path, start: int) -> None:
    """Refuse a file whose deflated rest expands to more than fits, as `check_size` does.

    It is expanded, and not kept, only if so many bytes could take too much.

    UserError if it expands to too much.
    """
    most = largest()
    if (path.stat().st_size - start) * _DEFLATE <= most:
        return
    size, expand = 0, zlib.decompressobj(-zlib.MAX_WBITS)
    with path.open("rb") as stream:
        stream.seek(start)
        try:
            while (piece := expand.unconsumed_tail or stream.read(_PIECE)) and not expand.eof:
                size += len(expand.decompress(piece, _PIECE))
                check_size(path, size)
        except zlib.error:  # whoever reads it says that it is damaged
            return
