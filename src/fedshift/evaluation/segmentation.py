"""Metrics of predicted masks: Dice coefficient in percent, Hausdorff distance in pixels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Masks = NDArray[np.bool_] | NDArray[np.uint8]


def dice(predictions: Masks, masks: Masks) -> NDArray[np.float64]:
    """Dice coefficient ``2|A ∩ B| / (|A| + |B|)`` of every image and structure, in percent; 100 where both are empty.

    Args:
        predictions: A, (n, structures, h, w) of 0 and 1, n ≥ 1.
        masks: B, the same shape.

    Returns:
        (n, structures).

    Raises:
        ValueError: the shapes differ, or there is no image.

    Example:
        >>> predicted, true = np.array([[[[1, 1, 0]]]]), np.array([[[[0, 1, 0]]]])
        >>> dice(predicted, true).round(2)
        array([[66.67]])
    """
    a, b = _checked(predictions, masks)
    both = np.count_nonzero(a & b, axis=(2, 3))
    sizes = np.count_nonzero(a, axis=(2, 3)) + np.count_nonzero(b, axis=(2, 3))
    return np.where(sizes > 0, 200.0 * both / np.maximum(sizes, 1), 100.0)


def hausdorff(predictions: Masks, masks: Masks) -> NDArray[np.float64]:
    """Hausdorff distance between the contours of predicted and true mask, of every image and structure, in pixels.

    ``max(max_{a∈A} min_{b∈B} ‖a − b‖, max_{b∈B} min_{a∈A} ‖a − b‖)`` with A and B the contours: pixels of the mask with
    one of their four neighbours outside. It is 0 where both masks are empty. Where one is empty it is the image's
    diagonal, which no distance exceeds.

    Args:
        predictions: (n, structures, h, w) of 0 and 1, n ≥ 1.
        masks: the same shape.

    Returns:
        (n, structures).

    Raises:
        ValueError: the shapes differ, or there is no image.

    Example:
        >>> predicted, true = np.array([[[[1, 0, 0, 0]]]]), np.array([[[[0, 0, 1, 0]]]])
        >>> hausdorff(predicted, true)
        array([[2.]])
    """
    a, b = _checked(predictions, masks)
    edges = _contours(a), _contours(b)
    diagonal = math.hypot(a.shape[2] - 1, a.shape[3] - 1)
    out = np.zeros(a.shape[:2])
    for place in np.ndindex(*out.shape):
        out[place] = _distance(np.argwhere(edges[0][place]), np.argwhere(edges[1][place]), diagonal)
    return out


def _checked(predictions: Masks, masks: Masks) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    a, b = np.asarray(predictions, dtype=np.bool_), np.asarray(masks, dtype=np.bool_)
    if a.ndim != 4 or a.shape != b.shape:
        raise ValueError(f"predictions {a.shape} and masks {b.shape} must both have the shape (n, structures, h, w)")
    if len(a) == 0:
        raise ValueError("no images: a mean needs at least one")
    return a, b


def _contours(masks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    padded = np.pad(masks, ((0, 0), (0, 0), (1, 1), (1, 1)))
    inner = padded[..., :-2, 1:-1] & padded[..., 2:, 1:-1] & padded[..., 1:-1, :-2] & padded[..., 1:-1, 2:]
    return masks & ~inner


def _distance(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]], diagonal: float) -> float:
    if len(a) == 0 or len(b) == 0:
        return 0.0 if len(a) == len(b) else diagonal
    from scipy.spatial import KDTree

    return float(max(KDTree(b).query(a)[0].max(), KDTree(a).query(b)[0].max()))
