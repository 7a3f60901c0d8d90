"""Images of other depths and modes than 8 bits of grey or RGB: known pixels, made by hand."""

from __future__ import annotations

import random
import struct
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from fedshift import encryption
from fedshift.data.builders.image_folder import ImageFolder
from fedshift.data.builders.mask_folder import MaskFolder
from fedshift.data.images import decode, decode_all, has_colour, on_disk, unreadable
from fedshift.data.inference import load_for_prediction
from fedshift.errors import UserError
from tried import case, cases

TWELVE = np.array([[0, 819], [2457, 4095]], dtype=np.uint16)  # 0, 20, 60 and 100 % of 12 bits
SHARES = [[0, 51], [153, 255]]
WINDOW = (2047.5, 4095.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


def png(path: Path, values: npt.NDArray[Any], kind: int, bits: int) -> Path:
    """A PNG by hand, as Pillow writes no colours of 16 bits. ``kind``: 0 grey, 2 RGB, 4 grey and alpha."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2" if bits == 16 else "u1").tobytes() for row in values)
    if bits < 8:
        rows = b"".join(b"\0" + np.packbits(np.unpackbits(row[:, None], axis=1)[:, -bits:]).tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    return path


def tiff(
    path: Path, data: bytes, size: tuple[int, int], bits: int, *, white_is_zero: bool = False, form: int = 1
) -> Path:
    """A little-endian TIFF of grey by hand. ``form``: 1 unsigned, 2 signed, 3 floating-point numbers."""
    tags = [
        (256, size[0]),
        (257, size[1]),
        (258, bits),
        (259, 1),
        (262, 0 if white_is_zero else 1),
        (273, 8),
        (277, 1),
        (278, size[1]),
        (279, len(data)),
        (339, form),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    padded = data + b"\0" * (len(data) % 2)
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"II*\0" + struct.pack("<I", 8 + len(padded)) + padded + directory)
    return path


def grey(path: Path, window: tuple[float, float] | None = None) -> list[Any]:
    found: list[Any] = decode(on_disk(path), 1, 2, 2, window=window)[0].tolist()
    return found


def colour(path: Path) -> list[Any]:
    found: list[Any] = decode(on_disk(path), 3, 2, 2).transpose(1, 2, 0).tolist()
    return found


def twelve_bits() -> bytes:
    """The four values in rows of three bytes."""
    rows = []
    for first, second in TWELVE.tolist():
        rows.append(bytes([first >> 4, (first & 15) << 4 | second >> 8, second & 255]))
    return b"".join(rows)


def pgm(path: Path, values: npt.NDArray[Any], white: int) -> Path:
    path.write_bytes(f"P5 2 2 {white}\n".encode() + values.astype(">u2").tobytes())
    return path


@cases(
    "deep images",
    "write",
    {
        "12 bits in a PNG of 16": lambda path: png(path, TWELVE, 0, 16),
        "12 bits in a TIFF of 16": lambda path: tiff(path, TWELVE.tobytes(), (2, 2), 16),
        "12 bits in a TIFF of 16 with a sign": lambda path: tiff(
            path, TWELVE.astype("<i2").tobytes(), (2, 2), 16, form=2
        ),
        "12 bits in a TIFF of 32": lambda path: tiff(path, TWELVE.astype("<i4").tobytes(), (2, 2), 32, form=2),
        "a TIFF of real numbers": lambda path: tiff(path, TWELVE.astype("<f4").tobytes(), (2, 2), 32, form=3),
    },
)
def test_a_window_says_what_is_black_and_white(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / "a.png")
    assert grey(path, WINDOW) == SHARES
    assert grey(path, (819.0, 1638.0)) == [[0, 128], [255, 255]]
    assert not has_colour([on_disk(path)])


@cases(
    "deep images",
    "write",
    {
        "PNG of 16 bits": lambda path: png(path, TWELVE * 16, 0, 16),
        "TIFF of 16 bits": lambda path: tiff(path, (TWELVE * 16).tobytes(), (2, 2), 16),
        "TIFF of 16 bits in which 0 is white": lambda path: tiff(
            path, (65535 - TWELVE * 16).tobytes(), (2, 2), 16, white_is_zero=True
        ),
        "TIFF that says it has 12 bits": lambda path: tiff(path, twelve_bits(), (2, 2), 12),
        "PGM of 12 bits": lambda path: pgm(path, TWELVE, 4095),
        "PGM of 16 bits": lambda path: pgm(path, TWELVE * 16, 65535),
    },
)
def test_a_format_says_what_is_white(tmp_path: Path, write: Any) -> None:
    assert np.allclose(grey(write(tmp_path / "a.png")), SHARES, atol=1)


@pytest.mark.case("deep images", "a compressed TIFF of 16 bits, big endian")
@pytest.mark.case("deep images", "orientation tags are followed in 16 bits")
def test_tiffs_of_16_bits(tmp_path: Path) -> None:
    Image.fromarray(TWELVE.astype(">u2")).save(tmp_path / "a.tif", compression="tiff_lzw", big_tiff=False)
    assert grey(tmp_path / "a.tif", WINDOW) == SHARES
    image = Image.fromarray(TWELVE)
    image.save(tmp_path / "a.tif", tiffinfo={0x0112: 3})  # turned by 180 degrees
    assert grey(tmp_path / "a.tif", WINDOW) == [row[::-1] for row in SHARES[::-1]]


@pytest.mark.parametrize(
    ("bits", "form", "dtype", "kind"),
    [
        case("deep images", "16 bits with a sign: nothing says white", 16, 2, "<i2", "sign"),
        case("deep images", "32 bits: nothing says white", 32, 2, "<i4", "32 bits"),
        case("deep images", "32 bits unsigned: nothing says white", 32, 1, "<u4", "32 bits"),
        case("deep images", "real numbers: nothing says white", 32, 3, "<f4", "real"),
    ],
)
def test_nothing_says_what_is_white(tmp_path: Path, bits: int, form: int, dtype: str, kind: str) -> None:
    path = tiff(tmp_path / "a.tif", TWELVE.astype(dtype).tobytes(), (2, 2), bits, form=form)
    with pytest.raises(UserError, match=r"a\.tif") as caught:
        grey(path)
    assert all(word in str(caught.value) for word in (kind, "0 to 4095", "data.window", "[2047.5, 4095]"))


@pytest.mark.case("deep images", "NaN and infinity are black")
@pytest.mark.case("deep images", "TIFF of 8 bits with a sign is refused")
def test_numbers_that_are_not_finite_or_have_a_sign(tmp_path: Path) -> None:
    values = np.array([[np.nan, np.inf], [2457, 4095]], dtype="<f4")
    path = tiff(tmp_path / "a.tif", values.tobytes(), (2, 2), 32, form=3)
    assert grey(path, WINDOW) == [[0, 0], [153, 255]]
    with pytest.raises(UserError, match="2457 to 4095"):
        grey(path)
    path = tiff(tmp_path / "b.tif", np.full(4, np.nan, "<f4").tobytes(), (2, 2), 32, form=3)
    with pytest.raises(UserError, match="no finite number"):
        grey(path)
    path = tiff(tmp_path / "a.tif", np.array([-5, 0, 5, 100], "i1").tobytes(), (2, 2), 8, form=2)
    with pytest.raises(UserError, match=r"a\.tif"):
        grey(path)


# Modes of 8 bits


@pytest.mark.case("image modes", "RGB of 16 bits: its upper bits")
@pytest.mark.case("image modes", "grey with alpha, of 8 and of 16 bits")
@pytest.mark.case("image modes", "TIFF of 8 bits in which 0 is white")
@pytest.mark.case("image modes", "palette with transparent entries: their colours stay")
def test_modes_of_8_and_16_bits(tmp_path: Path) -> None:
    values = np.array([[[65535, 0, 0], [0, 65535, 0]], [[0, 0, 65535], [51400, 51400, 51400]]], dtype=np.uint16)
    assert colour(png(tmp_path / "a.png", values, 2, 16)) == [
        [[255, 0, 0], [0, 255, 0]],
        [[0, 0, 255], [200, 200, 200]],
    ]
    values = np.array([[[10, 255], [20, 0]], [[30, 128], [40, 255]]], dtype=np.uint16)
    assert grey(png(tmp_path / "a.png", values, 4, 8)) == [[10, 20], [30, 40]]
    assert grey(png(tmp_path / "b.png", values * 257, 4, 16)) == [[10, 20], [30, 40]]
    path = tiff(tmp_path / "a.tif", bytes([255, 204, 102, 0]), (2, 2), 8, white_is_zero=True)
    assert grey(path) == SHARES
    image = Image.new("P", (2, 2))
    image.putpalette([9, 8, 7, 1, 2, 3])
    image.putdata([0, 1, 1, 0])
    image.save(tmp_path / "a.png", transparency=bytes([0, 128]))
    assert colour(tmp_path / "a.png") == [[[9, 8, 7], [1, 2, 3]], [[1, 2, 3], [9, 8, 7]]]


@pytest.mark.parametrize(
    ("bits", "factor"),
    [
        case("image modes", "grey of 1 bit", 1, 255),
        case("image modes", "grey of 2 bits", 2, 85),
        case("image modes", "grey of 4 bits", 4, 17),
    ],
)
def test_few_bits(tmp_path: Path, bits: int, factor: int) -> None:
    values = np.array([[0, 1], [2**bits - 1, 0]], dtype=np.uint8)
    assert grey(png(tmp_path / "a.png", values, 0, bits)) == (values.astype(int) * factor).tolist()


@pytest.mark.parametrize(
    "name",
    [
        case("image modes", "CMYK as TIFF", "a.tif"),
        case("image modes", "CMYK as JPEG, which stores it turned over", "a.jpg"),
    ],
)
def test_four_inks(tmp_path: Path, name: str) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / name)  # magenta and yellow are red
    found = np.array(colour(tmp_path / name))
    assert np.allclose(found, [254, 0, 0], atol=3)


# Further pages and frames


def two(path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    first, second = (Image.new("RGB", (20, 20), ink) for ink in ((200, 0, 0), (0, 0, 200)))
    first.save(path, save_all=True, append_images=[second], **options)
    return path


@pytest.mark.parametrize(
    ("name", "options"),
    [
        case("files left out", "second page of a TIFF", "a.tif", {}),
        case("files left out", "second frame of a GIF", "a.gif", {}),
        case("files left out", "second frame of a WebP", "a.webp", {"lossless": True}),
        case("files left out", "second frame of an APNG", "a.png", {}),
    ],
)
def test_further_pages_are_counted(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    path = two(tmp_path / name, **options)
    made = decode_all([on_disk(path)], 3, 2, 2, "x")
    assert made.paged == (0,)
    assert np.allclose(made.pixels[0][:, 0, 0], [200, 0, 0], atol=1)
    again = decode_all([on_disk(path)], 3, 2, 2, "x")  # from the cache
    assert again.paged == (0,)


@pytest.mark.case("files left out", "the preview in a camera's JPEG is no second page")
@pytest.mark.case("files left out", "a GIF whose second frame is cut off is refused in one line")
def test_previews_and_cut_frames(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (20, 20), (200, 0, 0)), Image.new("RGB", (20, 20), (0, 0, 200))
    first.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[second])
    assert decode_all([on_disk(tmp_path / "a.jpg")], 3, 2, 2, "x").paged == ()
    whole = two(tmp_path / "a.gif").read_bytes()
    begin = whole.rindex(b"\x2c")  # the second frame's descriptor
    for end in range(begin - 12, begin + 12):
        (tmp_path / "b.gif").write_bytes(whole[:end])
        with suppress(UserError):  # and no other error
            assert decode(on_disk(tmp_path / "b.gif"), 3, 2, 2).shape == (3, 2, 2)


# Warnings of a data set


def folders(root: Path, deep: dict[str, int]) -> Path:
    """Two sites with two classes of three images of 16 bits each, whose largest value is ``deep``."""
    for site, white in deep.items():
        for label in ("0", "1"):
            for number in range(3):
                values = np.linspace(0, white - number, 64).reshape(8, 8).astype(np.uint16)
                png(root / site / label / f"{number}.png", values, 0, 16)
    return root


@pytest.mark.case("deep images", "12 bits in 16 are warned of with file, range and what to set, also from the cache")
@pytest.mark.case("deep images", "a window is kept for predictions")
def test_a_site_that_uses_little_of_its_range_and_a_window(tmp_path: Path) -> None:
    root = folders(tmp_path / "x", {"a": 4000, "b": 65535})
    for _ in range(2):
        data = ImageFolder(root=root, size=8).build()
        (said,) = [text for text in data.warnings if "white" in text]
        assert "site 'a'" in said
        assert all(word in said for word in ("0 to 4000", "65535", "[2047.5, 4095]", str(root / "a")))
    root = folders(tmp_path / "x", {"a": 4095, "b": 4095})
    data = ImageFolder(root=root, size=8, window=WINDOW).build()
    assert not [text for text in data.warnings if "white" in text]
    inputs = np.asarray(data.domains["a"].inputs)
    assert inputs.max() == 255
    _, predicted = load_for_prediction(root / "a", data.preprocessing)
    assert np.array_equal(predicted, inputs)
    dark = ImageFolder(root=root, size=8).build().domains["a"].inputs
    assert np.asarray(dark).max() == 16  # another window, another file of the cache


@pytest.mark.case("deep images", "12 bits in colours of 16 are warned of")
def test_dark_colours(tmp_path: Path) -> None:
    root = folders(tmp_path / "x", {"a": 65535, "b": 65535})
    for number in range(3):
        png(root / "a" / "0" / f"{number}.png", np.full((8, 8, 3), 4095, dtype=np.uint16), 2, 16)
    data = ImageFolder(root=root, size=8, window=(32767.5, 65535)).build()
    (said,) = [text for text in data.warnings if "white" in text]
    assert "8 bits" in said
    assert "data.window" not in said


@pytest.mark.case("deep images", "12 bits in the images of a segmentation")
def test_dark_images_with_masks(tmp_path: Path) -> None:
    for site in ("a", "b"):
        for number in range(3):
            png(tmp_path / "x" / site / "images" / f"{number}.png", np.full((8, 8), 4095), 0, 16)
            png(tmp_path / "x" / site / "masks" / "disc" / f"{number}.png", np.eye(8) * 256, 0, 16)
    data = MaskFolder(root=tmp_path / "x", size=8).build()
    assert sum("4095" in text for text in data.warnings) == 2
    data = MaskFolder(root=tmp_path / "x", size=8, window=WINDOW).build()
    assert not [text for text in data.warnings if "4095" in text]
    assert (np.asarray(data.domains["a"].inputs) == 255).all()
    assert data.preprocessing.window == WINDOW
    masks = data.domains["a"].masks
    assert np.array_equal(masks[0, 0], np.eye(8))


@pytest.mark.parametrize(
    ("data", "bits", "form"),
    [
        case("deep images", "masks of 16 bits", np.array([0, 1, 255, 256], "<u2"), 16, 1),
        case("deep images", "masks of 32 bits", np.array([0, 1, -1, 70000], "<i4"), 32, 2),
        case("deep images", "masks of real numbers", np.array([0, 0.25, 1, 7], "<f4"), 32, 3),
    ],
)
def test_deep_masks(tmp_path: Path, data: npt.NDArray[Any], bits: int, form: int) -> None:
    path = tiff(tmp_path / "a.tif", data.tobytes(), (2, 2), bits, form=form)
    assert decode(on_disk(path), 1, 2, 2, mask=True).tolist() == [[[0, 1], [1, 1]]]


@pytest.mark.case("deep images", "a cache file whose end is lost is made anew")
def test_a_cut_cache(tmp_path: Path) -> None:
    file = on_disk(png(tmp_path / "a.png", TWELVE, 0, 16))
    decode_all([file], 1, 2, 2, "x")
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[: -len(b"}")])
    with pytest.warns(UserWarning, match="damaged"):
        again = decode_all([file], 1, 2, 2, "x")
    assert again.deep[0].high == 4095
    assert kept.read_bytes() == whole


@pytest.mark.case("bit flips", "decoded images, 20 flips")
def test_flipped_bits_of_decoded_images(tmp_path: Path) -> None:
    files = [on_disk(png(tmp_path / f"{number}.png", TWELVE + number, 0, 16)) for number in range(3)]
    expected = decode_all(files, 1, 2, 2, "x")
    pixels, deep = expected.pixels.copy(), expected.deep
    (kept,) = (tmp_path / "cache").iterdir()
    whole, draws = kept.read_bytes(), random.Random("decoded")
    for _ in range(20):
        flip(kept, draws)
        with pytest.warns(UserWarning, match=kept.name):
            again = decode_all(files, 1, 2, 2, "x")
        assert np.array_equal(again.pixels, pixels)
        assert again.deep == deep
        assert kept.read_bytes() == whole


@pytest.mark.case("bit flips", "list of images that do not decode, 20 flips")
def test_flipped_bits_of_what_does_not_decode(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    files = [on_disk(png(tmp_path / "a.png", TWELVE, 0, 16)), on_disk(tmp_path / "broken.png")]
    expected, draws = unreadable(files), random.Random("unreadable")
    (kept,) = (tmp_path / "cache").iterdir()
    for _ in range(20):
        flip(kept, draws)
        with pytest.warns(UserWarning, match=kept.name):
            assert unreadable(files) == expected


def flip(path: Path, draws: random.Random) -> None:
    """Turn one bit of a file."""
    data = bytearray(path.read_bytes())
    data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    path.write_bytes(data)


@pytest.mark.case("image modes", "no warning of Pillow reaches the user for ordinary modes")
def test_quiet(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            options = {"transparency": bytes([0, 128])} if mode == "P" else {}
            Image.new(mode, (4, 4)).save(tmp_path / "a.png", **options)
            assert decode(on_disk(tmp_path / "a.png"), 3, 2, 2).shape == (3, 2, 2)


def test_the_cache_is_encrypted_where_a_key_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded images and the names of unreadable files, which nothing else writes down."""
    pytest.importorskip("cryptography")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12), dtype=np.uint8)
    for site in ("north", "south"):
        for name in ("ill", "well"):
            folder = tmp_path / "photos" / site / name
            folder.mkdir(parents=True)
            Image.fromarray(pixels).save(folder / "a.png")
    (folder / "Doe.png").write_bytes(b"no image")
    source = ImageFolder(root=tmp_path / "photos", size=12, on_corrupt="skip")
    plain = np.asarray(source.build().domains["north"].inputs)
    written = [one.read_bytes() for one in (tmp_path / "cache").iterdir()]
    for known in (pixels.tobytes(), b"Doe.png"):
        assert any(known in one for one in written)
    monkeypatch.setenv(encryption.KEY, encryption.new_key())
    with pytest.warns(UserWarning, match="again"):
        assert np.array_equal(source.build().domains["north"].inputs, plain)
    written = [one.read_bytes() for one in (tmp_path / "cache").iterdir() if one.stat().st_size]
    assert written
    assert all(one.startswith(encryption.MAGIC) for one in written)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr("fedshift.data.images._decode", None)  # what is there is read
        assert np.array_equal(source.build().domains["north"].inputs, plain)
    assert {one.relative_to(tmp_path).parts[0] for one in tmp_path.rglob("*") if one.is_file()} == {"photos", "cache"}
