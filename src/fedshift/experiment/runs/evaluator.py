"""Evaluates a model on rows that methods never see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.data.domain import DataSet, Rows
from fedshift.data.site_data import SiteData
from fedshift.data.tasks.objective import CLASSES, Objective, objective_of
from fedshift.errors import UserError
from fedshift.evaluation import mask_metrics
from fedshift.evaluation.measuring import MetricOptions, measuring_of
from fedshift.evaluation.predictions import UNLABELLED, SitePredictions
from fedshift.evaluation.records import Part, SiteMetrics
from fedshift.evaluation.site_metrics import Scored, common_threshold
from fedshift.experiment.protocols.base import Split
from fedshift.methods.composition.new_site import NewSite
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.models.sliding import scores_of
from fedshift.weights import Weights

_BATCH = 500
MEASURED: tuple[Part, Part] = ("target", "common")
"""What is measured with the threshold that the held-out samples choose."""
OwnWeights = Callable[[str, Weights], Weights]
"""Site, the published model → the model that predicts at this site."""
_MASKS = 16
"""Images in a batch for segmentation, where every pixel has a score."""


@dataclass(frozen=True)
class Final:
    """What is measured once, with a run's last model."""

    record: dict[str, Any]  # the fields of a `RoundRecord`
    sites: tuple[SiteMetrics, ...] = ()  # further metrics at each target, then at each source; none for segmentation
    predictions: tuple[SitePredictions, ...] = ()  # what they were computed from


class Evaluator:
    """Evaluates models on the target and on the held-out rows of the sources.

    Args:
        data: the domains, with true labels.
        split: their rows.
        device: where the network is.
        model: the network's options.
        resamples: bootstrap samples of the intervals in `final`.
        new_site: of `answering` at the targets.
        own_weights: site that trained, model → what predicts at this site; None: the model predicts at all targets.
    """

    def __init__(
        self,
        data: DataSet,
        split: Split,
        device: torch.device,
        model: NetworkOptions,
        resamples: int = 0,
        new_site: NewSite | None = None,
        own_weights: OwnWeights | None = None,
    ) -> None:
        def views(rows: Mapping[str, Rows]) -> dict[str, SiteData]:
            return {
                name: SiteData([(data.domains[name], chosen, 0)], data.preprocessing, None, device)
                for name, chosen in rows.items()
                if len(chosen)
            }

        self._targets, self._sources = views(split.measured), views(split.held_out)
        self._answered, self._common = views(split.predicted), views(split.common)
        self._rows: dict[str, Mapping[str, Rows]] = {
            "target": split.measured,
            "held_out": split.held_out,
            UNLABELLED: split.predicted,
            "common": split.common,
        }
        self._domains = data.domains
        self._trained_at = sorted(split.train)
        self._classes, self._segments = len(data.classes), data.task == "segmentation"
        self._objective = objective_of(data.preprocessing)
        self._measuring = measuring_of(self._objective)
        self._model = model
        self._resamples, self._new_site, self._own_weights = resamples, new_site, own_weights

    def measure(self, network: Network, weights: Weights) -> dict[str, Any]:
        """Accuracy in percent: at each target, on each source's held-out rows, and of each class over the targets.

        For other tasks their own metric takes its place: for segmentation the Dice coefficient, and HD95 at each target
        is added where MONAI is installed.

        ``network``: the network that ``weights`` belong to. It is changed. Returns the fields of a `RoundRecord`.
        """
        if self._segments:
            return self._measure_masks(network, weights)
        model = _Loaded(network, weights)
        return self._record(
            {
                name: predictions(self._at(model, name, view), view, self._objective)
                for name, view in self._targets.items()
            },
            {
                name: predictions(self._at_source(model, name), view, self._objective)
                for name, view in self._sources.items()
            },
            {
                name: predictions(self._answering(model, view), view, self._objective)
                for name, view in self._common.items()
            },
        )

    def final(self, network: Network, weights: Weights, threshold: float | None = None) -> Final:
        """As `measure`, with further metrics of each site and the predictions for its samples.

        ``network``: the network that ``weights`` belong to. It is changed; ``threshold``: score from which a sample of
        a target is positive, if no source here chooses one.
        """
        if self._segments:
            return Final(self._measure_masks(network, weights))
        model = _Loaded(network, weights)
        kept = [
            self._predictions_of("target", name, self._at(model, name, view), view)
            for name, view in self._targets.items()
        ]
        kept += [
            self._predictions_of("held_out", name, self._at_source(model, name), view)
            for name, view in self._sources.items()
        ]
        kept += [
            self._predictions_of(part, name, self._answering(model, view), view)
            for part, views in ((UNLABELLED, self._answered), ("common", self._common))
            for name, view in views.items()
        ]
        at_site = self._measuring.at_site
        held_out = [
            at_site(item.site, "held_out", item.scored, MetricOptions()) for item in kept if item.part == "held_out"
        ]
        options = MetricOptions(common_threshold(held_out) if held_out else threshold, self._resamples)
        measured, common = (
            [at_site(item.site, part, item.scored, options) for item in kept if item.part == part] for part in MEASURED
        )
        record = self._record(
            *(
                {item.site: item.scored.predicted for item in kept if item.part == part}
                for part in ("target", "held_out", "common")
            )
        )
        return Final(record, (*measured, *held_out, *common), tuple(kept))

    def _at(self, model: _Loaded, name: str, view: SiteData) -> Network:
        """The network that predicts at a target: the site's own where it trained and the protocol measures so."""
        if self._own_weights is None:
            return self._answering(model, view)
        return self._at_source(model, name) if name in self._trained_at else self._answering(model, view)

    def _at_source(self, model: _Loaded, source: str) -> Network:
        weights = None if self._own_weights is None else self._own_weights(source, model.weights)
        # Of a model of many sites' networks only this one is set to predict: all of them, for each site, took longest.
        return model.network_of(model.weights if weights is None else weights).at(self._trained_at.index(source)).eval()

    def _answering(self, model: _Loaded, view: SiteData) -> Network:
        """The network that predicts where no one trained."""
        return answering(model.network_of(model.weights).eval(), view, self._new_site)

    def _predictions_of(self, part: str, name: str, network: Network, view: SiteData) -> SitePredictions:
        domain, rows = self._domains[name], np.asarray(self._rows[part][name], dtype=np.int64)
        ids: Sequence[str] | None = getattr(domain, "ids", None)
        groups = None if domain.groups is None else domain.groups[rows]
        names = None if ids is None else [ids[row] for row in rows]
        return SitePredictions(name, part, rows, names, score(network, view, self._objective, groups))

    def _record(
        self,
        targets: Mapping[str, NDArray[Any]],
        sources: Mapping[str, NDArray[Any]],
        common: Mapping[str, NDArray[Any]],
    ) -> dict[str, Any]:
        """The fields of a `RoundRecord`, from the prediction for every sample."""
        pairs = {name: (targets[name], view.labels.cpu().numpy()) for name, view in self._targets.items()}
        result = {
            "target_accuracy": self._values(targets, self._targets),
            "source_accuracy": self._values(sources, self._sources),
            "per_class": self._measuring.by_class(pairs, self._classes) if pairs else [],
        }
        return result | ({"common_accuracy": self._values(common, self._common)} if common else {})

    def _values(self, predictions: Mapping[str, NDArray[Any]], views: Mapping[str, SiteData]) -> dict[str, float]:
        """Name → the task's metric, where it can be measured."""
        values = {
            name: self._measuring.value(item, views[name].labels.cpu().numpy()) for name, item in predictions.items()
        }
        return {name: value for name, value in values.items() if value is not None}

    def _measure_masks(self, network: Network, weights: Weights) -> dict[str, Any]:
        """As `measure`, for segmentation: means over images, then over structures."""
        model, options, overlaps, distances = _Loaded(network, weights), self._model, {}, dict[str, float]()
        for name, view in self._targets.items():
            pairs = list(predicted_masks(self._at(model, name, view), view, options))
            overlaps[name] = np.concatenate([mask_metrics.dice(*pair) for pair in pairs])
            if mask_metrics.can_measure_distances():
                distances[name] = float(np.concatenate([mask_metrics.hd95(*pair) for pair in pairs]).mean())
        common = {name: _dice(self._answering(model, view), view, options) for name, view in self._common.items()}
        record: dict[str, Any] = {
            "target_accuracy": {name: float(overlap.mean()) for name, overlap in overlaps.items()},
            "target_hd95": distances,
            "source_accuracy": {
                name: _dice(self._at_source(model, name), view, options) for name, view in self._sources.items()
            },
            "per_class": np.concatenate(list(overlaps.values())).mean(axis=0).tolist(),
        }
        return record | ({"common_accuracy": common} if common else {})


class _Loaded:
    """A network with the weights that it last had, which are loaded only where others are asked for."""

    def __init__(self, network: Network, weights: Weights) -> None:
        self.network, self.weights = network, weights
        self._there: Weights | None = None

    def network_of(self, weights: Weights) -> Network:
        """The network with these weights."""
        if self._there is not weights:
            self.network.load_state_dict(dict(weights))
            self._there = weights
        return self.network


def _dice(network: Network, view: SiteData, options: NetworkOptions) -> float:
    return float(np.concatenate([mask_metrics.dice(*pair) for pair in predicted_masks(network, view, options)]).mean())


def answering(network: Network, view: SiteData, new_site: NewSite | None) -> Network:
    """The network that predicts at a new site, adapted to the site's samples; None: the trained network."""
    if new_site is None:
        return network
    order = new_site.order(view.samples)
    return new_site.adapt(network, lambda: (inputs for inputs, _, _ in view.all_batches(_BATCH, order)))


@torch.no_grad()
def score(network: Network, view: SiteData, objective: Objective, groups: NDArray[np.int64] | None) -> Scored:
    """Label, prediction and scores of every sample of ``view`` in order; for classes the probability of each.

    ``groups`` says which of the samples belong together; None if all are apart.
    """
    outputs = torch.cat([_outputs(network, inputs) for inputs, _, _ in view.all_batches(_BATCH)]).cpu()
    scores = objective.scores(outputs.double()).float()
    return Scored(view.labels.cpu().numpy(), objective.predict(outputs).numpy(), scores.numpy(), groups)


def _outputs(network: Network, inputs: Tensor) -> Tensor:
    outputs: Tensor = network(inputs)
    if len(outputs) != len(inputs):
        raise UserError(f"model: the network returns {len(outputs)} rows of scores for {len(inputs)} samples")
    return outputs


@torch.no_grad()
def predictions(network: Network, view: SiteData, objective: Objective = CLASSES) -> NDArray[Any]:
    """The prediction for every sample of ``view``, in order (n,): class numbers, or values in the label's unit."""
    text = [objective.predict(_outputs(network, inputs)) for inputs, _, _ in view.all_batches(_BATCH)]
    return torch.cat(text).cpu().numpy()


@torch.no_grad()
def predicted_masks(
    network: Network, view: SiteData, model: NetworkOptions
) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Predicted and true masks of every sample of ``view`` in batches, (b, structures, …) each."""
    for inputs, masks, _ in view.all_batches(_MASKS if len(view.input_shape) == 3 else 1):
        yield model.masks(scores_of(network, inputs, view.preprocessing.patch)), masks.cpu().numpy() > 0
