"""KD3A: knowledge distillation based decentralised domain adaptation.

Feng, You, Chen, Zhang, Zhu, Wu, Wu, Chen: KD3A: Unsupervised Multi-Source Decentralized Domain Adaptation via Knowledge
Distillation. ICML 2021, Algorithm 1.

Setting: domain adaptation; K labelled source sites, one target site without labels that aggregates.
Wire: every source's model goes to the target, and the aggregate to every source, 2·K·S(θ) per round, and N_k. Here they
pass through a coordinator, which need not read them: K·S up, (K + 1)·S down to the target (distillation starts from the
aggregate of the last round), S up, K·S down.

In every round, with θ the last aggregate
    source k: one epoch of cross-entropy from θ → θ_k
    target: p, n_p = knowledge vote of q_1 … q_K at confidence gate g;  min over θ_T of n_p · KL(p ‖ q_T), from θ  (3–6)
    target: CF_k = value of source k for Q(S) = Σ_x n_p(S) · max p(S)                                       (7, 8)
            α_T = N_T/(ΣN + N_T),   α_k = (1 − α_T) · N_k CF_k / Σ_j N_j CF_j                                  (9)
            θ ← Σ_k α_k θ_k + α_T θ_T,  BatchNorm statistics of the mixture                     (10, appendix E)

Where the paper and its code differ. In 1 to 8 setting ``paper``, the default, is the paper and ``released`` the code.
There is no ``practical``: in our measurements ``released`` was better with BatchNorm in the network, and neither was
without.
 1. Labels: the mean row with weight n_p; code: the one-hot winner with weight 0 or 1 (``labels: hard``).
 2. Vote: adds rows; code: adds top-1 probabilities (``vote: top1``).
 3. Consensus focus: leave-one-out (8); code: the Shapley value (``focus: shapley``). Negative values count as 0; if all
    are zero, shares are equal. The paper compares it with ``focus: samples``; ``h_divergence``, the distance of each
    source's BatchNorm statistics to those of the target's data under the same model, per channel; and
    ``information_gain``, how much tighter, relatively, the target's features cluster under each source's model as it
    is aggregated. Sums of distances or gains would give one source all the weight: their exponentials are 0 or 1.
 4. Shares: (9), new in every round; code: α_T is the share of confident images/(K+1) (``target_share: confident``), N_k
    is not used, and shares are averaged over epochs (``share_momentum: 0.9``).
 5. Classifiers are aggregated; code: they stay at their sites (``private_classifier``) and start from different
    weights. Here they start from the common start.
 6. Teachers in evaluation mode; code: in training mode on target batches, which also changes their statistics
    (``teacher_statistics: batch``).
 7. Mixup: Beta(0.2, 0.2), but none on Amazon Review (Table 5), which is ``mixup: 0``; code: Beta(2, 2) always.
 8. BatchNorm statistics: the closed form of appendix E; code: variances averaged, without the variance of the means
    (``batch_norm: linear``). ``off``: they stay at their sites. ``loss``: the aggregate h_T is trained on (12), instead
    of Algorithm 1, line 16, with the statistics and shares of all K + 1 models. The paper does not say for how long
    (here as many mini-batches as distillation has, with the experiment's optimiser; they count as work), nor what h_T's
    own statistics are (here averaged, then updated by its batches). (12) keeps the diagonal of the second moments of
    (⟨a, b⟩ + ½)². It grows with the fourth power of the weights: if it diverges, lower ``batch_norm_weight``.
 9. Gate and learning rate: in the code they follow the epoch's number, with a lag. Here: the share of work done.
10. Optimisers: the code keeps them for the whole run. Here momentum starts at zero in every round, at the target and at
    the sources, unless ``training.reset_optimizer_each_round: false``, as in all our measurements.
11. r aggregations per epoch (``aggregations_per_epoch``): a round is 1/r of an epoch for r ≥ 1, at least a mini-batch
    (at a site with fewer than r mini-batches per epoch, r is that number); for r < 1 the sources pass 1/r times over
    their data and the target once. ``training.rounds`` counts rounds, whatever r.
12. The code gives every site equally many mini-batches. Here a round is each site's own epoch.
13. A source whose weights or predictions are not finite counts as missing (``engine.quorum``): no vote, no share.
Equal work: the target's mini-batches count, too, so a method that does not train there has more rounds.

Should reproduce: Amazon Review 79.0, 80.6, 85.6, 86.9, average 83.1; Digit-5 92.0; ablations of its Figure 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedshift.errors import TrainingDiverged, UserError
from fedshift.federation.exchange import Missing, Routed
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Reply, Share, Update
from fedshift.federation.site import Batch, Site
from fedshift.functional import knowledge_vote as votes
from fedshift.functional import schedules
from fedshift.functional.averaging import is_buffer, weighted_average
from fedshift.functional.consensus_focus import FocusTally
from fedshift.methods.base import Method, State
from fedshift.methods.federated import kd3a_shares
from fedshift.methods.federated.kd3a_teachers import BatchNormAlignment, Teachers, with_private
from fedshift.methods.robust import Averaged
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights


@dataclass(frozen=True)
class Aggregate(Reply):
    """What the target sends: the aggregated model, α of every source, its own α, and two numbers about the round.

    ``confident`` is the share of its samples on which some teacher passed the gate.
    """

    weights: Weights
    shares: Mapping[str, Share]
    target_share: Share
    confident: Share
    loss: float


class KD3A(Method):
    """Source models vote on the target's samples; sources are weighted by what they add to the consensus."""

    traits = Traits(
        name="kd3a",
        citation="Feng et al., ICML 2021",
        group="unlabelled",
        advice="For networks with BatchNorm, as released: 69.85 on PACS features, +8.54 over FedAvg (p = 0.375; "
        "at these targets p here = 0.040); in the paper's setting 57.47, and 0.34 below FedAvg on Amazon "
        "Review (p = 1.000).",
        sends="a model; every source's model reaches the target, which aggregates",
        settings={
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
        },
        needs_classes="its teachers vote on the class of a sample",
        target="one unlabelled",
        memory_names=("optimizer", "alignment", "private"),
        averages={"fit": Averaged(rules="each")},
        routed={"fit": Routed("weights", to={"distil": "models"})},
        reads_sealed="the target's model",
    )

    aggregations_per_epoch: PositiveFloat = Field(1.0, description="r: aggregations in each epoch of the sources")
    gate_start: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="g₀: confidence gate at the beginning")
    gate_end: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="g₁: confidence gate at the end")
    vote: Literal["rows", "top1", "mean"] = Field(
        "rows", description="what teachers add up: rows (paper), top-1 (code); mean = no vote (ablation)"
    )
    labels: Literal["soft", "hard"] = Field(
        "soft", description="p with weight n_p (paper), or the winner with 0/1 (code)"
    )
    focus: kd3a_shares.Focus = Field(
        "leave_one_out",
        description="source shares: consensus focus (paper; shapley: code), N_k (ablation), or other weightings",
    )
    focus_permutations: PositiveInt | None = Field(
        None, description="orders sampled for Shapley values; none = exact up to 10 sources"
    )
    target_share: Literal["samples", "confident"] = Field("samples", description="α_T: N_T/(ΣN + N_T), or the code's")
    share_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="shares averaged over rounds (code: 0.9)"
    )
    batch_norm: Literal["moments", "linear", "loss", "off"] = Field(
        "moments", description="BatchNorm statistics: closed form, averaged (code), trained (12), or not shared"
    )
    batch_norm_weight: NonNegativeFloat = Field(1.0, description="weight of (12) with batch_norm: loss")
    teacher_statistics: Literal["running", "batch"] = Field("running", description="teachers' BatchNorm on the target")
    private_classifier: bool = Field(False, description="classifiers are not aggregated (code)")
    mixup: NonNegativeFloat = Field(0.2, description="a of Beta(a, a) (code: 2); 0 = without")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * self._steps(batches_per_epoch, self.aggregations_per_epoch)

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        passes = 2 if self.batch_norm == "loss" else 1  # distillation, and the aggregate's BatchNorm-MMD
        return passes * rounds * self._steps(batches_per_epoch, max(1.0, self.aggregations_per_epoch))

    def _steps(self, batches_per_epoch: int, exchanges: float) -> int:
        return max(1, round(batches_per_epoch / exchanges))

    def check(self, network: Network) -> None:
        normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
        if self.focus == "h_divergence" and not normalised:
            raise UserError("kd3a.focus: h_divergence compares BatchNorm statistics, but the network has none")
        if self.batch_norm == "loss" and not normalised:
            raise UserError("kd3a.batch_norm: loss aligns BatchNorm statistics, but the network has none")

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
        self._drop_nonfinite_sources(federation, models, shares)
        report = {
            "losses": losses | {target: aggregate.loss},
            "aggregation_weights": shares | {target: aggregate.target_share},
            "confident": aggregate.confident,
        }
        return state.advance(aggregate.weights, numbers=shares | {target: aggregate.target_share}, report=report)

    def _drop_nonfinite_sources(
        self, federation: Federation, models: Mapping[str, Weights], shares: Mapping[str, float]
    ) -> None:
        """Count sources whose predictions are not finite, as the target says, as missing.

        Raises:
            TrainingDiverged: fewer sources than the quorum are left.
        """
        dropped = [site for site in models if site not in shares]
        (target,) = federation.targets
        for number, site in enumerate(dropped, len(federation.sources) - len(models) + 1):
            error = TrainingDiverged(
                f"target '{target}' says that the model of site '{site}' predicts no finite numbers there in round "
                f"{federation.round}: check its data, or lower training.lr"
            )
            federation.go_on_without(Missing(site, error), len(federation.sources), number)

    # Source -------------------------------------------------------------------------------------------------------

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train with cross-entropy from the aggregate."""
        model = site.model(with_private(site, weights))
        loss = site.minimise(
            lambda batch: F.cross_entropy(model(batch.inputs), batch.targets),
            model,
            steps=self._steps(site.batches_per_epoch, self.aggregations_per_epoch),
            remember="optimizer",
        )
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
        """Knowledge vote, distillation, consensus focus and aggregation at the target."""
        gate = schedules.linear(site.envelope.progress, self.gate_start, self.gate_end)
        teachers = Teachers(
            site,
            list(models.values()),
            gate,
            own_statistics=self.teacher_statistics == "running",
            whole_epoch=self.aggregations_per_epoch <= 1,
            tally=self._tally(site, len(models), gate),
        )
        student = site.model(with_private(site, weights))

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
            return votes.distillation_loss(student(inputs), labels, support)

        loss = self._pass(site, student, loss_of, "optimizer")
        distilled = site.weights_of(student)
        self._keep(site, distilled)

        value, confident = teachers.judged()
        finite = teachers.finite(models)
        if value is not None:
            value = value[[name in finite for name in models]]
        trained = teachers.weights(models)
        models, trained = ({name: of[name] for name in finite} for of in (models, trained))
        samples = {name: samples[name] for name in finite}
        alphas = kd3a_shares.of_round(
            site,
            self.focus,
            kd3a_shares.Models(weights, models, trained, samples),
            value,
            confident if self.target_share == "confident" else None,
        )
        if previous and self.share_momentum:
            alphas = kd3a_shares.smoothed(previous, alphas, self.share_momentum)
        parts = {**trained, site.name: distilled}
        merged = weighted_average(
            list(parts.values()), list(alphas.values()), bn_merge="moments" if self.batch_norm == "moments" else "mean"
        )
        aggregate = with_private(site, merged)
        if self.batch_norm == "loss":
            aggregate = self._aligned(site, aggregate, parts, alphas)
        shares = {name: alphas[name] for name in models}
        return Aggregate(aggregate, shares, alphas[site.name], confident, loss)

    def _pass(self, site: Site, model: Network, loss_of: Callable[[Batch], Tensor], memory: str) -> float:
        """Train ``model`` for the target's mini-batches of a round. Returns the mean loss."""
        steps = self._steps(site.batches_per_epoch, max(1.0, self.aggregations_per_epoch))
        return site.minimise(loss_of, model, steps=steps, remember=memory)

    def _aligned(
        self, site: Site, weights: Weights, models: Mapping[str, Weights], shares: Mapping[str, float]
    ) -> Weights:
        """The aggregate after training on BatchNorm-MMD (12) with the statistics and shares of all K + 1 models."""
        model = site.model(weights)
        alignment = BatchNormAlignment(model, models, shares)
        self._pass(site, model, lambda batch: self.batch_norm_weight * alignment.objective(batch.inputs), "alignment")
        return site.weights_of(model)

    def _tally(self, site: Site, teachers: int, gate: float) -> FocusTally | None:
        """Adds up the focus of every teacher; None if sources are not weighted by it."""
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
        """λ ~ Beta(a, a) and a permutation, drawn from torch's generator, which each exchange seeds."""
        lam = torch.distributions.Beta(self.mixup, self.mixup).sample()
        return float(lam), torch.randperm(size).to(site.device)

    # What stays at a site -----------------------------------------------------------------------------------------

    def personal(self, weights: Weights) -> Weights:
        def private(name: str) -> bool:
            return (self.private_classifier and name.startswith("classifier.")) or (
                self.batch_norm == "off" and is_buffer(name)
            )

        return weights.select(private)

    def _keep(self, site: Site, trained: Weights) -> None:
        kept = self.personal(trained)
        if kept:
            site.memory["private"] = kept
