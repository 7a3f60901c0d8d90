"""The other door to labels: measuring a model on rows that no step of a method can reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedshift.data.domain import DataSet, Rows
from fedshift.data.view import SiteData
from fedshift.evaluation.metrics import accuracy, per_class_accuracy
from fedshift.experiment.protocol import Split
from fedshift.methods.base import Method
from fedshift.models.network import Network
from fedshift.weights import Weights

_BATCH = 500


class Evaluator:
    """Measures models on the target and on the sources' held-out parts."""

    def __init__(self, data: DataSet, split: Split, device: torch.device) -> None:
        def views(rows: Mapping[str, Rows]) -> dict[str, SiteData]:
            return {
                name: SiteData([(data.domains[name], chosen, 0)], data.preprocessing, None, device)
                for name, chosen in rows.items()
                if len(chosen)
            }

        self._targets, self._sources = views(split.measured), views(split.held_out)
        self._trained_at = tuple(split.train)
        self._classes = len(data.classes)

    def measure(self, method: Method, network: Network, weights: Weights) -> dict[str, Any]:
        """Accuracy in percent per target and per held-out part, and per class over the target(s)."""
        network.load_state_dict(dict(weights))
        network.eval()
        labels = {name: view.labels.cpu().numpy() for name, view in self._targets.items()}
        predicted = {name: predictions(method, network, view) for name, view in self._targets.items()}
        return {
            "target_accuracy": {name: accuracy(predicted[name], labels[name]) for name in labels},
            "source_accuracy": {
                name: accuracy(
                    predictions(method, method.network_at(network, name, self._trained_at), view),
                    view.labels.cpu().numpy(),
                )
                for name, view in self._sources.items()
            },
            "per_class": per_class_accuracy(
                np.concatenate(list(predicted.values())), np.concatenate(list(labels.values())), self._classes
            ),
        }


@torch.no_grad()
def predictions(method: Method, network: Network, view: SiteData) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The class number of every sample of ``view``, in order (n,)."""
    scores = [method.predict(network, inputs).argmax(dim=1) for inputs, _, _ in view.all_batches(_BATCH)]
    return torch.cat(scores).cpu().numpy()
