"""MDFNet: privacy-protected multi-domain collaborative learning with masks for what domains share.

Anonymous: Privacy-Protected Multi-Domain Collaborative Learning. Under review, ICLR 2022 (P²MDCL). No official code.

Setting: win-win; L labelled and U unlabelled sites of the same classes, all to be served by one model.
Wire: encoder, classifier and invariant mask, (L + U)·S(θ) up and down a round, N_k and r. The frozen backbone never
travels (features are the data); the specific mask and the decoder stay at their site.

With f the frozen features, enc and cls the network's features and classifier, ⊗ the product by entries:
    m^I, m^s ~ Bernoulli(σ(m̂)) per sample, straight-through gradient; in evaluation σ(m̂)
    g = enc(f),  g^I = m^I ⊗ g,  g^s = m^s ⊗ g,  L_r = ‖dec([g^s; g^I]) − f‖²
    L_s = ⟨g^s, g^I⟩ / Σ(g^s + g^I − g^s ⊗ g^I)
    labelled site    min  CE(y, cls(g^I)) + L_r + L_s
    unlabelled site  min  1[max p ≥ τ]·CE(ŷ, p) + H(p) + L_r + L_s,  p = cls(g^I)
        ŷ: spherical k-means on all its g^I, once a round, started from the classes that the common model predicts
    server           θ ← (1 − η)/L Σ θ_labelled + η/U Σ θ_unlabelled,   η = (1 − e^(−ρr)) / (2(1 + e^(−ρr)))
    every site       SGD momentum 0.9, lr = lr₀/(1 + 10r)^0.75, one epoch a round

Where the paper leaves things open or contradicts itself (and what is done here)
 1. Masks of size 2048 on an output of 128. Here: on the encoder's output (``mask: embedding``), which the decoder's
    input of 256 wants; ``mask: inputs`` masks f and encodes twice.
 2. L_s on features has a denominator that can be 0 or negative, and no lower bound. Here: on the mask's probabilities;
    ``interaction: features`` squashes features with a sigmoid first, ``literal`` does not.
 3. r is the round in the text, for which η is over after one round; the formulas come from work in which it is the
    progress. Here: progress, (round − 1)/(R − 1); ``r: round``.
 4. L_r is a sum. Here: the mean over the entries of f, else it drowns the rest; ``reconstruction: sum``.
 5. One formula averages the decoder and the specific mask too, the text keeps them at the sites. Here: the text.
 6. Silent: masks in evaluation (``evaluation: threshold``), the start of m̂ (U(0, 1), drawn for each mask), ReLU between
    layers (the network's), batch size, rounds, and whether momentum outlives a round (``training``; where an epoch has
    few steps and momentum begins anew, the first clusters fall into one class and stay there).
 7. τ = 0.1 lets nearly everything through: the largest of C probabilities is at least 1/C.
 8. A class that k-means loses keeps its last centroid; one that nothing is predicted as takes no part in the round.
``self_supervision: false`` is the ablation without pseudo-labels.

Should reproduce: Image-CLEF ACC_s 91.47, ACC_t 88.85, mean of the tasks' harmonic means 89.57 (printed: 90.13, that of
the averages); Office-Home 85.91, 66.63, 74.39 (printed 75.00). SHOT has 87.38 and 71.53.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.federation.federation import Federation
from fedshift.federation.messages import BYTES_PER_NUMBER, Update
from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Batch, Site
from fedshift.functional.clustering import spherical_kmeans
from fedshift.functional.losses import entropy
from fedshift.functional.masking import draws_like, soft_interaction, straight_through_mask
from fedshift.functional.win_win import collaborative_shares, decayed_rate, progressive_weight
from fedshift.methods.base import Method, RunPlan, State, Traffic
from fedshift.methods.blocks import drawn_from, with_block
from fedshift.models.network import Network
from fedshift.weights import MeanAccumulator, Weights

_SMOOTHING = 1e-6


class MDFNet(Method):
    """A mask keeps what domains share apart from what they do not; unlabelled sites teach themselves by clusters."""

    name: ClassVar[str] = "mdfnet"
    title: ClassVar[str] = "MDFNet"
    citation: ClassVar[str] = "P²MDCL, anonymous, ICLR 2022 submission"
    scenario: ClassVar[str] = "labelled and unlabelled sites"
    memory_names: ClassVar[tuple[str, ...]] = ("private", "optimizer")
    needs_target: ClassVar[bool] = True
    relative_cost: ClassVar[float] = 2.0

    local_epochs: PositiveInt = Field(1, description="passes over a site's data per round")
    mask: Literal["embedding", "inputs"] = Field("embedding", description="what is masked: g (choice A), or f (B)")
    evaluation: Literal["probability", "threshold"] = Field(
        "probability", description="masks in evaluation: σ(m̂), or 1"
    )
    interaction: Literal["probabilities", "features", "literal"] = Field(
        "probabilities", description="L_s on the masks' probabilities, on squashed features, or on features as they are"
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
    decay: bool = Field(True, description="lr₀/(1 + 10r)^0.75 at every site; off = training.lr_schedule")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * self.local_epochs * batches_per_epoch

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return self.mini_batches(batches_per_epoch, rounds)

    def traffic(self, plan: RunPlan) -> Traffic:
        exchanges = plan.rounds * (plan.sources + plan.targets)
        up, down = plan.payload + 2 * BYTES_PER_NUMBER, plan.payload + BYTES_PER_NUMBER
        return Traffic(exchanges * up, exchanges * down)

    def adapt_network(self, network: Network, sources: int) -> Network:
        hard = self.evaluation == "threshold"
        if self.mask == "inputs":
            return _with_masked_inputs(network, hard)
        size = network.embedding_size
        return with_block(network, lambda width: Mask(width, hard), size=size, names=("encoder", "mask"))

    # Server -------------------------------------------------------------------------------------------------------

    def round(self, federation: Federation, state: State) -> State:
        r = float(state.round)
        if self.r == "progress":
            r = min(1.0, r / max(1, federation.rounds - 1))
        weight = progressive_weight(r, self.rho)
        shares = collaborative_shares(len(federation.sources), len(federation.targets), weight)
        mean = MeanAccumulator()
        losses: dict[str, float] = {}
        weights: dict[str, float] = {}
        everyone = ((federation.sources, self.fit, shares[0]), (federation.targets, self.fit_unlabelled, shares[1]))
        for sites, step, share in everyone:
            for site, update in federation.ask(step, to=sites, weights=state.weights, r=r).items():
                mean.add(update.weights, share)
                losses[site], weights[site] = update.loss, share
        return state.advance(mean.result(), report={"losses": losses, "aggregation_weights": weights})

    # Labelled site ------------------------------------------------------------------------------------------------

    def fit(self, site: Site, weights: Weights, r: float) -> Update:
        """At a labelled site: cross-entropy on the invariant features."""

        def supervised(batch: Batch, logits: Tensor) -> Tensor:
            return F.cross_entropy(logits, batch.targets)

        return self._trained(site, _Halves(self, site, weights), supervised, r)

    # Unlabelled site ----------------------------------------------------------------------------------------------

    def fit_unlabelled(self, site: Site, weights: Weights, r: float) -> Update:
        """At an unlabelled site: entropy, and cross-entropy with the classes of the clusters."""
        halves = _Halves(self, site, weights)
        labels = self._pseudo_labels(site, halves.model) if self.self_supervision else None

        def unsupervised(batch: Batch, logits: Tensor) -> Tensor:
            probabilities = logits.softmax(1)
            loss = self.entropy_weight * entropy(probabilities).mean()
            if labels is None:
                return loss
            sure = probabilities.detach().amax(1) >= self.threshold
            each = F.cross_entropy(logits, labels[batch.rows.to(labels.device)], reduction="none")
            return loss + (sure * each).mean()

        return self._trained(site, halves, unsupervised, r)

    @torch.no_grad()
    def _pseudo_labels(self, site: Site, model: Network) -> Tensor:
        """ŷ of all the site's samples: their clusters, started from what the common model predicts."""
        model.eval()
        features = torch.cat([model.features(batch.inputs) for batch in site.all_batches()])
        predicted = model.classifier(features).argmax(1)
        model.train()
        return spherical_kmeans(features, predicted, site.classes).labels

    # Both ---------------------------------------------------------------------------------------------------------

    def _trained(self, site: Site, halves: _Halves, loss_of, r: float) -> Update:  # type: ignore[no-untyped-def]
        """Train the model and what is private together, and keep the latter."""
        model, private = halves.model, halves.private
        optimizer = site.optimizer(model, private, memory="optimizer")
        for group in optimizer.param_groups:
            group["lr"] = decayed_rate(r, site.training.lr) if self.decay else group["lr"]

        def whole(batch: Batch) -> Tensor:
            logits, common = halves(batch.inputs)
            loss: Tensor = loss_of(batch, logits) + common
            return loss

        loss = site.minimise(whole, model, private, epochs=self.local_epochs, optimizers=[optimizer])
        site.remember_optimizer(optimizer, "optimizer")
        site.memory["private"] = site.weights_of(private)
        return Update(site.weights_of(model), site.samples, loss)


class Mask(nn.Module):
    """Multiplies features (b, …) by a mask over all but the first axis, m̂ drawn from U(0, 1) at first."""

    def __init__(self, width: int, hard: bool) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.rand(width))
        self._hard = hard

    def forward(self, features: Tensor) -> Tensor:
        """Drawn for each sample in training; in evaluation the probabilities, or whether they reach ½."""
        flat = features.flatten(1)
        if self.training:
            mask = straight_through_mask(self.logits, draws_like(flat))
        else:
            mask = (self.logits >= 0).to(flat) if self._hard else self.logits.sigmoid()
        return (flat * mask).view_as(features)


class Private(nn.Module):
    """What stays at a site: the specific mask, and the decoder from both halves to the inputs."""

    def __init__(self, masked: int, embedding: int, hidden: int, inputs: int) -> None:
        super().__init__()
        self.mask = Mask(masked, hard=False)
        self.decoder = nn.Sequential(nn.Linear(2 * embedding, hidden), nn.ReLU(), nn.Linear(hidden, inputs))


class _Halves:
    """The common model and a site's private part in training: logits, and the losses that every site has."""

    def __init__(self, method: MDFNet, site: Site, weights: Weights) -> None:
        self._method = method
        self.model = site.model(weights)
        inputs = torch.Size(site.data.input_shape).numel()
        first, second = _parts(self.model)
        self._encoder, mask = (second, first) if method.mask == "inputs" else (first, second)
        assert isinstance(mask, Mask)
        self._invariant = mask
        kept = site.memory.weights("private").clone() if "private" in site.memory else None
        with drawn_from(derive_seed(site.seed, site.name, "private")), torch.device("meta" if kept else "cpu"):
            self.private = Private(len(mask.logits), self.model.embedding_size, method.decoder, inputs)
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
        reading = self._method.interaction
        if reading == "probabilities":
            pair = self.private.mask.logits.sigmoid(), self._invariant.logits.sigmoid()
            return soft_interaction(*pair, _SMOOTHING)
        if reading == "features":
            return soft_interaction(specific.sigmoid(), invariant.sigmoid(), _SMOOTHING).mean()
        return soft_interaction(specific, invariant).mean()


def _parts(model: Network) -> tuple[nn.Module, nn.Module]:
    """Encoder and mask, or mask and encoder."""
    assert isinstance(model.features, nn.Sequential)
    first, second = model.features
    return first, second


def _with_masked_inputs(network: Network, hard: bool) -> Network:
    """``network`` with the invariant mask before its features."""
    first = next((module for module in network.features.modules() if list(module.parameters(recurse=False))), None)
    if not isinstance(first, nn.Linear):
        raise UserError("mdfnet.mask: inputs masks the vectors that a fully connected layer reads; choose model mlp")
    width = first.in_features
    mask = _parts(with_block(network, lambda _: Mask(width, hard), size=network.embedding_size))[1]
    return Network(
        nn.Sequential(OrderedDict(mask=mask, encoder=network.features)),
        network.classifier,
        embedding_size=network.embedding_size,
        classes=network.classes,
        stages={name: path.replace("features", "features.encoder", 1) for name, path in network.stages.items()},
        alignment_stages=network.alignment_stages,
    )
