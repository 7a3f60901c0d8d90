"""Evaluates a model on rows that methods never see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from fedshift.evaluation import segmentation
from fedshift.evaluation.predictions import UNLABELLED, SitePredictions
from fedshift.evaluation.records import SiteMetrics
from fedshift.evaluation.site_metrics import Scored, common_threshold
from fedshift.evaluation.tasks.measuring import MetricOptions, measuring_of
from fedshift.experiment.protocols.base import Split
from fedshift.methods.composition.new_site import NewSite
from fedshift.models.network import Network
from fedshift.models.networks.unet import SegmentationOptions
from fedshift.models.options import NetworkOptions
from fedshift.weights import Weights

_BATCH = 500
_MASKS = 16
"""Images in a batch for segmentation, where every pixel has a score."""


@dataclass(frozen=True)
class Final:
    """What is measured once, with a run's last model.

    Attributes:
        record: the fields of a `RoundRecord`.
        sites: further metrics at each target, then at each source; none for segmentation.
        predictions: what they were computed from.
    """

    record: dict[str, Any]
    sites: tuple[SiteMetrics, ...] = ()
    predictions: tuple[SitePredictions, ...] = ()


class Evaluator:
    """Evaluates models on the target and on the held-out rows of the sources.

    Args:
        data: the domains, with true labels.
        split: their rows.
        device: where the network is.
        model: the network's options.
        resamples: bootstrap samples of the intervals in `final`.
        new_site: of `answering` at the targets.
    """

    def __init__(
        self,
        data: DataSet,
        split: Split,
        device: torch.device,
        model: NetworkOptions,
        resamples: int = 0,
        new_site: NewSite | None = None,
    ) -> None:
        def views(rows: Mapping[str, Rows]) -> dict[str, SiteData]:
            return {
                name: SiteData([(data.domains[name], chosen, 0)], data.preprocessing, None, device)
                for name, chosen in rows.items()
                if len(chosen)
            }

        self._targets, self._sources = views(split.measured), views(split.held_out)
        self._answered = views(split.predicted)
        self._rows: dict[str, Mapping[str, Rows]] = {
            "target": split.measured,
            "held_out": split.held_out,
            UNLABELLED: split.predicted,
        }
        self._domains = data.domains
        self._trained_at = sorted(split.train)
        self._classes = len(data.classes)
        self._objective = objective_of(data.preprocessing)
        self._measuring = measuring_of(self._objective)
        self._model = model
        self._resamples, self._new_site = resamples, new_site

    def measure(self, network: Network, weights: Weights) -> dict[str, Any]:
        """Accuracy in percent: at each target, on each source's held-out rows, and of each class over the targets.

        For other tasks their own metric takes its place: for segmentation the Dice coefficient, and the Hausdorff
        distance at each target is added.

        Args:
            network: the network that ``weights`` belong to. It is changed.
            weights: the model.

        Returns:
            The fields of a `RoundRecord`.
        """
        _load(network, weights)
        if isinstance(self._model, SegmentationOptions):
            return self._measure_masks(network, self._model)
        return self._record(
            {
                name: predictions(answering(network, view, self._new_site), view, self._objective)
                for name, view in self._targets.items()
            },
            {name: predictions(self._at(network, name), view, self._objective) for name, view in self._sources.items()},
        )

    def final(self, network: Network, weights: Weights, threshold: float | None = None) -> Final:
        """As `measure`, with further metrics of each site and the predictions for its samples.

        Args:
            network: the network that ``weights`` belong to. It is changed.
            weights: the model.
            threshold: score from which a sample of a target is positive, if no source here chooses one.
        """
        _load(network, weights)
        if isinstance(self._model, SegmentationOptions):
            return Final(self._measure_masks(network, self._model))
        kept = [
            self._kept("target", name, answering(network, view, self._new_site), view)
            for name, view in self._targets.items()
        ]
        kept += [self._kept("held_out", name, self._at(network, name), view) for name, view in self._sources.items()]
        kept += [
            self._kept(UNLABELLED, name, answering(network, view, self._new_site), view)
            for name, view in self._answered.items()
        ]
        at_site = self._measuring.at_site
        held_out = [
            at_site(one.site, "held_out", one.scored, MetricOptions()) for one in kept if one.part == "held_out"
        ]
        options = MetricOptions(common_threshold(held_out) if held_out else threshold, self._resamples)
        measured = [at_site(one.site, "target", one.scored, options) for one in kept if one.part == "target"]
        record = self._record(
            {one.site: one.scored.predicted for one in kept if one.part == "target"},
            {one.site: one.scored.predicted for one in kept if one.part == "held_out"},
        )
        return Final(record, (*measured, *held_out), tuple(kept))

    def _at(self, network: Network, source: str) -> Network:
        return network.at(self._trained_at.index(source))

    def _kept(self, part: str, name: str, network: Network, view: SiteData) -> SitePredictions:
        domain, rows = self._domains[name], np.asarray(self._rows[part][name], dtype=np.int64)
        ids: Sequence[str] | None = getattr(domain, "ids", None)
        groups = None if domain.groups is None else domain.groups[rows]
        names = None if ids is None else [ids[row] for row in rows]
        return SitePredictions(name, part, rows, names, scored(network, view, self._objective, groups))

    def _record(self, targets: Mapping[str, NDArray[Any]], sources: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """The fields of a `RoundRecord`, from the prediction for every sample."""
        pairs = {name: (targets[name], view.labels.cpu().numpy()) for name, view in self._targets.items()}
        value = self._measuring.value
        held_out = {name: (said, self._sources[name].labels.cpu().numpy()) for name, said in sources.items()}
        return {
            "target_accuracy": {name: found for name, pair in pairs.items() if (found := value(*pair)) is not None},
            "source_accuracy": {name: found for name, pair in held_out.items() if (found := value(*pair)) is not None},
            "per_class": self._measuring.by_class(pairs, self._classes) if pairs else [],
        }

    def _measure_masks(self, network: Network, model: SegmentationOptions) -> dict[str, Any]:
        """As `measure`, for segmentation: means over images, then over structures."""
        overlaps, distances = {}, {}
        for name, view in self._targets.items():
            found = [
                (segmentation.dice(predicted, true), segmentation.hausdorff(predicted, true))
                for predicted, true in predicted_masks(answering(network, view, self._new_site), view, model)
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


def _load(network: Network, weights: Weights) -> None:
    network.load_state_dict(dict(weights))
    network.eval()


def answering(network: Network, view: SiteData, new_site: NewSite | None) -> Network:
    """The network that predicts at a new site, adapted to the site's samples; None: the trained network."""
    if new_site is None:
        return network
    order = new_site.order(view.samples)
    return new_site.adapted(network, lambda: (inputs for inputs, _, _ in view.all_batches(_BATCH, order)))


@torch.no_grad()
def scored(network: Network, view: SiteData, objective: Objective, groups: NDArray[np.int64] | None) -> Scored:
    """Label, prediction and scores of every sample of ``view`` in order; for classes the probability of each.

    ``groups`` says which of the samples belong together; None if all are apart.
    """
    outputs = torch.cat([_outputs(network, inputs) for inputs, _, _ in view.all_batches(_BATCH)]).cpu()
    scores = objective.scores(outputs.double()).float()
    return Scored(view.labels.cpu().numpy(), objective.predicted(outputs).numpy(), scores.numpy(), groups)


def _outputs(network: Network, inputs: Tensor) -> Tensor:
    """What a network says of each sample.

    Raises:
        UserError: a user's own network says nothing of some.
    """
    found: Tensor = network(inputs)
    if len(found) != len(inputs):
        raise UserError(f"model: the network returns {len(found)} rows of scores for {len(inputs)} samples")
    return found


@torch.no_grad()
def predictions(network: Network, view: SiteData, objective: Objective = CLASSES) -> NDArray[Any]:
    """The prediction for every sample of ``view``, in order (n,): class numbers, or values in the label's unit."""
    said = [objective.predicted(_outputs(network, inputs)) for inputs, _, _ in view.all_batches(_BATCH)]
    return torch.cat(said).cpu().numpy()


@torch.no_grad()
def predicted_masks(
    network: Network, view: SiteData, model: SegmentationOptions
) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Predicted and true masks of every sample of ``view`` in batches, (b, structures, h, w) each."""
    for inputs, masks, _ in view.all_batches(_MASKS):
        yield model.masks(network(inputs)), masks.cpu().numpy() > 0
