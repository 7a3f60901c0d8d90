"""What FADA trains besides the model: domain identifiers at the coordinator, disentangling modules at a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.errors import FedshiftError
from fedshift.extras import compiler_comes_later
from fedshift.federation.messages import Features
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.site import Site
from fedshift.functional.adversarial import domain_identifier_loss, generator_loss
from fedshift.functional.information import mutual_information
from fedshift.functional.losses import entropy
from fedshift.models.network import Network
from fedshift.weights import Weights

NOTHING = Features({})
"""The content for and from a site that has no mini-batch left."""


class Disentangler(nn.Module):
    """The modules of (c) at one source besides the model's D: D', class identifier, critic and reconstruction."""

    def __init__(self, site: Site, model: Network, weight: float) -> None:
        super().__init__()
        self._site, self._weight = site, weight
        width = model.embedding_size
        with drawn_from(derive_seed(site.seed, site.name, "disentangler")):
            self.specific = square_layer(width)
            self.identifier = nn.Linear(width, model.classes)
            self.reconstruction = nn.Linear(2 * width, width)
            self.critic = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))
        if "disentangler" in site.memory:
            self.load_state_dict(dict(site.memory.weights("disentangler")))
        site.place(self)
        assert isinstance(model.features, nn.Sequential)
        # A function and tuples, so that the model's D is not among this module's parameters.
        self.invariant: Callable[[Tensor], Tensor] = model.features[1].__call__
        self._judges = (self.identifier, self.critic)
        self._parts = (model.features[1], self.specific, self.reconstruction)
        self._optimizers = (site.optimizer(*self._judges), site.optimizer(*self._parts))

    def learn(self, features: Tensor, labels: Tensor) -> None:
        """Train class identifier and critic, then D, D' and the reconstruction."""
        judging, disentangling = self._optimizers
        minimise = self._site.minimise_over
        minimise([labels], lambda given: self._judging(features, given), *self._judges, optimizers=[judging])
        minimise([features], self._disentangling, *self._parts, optimizers=[disentangling])

    def _judging(self, features: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            invariant, specific = self.invariant(features), self.specific(features)
        return F.cross_entropy(self.identifier(specific), labels) - self._information(invariant, specific)

    def _disentangling(self, features: Tensor) -> Tensor:
        invariant, specific = self.invariant(features), self.specific(features)
        confusion = -entropy(self.identifier(specific).softmax(1)).mean()
        gap = self.reconstruction(torch.cat([invariant, specific], 1)) - features
        whole: Tensor = confusion + F.relu(self._information(invariant, specific)) + gap.square().mean()
        return self._weight * whole

    def _information(self, invariant: Tensor, specific: Tensor) -> Tensor:
        """I(p, q). q' is the q of the previous sample; batches are in random order."""
        joint, shuffled = (torch.cat([invariant, other], 1) for other in (specific, specific.roll(1, 0)))
        return mutual_information(self.critic(joint), self.critic(shuffled))


class DomainIdentifiers:
    """The domain identifiers DI_i at the coordinator, one per source, made when its first features arrive.

    Args:
        known: their weights after the last round.
        name: the method's name, for messages.
        seed: the run's seed.
        width: hidden units.
        rate: learning rate of their Adam.
        weight: weight of the generators' loss.
    """

    def __init__(self, known: object, *, name: str, seed: int, width: int, rate: float, weight: float) -> None:
        self._name, self._seed = name, seed
        self._width, self._rate, self._weight = width, rate, weight
        self._known = known if isinstance(known, Mapping) else {}
        self._modules: dict[str, nn.Sequential] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._losses: list[float] = []

    def answer(self, sent: Mapping[str, Features], target: str) -> dict[str, Features]:
        """Train every DI_i on the features of its pair.

        Args:
            sent: site → features of its mini-batch.
            target: the target's name.

        Returns:
            Site → gradients of the generators' loss with respect to its features (b).
        """
        out = dict.fromkeys(sent, NOTHING)
        if target not in sent:
            raise FedshiftError(f"{self._name}: target '{target}' sends no features to align to")
        theirs = sent[target].get("features")
        slopes: list[Tensor] = []
        for site, features in sent.items():
            if site == target or theirs is None or not features:
                continue
            source, other = (rows.clone().requires_grad_() for rows in (features["features"], theirs))
            module = self._train(site, source.detach(), other.detach())
            loss = self._weight * generator_loss(module(source), module(other))
            slope, own = torch.autograd.grad(loss, (source, other))
            out[site] = Features({"features": slope})
            slopes.append(own.double())  # summed in float64: the order of sites does not matter
        if theirs is not None and slopes:
            out[target] = Features({"features": torch.stack(slopes).sum(0).to(theirs.dtype)})
        return out

    def _train(self, site: str, source: Tensor, target: Tensor) -> nn.Sequential:
        if site not in self._modules:
            width, hidden = source.shape[1], self._width
            with drawn_from(derive_seed(self._seed, "identifier", site)):
                module = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))
            if site in self._known:
                module.load_state_dict(dict(self._known[site]))
            self._modules[site] = module
            compiler_comes_later()
            self._optimizers[site] = torch.optim.Adam(module.parameters(), lr=self._rate)
        module, optimizer = self._modules[site], self._optimizers[site]
        optimizer.zero_grad(set_to_none=True)
        loss = domain_identifier_loss(module(source), module(target))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        self._losses.append(loss.item())
        return module

    def weights(self) -> dict[str, Weights]:
        """The weights of every identifier, for the next round."""
        trained = {site: Weights(module.state_dict()).clone() for site, module in self._modules.items()}
        return {**self._known, **trained}

    def loss(self) -> float:
        """The mean loss of the identifiers in the round: 2 ln 2 = 1.386 if they cannot tell the sides apart."""
        return sum(self._losses) / max(1, len(self._losses))


def square_layer(width: int) -> nn.Module:
    """A fully connected layer that keeps the width, with ReLU."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())
