"""Image files, decoded once into a memory-mapped uint8 array (n, channels, height, width)."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from fedshift.data.locate import cache_dir
from fedshift.errors import UserError
from fedshift.files import write_bytes

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm", ".pbm", ".pnm"}
)
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Accepted formats. The file's ending does not matter. Pillow reads more formats, but runs Ghostscript for EPS."""
_GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "F", "I;16", "I;16B", "I;16L", "I;16N"})
_FORMAT = "1"  # part of the cache key: increase it whenever decoding changes
_THREADS = 2
_ORIENTATION = 0x0112
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, Image.DecompressionBombError)


@dataclass(frozen=True)
class ImageFile:
    """One image.

    Attributes:
        name: its name in messages.
        stamp: a text that changes with its content.
        open: opens its bytes.
    """

    name: str
    stamp: str
    open: Callable[[], IO[bytes]]


def is_image(name: str) -> bool:
    """Whether a file name has the ending of an image and is not hidden."""
    path = Path(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def on_disk(path: Path) -> ImageFile:
    """An image file in a folder; its stamp is its size and time of change."""
    found = path.stat()
    return ImageFile(str(path), f"{found.st_size} {found.st_mtime_ns}", lambda: path.open("rb"))


def in_zip(archive: zipfile.ZipFile, name: str) -> ImageFile:
    """An image inside an open zip file; its stamp is its checksum. Several threads may read it."""
    return ImageFile(f"{archive.filename}:{name}", str(archive.getinfo(name).CRC), lambda: archive.open(name))


def _does_not_decode(file: ImageFile) -> UserError:
    return UserError(
        f"image {file.name} does not decode (truncated, not an image, or none of {', '.join(FORMATS)}): replace or "
        "remove it"
    )


def has_colour(files: Sequence[ImageFile]) -> bool:
    """Whether any image is stored in colour (RGB, palette, CMYK …). Stops at the first one."""
    return any(_mode(file) not in _GREY_MODES for file in files)


def _mode(file: ImageFile) -> str:
    try:
        with file.open() as stream, Image.open(stream, formats=FORMATS) as image:
            return str(image.mode)
    except _UNREADABLE as error:
        raise _does_not_decode(file) from error


def decode(file: ImageFile, channels: int, height: int, width: int, *, mask: bool = False) -> npt.NDArray[np.uint8]:
    """Decode one image: turn it upright, scale it to cover the size, and keep the centre.

    Grey becomes colour by repeating its channel; colour becomes grey as luma. 16-bit grey is scaled to 8 bits.
    Transparency is dropped.

    Args:
        file: the image.
        channels: 1 or 3.
        height: in pixels.
        width: in pixels.
        mask: whether it is a mask: everything that is not black is 1, with a threshold of one half after scaling.

    Returns:
        uint8 (channels, height, width).

    Raises:
        UserError: the file does not decode.
    """
    try:
        with file.open() as stream:
            image: Image.Image = Image.open(BytesIO(stream.read()), formats=FORMATS)
        image.draft(None, (2 * width, 2 * height))  # lets JPEG skip detail that scaling would throw away
        image = ImageOps.exif_transpose(image)
        if mask:
            image = Image.fromarray(np.uint8(255) * (np.asarray(image.convert("RGB")).max(axis=2) > 0).astype(np.uint8))
        image = _eight_bits(image, file).convert("RGB" if channels == 3 else "L")
        if image.size != (width, height):
            image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    except _UNREADABLE as error:
        raise _does_not_decode(file) from error
    pixels = np.asarray(image, dtype=np.uint8)
    if mask:
        return (pixels[np.newaxis] > 127).astype(np.uint8)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if channels == 3 else pixels[np.newaxis]


def _eight_bits(image: Image.Image, file: ImageFile) -> Image.Image:
    """The image with 8 bits. Scales 16-bit values, which Pillow would cut off at 255."""
    if image.mode == "F":
        raise UserError(f"image {file.name} holds real numbers: save it with 8 or 16 bits, or use data set 'arrays'")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise UserError(f"image {file.name} holds values beyond 16 bits: save it with 8 or 16 bits")
    return Image.fromarray((values // 257).astype(np.uint8))


def size_of(file: ImageFile) -> tuple[int, int]:
    """Width and height of an image as it is displayed, without decoding its pixels."""
    try:
        with file.open() as stream, Image.open(stream, formats=FORMATS) as image:
            turned = image.getexif().get(_ORIENTATION, 1) > 4  # EXIF orientations 5 to 8 swap the sides
            return (image.height, image.width) if turned else (image.width, image.height)
    except _UNREADABLE as error:
        raise _does_not_decode(file) from error


def unreadable(files: Sequence[ImageFile]) -> list[str]:
    """The names of the images that do not decode. What is found is kept in the cache."""
    digest = hashlib.sha256(f"{_FORMAT} unreadable\n".encode())
    for file in files:
        digest.update(f"{file.name}\t{file.stamp}\n".encode())
    target = cache_dir() / f"unreadable-{digest.hexdigest()[:24]}.json"
    try:
        known = json.loads(target.read_bytes())
    except (OSError, ValueError):
        known = None
    if isinstance(known, list):
        return [str(name) for name in known]

    def fails(file: ImageFile) -> bool:
        try:
            decode(file, 1, 8, 8)
        except UserError:
            return True
        return False

    with ThreadPoolExecutor(_THREADS) as pool:
        found = [file.name for file, failed in zip(files, pool.map(fails, files), strict=True) if failed]
    write_bytes(target, json.dumps(found).encode())
    return found


def decoded(
    files: Sequence[ImageFile], channels: int, height: int, width: int, label: str, *, mask: bool = False
) -> npt.NDArray[np.uint8]:
    """All images as one array, decoded now or found in the cache.

    The cache file is named after ``label`` and a hash of names, stamps and shape, so any changed, added or removed file
    gives a new one. It is written under another name and renamed when complete. What a killed process left under that
    name is written over.

    Args:
        files: the images.
        channels: 1 or 3.
        height: in pixels.
        width: in pixels.
        label: beginning of the cache file's name.
        mask: whether they are masks, see `decode`.

    Returns:
        A read-only memory-mapped array (n, channels, height, width).

    Raises:
        UserError: an image does not decode, or the cache folder is full or cannot be written.
    """
    digest = hashlib.sha256(f"{_FORMAT} {'mask' if mask else channels} {height} {width}\n".encode())
    for file in files:
        digest.update(f"{file.name}\t{file.stamp}\n".encode())
    folder = cache_dir()
    target = folder / f"{label}-{digest.hexdigest()[:24]}.npy"
    shape = (len(files), channels, height, width)
    known = _cached(target, shape)
    if known is not None:
        return known
    aside = target.with_suffix(".part")
    try:
        with _alone(aside) as stream:  # waits if another process decodes the same images, then uses its result
            if (known := _cached(target, shape)) is not None:
                return known
            # Not written through a memory map: on a full disk a write raises an error, a map kills the process.
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(stream, header)
            for image in _in_order(files, channels, height, width, mask):
                stream.write(image.tobytes())
            stream.flush()
            os.replace(aside, target)
    except OSError as error:
        raise UserError(
            f"cannot write decoded images to {folder} ({error.strerror}): free some space, or set FEDSHIFT_CACHE "
            "to another folder"
        ) from error
    written = _cached(target, shape)
    if written is None:
        raise UserError(f"the decoded images in {target} cannot be read back: remove the file and run again")
    return written


@contextmanager
def _alone(path: Path) -> Iterator[IO[bytes]]:
    """An empty file that no other process writes meanwhile. It is removed if it is there still at the end."""
    while True:
        with open(path, "ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if not (path.exists() and path.stat().st_ino == os.fstat(stream.fileno()).st_ino):
                continue  # who had it before has removed or renamed it
            try:
                stream.truncate(0)
                yield stream
            finally:
                path.unlink(missing_ok=True)
            return


def _in_order(
    files: Sequence[ImageFile], channels: int, height: int, width: int, mask: bool
) -> Iterator[npt.NDArray[np.uint8]]:
    with ThreadPoolExecutor(_THREADS) as pool:
        for begin in range(0, len(files), 256):  # in pieces, so that few decoded images wait in memory
            yield from pool.map(
                lambda file: decode(file, channels, height, width, mask=mask), files[begin : begin + 256]
            )


def _cached(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8] | None:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == np.uint8 else None


def as_channels_first(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Images with their channels first, without a copy.

    Args:
        pixels: (n, h, w), (n, c, h, w) or (n, h, w, c) with c = 1 or 3. If both readings are possible, the second axis
            holds the channels.

    Returns:
        (n, c, h, w).

    Raises:
        ValueError: another number of axes, or no axis of 1 or 3 channels.
    """
    if pixels.ndim == 3:
        return pixels[:, np.newaxis]
    if pixels.ndim != 4:
        raise ValueError(f"images need 3 or 4 axes, found shape {pixels.shape}")
    if pixels.shape[1] in (1, 3):
        return pixels
    if pixels.shape[3] in (1, 3):
        return pixels.transpose(0, 3, 1, 2)
    raise ValueError(f"images need 1 or 3 channels, found shape {pixels.shape}")
