"""Rotated MNIST as published by its authors: the file that early papers on domain generalization used.

Source: Ghifary, Kleijn, Zhang, Balduzzi, *Domain Generalization for Object Recognition with Multi-task Autoencoders*,
ICCV 2015.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fedshift.data.builders import mnist
from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest
from fedshift.data.locate import load_npz, require
from fedshift.errors import UserError

_CANDIDATES = ("rotated_mnist_ghifary.npz",)
_ANGLES = (0, 15, 30, 45, 60, 75)
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
            counts={f"M{angle}": 1000 for angle in _ANGLES},
            notes="Grey values are rounded to 1/255. M45 is shifted by half a pixel against a rotation about the "
            "centre. Data set rotated_mnist rotates clockwise and keeps 28×28 pixels.",
        )

    def build(self) -> DataSet:
        """Domains M0 … M75 of uint8 images (1000, 1, 16, 16); ``groups`` is the number of the base image."""
        path = require("Ghifary's Rotated MNIST", _CANDIDATES, _HOW)
        arrays = load_npz(path, [f"m{angle}_{part}" for angle in _ANGLES for part in "xy"])
        domains = {}
        for angle in _ANGLES:
            images, labels = arrays[f"m{angle}_x"], arrays[f"m{angle}_y"]
            if images.shape != (1000, 16, 16) or labels.shape != (1000,):
                raise UserError(f"data file {path}: m{angle}_x has shape {images.shape}, expected (1000, 16, 16)")
            if not (np.isfinite(images).all() and images.min() >= 0 and images.max() <= 1):
                raise UserError(f"data file {path}: m{angle}_x has values outside [0, 1]")
            pixels = np.rint(images * 255).astype(np.uint8)[:, np.newaxis]
            domains[f"M{angle}"] = Domain(f"M{angle}", pixels, labels.astype(np.int64), np.arange(1000))
        preprocessing = mnist.grey_preprocessing(16, self.mean_and_std if self.normalise else None)
        return check_dataset(DataSet(self.name, domains, mnist.CLASSES, preprocessing, self.manifest()))
