"""Metrics of predicted masks: Dice coefficient in percent, 95th percentile of the Hausdorff distance in pixels."""

from __future__ import annotations

import importlib
import importlib.util
import math
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.extras import import_extra, is_program

_APPS = "monai.apps"


def metrics(what: str) -> Any:
    """``monai.metrics``. Only fedshift's own programs are spared the rest: in a user's process MONAI is imported whole.

    Raises:
        UserError: MONAI is not installed.

    Example:
        >>> metrics("HD95").__name__  # doctest: +SKIP
        'monai.metrics'
    """
    if is_program() and "monai" not in sys.modules:
        before = set(sys.modules)
        try:
            return _metrics_alone()
        except Exception:  # of any kind: another version of MONAI needs more of itself
            for name in set(sys.modules) - before:
                if name.partition(".")[0] == "monai":
                    del sys.modules[name]
    return import_extra("monai.metrics", extra="volumes", what=what)


class _LaterApps(ModuleType):
    """Takes the place of ``monai.apps``, which imports nearly all of MONAI. It is run when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("_is_run"):
            raise AttributeError(name)
        self._is_run = True
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _metrics_alone() -> Any:
    with _no_walk():
        monai: Any = importlib.import_module("monai")
    monai.utils.module.walk_packages = pkgutil.walk_packages
    monai.__getattr__ = _part  # what it would have imported comes when it is used
    spec = importlib.util.find_spec(_APPS)
    assert spec is not None
    apps = _LaterApps(_APPS)
    apps.__spec__, apps.__path__ = spec, list(spec.submodule_search_locations or ())
    sys.modules[_APPS] = monai.apps = apps
    importlib.import_module("monai.data")  # first: it and monai.transforms import each other
    return importlib.import_module("monai.metrics")


def _part(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return importlib.import_module(f"monai.{name}")
    except ModuleNotFoundError:
        raise AttributeError(name) from None


@contextmanager
def _no_walk() -> Iterator[None]:
    """Within it, MONAI finds none of its own modules to import."""
    walk: Any = pkgutil.walk_packages
    pkgutil.walk_packages = lambda *_, **__: iter(())
    try:
        yield
    finally:
        pkgutil.walk_packages = walk


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
