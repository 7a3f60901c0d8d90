"""Volumes from NIfTI files and from DICOM series: three axes of the patient, in the order of arrays.

Whatever a scanner's order was, a volume is (z, y, x) in the axes of DICOM's patient coordinates (PS3.3 C.7.6.2.1.1):
z rises to the head, y to the back, x to the patient's left. Oblique volumes are turned to the nearest axes, which is no
resampling. The slices of a series are sorted by their position along the normal of their plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedshift.data import sizes
from fedshift.data.builders.medical import NIFTI, Patient, grey_header, grey_values, nifti_volume, patient_of
from fedshift.errors import UserError
from fedshift.extras import import_extra

Floats = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]
_SAME, _UNEVEN = 1e-3, 0.1
"""Largest difference of two directions that are one, and share of the usual distance by which slices may be uneven."""
_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""From the axes of NIfTI (right, front, head) to those of DICOM."""


@dataclass(frozen=True)
class Series:
    """What a volume is read from."""

    name: str  # for messages
    files: tuple[Path, ...]  # one NIfTI file, or the DICOM files of a series
    patient: str  # volumes of one patient have the same text


@dataclass(frozen=True)
class Volume:
    """A volume."""

    values: Floats  # (z, y, x), in the units of the file; NaN where nothing was measured
    spacing: tuple[float, float, float]  # millimetres between voxels along z, y and x
    affine: Vector  # (4, 4), from the indices z, y, x to the patient's coordinates in millimetres


def series_of(name: str, files: Sequence[Path], patient: Patient = "id") -> list[Series]:
    """The series among files: each NIfTI file is one, DICOM files by their series UID, in its order.

    UserError if a file is damaged or of a kind that is not read.
    """
    result = [Series(str(path), (path,), str(path)) for path in files if _is_nifti(path)]
    groups: dict[str, list[Path]] = {}
    patients: dict[str, str] = {}
    for path in (path for path in files if not _is_nifti(path)):
        header = grey_header(path)
        if header is None:
            continue
        series = str(header.get("SeriesInstanceUID") or "")
        groups.setdefault(series, []).append(path)
        patients.setdefault(series, patient_of(path, header, patient))
    several = len(groups) > 1
    for series in sorted(groups):
        whole = f"{name} (series {series})" if several else name
        result.append(Series(whole, tuple(groups[series]), patients[series]))
    return result


def _is_nifti(path: Path) -> bool:
    return path.name.lower().endswith(NIFTI)


def read_volume(series: Series) -> Volume:
    """Read a volume.

    Raises:
        UserError: a file is damaged; or slices differ in size or orientation, lie at one position, are missing or are
            shifted against one another.
    """
    if _is_nifti(series.files[0]):
        array, affine = nifti_volume(series.files[0])
        return _reorient(array, _LPS @ affine)
    return _from_slices(series)


def _reorient(array: npt.NDArray[Any], affine: Vector) -> Volume:
    """A volume whose array axes follow an affine to the patient's axes, in the common order."""
    nibabel = import_extra("nibabel", extra="medical", what="a volume")
    orientation = nibabel.io_orientation(affine)
    turned = nibabel.apply_orientation(array, orientation).transpose(2, 1, 0)
    placed = affine @ nibabel.orientations.inv_ornt_aff(orientation, array.shape)
    placed = placed[:, [2, 1, 0, 3]]
    spacing = np.linalg.norm(placed[:3, :3], axis=0)
    z, y, x = (float(side) for side in spacing)
    return Volume(np.ascontiguousarray(turned, dtype=np.float32), (z, y, x), placed)


# DICOM ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SlicePosition:
    """Where a slice lies: the directions of its columns' and rows' indices, its corner, its pixels' distances."""

    path: Path
    along: Vector
    down: Vector
    corner: Vector
    pixel: tuple[float, float]
    shape: tuple[int, int]


def _from_slices(series: Series) -> Volume:
    positions = [_slice_position(path) for path in series.files]
    first = positions[0]
    for other in positions[1:]:
        _check_alike(series, first, other)
    normal = np.cross(first.along, first.down)
    positions.sort(key=lambda position: float(position.corner @ normal))
    step = _step(series, positions, normal)
    sizes.check_volume(series.name, (len(positions), *first.shape))
    values = np.stack([grey_values(position.path) for position in positions])
    affine = np.eye(4)
    affine[:3, :3] = np.stack([step, first.down * first.pixel[0], first.along * first.pixel[1]], axis=1)
    affine[:3, 3] = positions[0].corner
    return _reorient(values, affine)


def _slice_position(path: Path) -> _SlicePosition:
    header = grey_header(path)
    assert header is not None  # `series_of` leaves out files without pixels
    directions, corner, pixel = (
        _numbers(header.get(name), length)
        for name, length in (("ImageOrientationPatient", 6), ("ImagePositionPatient", 3), ("PixelSpacing", 2))
    )
    if directions is None or corner is None or pixel is None or min(pixel) <= 0:
        raise UserError(
            f"image {path} does not say where it lies (ImageOrientationPatient, ImagePositionPatient, PixelSpacing): "
            "remove it, or save the volume as NIfTI"
        )
    along, down = directions[:3], directions[3:]
    if abs(float(along @ down)) > _SAME or not np.allclose([along @ along, down @ down], 1, atol=10 * _SAME):
        raise UserError(f"image {path} has an ImageOrientationPatient that is no pair of directions: mend or remove it")
    return _SlicePosition(path, along, down, corner, (pixel[0], pixel[1]), (int(header.Rows), int(header.Columns)))


def _numbers(value: Any, length: int) -> Vector | None:
    """The numbers of a header's element; None unless there are so many and all are finite."""
    try:
        numbers = np.array([float(part) for part in value or ()])
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == length and np.isfinite(numbers).all() else None


def _check_alike(series: Series, first: _SlicePosition, other: _SlicePosition) -> None:
    """Raise UserError unless two slices have one orientation, size and distance of pixels."""
    if not np.allclose([other.along, other.down], [first.along, first.down], atol=_SAME):
        raise UserError(
            f"{series.name}: slices have several orientations ({first.path.name} and {other.path.name}): keep those of "
            "one, without localizers"
        )
    if other.shape != first.shape or not np.allclose(other.pixel, first.pixel, rtol=_SAME):
        raise UserError(
            f"{series.name}: slices differ in size or PixelSpacing ({first.path.name} and {other.path.name}): keep "
            "those of one"
        )


def _step(series: Series, places: Sequence[_SlicePosition], normal: Vector) -> Vector:
    """From one slice to the next, in millimetres."""
    if len(places) < 2:
        raise UserError(f"{series.name}: a series of one slice is no volume: remove it, or use data set image_folder")
    heights = np.array([float(index.corner @ normal) for index in places])
    gaps = np.diff(heights)
    usual = float(np.median(gaps))
    if gaps.min() <= _SAME:
        twice = int(gaps.argmin())
        names = f"{places[twice].path.name} and {places[twice + 1].path.name}"
        raise UserError(f"{series.name}: two slices lie at one position ({names}): remove one of each pair")
    if gaps.max() > (1 + _UNEVEN) * usual or gaps.min() < (1 - _UNEVEN) * usual:
        worst = int(abs(gaps - usual).argmax())
        raise UserError(
            f"{series.name}: slices are missing or uneven: {gaps[worst]:.4g} mm from {places[worst].path.name} to "
            f"{places[worst + 1].path.name}, elsewhere {usual:.4g} mm; export the whole series"
        )
    step = (places[-1].corner - places[0].corner) / (len(places) - 1)
    if float(np.linalg.norm(step - (step @ normal) * normal)) > _UNEVEN * usual:
        raise UserError(f"{series.name}: slices are shifted against one another (a tilted gantry): save it as NIfTI")
    return step
