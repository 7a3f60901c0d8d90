"""The plan: an experiment's runs, with the rows, sites, budget and rounds of each.

Running, checking and deploying an experiment use the same `Plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.domain import DataSet, DataSource, Preprocessing, Rows, SparseRows
from fedshift.data.input_guard import LOOKED_AT, InputShift, feature_shift, image_shift, image_statistics
from fedshift.data.site_differences import shared_groups, site_differences
from fedshift.data.site_scale import all_scaled
from fedshift.data.tasks.objective import objective_of
from fedshift.evaluation.measuring import measuring_of
from fedshift.evaluation.metric_entries import Metric
from fedshift.evaluation.records import SitePrivacy, WithoutLabels
from fedshift.experiment.budgets import budgets, rounds_needed
from fedshift.experiment.config.experiment import Experiment, data_record, method_record
from fedshift.experiment.environment import data_fingerprint, versions
from fedshift.experiment.features import build_data
from fedshift.experiment.privacy import draws_of, site_privacy
from fedshift.experiment.protocols.base import Roles, Split
from fedshift.federation.site_runner import Setting, SitePlan
from fedshift.federation.training import Training
from fedshift.methods.base import Method
from fedshift.methods.composition.options import training_of
from fedshift.models.network import Network
from fedshift.text import join_names

_MOST_MEASURED = 100
"""Most columns that can be measurements; where there are more, they are computed features, and are not compared."""


def without_labels(data: DataSet, split: Split, source: DataSource) -> dict[str, WithoutLabels]:
    """The targets of a run that lack labels, and how unlike their samples are to those that trained.

    ``source``: the same data, with an encoding of the sites that trained with their labels.
    """
    result = {}
    for site, rows in split.predicted.items():
        table = source.table_shift(site) if data.preprocessing.kind == "table" else None
        shift = _shift(data, split, site, rows) if table is None else table
        result[site] = WithoutLabels(samples=len(rows), unlike=shift.refusal, unusual=shift.warning, doubt=shift.doubt)
    return result


def _shift(data: DataSet, split: Split, site: str, rows: Rows) -> InputShift:
    """How a site's samples differ from those of the sources. Nothing is known of features of a network."""
    site_inputs = data.domains[site].inputs
    sources = [
        np.asarray(inputs)[chosen]
        for name, chosen in split.train.items()
        if not isinstance(inputs := data.domains[name].inputs, SparseRows)
    ]
    own_scale = data.preprocessing.standardise is not None and data.preprocessing.kind != "image"
    if isinstance(site_inputs, SparseRows) or not sources or own_scale:
        return InputShift()
    if data.preprocessing.kind == "image":
        return image_shift(np.asarray(site_inputs)[rows].astype(np.uint8), image_statistics(sources))
    names = _columns(data.preprocessing, site_inputs.shape[1])
    return _column_shift(np.asarray(site_inputs)[rows], sources, names) if site_inputs.ndim == 2 else InputShift()


def _columns(preprocessing: Preprocessing, width: int) -> dict[str, int]:
    """Name → place of the columns that are numbers, as the data have them."""
    measured = width <= _MOST_MEASURED and preprocessing.backbone is None
    return {str(number): number for number in range(width)} if measured else {}


def _column_shift(
    site_inputs: NDArray[np.generic], sources: list[NDArray[np.generic]], names: dict[str, int]
) -> InputShift:
    places = list(names.values())
    if not places:
        return InputShift()
    trained = np.concatenate([rows[:, places] for rows in sources]).astype(np.float64)
    moments = Preprocessing(
        kind="features", mean=tuple(trained.mean(axis=0).tolist()), std=tuple(trained.std(axis=0).tolist())
    )
    return feature_shift(site_inputs[:, places], moments, tuple(names))


POOL = "pool"
"""Name of the single site that holds the samples of all sources for a pooled method."""
_MOST_NAMED = 3


@dataclass(frozen=True)
class Run:
    """One run of an experiment: a method, a target (a domain, or the name of a pair) and a seed.

    ``metric`` is what its rounds are measured by.
    """

    method: Method
    target: str
    seed: int
    metric: Metric = "accuracy"


class Plan:
    """All runs of an experiment, and what they share.

    The split of a target and a seed is computed once, for all methods. The data are kept in memory in the encoding of
    one target at a time. A deployment's plan uses what the sites report in place of what is computed here from data.
    """

    def __init__(self, experiment: Experiment, data: DataSet) -> None:
        """``data`` holds the domains that take part."""
        self.experiment = experiment
        self.data = data
        self._roles: dict[str, Roles] = {}
        self._splits: dict[tuple[str, int], Split] = {}
        self._encoded: dict[str, DataSet] = {}
        self._scaled: dict[tuple[str, int], DataSet] = {}

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The targets, in order. UserError as in `targets_of` of the protocol."""
        return self.experiment.protocol.targets_of(self.data)

    @cached_property
    def runs(self) -> tuple[PlannedRun, ...]:
        """All runs, in order. The seed is the outer loop, so that early results cover all targets and methods."""
        return tuple(
            PlannedRun(self, Run(method, target, seed, self.metric))
            for seed in self.experiment.protocol.seeds
            for target in self.targets
            for method in self.experiment.methods
        )

    @cached_property
    def metric(self) -> Metric:
        """What rounds are measured by."""
        if self.data.task == "segmentation":
            return "dice"
        return measuring_of(objective_of(self.data.preprocessing)).metric

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the data."""
        return data_fingerprint(self.data)

    @cached_property
    def site_differences(self) -> tuple[str, ...]:
        """Warnings about problems that show only when samples are compared, within sites and between them."""
        return (*site_differences(self.data, self._parts), *self._shared_groups())

    def _parts(self, site: str) -> tuple[Rows, Rows]:
        """The training and held-out rows of a site in the first split in which it is a source, if there is one."""
        for target in self.targets:
            if site in self.roles(target)[0]:
                split = self.split(target, self.experiment.protocol.seeds[0])
                return split.train[site], split.held_out[site]
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    def _shared_groups(self) -> Iterator[str]:
        """Numbers of patients that several sites use, and targets of which groups leave only some rows to measure."""
        pairs = [f"{count} of '{item}' and '{other}'" for (item, other), count in shared_groups(self.data).items()]
        protocol, domains = self.experiment.protocol, self.data.domains
        fewer = []
        if protocol.unseen and self.data.manifest.source == "yours":
            measured = {
                target: self.split(target, protocol.seeds[0]).measured[target]
                for target in self.targets
                if target in domains and domains[target].groups is not None and not domains[target].unlabelled
            }
            fewer = [
                f"{len(rows)} of {len(domains[target])} of '{target}'"
                for target, rows in measured.items()
                if len(rows) < len(domains[target])
            ]
        if pairs:
            yield (
                f"sites have numbers of groups in common: {join_names(pairs, _MOST_NAMED)}; if they are not the same "
                "patients, number them differently at each site"
            )
        if fewer:
            yield (
                "samples are in groups, so only those of held-out groups are measured: "
                f"{join_names(fewer, _MOST_NAMED)}; protocol.base_images: shared measures all, which is right where no "
                "group is at two sites"
            )

    def stored_preprocessing(self, data: DataSet) -> Preprocessing:
        """What a model file says of how the samples of ``data`` are prepared."""
        return data.preprocessing

    def about_images(self, planned: PlannedRun) -> dict[str, Any]:
        """What a model file says of its training images as a whole: nothing in private training, nor of few."""
        data = planned.data
        if data.preprocessing.kind != "image" or self.experiment.training.privacy is not None:
            return {}
        images = (
            np.asarray(inputs[rows[:: max(1, len(rows) // LOOKED_AT)]])
            for name, rows in planned.split.train.items()
            if not isinstance(inputs := data.domains[name].inputs, SparseRows)
        )
        sides = [side for name in planned.split.train for side in data.sides.get(name, ())]
        result = image_statistics(images, sides)
        return {} if result is None else {"training_images": result.model_dump()}

    def without_labels(self, planned: PlannedRun) -> dict[str, WithoutLabels]:
        """The targets of a run that lack labels, and how unlike their samples are to those that trained."""
        source, split = self.experiment.data, planned.split
        for name in (*self.data.domains, *self.experiment.protocol.left_out) if split.predicted else ():
            source = source if name in split.train else source.without(name)
        return without_labels(planned.data, split, source)

    def roles(self, target: str) -> Roles:
        """The sources and the targets of the runs with this target."""
        if target not in self._roles:
            self._roles[target] = self.experiment.protocol.roles_of(self.data, target)
        return self._roles[target]

    def split(self, target: str, seed: int) -> Split:
        """The rows of the runs with this target and seed. UserError as in `split_of` of the protocol."""
        if (target, seed) not in self._splits:
            self._splits[target, seed] = self._split(target, seed)
        return self._splits[target, seed]

    def in_groups(self, site: str, rows: Rows) -> bool:
        """Whether some of a site's ``rows`` belong together, such as those of one patient."""
        return self.largest_group(site, rows) > 1

    def largest_group(self, site: str, rows: Rows) -> int:
        """The number of ``rows`` in a site's largest group of samples; 1 where all are apart."""
        groups = self.data.domains[site].groups
        return 1 if groups is None else int(np.unique(groups[rows], return_counts=True)[1].max(initial=1))

    def measurement_noise(self, site: str) -> float | None:
        """Standard deviation of what a site adds to its number of right samples for its privacy; None: nothing."""
        return None

    def data_for(self, target: str) -> DataSet:
        """The data in the encoding of this target: sites that are unseen or not in the pair do not influence it."""
        if target not in self._encoded:
            self._encoded.clear()  # first, so that two encodings need not fit in memory together
            self._encoded[target] = self._data_for(target)
        return self._encoded[target]

    def data_of(self, target: str, seed: int) -> DataSet:
        """As `data_for`, with each site in its own scale where data are standardised per site."""
        if self.data.preprocessing.standardise is None:
            return self.data_for(target)
        if (target, seed) not in self._scaled:
            self._scaled.clear()  # as in `data_for`
            data, split = self.data_for(target), self.split(target, seed)
            here = replace(data, domains={name: data.domains[name] for name in self.samples_of(data)})
            result = all_scaled(here, {**split.unlabelled, **split.train})
            self._scaled[target, seed] = replace(data, domains={**data.domains, **result.domains})
        return self._scaled[target, seed]

    def samples_of(self, data: DataSet) -> Sequence[str]:
        """The domains of ``data`` whose samples are here."""
        return tuple(data.domains)

    def _split(self, target: str, seed: int) -> Split:
        return self.experiment.protocol.split_of(self.data, target, seed)

    def _data_for(self, target: str) -> DataSet:
        """As `data_for`. A target that trains without labels influences the encoding as the sources do, but with its
        inputs only."""
        sources, targets = map(frozenset, self.roles(target))
        protocol = self.experiment.protocol
        unseen = protocol.unseen
        source = self.experiment.data
        for name in (*self.data.domains, *(protocol.left_out if unseen else ())):
            if name not in sources:
                source = source.without(name) if unseen or name not in targets else source.without_labels(name)
        return (
            self.data if source == self.experiment.data else protocol.taking_part(build_data(self.experiment, source))
        )


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan, with all that is known about it before it trains."""

    plan: Plan
    run: Run

    @property
    def experiment(self) -> Experiment:
        """The run's experiment."""
        return self.plan.experiment

    @cached_property
    def training(self) -> Training:
        """How the run's sites train: as the experiment says, but for what its method does otherwise."""
        return training_of(self.run.method, self.experiment.training)

    @property
    def split(self) -> Split:
        """The rows of the run."""
        return self.plan.split(self.run.target, self.run.seed)

    @property
    def data(self) -> DataSet:
        """The data in the run's encoding, with true labels. Models are measured on these."""
        return self.plan.data_of(self.run.target, self.run.seed)

    @property
    def shown_data(self) -> DataSet:
        """The data that the sites train on: those of `data`, but with wrong labels at malicious sources."""
        return self.experiment.protocol.with_wrong_labels(self.data, self.split, self.run.seed)

    def sites(self, data: DataSet) -> list[SitePlan]:
        """The sites of the run, with their rows of ``data`` and the kinds that each refuses."""
        refused = self.experiment.engine.refuse_at
        plans = site_plans(self.run.method, data, self.split)
        return [replace(plan, refuse=frozenset(refused.get(plan.name, ()))) for plan in plans]

    @cached_property
    def budget(self) -> dict[str, int]:
        """Mini-batches that each site may train on."""
        return budgets(self.run.method, self.experiment.methods, self.training, self.split)

    @property
    def drawn(self) -> int | None:
        """How many sources are drawn for each round; None: all take part."""
        return self.experiment.protocol.number_drawn(len(self.split.train))

    @cached_property
    def rounds(self) -> int:
        """Rounds until the budget is used; 0 if it is used before the first round."""
        whole = self.experiment.engine.sums_only
        return rounds_needed(self.run.method, self.training, self.split, self.budget, whole=whole)

    @property
    def mini_batches(self) -> int:
        """Mini-batches per source, the mean over the sources."""
        return round(sum(self.budget.values()) / len(self.split.train))

    def setting(self, device: str) -> Setting:
        """What all sites of the run share. They train on ``device``."""
        experiment, data = self.experiment, self.data
        return Setting(
            method=self.run.method,
            training=self.training.for_classes(data.classes),
            network=experiment.model,
            preprocessing=data.preprocessing,
            input_shape=data.input_shape,
            classes=len(data.classes),
            sources=len(self.split.train),
            seed=self.run.seed,
            device=device,
            refuse=frozenset(experiment.engine.refuse),
            on_refusal=experiment.engine.on_refusal,
            draws=draws_of(self.privacy, self.identity if self.privacy else {}),
        )

    @cached_property
    def privacy(self) -> dict[str, SitePrivacy]:
        """What the run costs each site; empty unless it is private.

        UserError if the ε that is asked for cannot be reached.
        """
        if (training := self.training).privacy is None:
            return {}
        return {
            site: site_privacy(training, site, len(rows), self.budget[site], grouped=self.plan.in_groups(site, rows))
            for site, rows in self.split.train.items()
        }

    @property
    def pooled_bytes(self) -> dict[str, int]:
        """Bytes of the samples that leave each site before the method trains; empty unless it is pooled."""
        return pooled_bytes(self.run.method, self.data, self.split)

    def network(self) -> Network:
        """A network like that of the run's sites. Its weights are arbitrary."""
        data, sources = self.data, self.plan.roles(self.run.target)[0]
        network = self.training.network(self.experiment.model, data.input_shape, len(data.classes), 0)
        return self.run.method.adapt_network(network, len(sources))

    @property
    def folder(self) -> Path:
        """The run's folder, relative to the experiment's."""
        return Path(self.run.method.display, self.run.target, f"seed-{self.run.seed}")

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that identify the run, and others that are recorded with them."""
        experiment, settings = self.experiment, common_settings(self.experiment, self.run.method)
        whole = experiment.dump()
        return {
            **settings,
            "data": {**settings["data"], **self._scaling, "fingerprint": self.plan.fingerprint},
            "target": self.run.target,
            "seed": self.run.seed,
            "training": {**settings["training"], "mini_batches": self.budget},
            "engine": whole["engine"],
            "device": whole["device"],
            "versions": versions(),
            **experiment.engine.identity,
        }

    @property
    def _scaling(self) -> dict[str, Any]:
        """What only the sites of a deployment say of how inputs are scaled."""
        standardise = self.plan.data.preprocessing.standardise
        return {} if standardise is None else {"standardise": standardise}


def common_settings(experiment: Experiment, method: Method) -> dict[str, Any]:
    """The settings that all runs of a method share. They depend on the experiment file only."""
    whole = experiment.dump()
    return {
        "name": experiment.name,
        "data": data_record(experiment.data),
        "protocol": {key: value for key, value in whole["protocol"].items() if key not in experiment.protocol.extent},
        "model": experiment.model.record(),
        "training": training_of(method, experiment.training).model_dump(mode="json"),
        "method": method_record(method),
    }


def model_metadata(planned: PlannedRun) -> dict[str, Any]:
    """The metadata of a model file: all that is needed to predict with it."""
    experiment, data, run = planned.experiment, planned.data, planned.run
    sources, targets = planned.plan.roles(run.target)
    parts = experiment.model.structure(data.input_shape, len(data.classes))
    return {
        "method": method_record(run.method),
        "model": experiment.model.record(),
        **({} if parts is None else {"parts": parts}),
        "input_shape": list(data.input_shape),
        "classes": list(data.classes),
        **({"masks": True} if data.task == "segmentation" else {}),
        "preprocessing": planned.plan.stored_preprocessing(data).model_dump(mode="json"),
        "labelled_by": experiment.data.labelled_by(),
        **planned.plan.about_images(planned),
        "sources": list(sources),
        "unseen" if experiment.protocol.unseen else "adapted_to": "+".join(targets),
        "seed": run.seed,
        "experiment": experiment.name,
        "versions": versions(),
    }


def site_plans(method: Method, data: DataSet, split: Split) -> list[SitePlan]:
    """The sites of a run: one per source and per target that takes part, or the pool.

    An unseen target is not among them.
    """
    names = [name for name in data.domains if name in split.train]
    parts = [(data.domains[name], split.train[name], number) for number, name in enumerate(names)]
    unlabelled = [
        (data.domains[name], rows, number) for number, (name, rows) in enumerate(split.unlabelled.items(), len(names))
    ]
    if method.traits.target == "labelled":
        return [SitePlan(domain.name, "source", [(domain, rows, 0)]) for domain, rows, _ in unlabelled]
    if method.traits.pooled:
        return [SitePlan(POOL, "source", parts, unlabelled if method.traits.needs_target else ())]
    held_out = {
        name: [(data.domains[name], rows, 0)]
        for name, rows in split.held_out.items()
        if method.traits.uses_held_out and len(rows)
    }
    sources = [SitePlan(part[0].name, "source", [part], held_out=held_out.get(part[0].name, ())) for part in parts]
    return sources + [SitePlan(part[0].name, "target", [part]) for part in unlabelled]


def pooled_bytes(method: Method, data: DataSet, split: Split) -> dict[str, int]:
    """Site → bytes of its training samples and masks, which leave it if ``method`` is pooled; else empty."""
    sizes = {}
    pooled = {**split.train, **(split.unlabelled if method.traits.needs_target else {})} if method.traits.pooled else {}
    for name, rows in pooled.items():
        inputs = data.domains[name].inputs
        item = 4 if isinstance(inputs, SparseRows) else inputs.itemsize
        sizes[name] = len(rows) * math.prod(inputs.shape[1:]) * item
        masks = data.domains[name].masks
        if masks is not None and name in split.train:
            sizes[name] += len(rows) * math.prod(masks.shape[1:])
    return sizes
