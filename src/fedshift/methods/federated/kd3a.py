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

import math
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
from fedshift.functional import schedules
from fedshift.functional.averaging import is_buffer, weighted_average
from fedshift.functional.clustering import dispersion
from fedshift.methods.base import Method, Samples, State
from fedshift.methods.federated import fada
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

        Raises TrainingDiverged: fewer sources than the quorum are left.
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
                released_labels(consensus) if self.labels == "hard" else (consensus.probabilities, consensus.support)
            )
            inputs = batch.inputs
            if self.mixup > 0 and len(inputs) > 1:
                inputs, labels = mixup(inputs, labels, *self._mixture(site, len(inputs)))
            return distillation_loss(student(inputs), labels, support)

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

    def _consensus(self, predictions: Tensor, gate: float) -> Consensus:
        if self.vote == "mean":
            return mean_ensemble(predictions)
        return knowledge_vote(predictions, gate, ballots=self.vote)

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

    ``value``: consensus focus of each source (K,); None for another ``focus``. ``confident``: the share of the target's
    samples on which a teacher is confident, for the released code's α_T. None: α_T is N_T/(ΣN + N_T). Returns α of
    every source and, under the site's own name, of the target. They sum to 1.
    """
    counts = list(models.samples.values())
    if value is None:
        target = site.samples / (sum(counts) + site.samples) if confident is None else confident / (len(counts) + 1)
        sources = [(1 - target) * share for share in _without_value(site, focus, models, counts)]
    elif confident is None:
        sources, target = domain_weights(value, counts, site.samples)
    else:
        sources, target = released_domain_weights(value, confident)
    return {**dict(zip(models.samples, sources, strict=True)), site.name: target}


def _without_value(site: Site, focus: Focus, models: Models, counts: Sequence[int]) -> list[float]:
    """Shares among the sources by one of the weightings that consensus focus is compared with."""
    if focus == "samples":
        return sample_weights(counts)
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
    return distance_weights(samples, distances)


def by_gain(site: Site, before: Weights, models: Sequence[Weights]) -> list[float]:
    """FADA's information gain: α is the softmax of the relative gains.

    A gain is how much tighter the target's features cluster under a model than under ``before``, as a ratio.
    """
    gains = fada.relative_gains(_dispersion(site, before), [_dispersion(site, model) for model in models])
    return fada.gain_weights(gains)


@torch.no_grad()
def _dispersion(site: Site, weights: Weights) -> float:
    """The dispersion of the target's features around their cluster centres under a model."""
    model = site.model(weights).eval()
    features = torch.cat([model.features(batch.inputs).flatten(1) for batch in site.all_batches()])
    return dispersion(features, site.classes, derive_seed(site.seed))


def smooth_shares(previous: Mapping[str, float], new: Mapping[str, float], momentum: float) -> dict[str, float]:
    """Shares averaged over rounds. A site that was missing in the last round starts with its new share."""
    before = [previous.get(name, share) for name, share in new.items()]
    mixed = smoothed_weights(before, list(new.values()), momentum)
    return {name: share / sum(mixed) for name, share in zip(new, mixed, strict=True)}


# The sources' models at the target: predictions, focus, alignment with their statistics -------------------------------


class Teachers:
    """The sources' models at the target: their predictions for its samples, and what each adds to the consensus.

    If nothing is augmented and all predictions fit in `_KEPT_BYTES`, they are computed once, in large batches, and the
    focus is that of all samples. Otherwise they are computed for every batch and not kept, and the focus is that of the
    samples in training.

    A model with finite weights may still predict numbers that are not finite (a source that diverges). Such predictions
    are replaced by equal probabilities, which pass no gate, and the model is not among the `finite` ones.

    ``own_statistics``: use the teachers' BatchNorm statistics; otherwise those of the batch. ``tally``: adds up the
    focus of each teacher; None if it is not needed.
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

        Raises TrainingDiverged: there is no such model.
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

    ``network``: h_T, whose BatchNorm layers' inputs are π. ``models``: site → model, of the K sources and the target.
    ``shares``: site → α.
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


Ballots = Literal["rows", "top1"]


UNSUPPORTED = 0.001
"""Support n_p of a sample that no teacher supports."""


@dataclass(frozen=True)
class Consensus:
    """The teachers' common answer for n samples."""

    probabilities: Tensor  # (n, C), rows that sum to 1
    support: Tensor  # the number n_p of teachers behind each row, (n,); 0.001 where there is none
    labels: Tensor  # winners of the vote, (n,) class numbers


def knowledge_vote(predictions: Tensor, gate: float, *, ballots: Ballots = "rows") -> Consensus:
    """Mean prediction and number of the teachers that are confident and agree, for every sample (KD3A, eq. 3 to 5).

    A teacher passes the gate if its highest probability is above ``gate``. Teachers that pass vote for a class. The
    result is the mean over those of them whose own first class won.

    If none is left, the result is the mean over all teachers with support 0.001. This happens if no teacher passes the
    gate, or if the sum elects a class that is no teacher's first. If no teacher passes, all vote. The first of equal
    classes wins.
    """
    confidence, choice = predictions.max(2)
    passing = confidence > gate
    voting = passing | ~passing.any(0)
    if ballots == "rows":
        votes = _masked_sum(predictions, voting)
    else:
        votes = predictions.new_zeros(predictions.shape[1:]).scatter_add_(1, choice.T, (confidence * voting).T)
    labels = votes.argmax(1)
    agreeing = passing & (choice == labels)
    count = agreeing.sum(0)
    averaged = agreeing | (count == 0)
    probabilities = _masked_sum(predictions, averaged) / averaged.sum(0)[:, None]
    support = count.to(predictions.dtype)
    return Consensus(probabilities, support.masked_fill_(count == 0, UNSUPPORTED), labels)


def mean_ensemble(predictions: Tensor) -> Consensus:
    """The mean of all teachers, each sample with support 1: without the vote (ablation of Figure 3)."""
    probabilities = predictions.mean(0)
    return Consensus(probabilities, probabilities.new_ones(len(probabilities)), probabilities.argmax(1))


def released_labels(consensus: Consensus) -> tuple[Tensor, Tensor]:
    """Targets of KD3A's released code. They replace probabilities and support in `mixup` and `distillation_loss`."""
    probabilities = consensus.probabilities
    hard = torch.zeros_like(probabilities).scatter_(1, consensus.labels[:, None], 1)
    return hard, (consensus.support >= 1).to(probabilities.dtype)


def distillation_loss(logits: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """Distillation ``n_p · KL(p ‖ softmax(logits))``, mean over the batch, in nats (KD3A, equation 6).

    0·log 0 counts as 0. For one-hot p it is the cross-entropy. For mixed one-hot p, as in the released code, it is
    lower than the cross-entropy by the labels' entropy, with the same gradient.
    """
    divergence = F.kl_div(logits.log_softmax(1), probabilities, reduction="none").sum(1)
    return (support * divergence).mean()


def mixup(inputs: Tensor, probabilities: Tensor, lam: float, permutation: Tensor) -> tuple[Tensor, Tensor]:
    """Mix pairs of samples, ``λx + (1−λ)x_π`` and ``λp + (1−λ)p_π``. KD3A leaves the support unmixed.

    Source: mixup (Zhang et al., ICLR 2018), as in KD3A.
    """
    return (
        torch.lerp(inputs[permutation], inputs, lam),
        torch.lerp(probabilities[permutation], probabilities, lam),
    )


def _masked_sum(predictions: Tensor, mask: Tensor) -> Tensor:
    """The sum of those teachers' rows that ``mask`` (K, n) keeps: (n, C)."""
    return torch.einsum("kn,knc->nc", mask.to(predictions.dtype), predictions)


EXACT_UP_TO = 10
"""The most teachers for which Shapley values go through all coalitions (2¹⁰)."""


_ORDERS = 128


# Numbers per piece when many coalitions vote: 4 MiB in float64.
_CHUNK = 524_288


class FocusTally:
    """The focus of every teacher, added up over batches of samples, without keeping any sample.

    Q is a sum over samples. So the tally keeps one number for each coalition that the rule needs: 2^K for exact Shapley
    values, K + 1 for leave-one-out. All sums are in float64.

    ``gate``: g, at least 0 and below 1. ``rule``: ``"leave_one_out"`` is ``CF_k = Q(all) − Q(all but k)`` (equation 8).
    ``"shapley"`` are the Shapley values of Q: each teacher's mean gain over all orders of joining (KD3A's released
    code), which sum to Q(all). ``ballots``: as in `knowledge_vote`. With ``"rows"`` a focus can be negative;
    `domain_weights` counts that as 0. With ``"top1"``, samples on which no teacher passes the gate count 0, as in the
    released code; then Q never falls when a teacher joins. ``permutations``: number of sampled orders, every second one
    the reverse of the one before. None: Shapley values are exact for up to 10 teachers, and means over 128 orders for
    more. ``generator``: generator of the orders, on the CPU; PyTorch's global one by default.
    """

    def __init__(
        self,
        teachers: int,
        gate: float,
        *,
        rule: Literal["shapley", "leave_one_out"] = "shapley",
        ballots: Ballots = "rows",
        permutations: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._gate, self._ballots = gate, ballots
        self._orders: tuple[Tensor, Tensor] | None = None
        self._rule = rule
        if rule == "leave_one_out":
            self._members = torch.cat([torch.ones(1, teachers), 1 - torch.eye(teachers)]).bool()
        elif permutations is None and teachers <= EXACT_UP_TO:
            self._members = (torch.arange(2**teachers)[:, None] >> torch.arange(teachers)) & 1 == 1
        else:
            count = _ORDERS if permutations is None else permutations
            drawn = torch.stack([torch.randperm(teachers, generator=generator) for _ in range((count + 1) // 2)])
            orders = torch.stack([drawn, drawn.flip(1)], 1).flatten(0, 1)[:count]
            # Teacher k is among the first j if its place in the order is below j.
            members = orders.argsort(1)[:, None, :] < torch.arange(teachers + 1)[:, None]
            self._members, number = torch.unique(members.flatten(0, 1), dim=0, return_inverse=True)
            self._orders = orders, number
        self._qualities = torch.zeros(len(self._members), dtype=torch.float64)

    def add(self, predictions: Tensor) -> None:
        """Count more samples."""
        self._qualities += _qualities(predictions, self._gate, self._members, self._ballots)

    def focus(self) -> Tensor:
        """CF_k over all samples so far: (K,) float64 on the CPU."""
        if self._rule == "leave_one_out":
            return self._qualities[0] - self._qualities[1:]
        if self._orders is None:
            return _exact_shapley(self._members, self._qualities)
        orders, number = self._orders
        gains = self._qualities[number].view(len(orders), -1).diff(dim=1)
        focus = torch.zeros(orders.shape[1], dtype=torch.float64)
        return focus.index_add_(0, orders.flatten(), gains.flatten()) / len(orders)


def _exact_shapley(members: Tensor, qualities: Tensor) -> Tensor:
    """Shapley values from the qualities (2^K,) of all coalitions. Bit k of a coalition's number says whether k is in
    it.
    """
    teachers = members.shape[1]
    numbers = torch.arange(2**teachers)
    # Exactly the members of S precede k in |S|! (K − |S| − 1)! of the K! orders.
    chances = torch.tensor(
        [1 / (teachers * math.comb(teachers - 1, size)) for size in range(teachers)], dtype=torch.float64
    )
    focus = []
    for teacher in range(teachers):
        without = numbers[~members[:, teacher]]
        gains = qualities[without + 2**teacher] - qualities[without]
        focus.append(chances[members[without].sum(1)] @ gains)
    return torch.stack(focus)


def _qualities(predictions: Tensor, gate: float, members: Tensor, ballots: Ballots) -> Tensor:
    """Q of every coalition, one per row of ``members`` (M, K), bool: (M,) float64 on the CPU."""
    vote = _row_qualities if ballots == "rows" else _top_qualities
    teachers, _, classes = predictions.shape
    inside = members.to(predictions.device).double()
    total = torch.zeros(len(members), dtype=torch.float64, device=predictions.device)
    for piece in torch.split(predictions, max(1, _CHUNK // max(len(members), teachers * classes)), dim=1):
        total += vote(piece.double(), gate, inside)
    return total.cpu()


def _top_qualities(rows: Tensor, gate: float, inside: Tensor) -> Tensor:
    """Q over the samples of ``rows`` (K, n, C) when votes are top-1 probabilities: the winner's sum is n_p · max p."""
    confidence, choice = rows.max(2)
    votes = confidence * (confidence > gate)
    best = inside.new_zeros(len(inside), rows.shape[1])
    for candidate in choice:
        best = torch.maximum(best, inside @ (votes * (choice == candidate)))
    return best.sum(1)


def _row_qualities(rows: Tensor, gate: float, inside: Tensor) -> Tensor:
    """Q over the samples of ``rows`` (K, n, C) when votes are whole rows.

    For every coalition and sample this finds the class with the largest sum over voters, and that sum. The class is
    almost always some teacher's first choice, so only those classes are summed. Where another class could reach as much
    (at most the sum of each voter's best among the others), all classes are summed.
    """
    confidence, choice = rows.max(2)
    passing = (confidence > gate).double()
    passed = inside @ passing > 0
    sizes = inside.sum(1, keepdim=True)

    def tally(values: Tensor) -> Tensor:
        return torch.where(passed, inside @ (values * passing), inside @ values)

    # Sorted by class, so that the first of equal ones wins.
    candidates = choice.sort(0).values
    heights = torch.full_like(passed, -1.0, dtype=torch.float64)
    winners = torch.zeros_like(passed, dtype=torch.int64)
    for candidate in candidates:
        sums = tally(rows.gather(2, candidate.expand(len(rows), -1)[..., None])[..., 0])
        better = sums > heights
        heights, winners = torch.where(better, sums, heights), torch.where(better, candidate, winners)
    others = rows.scatter(2, candidates.T.expand(len(rows), -1, -1), 0.0).amax(2)
    for sample, coalition in _by_sample((heights <= tally(others)) & (sizes > 0)):
        voting = torch.where(passed[coalition, sample, None], inside[coalition] * passing[:, sample], inside[coalition])
        heights[coalition, sample], winners[coalition, sample] = (voting @ rows[:, sample]).max(1)

    quality = torch.zeros_like(heights)
    for teacher, vote in enumerate(confidence * passing):
        quality += torch.where(choice[teacher] == winners, inside[:, teacher, None] * vote, 0.0)
    quality = torch.where(passed, quality, UNSUPPORTED * heights / sizes.clamp(min=1))
    # If the elected class is no voter's first, the mean over all teachers counts, past the gate or not.
    for sample, coalition in _by_sample(passed & (quality == 0)):
        highest = (inside[coalition] @ rows[:, sample]).amax(1)
        quality[coalition, sample] = UNSUPPORTED * highest / sizes[coalition, 0]
    return quality.sum(1)


def _by_sample(mask: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The samples with anything set in ``mask`` (M, n), and for each the numbers of its coalitions."""
    for sample in mask.any(0).nonzero()[:, 0].tolist():
        yield sample, mask[:, sample].nonzero()[:, 0]


def domain_weights(
    focus: Sequence[float] | Tensor, samples: Sequence[int], target_samples: int
) -> tuple[list[float], float]:
    """KD3A's shares (equation 9): ``α_T = N_T / (ΣN + N_T)`` and ``α_k = (1 − α_T) · N_k CF_k / Σ_j N_j CF_j``.

    Negative focus counts as 0. When all are 0 the sources share equally. All shares together sum to 1.
    """
    counts = torch.tensor(samples, dtype=torch.float64)
    target = target_samples / (sum(samples) + target_samples)
    return _shares(_focus(focus) * counts, 1 - target), target


def released_domain_weights(focus: Sequence[float] | Tensor, confident_fraction: float) -> tuple[list[float], float]:
    """Shares in KD3A's released code: the target's ``fraction / (K + 1)``, the sources' ``α_k ∝ CF_k``.

    Numbers of samples do not enter. Negative and all-zero focus as in `domain_weights`. The released code rounds every
    share to 4 decimals, which then need not sum to 1; these are not rounded.
    """
    target = confident_fraction / (len(focus) + 1)
    return _shares(_focus(focus), 1 - target), target


def smoothed_weights(previous: Sequence[float], new: Sequence[float], momentum: float = 0.9) -> list[float]:
    """``m · previous + (1 − m) · new`` for the shares of all sites (KD3A's released code)."""
    return [momentum * old + (1 - momentum) * now for old, now in zip(previous, new, strict=True)]


def sample_weights(samples: Sequence[int]) -> list[float]:
    """Shares by numbers of samples, ``α_k = N_k / Σ_j N_j``: KD3A without its focus."""
    return _shares(torch.tensor(samples, dtype=torch.float64), 1.0)


def distance_weights(samples: Sequence[int], distances: Sequence[float]) -> list[float]:
    """Shares by distance to the target, ``α_k ∝ N_k exp(−d_k)``: the H-divergence row of its robustness experiment."""
    counts = torch.tensor(samples, dtype=torch.float64)
    gaps = torch.tensor(distances, dtype=torch.float64)
    return _shares(counts * torch.exp(gaps.min() - gaps), 1.0)


def _shares(values: Tensor, total: float) -> list[float]:
    """Divide ``total`` in proportion to ``values``, equally when all are 0."""
    largest = values.max()
    # Division by the largest keeps the sum and the quotients in the range of float64.
    values = values / largest if largest > 0 else torch.ones_like(values)
    shares: list[float] = (total * values / values.sum()).tolist()
    return shares


def _focus(focus: Sequence[float] | Tensor) -> Tensor:
    return torch.as_tensor(focus, dtype=torch.float64, device="cpu").clamp(min=0)


_MEAN = "running_mean"


_VARIANCE = "running_var"


def batchnorm_objective(batch_features: Tensor, means: Tensor, variances: Tensor, shares: Tensor) -> Tensor:
    """BatchNorm-MMD of one layer, ``Σ_k α_k (‖mean(π) − m_k‖² + ‖mean(π²) − (v_k + m_k²)‖²)``, a scalar.

    Source: KD3A, equation 12, with the diagonal of the second moments only. Differentiable by every argument.
    """
    axes = [axis for axis in range(batch_features.dim()) if axis != 1]
    first = batch_features.mean(axes) - means
    second = batch_features.square().mean(axes) - (variances + means.square())
    return (shares[:, None] * (first.square() + second.square())).sum()


def batchnorm_distance(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], *, per_channel: bool = False
) -> float:
    """Distance of two models' BatchNorm statistics, ``Σ_l ‖Δ m‖² + ‖Δ (v + m²)‖²`` over layers, in float64.

    It is the objective of `batchnorm_objective` between two models. Layers are found by keys that end in
    ``running_mean`` and ``running_var``; without any the distance is 0.
    """
    left, right = Weights(first).select(is_buffer), Weights(second).select(is_buffer)
    total, channels = 0.0, 0
    for name in left:
        layer = name.removesuffix(_MEAN)
        if layer != name and layer + _VARIANCE in left:
            (mean, moment), (other_mean, other_moment) = _moments(left, layer), _moments(right, layer)
            total += ((mean - other_mean).square().sum() + (moment - other_moment).square().sum()).item()
            channels += len(mean)
    return total / channels if per_channel and channels else total


def _moments(weights: Weights, layer: str) -> tuple[Tensor, Tensor]:
    """First and second moment of one layer's inputs."""
    mean = weights[layer + _MEAN].double()
    return mean, weights[layer + _VARIANCE].double() + mean.square()
