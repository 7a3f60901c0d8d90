"""Five domains of digits at 32×32 in colour: MNIST, MNIST-M, USPS, computer fonts and photographs (Chars74K).

The usual "Digit-5" has SVHN and synthetic digits in place of the last two; see the manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field

from fedshift.data.builders import mnist
from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest, Preprocessing, Rows
from fedshift.data.images import as_channels_first, decode, is_image, on_disk
from fedshift.data.locate import cache_dir, find, load_npz, not_found, require
from fedshift.errors import UserError

DomainName = Literal["mnist", "mnist_m", "usps", "font", "natural"]
Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

SIZE = 32
_USPS = ("usps.npz",)
_MNIST_M = ("mnist_m_test9001.npz", "mnist_m.npz", "mnist_m")
_CHARS = ("chars74k_digits.npz", "English", "Chars74K/English")
_SHA256 = {
    **mnist.SHA256,
    "usps.npz": "ff1e144b09abdd42b3877b83440fe2c032f76dd3d7d247010b756c454c067fd9",
    "mnist_m_test9001.npz": "5bb845a7f570551c9e5a82eb4a25a78b99b8c81c2a3ceb54fb390ecaabf8e3e1",
    "chars74k_digits.npz": "17312f3ac42a3c81b6012781f56b62b4a56d6634174defd9e3d2951d8d6b882d",
}
_HOW = (
    "Put mnist.npz, usps.npz, mnist_m_test9001.npz and chars74k_digits.npz below FEDSHIFT_DATA, or the original "
    "layouts (MNIST/raw; mnist_m/mnist_m_test with mnist_m_test_labels.txt; English/Fnt and English/Img); torchvision "
    "downloads MNIST and USPS"
)


class FiveDigits(DataSource):
    """Digits 0 to 9 in five styles, 32×32, three channels, values scaled to [-1, 1] for the network."""

    name: Literal["five_digits"] = "five_digits"
    domains: tuple[DomainName, ...] = Field(
        ("mnist", "mnist_m", "usps", "font", "natural"), min_length=1, description="which domains, in which order"
    )
    samples_per_domain: int | None = Field(
        None, ge=1, description="at most this many samples of each domain, at random"
    )
    natural_good_only: bool = Field(False, description="only the photographs that Chars74K calls good (593 of 885)")
    base_seed: int = Field(0, ge=0, description="seed of the draw when samples_per_domain is given")

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Five digits: MNIST, MNIST-M, USPS, Chars74K fonts, Chars74K photographs",
            source="LeCun et al. 1998; Ganin et al., JMLR 2016; Hull, PAMI 1994; de Campos, Babu, Varma, VISAPP 2009",
            licence="MNIST commonly CC BY-SA 3.0; the others research use, no explicit licence",
            how_to_get=_HOW,
            layout=", ".join((*mnist.CANDIDATES, *_MNIST_M, *_USPS, *_CHARS)),
            sha256=_SHA256,
            counts={"mnist": 70000, "mnist_m": 9001, "usps": 9298, "font": 10160, "natural": 885},
            notes="Fonts and photographs stand in for the SVHN and synthetic digits of Digit-5. MNIST and USPS keep "
            "their own training and test rows. The fonts are black on white as found, MNIST and USPS white on black. "
            "MNIST-M is its 9,001-image test part, which was made from MNIST test images: with one of the two unseen, "
            "base_images: disjoint does not keep the other's versions of its images out. Its folder is in "
            "github.com/joffery/M-ADA (data/mnist_m).",
        )

    def build(self) -> DataSet:
        """The chosen domains. Grey images have three channels without taking three times the memory."""
        if len(set(self.domains)) < len(self.domains):
            raise UserError("data.domains: each domain may appear once")
        readers: dict[str, Callable[[], tuple[Pixels, Labels, int | None]]] = {
            "mnist": _mnist,
            "mnist_m": _mnist_m,
            "usps": _usps,
            "font": _font,
            "natural": lambda: _natural(self.natural_good_only),
        }
        domains: dict[str, Domain] = {name: self._domain(name, *readers[name]()) for name in self.domains}
        preprocessing = Preprocessing(kind="image", channels=3, size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
        return check_dataset(DataSet(self.name, domains, mnist.CLASSES, preprocessing, self.manifest()))

    def _domain(self, name: str, images: Pixels, labels: Labels, train_samples: int | None) -> Domain:
        rows = np.arange(len(labels))
        if self.samples_per_domain is not None and self.samples_per_domain < len(labels):
            chosen = np.random.default_rng(self.base_seed).choice(len(labels), self.samples_per_domain, replace=False)
            rows = np.sort(chosen)
        train_rows: Rows | None = None
        test_rows: Rows | None = None
        if train_samples is not None:
            train_rows, test_rows = np.flatnonzero(rows < train_samples), np.flatnonzero(rows >= train_samples)
        return Domain(name, _resize(images, rows), labels[rows], None, train_rows, test_rows)


def _resize(images: Pixels, rows: Rows) -> Pixels:
    """The chosen images (m, 3, 32, 32), resized bilinearly. Grey ones are a view that repeats their channel."""
    channels = as_channels_first(images)
    out = np.empty((len(rows), channels.shape[1], SIZE, SIZE), dtype=np.uint8)
    for begin in range(0, len(rows), 4096):
        part = torch.from_numpy(np.ascontiguousarray(channels[rows[begin : begin + 4096]]))
        if part.shape[2:] != (SIZE, SIZE):
            large = F.interpolate(part.float(), size=(SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False)
            part = large.round().clamp(0, 255).to(torch.uint8)
        out[begin : begin + 4096] = part.numpy()
    return np.broadcast_to(out, (len(rows), 3, SIZE, SIZE))


def _mnist() -> tuple[Pixels, Labels, int | None]:
    parts = [mnist.images_and_labels(part) for part in ("train", "test")]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), len(parts[0][1])


def _usps() -> tuple[Pixels, Labels, int | None]:
    path = find(_USPS)
    if path is not None:
        arrays = load_npz(path, ["x_train", "y_train", "x_test", "y_test"])
        images = _pixels(path, np.concatenate([arrays["x_train"], arrays["x_test"]]))
        return images, np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int64), len(arrays["y_train"])
    try:
        from torchvision.datasets import USPS

        parts = [USPS(str(cache_dir()), train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        raise not_found("USPS", _USPS, _HOW) from error
    labels = np.concatenate([np.asarray(part.targets, dtype=np.int64) for part in parts])
    return np.concatenate([part.data for part in parts]), labels, len(parts[0].targets)


def _mnist_m() -> tuple[Pixels, Labels, int | None]:
    path = require("MNIST-M", _MNIST_M, _HOW)
    if path.is_file():
        arrays = load_npz(path, ["x", "y"])
        return _pixels(path, arrays["x"]), arrays["y"].astype(np.int64), None
    listing = path / "mnist_m_test_labels.txt"
    try:
        lines = [line.split() for line in listing.read_text().splitlines() if line.strip()]
        labels = np.array([int(label) for _, label in lines], dtype=np.int64)
    except (OSError, ValueError) as error:
        raise UserError(f"data file {listing} is missing or not lines of 'file label'. {_HOW}") from error
    return _decode_images([path / "mnist_m_test" / name for name, _ in lines], 3), labels, None


def _font() -> tuple[Pixels, Labels, int | None]:
    path = require("Chars74K", _CHARS, _HOW)
    if path.is_file():
        arrays = load_npz(path, ["font_x", "font_y"])
        return _pixels(path, arrays["font_x"]), arrays["font_y"].astype(np.int64), None
    files, labels = _samples([path / "Fnt"])
    return _decode_images(files, 1), labels, None


def _natural(good_only: bool) -> tuple[Pixels, Labels, int | None]:
    path = require("Chars74K", _CHARS, _HOW)
    if path.is_file():
        arrays = load_npz(path, ["natural_x", "natural_y", "natural_good"])
        kept = arrays["natural_good"] == 1 if good_only else np.ones(len(arrays["natural_y"]), dtype=np.bool_)
        return _pixels(path, arrays["natural_x"])[kept], arrays["natural_y"].astype(np.int64)[kept], None
    kinds = ("GoodImg",) if good_only else ("GoodImg", "BadImag")
    files, labels = _samples([path / "Img" / kind / "Bmp" for kind in kinds])
    return _decode_images(files, 3), labels, None


def _pixels(path: Path, values: npt.NDArray[np.generic]) -> Pixels:
    if values.dtype != np.uint8:
        raise UserError(f"data file {path}: images are {values.dtype}, expected uint8")
    return values.astype(np.uint8, copy=False)


def _samples(folders: list[Path]) -> tuple[list[Path], Labels]:
    """Files and labels of Chars74K's folders Sample001 (digit 0) … Sample010 (digit 9)."""
    files: list[Path] = []
    labels: list[int] = []
    for folder in folders:
        for digit in range(10):
            result = sorted(path for path in folder.glob(f"Sample{digit + 1:03d}/*") if is_image(path.name))
            files += result
            labels += [digit] * len(result)
    if not files:
        raise UserError(f"no images in {folders[0]}/Sample001 to Sample010. {_HOW}")
    return files, np.array(labels, dtype=np.int64)


def _decode_images(files: list[Path], channels: int) -> Pixels:
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None:
        raise UserError(f"image {missing} does not exist. {_HOW}")
    return np.stack([decode(on_disk(path), channels, SIZE, SIZE) for path in files])
