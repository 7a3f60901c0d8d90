"""Metrics of predicted masks: Dice coefficient in percent, 95th percentile of the Hausdorff distance in pixels."""

from __future__ import annotations

import math
import warnings
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from fedshift.evaluation.light_monai import metrics

Masks = NDArray[np.bool_] | NDArray[np.uint8]


def dice(predictions: Masks, masks: Masks) -> NDArray[np.float64]:
    """Dice coefficient ``2|A ∩ B| / (|A| + |B|)`` of every image and structure, in percent; 100 where both are empty.

    Args:
        predictions: A, (n, structures, …) of 0 and 1, n ≥ 1.
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
    a, b = _check_shapes(predictions, masks)
    space = tuple(range(2, a.ndim))
    both = np.count_nonzero(a & b, axis=space)
    sizes = np.count_nonzero(a, axis=space) + np.count_nonzero(b, axis=space)
    return np.where(sizes > 0, 200.0 * both / np.maximum(sizes, 1), 100.0)


def can_measure_distances() -> bool:
    """Whether MONAI is installed, by which `hd95` measures.

    Example:
        >>> can_measure_distances() in (True, False)
        True
    """
    return find_spec("monai") is not None


def hd95(predictions: Masks, masks: Masks) -> NDArray[np.float64]:
    """HD95 of every image and structure, in pixels or voxels, by MONAI: ``max(P₉₅ d(A, B), P₉₅ d(B, A))``.

    d(A, B) are the distances from each pixel of the contour of A to the nearest one of B; a contour has the pixels of a
    mask with a neighbour outside of it. It is 0 where both masks are empty. Where one is empty it is the image's
    diagonal, which no distance exceeds; MONAI has none there.

    Args:
        predictions: A, (n, structures, …) of 0 and 1, n ≥ 1.
        masks: B, the same shape.

    Returns:
        (n, structures).

    Raises:
        ValueError: the shapes differ, or there is no image.
        UserError: MONAI is not installed.

    Example:
        >>> predicted, true = np.array([[[[1, 0, 0, 0]]]]), np.array([[[[0, 0, 1, 0]]]])
        >>> hd95(predicted, true)  # doctest: +SKIP
        array([[2.]])
    """
    import torch

    a, b = _check_shapes(predictions, masks)
    space = tuple(range(2, a.ndim))
    some_a, some_b = a.any(axis=space), b.any(axis=space)
    distances = np.where(some_a == some_b, 0.0, math.hypot(*(side - 1 for side in a.shape[2:])))
    both = some_a & some_b
    if both.any():
        pairs = (torch.from_numpy(chosen[both][:, np.newaxis]).float() for chosen in (a, b))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # MONAI warns of its own call of a function of its own
            result = metrics("HD95").compute_hausdorff_distance(*pairs, include_background=True, percentile=95)
        distances[both] = result[:, 0].double().numpy()
    return distances


def _check_shapes(predictions: Masks, masks: Masks) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    a, b = np.asarray(predictions, dtype=np.bool_), np.asarray(masks, dtype=np.bool_)
    if a.ndim < 4 or a.shape != b.shape:
        raise ValueError(f"predictions {a.shape} and masks {b.shape} must both have the shape (n, structures, …)")
    if len(a) == 0:
        raise ValueError("no images: a mean needs at least one")
    return a, b
