"""PACS as 1280 features of a frozen MobileNetV2. Training takes minutes instead of hours."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedshift.data.builders.pacs import CLASSES, COUNTS, DOMAINS, official_rows
from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest, Preprocessing
from fedshift.data.locate import load_npz, require
from fedshift.errors import UserError

_CANDIDATES = ("pacs_mobilenetv2.npz",)
_HOW = "Put pacs_mobilenetv2.npz below FEDSHIFT_DATA (x, y, domain, path: pooled ImageNet MobileNetV2 features of PACS)"


class PacsFeatures(DataSource):
    """The global-average-pooled output (≥ 0) of an ImageNet MobileNetV2 for every PACS image."""

    name: Literal["pacs_features"] = "pacs_features"

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="PACS, frozen MobileNetV2 features (1280)",
            source="Li, Yang, Song, Hospedales, ICCV 2017; features: Sandler et al., CVPR 2018, ImageNet weights",
            licence="as PACS (research use); weights Apache-2.0",
            how_to_get=_HOW,
            layout=", ".join(_CANDIDATES) + "; pacs_splits/*.txt for the official split",
            sha256={"pacs_mobilenetv2.npz": "d4d664ca1f3145b60dec4600c278010699db05c0768c71abfad92e4b9ade5344"},
            counts=COUNTS,
            notes="Computed at 224 pixels from the 227-pixel images. Rows are sorted by path; the split lists are the "
            "same as for the images. `model: {name: frozen, backbone: …}` makes its own from data set pacs.",
        )

    def build(self) -> DataSet:
        """Four domains of float features (n, 1280)."""
        path = require("PACS features", _CANDIDATES, _HOW)
        arrays = load_npz(path, ["x", "y", "domain", "path"])
        features, labels, numbers, paths = (arrays[key] for key in ("x", "y", "domain", "path"))
        if features.ndim != 2 or not len(features) == len(labels) == len(numbers) == len(paths):
            raise UserError(f"data file {path}: x has shape {features.shape}, y {labels.shape}, domain {numbers.shape}")
        domains = {}
        for number, name in enumerate(DOMAINS):
            rows = np.flatnonzero(numbers == number)
            train_rows, test_rows = official_rows(name, [str(entry) for entry in paths[rows]])
            inputs = features[rows].astype(np.float32)
            domains[name] = Domain(name, inputs, labels[rows].astype(np.int64), None, train_rows, test_rows)
        return check_dataset(DataSet(self.name, domains, CLASSES, Preprocessing(kind="features"), self.manifest()))
