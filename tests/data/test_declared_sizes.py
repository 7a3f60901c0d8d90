"""Files that declare, or expand to, more than the machine has: refused before they are read, in one line."""

from __future__ import annotations

import gzip
import io
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from fedshift.data import sizes
from fedshift.data.images import decode, on_disk
from fedshift.data.locate import load_npz
from fedshift.data.published.array_files import read_pickled
from fedshift.data.table_files import read_table
from fedshift.errors import UserError, is_out_of_memory
from tried import case, cases

LIMIT = "0.1"
"""GiB."""


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(sizes.VARIABLE, LIMIT)
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


def refused(path: Path, read: Callable[[Path], Any]) -> str:
    """The message for a file that declares too much, which is said at once and without memory."""
    before, begun = psutil.Process().memory_info().rss, time.process_time()
    with pytest.raises(UserError, match=sizes.VARIABLE) as caught:
        read(path)
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert time.process_time() - begun < 5
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def array_file(shape: tuple[int, ...], kind: str = "<f8", version: tuple[int, int] = (1, 0)) -> bytes:
    """The header of an ``.npy`` file, by NumPy's description of the format."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    size = "<H" if version == (1, 0) else "<I"
    fill = -(10 + struct.calcsize(size) - 2 + len(text) + 1) % 64
    words = text.encode() + b" " * fill + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack(size, len(words)) + words


def archive_of(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


@pytest.mark.parametrize(
    ("shape", "kind", "version"),
    [
        case("declared sizes", "npz: 2^46 numbers", (2**46,), "<f8", (1, 0)),
        case("declared sizes", "npz: header of version 2", (2**20,) * 3, "|u1", (2, 0)),
        case("declared sizes", "npz: above 64 bits", (2**62, 2**62), "<f4", (1, 0)),
        case("declared sizes", "npz: header of version 3", (2**28,), "<c16", (3, 0)),
        case("declared sizes", "npz: texts of 1 GB", (3,), "|S999999999", (1, 0)),
    ],
)
def test_arrays_that_declare_too_much(
    shape: tuple[int, ...], kind: str, version: tuple[int, int], tmp_path: Path
) -> None:
    path = archive_of(tmp_path / "a.npz", x=array_file(shape, kind, version), y=array_file((3,)) + bytes(24))
    refused(path, load_npz)
    assert load_npz(path, ["y"])["y"].tolist() == [0, 0, 0], "what is not read may be of any size"


@pytest.mark.slow
@pytest.mark.case("declared sizes", "npz: 200 kB that expand to 200 MB")
@pytest.mark.case("declared sizes", "npz: many arrays that fit one by one")
@pytest.mark.case("declared sizes", "npz: fits exactly, one byte more does not")
def test_sizes_of_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w") as member,
    ):
        member.write(array_file((200 << 20,), "|u1"))
        for _ in range(200):
            member.write(bytes(1 << 20))
    assert (tmp_path / "a.npz").stat().st_size < 300_000
    assert "200.0 MiB" in refused(tmp_path / "a.npz", load_npz)
    members = {f"x{number}": array_file((10 << 20,), "|u1") for number in range(20)}
    refused(archive_of(tmp_path / "a.npz", **members), load_npz)
    np.savez(tmp_path / "a.npz", x=np.arange(1 << 17, dtype=np.float64))
    monkeypatch.setenv(sizes.VARIABLE, str(2**20 / 2**30))
    assert len(load_npz(tmp_path / "a.npz")["x"]) == 1 << 17
    monkeypatch.setenv(sizes.VARIABLE, str((2**20 - 1) / 2**30))
    refused(tmp_path / "a.npz", load_npz)


@pytest.mark.case("declared sizes", "npz: a damaged header, numbers that are missing")
def test_what_is_damaged_is_still_said_so(tmp_path: Path) -> None:
    for content in (array_file((3,))[:20], array_file((3,)), b"\x93NUMPY\x01\x00\x08\x00{'a': 1}"):
        with pytest.raises(UserError, match=r"a\.npz") as caught:
            load_npz(archive_of(tmp_path / "a.npz", x=content))
        assert sizes.VARIABLE not in str(caught.value)


@pytest.mark.case("declared sizes", "Parquet: 133 kB with 30 million rows")
@pytest.mark.case("declared sizes", "Parquet: 60 kB of rows that repeat a text of 100 kB")
def test_parquet_that_declares_or_repeats_much(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    piece = arrow.table({"x": arrow.array(np.zeros(10**6, dtype=np.int8))})
    with parquet.ParquetWriter(tmp_path / "a.parquet", piece.schema, compression="zstd") as writer:
        for _ in range(30):
            writer.write_table(piece)
    assert (tmp_path / "a.parquet").stat().st_size < 133_000
    refused(tmp_path / "a.parquet", read_table)
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = arrow.DictionaryArray.from_arrays(arrow.array([0, None, 1] * 2000), ["x" * 100_000, "y"])
    parquet.write_table(arrow.table({"t": texts.cast("string")[:3], "n": [1.5, 2.0, None]}), tmp_path / "a.parquet")
    small = read_table(tmp_path / "a.parquet")
    assert [cell[:1] for cell in small.cells["t"]] == ["x", "", "y"]
    assert small.cells["n"] == ["1.5", "2.0", ""]
    parquet.write_table(arrow.table({"t": texts}), tmp_path / "b.parquet")
    before = psutil.Process().memory_info().rss
    table = read_table(tmp_path / "b.parquet")
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert len(table) == 6000
    assert sum(map(len, table.cells["t"])) == 2000 * 100_001


@pytest.mark.case("declared sizes", "PNG: 60 kB of 7,000 by 7,000 pixels")
def test_images_and_pickles_that_are_too_large(tmp_path: Path) -> None:
    Image.new("L", (7000, 7000)).save(tmp_path / "a.png")
    refused(tmp_path / "a.png", lambda path: decode(on_disk(path), 1, 8, 8))
    Image.new("L", (5000, 5000)).save(tmp_path / "b.png")
    assert decode(on_disk(tmp_path / "b.png"), 1, 8, 8).shape == (1, 8, 8)
    path = tmp_path / "data.pkl"
    with path.open("wb") as stream:
        stream.truncate(200 << 20)  # a hole: it takes no room on the disk
    refused(path, read_pickled)


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
@pytest.mark.case("declared sizes", "NIfTI: 400 bytes that declare 2.2 GB")
def test_a_volume_that_declares_too_much(ending: str, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    from fedshift.data.builders.medical import slices_of

    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.int16)
    header.set_data_shape((1024, 1024, 1024))
    header.set_sform(np.eye(4), 1)
    header["vox_offset"] = 352
    content = header.binaryblock + bytes(4) + bytes(100)
    (tmp_path / f"a{ending}").write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    refused(tmp_path / f"a{ending}", slices_of)


def dicom(path: Path, *, deflated: bool = False, **values: Any) -> Path:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian

    whole = pydicom.Dataset()
    whole.file_meta = pydicom.dataset.FileMetaDataset()
    whole.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian if deflated else ExplicitVRLittleEndian
    whole.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    whole.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    known = {"Rows": 4, "Columns": 4, "SamplesPerPixel": 1, "BitsAllocated": 8, "BitsStored": 8, "HighBit": 7}
    known |= {"PixelRepresentation": 0, "PhotometricInterpretation": "MONOCHROME2", "PixelData": bytes(range(16))}
    for name, value in {**known, **values}.items():
        setattr(whole, name, value)
    whole.save_as(path, enforce_file_format=True)
    return path


@cases(
    "declared sizes",
    "values",
    {
        "DICOM: 65,535 by 65,535 pixels": {"Rows": 65535, "Columns": 65535},
        "DICOM: two thousand million frames": {"Rows": 512, "Columns": 512, "NumberOfFrames": 2**31 - 1},
    },
)
def test_a_dicom_file_that_declares_too_much(values: dict[str, Any], tmp_path: Path) -> None:
    from fedshift.data.builders.medical import slices_of

    refused(dicom(tmp_path / "a.dcm", **values), slices_of)


@pytest.mark.slow
@pytest.mark.case("declared sizes", "DICOM: deflated, 300 kB that expand to 300 MB")
@pytest.mark.case("declared sizes", "DICOM: deflated bytes that are damaged")
def test_deflated_dicom_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedshift.data.builders.medical import slices_of

    honest = dicom(tmp_path / "a.dcm", deflated=True)
    (only,) = slices_of(honest)
    assert decode(only.image, 1, 4, 4)[0, 0].tolist() == [0, 17, 34, 51]
    content = honest.read_bytes()
    start = 144 + struct.unpack("<I", content[140:144])[0]
    assert zlib.decompress(content[start:], -zlib.MAX_WBITS)[:2] == struct.pack("<H", 0x28)
    bomb = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    size = 300 << 20
    pieces = [bomb.compress(struct.pack("<HH2sHI", 9, 0x1001, b"OB", 0, size))]
    pieces += [bomb.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    pieces += [bomb.compress(zlib.decompress(content[start:], -zlib.MAX_WBITS)), bomb.flush()]
    (tmp_path / "b.dcm").write_bytes(content[:start] + b"".join(pieces))
    assert (tmp_path / "b.dcm").stat().st_size < 400_000
    refused(tmp_path / "b.dcm", slices_of)
    from fedshift.data.builders.medical import slices_of

    monkeypatch.setenv(sizes.VARIABLE, "0.0001")
    whole = dicom(tmp_path / "a.dcm", deflated=True).read_bytes()
    start = 144 + struct.unpack("<I", whole[140:144])[0]
    (tmp_path / "a.dcm").write_bytes(whole[:start] + b"\xff" * 100_000)
    with pytest.raises(UserError, match=r"a\.dcm"):
        slices_of(tmp_path / "a.dcm")


# The limit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "much", "0", "-1", "nan", "inf", "8 GB", "1e999", "0x10"])
@pytest.mark.case("settings", "FEDSHIFT_LARGEST_DATA that is no number of GiB")
def test_a_limit_that_is_no_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sizes.VARIABLE, text)
    with pytest.raises(UserError, match="GiB"):
        sizes.largest()


@pytest.mark.case("settings", "FEDSHIFT_LARGEST_DATA unset: half of what the machine or its container has")
def test_half_of_the_memory_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(sizes.VARIABLE)
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "some").write_text(f"{1 << 30}\n")
    for files, most in (
        ([tmp_path / "none", tmp_path / "max"], psutil.virtual_memory().total),
        ([tmp_path / "some"], 1 << 30),
    ):
        monkeypatch.setattr(sizes, "_CONTAINER", files)
        sizes._memory.cache_clear()
        assert sizes.largest() == most // 2
    sizes._memory.cache_clear()


# Too little memory ----------------------------------------------------------------------------------------------------


def _none(*_: object, **__: object) -> None:
    raise MemoryError("Unable to allocate 2.00 GiB for an array with shape (268435456,) and data type float64")


@pytest.mark.case("out of memory", "while an npz, a table, an image, a volume, a DICOM file is read")
def test_the_file_for_which_there_is_no_memory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    nibabel, pydicom = pytest.importorskip("nibabel"), pytest.importorskip("pydicom")
    from fedshift.data.builders.medical import slices_of

    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    parquet.write_table(arrow.table({"x": [1]}), tmp_path / "a.parquet")
    Image.new("L", (9, 9)).save(tmp_path / "a.png")
    nibabel.save(nibabel.Nifti1Image(np.zeros((3, 3, 3), np.int16), np.eye(4)), tmp_path / "a.nii")
    dicom(tmp_path / "a.dcm")
    cases: list[tuple[str, Any, str, Callable[[Path], Any]]] = [
        ("a.npz", np.lib.npyio.NpzFile, "__getitem__", load_npz),
        ("a.parquet", parquet.ParquetFile, "read", read_table),
        ("a.png", Image, "open", lambda path: decode(on_disk(path), 1, 8, 8)),
        ("a.nii", nibabel, "load", slices_of),
        ("a.dcm", pydicom, "dcmread", slices_of),
    ]
    for name, owner, function, read in cases:
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, _none)
            with pytest.raises(UserError, match="memory") as caught:
                read(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.case("out of memory", "as Python, NumPy and torch say it; other errors are not")
def test_what_says_that_there_is_no_memory() -> None:
    def error_of(make: Callable[[], object]) -> BaseException:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            make()
        return caught.value

    assert is_out_of_memory(error_of(lambda: np.zeros(2**55)))
    assert is_out_of_memory(error_of(lambda: torch.zeros(2**50)))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(error_of(lambda: torch.zeros(3) @ torch.zeros(4)))
    assert not is_out_of_memory(error_of(lambda: io.BytesIO().fileno()))
