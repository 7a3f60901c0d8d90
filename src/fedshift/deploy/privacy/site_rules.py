"""What a site does differently if it has a budget of privacy, or is asked to train privately; and what it measures.

With a budget, all that leaves the site is public (shapes, numbers of samples), or has noise and is counted, or is
refused. Neighbours are two data sets of the same size, of which one has nothing in the place of one sample or group;
so the number of samples is public.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedshift.data.domain import Domain, Rows
from fedshift.data.site_data import SiteData
from fedshift.data.splits import part_rows, random_split, split_kind
from fedshift.data.tasks.objective import Objective
from fedshift.deploy.kept_scores import KeptScores
from fedshift.deploy.privacy.ledger import PrivacyLedger
from fedshift.deploy.privacy.table_view import lacking, of_many_rows, with_noise
from fedshift.deploy.remote.policy import ACCURACY, METRICS, AuditLog, Policy
from fedshift.deploy.remote.requests import Asked, CallRequest, MeasureRequest, Measures, Request, SeedSplit, Whole
from fedshift.deploy.remote.wire import body_of
from fedshift.deploy.site_file import Holding, SiteConfig
from fedshift.errors import Refused, UserError
from fedshift.evaluation.measuring import MetricOptions, measuring_of
from fedshift.evaluation.metrics import counts_by_class
from fedshift.experiment.environment import versions
from fedshift.experiment.fits.private import check_private
from fedshift.experiment.runs.evaluator import answering, predictions, score
from fedshift.federation.randomness import SecretDraws
from fedshift.federation.site import Site
from fedshift.functional.differential_privacy import NoisySteps, gaussian, sample_rate
from fedshift.functional.noisy_scores import cells, nearest_counts, samples_of
from fedshift.functional.secret_noise import SecretStream
from fedshift.methods.base import Method
from fedshift.methods.composition.new_site import NewSite
from fedshift.models.network import Network


def measure_at_site(
    network: Network,
    view: SiteData,
    classes: int,
    objective: Objective,
    policy: Policy,
    groups: NDArray[np.int64] | None,
    asked: Whole | None,
) -> tuple[Measures, dict[str, Any]]:
    """What a site reports, and what its audit log says of it. Refused if too few samples can be compared. ``asked``:
    the coordinator's request for all metrics; None after rounds before the last."""
    sent = {"measures": {"kind": ACCURACY}}
    measuring = measuring_of(objective)
    labels = view.labels.cpu().numpy()
    metrics = None
    if asked is None or METRICS not in policy.send:
        result = predictions(network, view, objective)
    else:
        scores = score(network, view, objective, groups)
        result = scores.predicted
        limits = asked.resamples if asked.part == "target" else 0
        options = MetricOptions(asked.threshold, limits, policy.smallest_group)
        metrics = measuring.at_site("", asked.part, scores, options)
        sent["metrics"] = {"kind": METRICS}
    pairs = counts_by_class(result, labels, classes, policy.smallest_group) if measuring.counts_classes else []
    value = measuring.value(result, labels)
    if value is None or measuring.shows_few(labels, policy.smallest_group):
        # Of tasks without classes there is no part that could be kept back alone.
        raise Refused("too few of the measured samples can be compared (rule policy.smallest_group)")
    classes_told = tuple(None if pair is None else (pair[0], pair[1]) for pair in pairs)
    return Measures(accuracy=value, samples=len(labels), classes=classes_told, metrics=metrics), sent


_LEAST_NOISE, _MOST_NOISE = 0.05, 1e5
_LEAST_NORM, _MOST_NORM = 1e-6, 1e6
"""Clipping norms between which products in float32 keep their precision, on which the bound of the sum rests."""


class SiteRules:
    """The rules of one site, over all jobs of its project."""

    def __init__(self, config: SiteConfig, log: AuditLog | None = None) -> None:
        """``log``: the site's audit log, with which the ledger of privacy is compared."""
        self.site, self.budget = config.file.site, config.file.privacy
        self.ledger = PrivacyLedger(config.memory, self.site, self.budget, log)
        self._policy = config.file.policy
        self._fit: tuple[Method, Network] | None = None

    # What is told of the data -----------------------------------------------------------------------------------------

    def public_view(self, holding: Holding) -> Holding:
        """The data as the site tells of them: nothing of few rows of a table.

        With a budget, statistics have noise, and the fingerprint is one of its own.
        """
        if self.budget is None:
            return of_many_rows(holding, self._policy)
        shown = replace(holding, fingerprint=self.ledger.mark(data=holding.fingerprint)[:32])
        if holding.given is None or lacking(holding.given, self.budget) is not None:
            return shown
        stream = SecretStream(self.ledger.secret(), f"{self._statistics_mark(shown)}\x1fstatistics")
        return with_noise(shown, self.budget, stream)

    def _statistics_mark(self, shown: Holding) -> str:
        """The mark of a table's statistics, by the fingerprint that is shown: the same for the life of a project."""
        assert self.budget is not None  # only then there is noise
        options = self.budget.model_dump(include={"statistics_noise", "ranges", "categories"})
        return self.ledger.mark(statistics=shown.fingerprint, options=options, versions=versions())

    def check_hello(self, private: bool, holding: Holding) -> None:
        """Raise Refused unless the site can take part in an experiment that trains privately, or that does not."""
        if not private:
            self._refuse_without_noise()
        if self.budget is not None and holding.data.preprocessing.standardise is not None:
            raise Refused(
                f"site '{self.site}' has a budget of privacy (rule privacy.epsilon), and no noise covers the scale of "
                "data.standardise: per_site: give fixed numbers (data.mean and data.std)"
            )
        if self.budget is None or holding.given is None:
            return
        if (reason := lacking(holding.given, self.budget)) is not None:
            raise Refused(
                f"site '{self.site}' refuses to send statistics for the encoding of its data without noise (rule "
                f"privacy.epsilon): {reason}"
            )

    def pay_statistics(self, holding: Holding, entry: dict[str, Any]) -> None:
        """Count the statistics of a table before a card tells them; Refused if the budget is too small."""
        if self.budget is not None and holding.given is not None and holding.given["numeric"]:
            cost = NoisySteps(float(self.budget.statistics_noise or 0), 1.0, 1)
            entry["ledger"] = self.ledger.pay(self._statistics_mark(holding), cost, call="statistics")

    def _refuse_without_noise(self) -> None:
        if self.budget is not None:
            raise Refused(
                f"site '{self.site}' has a budget of privacy and trains with noise only: write training.privacy (rule "
                f"privacy.epsilon: {self.budget.epsilon:g})"
            )

    def rows(self, domain: Domain, split: SeedSplit) -> tuple[Rows, Rows]:
        """Training and held-out rows of a request's split.

        With a budget, a random split does not look at labels: one that does moves other samples when one changes. With
        groups it looks at their numbers alone.
        """
        fraction, seed = split.test_fraction, split.seed
        official = split_kind(domain, split.split) == "official"
        if self.budget is not None and not official and domain.groups is None:
            return random_split(len(domain), fraction, seed)
        return part_rows(domain, fraction, seed, "official" if official else "random")

    def card_additions(self, rows: Mapping[str, list[int]]) -> dict[str, Any]:
        """What a card says in addition if the site has a budget. Without measurements nothing is held out."""
        if self.budget is None:
            return {}
        if self.budget.measurement_noise is None:
            rows = {seed: [train, 0] for seed, (train, _) in rows.items()}
        spent = [[item.noise_multiplier, item.sample_rate, item.steps] for item in self.ledger.noisy_steps()]
        told = self.budget.model_dump(include={"epsilon", "delta", "measurement_noise", "confidences_noise"})
        return {"rows": dict(rows), "privacy": {**told, "spent": spent}}

    # Training ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def train_and_pay(self, call: Asked[CallRequest], method: Method, site: Site) -> Iterator[None]:
        """Let a call train inside the block with noise that only this site knows, and count it, even if it fails.

        Refused if the request trains without noise, or the budget is too small; UserError if method, network or noise
        cannot be private.
        """
        privacy, asked = site.training.privacy, site.draws
        if privacy is None:
            self._refuse_without_noise()
            yield
            return
        sigma = asked.noise_multiplier if asked is not None else None
        if not isinstance(sigma, float | int) or not _LEAST_NOISE <= sigma <= _MOST_NOISE:
            raise UserError(f"site '{self.site}': a request to train privately does not say how much noise")
        if not _LEAST_NORM <= privacy.clip_norm <= _MOST_NORM:
            raise UserError(f"site '{self.site}': training.privacy.clip_norm is not in [{_LEAST_NORM}, {_MOST_NORM:g}]")
        if self._fit is None or self._fit[0] != method or self._fit[1] is not site.network:
            check_private(method, site.network, site.data.input_shape)
            self._fit = method, site.network
        request, mark = call.request, self._mark(call, site.device, memory=body_of(dict(site.memory)).sha256)
        rate = sample_rate(site.data.samples, site.training.batch_size)

        def cost(steps: int) -> NoisySteps:
            return NoisySteps(float(sigma), rate, steps)

        wanted = method.mini_batches(site.batches_per_epoch, 2) - method.mini_batches(site.batches_per_epoch, 1)
        self.ledger.check(mark, cost(max(1, min(wanted, request.envelope.mini_batches_left))))
        site.draws = SecretDraws(float(sigma), mark, self.ledger.secret())
        site.mini_batches = 0
        try:
            yield
        finally:
            if site.mini_batches:
                position = {"run": request.run, "round": request.envelope.round, "call": request.call}
                call.entry["ledger"] = self.ledger.pay(mark, cost(site.mini_batches), **position)

    def _mark(self, asked: Asked[Request], device: torch.device, **of: str) -> str:
        """The mark of an exchange. The request's key covers run, round, call, content and the data's fingerprint."""
        # Last bits depend on these, and two answers with the same noise may not differ in any.
        processor = platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor()
        here = {"versions": versions(), "device": str(device), "threads": torch.get_num_threads(), "on": processor}
        if device.type != "cpu":  # sums in any order
            here["once"] = os.urandom(16).hex()
        return self.ledger.mark(request=asked.key, here=here, **of)

    # Measuring --------------------------------------------------------------------------------------------------------

    def check_measures(self) -> None:
        """Raise Refused if the site has a budget and measures no model."""
        if self.budget is not None and self.budget.measurement_noise is None:
            raise Refused(
                f"site '{self.site}' measures no model: it has a budget of privacy and no noise for measurements (rule "
                "privacy.measurement_noise)"
            )

    def check_measured(self, method: Method, network: Network, input_shape: tuple[int, ...]) -> None:
        """Raise Refused if the site has a budget and this network lets a sample change the prediction of another.

        Then one sample could change the whole accuracy, and the noise is for one vote. ``network``: what the method
        measures, with weights that no request chose.
        """
        if self.budget is None:
            return
        try:
            check_private(method, network, input_shape)
        except UserError as error:
            raise Refused(
                f"site '{self.site}' has a budget of privacy and measures only what can train privately (rule "
                f"privacy.epsilon): {error}"
            ) from None

    def measure(
        self,
        asked: Asked[MeasureRequest],
        network: Network,
        view: SiteData,
        objective: Objective,
        groups: NDArray[np.int64] | None,
        new_site: NewSite | None,
    ) -> Measures:
        """What the site reports of a model; with a budget an accuracy with noise.

        With a budget each group has one vote, the share of its samples that the model gets right; without groups each
        sample has. The network is then not adapted to them, so that no sample changes the prediction of another.
        ``groups``: which of them belong together; None if all are apart.
        """
        request, entry = asked.request, asked.entry
        classes = request.setting.classes
        if self.budget is None:
            network = answering(network, view, new_site)
            measures, entry["sent"] = measure_at_site(
                network, view, classes, objective, self._policy, groups, request.whole
            )
            return measures
        self.check_measures()
        if not measuring_of(objective).counts_classes:
            raise Refused(
                f"site '{self.site}' has a budget of privacy and measures classification only: an error in the label's "
                "unit has no bound that noise could hide (rule privacy.measurement_noise)"
            )
        deviation = float(self.budget.measurement_noise or 0)
        right = (predictions(network, view, objective) == view.labels.cpu().numpy()).astype(float)
        if groups is not None:
            _, position, sizes = np.unique(groups, return_inverse=True, return_counts=True)
            right = np.bincount(position, right) / sizes
        mark = self._mark(asked, view.device)
        noise = float(gaussian((1,), SecretStream(self.ledger.secret(), f"{mark}\x1fmeasurement")))
        share = (float(right.sum()) + deviation * noise) / len(right)
        cost = NoisySteps(deviation, 1.0, 1)
        entry["ledger"] = self.ledger.pay(mark, cost, run=request.run, round=request.round, call="measure")
        entry["sent"] = {"measures": {"kind": ACCURACY}}
        accuracy = 100.0 * min(1.0, max(0.0, share))
        return Measures(accuracy=accuracy, samples=view.samples, classes=(None,) * classes, metrics=None)

    def with_noise(
        self, asked: Asked[MeasureRequest], kept: KeptScores, groups: NDArray[np.int64] | None, device: torch.device
    ) -> KeptScores:
        """What may be told of a model's scores: with a budget, samples that have noisy counts of them.

        Refused if the budget is too small. ``groups``: which of the samples belong together and have one vote; None if
        all are apart.
        """
        if self.budget is None:
            return kept
        deviation, request = float(self.budget.confidences_noise or 0), asked.request
        where, number = cells(kept.scores, kept.labels, kept.threshold)
        votes, weights = len(kept.labels), None
        if groups is not None:
            _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
            votes, weights = len(sizes), 1 / sizes[index]
        mark = self._mark(asked, device, of="confidences")
        noise = gaussian((number,), SecretStream(self.ledger.secret(), f"{mark}\x1fconfidences")).double().numpy()
        noisy = np.bincount(where, weights, minlength=number) + deviation * noise
        cost = NoisySteps(deviation, 1.0, 1)
        asked.entry["ledger"] = self.ledger.pay(mark, cost, run=request.run, round=request.round, call="confidences")
        scores, labels = samples_of(nearest_counts(noisy, votes), kept.scores.shape[1], kept.threshold)
        return KeptScores(scores, labels, kept.threshold)


@functools.cache
def _processor() -> str:
    """The processor's model, as far as the system tells it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line for line in lines if line.startswith("model name"))
    return platform.processor()
