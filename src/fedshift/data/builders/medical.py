"""Slices of DICOM and NIfTI files as images of 8 bits, by pydicom and nibabel.

How the values of a DICOM file become grey is the standard's pipeline (PS3.3 C.11): stored value, modality (rescale or
table), values of interest (window or table), presentation. Tables, windows and padding are applied here rather than by
`pydicom.pixels`, whose functions wrap in tables of 8 bits with more than 256 entries, fail at empty fields, and turn
the image over where the slope is negative. Tests compare the two where both are right.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedshift.data import sizes
from fedshift.data.images import (
    Grey,
    ImageFile,
    NotYetReadable,
    Values,
    Window,
    begins_as_dicom,
    finite_range,
    is_image,
    limits,
    scale_to_grey,
    to_grey,
)
from fedshift.errors import UserError
from fedshift.extras import import_extra

DICOM, NIFTI = (".dcm", ".dicom"), (".nii", ".nii.gz")
Which = Literal["all", "middle"]
Patient = Literal["id", "study", "series", "file"]
_FORMAT = "2"
"""Part of a slice's stamp: increase it whenever the pixels change."""
_PHOTOMETRIC = ("MONOCHROME1", "MONOCHROME2", "PALETTE COLOR", "RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")


@dataclass(frozen=True)
class Slice:
    """One slice of a file."""

    image: ImageFile  # the slice as an image of 8 bits
    patient: str  # slices of one patient have the same text; for NIfTI the volume stands for the patient
    colour: bool  # whether it has three channels


class _Header(NamedTuple):
    """What is known of a file before its pixels are read."""

    slices: int
    patient: str
    colour: bool


def is_medical(path: Path) -> bool:
    """Whether a file is DICOM or NIfTI and not hidden: NIfTI by its ending, DICOM by its ending or its content.

    A file with the ending of another image is not opened.
    """
    name = path.name.lower()
    if name.startswith("."):
        return False
    if name.endswith(DICOM + NIFTI):
        return True
    return not is_image(name) and begins_as_dicom(ImageFile(name, "", lambda: path.open("rb")))


def can_read(path: Path) -> bool:
    """Whether the package that reads such files is installed."""
    return find_spec("nibabel" if path.name.lower().endswith(NIFTI) else "pydicom") is not None


def slices_of(path: Path, which: Which = "all", window: Window | None = None, patient: Patient = "id") -> list[Slice]:
    """The slices of a file. Only its header is read; pixels are read when a slice is opened.

    Grey values become 0 to 255 within ``window``. Without one it is the window or table that a DICOM file names for the
    frame, else the range of the file's finite values. NIfTI volumes are turned so that slices are axial, with the front
    of the body above.

    Args:
        window: centre and width, in the file's units (for CT Hounsfield units).
        patient: what stands for the patient in DICOM files: the patient's ID, the study, the series or the file.

    Returns:
        The slices; none for a DICOM file without pixels, such as a report.

    Raises:
        UserError: pydicom or nibabel is not installed, or the file is damaged or of a kind that is not read.
    """
    header = _nifti_header(path) if path.name.lower().endswith(NIFTI) else _dicom_header(path, patient)
    if header is None:
        return []
    changed = path.stat()
    stamp = f"{changed.st_size} {changed.st_mtime_ns} {_FORMAT} {window}"
    chosen = range(header.slices) if which == "all" else [header.slices // 2]

    def opener(number: int) -> Callable[[], IO[bytes]]:
        return lambda: _png(_pixels(path, changed.st_mtime_ns, window)[number])

    return [
        Slice(
            ImageFile(str(path) if header.slices == 1 else f"{path}[{number}]", f"{stamp} {number}", opener(number)),
            header.patient,
            header.colour,
        )
        for number in chosen
    ]


def _png(pixels: Grey) -> IO[bytes]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    file.seek(0)
    return file


@lru_cache(maxsize=2)
def _pixels(path: Path, _changed: int, window: Window | None) -> Grey:
    """All slices (n, h, w) or (n, h, w, 3). The last files are kept, since their slices are opened one by one."""
    return _nifti(path, window) if path.name.lower().endswith(NIFTI) else _dicom(path, window)


def _check_deflated(path: Path) -> None:
    """Refuse a deflated file that expands to more than fits: pydicom expands it before it reads the header.

    Files of any other kind are told apart by a few bytes.
    """
    from pydicom.filereader import read_file_meta_info
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    with path.open("rb") as stream:
        if DeflatedExplicitVRLittleEndian.encode() not in stream.read(1024):
            return
    group = read_file_meta_info(path)
    if group.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
        # 128 bytes, DICM, and an element of 12 bytes that says how long the others of its group are.
        sizes.check_deflated(path, 128 + 4 + 12 + int(group.FileMetaInformationGroupLength))


def _read_error(path: Path, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    if isinstance(error, MemoryError):
        return sizes.no_memory(path)
    return UserError(
        f"image {path} cannot be read ({_one_line(f'{type(error).__name__}: {error}')}): replace or remove it"
    )


def _one_line(text: object) -> str:
    """What a file or a package says, fit for a message."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(text)).split())[:200]


# NIfTI


def _nifti_header(path: Path) -> _Header:
    _, shape, orientation = _volume(path)
    slices = next(size for size, (axis, _) in zip(shape, orientation, strict=True) if axis == 2)
    return _Header(slices, str(path), _nifti_colour(path))


def _nifti_colour(path: Path) -> bool:
    return _volume(path)[0].get_data_dtype().names is not None


def _volume(path: Path) -> tuple[Any, tuple[int, ...], Values]:
    """A NIfTI file whose values are not read yet, its three sizes as stored, and how its axes are turned.

    Trailing axes of length one are dropped, and a single plane is a volume of one slice.
    """
    nibabel = import_extra("nibabel", extra="medical", what=f"{path.name}, a NIfTI file,")
    try:
        image = nibabel.load(path)
        shape = tuple(int(size) for size in image.shape)
        sizes.check_volume(path, shape)
        kind = image.get_data_dtype()
        orientation = nibabel.io_orientation(image.affine)
    except Exception as error:
        raise _read_error(path, error) from error
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    stored, shape = len(shape), shape + (1,) * (3 - len(shape))
    if stored > 3:
        stated = "×".join(map(str, shape))
        raise UserError(f"{path} has {stated} values: split its volumes into files of three axes each")
    if 0 in shape:
        raise UserError(f"{path} is empty (shape {shape}): replace or remove it")
    if kind.kind == "c" or (kind.names is not None and kind.names[:3] != ("R", "G", "B")):
        raise UserError(f"{path} holds values of type {kind}, which are no image: save real numbers or RGB24")
    if not np.isfinite(orientation).all():
        raise UserError(f"{path} has an affine that does not say how its axes lie: mend its sform or qform")
    if stored < 3 and orientation[2][0] != 2:
        raise UserError(f"{path} is a single plane that is not axial: save it as PNG, or as a volume of three axes")
    return image, shape, orientation


def nifti_volume(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """The values of a NIfTI file with three axes as stored, and its affine to (right, front, head) in millimetres.

    UserError if it is damaged, in colour, or no volume.
    """
    image, shape, _ = _volume(path)
    if _nifti_colour(path):
        raise UserError(f"{path} is in colour, and volumes are of one channel: save it in grey")
    try:
        return np.asarray(image.dataobj, dtype=np.float32).reshape(shape), np.asarray(image.affine, dtype=np.float64)
    except Exception as error:
        raise _read_error(path, error) from error


def _nifti(path: Path, window: Window | None) -> Grey:
    nibabel = import_extra("nibabel", extra="medical", what=f"{path.name}, a NIfTI file,")
    image, shape, orientation = _volume(path)
    try:
        volume = nibabel.apply_orientation(np.asarray(image.dataobj).reshape(shape), orientation)
        # From (right, front, head) to slices of rows from the front and columns from the right.
        slices = np.flip(volume.transpose(2, 1, 0), (1, 2))
        if slices.dtype.names is not None:
            return np.stack([slices[channel] for channel in "RGB"], axis=-1)
        low, high = finite_range(slices) if window is None else limits(window)
        return np.stack([scale_to_grey(plane, low, high) for plane in slices])
    except Exception as error:
        raise _read_error(path, error) from error


# DICOM


def _dicom_header(path: Path, patient: Patient) -> _Header | None:
    """What a DICOM file says before its pixels; None if it holds none."""
    pydicom = import_extra("pydicom", extra="medical", what=f"{path.name}, a DICOM file,")
    try:
        _check_deflated(path)
        header = pydicom.dcmread(path, stop_before_pixels=True)
        if "Rows" not in header:
            return None
        sizes.check_dicom(path, header)
        _check_supported(path, header)
        frames = int(header.get("NumberOfFrames") or 1)
        if frames < 1:
            raise ValueError(f"{frames} frames")
        return _Header(
            frames,
            patient_of(path, header, patient),
            int(header.get("SamplesPerPixel") or 1) == 3 or header.get("PhotometricInterpretation") == "PALETTE COLOR",
        )
    except Exception as error:
        raise _read_error(path, error) from error


def grey_header(path: Path) -> Any:
    """pydicom's data set of a DICOM file of one grey slice, without its pixels; None if it holds no image.

    UserError if the file is damaged, of a kind that is not read, in colour, or of several frames.
    """
    pydicom = import_extra("pydicom", extra="medical", what=f"{path.name}, a DICOM file,")
    if (known := _dicom_header(path, "file")) is None:
        return None
    header = pydicom.dcmread(path, stop_before_pixels=True)
    if known.colour or header.PhotometricInterpretation != "MONOCHROME2" or known.slices > 1:
        kind = f"{known.slices} frames" if known.slices > 1 else _one_line(header.PhotometricInterpretation)
        raise UserError(f"image {path} has {kind}, and a slice of a volume is one of MONOCHROME2: save it as NIfTI")
    return header


def grey_values(path: Path) -> npt.NDArray[np.float32]:
    """The values (rows, columns) of such a file in the units of its modality; NaN where it is padded.

    UserError if the file is damaged.
    """
    stored, whole = _decode(path)
    values = _modality(stored[0], whole, 0).astype(np.float32)
    values[_padding(stored, whole)[0]] = np.nan
    return values


def patient_of(path: Path, header: Any, patient: Patient) -> str:
    """What slices of one patient have in common, by a file's header."""
    fields: dict[Patient, tuple[str, ...]] = {
        "id": ("PatientID", "SeriesInstanceUID"),
        "study": ("StudyInstanceUID",),
        "series": ("SeriesInstanceUID",),
        "file": (),
    }
    texts = (str(header.get(field) or "").strip() for field in fields[patient])
    return next((text for text in texts if text), str(path))


def _check_supported(path: Path, header: Any) -> None:
    """Raise UserError for a DICOM file whose pixels cannot be read as they are meant."""
    from pydicom.pixels.decoders.base import get_decoder

    kind, samples = _one_line(header.get("PhotometricInterpretation")), int(header.get("SamplesPerPixel") or 1)
    syntax = header.file_meta.TransferSyntaxUID
    name = _one_line(syntax.name)
    if kind not in _PHOTOMETRIC or samples != (1 if kind.startswith(("MONO", "PALETTE")) else 3):
        raise UserError(f"image {path} is stored as {kind} with {samples} samples a pixel: convert it to grey or RGB")
    if kind in ("YBR_FULL", "YBR_FULL_422") and int(header.BitsAllocated) > 8:
        raise UserError(f"image {path} is stored as {kind} with more than 8 bits: convert it to RGB")
    if _has_shifted_bits(header):
        raise UserError(f"image {path} has its bits elsewhere than at the lower end (0028,0102): convert it")
    if header.get("PresentationLUTSequence"):
        raise UserError(f"image {path} has a table for its presentation (2050,0010): convert it without it")
    if header.get("PixelPresentation") in ("COLOR", "MIXED") and "RedPaletteColorLookupTableDescriptor" in header:
        raise UserError(f"image {path} lays colours over grey (a supplemental palette): convert it to grey or RGB")
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise UserError(f"image {path} is stored as {name}, which is not read: convert it") from None
    if not decoder.is_available:
        packages = _packages(decoder)
        if not packages:
            raise UserError(f"image {path} is stored as {name}, which is not read: convert it")
        raise NotYetReadable(f"image {path} is stored as {name}, which needs other packages: {packages}")


def _has_shifted_bits(header: Any) -> bool:
    """Whether stored values begin above the lowest bit, as the standard allowed until 2014 and decoders do not read."""
    high, stored = header.get("HighBit"), header.get("BitsStored")
    return high is not None and stored is not None and int(high) != int(stored) - 1


def _packages(decoder: Any) -> str:
    """How to install what reads a transfer syntax: pylibjpeg where it can, else the first package; empty if none."""
    choices = [re.findall(r"([A-Za-z][\w-]*)>=", text) for text in decoder.missing_dependencies]
    names = next((some for some in choices if "pylibjpeg" in some), choices[0] if choices else [])
    return f"pip install {' '.join(names)}" if names else ""


def _decode(path: Path) -> tuple[Values, Any]:
    """The stored values (frames, h, w) of a grey file, and its data set."""
    pydicom = import_extra("pydicom", extra="medical", what=f"{path.name}, a DICOM file,")
    from pydicom.pixels.decoders.base import get_decoder

    try:
        _check_deflated(path)
        whole = pydicom.dcmread(path)
        sizes.check_dicom(path, whole)
        values, _ = get_decoder(whole.file_meta.TransferSyntaxUID).as_array(whole)
        return values.reshape(-1, *values.shape[-2:]), whole
    except Exception as error:
        raise _read_error(path, error) from error


def _dicom(path: Path, window: Window | None) -> Grey:
    pydicom = import_extra("pydicom", extra="medical", what=f"{path.name}, a DICOM file,")
    from pydicom.pixels.decoders.base import get_decoder

    try:
        _check_deflated(path)
        whole = pydicom.dcmread(path)
        sizes.check_dicom(path, whole)
        decoder = get_decoder(whole.file_meta.TransferSyntaxUID)
        try:
            # As RGB where the file has colour: pydicom 3 converts YBR itself, and so do decoders of JPEG 2000.
            values, described = decoder.as_array(whole)
        except (RuntimeError, NotImplementedError) as error:
            reason = _one_line(str(error).rpartition("plugins:")[2])
            packages = _packages(decoder)
            raise UserError(
                f"image {path} is not decoded as {whole.file_meta.TransferSyntaxUID.name} ({reason}): replace or "
                f"remove it{', or try ' + packages if packages else ''}"
            ) from error
        frames = int(whole.get("NumberOfFrames") or 1)
        if int(whole.get("SamplesPerPixel") or 1) == 3:
            return _colours(values, described, whole, path).reshape(frames, *values.shape[-3:])
        values = values.reshape(frames, *values.shape[-2:])
        if whole.PhotometricInterpretation == "PALETTE COLOR":
            return _through_palette(values, whole, path)
        return _greys(values, whole, window)
    except Exception as error:
        raise _read_error(path, error) from error


def _colours(values: Values, described: Any, whole: Any, path: Path) -> Grey:
    """RGB of 8 bits; more bits are scaled by how many the file says are stored."""
    bits = int(whole.BitsStored)
    if described["photometric_interpretation"] != "RGB":
        raise UserError(f"image {path} is stored as {whole.PhotometricInterpretation} without JPEG: convert it to RGB")
    return np.asarray(values, dtype=np.uint8) if bits == 8 else scale_to_grey(values, 0, 2**bits - 1)


def _through_palette(values: Values, whole: Any, path: Path) -> Grey:
    """Indices (n, h, w) as the colours of the file's palette (PS3.3 C.7.6.3.1.5 and C.7.6.3.1.6)."""
    if "RedPaletteColorLookupTableData" in whole:
        tables = [
            _table(whole[f"{name}PaletteColorLookupTableDescriptor"].value, data.value, whole)
            for name in _RGB
            for data in [whole[f"{name}PaletteColorLookupTableData"]]
        ]
        first = [_first_index(whole[f"{name}PaletteColorLookupTableDescriptor"].value, values) for name in _RGB]
        out = np.stack([_looked_up(values, *pair) for pair in zip(tables, first, strict=True)], axis=-1)
        bits = 8 if max(int(table.max()) for table in tables) < 256 else 16
    else:
        from pydicom.pixels.processing import apply_color_lut

        bits = int(whole.RedPaletteColorLookupTableDescriptor[2])
        if bits == 8 and (int(whole.RedPaletteColorLookupTableDescriptor[0]) or 1 << 16) > 256:
            raise UserError(f"image {path} has a segmented palette of 8 bits with over 256 colours: convert it to RGB")
        out = apply_color_lut(values, whole)[..., :3]
    return np.asarray(out >> (bits - 8), dtype=np.uint8)


_RGB = ("Red", "Green", "Blue")


def _greys(stored: Values, whole: Any, window: Window | None) -> Grey:
    """Stored values (n, h, w) of a grey file as they are to be shown.

    Padding is black and does not count for the range (PS3.3 C.7.5.1.1.2).
    """
    padding = _padding(stored, whole)
    views = [None if window is not None else _view(whole, number) for number in range(len(stored))]
    frames = [_modality(frame, whole, number) for number, frame in enumerate(stored)]
    low, high = limits(window) if window is not None else (0.0, 0.0)
    if window is None and None in views:
        ranges = [finite_range(frame[~hidden]) for frame, hidden in zip(frames, padding, strict=True)]
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    grey = np.stack(
        [
            scale_to_grey(frame, low, high) if view is None else view(frame)
            for frame, view in zip(frames, views, strict=True)
        ]
    )
    # A file that says INVERSE says with it that it is MONOCHROME1 (PS3.3 C.8.11.3): it is turned over once.
    if whole.PhotometricInterpretation == "MONOCHROME1" or whole.get("PresentationLUTShape") == "INVERSE":
        grey = 255 - grey
    grey[padding] = 0
    return grey


def _padding(stored: Values, whole: Any) -> npt.NDArray[np.bool_]:
    """Which pixels hold no measurement: those of the padding value, or between it and its limit."""
    first = whole.get("PixelPaddingValue")
    if first is None or stored.dtype.kind not in "iu":
        return np.zeros(stored.shape, dtype=np.bool_)
    last = whole.get("PixelPaddingRangeLimit")
    ends = [_as_stored(int(end), stored) for end in (first, first if last is None else last)]
    inside: npt.NDArray[np.bool_] = (stored >= min(ends)) & (stored <= max(ends))
    return inside


def _as_stored(value: int, stored: Values) -> int:
    """A value of a header with the sign of the pixels: writers give -2000 as 63536, and the other way round."""
    span = 1 << (8 * stored.dtype.itemsize)
    signed = stored.dtype.kind == "i"
    if signed and value >= span // 2:
        return value - span
    return value + span if not signed and value < 0 else value


def _of_frame(whole: Any, number: int, group: str) -> Any:
    """Where a frame's fields of one kind stand: in its own functional group, in the shared one, else in the file."""
    per_frame, shared = whole.get("PerFrameFunctionalGroupsSequence"), whole.get("SharedFunctionalGroupsSequence")
    for item in ([per_frame[number]] if per_frame else []) + ([shared[0]] if shared else []):
        if item.get(group):
            return item[group].value[0]
    return whole


def _modality(frame: Values, whole: Any, number: int) -> Values:
    """Stored values in the units of the modality, such as Hounsfield units (PS3.3 C.11.1)."""
    fields = _of_frame(whole, number, "PixelValueTransformationSequence")
    if fields.get("ModalityLUTSequence"):
        item = fields.ModalityLUTSequence[0]
        table = _table(item.LUTDescriptor, item.LUTData, whole)
        return _looked_up(frame, table, _first_index(item.LUTDescriptor, frame))
    slope, intercept = _number(fields.get("RescaleSlope")), _number(fields.get("RescaleIntercept"))
    slope, intercept = 1.0 if slope is None else slope, 0.0 if intercept is None else intercept
    if slope == 0 or not np.isfinite([slope, intercept]).all():
        raise ValueError(f"Rescale Slope {slope:g}, Rescale Intercept {intercept:g}")
    return frame if (slope, intercept) == (1.0, 0.0) else frame.astype(np.float64) * slope + intercept


def _view(whole: Any, number: int) -> Callable[[Values], Grey] | None:
    """How a file shows a frame's values of interest: by a table, or by a window; the first of several. None: neither.

    A width of 0 or less is no window. LINEAR (PS3.3 C.11.2.1.2) does not allow a width below 1, which floating-point
    data have nevertheless: then its ends are those of LINEAR_EXACT.
    """
    fields = _of_frame(whole, number, "FrameVOILUTSequence")
    if fields.get("VOILUTSequence"):
        return _table_view(fields.VOILUTSequence[0], whole)
    centre, width = _number(fields.get("WindowCenter")), _number(fields.get("WindowWidth"))
    if centre is None or width is None or not np.isfinite(centre) or not 0 < width < np.inf:
        return None
    function = str(fields.get("VOILUTFunction") or "LINEAR").upper()
    if function == "SIGMOID":
        return lambda frame: to_grey(1 / (1 + np.exp((-4 * (frame - centre) / width).clip(-700, 700))), frame)
    if function not in ("LINEAR", "LINEAR_EXACT"):
        raise ValueError(f"VOI LUT Function {function}")
    exact = function == "LINEAR_EXACT" or width < 1
    low, high = limits((centre, width) if exact else (centre - 0.5, width - 1))
    return lambda frame: scale_to_grey(frame, low, high)


def _table_view(item: Any, whole: Any) -> Callable[[Values], Grey]:
    """A table of values of interest, whose entries are scaled by their bits (PS3.3 C.11.2.1.1).

    Some writers declare 16 bits for entries of 12 or 8: where the largest needs four bits less, its own bits count.
    """
    table, bits = _table(item.LUTDescriptor, item.LUTData, whole), int(item.LUTDescriptor[2])
    needed_bits = int(table.max()).bit_length()
    white = 2 ** (needed_bits if 0 < needed_bits <= bits - 4 else bits) - 1
    return lambda frame: scale_to_grey(
        _looked_up(np.rint(frame), table, _first_index(item.LUTDescriptor, frame)), 0, white
    )


def _table(descriptor: Any, data: Any, whole: Any) -> Values:
    """The entries of a lookup table, as numbers or as bytes of one or two an entry."""
    entries = int(descriptor[0]) or 1 << 16
    order = "<" if whole.original_encoding[1] is not False else ">"
    if not isinstance(data, bytes):
        data = np.atleast_1d(np.asarray(data, dtype=np.int64) & 0xFFFF).astype(f"{order}u2").tobytes()
    table = np.frombuffer(data, dtype=np.uint8)
    if len(data) >= 2 * entries:
        table = np.frombuffer(data[: 2 * entries], dtype=f"{order}u2")
    if len(table) < entries:
        raise ValueError(f"a lookup table has {len(table)} of {entries} entries")
    return table[:entries].astype(np.uint16)


def _first_index(descriptor: Any, values: Values) -> int:
    """The value of a table's first entry. Writers may give a negative one without its sign."""
    first = int(descriptor[1])
    return first - (1 << 16) if first >= 1 << 15 and values.min() < 0 else first


def _looked_up(values: Values, table: Values, first: int) -> Values:
    """Entries of a table; values outside of it get the first or the last one."""
    result: Values = table[(values.astype(np.int64) - first).clip(0, len(table) - 1)]
    return result


def _number(value: Any) -> float | None:
    """A number of a header, the first one if there are several; None if it is absent or empty."""
    if value is None or value == "":
        return None
    try:
        return float(value)
    except TypeError:
        return float(value[0]) if len(value) else None
