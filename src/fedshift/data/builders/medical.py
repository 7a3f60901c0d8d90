"""Slices of DICOM and NIfTI files as grey images, by pydicom and nibabel."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedshift.data.images import ImageFile
from fedshift.errors import UserError
from fedshift.extras import needed

DICOM, NIFTI = (".dcm", ".dicom"), (".nii", ".nii.gz")
Which = Literal["all", "middle"]
Window = tuple[float, float]
_FORMAT = "1"
"""Part of a slice's stamp: increase it whenever the pixels change."""


@dataclass(frozen=True)
class Slice:
    """One slice of a file.

    Attributes:
        image: the slice as an image of 8 bits.
        patient: slices of one patient have the same text; for NIfTI the volume stands for the patient.
        colour: whether it has three channels.
    """

    image: ImageFile
    patient: str
    colour: bool


def is_medical(name: str) -> bool:
    """Whether a file name has the ending of a DICOM or NIfTI file and is not hidden."""
    return name.lower().endswith(DICOM + NIFTI) and not Path(name).name.startswith(".")


def can_read(path: Path) -> bool:
    """Whether the package that reads such files is installed."""
    return find_spec("nibabel" if path.name.lower().endswith(NIFTI) else "pydicom") is not None


def slices_of(path: Path, which: Which = "all", window: Window | None = None) -> list[Slice]:
    """The slices of a file. Only its header is read; pixels are read when a slice is opened.

    Values become 0 to 255 within ``window``. Without one it is the window that a DICOM file names, else the range of
    the file's values. NIfTI volumes are turned so that slices are axial, with the front of the body above.

    Args:
        path: the file.
        which: all slices, or the middle one.
        window: centre and width, in the file's units (for CT Hounsfield units).

    Raises:
        UserError: pydicom or nibabel is not installed, or the file is damaged.
    """
    read = _nifti_header if path.name.lower().endswith(NIFTI) else _dicom_header
    count, patient, colour = read(path)
    found = path.stat()
    stamp = f"{found.st_size} {found.st_mtime_ns} {_FORMAT} {window}"
    chosen = range(count) if which == "all" else [count // 2]

    def opener(number: int) -> Callable[[], IO[bytes]]:
        return lambda: _png(_pixels(path, found.st_mtime_ns, window)[number])

    return [
        Slice(ImageFile(str(path) if count == 1 else f"{path}[{row}]", f"{stamp} {row}", opener(row)), patient, colour)
        for row in chosen
    ]


def _png(pixels: npt.NDArray[np.uint8]) -> IO[bytes]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    file.seek(0)
    return file


@lru_cache(maxsize=2)
def _pixels(path: Path, _changed: int, window: Window | None) -> npt.NDArray[np.uint8]:
    """All slices (n, h, w) or (n, h, w, 3). The last files are kept, since their slices are opened one by one."""
    return _nifti(path, window) if path.name.lower().endswith(NIFTI) else _dicom(path, window)


def _scaled(values: npt.NDArray[Any], window: Window | None) -> npt.NDArray[np.uint8]:
    values = np.nan_to_num(values.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if window is not None:
        low, high = window[0] - window[1] / 2, window[0] + window[1] / 2
    share = (values - low) / (high - low) if high > low else np.zeros_like(values)
    grey: npt.NDArray[np.uint8] = np.rint(share.clip(0, 1) * 255).astype(np.uint8)
    return grey


def _nifti_header(path: Path) -> tuple[int, str, bool]:
    nibabel = needed("nibabel", extra="medical", what=f"{path.name}, a NIfTI file,")
    try:
        shape = nibabel.as_closest_canonical(nibabel.load(path)).shape
    except Exception as error:
        raise _damaged(path, error) from error
    if len(shape) != 3:
        raise UserError(f"{path} has {len(shape)} axes: split it into volumes of three, one file each")
    return shape[2], str(path), False


def _nifti(path: Path, window: Window | None) -> npt.NDArray[np.uint8]:
    nibabel = needed("nibabel", extra="medical", what=f"{path.name}, a NIfTI file,")
    try:
        volume = np.asarray(nibabel.as_closest_canonical(nibabel.load(path)).dataobj)
        # From (right, front, head) to slices of rows from the front and columns from the right.
        return _scaled(np.flip(volume.transpose(2, 1, 0), (1, 2)), window)
    except Exception as error:
        raise _damaged(path, error) from error


def _dicom_header(path: Path) -> tuple[int, str, bool]:
    pydicom = needed("pydicom", extra="medical", what=f"{path.name}, a DICOM file,")
    try:
        header = pydicom.dcmread(path, stop_before_pixels=True)
        patient = str(header.get("PatientID") or header.get("SeriesInstanceUID") or path)
        return int(header.get("NumberOfFrames") or 1), patient, int(header.get("SamplesPerPixel") or 1) == 3
    except Exception as error:
        raise _damaged(path, error) from error


def _dicom(path: Path, window: Window | None) -> npt.NDArray[np.uint8]:
    pydicom = needed("pydicom", extra="medical", what=f"{path.name}, a DICOM file,")
    from pydicom.pixels.processing import apply_modality_lut, convert_color_space

    try:
        whole = pydicom.dcmread(path)
        values = whole.pixel_array
        frames = int(whole.get("NumberOfFrames") or 1)
        if int(whole.get("SamplesPerPixel") or 1) == 3:
            kind = str(whole.PhotometricInterpretation)
            colours = convert_color_space(values, kind, "RGB") if kind.startswith("YBR") else values
            return np.asarray(colours, dtype=np.uint8).reshape(frames, *values.shape[-3:])
        values = apply_modality_lut(values, whole).reshape(frames, *values.shape[-2:])
        centre, width = (_first(whole.get(name)) for name in ("WindowCenter", "WindowWidth"))
        if window is None and centre is not None and width is not None and width > 0:
            window = centre, width
        grey = _scaled(values, window)
        return 255 - grey if whole.get("PhotometricInterpretation") == "MONOCHROME1" else grey
    except Exception as error:
        raise _damaged(path, error) from error


def _first(value: Any) -> float | None:
    """A number of a header, the first one if there are several."""
    if value is None:
        return None
    try:
        return float(value)
    except TypeError:
        return float(value[0]) if len(value) else None


def _damaged(path: Path, error: Exception) -> UserError:
    said = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    return UserError(f"image {path} cannot be read ({said}): replace or remove it")
