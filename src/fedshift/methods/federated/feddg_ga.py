"""GA: generalization adjustment, which gives more weight to sites at which the common model is worse than their own.

Zhang, Xu, Yao, Wang: Federated Domain Generalization With Generalization Adjustment. CVPR 2023, Algorithm 1.

Setting: domain generalization, as FedAvg.
Wire: FedAvg's, and two losses a site and round.

    G_k = L_k(θ^r) − L_k(θ_k^r)              the gap at site k: the new common model's loss minus its own model's   (5)
    a_k ← a_k + d_r · (G_k − mean G)/max_j |G_j − mean G|,   cut to [0, 1], divided by the sum                  (6–8)
    θ^{r+1} ← Σ_k a_k θ_k
    d_r = d·(1 − r/R)                                                                     a step that becomes smaller

Where papers and code differ, and what was chosen (code: MediaBrain-SJTU/FedDG-GA)
 1. The gap of round r is known at the start of round r + 1, when θ^r arrives: so its weights are used from then on, in
    both. The code's step is then d·(1 − (r − 1)/R), which is above d at first (algorithms/fedavg/train_pacs_GA.py,
    `main`); the paper's is d·(1 − (r + 1)/R) for the gap of round r = 0, 1, …
 2. The code measures the gap on held-out data of each site, by accuracy, its default, or by loss
    (utils/weight_adjust.py, `refine_weight_dict_by_GA`). Here: losses on the training samples, without augmentation, as
    the paper's equation reads. They do not count as training. There is no setting for this difference.
 3. The code (`refine_weight_dict_by_GA`) divides the gap by the largest one without subtracting the mean, and the step
    by three, whatever the number of sites is; ``setting: released`` divides by the number of sites, which is three
    where the code ran.
 4. d = 0.2 (code); a_k begin at 1/K. Where all gaps are equal nothing changes (the code divides by zero:
    `refine_weight_dict_by_GA`).
 5. A site that is missing in a round keeps its weight, and the others share what is left (``engine.quorum``).

Should reproduce: no table of this setting with our splits is known to us; with d = 0 it is FedAvg with equal shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from pydantic import Field, NonNegativeFloat

from fedshift.errors import UserError
from fedshift.federation.federation import Federation
from fedshift.federation.messages import NotNegative, Update
from fedshift.federation.site import Site
from fedshift.methods.base import State, trained_mean
from fedshift.methods.federated.fedavg import LocalTraining
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.weights import Weights


@dataclass(frozen=True)
class Judged(Update):
    """The trained model; the loss of the common model that came, and that of the model which the site sent before."""

    common_loss: NotNegative
    own_loss: NotNegative


class GeneralizationAdjustment(LocalTraining):
    """Weights that follow the gap between the common model and each site's own."""

    traits = LocalTraining.traits.derive(
        name="feddg_ga",
        citation="Zhang et al., CVPR 2023",
        group="rivals",
        advice="For sites of which some are harder: 53.96 on SURF, as FedAvg by equal shares (53.69), with which "
        "it begins.",
        sends="a model, with two losses",
        settings={"released": {"centred": False, "shared_step": True, "late_step": True}},
        memory_names=("optimizer", "own_loss"),
        averages={"train": Averaged()},
        server_reads="norms",
        relative_cost=1.5,
        tests=MethodTests(options={"step": tries(0.0, 0.5)}),
    )

    step: NonNegativeFloat = Field(0.2, description="d: how far a weight may move in the first round")
    centred: bool = Field(True, description="gaps are measured from their mean (code: from zero)")
    shared_step: bool = Field(False, description="the step is divided by the number of sites (code: by 3)")
    late_step: bool = Field(False, description="the step is d·(1 − (r − 1)/R) for the gap of round r (code)")

    def round(self, federation: Federation, state: State) -> State:
        sources = federation.sources
        known = {site: cast(float, state.numbers.get(site, 1 / len(sources))) for site in sources}
        updates = federation.ask(self.train, to=sources, weights=state.weights).keep()
        common, numbers = updates.numbers("common_loss"), updates.numbers("own_loss")
        gaps = {site: common[site] - numbers[site] for site in updates.sites}
        # Sites that are missing keep their weights; the others share what they have together.
        whole = sum(known[site] for site in gaps)
        shares = {site: known[site] / whole if whole else 1 / len(gaps) for site in gaps}
        if state.round > 0:
            gap_of = state.round - 2 if self.late_step else state.round
            step = self.step * (1 - gap_of / federation.rounds)
            step /= len(sources) if self.shared_step else 1
            adjusted = adjusted_shares(list(shares.values()), list(gaps.values()), step, centred=self.centred)
            shares = dict(zip(shares, adjusted, strict=True))
        weights, used, losses = trained_mean(updates, by=shares)
        kept = known | {site: whole * share for site, share in shares.items()}
        return state.advance(
            weights, numbers=kept, report={"losses": losses, "aggregation_weights": used, "gaps": gaps}
        )

    def train(self, site: Site, weights: Weights) -> Judged:
        """Judge the common model, train, judge the own model for the next round."""
        common = loss_of(site, weights)
        own_loss = site.memory.get("own_loss", common)
        update = self.fit(site, weights)
        site.memory["own_loss"] = loss_of(site, update.weights)
        return Judged(update.weights, update.samples, update.loss, common, float(cast(float, own_loss)))


@torch.no_grad()
def loss_of(site: Site, weights: Weights) -> float:
    """The mean loss of a model on a site's training samples, without augmentation."""
    model = site.model(weights).eval()
    loss = site.objective.loss
    total = sum(float(loss(model(b.inputs), b.targets)) * len(b.inputs) for b in site.all_batches())
    return total / site.samples


def adjusted_shares(
    shares: Sequence[float], gaps: Sequence[float], step: float, *, centred: bool = True
) -> list[float]:
    """``a_k + d·(G_k − Ḡ)/max_j |G_j − Ḡ|``, cut to [0, 1] and divided by the sum: generalization adjustment.

    Source: Zhang et al. (CVPR 2023), equations 6 to 8. Where all gaps are equal the shares stay.
    """
    if len(shares) != len(gaps) or not all(math.isfinite(gap) for gap in gaps):
        raise UserError(f"shares are adjusted by one finite gap each, found {list(gaps)} for {len(shares)} shares")
    middle = sum(gaps) / len(gaps) if centred else 0.0
    largest = max(abs(gap - middle) for gap in gaps)
    if largest == 0:
        return list(shares)
    moved = [share + step * (gap - middle) / largest for share, gap in zip(shares, gaps, strict=True)]
    cut = [min(1.0, max(0.0, share)) for share in moved]
    total = sum(cut)
    return [share / total for share in cut] if total > 0 else list(shares)
