"""SelfReg: samples of a class pull each other's logits and features.

Kim, Yoo, Park, Kim, Lee: SelfReg: Self-supervised Contrastive Regularization for Domain Generalization. ICCV 2021,
arXiv 2104.09841.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

o are a sample's logits, f its features, g a small network (perturbation layer); a prime stands for a sample of the same
class in the step, of any domain, a bar for a mixture of two: ā = γ a' + (1 − γ) a'', γ ~ Beta(0.5, 0.5):
    L_ind = ‖o − o'‖² + 0.3 ‖f − g(f')‖²                                         dissimilarity of pairs
    L_hdl = ‖o − ō‖² + 0.3 ‖f − ḡ(f)‖²                                           and of mixtures
    L(θ) = CE + min(1, CE) (γ L_ind + (1 − γ) L_hdl)
‖·‖² are means over samples and entries.

Where papers and code differ, and what was chosen. DomainBed: `SelfReg` and its base in facebookresearch/DomainBed,
domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. The formula is that of DomainBed (facebookresearch/DomainBed, domainbed/algorithms.py, SelfReg), by the authors.
    The factor min(1, CE) is held constant there, and here.
 2. g is linear–BatchNorm–ReLU twice and linear–BatchNorm, of twice the features' width (2,048 for 2,048). DomainBed's
    optimiser does not have it, so it stays as it was drawn: ``train_projection: false`` and ``setting: domainbed``.
 3. The authors' averaging of weights and curriculum of domains are not here. ``average: swa`` averages over rounds.
 4. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce: no row in DomainBed's published table; its code later than that has the method.
"""

from __future__ import annotations

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional

from fedshift.methods.composition.mixstyle import beta
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import DomainLoss, Step
from fedshift.models.network import Network


class SelfReg(DomainLoss):
    """Cross-entropy, and the distance to other samples of the class."""

    traits = DomainLoss.traits.derive(
        name="selfreg",
        citation="Kim et al., ICCV 2021",
        group="pooled",
        advice="Positive pairs alone, without negatives; it wants several samples of each class in a step.",
        settings={"domainbed": {"train_projection": False}},
        needs_classes="it pairs samples of a class",
        relative_cost=1.2,
        tests=MethodTests(
            options={"feature_weight": tries(0.0), "alpha": tries(5.0)},
            rates=(0.005, 0.005),
        ),
    )

    feature_weight: NonNegativeFloat = Field(0.3, description="weight of distances of features")
    alpha: PositiveFloat = Field(0.5, description="of γ ~ Beta(α, α)")
    train_projection: bool = Field(True, description="whether g trains; or stays as it was drawn")

    def build_parts(self, model: Network, domains: int) -> nn.Module:
        return Projection(model.embedding_size)

    def loss(self, step: Step) -> Tensor:
        step.parts.requires_grad_(self.train_projection)
        share = float(beta(self.alpha, 1, step.draws))
        partners = same_class(step.labels, step.draws), same_class(step.labels, step.draws)
        plain = functional.cross_entropy(step.logits, step.labels)
        gap = pull(step.logits, step.logits, partners, share)
        gap = gap + self.feature_weight * pull(step.features, step.parts(step.features), partners, share)
        return plain + plain.detach().clamp_max(1.0) * gap


def pull(values: Tensor, others: Tensor, partners: tuple[Tensor, Tensor], share: float) -> Tensor:
    """γ times the distance to partners, and 1 − γ times that to mixtures of them."""
    first, second = (others[order] for order in partners)
    mixed = share * first + (1 - share) * second
    return share * functional.mse_loss(values, first) + (1 - share) * functional.mse_loss(values, mixed)


def same_class(labels: Tensor, draws: torch.Generator) -> Tensor:
    """For each sample another one of its class, or itself: a permutation within every class, (n,)."""
    shuffled = torch.randperm(len(labels), generator=draws).to(labels.device)
    partners = torch.empty_like(shuffled)
    partners[labels.argsort(stable=True)] = shuffled[labels[shuffled].argsort(stable=True)]
    return partners


class Projection(nn.Sequential):
    """g: features (n, d) → (n, d)."""

    def __init__(self, width: int) -> None:
        hidden = width if width == 2048 else 2 * width
        super().__init__(
            nn.Linear(width, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, width),
            nn.BatchNorm1d(width),
        )
