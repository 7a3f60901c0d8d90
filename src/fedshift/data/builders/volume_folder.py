"""Your own volumes: NIfTI files and DICOM series in folders of classes, or with a mask of each structure."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, FiniteFloat, model_validator

from fedshift.data import sizes
from fedshift.data.builders.image_folder import LeftOut, Width, folders, root_hint, site_folders
from fedshift.data.builders.medical import (
    NIFTI,
    Patient,
    grey_header,
    grey_values,
    is_medical,
    nifti_volume,
    patient_of,
)
from fedshift.data.checks import agreed_classes, check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest, Preprocessing
from fedshift.data.images import finite_range, limits, scale_to_grey
from fedshift.data.locate import cache_dir
from fedshift.data.monai_bundle import Bundle, transform_volume, transforms_of, trusted_bundle
from fedshift.encryption import read_private, write_private
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


_LAYOUT = (
    "root/<site>/<class>/<volume>; for segmentation root/<site>/images/<volume> and root/<site>/masks/<structure>/"
    "<volume>; a volume is a NIfTI file or a folder of the DICOM files of a series"
)
_IMAGES, _MASKS = "images", "masks"
_FORMAT = "3"
"""Part of the name of a cache file: increase it whenever the voxels change."""
Side = Annotated[int, Field(ge=4, le=1024)]
Millimetres = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Voxels = npt.NDArray[np.uint8]


class VolumeFolder(DataSource):
    """One folder per site, with volumes of one size."""

    name: Literal["volume_folder"] = "volume_folder"
    root: Path = Field(description="the folder that holds one folder per site")
    size: tuple[Side, Side, Side] = Field(
        description="depth, height and width in voxels: the centre is kept, what is missing is black"
    )
    spacing: tuple[Millimetres, Millimetres, Millimetres] | None = Field(
        None,
        description="millimetres between voxels from feet to head, front to back and right to left; unset: as stored",
    )
    window: tuple[FiniteFloat, Width] | None = Field(
        None,
        description="centre and width of the values that become black to white, such as [40, 400]; unset: each "
        "volume's own range",
    )
    patch: tuple[Side, Side, Side] | None = Field(
        None,
        description="size of the parts that a network reads: random to train, side by side to measure and predict; "
        "unset: whole volumes",
    )
    bundle: Path | None = Field(
        None,
        description="folder of a bundle of MONAI, which is code: its transforms of image and label, but for random "
        "ones, prepare each volume and its masks in place of spacing and window; values from 0 to 1 stay, others are "
        "scaled by the volume's own range",
    )
    patient: Patient = Field(
        "id",
        description="what volumes of one patient have in common in DICOM files: the patient's ID, or the study, series "
        "or file, where an export gave one ID to all",
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.patch is not None and any(part > side for part, side in zip(self.patch, self.size, strict=True)):
            raise ValueError(f"patch: parts of {self.patch} do not fit into volumes of {self.size}")
        if self.bundle is not None and (self.spacing is not None or self.window is not None):
            raise ValueError("bundle: its transforms say spacing and window, so leave these out")
        return self

    @cached_property
    def _bundle(self) -> tuple[Bundle, list[Any]] | None:
        """The bundle and its transforms, if it may run."""
        if self.bundle is None:
            return None
        bundle = trusted_bundle(f"data.bundle '{self.bundle.name}'", self.bundle)
        return bundle, transforms_of(bundle)

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Your own folders of volumes",
            source="yours",
            licence="yours",
            how_to_get="collect volumes as described by the layout and give data.root and data.size",
            layout=_LAYOUT,
            notes="Axes: from feet to head, front to back, the patient's right to left. Read once into the cache "
            "folder (FEDSHIFT_CACHE), which is encrypted if a key is set; values scaled to [-1, 1].",
        )

    def build(self) -> DataSet:
        """Domains of uint8 volumes (n, 1, depth, height, width), with masks if there are any.

        UserError if a folder or a volume is missing or cannot be used; names it.
        """
        left_out, sites = LeftOut(), site_folders(self.root, _LAYOUT)
        left_out.note_misplaced(self.root)
        masked = {site.name: (site / _IMAGES).is_dir() and (site / _MASKS).is_dir() for site in sites}
        if len(set(masked.values())) > 1:
            plain, other = (next(site for site in masked if masked[site] is kind) for kind in (False, True))
            raise UserError(f"site '{other}' has masks, site '{plain}' has none: expected {_LAYOUT}")
        segments = all(masked.values())
        result = {
            site.name: self._with_masks(site, left_out) if segments else self._of_classes(site, left_out)
            for site in sites
        }
        what = "folders of masks" if segments else "class folders"
        classes = agreed_classes({site: names for site, (names, _) in result.items()}, what=what, allow_missing=False)
        groups = _groups({site: items for site, (_, items) in result.items()})
        domains = {
            site: replace(self._domain(site, items, classes, segments), groups=groups.get(site))
            for site, (_, items) in result.items()
        }
        preprocessing = Preprocessing(kind="features", mean=(0.5,), std=(0.5,), window=self.window, patch=self.patch)
        warned = tuple(left_out.warnings(self.root))
        return check_dataset(DataSet(self.name, domains, classes, preprocessing, self.manifest(), warned))

    def _of_classes(self, site: Path, left_out: LeftOut) -> tuple[list[str], list[_Item]]:
        left_out.note_misplaced(site)
        items = [
            _Item(series, label.name)
            for label in folders(site)
            for volume in _volumes_in(label, left_out, self.patient).values()
            for series in volume
        ]
        if not items:
            hint = root_hint(
                self.root,
                lambda root: any(
                    path.is_file() and is_medical(path) for folder in folders(root) for path in folder.rglob("*")
                ),
            )
            raise UserError(f"site '{site.name}' is empty: no volumes in {site}/<class>; {hint}expected {_LAYOUT}")
        return sorted({item.label for item in items}), items

    def _with_masks(self, site: Path, left_out: LeftOut) -> tuple[list[str], list[_Item]]:
        volumes = _volumes_in(site / _IMAGES, left_out, self.patient)
        structures = {folder.name: _volumes_in(folder, left_out, self.patient) for folder in folders(site / _MASKS)}
        if not volumes or not structures:
            raise UserError(f"site '{site.name}' is empty: expected {_LAYOUT}")
        items = []
        for name, series in volumes.items():
            masks = []
            for structure, held in structures.items():
                if name not in held:
                    raise UserError(
                        f"volume {site / _IMAGES / name} has no mask: expected {site / _MASKS / structure / name}"
                    )
                masks.append((structure, _only(held[name])))
            items.append(_Item(_only(series), "", tuple(masks)))
        lone = next(((kind, name) for kind, held in structures.items() for name in held if name not in volumes), None)
        if lone is not None:
            raise UserError(
                f"mask {site / _MASKS / lone[0] / lone[1]} has no volume of that name: add it or remove the mask"
            )
        return list(structures), items

    def _domain(self, site: str, items: Sequence[_Item], classes: tuple[str, ...], segments: bool) -> Domain:
        if segments:
            lacking = next((name for name in classes if name not in {kind for kind, _ in items[0].masks}), None)
            if lacking is not None:
                raise UserError(
                    f"site '{site}' has no masks of '{lacking}': expected {self.root / site / _MASKS / lacking}"
                )
        wanted = classes if segments else ()
        voxels = self._load_voxels(site, items, wanted)
        labels = [0 if segments else classes.index(item.label) for item in items]
        return Domain(
            site,
            voxels[:, :1],
            np.array(labels, dtype=np.int64),
            masks=np.ascontiguousarray(voxels[:, 1:]) if segments else None,
        )

    def _load_voxels(self, site: str, items: Sequence[_Item], structures: Sequence[str]) -> Voxels:
        """The volumes of a site and their masks, (n, 1 + structures, …), read now or found in the cache."""
        bundle = "" if self._bundle is None else f" {self._bundle[0].sha256}"
        digest = hashlib.sha256(f"{_FORMAT} {self.size} {self.spacing} {self.window}{bundle} {structures}\n".encode())
        for item in items:
            for path in item.files:
                known = path.stat()
                digest.update(f"{path}\t{known.st_size} {known.st_mtime_ns}\n".encode(errors="surrogatepass"))
        target = cache_dir() / f"volumes-{digest.hexdigest()[:24]}"
        shape = (len(items), 1 + len(structures), *self.size)
        if target.exists():
            try:
                return np.frombuffer(read_private(target), dtype=np.uint8).reshape(shape)
            except (UserError, OSError, ValueError):
                warnings.warn(
                    f"{target} was damaged, or written with another key: its volumes are read again", stacklevel=2
                )
        voxels = np.stack([self._voxels(item, structures) for item in items])
        write_private(target, voxels.tobytes())
        return voxels

    def _voxels(self, item: _Item, structures: Sequence[str]) -> Voxels:
        """A volume and its masks, (1 + structures, …)."""
        volume = read_volume(item.series)
        masks = [_mask(volume, item, structure) for structure in structures]
        if self._bundle is not None:
            return self._with_bundle(volume, masks, item.series.name)
        low, high = finite_range(volume.values) if self.window is None else limits(self.window)
        channels = [self._fit_grid(volume, scale_to_grey(volume.values, low, high), mask=False)]
        channels += [self._fit_grid(volume, mask, mask=True) for mask in masks]
        return np.stack(channels)

    def _with_bundle(self, volume: Volume, masks: Sequence[Voxels], name: str) -> Voxels:
        """A volume and its masks as the bundle's transforms leave them."""
        assert self._bundle is not None
        grey, *prepared = transform_volume(*self._bundle, volume.values, volume.affine, masks, name)
        low, high = finite_range(grey)
        whole = scale_to_grey(grey, 0, 1) if low >= 0 and high <= 1 else scale_to_grey(grey, low, high)
        return np.stack(
            [crop_to_centre(item, self.size) for item in (whole, *((mask > 0.5).astype(np.uint8) for mask in prepared))]
        )

    def _fit_grid(self, volume: Volume, voxels: Voxels, *, mask: bool) -> Voxels:
        """Voxels at the wanted spacing, of which the centre is kept."""
        if self.spacing is not None and not np.allclose(volume.spacing, self.spacing, rtol=1e-3):
            voxels = _resample(
                voxels, [had / wanted for had, wanted in zip(volume.spacing, self.spacing, strict=True)], mask
            )
        return crop_to_centre(voxels, self.size)


@dataclass(frozen=True)
class _Item:
    """A volume of a site with its class, or with its masks by structure."""

    series: Series
    label: str
    masks: tuple[tuple[str, Series], ...] = ()

    @property
    def files(self) -> list[Path]:
        return [path for series in (self.series, *(mask for _, mask in self.masks)) for path in series.files]


def _mask(volume: Volume, item: _Item, structure: str) -> Voxels:
    """The mask of a structure, 0 and 1."""
    series = dict(item.masks)[structure]
    mask = read_volume(series)
    if mask.values.shape != volume.values.shape or not np.allclose(mask.affine, volume.affine, atol=1e-2):
        raise UserError(f"mask {series.name} has another size or place than its volume {item.series.name}")
    inside: Voxels = (np.nan_to_num(mask.values) != 0).astype(np.uint8)
    return inside


def _groups(items: Mapping[str, Sequence[_Item]]) -> dict[str, npt.NDArray[np.int64]]:
    """Site → a number for the patient of each volume; empty if no two volumes are of one patient."""
    numbers: dict[tuple[str, str], int] = {}
    patients = {
        site: [numbers.setdefault((site, item.series.patient), len(numbers)) for item in some]
        for site, some in items.items()
    }
    if len(numbers) == sum(map(len, patients.values())):
        return {}
    return {site: np.array(some, dtype=np.int64) for site, some in patients.items()}


def _volumes_in(folder: Path, left_out: LeftOut, patient: Patient) -> dict[str, list[Series]]:
    """The series in a folder by the name of their file or folder, sorted. DICOM files beside folders are one entry."""
    result: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith((".", "__")):
            result[path.name] = sorted(file for file in path.rglob("*") if file.is_file() and is_medical(file))
        elif path.is_file() and is_medical(path):
            nifti = path.name.lower().endswith((".nii", ".nii.gz"))
            name = path.name.removesuffix(".gz").removesuffix(".nii") if nifti else "."
            result.setdefault(name, []).append(path)
        else:
            left_out.other(path)
    series = {name: series_of(str(folder / name), files, patient) for name, files in result.items()}
    return {name: some for name, some in series.items() if some}


def _only(series: Sequence[Series]) -> Series:
    if len(series) > 1:
        raise UserError(f"{series[0].name}: a folder with {len(series)} series: a volume with masks is one series")
    return series[0]


def _resample(voxels: Voxels, factors: Sequence[float], mask: bool) -> Voxels:
    """Voxels as many as the factors say along each axis; of masks the nearest."""
    import torch

    size = [max(1, round(side * factor)) for side, factor in zip(voxels.shape, factors, strict=True)]
    values = torch.from_numpy(voxels)[None, None].float()
    ways = {"mode": "nearest-exact"} if mask else {"mode": "trilinear", "align_corners": False}
    resized = torch.nn.functional.interpolate(values, size=size, **ways)
    rounded: Voxels = resized[0, 0].round().clamp(0, 255).to(torch.uint8).numpy()
    return rounded


def crop_to_centre(voxels: Voxels, size: Sequence[int]) -> Voxels:
    """The centre of a volume, with zeros around it where it is smaller.

    Example:
        >>> crop_to_centre(np.arange(1, 6, dtype=np.uint8).reshape(1, 1, 5), (1, 1, 3)).ravel().tolist()
        [2, 3, 4]
        >>> crop_to_centre(np.ones((1, 1, 2), dtype=np.uint8), (1, 1, 4)).ravel().tolist()
        [0, 1, 1, 0]
    """
    out = np.zeros(tuple(size), dtype=voxels.dtype)
    here, there = [], []
    for had, wanted in zip(voxels.shape, size, strict=True):
        kept = min(had, wanted)
        here.append(slice((had - kept) // 2, (had - kept) // 2 + kept))
        there.append(slice((wanted - kept) // 2, (wanted - kept) // 2 + kept))
    out[tuple(there)] = voxels[tuple(here)]
    return out
