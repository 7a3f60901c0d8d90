"""Rotated digits: every domain shows the same base images, rotated clockwise by its angle.

Source: Ghifary, Kleijn, Zhang, Balduzzi, *Domain Generalization for Object Recognition with Multi-task Autoencoders*,
ICCV 2015: 100 MNIST images per class, angles 0 to 75 degrees in steps of 15.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field

from fedshift.data.builders import mnist
from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest
from fedshift.data.locate import load_npz, require
from fedshift.errors import UserError
from fedshift.extras import import_extra

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
_ANGLES = (0.0, 15.0, 30.0, 45.0, 60.0, 75.0)


def turned_clockwise(images: Pixels, angle: float) -> Pixels:
    """Images rotated clockwise about their centre, bilinearly; corners are filled with 0.

    Bit for bit the same on every processor: torch's rotation takes instructions that differ in the last digit, and a
    pixel that lies between two grey levels then becomes either.

    ``images``: (n, h, w).
    """
    if angle == 0:
        return images
    count, height, width = images.shape
    turn = math.radians(angle)
    cosine, sine = np.float32(math.cos(turn)), np.float32(math.sin(turn))
    # The source of each output pixel is its position rotated back, with y pointing down; the image is 2 by 2.
    x, y = _centres(width)[None, :], _centres(height)[:, None]
    across = x * cosine + y * np.float32(sine * np.float32(height / width))
    down = x * np.float32(-sine * np.float32(width / height)) + y * cosine
    left, to_right = _in_pixels(across, width)
    top, to_bottom = _in_pixels(down, height)
    item = np.float32(1)
    weights = [(item - to_right) * (item - to_bottom), to_right * (item - to_bottom)]
    weights += [(item - to_right) * to_bottom, to_right * to_bottom]
    padded = np.zeros((count, height + 2, width + 2), np.float32)
    padded[:, 1:-1, 1:-1] = images
    turned = np.zeros(images.shape, np.float32)
    for weight, (row, column) in zip(weights, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        rows, columns = np.clip(top + 1 + row, 0, height + 1), np.clip(left + 1 + column, 0, width + 1)
        turned = _multiply_add(padded[:, rows, columns], weight, turned)
    grey: Pixels = np.rint(turned).clip(0, 255).astype(np.uint8)
    return grey


def _centres(size: int) -> npt.NDArray[np.float32]:
    """Positions of the pixels' centres along a side from −1 to 1, of two pixels or more."""
    numbers, step = np.arange(size), np.float32(2) / np.float32(size - 1)
    first, last = _multiply_add(numbers, step, -1), _multiply_add(size - 1 - numbers, -step, 1)
    return np.where(numbers < size // 2, first, last) * np.float32(size - 1) / np.float32(size)


def _in_pixels(places: npt.NDArray[np.float32], size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The pixel at or before each place of a side from −1 to 1, and how far behind it the place lies."""
    at = _multiply_add(places + np.float32(1), np.float32(size / 2), np.float32(-0.5))
    before = np.floor(at)
    return before.astype(np.int64), at - before


def _multiply_add(left: Any, right: Any, added: Any) -> npt.NDArray[np.float32]:
    """left · right + added, rounded once, as a fused multiply-add of float32 does."""
    exact = np.asarray(left, np.float64) * np.asarray(right, np.float64) + np.asarray(added, np.float64)
    return exact.astype(np.float32)


def base_images(images: Pixels, labels: Labels, per_class: int, seed: int, what: str) -> tuple[Pixels, Labels]:
    """Draw images at random, class after class.

    Args:
        images: (n, h, w).
        labels: (n,).

    Returns:
        Images and labels.

    Raises:
        UserError: a class has too few images.
    """
    counts = np.bincount(labels)
    if per_class > counts.min():
        raise UserError(
            f"data.per_class is {per_class}, but {what} has at most {counts.min()} images of every class: lower it"
        )
    generator = np.random.default_rng(seed)
    rows = np.concatenate(
        [generator.choice(np.flatnonzero(labels == label), per_class, replace=False) for label in range(len(counts))]
    )
    return images[rows], labels[rows]


class _Rotated(DataSource):
    """Base of the data sets of rotated digits."""

    letter: ClassVar[str]
    mean_and_std: ClassVar[tuple[float, float]]

    angles: tuple[Annotated[float, Field(ge=-360, le=360)], ...] = Field(
        _ANGLES, min_length=1, description="clockwise rotation of each domain in degrees"
    )
    per_class: int = Field(100, ge=1, description="base images per class")
    base_seed: int = Field(0, ge=0, description="seed of the draw of the base images")
    normalise: bool = Field(True, description="subtract the mean and divide by the deviation, not only divide by 255")

    @abstractmethod
    def base(self) -> tuple[Pixels, Labels]:
        """The base images (n, h, w) and their labels (n,)."""

    def build(self) -> DataSet:
        """Domains named by letter and angle. ``groups`` numbers the base images, equally in all domains."""
        if len(set(self.angles)) < len(self.angles):
            raise UserError("data.angles: each angle may appear once")
        images, labels = self.base()
        groups = np.arange(len(labels), dtype=np.int64)
        domains = {}
        for angle in self.angles:
            name = f"{self.letter}{angle:g}"
            domains[name] = Domain(name, turned_clockwise(images, angle)[:, np.newaxis], labels, groups)
        preprocessing = mnist.grey_preprocessing(images.shape[1], self.mean_and_std if self.normalise else None)
        return check_dataset(DataSet(self.name, domains, mnist.CLASSES, preprocessing, self.manifest()))


class RotatedDigits(_Rotated):
    """scikit-learn's 8×8 digits, enlarged and rotated; needs no download. Domains D0, D15, …, D75."""

    letter: ClassVar[str] = "D"
    mean_and_std: ClassVar[tuple[float, float]] = (0.305, 0.319)  # of all images at 16×16

    name: Literal["rotated_digits"] = "rotated_digits"
    size: int = Field(16, ge=8, le=256, description="height and width in pixels after bilinear enlargement")

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Rotated digits (UCI optical recognition of handwritten digits, as shipped with scikit-learn)",
            source="Alpaydin, Kaynak 1998, UCI Machine Learning Repository; sklearn.datasets.load_digits",
            licence="CC BY 4.0 (UCI)",
            how_to_get="comes with scikit-learn: nothing to download",
            layout="none",
            counts={f"D{angle:g}": 1000 for angle in _ANGLES},
            notes="1,797 images of 8×8 pixels, values 0 to 16 scaled to 0 to 255; 100 per class by default (at most "
            "174).",
        )

    def base(self) -> tuple[Pixels, Labels]:
        digits = import_extra("sklearn.datasets", extra="report", what="rotated_digits").load_digits()
        labels = np.asarray(digits.target, dtype=np.int64)
        small, labels = base_images(
            np.asarray(digits.images, dtype=np.float32), labels, self.per_class, self.base_seed, "scikit-learn's digits"
        )
        values = torch.from_numpy(np.asarray(small, dtype=np.float32) * (255 / 16)).unsqueeze(1)
        large = F.interpolate(values, size=(self.size, self.size), mode="bilinear", align_corners=False)
        return large[:, 0].round().clamp(0, 255).to(torch.uint8).numpy(), labels


class RotatedMnist(_Rotated):
    """MNIST training images, rotated. Domains M0, M15, …, M75 as in the papers, or any angles."""

    letter: ClassVar[str] = "M"
    mean_and_std: ClassVar[tuple[float, float]] = (0.1307, 0.3081)

    name: Literal["rotated_mnist"] = "rotated_mnist"

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Rotated MNIST",
            source="Ghifary et al., ICCV 2015; images: LeCun, Bottou, Bengio, Haffner, Proc. IEEE 1998",
            licence="commonly stated as CC BY-SA 3.0 (LeCun, Cortes)",
            how_to_get=mnist.HOW_TO_GET,
            layout=", ".join(mnist.CANDIDATES),
            sha256=mnist.SHA256,
            counts={f"M{angle:g}": 1000 for angle in _ANGLES},
            notes="Base images are drawn from the 60,000 training images with base_seed, 100 per class by default.",
        )

    def base(self) -> tuple[Pixels, Labels]:
        images, labels = mnist.train_images()
        return base_images(images, labels, self.per_class, self.base_seed, "MNIST")


_CANDIDATES = ("rotated_mnist_ghifary.npz",)
_PUBLISHED_ANGLES = (0, 15, 30, 45, 60, 75)
_HOW = (
    "The authors published MNIST_6rot.pkl.gz (repository ghif/mtae). Convert it once, with an unpickler that makes "
    "arrays only, to rotated_mnist_ghifary.npz (m0_x … m75_x float32 (1000, 16, 16) in [0, 1], m0_y … m75_y) and put "
    "that below FEDSHIFT_DATA"
)


class GhifaryMnist(DataSource):
    """The authors' 16×16 images: 1,000 base images, 100 per digit, rotated *counter-clockwise* by 0 to 75 degrees."""

    mean_and_std: ClassVar[tuple[float, float]] = (0.1317, 0.2577)  # of all six domains

    name: Literal["rotated_mnist_ghifary"] = "rotated_mnist_ghifary"
    normalise: bool = Field(True, description="subtract the mean and divide by the deviation, not only divide by 255")

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Rotated MNIST, the file of its authors",
            source="Ghifary, Kleijn, Zhang, Balduzzi, ICCV 2015; images: LeCun, Bottou, Bengio, Haffner, 1998",
            licence="derived from MNIST; none stated",
            how_to_get=_HOW,
            layout=", ".join(_CANDIDATES),
            sha256={"rotated_mnist_ghifary.npz": "45d2e5986c818680cc746fc9be25754bec3f124c30790b5fa88c8072dd577273"},
            counts={f"M{angle}": 1000 for angle in _PUBLISHED_ANGLES},
            notes="Grey values are rounded to 1/255. M45 is shifted by half a pixel against a rotation about the "
            "centre. Data set rotated_mnist rotates clockwise and keeps 28×28 pixels.",
        )

    def build(self) -> DataSet:
        """Domains M0 … M75 of uint8 images (1000, 1, 16, 16); ``groups`` is the number of the base image."""
        path = require("Ghifary's Rotated MNIST", _CANDIDATES, _HOW)
        arrays = load_npz(path, [f"m{angle}_{part}" for angle in _PUBLISHED_ANGLES for part in "xy"])
        domains = {}
        for angle in _PUBLISHED_ANGLES:
            images, labels = arrays[f"m{angle}_x"], arrays[f"m{angle}_y"]
            if images.shape != (1000, 16, 16) or labels.shape != (1000,):
                raise UserError(f"data file {path}: m{angle}_x has shape {images.shape}, expected (1000, 16, 16)")
            if not (np.isfinite(images).all() and images.min() >= 0 and images.max() <= 1):
                raise UserError(f"data file {path}: m{angle}_x has values outside [0, 1]")
            pixels = np.rint(images * 255).astype(np.uint8)[:, np.newaxis]
            domains[f"M{angle}"] = Domain(f"M{angle}", pixels, labels.astype(np.int64), np.arange(1000))
        preprocessing = mnist.grey_preprocessing(16, self.mean_and_std if self.normalise else None)
        return check_dataset(DataSet(self.name, domains, mnist.CLASSES, preprocessing, self.manifest()))
