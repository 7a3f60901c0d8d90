"""Volumes from NIfTI and DICOM: the axes of MONAI's own readers, slices by position, and mistakes in one line."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedshift import encryption
from fedshift.data.builders.volume_folder import VolumeFolder, read_volume, series_of
from fedshift.errors import UserError

pydicom = pytest.importorskip("pydicom")
nibabel = pytest.importorskip("nibabel")
from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402

PLANES = {"axial": (1, 0, 0, 0, 1, 0), "coronal": (1, 0, 0, 0, 0, -1), "sagittal": (0, 1, 0, 0, 0, -1)}


def write_slice(path: Path, values: npt.NDArray[Any], corner: Any, plane: Any = PLANES["axial"], **fields: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = pydicom.uid.CTImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = pydicom.uid.generate_uid()
    made.SeriesInstanceUID, made.PatientID = "1.2.3", "p1"
    made.Rows, made.Columns = values.shape
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.PixelRepresentation, made.BitsAllocated, made.BitsStored, made.HighBit = 1, 16, 16, 15
    made.RescaleSlope, made.RescaleIntercept = 2, -100
    made.ImageOrientationPatient, made.ImagePositionPatient = list(plane), [float(part) for part in corner]
    made.PixelSpacing = [0.5, 0.8]
    made.PixelData = values.astype(np.int16).tobytes()
    for name, value in fields.items():
        setattr(made, name, value)
    made.save_as(path, enforce_file_format=True)
    return path


def write_series(folder: Path, values: npt.NDArray[Any], plane: str = "axial", gap: float = 2.5, **fields: Any) -> Path:
    """A series whose files are named in another order than that of their positions."""
    along, down = np.array(PLANES[plane][:3], float), np.array(PLANES[plane][3:], float)
    names = np.random.default_rng(0).permutation(len(values))
    for number, one in enumerate(values):
        corner = np.array([-10.0, -20.0, 30.0]) + number * gap * np.cross(along, down)
        place = folder / f"{names[number]}.dcm"
        write_slice(place, one, corner, PLANES[plane], InstanceNumber=number + 1, **fields)  # by which MONAI sorts
    return folder


def read(place: Path) -> Any:
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    (series,) = series_of(str(place), files)
    return read_volume(series)


def of_monai(place: Path, reader: str) -> tuple[npt.NDArray[Any], list[float]]:
    """(z, y, x) by MONAI's reader and its transform to DICOM's axes, and the spacing."""
    transforms = pytest.importorskip("monai.transforms")
    image = transforms.LoadImage(reader=reader, image_only=True, ensure_channel_first=True)(str(place))
    image = transforms.Orientation(axcodes="LPS", labels=None)(image)
    return image[0].numpy().transpose(2, 1, 0), [float(side) for side in image.pixdim.flip(0)]


@pytest.mark.slow  # the import of MONAI takes seconds
@pytest.mark.parametrize("plane", PLANES)
def test_a_series_is_the_volume_of_monai(plane: str, tmp_path: Path) -> None:
    """Stored shuffled, in any plane; values are rescaled."""
    values = np.random.default_rng(1).integers(-50, 500, (5, 6, 7))
    found = read(write_series(tmp_path / "a", values, plane))
    wanted, spacing = of_monai(tmp_path / "a", "PydicomReader")
    assert np.array_equal(found.values, wanted)
    assert found.spacing == pytest.approx(spacing)
    assert sorted(found.values.ravel()) == sorted((2 * values - 100).ravel())
    assert found.affine[:3] @ [0, 0, 0, 1] == pytest.approx(found.affine[:3, 3])


def test_the_axes_are_head_back_and_left(tmp_path: Path) -> None:
    """By hand: axial slices from the head down, and the same volume as NIfTI with reversed axes."""
    values = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    found = read(write_series(tmp_path / "a", values, gap=2.5))
    assert np.array_equal(found.values, 2 * values - 100)  # z up, rows to the back, columns to the left: as stored
    assert found.spacing == (2.5, 0.5, 0.8)
    ras = np.flip(2 * values - 100, (1, 2)).transpose(2, 1, 0)  # x to the right, y to the front, z to the head
    nibabel.save(nibabel.Nifti1Image(ras.astype(np.float32), np.diag([0.8, 0.5, 2.5, 1])), tmp_path / "a.nii.gz")
    assert np.array_equal(read(tmp_path / "a.nii.gz").values, found.values)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("signs", [(1, 1, 1), (-1, 1, -1)])
def test_nifti_is_the_volume_of_monai(axes: tuple[int, ...], signs: tuple[int, ...], tmp_path: Path) -> None:
    affine = np.zeros((4, 4))
    for column, (axis, sign) in enumerate(zip(axes, signs, strict=True)):
        affine[axis, column] = sign * (1.5, 2.0, 3.0)[column]
    affine[:, 3] = (5, -6, 7, 1)
    values = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(values, affine), tmp_path / "a.nii")
    found = read(tmp_path / "a.nii")
    wanted, spacing = of_monai(tmp_path / "a.nii", "NibabelReader")
    assert np.array_equal(found.values, wanted)
    assert found.spacing == pytest.approx(spacing)
    lps = np.diag([-1, -1, 1, 1]) @ affine
    index = np.array([int(part[0]) for part in np.nonzero(found.values == values[1, 2, 3])])
    assert found.affine @ [*index, 1] == pytest.approx(lps @ [1, 2, 3, 1])


REAL = Path(pydicom.__file__).parent / "data" / "test_files" / "dicomdirtests"


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="pydicom comes without these files")
def test_files_of_real_scanners() -> None:
    """pydicom's own: a CT that is whole, as MONAI reads it; one that misses slices, and one with its localizer."""
    whole = REAL / "98892001" / "CT5N"
    found = read(whole)
    wanted, spacing = of_monai(whole, "PydicomReader")
    assert np.array_equal(found.values, wanted)
    assert found.spacing == pytest.approx(spacing)
    assert spacing == pytest.approx([2.5, 0.488281, 0.488281])
    with pytest.raises(UserError, match=r"missing or uneven: 202\.5 mm .* elsewhere 1\.25 mm"):
        read(REAL / "77654033" / "CT2")
    with pytest.raises(UserError, match="several orientations"):
        read(REAL / "98892001" / "CT2N")


@pytest.mark.case("DICOM series", "a missing slice, mixed orientations, two slices at one position, tilted gantries")
def test_series_that_are_no_volume_are_refused_in_one_line(tmp_path: Path) -> None:
    values = np.zeros((6, 4, 4))
    whole = write_series(tmp_path / "whole", values)

    def broken(name: str, change: Any) -> Path:
        shutil.copytree(whole, tmp_path / name)
        change(tmp_path / name)
        return tmp_path / name

    def middle(folder: Path) -> Path:
        heights = {float(pydicom.dcmread(file).ImagePositionPatient[2]): file for file in folder.iterdir()}
        return heights[sorted(heights)[2]]

    at = [-10.0, -20.0, 100.0]

    def more(name: str, rows: int = 4, plane: str = "axial", **fields: Any) -> Path:
        return broken(name, lambda folder: write_slice(folder / "x.dcm", values[0, :rows], at, PLANES[plane], **fields))

    for place, message in (
        (broken("gap", lambda folder: middle(folder).unlink()), r"missing or uneven: 5 mm from .* elsewhere 2\.5 mm"),
        (broken("twice", lambda folder: shutil.copy(middle(folder), folder / "copy.dcm")), "two slices lie at one pos"),
        (more("mixed", plane="coronal"), "several orientations"),
        (more("size", rows=3), "differ in size or PixelSpacing"),
        (more("bare", PixelSpacing=None), "does not say where it lies"),
        (more("skew", ImageOrientationPatient=[1, 0, 0, 1, 0, 0]), "no pair of directions"),
        (more("inverse", PhotometricInterpretation="MONOCHROME1"), "MONOCHROME1"),
    ):
        with pytest.raises(UserError, match=message) as error:
            read(place)
        assert "\n" not in str(error.value)
    tilted = tmp_path / "tilted"
    for number in range(4):
        write_slice(tilted / f"{number}.dcm", values[0], [0, number * 1.0, number * 2.5])
    with pytest.raises(UserError, match="tilted gantry"):
        read(tilted)
    one = write_slice(tmp_path / "one" / "a.dcm", values[0], at)
    with pytest.raises(UserError, match="a series of one slice"):
        read(one.parent)


def nifti(path: Path, values: npt.NDArray[Any], spacing: float = 1.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), np.diag([spacing] * 3 + [1])), path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def with_masks(root: Path) -> Path:
    draws = np.random.default_rng(0)
    for site, name in itertools.product(("north", "south"), ("a", "b")):
        values = draws.integers(0, 1000, (8, 8, 8))
        nifti(root / site / "images" / f"{name}.nii.gz", values)
        nifti(root / site / "masks" / "lesion" / f"{name}.nii", values > 500)
    return root


@pytest.mark.usefixtures("cache")
def test_volumes_with_masks(tmp_path: Path) -> None:
    data = VolumeFolder(root=with_masks(tmp_path / "scans"), size=(8, 8, 8), window=(500, 1000)).build()
    assert (data.task, data.classes, data.input_shape) == ("segmentation", ("lesion",), (1, 8, 8, 8))
    for domain in data.domains.values():
        grey = np.asarray(domain.inputs)[:, 0]
        assert np.array_equal(domain.masks[:, 0][grey > 129], np.ones((grey > 129).sum()))
        assert not domain.masks[:, 0][grey < 127].any()


@pytest.mark.usefixtures("cache")
def test_classes_and_patients(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for site, (label, name) in itertools.product(("a", "b"), itertools.product(("ill", "well"), ("x", "y"))):
        patient = f"{name}" if label == "ill" else "z"
        folder = tmp_path / "scans" / site / label / name
        write_series(folder, draws.integers(0, 100, (6, 6, 6)), SeriesInstanceUID=f"1.{name}", PatientID=patient)
    data = VolumeFolder(root=tmp_path / "scans", size=(4, 6, 8)).build()
    assert (data.task, data.classes, data.input_shape) == ("classification", ("ill", "well"), (1, 4, 6, 8))
    first, second = (domain.groups for domain in data.domains.values())
    assert len(set(first)) == 3  # both of those who are well are one patient
    assert not set(first) & set(second)
    kept = np.asarray(data.domains["a"].inputs)
    assert not kept[..., [0, -1]].any()  # two columns were added
    assert kept[..., 1:-1].any()


def test_spacing_is_common(tmp_path: Path, cache: Path) -> None:
    """A ball of radius 10 mm has 4/3·π·10³ mm³ whatever its voxels are."""
    for site, spacing in (("fine", 1.0), ("coarse", 2.0)):
        side = int(32 / spacing)
        axes = np.stack(np.meshgrid(*[(np.arange(side) + 0.5) * spacing - 16] * 3, indexing="ij"))
        ball = np.linalg.norm(axes, axis=0) <= 10
        nifti(tmp_path / "scans" / site / "images" / "a.nii", 100 * ball, spacing)
        nifti(tmp_path / "scans" / site / "masks" / "ball" / "a.nii", ball, spacing)
    data = VolumeFolder(root=tmp_path / "scans", size=(16, 16, 16), spacing=(2, 2, 2)).build()
    volume = 4 / 3 * np.pi * 10**3
    for domain in data.domains.values():
        assert 8 * domain.masks.sum() == pytest.approx(volume, rel=0.08)
        assert 8 * (np.asarray(domain.inputs) > 127).sum() == pytest.approx(volume, rel=0.12)


def test_the_cache_is_encrypted_where_a_key_is_set(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    source = VolumeFolder(root=with_masks(tmp_path / "scans"), size=(8, 8, 8))
    plain = source.build()
    (file, _) = sorted(cache.iterdir())
    bits = np.asarray(plain.domains["north"].masks).tobytes()
    assert any(bits[:64] in one.read_bytes() for one in cache.iterdir())
    monkeypatch.setenv(encryption.KEY, encryption.new_key())
    with pytest.warns(UserWarning, match="read again"):
        closed = source.build()
    assert all(one.read_bytes().startswith(encryption.MAGIC) for one in cache.iterdir())
    assert np.array_equal(closed.domains["north"].inputs, plain.domains["north"].inputs)
    assert np.array_equal(source.build().domains["north"].masks, plain.domains["north"].masks)
    assert {one.relative_to(tmp_path).parts[0] for one in tmp_path.rglob("*") if one.is_file()} == {"scans", "cache"}
    file.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="read again"):
        assert np.array_equal(source.build().domains["south"].inputs, plain.domains["south"].inputs)


@pytest.mark.usefixtures("cache")
def test_folders_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    def changed(name: str, change: Any) -> Path:
        change(with_masks(tmp_path / name))
        return tmp_path / name

    def other_grid(root: Path) -> None:
        nifti(root / "north" / "masks" / "lesion" / "a.nii", np.ones((8, 8, 8)), 2.0)

    for root, message in (
        (changed("lone", lambda root: (root / "north" / "masks" / "lesion" / "a.nii").unlink()), "has no mask"),
        (changed("more", lambda root: (root / "north" / "images" / "a.nii.gz").unlink()), "no volume of that name"),
        (changed("grid", other_grid), "another size or place"),
        (changed("some", lambda root: shutil.rmtree(root / "north" / "masks")), "site 'south' has masks, site 'north'"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        with pytest.raises(UserError, match=message) as error:
            VolumeFolder(root=root, size=(8, 8, 8)).build()
        assert "\n" not in str(error.value)


def test_a_flipped_bit_of_the_cache_is_no_other_volume(tmp_path: Path, cache: Path) -> None:
    source = VolumeFolder(root=with_masks(tmp_path / "scans"), size=(8, 8, 8))
    plain = source.build()
    file = min(cache.iterdir())
    written = bytearray(file.read_bytes())
    written[-1] ^= 1
    file.write_bytes(written)
    with pytest.warns(UserWarning, match="read again"):
        again = source.build()
    for site, domain in plain.domains.items():
        assert np.array_equal(domain.masks, again.domains[site].masks)
