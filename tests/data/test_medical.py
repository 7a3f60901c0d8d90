"""DICOM and NIfTI: known pixels of every kind, made by hand with pydicom and nibabel."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from fedshift.data.builders.medical import is_medical, slices_of
from fedshift.data.inference import load_for_prediction
from fedshift.errors import UserError

pydicom = pytest.importorskip("pydicom")
nibabel = pytest.importorskip("nibabel")
from pydicom.dataset import Dataset, FileMetaDataset  # noqa: E402
from pydicom.encaps import encapsulate  # noqa: E402
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi_lut  # noqa: E402
from pydicom.sequence import Sequence as Items  # noqa: E402

from tried import case, cases  # noqa: E402

PURE = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [200, 200, 200]]], dtype=np.uint8)
HU = np.array([[-1000, 0], [40, 1000]])


def item(**fields: Any) -> Dataset:
    made = Dataset()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def dicom(path: Path, values: npt.NDArray[Any], *, stored: bytes | None = None, **fields: Any) -> Path:
    """A file with these stored values (rows, columns), (frames, rows, columns) or with a last axis of 3 channels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    syntax = fields.pop("syntax", pydicom.uid.ExplicitVRLittleEndian)
    colour = fields.get("PhotometricInterpretation", "MONOCHROME2")[:3] in ("RGB", "YBR")
    shape = values.shape[:-1] if colour else values.shape
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = syntax
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = pydicom.uid.generate_uid()
    made.Rows, made.Columns = shape[-2:]
    if len(shape) == 3:
        made.NumberOfFrames = shape[0]
    made.SamplesPerPixel, made.PhotometricInterpretation = 3 if colour else 1, "MONOCHROME2"
    if colour:
        made.PlanarConfiguration = 0
    made.PixelRepresentation = int(values.dtype.kind == "i")
    made.BitsAllocated = made.BitsStored = 8 * values.dtype.itemsize
    made.HighBit = made.BitsStored - 1
    made.PixelData = values.tobytes() if stored is None else stored
    for name, value in fields.items():
        setattr(made, name, value)
    if "BitsStored" in fields:
        made.HighBit = made.BitsStored - 1
    if made.BitsAllocated == 8 and not syntax.is_encapsulated:
        made["PixelData"].VR = "OW"
    made.save_as(path, enforce_file_format=True)
    return path


def pixels(path: Path, window: tuple[float, float] | None = None) -> list[npt.NDArray[np.uint8]]:
    return [np.asarray(Image.open(one.image.open())) for one in slices_of(path, "all", window)]


def one_of(path: Path, window: tuple[float, float] | None = None) -> list[Any]:
    (only,) = pixels(path, window)
    found: list[Any] = only.tolist()
    return found


# Colours


def ybr(colours: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """PS3.3 C.7.6.3.1.2, the equations of YBR_FULL."""
    red, green, blue = np.moveaxis(colours.astype(float), -1, 0)
    y = 0.2990 * red + 0.5870 * green + 0.1140 * blue
    b = -0.1687 * red - 0.3313 * green + 0.5000 * blue + 128
    r = 0.5000 * red - 0.4187 * green - 0.0813 * blue + 128
    return np.rint(np.stack([y, b, r], axis=-1)).clip(0, 255).astype(np.uint8)


@pytest.mark.case("DICOM colours", "RGB")
@pytest.mark.case("DICOM colours", "uncompressed YBR_FULL is converted once")
@pytest.mark.case("DICOM colours", "uncompressed YBR_FULL_422 is expanded and converted once")
@pytest.mark.case("DICOM colours", "planar configuration 1")
@pytest.mark.case("DICOM colours", "YBR_FULL in planes and in two frames")
@pytest.mark.case("DICOM colours", "RLE of YBR_FULL")
def test_colours_without_compression_or_by_run_lengths(tmp_path: Path) -> None:
    assert one_of(dicom(tmp_path / "a.dcm", PURE, PhotometricInterpretation="RGB")) == PURE.tolist()
    found = one_of(dicom(tmp_path / "a.dcm", ybr(PURE), PhotometricInterpretation="YBR_FULL"))
    assert np.allclose(found, PURE, atol=2)
    colours = np.repeat(PURE, 2, axis=1)  # pairs of equal pixels share their chroma
    full = ybr(colours).reshape(-1, 2, 3)
    stored = np.stack([full[:, 0, 0], full[:, 1, 0], full[:, 0, 1], full[:, 0, 2]], axis=1).tobytes()
    path = dicom(tmp_path / "a.dcm", colours, stored=stored, PhotometricInterpretation="YBR_FULL_422")
    assert np.allclose(one_of(path), colours, atol=2)
    planes = PURE.transpose(2, 0, 1).tobytes()
    path = dicom(tmp_path / "a.dcm", PURE, stored=planes, PhotometricInterpretation="RGB", PlanarConfiguration=1)
    assert one_of(path) == PURE.tolist()
    frames = np.stack([PURE, PURE[::-1]])
    planes = ybr(frames).transpose(0, 3, 1, 2).tobytes()
    path = dicom(tmp_path / "a.dcm", frames, stored=planes, PhotometricInterpretation="YBR_FULL", PlanarConfiguration=1)
    assert np.allclose(pixels(path), frames, atol=2)
    path = dicom(tmp_path / "plain.dcm", ybr(QUARTERS), PhotometricInterpretation="YBR_FULL")
    whole = pydicom.dcmread(path)
    whole.compress(pydicom.uid.RLELossless)
    whole.save_as(tmp_path / "a.dcm")
    assert np.allclose(np.array(one_of(tmp_path / "a.dcm"))[MIDDLES], PURE, atol=2)


@pytest.mark.parametrize(
    ("bits", "white"),
    [
        case("DICOM colours", "RGB of 16 bits", 16, 65535),
        case("DICOM colours", "RGB of 12 bits in 16", 12, 4095),
        case("DICOM colours", "RGB of 10 bits in 16", 10, 1023),
    ],
)
def test_colours_of_more_bits(tmp_path: Path, bits: int, white: int) -> None:
    deep = np.rint(PURE / 255 * white).astype(np.uint16)
    found = one_of(dicom(tmp_path / "a.dcm", deep, PhotometricInterpretation="RGB", BitsStored=bits))
    assert np.allclose(found, PURE, atol=1)


QUARTERS = np.kron(PURE, np.ones((16, 16, 1), dtype=np.uint8))
MIDDLES = (slice(4, None, 16), slice(4, None, 16))


def encoded(form: str, **options: Any) -> bytes:
    stream = BytesIO()
    Image.fromarray(QUARTERS).save(stream, form, **options)
    return encapsulate([stream.getvalue()])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        case("DICOM colours", "JPEG YBR_FULL_422", "YBR_FULL_422", {"subsampling": 1}),
        case("DICOM colours", "JPEG YBR_FULL", "YBR_FULL", {"subsampling": 0}),
        case("DICOM colours", "JPEG of YBR with JFIF that is called RGB", "RGB", {"subsampling": 0}),
        case("DICOM colours", "JPEG whose components are red, green, blue", "RGB", {"keep_rgb": True}),
    ],
)
def test_jpeg(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    path = dicom(
        tmp_path / "a.dcm",
        QUARTERS,
        stored=encoded("JPEG", quality=95, **options),
        PhotometricInterpretation=kind,
        syntax=pydicom.uid.JPEGBaseline8Bit,
    )
    assert np.allclose(np.array(one_of(path))[MIDDLES], PURE, atol=4)


@cases(
    "DICOM colours",
    "kind irreversible syntax",
    {
        "JPEG 2000 YBR_RCT, which the decoder has converted": ("YBR_RCT", False, pydicom.uid.JPEG2000Lossless),
        "JPEG 2000 YBR_ICT, which the decoder has converted": ("YBR_ICT", True, pydicom.uid.JPEG2000),
        "JPEG 2000 RGB": ("RGB", False, pydicom.uid.JPEG2000Lossless),
    },
)
def test_jpeg_2000(tmp_path: Path, kind: str, irreversible: bool, syntax: Any) -> None:
    stored = encoded("JPEG2000", irreversible=irreversible, mct=int(kind != "RGB"), no_jp2=True)
    path = dicom(tmp_path / "a.dcm", QUARTERS, stored=stored, PhotometricInterpretation=kind, syntax=syntax)
    assert np.allclose(np.array(one_of(path))[MIDDLES], PURE, atol=4)


@pytest.mark.parametrize(
    "fields",
    [
        case("DICOM colours", "HSV is refused", {"kind": "HSV"}),
        case("DICOM colours", "YBR_PARTIAL_422 is refused", {"kind": "YBR_PARTIAL_422"}),
        case("DICOM colours", "uncompressed YBR_RCT is refused", {"kind": "YBR_RCT"}),
        case("DICOM colours", "YBR_FULL of 16 bits is refused", {"kind": "YBR_FULL", "deep": True}),
    ],
)
def test_colours_that_are_not_read(tmp_path: Path, fields: dict[str, Any]) -> None:
    values = PURE.astype(np.uint16) if "deep" in fields else PURE
    path = dicom(tmp_path / "a.dcm", values, PhotometricInterpretation="YBR_FULL")
    whole = pydicom.dcmread(path)
    whole.PhotometricInterpretation = fields["kind"]
    whole.save_as(path)
    with pytest.raises(UserError, match=r"a\.dcm") as caught:
        pixels(path)
    assert fields["kind"] in str(caught.value)
    assert "\n" not in str(caught.value)


# Palettes

INDICES = np.array([[0, 1], [2, 3]], dtype=np.uint8)


def palette(kind: str, bits: int, first: int = 0, *, entries: int | None = None) -> dict[str, Any]:
    """The four colours of PURE as tables; ``kind``: bytes an entry or ``segmented``."""
    fields: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for number, name in enumerate(("Red", "Green", "Blue")):
        table = PURE.reshape(4, 3)[:, number]
        fields[f"{name}PaletteColorLookupTableDescriptor"] = [entries or 4, first, bits]
        wide = (table.astype(np.uint16) * (257 if bits == 16 else 1)).astype("<u2")
        if kind == "segmented":  # PS3.3 C.7.9.2: one discrete segment of four entries
            cells = wide if bits == 16 else table
            data = np.concatenate([np.array([0, 4], dtype=cells.dtype), cells]).tobytes()
            fields[f"Segmented{name}PaletteColorLookupTableData"] = data
        else:
            fields[f"{name}PaletteColorLookupTableData"] = table.tobytes() if kind == "1" else wide.tobytes()
    return fields


@cases(
    "DICOM palettes",
    "values tables",
    {
        "entries of 8 bits": (INDICES, palette("1", 8)),
        "entries of 16 bits": (INDICES, palette("2", 16)),
        "entries of 8 bits in 16": (INDICES, palette("2", 8)),
        "indices of 16 bits from 1000 on": (INDICES.astype(np.uint16) + 1000, palette("2", 16, 1000)),
        "signed indices": (INDICES.astype(np.int16) - 2, palette("2", 16, -2)),
        "segmented, entries of 16 bits": (INDICES, palette("segmented", 16)),
        "segmented, entries of 8 bits": (INDICES, palette("segmented", 8)),
    },
)
def test_palettes(tmp_path: Path, values: npt.NDArray[Any], tables: dict[str, Any]) -> None:
    path = dicom(tmp_path / "a.dcm", values, **tables)
    assert one_of(path) == PURE.tolist()
    (only,) = slices_of(path)
    assert only.colour
    whole = pydicom.dcmread(path)
    theirs = apply_color_lut(whole.pixel_array, whole)
    assert np.array_equal(theirs >> (8 if theirs.max() > 255 else 0), PURE)


@pytest.mark.case("DICOM palettes", "more than 256 entries of 8 bits")
@pytest.mark.case("DICOM palettes", "a palette with fewer entries than it says")
@pytest.mark.case("DICOM palettes", "colours laid over grey are refused")
def test_palettes_that_are_long_short_or_supplemental(tmp_path: Path) -> None:
    values = np.array([[0, 300], [511, 900]], dtype=np.uint16)  # beyond the last entry stands the last one
    fields: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    ramp = (np.arange(512) // 2).astype(np.uint8)
    for name, table in {"Red": ramp, "Green": 255 - ramp, "Blue": ramp * 0}.items():
        fields[f"{name}PaletteColorLookupTableDescriptor"] = [512, 0, 8]
        fields[f"{name}PaletteColorLookupTableData"] = table.tobytes()
    assert one_of(dicom(tmp_path / "a.dcm", values, **fields)) == [
        [[0, 255, 0], [150, 105, 0]],
        [[255, 0, 0], [255, 0, 0]],
    ]
    with pytest.raises(UserError, match="4 of 9 entries"):
        pixels(dicom(tmp_path / "a.dcm", INDICES, **palette("1", 8, entries=9)))
    fields = palette("2", 16) | {"PhotometricInterpretation": "MONOCHROME2", "PixelPresentation": "COLOR"}
    with pytest.raises(UserError, match="supplemental"):
        slices_of(dicom(tmp_path / "a.dcm", INDICES, **fields))


# Windows, tables and padding


def ct(path: Path, values: npt.NDArray[Any] = HU, **fields: Any) -> Path:
    return dicom(path, (values + 1000).astype(np.uint16), **({"RescaleSlope": 1, "RescaleIntercept": -1000} | fields))


def shown(values: npt.NDArray[Any], function: str, centre: float, width: float) -> npt.NDArray[np.float64]:
    """PS3.3 C.11.2.1.2 and C.11.2.1.3 with an output of 0 to 255."""
    if function == "SIGMOID":
        out: npt.NDArray[np.float64] = 255 / (1 + np.exp(-4 * (values - centre) / width))
        return out
    shift, less = (0.5, 1) if function == "LINEAR" else (0, 0)
    share = (values - (centre - shift)) / (width - less) + 0.5
    return share.clip(0, 1) * 255


@pytest.mark.parametrize(
    "function",
    [
        case("DICOM windows", "LINEAR", "LINEAR"),
        case("DICOM windows", "LINEAR_EXACT", "LINEAR_EXACT"),
        case("DICOM windows", "SIGMOID", "SIGMOID"),
    ],
)
def test_window_functions(tmp_path: Path, function: str) -> None:
    values = np.arange(-12, 13).reshape(5, 5)
    path = ct(tmp_path / "a.dcm", values, WindowCenter=2, WindowWidth=10, VOILUTFunction=function)
    assert np.abs(one_of(path) - shown(values, function, 2, 10)).max() <= 0.5 + 1e-9
    whole = pydicom.dcmread(path)
    whole.BitsStored = 16
    theirs = apply_voi_lut(apply_modality_lut(whole.pixel_array, whole), whole)
    assert np.allclose(one_of(path), (theirs + 1000) / 65535 * 255, atol=0.51)


@pytest.mark.case("DICOM windows", "an unknown VOI LUT Function is refused")
@pytest.mark.case("DICOM windows", "a width below 1, as of floating-point data")
@pytest.mark.case("DICOM windows", "a negative slope")
@pytest.mark.case("DICOM grey", "12 bits at the upper end of 16, as before 2014, are refused")
def test_windows_and_bits_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TANH"):
        pixels(ct(tmp_path / "a.dcm", WindowCenter=2, WindowWidth=10, VOILUTFunction="TANH"))
    path = dicom(
        tmp_path / "a.dcm",
        np.array([[0, 25], [50, 100]], dtype=np.uint16),
        RescaleSlope=0.01,
        RescaleIntercept=0,
        WindowCenter=0.25,
        WindowWidth=0.5,
    )
    assert one_of(path) == [[0, 128], [255, 255]]
    path = dicom(
        tmp_path / "a.dcm",
        np.array([[0, 100], [200, 255]], dtype=np.uint8),
        RescaleSlope=-1,
        RescaleIntercept=255,
        WindowCenter=127.5,
        WindowWidth=255,
        VOILUTFunction="LINEAR_EXACT",
    )
    assert one_of(path) == [[255, 155], [55, 0]]
    path = dicom(tmp_path / "a.dcm", np.array([[0, 0x7FF0]], dtype=np.uint16), BitsStored=12)
    whole = pydicom.dcmread(path)
    whole.HighBit = 15
    whole.save_as(path)
    with pytest.raises(UserError, match="has its bits elsewhere than at the lower end"):
        pixels(path)


@pytest.mark.parametrize(
    "fields",
    [
        case("DICOM windows", "width 0 is none", {"WindowCenter": 40, "WindowWidth": 0}),
        case("DICOM windows", "empty ones are none", {"WindowCenter": None, "WindowWidth": None}),
        case("DICOM windows", "without one the range of the file", {}),
    ],
)
def test_no_window(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert one_of(ct(tmp_path / "a.dcm", **fields)) == [[0, 128], [133, 255]]


@pytest.mark.case("DICOM grey", "a slope without an intercept, and the other way round: 0 and 1 are meant")
@pytest.mark.parametrize(("fields", "grey"), [({"RescaleSlope": 2}, 80), ({"RescaleIntercept": -10}, 30)])
def test_half_of_a_rescale(fields: dict[str, float], grey: int, tmp_path: Path) -> None:
    """As GDCM reads them. With this window each value from 0 to 255 is its own grey level."""
    path = dicom(tmp_path / "a.dcm", np.array([[0, 40]], dtype=np.int16), **fields)
    assert one_of(path, (127.5, 255.0))[0][1] == grey


@pytest.mark.case("DICOM grey", "a slope of 0, or one that is no number, is refused")
@pytest.mark.parametrize("fields", [{"RescaleSlope": 0}, {"RescaleSlope": "inf"}, {"RescaleIntercept": "nan"}])
def test_a_rescale_that_cannot_be(fields: dict[str, Any], tmp_path: Path) -> None:
    path = dicom(tmp_path / "a.dcm", np.array([[0, 1]], dtype=np.int16), **({"RescaleSlope": 1} | fields))
    with pytest.raises(UserError, match=r"a.dcm cannot be read \(ValueError: Rescale Slope"):
        one_of(path)


def table(entries: Sequence[int], first: int, bits: int) -> Items:
    made = item(LUTDescriptor=[len(entries), first, bits])
    made.add_new("LUTData", "US", list(entries))
    return Items([made])


@cases(
    "DICOM tables",
    "sequence expected",
    {
        "VOI of 8 bits": (table([255, 10, 20, 30], 0, 8), [[255, 10], [20, 30]]),
        "VOI of 12 bits": (table([4095, 0, 819, 1638], 0, 12), [[255, 0], [51, 102]]),
        "VOI of 16 bits": (table([65535, 0, 257, 514], 0, 16), [[255, 0], [1, 2]]),
        "VOI that says 16 bits and holds 12": (table([4095, 0, 819, 1638], 0, 16), [[255, 0], [51, 102]]),
        "VOI that begins at 2: values before have its first entry": (table([0, 200], 2, 8), [[0, 0], [0, 200]]),
    },
)
def test_tables_of_interest(tmp_path: Path, sequence: Items, expected: list[list[int]]) -> None:
    path = dicom(tmp_path / "a.dcm", INDICES, VOILUTSequence=sequence, WindowCenter=2, WindowWidth=4)
    assert one_of(path) == expected


@pytest.mark.case("DICOM tables", "VOI of 8 bits with 4096 entries")
@pytest.mark.case("DICOM tables", "a data set's own window takes the place of a VOI table")
@pytest.mark.case("DICOM tables", "a presentation table is refused")
def test_tables_that_are_long_or_give_way(tmp_path: Path) -> None:
    values = np.array([[0, 1000], [4000, 4095]], dtype=np.uint16)
    sequence = table([entry // 16 for entry in range(4096)], 0, 8)
    assert one_of(dicom(tmp_path / "a.dcm", values, VOILUTSequence=sequence)) == [[0, 62], [250, 255]]
    path = dicom(tmp_path / "a.dcm", INDICES, VOILUTSequence=table([255, 10, 20, 30], 0, 8))
    assert one_of(path, (1.5, 3.0)) == [[0, 85], [170, 255]]
    with pytest.raises(UserError, match="presentation"):
        slices_of(dicom(tmp_path / "a.dcm", INDICES, PresentationLUTSequence=table([0, 1], 0, 8)))


@pytest.mark.parametrize(
    ("values", "first"),
    [
        case("DICOM tables", "modality, unsigned of 8 bits", INDICES, 0),
        case("DICOM tables", "modality, from a negative value on", INDICES.astype(np.int16) - 5, -5),
    ],
)
def test_tables_of_the_modality(tmp_path: Path, values: npt.NDArray[Any], first: int) -> None:
    sequence = table([300, 0, 100, 400], first, 16)
    sequence[0].ModalityLUTType = "US"
    path = dicom(tmp_path / "a.dcm", values, ModalityLUTSequence=sequence)
    assert one_of(path) == [[191, 0], [64, 255]]
    assert one_of(path, (200.0, 200.0)) == [[255, 0], [0, 255]]
    whole = pydicom.dcmread(path)
    assert apply_modality_lut(whole.pixel_array.astype(np.int32), whole).tolist() == [[300, 0], [100, 400]]


@pytest.mark.parametrize(
    "fields",
    [
        case("DICOM grey", "MONOCHROME1", {"PhotometricInterpretation": "MONOCHROME1"}),
        case("DICOM grey", "INVERSE", {"PresentationLUTShape": "INVERSE"}),
        case(
            "DICOM grey",
            "MONOCHROME1 and INVERSE say the same, as in digital radiography",
            {"PhotometricInterpretation": "MONOCHROME1", "PresentationLUTShape": "INVERSE"},
        ),
    ],
)
def test_white_is_low(tmp_path: Path, fields: dict[str, Any]) -> None:
    window = {"WindowCenter": 40, "WindowWidth": 400}
    assert one_of(ct(tmp_path / "a.dcm", **window, **fields)) == [[255, 153], [127, 0]]


@pytest.mark.parametrize(
    "fields",
    [
        case("DICOM grey", "padding", {"PixelPaddingValue": -32768}),
        case("DICOM grey", "padding up to a limit", {"PixelPaddingValue": -32768, "PixelPaddingRangeLimit": -30000}),
        case("DICOM grey", "padding down to a limit", {"PixelPaddingValue": -30000, "PixelPaddingRangeLimit": -32768}),
        case(
            "DICOM grey",
            "padding is black in MONOCHROME1 too",
            {"PixelPaddingValue": -32768, "PhotometricInterpretation": "MONOCHROME1"},
        ),
    ],
)
def test_padding_is_black(tmp_path: Path, fields: dict[str, Any]) -> None:
    low = -31000 if "PixelPaddingRangeLimit" in fields else -32768
    values = np.array([[-32768, low], [10, 20], [60, 110]], dtype=np.int16)
    expected = np.array([0, 26, 128, 255])
    if "PhotometricInterpretation" in fields:
        expected = 255 - expected
    found = one_of(dicom(tmp_path / "a.dcm", values, **fields))
    assert found == [[0, 0], expected[:2].tolist(), [expected[2], expected[3]]]


@pytest.mark.case("DICOM grey", "signed padding that is written without its sign")
@pytest.mark.case("DICOM grey", "nothing but padding")
@pytest.mark.case("DICOM grey", "signed of 12 bits in 16")
@pytest.mark.case("DICOM grey", "an overlay in the unused upper bits")
@pytest.mark.case("DICOM grey", "floating-point pixels with NaN")
@pytest.mark.case("DICOM grey", "a mask of one bit")
def test_grey_of_other_kinds(tmp_path: Path) -> None:
    values = np.array([[-2000, 0], [50, 100]], dtype=np.int16)
    path = dicom(tmp_path / "a.dcm", values)
    whole = pydicom.dcmread(path)
    whole.add_new("PixelPaddingValue", "US", 63536)
    whole.save_as(path)
    assert one_of(path) == [[0, 0], [128, 255]]
    path = dicom(tmp_path / "a.dcm", np.full((2, 2), 7, dtype=np.uint16), PixelPaddingValue=7)
    assert one_of(path) == [[0, 0], [0, 0]]
    values = np.array([[-2048, -1024], [0, 2047]], dtype=np.int16)
    stored = (values.astype(np.int32) & 0x0FFF).astype(np.uint16).tobytes()  # without the sign in the upper bits
    found = one_of(dicom(tmp_path / "a.dcm", values, stored=stored, BitsStored=12), (0.0, 4096.0))
    assert found == [[0, 64], [128, 255]]
    values = np.array([[0xF000, 0x1400], [0x0800, 0x0FFF]], dtype=np.uint16)
    found = one_of(dicom(tmp_path / "a.dcm", values, BitsStored=12), (2047.5, 4095.0))
    assert found == [[0, 64], [128, 255]]
    values = np.array([[np.nan, 0.5], [1.0, 1.5]], dtype=np.float32)
    path = dicom(tmp_path / "a.dcm", values.view(np.uint32))
    whole = pydicom.dcmread(path)
    del whole.PixelData, whole.PixelRepresentation, whole.BitsStored, whole.HighBit
    whole.FloatPixelData = values.tobytes()
    whole.save_as(path)
    assert one_of(path) == [[0, 0], [128, 255]]
    bits = np.array([[0, 1, 0, 1], [1, 1, 0, 0]], dtype=np.uint8)
    stored = np.packbits(bits.ravel(), bitorder="little").tobytes() + b"\0"
    found = one_of(dicom(tmp_path / "a.dcm", bits, stored=stored, BitsAllocated=1, BitsStored=1))
    assert found == (bits * 255).tolist()


@pytest.mark.parametrize(
    ("shape", "signed"),
    [
        case("DICOM encodings", "JPEG 2000 grey of 16 bits", (4, 4), False),
        case("DICOM encodings", "JPEG 2000 grey in three frames", (3, 4, 4), False),
    ],
)
def test_jpeg_2000_grey(tmp_path: Path, shape: tuple[int, ...], signed: bool) -> None:
    values = np.random.default_rng(0).integers(0, 4096, shape, dtype=np.uint16)
    streams = []
    for frame in values.reshape(-1, *shape[-2:]):
        stream = BytesIO()
        Image.fromarray(frame).save(stream, "JPEG2000", irreversible=False, no_jp2=True)
        streams.append(stream.getvalue())
    path = dicom(tmp_path / "a.dcm", values, stored=encapsulate(streams), syntax=pydicom.uid.JPEG2000Lossless)
    expected = np.rint(values.reshape(-1, *shape[-2:]) / 4095 * 255)
    assert np.array_equal(pixels(path, (2047.5, 4095.0)), expected)


@pytest.mark.parametrize(
    "syntax",
    [
        case("DICOM encodings", "deflated", "1.2.840.10008.1.2.1.99"),
        case("DICOM encodings", "implicit VR", "1.2.840.10008.1.2"),
        case("DICOM encodings", "big endian, with a VOI table", "1.2.840.10008.1.2.2"),
        case("DICOM encodings", "RLE grey of 16 bits", "1.2.840.10008.1.2.5"),
    ],
)
def test_other_encodings(tmp_path: Path, syntax: str) -> None:
    values = np.array([[0, 1], [2, 3]], dtype=np.uint16)
    whole = pydicom.dcmread(dicom(tmp_path / "plain.dcm", values, VOILUTSequence=table([0, 51, 102, 255], 0, 8)))
    if syntax.endswith("5"):
        whole.compress(syntax)
        whole.save_as(tmp_path / "a.dcm")
    else:
        if syntax.endswith("2.2"):
            whole.PixelData = values.astype(">u2").tobytes()
        whole.file_meta.TransferSyntaxUID = pydicom.uid.UID(syntax)
        little, implicit = not syntax.endswith("2.2"), syntax.endswith("1.2")
        pydicom.dcmwrite(
            tmp_path / "a.dcm", whole, little_endian=little, implicit_vr=implicit, enforce_file_format=False
        )
    assert one_of(tmp_path / "a.dcm") == [[0, 51], [102, 255]]


@cases(
    "DICOM encodings",
    "syntax words",
    {
        "JPEG Lossless: the message names what to install": (
            "1.2.840.10008.1.2.4.70",
            "pip install pylibjpeg pylibjpeg-libjpeg",
        ),
        "JPEG-LS: the message names what to install": ("1.2.840.10008.1.2.4.80", "pip install pylibjpeg"),
        "HTJ2K: the message names what to install": (
            "1.2.840.10008.1.2.4.201",
            "pip install pylibjpeg pylibjpeg-openjpeg",
        ),
        "a video is refused": ("1.2.840.10008.1.2.4.102", "convert it"),
    },
)
def test_encodings_that_are_not_installed(tmp_path: Path, syntax: str, words: str) -> None:
    uid = pydicom.uid.UID(syntax)
    if words.startswith("pip") and pydicom.pixels.get_decoder(uid).is_available:
        pytest.skip("a package for it is installed")
    path = dicom(tmp_path / "a.dcm", INDICES, stored=encapsulate([b"\0\0"]), syntax=uid)
    with pytest.raises(UserError) as caught:
        slices_of(path)  # the header is enough to say so
    assert words in str(caught.value)
    assert uid.name in str(caught.value)


@pytest.mark.case("DICOM encodings", "JPEG of 12 bits, which Pillow does not decode")
@pytest.mark.case("DICOM encodings", "a transfer syntax with a line break and an escape in its name")
def test_encodings_that_are_not_read(tmp_path: Path) -> None:
    values = QUARTERS[..., 0].astype(np.uint16)
    stream = BytesIO()
    Image.fromarray(QUARTERS[..., 0]).save(stream, "JPEG")
    stored = encapsulate([stream.getvalue()])
    path = dicom(tmp_path / "a.dcm", values, stored=stored, syntax=pydicom.uid.JPEGExtended12Bit, BitsStored=12)
    with pytest.raises(UserError, match="JPEG Extended") as caught:
        pixels(path)
    assert "\n" not in str(caught.value)
    path = dicom(tmp_path / "a.dcm", INDICES)
    raw = path.read_bytes().replace(b"1.2.840.10008.1.2.1", b"1.2.840\n\x1b[31m\r8.1.2.1"[:19].ljust(19, b"1"), 1)
    path.write_bytes(raw)
    with pytest.raises(UserError) as caught:
        pixels(path)
    assert str(caught.value).isprintable()


# Enhanced multi-frame


def enhanced(path: Path, own: Sequence[Dataset], shared: Dataset, **fields: Any) -> Path:
    frames = np.stack([HU, HU]) + 1000
    return dicom(
        path,
        frames.astype(np.uint16),
        PerFrameFunctionalGroupsSequence=Items(own),
        SharedFunctionalGroupsSequence=Items([shared]),
        **fields,
    )


def rescale(slope: float, intercept: float) -> dict[str, Any]:
    values = item(RescaleSlope=slope, RescaleIntercept=intercept, RescaleType="HU")
    return {"PixelValueTransformationSequence": Items([values])}


def window(centre: float, width: float, **fields: Any) -> dict[str, Any]:
    return {"FrameVOILUTSequence": Items([item(WindowCenter=centre, WindowWidth=width, **fields)])}


IN_WINDOW = [[0, 102], [128, 255]]


@pytest.mark.case("DICOM frames", "shared rescale, the data set's window")
@pytest.mark.case("DICOM frames", "shared rescale and window")
@pytest.mark.case("DICOM frames", "each frame has its own rescale")
@pytest.mark.case("DICOM frames", "each frame has its own window, which goes before the shared one and the file's")
@pytest.mark.case("DICOM frames", "one frame has a window, the other the range of the file")
@pytest.mark.case("DICOM frames", "a VOI table of one frame")
@pytest.mark.case("DICOM frames", "fewer functional groups than frames")
@pytest.mark.case("DICOM frames", "a negative number of frames")
def test_frames_have_functions_of_their_own(tmp_path: Path) -> None:
    path = enhanced(tmp_path / "a.dcm", [item(), item()], item(**rescale(1, -1000)))
    assert [frame.tolist() for frame in pixels(path, (40.0, 400.0))] == [IN_WINDOW, IN_WINDOW]
    path = enhanced(tmp_path / "a.dcm", [item(), item()], item(**rescale(1, -1000), **window(40, 400)))
    assert [frame.tolist() for frame in pixels(path)] == [IN_WINDOW, IN_WINDOW]
    path = enhanced(tmp_path / "a.dcm", [item(**rescale(1, -1000)), item(**rescale(2, -2000))], item())
    first, second = pixels(path, (40.0, 400.0))
    assert first.tolist() == IN_WINDOW
    assert second.tolist() == [[0, 102], [153, 255]]  # 80 HU
    own = [item(**window(40, 400)), item(**window(0, 100, VOILUTFunction="LINEAR_EXACT"))]
    shared = item(**rescale(1, -1000), **window(500, 10))
    first, second = pixels(enhanced(tmp_path / "a.dcm", own, shared, WindowCenter=-900, WindowWidth=5))
    assert first.tolist() == IN_WINDOW
    assert second.tolist() == [[0, 128], [230, 255]]
    first, second = pixels(enhanced(tmp_path / "a.dcm", [item(**window(40, 400)), item()], item(**rescale(1, -1000))))
    assert first.tolist() == IN_WINDOW
    assert second.tolist() == [[0, 128], [133, 255]]
    lut = {"FrameVOILUTSequence": Items([item(VOILUTSequence=table([0] * 1000 + [100] * 1001, 0, 8))])}
    first, second = pixels(enhanced(tmp_path / "a.dcm", [item(**lut), item(**window(1040, 400))], item()))
    assert first.tolist() == [[0, 100], [100, 100]]
    assert second.tolist() == IN_WINDOW
    with pytest.raises(UserError, match=r"a\.dcm"):
        pixels(enhanced(tmp_path / "a.dcm", [item()], item(**rescale(1, -1000))))
    with pytest.raises(UserError, match="-2 frames"):
        slices_of(dicom(tmp_path / "a.dcm", INDICES, NumberOfFrames=-2))


# Which files are DICOM


@pytest.mark.parametrize(
    "name",
    [
        case("files left out", "DICOM without an ending is read", "IM000001"),
        case("files left out", "DICOM as .IMA is read", "a.IMA"),
        case("files left out", "DICOM named as its UID is read", "1.2.840.113619.2.5"),
        case("files left out", "DICOM as .DCM is read", "a.DCM"),
        case("files left out", "DICOM as .dicom is read", "a.dicom"),
    ],
)
def test_dicom_is_recognised(tmp_path: Path, name: str) -> None:
    path = dicom(tmp_path / "k" / name, np.array([[0, 1], [2, 3]], dtype=np.uint16), Modality="CT")
    assert is_medical(path)
    assert one_of(path) == [[0, 85], [170, 255]]


@pytest.mark.case("files left out", "hidden, empty, short, text and missing files are no DICOM")
@pytest.mark.case("files left out", "DICOM without an image gives no slices")
def test_what_has_no_image(tmp_path: Path) -> None:
    dicom(tmp_path / ".a", INDICES)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"\0" * 100)
    (tmp_path / "notes.txt").write_text("DICM " * 100)
    assert not any(is_medical(tmp_path / name) for name in (".a", "empty", "short", "notes.txt", "missing"))
    path = dicom(tmp_path / "report.dcm", INDICES)
    whole = pydicom.dcmread(path)
    del whole.PixelData, whole.Rows, whole.Columns
    whole.save_as(path)
    assert slices_of(path) == []


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        case("patients", "by the patient's ID, without blanks around", "id", "P 7"),
        case("patients", "by study", "study", "1.2.3"),
        case("patients", "by series", "series", "1.2.3.4"),
        case("patients", "by file", "file", None),
    ],
)
def test_who_is_a_patient(tmp_path: Path, by: Any, expected: str | None) -> None:
    path = dicom(tmp_path / "a.dcm", INDICES, PatientID=" P 7 ", StudyInstanceUID="1.2.3", SeriesInstanceUID="1.2.3.4")
    (only,) = slices_of(path, patient=by)
    assert only.patient == (expected or str(path))


# NIfTI


def nifti(path: Path, values: npt.NDArray[Any], affine: npt.NDArray[Any] | None = None, **scaling: float) -> Path:
    image = nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine)
    nibabel.save(image, path)
    if scaling:  # nibabel does not write such headers itself
        raw = bytearray(path.read_bytes())
        for offset, value in ((112, scaling["slope"]), (116, scaling["intercept"])):
            raw[offset : offset + 4] = np.float32(value).tobytes()
        path.write_bytes(raw)
    return path


VOLUME = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def axial(volume: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A volume of (right, front, head) as slices seen from below with the front above, 0 to 255 over its range."""
    share = (volume - np.nanmin(volume)) / (np.nanmax(volume) - np.nanmin(volume))
    out = np.empty((volume.shape[2], volume.shape[1], volume.shape[0]))
    for x, y, z in np.ndindex(*volume.shape):
        out[z, volume.shape[1] - 1 - y, volume.shape[0] - 1 - x] = share[x, y, z] * 255
    return np.rint(np.nan_to_num(out))


@pytest.mark.parametrize(
    "beyond",
    [
        case("NIfTI", "NaN is black and not in the range", np.nan),
        case("NIfTI", "infinity is black and not in the range", np.inf),
        case("NIfTI", "minus infinity is black and not in the range", -np.inf),
    ],
)
def test_only_finite_values_make_the_range(tmp_path: Path, beyond: float) -> None:
    values = VOLUME + 1000
    values[0, 0, 0] = np.nan
    expected = axial(values)
    values[0, 0, 0] = beyond
    assert np.array_equal(pixels(nifti(tmp_path / "a.nii.gz", values)), expected)


@pytest.mark.case("NIfTI", "nothing finite is black")
@pytest.mark.case("NIfTI", "a single axial plane of two axes is one slice")
@pytest.mark.case("NIfTI", "a single sagittal plane of two axes is refused")
@pytest.mark.case("NIfTI", "RGB24 has colour")
@pytest.mark.case("NIfTI", "large numbers that differ little keep their grey levels")
@pytest.mark.case("NIfTI", "the range of float32 does not overflow")
@pytest.mark.case("NIfTI", "an affine that says nothing is refused in one line")
def test_nifti_of_other_kinds(tmp_path: Path) -> None:
    assert not np.any(pixels(nifti(tmp_path / "a.nii", np.full((2, 2, 2), np.nan, dtype=np.float32))))
    plane = VOLUME[:, :, 0]
    assert np.array_equal(pixels(nifti(tmp_path / "a.nii", plane)), axial(plane[..., np.newaxis]))
    affine = np.array([[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]], dtype=float)
    with pytest.raises(UserError, match="not axial"):
        slices_of(nifti(tmp_path / "a.nii", VOLUME[0], affine))
    kind = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])
    values = np.zeros((2, 3, 4), dtype=kind)
    values[1, 2, 3] = (200, 10, 20)  # right, front, head
    path = nifti(tmp_path / "a.nii", values)
    found = pixels(path)
    assert len(found) == 4
    assert found[3][0, 0].tolist() == [200, 10, 20]
    assert np.count_nonzero(found) == 3
    assert all(one.colour for one in slices_of(path))
    path = nifti(tmp_path / "a.nii", VOLUME.astype(np.float64) + 2.0**30)
    assert np.array_equal(pixels(path), axial(VOLUME))
    values = np.array([-3e38, 0, 3e38, 3e38] * 2, dtype=np.float32).reshape(2, 2, 2)
    assert np.array_equal(pixels(nifti(tmp_path / "a.nii", values)), axial(values.astype(np.float64)))
    image = nibabel.Nifti1Image(VOLUME, None)
    image.header.set_sform(np.diag([1.0, 1.0, 0.0, 1.0]), code=1)
    path = tmp_path / "a.nii"
    path.write_bytes(image.to_bytes())
    with pytest.raises(UserError, match=r"a\.nii") as caught:
        slices_of(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "shape",
    [
        case("NIfTI", "a fourth axis of length one is dropped", (2, 3, 4, 1)),
        case("NIfTI", "a fourth and fifth axis of length one are dropped", (2, 3, 4, 1, 1)),
    ],
)
def test_trailing_axes_of_one(tmp_path: Path, shape: tuple[int, ...]) -> None:
    assert np.array_equal(pixels(nifti(tmp_path / "a.nii", VOLUME.reshape(shape))), axial(VOLUME))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        case("NIfTI", "several volumes", np.zeros((2, 2, 2, 3), np.float32), "2×2×2×3"),
        case("NIfTI", "vectors in a fifth axis", np.zeros((2, 2, 2, 1, 3), np.float32), "2×2×2×1×3"),
        case("NIfTI", "complex numbers", np.zeros((2, 2, 2), np.complex64), "complex"),
    ],
)
def test_nifti_that_is_not_read(tmp_path: Path, values: npt.NDArray[Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        slices_of(nifti(tmp_path / "a.nii", values))
    assert "two axes" not in str(caught.value)


@pytest.mark.parametrize(
    "slope",
    [
        case("NIfTI", "slope 0 means no scaling", 0.0),
        case("NIfTI", "slope NaN means no scaling", np.nan),
        case("NIfTI", "a slope", 3.0),
        case("NIfTI", "a negative slope", -2.0),
    ],
)
def test_slopes(tmp_path: Path, slope: float) -> None:
    whole = VOLUME.astype(np.int16)
    scale = slope if slope and np.isfinite(slope) else 1.0
    intercept = 7.0 if scale == slope else 0.0
    path = nifti(tmp_path / "a.nii", whole, slope=slope, intercept=intercept)
    assert np.array_equal(pixels(path), axial(whole * scale + intercept))


@pytest.mark.parametrize(
    "order",
    [
        case("NIfTI", "a sagittal volume is turned", (1, 2, 0)),
        case("NIfTI", "a coronal volume is turned", (0, 2, 1)),
    ],
)
def test_volumes_are_turned(tmp_path: Path, order: tuple[int, int, int]) -> None:
    affine = np.zeros((4, 4))
    affine[3, 3] = 1
    for stored, world in enumerate(order):
        affine[world, stored] = 1
    path = nifti(tmp_path / "a.nii", VOLUME.transpose(order), affine)
    assert np.array_equal(pixels(path), axial(VOLUME))
    assert len(slices_of(path)) == 4


@pytest.mark.case("patients", "what a model predicts of DICOM without an ending is what it trained on")
def test_prediction_reads_by_content(tmp_path: Path) -> None:
    from fedshift.data.domain import Preprocessing

    dicom(tmp_path / "new" / "IM1", np.array([[0, 1], [2, 3]], dtype=np.uint16))
    half = (0.5,)
    names, inputs = load_for_prediction(
        tmp_path / "new", Preprocessing(kind="image", channels=1, size=2, mean=half, std=half, window=(1.5, 3.0))
    )
    assert names == ["IM1"]
    assert np.asarray(inputs).tolist() == [[[[0, 85], [170, 255]]]]


@pytest.mark.case("bit flips", "300 damaged files of DICOM and NIfTI: pixels or one line")
def test_damaged_files(tmp_path: Path) -> None:
    kinds = [
        ct(tmp_path / "window.dcm", WindowCenter=40, WindowWidth=400, PixelPaddingValue=3),
        dicom(tmp_path / "palette.dcm", INDICES, **palette("2", 16)),
        dicom(tmp_path / "segmented.dcm", INDICES, **palette("segmented", 8)),
        dicom(tmp_path / "tables.dcm", INDICES, VOILUTSequence=table([255, 10, 20, 30], 0, 8)),
        enhanced(tmp_path / "frames.dcm", [item(), item(**window(40, 400))], item(**rescale(1, -1000))),
        nifti(tmp_path / "volume.nii", VOLUME),
    ]
    generator, messages = np.random.default_rng(0), []
    for path in kinds:
        whole = path.read_bytes()
        for number in range(50):
            damaged = bytearray(whole)
            for position in generator.integers(0 if path.suffix == ".nii" else 132, len(whole), 1 + number % 4):
                damaged[position] = int(generator.integers(256))
            copy = tmp_path / f"{number}-{path.name}"
            copy.write_bytes(damaged[: len(whole) - (number % 10 == 9) * int(generator.integers(len(whole)))])
            try:
                for one in slices_of(copy)[:3]:
                    one.image.open()
            except UserError as error:
                messages.append(str(error))
    assert messages
    assert all(message.isprintable() for message in messages)
