"""Evaluates a model on rows that methods never see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedshift.data.domain import DataSet, Rows
from fedshift.data.site_data import SiteData
from fedshift.evaluation import segmentation
from fedshift.evaluation.metrics import accuracy, per_class_accuracy
from fedshift.experiment.protocol import Split
from fedshift.models.network import Network
from fedshift.models.options import NetworkOptions
from fedshift.models.unet import SegmentationOptions
from fedshift.weights import Weights

_BATCH = 500
_MASKS = 16
"""Images in a batch for segmentation, where every pixel has a score."""


class Evaluator:
    """Evaluates models on the target and on the held-out rows of the sources."""

    def __init__(self, data: DataSet, split: Split, device: torch.device, model: NetworkOptions) -> None:
        def views(rows: Mapping[str, Rows]) -> dict[str, SiteData]:
            return {
                name: SiteData([(data.domains[name], chosen, 0)], data.preprocessing, None, device)
                for name, chosen in rows.items()
                if len(chosen)
            }

        self._targets, self._sources = views(split.measured), views(split.held_out)
        self._trained_at = sorted(split.train)
        self._classes = len(data.classes)
        self._model = model

    def measure(self, network: Network, weights: Weights) -> dict[str, Any]:
        """Accuracy in percent: at each target, on each source's held-out rows, and of each class over the targets.

        For segmentation, the Dice coefficient takes its place, and the Hausdorff distance at each target is added.

        Args:
            network: the network that ``weights`` belong to. It is changed.
            weights: the model.

        Returns:
            The fields of a `RoundRecord`.
        """
        network.load_state_dict(dict(weights))
        network.eval()
        if isinstance(self._model, SegmentationOptions):
            return self._measure_masks(network, self._model)
        labels = {name: view.labels.cpu().numpy() for name, view in self._targets.items()}
        predicted = {name: predictions(network, view) for name, view in self._targets.items()}
        return {
            "target_accuracy": {name: accuracy(predicted[name], labels[name]) for name in labels},
            "source_accuracy": {
                name: accuracy(
                    predictions(network.at(self._trained_at.index(name)), view),
                    view.labels.cpu().numpy(),
                )
                for name, view in self._sources.items()
            },
            "per_class": per_class_accuracy(
                np.concatenate(list(predicted.values())), np.concatenate(list(labels.values())), self._classes
            ),
        }

    def _measure_masks(self, network: Network, model: SegmentationOptions) -> dict[str, Any]:
        """As `measure`, for segmentation: means over images, then over structures."""
        overlaps, distances = {}, {}
        for name, view in self._targets.items():
            found = [
                (segmentation.dice(predicted, true), segmentation.hausdorff(predicted, true))
                for predicted, true in predicted_masks(network, view, model)
            ]
            overlaps[name] = np.concatenate([overlap for overlap, _ in found])
            distances[name] = float(np.concatenate([distance for _, distance in found]).mean())
        return {
            "target_accuracy": {name: float(overlap.mean()) for name, overlap in overlaps.items()},
            "target_hausdorff": distances,
            "source_accuracy": {
                name: float(
                    np.concatenate([segmentation.dice(*pair) for pair in predicted_masks(network, view, model)]).mean()
                )
                for name, view in self._sources.items()
            },
            "per_class": np.concatenate(list(overlaps.values())).mean(axis=0).tolist(),
        }


@torch.no_grad()
def predictions(network: Network, view: SiteData) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The class number of every sample of ``view``, in order (n,)."""
    scores = [network(inputs).argmax(dim=1) for inputs, _, _ in view.all_batches(_BATCH)]
    return torch.cat(scores).cpu().numpy()


@torch.no_grad()
def predicted_masks(
    network: Network, view: SiteData, model: SegmentationOptions
) -> Iterator[tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]:
    """Predicted and true masks of every sample of ``view`` in batches, (b, structures, h, w) each."""
    for inputs, masks, _ in view.all_batches(_MASKS):
        yield model.masks(network(inputs)), masks.cpu().numpy() > 0
