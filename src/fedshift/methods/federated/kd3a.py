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

Where the paper and its code differ. In 1 to 8 setting ``paper``, the default, is the paper and ``released`` the code
(FengHZ/KD3A, train/train.py, `train`, unless another is named). There is no ``practical``: in our measurements
``released`` was better with BatchNorm in the network, and neither was without.
 1. Labels: the mean row with weight n_p; code (lib/utils/federated_utils.py, `knowledge_vote`): the one-hot winner with
    weight 0 or 1 (``labels: hard``).
 2. Vote: adds rows; code (`knowledge_vote`): adds top-1 probabilities (``vote: top1``).
 3. Consensus focus: leave-one-out (8); code (lib/utils/federated_utils.py, `calculate_consensus_focus`): the Shapley
    value (``focus: shapley``). Negative values count as 0; if all are zero, shares are equal. The paper compares it
    with ``focus: samples``; ``h_divergence``, the distance of each source's BatchNorm statistics to those of the
    target's data under the same model, per channel; and ``information_gain``, how much tighter, relatively, the
    target's features cluster under each source's model as it is aggregated. Sums of distances or gains would give one
    source all the weight: their exponentials are 0 or 1.
 4. Shares: (9), new in every round; code: α_T is the share of confident images/(K+1) (``target_share: confident``), N_k
    is not used, and shares are averaged over epochs (`update_domain_weight`; ``share_momentum: 0.9``).
 5. Classifiers are aggregated; code (main.py, `main`): they stay at their sites (``private_classifier``) and start from
    different weights. Here they start from the common start.
 6. Teachers in evaluation mode; code: in training mode on target batches, which also changes their statistics
    (``teacher_statistics: batch``).
 7. Mixup: Beta(0.2, 0.2), but none on Amazon Review (Table 5), which is ``mixup: 0``; code: Beta(2, 2) always.
 8. BatchNorm statistics: the closed form of appendix E; code (`federated_average`): variances averaged, without the
    variance of the means (``batch_norm: linear``). ``off``: they stay at their sites. ``loss``: the aggregate h_T is
    trained on (12), instead of Algorithm 1, line 16, with the statistics and shares of all K + 1 models. The paper does
    not say for how long (here as many mini-batches as distillation has, with the experiment's optimiser; they count as
    work), nor what h_T's own statistics are (here averaged, then updated by its batches). (12) keeps the diagonal of
    the second moments of (⟨a, b⟩ + ½)². It grows with the fourth power of the weights: if it diverges, lower
    ``batch_norm_weight``.
 9. Gate and learning rate: in the code (main.py, `main`) they follow the epoch's number, with a lag. Here: the share of
    work done.
10. Optimisers: the code (main.py, `main`) keeps them for the whole run. Here momentum starts at zero in every round, at
    the target and at the sources, unless ``training.reset_optimizer_each_round: false``, as in all our measurements.
11. r aggregations per epoch (``aggregations_per_epoch``): a round is 1/r of an epoch for r ≥ 1, at least a mini-batch
    (at a site with fewer than r mini-batches per epoch, r is that number); for r < 1 the sources pass 1/r times over
    their data and the target once. ``training.rounds`` counts rounds, whatever r.
12. The code gives every site equally many mini-batches. Here a round is each site's own epoch.
13. A source whose weights or predictions are not finite counts as missing (``engine.quorum``): no vote, no share.
Equal work: the target's mini-batches count, too, so a method that does not train there has more rounds.

Should reproduce: Amazon Review 79.0, 80.6, 85.6, 86.9, average 83.1; Digit-5 92.0; ablations of its Figure 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedshift.errors import TrainingDiverged, UserError
from fedshift.federation.exchange import Missing, Routed
from fedshift.federation.federation import Federation
from fedshift.federation.messages import BYTES_PER_NUMBER, Reply, Share, Update
from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Batch, Site
from fedshift.functional import knowledge_vote as votes
from fedshift.functional import schedules, source_weights
from fedshift.functional.averaging import is_buffer, weighted_average
from fedshift.functional.batchnorm import batchnorm_distance, batchnorm_objective
from fedshift.functional.clustering import dispersion
from fedshift.functional.consensus_focus import FocusTally
from fedshift.methods.base import Method, Samples, State
from fedshift.methods.heads import with_own_statistics
from fedshift.methods.method_tests import MethodTests, Try, tries
from fedshift.methods.robust import Averaged
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights

_INFERENCE_BATCH = 500
_KEPT_BYTES = 256 * 2**20
"""The most that predictions of all teachers for all samples may take to be kept in memory."""
Focus = Literal["shapley", "leave_one_out", "samples", "h_divergence", "information_gain"]


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
        tests=MethodTests(
            where="kd3a",
            beside={"gate_start": 0.6, "gate_end": 0.9},
            options={
                "aggregations_per_epoch": tries(2.0, 0.5),
                "gate_start": tries(0.8),
                "gate_end": tries(0.6),
                "focus_permutations": tries(1, focus="shapley"),
                "share_momentum": tries(0.7),
                # at weight 1 it diverges
                "batch_norm": (Try(("linear", "off")), Try(("loss",), {"batch_norm_weight": 0.01})),
                "batch_norm_weight": tries(0.02, batch_norm="loss", batch_norm_weight=0.01),
                "mixup": tries(0.0, 2.0),
            },
            golden={"focus": "shapley", "gate_start": 0.4, "gate_end": 0.5, "aggregations_per_epoch": 0.2},
            rates=(0.02, 0.03),
        ),
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
    focus: Focus = Field(
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

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        if samples.tokens and self.mixup > 0:
            raise UserError("kd3a: tokens are no numbers and cannot be mixed: write mixup: 0")
        return super().check_samples(samples)

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

        value, confident = teachers.focus_and_confidence()
        finite = teachers.finite(models)
        if value is not None:
            value = value[[name in finite for name in models]]
        trained = teachers.weights(models)
        models, trained = ({name: of[name] for name in finite} for of in (models, trained))
        samples = {name: samples[name] for name in finite}
        alphas = shares_of_round(
            site,
            self.focus,
            Models(weights, models, trained, samples),
            value,
            confident if self.target_share == "confident" else None,
        )
        if previous and self.share_momentum:
            alphas = smooth_shares(previous, alphas, self.share_momentum)
        parts = {**trained, site.name: distilled}
        merged = weighted_average(
            list(parts.values()), list(alphas.values()), bn_merge="moments" if self.batch_norm == "moments" else "mean"
        )
        aggregate = with_private(site, merged)
        if self.batch_norm == "loss":
            aggregate = self._align(site, aggregate, parts, alphas)
        shares = {name: alphas[name] for name in models}
        return Aggregate(aggregate, shares, alphas[site.name], confident, loss)

    def _pass(self, site: Site, model: Network, loss_of: Callable[[Batch], Tensor], memory: str) -> float:
        """Train ``model`` for the target's mini-batches of a round. Returns the mean loss."""
        steps = self._steps(site.batches_per_epoch, max(1.0, self.aggregations_per_epoch))
        return site.minimise(loss_of, model, steps=steps, remember=memory)

    def _align(
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


# Shares of sources and target in a round: consensus focus, or what the paper compares it with -------------------------


class Models(NamedTuple):
    """The models of a round: θ, the sources' models as received and as aggregated, and N_k."""

    start: Weights
    came: Mapping[str, Weights]
    merged: Mapping[str, Weights]
    samples: Mapping[str, int]


def shares_of_round(
    site: Site, focus: Focus, models: Models, value: Tensor | None, confident: float | None
) -> dict[str, float]:
    """The shares of a round.

    Args:
        site: the target.
        focus: how sources are weighted.
        models: the models of the round.
        value: consensus focus of each source (K,); None for another ``focus``.
        confident: the share of the target's samples on which a teacher is confident, for the released code's α_T. None:
            α_T is N_T/(ΣN + N_T).

    Returns:
        α of every source and, under the site's own name, of the target. They sum to 1.
    """
    counts = list(models.samples.values())
    if value is None:
        target = site.samples / (sum(counts) + site.samples) if confident is None else confident / (len(counts) + 1)
        sources = [(1 - target) * share for share in _without_value(site, focus, models, counts)]
    elif confident is None:
        sources, target = source_weights.domain_weights(value, counts, site.samples)
    else:
        sources, target = source_weights.released_domain_weights(value, confident)
    return {**dict(zip(models.samples, sources, strict=True)), site.name: target}


def _without_value(site: Site, focus: Focus, models: Models, counts: Sequence[int]) -> list[float]:
    """Shares among the sources by one of the weightings that consensus focus is compared with."""
    if focus == "samples":
        return source_weights.sample_weights(counts)
    if focus == "h_divergence":  # as received: after aggregation they may hold the target's statistics
        return by_distance(site, list(models.came.values()), counts)
    return by_gain(site, models.start, list(models.merged.values()))


def by_distance(site: Site, models: Sequence[Weights], samples: Sequence[int]) -> list[float]:
    """H-divergence: α_k ∝ N_k exp(−d_k).

    d_k is the distance per channel between a source's BatchNorm statistics and those of the target's data under its
    model.
    """
    with_own = (site.weights_of(with_own_statistics(site, model)) for model in models)
    distances = [batchnorm_distance(*pair, per_channel=True) for pair in zip(models, with_own, strict=True)]
    return source_weights.distance_weights(samples, distances)


def by_gain(site: Site, before: Weights, models: Sequence[Weights]) -> list[float]:
    """FADA's information gain: α is the softmax of the relative gains.

    A gain is how much tighter the target's features cluster under a model than under ``before``, as a ratio.
    """
    gains = source_weights.relative_gains(_dispersion(site, before), [_dispersion(site, model) for model in models])
    return source_weights.gain_weights(gains)


@torch.no_grad()
def _dispersion(site: Site, weights: Weights) -> float:
    """The dispersion of the target's features around their cluster centres under a model."""
    model = site.model(weights).eval()
    features = torch.cat([model.features(batch.inputs).flatten(1) for batch in site.all_batches()])
    return dispersion(features, site.classes, derive_seed(site.seed))


def smooth_shares(previous: Mapping[str, float], new: Mapping[str, float], momentum: float) -> dict[str, float]:
    """Shares averaged over rounds. A site that was missing in the last round starts with its new share."""
    before = [previous.get(name, share) for name, share in new.items()]
    mixed = source_weights.smoothed_weights(before, list(new.values()), momentum)
    return {name: share / sum(mixed) for name, share in zip(new, mixed, strict=True)}


# The sources' models at the target: predictions, focus, alignment with their statistics -------------------------------


class Teachers:
    """The sources' models at the target: their predictions for its samples, and what each adds to the consensus.

    If nothing is augmented and all predictions fit in `_KEPT_BYTES`, they are computed once, in large batches, and the
    focus is that of all samples. Otherwise they are computed for every batch and not kept, and the focus is that of the
    samples in training.

    A model with finite weights may still predict numbers that are not finite (a source that diverges). Such predictions
    are replaced by equal probabilities, which pass no gate, and the model is not among the `finite` ones.

    Args:
        site: the target.
        models: the sources' models.
        gate: confidence from which a teacher votes.
        own_statistics: use the teachers' BatchNorm statistics; otherwise those of the batch.
        whole_epoch: whether training passes over all samples.
        tally: adds up the focus of each teacher; None if it is not needed.
    """

    def __init__(
        self,
        site: Site,
        models: Sequence[Weights],
        gate: float,
        *,
        own_statistics: bool,
        whole_epoch: bool,
        tally: FocusTally | None,
    ) -> None:
        self._site, self._gate = site, gate
        self._own_statistics, self._tally = own_statistics, tally
        self._networks = [site.model(weights).requires_grad_(False) for weights in models]
        for network in self._networks:
            network.train(not self._own_statistics)
        self._confident = self._judged = 0
        self._finite = torch.ones(len(models), dtype=torch.bool, device=site.device)
        self._all: Tensor | None = None
        kept = len(models) * site.samples * site.classes * BYTES_PER_NUMBER <= _KEPT_BYTES
        if kept and whole_epoch and self._own_statistics and site.data.deterministic:
            self._all = torch.cat(list(self._ask_all()), dim=1)
            self._judge(self._all)

    @torch.no_grad()
    def _ask(self, inputs: Tensor) -> Tensor:
        result = torch.stack([network(inputs).softmax(1) for network in self._networks])
        finite = result.isfinite().all(2)
        self._finite &= finite.all(1)
        return result.where(finite[:, :, None], torch.full_like(result, 1 / result.shape[2]))

    def _ask_all(self) -> Iterator[Tensor]:
        return (self._ask(inputs) for inputs, _, _ in self._site.data.all_batches(_INFERENCE_BATCH))

    def _judge(self, probabilities: Tensor) -> None:
        self._confident += int((probabilities.amax(2) > self._gate).any(0).sum())
        self._judged += probabilities.shape[1]
        if self._tally is not None:
            self._tally.add(probabilities)

    def predictions(self, batch: Batch) -> Tensor:
        """The teachers' probabilities for a batch, (K, b, C)."""
        if self._all is not None:
            return self._all[:, batch.rows.to(self._all.device)]
        predictions = self._ask(batch.inputs)
        self._judge(predictions)
        return predictions

    def focus_and_confidence(self) -> tuple[Tensor | None, float]:
        """Consensus focus (K,), or None without a tally; and the share of samples on which a teacher is confident."""
        if not self._judged:  # no batch was left for this exchange
            for network in self._networks:
                network.eval()
            for predicted in self._ask_all():
                self._judge(predicted)
        return None if self._tally is None else self._tally.focus(), self._confident / self._judged

    def finite(self, names: Iterable[str]) -> list[str]:
        """The names of the models whose predictions were all finite.

        Args:
            names: one per model.

        Raises:
            TrainingDiverged: there is no such model.
        """
        names = list(names)
        result = [name for name, finite in zip(names, self._finite.tolist(), strict=True) if finite]
        if not result:
            raise TrainingDiverged(
                f"no source's model ({', '.join(names)}) predicts finite numbers at site '{self._site.name}': lower "
                "training.lr"
            )
        return result

    def weights(self, models: Mapping[str, Weights]) -> Mapping[str, Weights]:
        """The models as they are aggregated: as received, or with BatchNorm statistics updated by target batches."""
        if self._own_statistics:
            return models
        return {name: self._site.weights_of(network) for name, network in zip(models, self._networks, strict=True)}


class BatchNormAlignment:
    """The objective of BatchNorm-MMD (12) for a network in training: its features against the statistics of models.

    Args:
        network: h_T, whose BatchNorm layers' inputs are π.
        models: site → model, of the K sources and the target.
        shares: site → α.
    """

    def __init__(self, network: Network, models: Mapping[str, Weights], shares: Mapping[str, float]) -> None:
        self._network = network
        self._objectives: list[Tensor] = []
        alphas = [shares[site] for site in models]
        device = next(network.parameters()).device
        for name, module in network.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                means, variances = (
                    torch.stack([model[f"{name}.{part}"] for model in models.values()]).to(device)
                    for part in ("running_mean", "running_var")
                )
                hook = self._hook(means, variances, torch.tensor(alphas, device=device))
                module.register_forward_pre_hook(hook)

    def _hook(
        self, means: Tensor, variances: Tensor, shares: Tensor
    ) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._objectives.append(batchnorm_objective(inputs[0], means, variances, shares))

        return keep

    def objective(self, inputs: Tensor) -> Tensor:
        """Σ_l Σ_k α_k (‖mean(π_l) − m_lk‖² + ‖mean(π_l²) − (v_lk + m_lk²)‖²) for a batch, a scalar."""
        self._objectives.clear()
        self._network(inputs)
        return torch.stack(self._objectives).sum()


def with_private(site: Site, weights: Weights) -> Weights:
    """``weights`` with the site's private tensors in place of those of the same name."""
    return weights.merge(site.memory.weights("private")) if "private" in site.memory else weights
