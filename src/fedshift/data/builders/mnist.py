"""MNIST from ``mnist.npz``, else from torchvision's folder, else downloaded by torchvision."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedshift.data.domain import Preprocessing
from fedshift.data.locate import cache_dir, find, load_npz, not_found
from fedshift.errors import UserError

CANDIDATES = ("mnist.npz", "MNIST/raw", "mnist/raw", "mnist")
SHA256 = {"mnist.npz": "06af5dfe73b70e3bc1c36439982b18a8d76803db9b544f6fdf838a37fbb01b64"}
HOW_TO_GET = (
    "Put mnist.npz (x_train, y_train, x_test, y_test) or torchvision's MNIST/raw folder below FEDSHIFT_DATA, or run "
    "with network access and torchvision downloads it"
)
CLASSES = tuple(str(digit) for digit in range(10))
_PREFIX = {"train": "train", "test": "t10k"}

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


def grey_preprocessing(size: int, mean_and_std: tuple[float, float] | None) -> Preprocessing:
    """Preprocessing of grey images of ``size`` pixels a side: value / 255, then standardised if moments are given."""
    mean, std = (None, None) if mean_and_std is None else ((mean_and_std[0],), (mean_and_std[1],))
    return Preprocessing(kind="image", channels=1, size=size, mean=mean, std=std)


def train_images() -> tuple[Pixels, Labels]:
    """The 60,000 training images (n, 28, 28) and labels."""
    return images_and_labels("train")


def images_and_labels(part: str) -> tuple[Pixels, Labels]:
    """One part of MNIST.

    Args:
        part: ``train`` or ``test``.

    Returns:
        Images (n, 28, 28) uint8, and labels (n,).

    Raises:
        UserError: MNIST cannot be found, downloaded or read.
    """
    path = find(CANDIDATES) or _raw_folder()
    if path.is_dir():
        images = _idx(path, f"{_PREFIX[part]}-images-idx3-ubyte")
        labels = _idx(path, f"{_PREFIX[part]}-labels-idx1-ubyte")
    else:
        result = load_npz(path, [f"x_{part}", f"y_{part}"])
        images, labels = np.asarray(result[f"x_{part}"]), np.asarray(result[f"y_{part}"])
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (28, 28) or len(images) != len(labels):
        raise UserError(f"{path} does not hold MNIST: images have shape {images.shape} and type {images.dtype}")
    return images.astype(np.uint8, copy=False), labels.astype(np.int64)


def _idx(folder: Path, name: str) -> npt.NDArray[np.uint8]:
    """Read the idx format: 0, 0, 8 (bytes), the number of axes, sizes as big-endian int32, then the bytes."""
    plain, packed = folder / name, folder / f"{name}.gz"
    path = plain if plain.is_file() else packed
    if not path.is_file():
        raise UserError(f"data file {plain} (or the same with .gz) does not exist. {HOW_TO_GET}")
    try:
        content = gzip.decompress(path.read_bytes()) if path == packed else path.read_bytes()
        axes = content[3]
        shape = np.frombuffer(content, dtype=">i4", count=axes, offset=4).astype(int)
        values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes)
        if content[:3] != b"\0\0\x08":
            raise ValueError("not bytes in idx format")
        return values.reshape(tuple(shape))
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise UserError(f"data file {path} cannot be read (truncated or not in idx format): get it again") from error


def _raw_folder() -> Path:
    """The folder of raw files in the cache. torchvision downloads them if they are missing."""
    folder = cache_dir() / "MNIST" / "raw"
    if not (folder / "t10k-labels-idx1-ubyte").is_file():
        try:
            from torchvision.datasets import MNIST

            MNIST(str(cache_dir()), download=True)
        except (OSError, RuntimeError) as error:
            raise not_found("MNIST", CANDIDATES, HOW_TO_GET) from error
    return folder
