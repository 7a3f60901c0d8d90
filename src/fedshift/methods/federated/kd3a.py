"""KD3A: knowledge distillation based decentralised domain adaptation.

Feng, You, Chen, Zhang, Zhu, Wu, Wu, Chen: KD3A: Unsupervised Multi-Source Decentralized Domain Adaptation via Knowledge
Distillation. ICML 2021, Algorithm 1.

Setting: domain adaptation; K labelled source sites, one target site without labels that aggregates.
Wire: every source's model goes to the target and the aggregate to every source, 2·K·S(θ) a round, and N_k. Here a
coordinator stands between (it could pass the models on unread): K·S up, (K + 1)·S down to the target (the aggregate of
the round before is the start of distillation), S up, K·S down.

In every round, θ being the last aggregate
    source k: one epoch of cross-entropy from θ → θ_k
    target: p, n_p = knowledge vote of q_1 … q_K at confidence gate g;  min over θ_T of n_p · KL(p ‖ q_T), from θ  (3–6)
    target: CF_k = value of source k for Q(S) = Σ_x n_p(S) · max p(S)                                       (7, 8)
            α_T = N_T/(ΣN + N_T),   α_k = (1 − α_T) · N_k CF_k / Σ_j N_j CF_j                                  (9)
            θ ← Σ_k α_k θ_k + α_T θ_T,  BatchNorm statistics of the mixture                     (10, appendix E)

Where the paper and its code differ (and what is done here; section numbers are the list's of our specification)
 1. The code distils the one-hot winner with weight 0 or 1, the paper the mean row with weight n_p.
    Here: paper; ``labels: hard``.
 2. The code's vote adds top-1 probabilities, the paper's adds rows. Here: paper; ``vote: top1``.
 3. Consensus focus is leave-one-out in (8) and the Shapley value in the code. Here: the code; ``focus: leave_one_out``.
    Negative values count as 0; all zero: equal. What it is compared with: ``focus: samples``; ``h_divergence``, by the
    distance of each source's BatchNorm statistics, as they came, to those of the target's data under the same model,
    per channel; ``information_gain``, by how much tighter the target's features cluster, in parts, under each source's
    model as it will be aggregated.
    Distances and gains summed up instead would leave one source all the weight: their exponentials are 0 or 1.
 4. The code's target share is the share of confident images/(K+1), without N_k, and shares are smoothed over epochs.
    Here: paper; ``target_share: confident``, ``share_momentum: 0.9``.
 5. The code never aggregates classifiers, and each begins with other weights. Here: everything is aggregated;
    ``private_classifier``: classifiers stay at their sites, from the common start.
 6. The code's teachers run in training mode on target batches, which also changes their statistics. Here: evaluation
    mode; ``teacher_statistics: batch``.
 7. Mixup: Beta(0.2, 0.2) in the paper, Beta(2, 2) in the code. Here: paper; ``mixup: 0`` is without.
 8. The code averages running variances, which drops the variance of the means. Here: the closed form of appendix E;
    ``batch_norm: linear``; ``loss`` adds the objective of (12) to the distillation loss, ``off`` keeps statistics at
    their sites.
 9. Gate and learning rate: the code steps them with the epoch's number and a lag. Here: with the share of work done.
10. r aggregations per epoch (``aggregations_per_epoch``): a round is 1/r of an epoch for r ≥ 1, at least a mini-batch
    (an r above a site's mini-batches an epoch is that number there); for r < 1 the sources pass 1/r times over their
    data and the target once. ``training.rounds`` counts rounds, whatever r.
11. The code gives every site equally many mini-batches. Here a round is each site's own epoch.
12. A source whose model is no number, or predicts none, counts as missing (``engine.quorum``): no vote, no share.
Equal work counts the target's mini-batches too, so a method that does not train there gets further rounds.

Should reproduce: Amazon Review 79.0, 80.6, 85.6, 86.9, average 83.1; Digit-5 92.0; ablations of its Figure 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedshift.errors import TrainingDiverged, UserError
from fedshift.federation.federation import Federation, Missing
from fedshift.federation.messages import BYTES_PER_NUMBER, Reply, Update
from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Batch, Site
from fedshift.functional import knowledge_vote as votes
from fedshift.functional import schedules, source_weights
from fedshift.functional.batchnorm import batchnorm_distance
from fedshift.functional.clustering import dispersion
from fedshift.functional.consensus_focus import FocusTally
from fedshift.methods.base import Method, RunPlan, State, Traffic
from fedshift.methods.blocks import with_own_statistics
from fedshift.methods.settings import Settings
from fedshift.methods.teachers import SourceStatistics, Teachers
from fedshift.models.network import Network
from fedshift.weights import Weights, is_buffer, weighted_average


@dataclass(frozen=True)
class Aggregate(Reply):
    """What the target sends back: the aggregated model, α of every source, its own, and how the round went.

    confident: share of its samples on which some teacher passed the gate.
    """

    weights: Weights
    shares: Mapping[str, float]
    target_share: float
    confident: float
    loss: float


class KD3A(Method):
    """Source models vote on the target's samples; sources are weighed by what they add to the consensus."""

    name: ClassVar[str] = "kd3a"
    title: ClassVar[str] = "KD3A"
    citation: ClassVar[str] = "Feng et al., ICML 2021"
    scenario: ClassVar[str] = "target without labels"
    memory_names: ClassVar[tuple[str, ...]] = ("optimizer", "private")
    settings: ClassVar[Settings] = {
        "released": {
            "labels": "hard",
            "vote": "top1",
            "focus": "shapley",
            "target_share": "confident",
            "share_momentum": 0.9,
            "private_classifier": True,
            "teacher_statistics": "batch",
            "batch_norm": "linear",
            "mixup": 2.0,
        }
    }
    needs_target: ClassVar[bool] = True
    one_target: ClassVar[bool] = True

    aggregations_per_epoch: PositiveFloat = Field(1.0, description="r: aggregations in each epoch of the sources")
    gate_start: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="g₀: confidence gate at the beginning")
    gate_end: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="g₁: where the gate rises to")
    vote: Literal["rows", "top1", "mean"] = Field(
        "rows", description="what teachers add up: rows (paper), top-1 (code); mean = no vote (ablation)"
    )
    labels: Literal["soft", "hard"] = Field(
        "soft", description="p with weight n_p (paper), or the winner with 0/1 (code)"
    )
    focus: Literal["shapley", "leave_one_out", "samples", "h_divergence", "information_gain"] = Field(
        "leave_one_out",
        description="source shares: consensus focus (paper; shapley: code), N_k (ablation), or other weightings",
    )
    focus_permutations: PositiveInt | None = Field(
        None, description="orders sampled for Shapley values; none = exact up to 10 sources"
    )
    target_share: Literal["samples", "confident"] = Field("samples", description="α_T: N_T/(ΣN + N_T), or as the code")
    share_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="shares averaged over rounds (code: 0.9)"
    )
    batch_norm: Literal["moments", "linear", "loss", "off"] = Field(
        "moments", description="BatchNorm statistics: closed form, averaged (code), gradient form, or not shared"
    )
    batch_norm_weight: NonNegativeFloat = Field(1.0, description="weight of the gradient form in the loss")
    teacher_statistics: Literal["running", "batch"] = Field("running", description="teachers' BatchNorm on the target")
    private_classifier: bool = Field(False, description="classifiers are not aggregated (code)")
    mixup: NonNegativeFloat = Field(0.2, description="a of Beta(a, a) (code: 2); 0 = without")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * self._steps(batches_per_epoch, self.aggregations_per_epoch)

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * self._steps(batches_per_epoch, max(1.0, self.aggregations_per_epoch))

    def _steps(self, batches_per_epoch: int, exchanges: float) -> int:
        return max(1, round(batches_per_epoch / exchanges))

    def traffic(self, plan: RunPlan) -> Traffic:
        aggregate = plan.payload + BYTES_PER_NUMBER * (plan.sources + 3)
        models = (plan.sources + 1) * plan.payload + BYTES_PER_NUMBER * plan.sources
        remembered = BYTES_PER_NUMBER * (plan.sources + 1) * (plan.rounds - 1)
        return super().traffic(plan) + Traffic(plan.rounds * aggregate, plan.rounds * models + remembered)

    def check(self, network: Network) -> None:
        normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
        if self.focus == "h_divergence" and not normalised:
            raise UserError("kd3a.focus: h_divergence compares BatchNorm statistics and the network has none")
        if self.batch_norm == "loss" and not normalised:
            raise UserError("kd3a.batch_norm: loss aligns BatchNorm statistics and the network has none")

    # Server -------------------------------------------------------------------------------------------------------

    def round(self, federation: Federation, state: State) -> State:
        updates = federation.ask(self.fit, to=federation.sources, weights=state.weights)
        models = {site: update.weights for site, update in updates.items()}
        losses = updates.numbers("loss")
        (target,) = federation.targets
        aggregate = federation.ask(
            self.distil,
            to=(target,),
            weights=state.weights,
            models=models,
            samples={site: int(number) for site, number in updates.numbers("samples").items()},
            previous={site: share for site, share in state.numbers.items() if site in models or site == target},
        ).only()
        shares = dict(aggregate.shares)
        self._go_on_without_unsound(federation, models, shares)
        report = {
            "losses": losses | {target: aggregate.loss},
            "aggregation_weights": shares | {target: aggregate.target_share},
            "confident": aggregate.confident,
        }
        return state.advance(aggregate.weights, numbers=shares | {target: aggregate.target_share}, report=report)

    def _go_on_without_unsound(
        self, federation: Federation, models: Mapping[str, Weights], shares: Mapping[str, float]
    ) -> None:
        """Sources whose model the target could not use count as missing. Raises when that leaves too few."""
        unsound = [site for site in models if site not in shares]
        for number, site in enumerate(unsound, len(federation.sources) - len(models) + 1):
            error = TrainingDiverged(
                f"the model of site '{site}' predicts no finite numbers at the target in round {federation.round}: "
                "look at its data, or lower training.lr"
            )
            federation.go_on_without(Missing(site, error), len(federation.sources), number)

    # Source -------------------------------------------------------------------------------------------------------

    def fit(self, site: Site, weights: Weights) -> Update:
        """At a source: cross-entropy from the aggregate."""
        model = site.model(self._own(site, weights))
        optimizer = site.optimizer(model, memory="optimizer")
        loss = site.minimise(
            lambda batch: F.cross_entropy(model(batch.inputs), batch.targets),
            model,
            steps=self._steps(site.batches_per_epoch, self.aggregations_per_epoch),
            optimizers=[optimizer],
        )
        site.remember_optimizer(optimizer, "optimizer")
        trained = site.weights_of(model)
        self._keep(site, trained)
        return Update(trained, site.samples, loss)

    # Target -------------------------------------------------------------------------------------------------------

    def distil(
        self,
        site: Site,
        weights: Weights,
        models: Mapping[str, Weights],
        samples: Mapping[str, int],
        previous: Mapping[str, float],
    ) -> Aggregate:
        """At the target: knowledge vote, distillation, consensus focus, aggregation."""
        gate = schedules.linear(site.envelope.progress, self.gate_start, self.gate_end)
        teachers = Teachers(
            site,
            list(models.values()),
            gate,
            own_statistics=self.teacher_statistics == "running",
            whole_epoch=self.aggregations_per_epoch <= 1,
            tally=self._tally(site, len(models), gate),
        )
        student = site.model(self._own(site, weights))
        known = previous if previous.keys() >= models.keys() else None  # not where a source is back from an absence
        shares = known or dict(zip(models, source_weights.sample_weights(list(samples.values())), strict=True))
        aligned = SourceStatistics(student, models, shares) if self.batch_norm == "loss" else None

        def loss_of(batch: Batch) -> Tensor:
            consensus = self._consensus(teachers.predictions(batch), gate)
            labels, support = (
                votes.released_labels(consensus)
                if self.labels == "hard"
                else (consensus.probabilities, consensus.support)
            )
            inputs = batch.inputs
            if self.mixup > 0 and len(inputs) > 1:
                inputs, labels = votes.mixup(inputs, labels, *self._mixture(site, len(inputs)))
            if aligned is None:
                return votes.distillation_loss(student(inputs), labels, support)
            aligned.clear()
            distillation = votes.distillation_loss(student(inputs), labels, support)
            return distillation + self.batch_norm_weight * aligned.objective()

        optimizer = site.optimizer(student, memory="optimizer")
        steps = self._steps(site.batches_per_epoch, max(1.0, self.aggregations_per_epoch))
        loss = site.minimise(loss_of, student, steps=steps, optimizers=[optimizer])
        site.remember_optimizer(optimizer, "optimizer")
        distilled = site.weights_of(student)
        self._keep(site, distilled)

        value, confident = teachers.judged()
        sound = teachers.sound(models)
        if value is not None:
            value = value[[name in sound for name in models]]
        trained = teachers.weights(models)
        models, trained = ({name: of[name] for name in sound} for of in (models, trained))
        samples = {name: samples[name] for name in sound}
        shares, target_share = self._shares(site, weights, models, trained, samples, value, confident)
        if previous and self.share_momentum:
            smoothed = self._smoothed(previous, shares | {site.name: target_share})
            target_share = smoothed.pop(site.name)
            shares = smoothed
        aggregate = weighted_average(
            [*trained.values(), distilled],
            [*shares.values(), target_share],
            bn_merge="moments" if self.batch_norm == "moments" else "mean",
        )
        return Aggregate(self._own(site, aggregate), shares, target_share, confident, loss)

    def _smoothed(self, previous: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
        """Shares averaged over rounds. A site that was not there in the round before starts with its share of now."""
        before = [previous.get(name, share) for name, share in new.items()]
        mixed = source_weights.smoothed_weights(before, list(new.values()), self.share_momentum)
        return {name: share / sum(mixed) for name, share in zip(new, mixed, strict=True)}

    def _tally(self, site: Site, teachers: int, gate: float) -> FocusTally | None:
        """What adds up the focus of every teacher, where sources are weighed by it."""
        if self.focus != "shapley" and self.focus != "leave_one_out":
            return None
        return FocusTally(
            teachers,
            gate,
            rule=self.focus,
            ballots="top1" if self.vote == "top1" else "rows",
            permutations=self.focus_permutations,
            generator=site.generator_for("focus"),
        )

    def _consensus(self, predictions: Tensor, gate: float) -> votes.Consensus:
        if self.vote == "mean":
            return votes.mean_ensemble(predictions)
        return votes.knowledge_vote(predictions, gate, ballots=self.vote)

    def _mixture(self, site: Site, size: int) -> tuple[float, Tensor]:
        """λ ~ Beta(a, a) and π, drawn from torch's generator, which an exchange seeds."""
        lam = torch.distributions.Beta(self.mixup, self.mixup).sample()
        return float(lam), torch.randperm(size).to(site.device)

    def _shares(
        self,
        site: Site,
        weights: Weights,
        models: Mapping[str, Weights],
        trained: Mapping[str, Weights],
        samples: Mapping[str, int],
        value: Tensor | None,
        confident: float,
    ) -> tuple[dict[str, float], float]:
        """α_k by site and α_T.

        weights: θ. models, trained: the sources' as they came, and as they are aggregated. value: consensus focus, if
        it decides. confident: share of the target's samples on which a teacher is sure.
        """
        counts = list(samples.values())
        target_share = site.samples / (sum(counts) + site.samples)
        if self.target_share == "confident":
            target_share = confident / (len(counts) + 1)
        if value is not None:
            if self.target_share == "confident":
                sources, target_share = source_weights.released_domain_weights(value, confident)
            else:
                sources, target_share = source_weights.domain_weights(value, counts, site.samples)
            return dict(zip(models, sources, strict=True)), target_share
        if self.focus == "samples":
            sources = source_weights.sample_weights(counts)
        elif self.focus == "h_divergence":
            # As they came: with the target's own statistics in them no source is far from it.
            own = (site.weights_of(with_own_statistics(site, model)) for model in models.values())
            distances = [batchnorm_distance(*pair, per_channel=True) for pair in zip(models.values(), own, strict=True)]
            sources = source_weights.distance_weights(counts, distances)
        else:
            before = self._dispersion(site, weights)
            gains = source_weights.relative_gains(before, [self._dispersion(site, model) for model in trained.values()])
            sources = source_weights.gain_weights(gains)
        return {name: (1 - target_share) * share for name, share in zip(models, sources, strict=True)}, target_share

    @torch.no_grad()
    def _dispersion(self, site: Site, weights: Weights) -> float:
        """How far the target's features lie from their clusters' centres under a model (information gain of FADA)."""
        model = site.model(weights).eval()
        features = torch.cat([model.features(batch.inputs).flatten(1) for batch in site.all_batches()])
        return dispersion(features, site.classes, derive_seed(site.seed))

    # What stays at a site -----------------------------------------------------------------------------------------

    def _own(self, site: Site, weights: Weights) -> Weights:
        """``weights`` with what is private to the site put over them."""
        return weights.merge(site.memory.weights("private")) if "private" in site.memory else weights

    def _keep(self, site: Site, trained: Weights) -> None:
        def private(name: str) -> bool:
            return (self.private_classifier and name.startswith("classifier.")) or (
                self.batch_norm == "off" and is_buffer(name)
            )

        kept = trained.select(private)
        if kept:
            site.memory["private"] = kept
