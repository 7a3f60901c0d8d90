"""Image files, decoded once into a memory-mapped uint8 array (n, channels, height, width)."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from fedshift.claims import hold_claim
from fedshift.data import sizes
from fedshift.data.locate import cache_dir
from fedshift.encryption import present_key, read_private, write_private
from fedshift.errors import UserError
from fedshift.json_objects import read_object, write_object

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm", ".pbm", ".pnm"}
)
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Accepted formats. The file's ending does not matter. Pillow reads more formats, but runs Ghostscript for EPS."""
_GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "F", "I;16", "I;16B", "I;16L", "I;16N"})
_FORMAT = "3"  # part of the cache key: increase it whenever decoding changes
_CRC, _PIECE = 4, 1 << 20  # bytes of the checksum at the end of a cache file, and of what is read at once
_THREADS = 2
_MOST_NAMED = 3
_ORIENTATION = 0x0112
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    ArithmeticError,
    TypeError,
    AttributeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    Image.DecompressionBombError,
)


Window = tuple[float, float]
"""Centre and width of the values that become black to white."""
Values = npt.NDArray[Any]
Grey = npt.NDArray[np.uint8]
T = TypeVar("T")


@dataclass(frozen=True)
class ImageFile:
    """One image."""

    name: str  # its name in messages
    stamp: str  # a text that changes with its content
    open: Callable[[], IO[bytes]]  # opens its bytes


class NotYetReadable(UserError):
    """An image is whole, but reading it needs a setting or a package. So it is not left out as a corrupt one."""


class Deep(NamedTuple):
    """What an image of more than 8 bits held before it got 8."""

    low: float  # its smallest finite value
    high: float  # its largest finite value
    white: float  # the value that its format has for white
    colour: bool = False  # whether it is in colour, to which no window applies


_NOT_WHOLE = (OSError, ValueError, EOFError, TypeError, KeyError, AttributeError)
"""What reading a damaged cache file raises."""


class Decoded(NamedTuple):
    """Images as one array, and what of them the array does not show."""

    pixels: Grey  # uint8 (n, channels, height, width), read-only and memory-mapped; in memory if the cache is encrypted
    deep: dict[int, Deep]  # of those with more than 8 bits that no window scales, by their number
    paged: tuple[int, ...]  # the numbers of those whose file has further pages or frames, which were not read


class _Image(NamedTuple):
    pixels: Grey
    deep: Deep | None
    paged: bool


def is_image(name: str) -> bool:
    """Whether a file name has the ending of an image and is not hidden."""
    base = os.path.basename(name)
    return os.path.splitext(base)[1].lower() in SUFFIXES and not base.startswith(".")


def on_disk(path: Path) -> ImageFile:
    """An image file in a folder; its stamp is its size and time of change."""
    result = path.stat()
    return ImageFile(str(path), f"{result.st_size} {result.st_mtime_ns}", lambda: path.open("rb"))


def in_zip(archive: zipfile.ZipFile, name: str) -> ImageFile:
    """An image inside an open zip file; its stamp is its checksum. Several threads may read it."""
    return ImageFile(f"{archive.filename}:{name}", str(archive.getinfo(name).CRC), lambda: archive.open(name))


def _does_not_decode(file: ImageFile) -> UserError:
    if begins_as_dicom(file):
        return UserError(f"image {file.name} holds DICOM: give it the ending .dcm")
    return UserError(
        f"image {file.name} does not decode (truncated, not an image, or none of {', '.join(FORMATS)}): replace or "
        "remove it"
    )


def begins_as_dicom(file: ImageFile) -> bool:
    """Whether a file begins with the preamble of DICOM (PS3.10 7.1): 128 bytes, then DICM."""
    try:
        with file.open() as stream:
            return stream.read(132)[128:] == b"DICM"
    except OSError:
        return False


def has_colour(files: Sequence[ImageFile]) -> bool:
    """Whether any image is stored in colour (RGB, palette, CMYK …). Stops at the first one."""
    return any(_ask(file, lambda image: image.mode) not in _GREY_MODES for file in files)


def _ask(file: ImageFile, question: Callable[[Image.Image], T]) -> T:
    """What the header of an image says."""
    try:
        with file.open() as stream, Image.open(stream, formats=FORMATS) as image:
            return question(image)
    except _UNREADABLE as error:
        raise _does_not_decode(file) from error


def limits(window: Window) -> tuple[float, float]:
    """The values that become black and white: those of DICOM's LINEAR_EXACT (PS3.3 C.11.2.1.3.2).

    Example:
        >>> limits((40.0, 400.0))
        (-160.0, 240.0)
    """
    return window[0] - window[1] / 2, window[0] + window[1] / 2


def finite_range(values: Values) -> tuple[float, float]:
    """The smallest and the largest finite value; (inf, -inf) if there is none."""
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if values.size else (np.inf, -np.inf)


def scale_to_grey(values: Values, low: float, high: float) -> Grey:
    """Values as 0 (``low`` and below) to 255 (``high`` and above); what is not finite is 0."""
    share = values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        share = (share - low) / (high - low) if high > low else (share > low).astype(np.float64)
    return to_grey(share, values)


def to_grey(share: npt.NDArray[np.float64], values: Values) -> Grey:
    """Shares of white as 0 to 255; where ``values`` are not finite it is 0."""
    if values.dtype.kind == "f":
        share = np.where(np.isfinite(values), share, 0.0)
    grey: Grey = np.rint(share.clip(0, 1) * 255).astype(np.uint8)
    return grey


def decode(
    file: ImageFile, channels: int, height: int, width: int, *, mask: bool = False, window: Window | None = None
) -> Grey:
    """Decode one image: turn it upright, scale it to cover the size, and keep the centre.

    Grey becomes colour by repeating its channel; colour becomes grey as luma. Transparency is dropped. Of a file with
    several pages or frames the first is read. Grey with more than 8 bits is scaled by ``window``, else by what its
    format has for white: 65535 for 16 bits, 4095 for a TIFF of 12.

    Args:
        channels: 1 or 3.
        mask: whether it is a mask: everything that is not black is 1, with a threshold of one half after scaling.
        window: centre and width of the values of grey images with more than 8 bits that become black to white.

    Returns:
        uint8 (channels, height, width).

    Raises:
        UserError: the file does not decode, or holds numbers whose black and white nothing says.
    """
    return _decode(file, channels, height, width, mask, window).pixels


def _decode(file: ImageFile, channels: int, height: int, width: int, mask: bool, window: Window | None) -> _Image:
    try:
        with file.open() as stream:
            image: Image.Image = Image.open(BytesIO(stream.read()), formats=FORMATS)
        sizes.check_image(file.name, image.width, image.height)
        paged = _has_pages(image)
        image.draft(None, (2 * width, 2 * height))  # lets JPEG skip detail that scaling would throw away
        form, deep = _form(image), None
        image = ImageOps.exif_transpose(image)
        if mask:
            image = _not_black(image)
        elif form is not None:
            image, deep = _eight_bits(image, form, file, window)
        if "transparency" in image.info and image.mode == "P":
            image = image.convert("RGBA")  # without this step Pillow warns
        image = image.convert("RGB" if channels == 3 else "L")
        if image.size != (width, height):
            image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    except _UNREADABLE as error:
        raise _does_not_decode(file) from error
    except MemoryError as error:
        raise sizes.no_memory(file.name) from error
    pixels = np.asarray(image, dtype=np.uint8)
    if mask:
        pixels = (pixels > 127).astype(np.uint8)
    return _Image(
        np.ascontiguousarray(pixels.transpose(2, 0, 1)) if pixels.ndim == 3 else pixels[np.newaxis], deep, paged
    )


class _Form(NamedTuple):
    """How an image of more than 8 bits is stored."""

    white: float | None  # the value that means white, if the format says it
    turned: bool = False  # whether 0 means white
    upper: bool = False  # whether only the upper 8 of 16 bits are read, as of colours


def _form(image: Image.Image) -> _Form | None:
    """How an image is stored that was opened but not read; None if it has 8 bits."""
    tags = getattr(image, "tag_v2", {})
    bits = next(iter(tags.get(_BITS_PER_SAMPLE, ())), 16)
    if image.mode != "F" and not image.mode.startswith("I"):
        if 2 in tags.get(_SAMPLE_FORMAT, ()):
            raise ValueError("numbers of 8 bits with a sign")
        return _Form(65535, upper=True) if _has_wide_channels(image) else None
    turned = tags.get(_PHOTOMETRIC) == 0
    if image.mode.startswith("I;16") or image.format != "TIFF":  # Pillow scales PGM to 16 bits
        return _Form(2**bits - 1 if bits < 16 else 65535, turned)
    return _Form(None, turned)


def _has_wide_channels(image: Image.Image) -> bool:
    """Whether the channels of a colour image have 16 bits, which Pillow's mode does not say."""
    return any(";16" in str(part[-1]) for part in getattr(image, "tile", ()))


def _eight_bits(
    image: Image.Image, form: _Form, file: ImageFile, window: Window | None
) -> tuple[Image.Image, Deep | None]:
    """An image of more than 8 bits with 8, and what it held if no window scaled it."""
    values = np.asarray(image)
    low, high = finite_range(values)
    if form.upper:  # Pillow has dropped the lower bits
        return image, Deep(257 * low, 257 * high, 65535, True)
    if window is None and form.white is None:
        if not np.isfinite(low):
            raise UserError(f"image {file.name} holds no finite number: replace or remove it")
        kind = "real numbers" if values.dtype.kind == "f" else "whole numbers of 32 bits or with a sign"
        raise NotYetReadable(
            f"image {file.name} holds {kind} from {low:g} to {high:g}, and nothing says which are black and white: set "
            f"data.window to centre and width, such as [{(low + high) / 2:g}, {max(high - low, 1):g}]"
        )
    grey = scale_to_grey(values, *((0.0, form.white or 0.0) if window is None else limits(window)))
    deep = Deep(low, high, form.white or 0.0) if window is None else None
    return Image.fromarray(255 - grey if form.turned else grey), deep


def _not_black(image: Image.Image) -> Image.Image:
    """White wherever a mask is not black."""
    values = np.asarray(image if image.mode == "F" or image.mode.startswith("I") else image.convert("RGB"))
    lit = np.nan_to_num(values) != 0
    return Image.fromarray(np.uint8(255) * (lit.any(axis=2) if lit.ndim == 3 else lit).astype(np.uint8))


def size_of(file: ImageFile) -> tuple[int, int]:
    """Width and height of an image as it is displayed, without decoding its pixels."""

    def sides(image: Image.Image) -> tuple[int, int]:
        turned = image.getexif().get(_ORIENTATION, 1) > 4  # EXIF orientations 5 to 8 swap the sides
        return (image.height, image.width) if turned else (image.width, image.height)

    return _ask(file, sides)


def _has_pages(image: Image.Image) -> bool:
    """Whether an open file has further pages or frames. The further images of a JPEG are previews."""
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))


def paged_files(files: Sequence[ImageFile]) -> list[int]:
    """The numbers of the files that have further pages or frames, without decoding pixels."""
    return [number for number, file in enumerate(files) if _ask(file, _has_pages)]


def pages_warning(names: Sequence[str]) -> str:
    """That files have further pages or frames, with the first names."""
    which = "1 file has" if len(names) == 1 else f"{len(names)} files have"
    return f"{which} more than one page or frame, of which the first is read: {first_names(names)}"


def first_names(names: Iterable[object]) -> str:
    """The first names, and that there are more."""
    texts = list(map(str, names))
    return ", ".join(texts[:_MOST_NAMED]) + (", …" if len(texts) > _MOST_NAMED else "")


def some_sides(files: Sequence[ImageFile], most: int = 16) -> tuple[int, ...]:
    """The shorter sides of some of the images, evenly spaced, in pixels."""
    return tuple(_ask(file, lambda image: min(image.size)) for file in files[:: max(1, -(-len(files) // most))])


def unreadable(files: Sequence[ImageFile], window: Window | None = None) -> list[str]:
    """The names of the images that do not decode. What is found is kept in the cache.

    NotYetReadable if one is whole, but needs a setting or a package.
    """
    digest = hashlib.sha256(f"{_FORMAT} unreadable {window}\n".encode())
    for file in files:
        digest.update(f"{file.name}\t{file.stamp}\n".encode(errors="surrogatepass"))  # names may be no UTF-8
    target = cache_dir() / f"unreadable-{digest.hexdigest()[:24]}.json"
    closed = present_key() is not None  # names of files may be those of patients
    try:
        known = json.loads(read_private(target)) if closed and target.exists() else read_object(target)
    except (UserError, ValueError):
        known = {}
        warnings.warn(f"{target} was damaged: the images are tried again", stacklevel=2)
    if known:
        return list(known["unreadable"])

    def fails(file: ImageFile) -> bool:
        try:
            decode(file, 1, 8, 8, window=window)
        except NotYetReadable:
            raise
        except UserError:
            return True
        return False

    with ThreadPoolExecutor(_THREADS) as pool:
        result = [file.name for file, failed in zip(files, pool.map(fails, files), strict=True) if failed]
    if closed:
        write_private(target, json.dumps({"unreadable": result}).encode())
    else:
        write_object(target, {"unreadable": result})
    return result


def decode_all(
    files: Sequence[ImageFile],
    channels: int,
    height: int,
    width: int,
    label: str,
    *,
    mask: bool = False,
    window: Window | None = None,
) -> Decoded:
    """All images as one array, decoded now or found in the cache.

    The cache file is named after ``label`` and a hash of names, stamps and shape, so any changed, added or removed file
    gives a new one. It is written under another name and renamed when complete. What a killed process left under that
    name is written over. A damaged file is made again, with a warning. Where a key is set the file is encrypted.

    Args:
        channels: 1 or 3.
        mask: whether they are masks, see `decode`.
        window: see `decode`.

    Raises:
        UserError: an image does not decode, or the cache folder is full or cannot be written.
    """
    digest = hashlib.sha256(f"{_FORMAT} {'mask' if mask else channels} {height} {width} {window}\n".encode())
    for file in files:
        digest.update(f"{file.name}\t{file.stamp}\n".encode(errors="surrogatepass"))  # names may be no UTF-8
    folder = cache_dir()
    target = folder / f"{label}-{digest.hexdigest()[:24]}.npy"
    shape = (len(files), channels, height, width)
    if present_key() is not None:
        return _load_encrypted(target, shape, _in_order(files, channels, height, width, mask, window))
    known = _read_cache(target, shape)
    if known is not None:
        return known
    aside = target.with_suffix(".part")
    try:
        # Waits if another process decodes the same images, then uses its result.
        with hold_claim(aside) as claim, _fresh(aside) as stream:
            if (known := _read_cache(target, shape)) is not None:
                return known
            if target.exists():
                warnings.warn(f"{target} was damaged: its images are decoded again", stacklevel=2)
            _write(stream, shape, _in_order(files, channels, height, width, mask, window))
            claim.check()
            os.replace(aside, target)
    except OSError as error:
        raise UserError(
            f"cannot write decoded images to {folder} ({error.strerror}): free some space, or set FEDSHIFT_CACHE "
            "to another folder"
        ) from error
    written = _read_cache(target, shape)
    if written is None:
        raise UserError(f"the decoded images in {target} cannot be read back: remove the file and run again")
    return written


def _load_encrypted(target: Path, shape: tuple[int, ...], images: Iterable[_Image]) -> Decoded:
    """The images from an encrypted cache file, or decoded now and written to one."""
    if target.exists():
        try:
            return _parse_cache(read_private(target), shape)
        except (UserError, *_NOT_WHOLE):
            warnings.warn(
                f"{target} was damaged, or written with another key: its images are decoded again", stacklevel=3
            )
    stream = BytesIO()
    _write(stream, shape, images)
    write_private(target, stream.getvalue())
    return _parse_cache(stream.getvalue(), shape)


def _parse_cache(content: bytes, shape: tuple[int, ...]) -> Decoded:
    stream = BytesIO(content)
    array = np.load(stream, allow_pickle=False)
    if array.shape != shape or array.dtype != np.uint8:
        raise ValueError(array.shape)
    return _with_what_is_beside(array, stream.read())


def _with_what_is_beside(pixels: Grey, rest: bytes) -> Decoded:
    """The array of a cache file, and what else is known, which stands behind it and before the CRC."""
    beside = json.loads(rest[:-_CRC])
    deep = {
        int(number): Deep(float(low), float(high), float(white), bool(colour))
        for number, (low, high, white, colour) in beside["deep"].items()
    }
    return Decoded(pixels, deep, tuple(map(int, beside["paged"])))


def _write(stream: IO[bytes], shape: tuple[int, ...], images: Iterable[_Image]) -> None:
    """Write a cache file: the array; behind it, where numpy does not look, what else is known; the CRC of all that."""
    checksum, deep, paged = 0, {}, []

    def write(data: bytes) -> None:
        # Not through a memory map: on a full disk a write raises an error, a map kills the process.
        nonlocal checksum
        checksum = zlib.crc32(data, checksum)
        stream.write(data)

    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    write(header.getvalue())
    for number, image in enumerate(images):
        write(image.pixels.tobytes())
        if image.deep is not None:
            deep[number] = image.deep
        if image.paged:
            paged.append(number)
    write(json.dumps({"deep": deep, "paged": paged}).encode())
    stream.write(checksum.to_bytes(_CRC))
    stream.flush()


@contextmanager
def _fresh(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which is removed if it is there still at the end."""
    path.unlink(missing_ok=True)  # a process that lost its claim may be writing to it
    with open(path, "xb") as stream:
        try:
            yield stream
        finally:
            path.unlink(missing_ok=True)


def _in_order(
    files: Sequence[ImageFile], channels: int, height: int, width: int, mask: bool, window: Window | None
) -> Iterator[_Image]:
    with ThreadPoolExecutor(_THREADS) as pool:
        for begin in range(0, len(files), 256):  # in pieces, so that few decoded images wait in memory
            yield from pool.map(
                lambda file: _decode(file, channels, height, width, mask, window), files[begin : begin + 256]
            )


def _read_cache(path: Path, shape: tuple[int, ...]) -> Decoded | None:
    try:
        if not _is_whole(path):
            return None
        result = np.load(path, mmap_mode="r", allow_pickle=False)
        if result.shape != shape or result.dtype != np.uint8:
            return None
        with path.open("rb") as stream:
            stream.seek(result.offset + result.nbytes)
            return _with_what_is_beside(result, stream.read())
    except _NOT_WHOLE:
        return None


def _is_whole(path: Path) -> bool:
    """Whether a cache file ends with the CRC of what is before."""
    left, checksum = path.stat().st_size - _CRC, 0
    with path.open("rb") as stream:
        while piece := stream.read(min(_PIECE, max(0, left))):
            checksum = zlib.crc32(piece, checksum)
            left -= len(piece)
        return stream.read() == checksum.to_bytes(_CRC)


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
