"""Office-Caltech10 as SURF bags of words (800 bins). Source: Gong, Shi, Sha, Grauman, CVPR 2012."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Manifest, Preprocessing
from fedshift.data.locate import load_npz, require
from fedshift.errors import UserError

DOMAINS = ("amazon", "caltech10", "dslr", "webcam")
CLASSES = (
    "backpack", "bike", "calculator", "headphones", "keyboard", "laptop", "monitor", "mouse", "mug", "projector",
)  # fmt: skip
_CANDIDATES = ("office_caltech10_surf.npz", "office_caltech10_surf", "surf", "Surf")
_HOW = (
    "Put office_caltech10_surf.npz below FEDSHIFT_DATA, or a folder surf with amazon_SURF_L10.mat, "
    "caltech10_SURF_L10.mat, …"
)


class OfficeCaltechSurf(DataSource):
    """Ten kinds of objects in pictures of a shop, a web collection, an SLR camera and a webcam; 800 features."""

    name: Literal["office_caltech_surf"] = "office_caltech_surf"
    scaling: Literal["zscore", "none"] = Field(
        "zscore",
        description="zscore: rows divided by their sum, then columns standardised within each domain; none: counts",
    )

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Office-Caltech10, SURF features",
            source="Saenko et al., ECCV 2010; Gong, Shi, Sha, Grauman, CVPR 2012; Caltech-256",
            licence="research use; no explicit licence",
            how_to_get=_HOW,
            layout=", ".join(_CANDIDATES),
            sha256={"office_caltech10_surf.npz": "24fb75245e234dd22ad727bb7e5ce61c360d889c684c0538e3cda393a49123aa"},
            counts={"amazon": 958, "caltech10": 1123, "dslr": 157, "webcam": 295},
            notes="The usual z-score uses the mean and deviation of each domain itself, unseen ones included (no "
            "labels). Rows are sorted by class. The .mat files are in the folder Surf of "
            "github.com/alecamo97/Optimal-Transport-Office-Caltech-dataset.",
        )

    def build(self) -> DataSet:
        """Four domains of float features (n, 800)."""
        path = require("Office-Caltech10 SURF", _CANDIDATES, _HOW)
        domains = {}
        for name in DOMAINS:
            counts, labels = _from_npz(path, name) if path.is_file() else _from_mat(path, name)
            if counts.ndim != 2 or counts.shape[1] != 800 or len(counts) != len(labels):
                raise UserError(f"{path}: features of '{name}' have shape {counts.shape}, expected (n, 800)")
            features = _standardise(counts) if self.scaling == "zscore" else counts
            domains[name] = Domain(name, features.astype(np.float32), labels)
        return check_dataset(DataSet(self.name, domains, CLASSES, Preprocessing(kind="features"), self.manifest()))


def _from_npz(path: Path, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    arrays = load_npz(path, [f"{name}_x", f"{name}_y"])
    return arrays[f"{name}_x"].astype(np.float64), arrays[f"{name}_y"].astype(np.int64)


def _from_mat(folder: Path, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Read the released MATLAB files, in which labels run from 1 to 10."""
    from scipy.io import loadmat

    stem = {"caltech10": ("caltech10", "Caltech10", "caltech")}.get(name, (name, name.capitalize()))
    path = next((folder / f"{part}_SURF_L10.mat" for part in stem if (folder / f"{part}_SURF_L10.mat").is_file()), None)
    if path is None:
        raise UserError(f"data file {folder / f'{name}_SURF_L10.mat'} does not exist. {_HOW}")
    try:
        result = loadmat(str(path))
        return result["fts"].astype(np.float64), result["labels"].ravel().astype(np.int64) - 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"data file {path} cannot be read (truncated, or without fts and labels): get it again"
        ) from error


def _standardise(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Divide rows by their sum, then standardise columns (deviation with n - 1). Constant columns become 0."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-12)
    centred = shares - shares.mean(axis=0)
    deviation = shares.std(axis=0, ddof=1)
    scaled: npt.NDArray[np.float64] = np.where(deviation > 0, centred / np.where(deviation > 0, deviation, 1), 0)
    return scaled
