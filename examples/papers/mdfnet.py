"""MDFNet in plain PyTorch, from top to bottom. Only the images are fedshift's. The paper does not number its equations.

Anonymous: Privacy-Protected Multi-Domain Collaborative Learning. Under review, ICLR 2022.

    python examples/papers/mdfnet.py

Digits turned by 45 degrees are at a site without labels, others at sites with labels. All take part and share a model.
All are in one process here; `methods: [mdfnet]` in an experiment is the same, with messages. There is no code of the
authors, and the paper leaves much open: `fedshift methods mdfnet` says what was chosen, and why.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.data import registry

ROUNDS, RATE, MOMENTUM, BATCH = 20, 0.05, 0.9, 8  # with few steps in the first rounds, all clusters become one
EMBEDDING, DECODER = 64, 512
UNLABELLED = "D45"
CONFIDENT = 0.1
"""τ: from which probability a pseudo-label counts."""
RHO = 10.0
"""ρ: how fast the share of the sites without labels grows."""
SMOOTHING = 1e-6

Model = dict[str, Tensor]
Batches = Callable[[int, int], Iterator[Tensor]]
"""Site and round → the rows of each mini-batch of an epoch."""


class Mask(nn.Module):
    """m ~ Bernoulli(σ(m̂)) for each sample, with the gradient of the probability; in evaluation σ(m̂)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.rand(width))  # m̂

    def forward(self, embedding: Tensor) -> Tensor:
        chance = self.logits.sigmoid()
        if not self.training:
            return embedding * chance
        drawn = (uniform(embedding) < chance).to(embedding.dtype)
        return embedding * (drawn + chance - chance.detach())


class Shared(nn.Module):
    """What all sites share: encoder, the mask of what is common, m^I, and classifier."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.mask, self.classifier = encoder, Mask(width), nn.Linear(width, classes)


class Private(nn.Module):
    """What stays at a site: the mask of what is its own, m^s, and the decoder."""

    def __init__(self, width: int, hidden: int, inputs: int) -> None:
        super().__init__()
        self.mask = Mask(width)
        self.decoder = nn.Sequential(nn.Linear(2 * width, hidden), nn.ReLU(), nn.Linear(hidden, inputs))


@dataclass
class Site:
    """A site: frozen features f (n, d), labels or none, its private modules, its copy of the model, its optimiser."""

    features: Tensor
    labels: Tensor | None
    model: Shared
    private: Private

    def __post_init__(self) -> None:
        parameters = [*self.model.parameters(), *self.private.parameters()]
        self.optimizer = torch.optim.SGD(parameters, RATE, MOMENTUM)  # its momentum lasts for the whole run


# The algorithm ------------------------------------------------------------------------------------------------------


def mdfnet(start: Model, sites: list[Site], batches: Batches, rounds: int) -> Model:
    """The shared model after ``rounds``, an epoch of every site each."""
    shared = start
    for number in range(rounds):
        r = number / max(1, rounds - 1)  # progress; were r the round's number, η would end after one
        weight = (1 - math.exp(-RHO * r)) / (2 * (1 + math.exp(-RHO * r)))  # η
        for place, site in enumerate(sites):
            site.model.load_state_dict(shared)
            site.optimizer.param_groups[0]["lr"] = RATE / (1 + 10 * r) ** 0.75
            train(site, batches(place, number))
        labelled = mean([site for site in sites if site.labels is not None])
        unlabelled = mean([site for site in sites if site.labels is None])
        shared = {  # θ ← (1 − η)/L Σ θ_labelled + η/U Σ θ_unlabelled
            name: ((1 - weight) * labelled[name] + weight * unlabelled[name]).to(start[name].dtype) for name in start
        }
    return shared


def train(site: Site, batches: Iterator[Tensor]) -> None:
    """An epoch at a site: on CE(y, cls(g^I)), or without labels on the pseudo-labels ŷ of this round."""
    known = site.labels is not None
    labels, loss_of = (site.labels, F.cross_entropy) if known else (pseudo_labels(site), unsupervised)
    site.model.train()
    for rows in batches:
        f = site.features[rows]
        g = site.model.encoder(f)
        common, own = site.model.mask(g), site.private.mask(g)  # g^I = m^I ⊗ g,  g^s = m^s ⊗ g
        reconstruction = (site.private.decoder(torch.cat([own, common], 1)) - f).square().mean()  # L_r; the paper sums
        separation = interaction(site.private.mask.logits.sigmoid(), site.model.mask.logits.sigmoid())  # L_s
        task = loss_of(site.model.classifier(common), labels[rows])
        site.optimizer.zero_grad()
        (task + reconstruction + separation).backward()
        site.optimizer.step()


def unsupervised(scores: Tensor, pseudo: Tensor) -> Tensor:
    """1[max p ≥ τ]·CE(ŷ, p) + H(p)."""
    logarithms = scores.log_softmax(1)
    entropy = -(logarithms.exp() * logarithms).sum(1).mean()
    confident = scores.detach().softmax(1).amax(1) >= CONFIDENT
    return (confident * F.cross_entropy(scores, pseudo, reduction="none")).mean() + entropy


def interaction(own: Tensor, common: Tensor) -> Tensor:
    """⟨s, I⟩ / Σ(s + I − s ⊗ I), of the masks' probabilities: of features the denominator could be 0 or negative."""
    both = own * common
    return (both.sum() + SMOOTHING) / ((own + common - both).sum() + SMOOTHING)


@torch.no_grad()
def pseudo_labels(site: Site) -> Tensor:
    """ŷ of all samples: spherical k-means on g^I, which starts from the classes that the shared model predicts."""
    model = site.model.eval()
    common = model.mask(model.encoder(site.features))
    scores = model.classifier(common)
    labels = scores.argmax(1)
    directions, classes = F.normalize(common), F.one_hot(labels, scores.shape[1]).to(common.dtype)
    absent = classes.sum(0) == 0
    centres = classes.T @ common / classes.sum(0).clamp(min=1)[:, None]
    for _ in range(100):
        near = (directions @ F.normalize(centres).T).masked_fill(absent, -math.inf).argmax(1)
        if torch.equal(near, labels):
            break
        labels, classes = near, F.one_hot(near, scores.shape[1]).to(common.dtype)
        centres = torch.where(classes.sum(0)[:, None] > 0, classes.T @ directions, centres)  # Σ_{ŷ=k} g/‖g‖
    return labels


def mean(sites: list[Site]) -> Model:
    """The mean of the sites' models, in double precision."""
    models = [site.model.state_dict() for site in sites]
    return {name: torch.stack([model[name].double() for model in models]).mean(0) for name in models[0]}


def uniform(like: Tensor) -> Tensor:
    """Draws from U(0, 1)."""
    return torch.rand_like(like)


# A run --------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Five sites with labels, one without; accuracy at both kinds of site."""
    data = registry.parse({"name": "rotated_digits", "per_class": 40, "size": 8}).build().domains
    labels = {name: torch.from_numpy(domain.labels) for name, domain in data.items()}
    features = {name: torch.from_numpy(domain.inputs / 255).float().flatten(1) for name, domain in data.items()}
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, EMBEDDING), nn.ReLU())
    model = Shared(encoder, EMBEDDING, 10)
    sites = [
        Site(f, None if name == UNLABELLED else labels[name], copy.deepcopy(model), Private(EMBEDDING, DECODER, 64))
        for name, f in features.items()
    ]

    def batches(place: int, number: int) -> Iterator[Tensor]:
        order = torch.Generator().manual_seed(1000 * number + place)
        yield from torch.randperm(len(sites[place].features), generator=order).split(BATCH)

    model.load_state_dict(mdfnet(model.state_dict(), sites, batches, ROUNDS))
    model.eval()
    for name in data:
        scores = model.classifier(model.mask(model.encoder(features[name])))
        correct = (scores.argmax(1) == labels[name]).float().mean()
        print(f"{name}: {100 * correct:.1f} %{', the site without labels' if name == UNLABELLED else ''}")


if __name__ == "__main__":
    main()
