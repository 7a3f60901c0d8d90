"""Data set `image_folder`, and how images are decoded and cached."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from pydantic import TypeAdapter, ValidationError

from fedshift.data.builders.image_folder import ImageFolder, _one_patient
from fedshift.data.builders.medical import slices_of
from fedshift.data.domain import DataSet, Domain, Preprocessing
from fedshift.data.images import FORMATS, SUFFIXES, decode, has_colour, on_disk, size_of
from fedshift.data.inference import load_for_prediction
from fedshift.errors import UserError
from fedshift.experiment.protocols.index import Protocol
from tried import case


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def picture(path: Path, colour: tuple[int, int, int] | int = (200, 10, 10), size: tuple[int, int] = (20, 20)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)
    return path


def collection(root: Path) -> Path:
    for site in ("north", "south"):
        for label, colour in (("cat", (250, 0, 0)), ("dog", (0, 250, 0))):
            for number in range(3):
                picture(root / site / label / f"{number}.png", colour)
    return root


def test_domains_classes_sizes_and_colours(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    (root / "north" / "cat" / ".DS_Store").write_text("x")
    (root / "north" / "cat" / "notes.txt").write_text("x")
    (root / "readme.md").write_text("x")
    (root / ".git" / "cat").mkdir(parents=True)
    data = ImageFolder(root=root, size=16).build()
    assert data.classes == ("cat", "dog")
    assert {name: len(domain) for name, domain in data.domains.items()} == {"north": 6, "south": 6}
    assert data.domains["north"].labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.input_shape == (3, 16, 16)
    inputs = data.domains["south"].inputs
    assert inputs[4, :, 5, 5].tolist() == [0, 250, 0]
    root = collection(tmp_path / "photos")
    picture(root / "south" / "dog" / "grey.png", 77, (50, 9))
    picture(root / "south" / "dog" / "large.jpg", (0, 0, 250), (300, 200))
    data = ImageFolder(root=root, size=12).build()
    assert data.input_shape == (3, 12, 12)
    inputs = data.domains["south"].inputs
    assert (inputs[6] == 77).all()
    grey = ImageFolder(root=root, size=12, colour=False).build()
    assert grey.input_shape == (1, 12, 12)
    assert grey.preprocessing.mean == (0.5,)
    for site in "ab":
        for label in ("0", "1", "10", "2"):
            picture(tmp_path / "g" / site / label / "x.png", 10)
    data = ImageFolder(root=tmp_path / "g", size=8).build()
    assert data.input_shape == (1, 8, 8)
    assert data.classes == ("0", "1", "2", "10")


def test_pixels_of_every_ending(tmp_path: Path) -> None:
    wide = np.zeros((10, 30), dtype=np.uint8)
    wide[:, 10:20] = 255
    Image.fromarray(wide).save(tmp_path / "wide.png")
    assert (decode(on_disk(tmp_path / "wide.png"), 1, 10, 10) == 255).all()
    Image.fromarray(np.full((10, 10), 257 * 100, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert (decode(on_disk(tmp_path / "deep.png"), 3, 10, 10) == 100).all()
    palette = Image.new("P", (10, 10), 3)
    palette.putpalette([0, 0, 0, 1, 1, 1, 2, 2, 2, 9, 8, 7])
    palette.save(tmp_path / "palette.png")
    assert decode(on_disk(tmp_path / "palette.png"), 3, 10, 10)[:, 0, 0].tolist() == [9, 8, 7]
    Image.init()
    assert {Image.registered_extensions()[suffix] for suffix in SUFFIXES} == set(FORMATS)
    for suffix in SUFFIXES:
        Image.new("1" if suffix == ".pbm" else "L", (9, 9), 0).save(tmp_path / f"picture{suffix}")
        assert decode(on_disk(tmp_path / f"picture{suffix}"), 1, 8, 8).max() == 0
    # Some telephones write several pictures into one JPEG.
    Image.new("L", (9, 9)).save(tmp_path / "several.jpg", "MPO", save_all=True, append_images=[Image.new("L", (9, 9))])
    assert decode(on_disk(tmp_path / "several.jpg"), 1, 8, 8).shape == (1, 8, 8)


def test_an_image_that_does_not_decode_is_named(tmp_path: Path, cache: Path) -> None:
    root = collection(tmp_path / "photos")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    broken = root / "south" / "dog" / "broken.png"
    Image.fromarray(noise).save(broken)
    broken.write_bytes(broken.read_bytes()[:3000])
    with pytest.raises(UserError, match=r"south/dog/broken\.png does not decode"):
        ImageFolder(root=root).build()
    broken.write_text("not an image at all")
    with pytest.raises(UserError, match=r"broken\.png does not decode"):
        ImageFolder(root=root).build()
    assert list(cache.iterdir()) == []  # nothing half-written is left


@pytest.mark.slow
def test_what_a_killed_process_decoded_is_written_over(tmp_path: Path, cache: Path) -> None:
    root = collection(tmp_path / "photos")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom fedshift.data import images\n"
        "from fedshift.data.builders.image_folder import ImageFolder\n"
        "def stuck(*_):\n    yield images._Image(__import__('numpy').ones((3, 99, 99), 'uint8'), None, False)\n"
        "    print('half', flush=True)\n"
        "    time.sleep(60)\nimages._in_order = stuck\nImageFolder(root=Path(sys.argv[1])).build()"
    )
    environment = {**os.environ, "FEDSHIFT_CACHE": str(cache)}
    words = [sys.executable, "-c", code, str(root)]
    dying = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert dying.stdout.readline() == "half\n"
    dying.kill()
    dying.communicate()
    assert [path.suffix for path in cache.glob("[!.]*")] == [".part"]
    assert len(list(cache.glob(".*.claim-*"))) == 1
    ImageFolder(root=root).build()
    assert {path.suffix for path in cache.iterdir()} == {".npy"}


def test_no_other_program_is_started_for_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    def ghostscript(*arguments: object, **options: object) -> Image.core.ImagingCore:
        started.append(arguments)
        return Image.new("RGB", (10, 10)).im

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", ghostscript)
    scan = tmp_path / "scan.png"
    scan.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n")
    file = on_disk(scan)
    for read in (lambda: has_colour([file]), lambda: size_of(file), lambda: decode(file, 3, 8, 8)):
        with pytest.raises(UserError, match=r"scan\.png does not decode") as caught:
            read()
        assert "\n" not in str(caught.value)
    assert not started


def test_the_cache_is_used_and_follows_the_files(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = collection(tmp_path / "photos")
    first = ImageFolder(root=root, size=8).build()
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr("fedshift.data.images.decode", lambda *_: pytest.fail("decoded again"))
        again = ImageFolder(root=root, size=8).build()
    assert np.array_equal(first.domains["north"].inputs, again.domains["north"].inputs)
    changed = picture(root / "north" / "cat" / "0.png", (1, 2, 3))
    os.utime(changed, ns=(1, 1))
    after = np.array(ImageFolder(root=root, size=8).build().domains["north"].inputs)
    assert after[0, :, 0, 0].tolist() == [1, 2, 3]
    for path in cache.iterdir():  # a cache file that was cut off is made again
        path.write_bytes(path.read_bytes()[:150])
    with pytest.warns(UserWarning, match="decoded again"):
        whole = ImageFolder(root=root, size=8).build().domains["north"].inputs
    assert np.array_equal(whole, after)


def test_a_cache_that_cannot_be_written(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedshift.data.images.os.replace", full)
    with pytest.raises(UserError, match="No space left"):
        ImageFolder(root=collection(tmp_path / "photos")).build()
    assert list(cache.iterdir()) == []
    root = collection(tmp_path / "photos")
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="cache folder"):
        ImageFolder(root=root).build()


def test_class_folders_that_differ(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    (root / "south" / "dog").rename(root / "south" / "dogs")
    with pytest.raises(UserError, match=r"'north' has \[cat, dog\]; 'south' has \[cat, dogs\]. Is 'dog' .*'dogs'"):
        ImageFolder(root=root).build()
    data = ImageFolder(root=root, missing_classes="allow").build()
    assert data.classes == ("cat", "dog", "dogs")
    assert sum("no sample of class" in line for line in data.warnings) == 2


@pytest.mark.parametrize("leave_empty", [True, False])
def test_a_site_that_lacks_a_class_is_warned(tmp_path: Path, leave_empty: bool) -> None:
    root = collection(tmp_path / "photos")
    for path in (root / "south" / "dog").iterdir():
        path.unlink()
    if not leave_empty:
        (root / "south" / "dog").rmdir()
    data = ImageFolder(root=root).build()
    assert data.classes == ("cat", "dog")
    assert any("site 'south' has no sample of class dog" in line for line in data.warnings)


def test_empty_and_missing_folders(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    (root / "west").mkdir()
    with pytest.raises(UserError, match="site 'west' is empty"):
        ImageFolder(root=root).build()
    (root / "west" / "cat").mkdir()
    with pytest.raises(UserError, match="site 'west' is empty"):
        ImageFolder(root=root).build()
    with pytest.raises(UserError, match="does not exist"):
        ImageFolder(root=tmp_path / "nowhere").build()
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="no folder of a site"):
        ImageFolder(root=tmp_path / "bare").build()


@pytest.mark.parametrize(
    ("root", "meant"),
    [
        case("folders", "root one folder too high", "all", "all/images"),
        case("folders", "root one folder too low", "all/images/north", "all/images"),
        case("folders", "root two folders too high", "", None),
    ],
)
def test_a_root_beside_the_right_one_is_asked_about(tmp_path: Path, root: str, meant: str | None) -> None:
    collection(tmp_path / "all" / "images")
    with pytest.raises(UserError, match="is empty") as caught:
        ImageFolder(root=tmp_path / root, size=8).build()
    hints = re.findall(r"did you mean root: (\S+)\?", str(caught.value))
    assert hints == ([] if meant is None else [str((tmp_path / meant).resolve())])


def test_corrupt_images_are_skipped_and_listed_by_choice(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    (root / "north" / "cat" / "bad.png").write_bytes(b"no image")
    cut = (root / "south" / "dog" / "0.png").read_bytes()
    (root / "south" / "dog" / "cut.png").write_bytes(cut[: len(cut) // 2])
    with pytest.raises(UserError, match="does not decode"):
        ImageFolder(root=root, size=16).build()
    for _ in range(2):  # the second time from the cache
        data = ImageFolder(root=root, size=16, on_corrupt="skip").build()
        assert {name: len(domain) for name, domain in data.domains.items()} == {"north": 6, "south": 6}
        (said,) = [warning for warning in data.warnings if "left out" in warning]
        assert said.startswith("2 images")
        assert all(name in said for name in ("bad.png", "cut.png"))
    picture(root / "north" / "cat" / "bad.png")
    again = ImageFolder(root=root, size=16, on_corrupt="skip").build()
    assert len(again.domains["north"]) == 7
    assert "1 image does" in str(again.warnings)


def dicom(path: Path, values: np.ndarray, **fields: Any) -> Path:
    """A CT slice: stored values are 1000 above Hounsfield units."""
    pydicom = pytest.importorskip("pydicom")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = pydicom.Dataset()
    made.file_meta = pydicom.dataset.FileMetaDataset()
    made.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = pydicom.uid.CTImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = pydicom.uid.generate_uid()
    made.Rows, made.Columns = values.shape
    made.SamplesPerPixel, made.PhotometricInterpretation, made.PixelRepresentation = 1, "MONOCHROME2", 0
    made.BitsAllocated = made.BitsStored = 16
    made.HighBit, made.RescaleSlope, made.RescaleIntercept = 15, 1, -1000
    made.PixelData = (values + 1000).astype(np.uint16).tobytes()
    for name, value in fields.items():
        setattr(made, name, value)
    made.save_as(path, enforce_file_format=True)
    return path


def nifti(path: Path, values: np.ndarray) -> Path:
    nibabel = pytest.importorskip("nibabel")
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), np.eye(4)), path)
    return path


GREY = np.linspace(-1000, 1000, 64).reshape(8, 8)


def pixels_of(path: Path, **options: Any) -> list[np.ndarray]:
    return [decode(one.image, 1, 8, 8)[0] for one in slices_of(path, **options)]


def test_dicom_slices_and_nifti_volumes(tmp_path: Path) -> None:
    (whole,) = pixels_of(dicom(tmp_path / "a.dcm", GREY))
    values = np.floor(GREY)
    assert np.allclose(whole, (values - values.min()) / (values.max() - values.min()) * 255, atol=1)
    low, high = 40 - 200, 40 + 200
    expected = ((values - low) / (high - low)).clip(0, 1) * 255
    (chosen,) = pixels_of(tmp_path / "a.dcm", window=(40.0, 400.0))
    (own,) = pixels_of(dicom(tmp_path / "b.dcm", GREY, WindowCenter=[40, 50], WindowWidth=[400, 90]))
    (turned,) = pixels_of(
        dicom(tmp_path / "c.dcm", GREY, WindowCenter=40, WindowWidth=400, PhotometricInterpretation="MONOCHROME1")
    )
    for found in (chosen, own, 255 - turned):
        assert np.allclose(found, expected, atol=1)
    volume = np.zeros((8, 8, 5))
    volume[6:, 7, 2] = 10.0  # right and front of the third slice; x grows to the right, y to the front
    found = pixels_of(nifti(tmp_path / "a.nii.gz", volume))
    assert len(found) == 5
    assert [int(slice_.max()) for slice_ in found] == [0, 0, 255, 0, 0]
    assert np.argwhere(found[2] == 255).tolist() == [[0, 0], [0, 1]]
    (middle,) = pixels_of(tmp_path / "a.nii.gz", which="middle")
    assert np.array_equal(middle, found[2])
    with pytest.raises(UserError, match="2×2×2×2"):
        slices_of(nifti(tmp_path / "b.nii", np.zeros((2, 2, 2, 2))))


def test_slices_of_a_patient_stay_together_and_are_predicted_by_name(tmp_path: Path) -> None:
    for site in ("north", "south"):
        for number, label in enumerate(("ill", "well")):
            dicom(tmp_path / "ct" / site / label / "1.dcm", GREY, PatientID=f"p{number}")
            dicom(tmp_path / "ct" / site / label / "2.dcm", GREY, PatientID=f"p{number}")
            nifti(tmp_path / "ct" / site / label / "3.nii", np.random.default_rng(number).normal(size=(6, 6, 3)))
    bad = tmp_path / "ct" / "north" / "ill" / "4.dcm"
    bad.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"4\.dcm"):
        ImageFolder(root=tmp_path / "ct", size=8).build()
    data = ImageFolder(root=tmp_path / "ct", size=8, on_corrupt="skip", window=(0.0, 100.0)).build()
    assert "4.dcm" in str(data.warnings)
    assert data.input_shape == (1, 8, 8)
    groups = {site: domain.groups for site, domain in data.domains.items()}
    assert all([len(set(part)) for part in np.split(group, [2, 5, 7])] == [1] * 4 for group in groups.values())
    assert not set(groups["north"]) & set(groups["south"])
    names, inputs = load_for_prediction(tmp_path / "ct" / "south", data.preprocessing)
    assert names[:3] == ["ill/1.dcm", "ill/2.dcm", "ill/3.nii[0]"]
    assert np.array_equal(inputs, data.domains["south"].inputs)


def left_out(data: DataSet) -> str:
    (text,) = [warning for warning in data.warnings if "left out" in warning]
    return text


@pytest.mark.case("files left out", "other endings are counted and named; hidden files and those of systems are not")
def test_files_that_are_no_images_are_named(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    quiet = (".DS_Store", "Thumbs.db", "desktop.ini", "__MACOSX/x.png", ".ipynb_checkpoints/y.png", ".hidden.png")
    for name in quiet:
        path = root / "north" / "cat" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert not any("left out" in text for text in ImageFolder(root=root, size=8).build().warnings)
    for name in ("a.svs", "b.txt", "c.jp2", "d.heic"):
        (root / "north" / "cat" / name).write_bytes(b"x")
    text = left_out(ImageFolder(root=root, size=8).build())
    assert "4 " in text
    assert all(f"north/cat/{name}" in text for name in ("a.svs", "b.txt", "c.jp2"))
    assert "d.heic" not in text  # three are named
    assert not any(name in text for name in quiet)


@pytest.mark.case("files left out", "images in deeper folders are counted and named")
def test_deeper_folders_are_named(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    picture(root / "north" / "cat" / "old" / "a.png")
    picture(root / "north" / "cat" / "old" / "older" / "b.png")
    picture(root / "north" / "cat" / ".trash" / "c.png")
    text = left_out(ImageFolder(root=root, size=8).build())
    assert "2 in deeper folders (north/cat/old/a.png, north/cat/old/older/b.png)" in text


@pytest.mark.case("files left out", "images outside of a class folder are counted and named, other files there are not")
def test_images_outside_of_a_class_are_named(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    picture(root / "a.png")
    picture(root / "north" / "b.png")
    (root / "e.yaml").write_text("x")
    (root / "north" / "readme.md").write_text("x")
    text = left_out(ImageFolder(root=root, size=8).build())
    assert "2 files" in text
    assert "a.png, north/b.png" in text


@pytest.mark.case("files left out", "a site whose images all lie deeper: the error names them")
def test_a_site_with_deeper_images_only(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    picture(root / "west" / "cat" / "patient1" / "a.png")
    with pytest.raises(UserError, match=r"west.*cat/patient1/a\.png"):
        ImageFolder(root=root, size=8).build()


@pytest.mark.case("files left out", "a folder or a broken link named as an image")
def test_what_is_only_named_as_an_image(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    (root / "north" / "cat" / "x.png").symlink_to(tmp_path / "nowhere")
    picture(root / "north" / "cat" / "y.png" / "inner.png")
    text = left_out(ImageFolder(root=root, size=8).build())
    assert "north/cat/x.png" in text
    assert "north/cat/y.png/inner.png" in text


@pytest.mark.case("files left out", "a named pipe is not opened")
def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    os.mkfifo(root / "north" / "cat" / "pipe")
    os.mkfifo(root / "north" / "cat" / "pipe.dcm")
    assert "2 of other kinds" in left_out(ImageFolder(root=root, size=8).build())


@pytest.mark.case("numbers of patients", "DICOM of two sites with IDs in common")
def test_patients_at_two_sites(tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    for site, first in (("a", 0), ("b", 3), ("c", 100)):
        for number in range(8):
            (tmp_path / "ct" / site / "xy"[number % 2]).mkdir(parents=True, exist_ok=True)
            file = tmp_path / "ct" / site / "xy"[number % 2] / f"{number}.dcm"
            dicom(file, GREY, PatientID=f"secret{first + number}")
    said = [text for text in ImageFolder(root=tmp_path / "ct", size=8).build().warnings if "common" in text]
    assert len(said) == 1
    assert "5 of 'a' and 'b'" in said[0]
    assert "secret" not in said[0]


@pytest.mark.case("files left out", "DICOM whatever its ending is read, a report is left out and named")
def test_dicom_by_content(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    for site in ("north", "south"):
        for label in ("ill", "well"):
            for number, ending in enumerate(("", ".IMA", ".dcm", ".001")):
                dicom(tmp_path / "ct" / site / label / f"{number}{ending}", GREY, PatientID=f"{label}{number}")
    report = pydicom.dcmread(dicom(tmp_path / "ct" / "north" / "ill" / "SR", GREY))
    del report.PixelData, report.Rows, report.Columns
    report.save_as(tmp_path / "ct" / "north" / "ill" / "SR")
    data = ImageFolder(root=tmp_path / "ct", size=8).build()
    assert [len(domain) for domain in data.domains.values()] == [8, 8]
    assert "north/ill/SR" in left_out(data)


def scans(root: Path, patient: Callable[[str, int], str]) -> Path:
    for site in ("a", "b", "c"):
        for number in range(8):
            name = root / site / f"k{number % 2}" / f"{number}.dcm"
            dicom(name, GREY + number, PatientID=patient(site, number), SeriesInstanceUID=f"1.2.{number}")
    return root


def split_often(data: DataSet, target: str, kind: str, fraction: float) -> None:
    """Split with many seeds: some hold the only group out, others train on it."""
    fields = {"kind": kind, "test_fraction": fraction, "targets": [target]}
    protocol: Protocol = TypeAdapter(Protocol).validate_python(fields)
    for seed in range(20):
        protocol.split_of(data, target, seed)


@pytest.mark.case("patients", "one ID for all images of a site: the message counts them and shows no ID")
@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("kind", ["leave_one_out", "adapt_to_one"])
def test_one_patient_for_a_whole_site(tmp_path: Path, fraction: float, kind: str) -> None:
    root = scans(tmp_path / "ct", lambda site, number: "ANONYMOUS" if site == "c" else f"{site}{number}")
    data = ImageFolder(root=root, size=8).build()
    (warned,) = [text for text in data.warnings if "patient ID" in text]
    assert "all 8 images of site 'c'" in warned
    with pytest.raises(UserError, match="all 8 images of site 'c' have the same patient ID") as caught:
        split_often(data, "c", kind, fraction)
    assert "data.patient" in str(caught.value)
    assert "ANONYMOUS" not in str(caught.value) + warned
    free = ImageFolder(root=root, size=8, patient="series").build()
    assert not [text for text in free.warnings if "patient ID" in text]
    split_often(free, "c", kind, 0.4)


@pytest.mark.case("patients", "nearly all images with one ID are warned of, a fair share is not")
@pytest.mark.case("patients", "arrays whose groups are all one")
@pytest.mark.case("patients", "many patients are counted in a moment")
def test_patients_of_images_and_groups_of_arrays(tmp_path: Path) -> None:
    names = ["X", "P1", "P2"]
    mostly = list(_one_patient({"a": ["X"] * 19 + ["P1"], "b": ["X"] * 5 + ["P1"] * 5, "c": [None] * 9, "d": names}))
    assert len(mostly) == 1
    assert "19 of 20 images of site 'a'" in mostly[0]
    domains = {
        name: Domain(name, np.zeros((8, 2), np.float32), np.arange(8) % 2, groups=np.full(8, number))
        for number, name in enumerate("ab")
    }
    manifest = ImageFolder.manifest()
    data = DataSet("arrays", domains, ("0", "1"), Preprocessing(kind="features"), manifest)
    with pytest.raises(UserError, match=r"all 8 samples of site '.' are in one group"):
        split_often(data, "b", "leave_one_out", 0.9)
    names = [f"P{number}" for number in range(100_000)]
    begin = time.perf_counter()
    assert list(_one_patient({"a": names})) == []
    assert time.perf_counter() - begin < 2


@pytest.mark.case("deep images", "a missing window is no corrupt image: it is asked for, and then all are read")
def test_a_missing_window_is_not_skipped(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    values = np.linspace(0, 4095, 64, dtype=np.float32).reshape(8, 8)
    Image.fromarray(values).save(root / "north" / "cat" / "deep.tif")
    (root / "north" / "cat" / "bad.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"deep\.tif.*data\.window"):
        ImageFolder(root=root, size=8, on_corrupt="skip").build()
    data = ImageFolder(root=root, size=8, on_corrupt="skip", window=(2047.5, 4095)).build()
    assert len(data.domains["north"]) == 7
    (text,) = [warning for warning in data.warnings if "left out" in warning]
    assert "bad.png" in text
    assert "deep.tif" not in text


@pytest.mark.case("DICOM encodings", "a missing package is no corrupt image")
def test_a_missing_package_is_not_skipped(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    if pydicom.pixels.get_decoder(pydicom.uid.JPEGLosslessSV1).is_available:
        pytest.skip("a package for it is installed")
    root = collection(tmp_path / "photos")
    path = dicom(root / "north" / "cat" / "a.dcm", GREY)
    whole = pydicom.dcmread(path)
    whole.PixelData = pydicom.encaps.encapsulate([b"\0\0"])
    whole["PixelData"].is_undefined_length = True
    whole.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLosslessSV1
    whole.save_as(path)
    with pytest.raises(UserError, match="pip install"):
        ImageFolder(root=root, size=8, on_corrupt="skip").build()


@pytest.mark.case("deep images", "a window that is not finite, or not positive")
@pytest.mark.parametrize("window", [(float("nan"), 5), (5, float("inf")), (5, float("nan")), (5, 0), (5, -1)])
def test_a_window_that_is_none(tmp_path: Path, window: tuple[float, float]) -> None:
    with pytest.raises(ValidationError):
        ImageFolder(root=tmp_path, window=window)


@pytest.mark.case("files left out", "DICOM that is named .png: the message says so")
def test_dicom_named_as_another_image(tmp_path: Path) -> None:
    root = collection(tmp_path / "photos")
    dicom(root / "north" / "cat" / "a.png", GREY)
    with pytest.raises(UserError, match=r"a\.png.*DICOM.*\.dcm"):
        ImageFolder(root=root, size=8).build()


@pytest.mark.case("names of files", "an image whose name is not written in UTF-8 is read")
def test_a_file_named_by_another_system(tmp_path: Path) -> None:
    root = collection(tmp_path / "images")
    folder = root / "north" / "cat"
    named = os.path.join(os.fsencode(folder), b"Aufnahme \xfc.png")
    picture(folder / "plain.png")
    os.rename(folder / "plain.png", named)
    assert len(ImageFolder(root=root, size=8).build().domains["north"]) == 7
    Path(os.fsdecode(named)).write_bytes(b"no image")
    with pytest.raises(UserError, match="does not decode"):
        ImageFolder(root=root, size=8).build()


@pytest.mark.case("names of files", "a folder of a class, or of a site, whose name is not written in UTF-8")
@pytest.mark.parametrize(("site", "label"), [(b"a", b"m\xfcde"), (b"M\xfcnchen", b"yes")])
def test_a_folder_named_by_another_system(site: bytes, label: bytes, tmp_path: Path) -> None:
    """A run would end with a traceback after training, where it writes the names of its classes."""
    root = tmp_path / "images"
    for place in (site, b"b"):
        for name in (b"no", label):
            folder = Path(os.fsdecode(os.path.join(os.fsencode(root), place, name)))
            folder.mkdir(parents=True)
            picture(folder / "0.png")
    with pytest.raises(UserError, match=r"is not written in UTF-8: rename it") as raised:
        ImageFolder(root=root, size=8).build()
    assert str(raised.value).isascii()
