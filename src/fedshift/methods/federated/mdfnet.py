"""MDFNet: privacy-protected multi-domain collaborative learning with masks for what domains share.

Anonymous: Privacy-Protected Multi-Domain Collaborative Learning. Under review, ICLR 2022 (P²MDCL). No official code.

Setting: win-win; L labelled and U unlabelled sites with the same classes share one model.
Wire: encoder, classifier and invariant mask, (L + U)·S(θ) up and down per round, N_k and r; up also a labelled site's
cross-entropy, and the number of classes in an unlabelled site's pseudo-labels. The frozen backbone is never sent
(features are the data); the specific mask, the decoder and the momentum stay at their site.

With f the frozen features, enc and cls the network's features and classifier, ⊗ the element-wise product:
    m^I, m^s ~ Bernoulli(σ(m̂)) per sample, straight-through gradient; in evaluation σ(m̂)
    g = enc(f),  g^I = m^I ⊗ g,  g^s = m^s ⊗ g,  L_r = ‖dec([g^s; g^I]) − f‖²
    L_s = ⟨g^s, g^I⟩ / Σ(g^s + g^I − g^s ⊗ g^I)
    labelled site    min  CE(y, cls(g^I)) + L_r + L_s
    unlabelled site  min  1[max p ≥ τ]·CE(ŷ, p) + H(p) + L_r + L_s,  p = cls(g^I)
        ŷ: spherical k-means on all its g^I, once per round, initialised with the classes that the common model predicts
    server           θ ← (1 − η)/L Σ θ_labelled + η/U Σ θ_unlabelled,   η = (1 − e^(−ρr)) / (2(1 + e^(−ρr)))
    every site       SGD momentum 0.9, lr = lr₀/(1 + 10r)^0.75, one epoch per round
L and U count the sites that answered: with `engine.quorum` the unlabelled ones together keep the share η.
With secure aggregation either mean is a sum, of three sites or more; the loss on record is that of labelled sites.

Where the paper leaves things open or contradicts itself (and what is done here)
 1. Masks have size 2048 but the output 128. Here: masks on the encoder's output (``mask: embedding``), which fits the
    decoder's input of 256; ``mask: inputs`` masks f and encodes twice.
 2. L_s on features has a denominator that can be 0 or negative, and no lower bound. Here: on the mask's probabilities;
    ``interaction: features`` first applies a sigmoid to the features, ``literal`` does not.
 3. In the text r is the round, with which η is saturated after one round. The formulas come from work in which r is the
    progress. Here: progress, (round − 1)/(R − 1); ``r: round``.
 4. L_r is a sum. Here: the mean over the entries of f, since a sum outweighs the other terms; ``reconstruction: sum``.
 5. One formula averages the decoder and the specific mask, too; the text keeps them at the sites. Here: the text.
 6. Not stated: masks in evaluation (``evaluation: threshold``), initial m̂ (U(0, 1), drawn for each mask), ReLU between
    layers (the network's), batch size, rounds, whether momentum is kept over rounds (here it is: ``keep_momentum``).
 7. τ = 0.1 admits nearly every sample: the largest of C probabilities is at least 1/C.
 8. A class whose cluster becomes empty keeps its last centroid; a class that is never predicted is left out in a round.
``setting: practical`` is not in the paper. While a model cannot tell classes apart, all clusters become one class, and
this does not recover. So unlabelled sites wait (η = 0, lr = lr₀) until the labelled cross-entropy is below `readiness`
· ln C; then r runs from 0 to 1 over the remaining rounds. Labelled sites train the mini-batches of waiting sites, and
later ``lend`` = 0.9 of them, so the total work is equal. Also τ = 0.9, ρ = 0.5 and no H. L_r, L_s and masks drawn at
random cost labelled sites accuracy on SURF features, the decay does on PACS features; so they have none of these.

Should reproduce: Image-CLEF ACC_s 91.47, ACC_t 88.85, mean of the tasks' harmonic means 89.57 (printed: 90.13, that of
the averages); Office-Home 85.91, 66.63, 74.39 (printed 75.00). SHOT has 87.38 and 71.53.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedshift.errors import UserError
from fedshift.federation.federation import Federation
from fedshift.federation.messages import BYTES_PER_NUMBER, Count, NotNegative, Number, PerSite, Update
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.site import Batch, Site
from fedshift.federation.training import set_learning_rate
from fedshift.functional import schedules
from fedshift.functional.averaging import MeanAccumulator
from fedshift.functional.clustering import class_means
from fedshift.functional.losses import entropy_of_logits
from fedshift.functional.masking import soft_interaction
from fedshift.methods.base import Method, RunPlan, Samples, State, Traffic
from fedshift.methods.heads import hand_over, with_block
from fedshift.methods.masks import Mask, Private, parts, with_masked_inputs
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.models.payload import payload
from fedshift.weights import Weights

_SMOOTHING = 1e-6
_NOT_YET = -1  # `State.numbers["opened"]` while unlabelled sites wait
_ROUNDS_OF_FEW = 2
_FEW_CLASSES = (
    "mdfnet: the pseudo-labels of '{}' name at most half of the classes in two rounds running: they may have "
    "collapsed, unless the site has no other classes; check the unlabelled accuracy, and see setting: practical"
)
_NEVER_READY = (
    "mdfnet: the labelled cross-entropy never fell far enough (readiness), so unlabelled sites did not take part: "
    "train more rounds, with a smaller batch_size or a larger lr"
)
Extra = int | Mapping[str, int]  # further mini-batches of a site, or of each site
_FEW_STEPS = 20  # with fewer mini-batches per epoch, the first clusters were seen to collapse without `readiness`


@dataclass(frozen=True)
class LabelledUpdate(Update):
    """A labelled site's `Update`. ``cross_entropy`` is its mean in nats, without L_r and L_s."""

    cross_entropy: NotNegative


@dataclass(frozen=True)
class UnlabelledUpdate(Update):
    """An unlabelled site's `Update`. ``named`` is the number of classes in its pseudo-labels, 0 without any."""

    named: Count


class MDFNet(Method):
    """Masks separate shared from specific features; unlabelled sites train on pseudo-labels from clusters."""

    traits = Traits(
        name="mdfnet",
        citation="P²MDCL, anonymous, ICLR 2022 submission",
        group="both",
        advice="Take setting: practical: 61.49 on PACS features where Source-only has 56.84, and the labelled "
        "sites lose 0.12; as the paper sets it they lose 2.73.",
        sends="a model, from sites of both kinds",
        sites="labelled and unlabelled sites",
        settings={
            "practical": {"readiness": 0.25, "threshold": 0.9, "rho": 0.5, "lend": 0.9, "draw": False}
            | {"decay": "unlabelled"}
            | dict.fromkeys(("entropy_weight", "reconstruction_weight", "interaction_weight"), 0.0)
        },
        small={"local_epochs": 2, "decay": False, "rho": 1},
        needs_classes="unlabelled sites learn from guessed classes",
        target="unlabelled",
        memory_names=("private", "optimizer"),
        averages={"fit": Averaged(), "fit_unlabelled": Averaged(at="targets")},
        server_reads="sums",
        relative_cost=2.0,
        tests=MethodTests(
            where="normed",
            options={
                "interaction_weight": tries(0.0, 5.0),
                "reconstruction_weight": tries(0.0, 5.0),
                "decoder": tries(3),
                "threshold": tries(0.9),
                "entropy_weight": tries(0.0, 5.0),
                "rho": tries(1.0),
                "decay": tries(False, "unlabelled"),
                "keep_momentum": tries(False, where="normed with momentum"),
                "readiness": tries(0.9, 0.01),
                "lend": tries(0.25, 0.5),
            },
            elsewhere={"interaction": ("literal",)},
            golden={"decay": False, "rho": 1.0, "keep_momentum": False},
            rates=(0.05, 0.03),
        ),
    )

    local_epochs: PositiveInt = Field(1, description="passes over a site's data per round")
    mask: Literal["embedding", "inputs"] = Field("embedding", description="what is masked: g (choice A), or f (B)")
    evaluation: Literal["probability", "threshold"] = Field(
        "probability", description="masks in evaluation: σ(m̂), or 1"
    )
    draw: bool = Field(True, description="masks in training: drawn for each sample; false = σ(m̂)")
    interaction: Literal["probabilities", "features", "literal"] = Field(
        "probabilities", description="L_s on the masks' probabilities, on features after a sigmoid, or on features"
    )
    interaction_weight: NonNegativeFloat = Field(1.0, description="weight of L_s; 0 = without")
    reconstruction: Literal["mean", "sum"] = Field("mean", description="L_r over the entries of f")
    reconstruction_weight: NonNegativeFloat = Field(1.0, description="weight of L_r; 0 = without")
    decoder: PositiveInt = Field(512, description="hidden units of the decoder")
    self_supervision: bool = Field(True, description="pseudo-labels at unlabelled sites; false: the ablation without")
    threshold: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="τ: confidence from which ŷ counts")
    entropy_weight: NonNegativeFloat = Field(1.0, description="weight of H at unlabelled sites; 0 = without")
    r: Literal["progress", "round"] = Field("progress", description="r: share of the rounds done, or their number")
    rho: NonNegativeFloat = Field(10.0, description="ρ: how fast the unlabelled sites' share grows")
    decay: bool | Literal["unlabelled"] = Field(
        True, description="lr₀/(1 + 10r)^0.75 at every site, or at unlabelled ones alone; off = training.lr_schedule"
    )
    keep_momentum: bool = Field(True, description="momentum is kept over rounds; false: as training says")
    readiness: PositiveFloat | None = Field(
        None, description="unlabelled sites wait for a labelled cross-entropy below this share of ln C; none: never"
    )
    lend: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the unlabelled sites' mini-batches that labelled sites train instead"
    )

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * self.local_epochs * batches_per_epoch

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return self.mini_batches(batches_per_epoch, rounds)

    def traffic(self, plan: RunPlan) -> Traffic:
        """At most: unlabelled sites that wait, as they do in a dry run, are not asked."""
        waiting = plan.rounds * plan.targets if self.readiness is not None else 0
        model, number = payload(plan.network).bytes, BYTES_PER_NUMBER
        up, down = model + 3 * number, model + 2 * number
        if plan.sums_only:  # up: a one, N_k, loss, classes, the model; down: what each site lends
            up = number * (4 + sum(tensor.numel() for tensor in plan.network.state_dict().values()))
            down += number * (len(plan.samples) + plan.targets - 1)
        return plan.dry + Traffic(waiting * up, waiting * down)

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        few = [f"{site} ({number})" for site, number in samples.epochs.items() if number < _FEW_STEPS]
        if not few or self.readiness is not None:
            return ()
        return (
            f"{self.display}: an epoch has few mini-batches at {', '.join(few)}, and clusters of a model that cannot "
            "tell classes apart yet collapse into one: write setting: practical, or lower training.batch_size",
        )

    def adapt_network(self, network: Network, sources: int) -> Network:
        hard = self.evaluation == "threshold"
        if self.mask == "inputs":
            return with_masked_inputs(network, hard, self.draw)
        size = network.embedding_size
        return with_block(network, lambda width: Mask(width, hard, self.draw), size=size, names=("encoder", "mask"))

    # Server -------------------------------------------------------------------------------------------------------

    def round(self, federation: Federation, state: State) -> State:
        opened = 0 if self.readiness is None else int(state.numbers.get("opened", _NOT_YET))
        waiting = opened == _NOT_YET
        r = 0.0 if waiting else self._r(opened, state.round, federation.rounds)
        moved = hand_over(federation, federation.targets, federation.sources, 1.0 if waiting else self.lend)
        extra = moved if federation.sums_only else PerSite(moved)  # the sites of a sum are sent the same
        content: dict[str, Any] = {"weights": state.weights, "r": r, "extra": extra}
        groups = [federation.ask(self.fit, to=federation.sources, **content).mean("uniform")]
        if not waiting and federation.targets:
            groups.append(federation.ask(self.fit_unlabelled, to=federation.targets, **content).mean("uniform"))
        labelled, *unlabelled = groups
        weight = progressive_weight(r, self.rho) if unlabelled else 0.0
        others = unlabelled[0].answered if unlabelled else len(federation.targets)
        shares = collaborative_shares(labelled.answered, others, weight)
        weights = {site: share for group, share in zip(groups, shares, strict=False) for site in group.shares}
        mean = MeanAccumulator()
        for group, part in zip(groups, (1 - weight, weight), strict=False):
            mean.add(group.model(), part)
        entropies, named = labelled.numbers["cross_entropy"], unlabelled[0].numbers["named"] if unlabelled else {}
        classes = list(state.weights.select("classifier").values())[-1].shape[0]  # C, of the classifier's last tensor
        numbers, warnings = self._guard(state, named, classes)
        if waiting and self.readiness is not None:
            ready = is_ready(fmean(entropies.values()), classes, self.readiness)
            numbers["opened"] = state.round + 1 if ready else _NOT_YET
            warnings += [_NEVER_READY] if federation.round >= federation.rounds else []
        report = {
            "losses": {site: loss for group in (*groups, labelled) for site, loss in group.numbers["loss"].items()},
            "aggregation_weights": weights,
            "cross_entropies": entropies,
            "named_classes": named,
            "warnings": warnings,
        }
        return state.advance(mean.result(), numbers={**state.numbers, **numbers}, report=report)

    def _r(self, opened: int, done: int, rounds: int) -> float:
        """r after ``done`` rounds, if unlabelled sites have taken part since round ``opened``."""
        return progress_since(opened, done, rounds) if self.r == "progress" else float(done - opened)

    def _guard(self, state: State, named: Mapping[str, float], classes: int) -> tuple[dict[str, Number], list[str]]:
        """Count the rounds in which a site's pseudo-labels name few classes. Returns the counts and warnings."""
        numbers: dict[str, Number] = {}
        warnings = []
        for site, number in named.items():
            few = self.self_supervision and names_few_classes(number, classes)
            numbers[f"few/{site}"] = so_often = int(state.numbers.get(f"few/{site}", 0)) + 1 if few else 0
            if so_often == _ROUNDS_OF_FEW:
                warnings.append(_FEW_CLASSES.format(site))
        return numbers, warnings

    # Labelled site ------------------------------------------------------------------------------------------------

    def fit(self, site: Site, weights: Weights, r: float, extra: Extra) -> LabelledUpdate:
        """Train with cross-entropy at a labelled site. ``extra`` mini-batches (by site) are added to its epochs."""
        seen: list[Tensor] = []

        def supervised_loss(batch: Batch, logits: Tensor) -> Tensor:
            loss = F.cross_entropy(logits, batch.targets)
            seen.append(loss.detach())
            return loss

        trained, loss = self._train(site, _Halves(self, site, weights), supervised_loss, r, extra)
        # Without a mini-batch nothing was measured: use the cross-entropy of guessing.
        mean = float(torch.stack(seen).cpu().double().mean()) if seen else math.log(site.classes)
        return LabelledUpdate(trained, site.samples, loss, mean)

    # Unlabelled site ----------------------------------------------------------------------------------------------

    def fit_unlabelled(self, site: Site, weights: Weights, r: float, extra: Extra) -> UnlabelledUpdate:
        """Train with entropy, and cross-entropy on the clusters' classes, at an unlabelled site."""
        halves = _Halves(self, site, weights)
        labels = self._pseudo_labels(site, halves.model) if self.self_supervision else None

        def unsupervised_loss(batch: Batch, logits: Tensor) -> Tensor:
            loss = self.entropy_weight * entropy_of_logits(logits).mean()
            if labels is None:
                return loss
            sure = logits.detach().softmax(1).amax(1) >= self.threshold
            each = F.cross_entropy(logits, labels[batch.rows.to(labels.device)], reduction="none")
            return loss + (sure * each).mean()

        trained, loss = self._train(site, halves, unsupervised_loss, r, extra)
        return UnlabelledUpdate(trained, site.samples, loss, 0 if labels is None else len(set(labels.tolist())))

    @torch.no_grad()
    def _pseudo_labels(self, site: Site, model: Network) -> Tensor:
        """ŷ of all the site's samples: clusters, initialised with the common model's predictions."""
        model.eval()
        features = torch.cat([model.features(batch.inputs) for batch in site.all_batches()])
        predicted = model.classifier(features).argmax(1)
        model.train()
        return spherical_kmeans(features, predicted, site.classes).labels

    # Both ---------------------------------------------------------------------------------------------------------

    def _train(
        self, site: Site, halves: _Halves, loss_of: Callable[[Batch, Tensor], Tensor], r: float, extra: Extra
    ) -> tuple[Weights, float]:
        """Train the model and the private modules; keep the latter. Returns the model and the mean loss."""
        model, private = halves.model, halves.private
        optimizer = site.optimizer(model, private, memory="optimizer", keep=self.keep_momentum)
        if self.decay is True or (self.decay and site.role == "target"):
            set_learning_rate(optimizer, schedules.inverse_power(r, site.training.lr, clamp=False))

        def whole(batch: Batch) -> Tensor:
            logits, common = halves(batch.inputs)
            return loss_of(batch, logits) + common

        steps = self.local_epochs * site.batches_per_epoch
        # In a sum a site that does not train would hide nobody: the coordinator knows what it sent.
        steps = max(1, steps + extra[site.name]) if isinstance(extra, Mapping) else steps + extra
        loss = site.minimise(whole, model, private, steps=steps, optimizers=[optimizer])
        site.remember_optimizer(optimizer, "optimizer", keep=self.keep_momentum)
        site.memory["private"] = site.weights_of(private)
        return site.weights_of(model), loss


class _Halves:
    """The common model and a site's private modules: logits, and the losses L_r and L_s."""

    def __init__(self, method: MDFNet, site: Site, weights: Weights) -> None:
        self._method = method
        self.model = site.model(weights)
        inputs = torch.Size(site.data.input_shape).numel()
        first, second = parts(self.model)
        self._encoder, mask = (second, first) if method.mask == "inputs" else (first, second)
        assert isinstance(mask, Mask)
        self._invariant = mask
        kept = site.memory.weights("private").clone() if "private" in site.memory else None
        with drawn_from(derive_seed(site.seed, site.name, "private")), torch.device("meta" if kept else "cpu"):
            self.private = Private(len(mask.logits), self.model.embedding_size, method.decoder, inputs, method.draw)
        if kept is not None:
            self.private.load_state_dict(dict(kept), assign=True)
        site.place(self.private)

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """cls(g^I), and the weighted sum of L_r and L_s."""
        method = self._method
        if method.mask == "inputs":
            invariant, specific = self._encoder(self._invariant(inputs)), self._encoder(self.private.mask(inputs))
        else:
            embedding = self._encoder(inputs)
            invariant, specific = self._invariant(embedding), self.private.mask(embedding)
        common = inputs.new_zeros(())
        if method.reconstruction_weight:
            gap = (self.private.decoder(torch.cat([specific, invariant], 1)) - inputs.flatten(1)).square()
            each = gap.mean() if method.reconstruction == "mean" else gap.sum(1).mean()
            common = common + method.reconstruction_weight * each
        if method.interaction_weight:
            common = common + method.interaction_weight * self._interaction(specific, invariant)
        return self.model.classifier(invariant), common

    def _interaction(self, specific: Tensor, invariant: Tensor) -> Tensor:
        if self._method.interaction == "probabilities":
            return soft_interaction(self.private.mask.logits.sigmoid(), self._invariant.logits.sigmoid(), _SMOOTHING)
        if self._method.interaction == "features":
            return soft_interaction(specific.sigmoid(), invariant.sigmoid(), _SMOOTHING).mean()
        return soft_interaction(specific, invariant).mean()


def progressive_weight(r: float, rho: float = 10.0) -> float:
    """The unlabelled sites' share ``η = (1 − e^(−ρr)) / (2(1 + e^(−ρr)))``, from 0 towards ½ (MDFNet)."""
    if r < 0 or rho < 0:
        raise UserError(f"the progressive weight needs r and rho of at least 0, found {r} and {rho}")
    return math.tanh(rho * r / 2) / 2


def collaborative_shares(labelled: int, unlabelled: int, weight: float) -> tuple[float, float]:
    """Share ``(1 − η)/L`` of each labelled site and ``η/U`` of each unlabelled one; all sum to 1 (MDFNet)."""
    if labelled < 1 or unlabelled < 1:
        raise UserError(
            f"the federation has {labelled} labelled and {unlabelled} unlabelled sites: at least one of each is needed"
        )
    if not 0 <= weight <= 1:
        raise UserError(f"the unlabelled sites' share must lie in [0, 1], found {weight}")
    return (1 - weight) / labelled, weight / unlabelled


def is_ready(cross_entropy: float, classes: int, readiness: float) -> bool:
    """Whether a model can tell classes apart: ``CE < q · ln C``. The readiness gate of MDFNet's practical setting."""
    if classes < 2:
        raise UserError(f"a cross-entropy needs at least two classes to be compared with guessing, found {classes}")
    return cross_entropy < readiness * math.log(classes)


def progress_since(opened: int, done: int, rounds: int) -> float:
    """Progress ``r = (done − opened)/(rounds − 1 − opened)`` since the gate opened, at most 1.

    It is 0 in the first round in which unlabelled sites take part, and 1 in the last round planned.
    """
    return min(1.0, (done - opened) / max(1, rounds - 1 - opened))


def names_few_classes(named: float, classes: int) -> bool:
    """Whether pseudo-labels name at most half of the classes: a sign that clusters have merged."""
    return 2 * named <= classes


@dataclass(frozen=True)
class Clusters:
    """The result of `spherical_kmeans`."""

    labels: Tensor  # class of each sample, (n,)
    centroids: Tensor  # (C, d), zero where a class never had a sample
    passes: int  # how often samples were assigned. The last pass changed nothing, unless the limit came first.


@torch.no_grad()
def spherical_kmeans(features: Tensor, labels: Tensor, classes: int, limit: int = 100) -> Clusters:
    """k-means by cosine distance ``d = ½(1 − cos(g, O_k))``, started from given labels (MDFNet).

    A centroid ``O_k`` is at first the mean of its class, then ``Σ_{ŷ=k} g/‖g‖``. Samples go to the nearest centroid
    until no label changes. A class that loses all samples keeps its last centroid; a class that is empty at the start
    takes no part. A zero vector has cosine 0 with everything and goes to the first class that takes part.
    """
    directions = F.normalize(features)
    centroids, present = class_means(features, labels, classes)
    for passes in range(1, limit + 1):
        cosines = directions @ F.normalize(centroids).T
        nearest = cosines.masked_fill(~present, -torch.inf).argmax(1)
        if torch.equal(nearest, labels):
            return Clusters(labels, centroids, passes)
        labels = nearest
        chosen = F.one_hot(labels, classes).to(directions.dtype)
        centroids = torch.where((chosen.sum(0) > 0)[:, None], chosen.T @ directions, centroids)
    return Clusters(labels, centroids, limit)
