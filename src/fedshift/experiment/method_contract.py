"""What every method promises, tried on made-up sites: ``fedshift.check_method(MyMethod)``, in a notebook or a test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedshift.data.domain import Domain, Preprocessing
from fedshift.data.site_data import batches_per_epoch
from fedshift.errors import UserError
from fedshift.experiment.costs import SAMPLES, dry_run
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import known_kinds
from fedshift.federation.site_runner import Setting, SitePlan
from fedshift.federation.training import Training
from fedshift.methods.base import Method, RunPlan, State
from fedshift.methods.rounds import play_round, start_run
from fedshift.models import registry as models
from fedshift.models.options import NetworkOptions
from fedshift.models.own.trial import line_of
from fedshift.weights import Weights

_SIZES = {"large": 41, "small": 5, "single": 1}
"""Samples of the sites; a mini-batch has 8, so one has a last batch of one and one has a single sample."""
_CLASSES, _SIDE, _ROUNDS = 3, 12, 10
_NETWORK = {"name": "mnist_cnn", "channels": [3, 4], "hidden": 6}
_LEARNED = 0.85
"""The loss that a method must fall below, as a part of that of equal probabilities; the classes are easy to tell."""


def check_method(kind: type[Method], network: str | Mapping[str, Any] | None = None, **options: Any) -> None:
    """Hold a method of your own to what every method promises. It takes a few seconds.

    It trains on three small sites of made-up images with three classes.

    Args:
        kind: the class.
        network: name, or name and options, of a network for small grey images; by default a small CNN.
        options: of the method, beside those of its trait ``small``.

    Raises:
        UserError: promises are broken; the message has one line for each.

    Example:
        >>> from fedshift.methods import FedAvg
        >>> check_method(FedAvg)
    """
    chosen = {"name": network} if isinstance(network, str) else network or _NETWORK
    tried = _Tried(kind(**{**kind.traits.small, **options}), models.parse(chosen, permit=models.any_code))
    broken = [f"{promise}: {why}" for promise, why in _broken(tried)]
    if broken:
        raise UserError("\n".join([f"{kind.__name__} breaks {len(broken)} of {len(_PROMISES)} promises", *broken]))


def _broken(tried: _Tried) -> Iterator[tuple[str, str]]:
    for promise, keeps in _PROMISES.items():
        try:
            why = keeps(tried)
        except Exception as error:
            why = f"{type(error).__name__}{line_of(error)}: {error}".partition("\n")[0]
        if why:
            yield promise, why


@dataclass(frozen=True)
class _Tried:
    """A method and the sites on which it is tried."""

    method: Method
    network: NetworkOptions
    sizes: Mapping[str, int] = field(default_factory=lambda: _SIZES)

    def plans(self) -> list[SitePlan]:
        """The sites in their order; a pool, and a target without labels, where the method needs them."""
        traits, domains = self.method.traits, [_images(name, size) for name, size in self.sizes.items()]
        parts = [(domain, np.arange(len(domain)), number) for number, domain in enumerate(domains)]
        target = [(_images("target", 14), np.arange(14), len(parts))] if traits.needs_target else []
        if traits.target == "labelled":
            return [SitePlan("target", "source", target)]
        if traits.pooled:
            return [SitePlan("pool", "source", parts, target)]
        sources = [SitePlan(part[0].name, "source", [part]) for part in parts]
        return sources + [SitePlan("target", "target", [part]) for part in target]

    def setting(self, seed: int = 3, refuse: Sequence[str] = (), **training: Any) -> Setting:
        """What all sites of a run have in common."""
        images = Preprocessing(kind="image", channels=1, size=_SIDE, mean=(0.5,), std=(0.25,))
        asked = Training(**{"batch_size": 8, "lr": 0.05, "rounds": 2, **training})
        shape, sources = (1, _SIDE, _SIDE), len(self.sizes)
        return Setting(
            self.method, asked, self.network, images, shape, _CLASSES, sources, seed, "cpu", frozenset(refuse)
        )

    def start(self, setting: Setting, rounds: int = 2) -> tuple[LocalFederation, State]:
        """The sites and the state before the first round."""
        plans = self.plans()
        budget = 480 if self.method.traits.pooled else 120
        where = LocalFederation(plans, setting, budget={plan.name: budget for plan in plans}, rounds=rounds)
        built = setting.build_network().state_dict()
        state = start_run(self.method, where, Weights({name: tensor.contiguous() for name, tensor in built.items()}))
        where.settle()
        return where, state

    def run(self, rounds: int, **setting: Any) -> tuple[LocalFederation, State]:
        """The sites and the state after some rounds."""
        where, state = self.start(self.setting(**setting))
        for _ in range(rounds):
            state = play_round(self.method, where, state)
            where.settle()
        return where, state


def _images(name: str, number: int) -> Domain:
    """Noisy pictures of one fixed pattern per class, a little brighter or darker at each site."""
    patterns = np.random.default_rng(7).integers(40, 200, (_CLASSES, 1, _SIDE, _SIDE))
    draws = np.random.default_rng(sum(name.encode()))
    labels = np.arange(number, dtype=np.int64) % _CLASSES
    noise = draws.integers(-40, 41, (number, 1, _SIDE, _SIDE)) + draws.integers(-15, 16)
    return Domain(name, np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8), labels)


# The promises: what is wrong, or "" ---------------------------------------------------------------------------------


def _same_seed(tried: _Tried) -> str:
    first = tried.run(1)[1]
    torch.rand(3)  # what the caller drew before must not matter
    if tried.run(1)[1].weights != first.weights:
        return "two runs of one seed differ; draw with site.generator or federation.seed alone"
    return "" if tried.run(1, seed=4)[1].weights != first.weights else "another seed gives the same weights"


def _order(tried: _Tried) -> str:
    if tried.method.traits.pooled or tried.method.traits.target == "labelled":
        return ""
    turned = _Tried(tried.method, tried.network, {name: _SIZES[name] for name in ("single", "large", "small")})
    first, second = (item.run(1)[1].weights for item in (tried, turned))
    far = [name for name in first if not torch.allclose(first[name], second[name], atol=1e-6, rtol=1e-5)]
    return f"the order in which sites are asked changes '{far[0]}'; take sites by name" if far else ""


def _declared(tried: _Tried) -> str:
    declared = tried.method.calls.shares
    where, _ = tried.run(1, refuse=sorted(set(known_kinds()) - set(declared)))
    sent = sorted(set(where.ledger.total["up"]) - set(declared))
    return f"{', '.join(sent)} left a site, and its calls promise {', '.join(declared)}" if sent else ""


def _bytes(tried: _Tried) -> str:
    where, _ = tried.run(2)
    setting, plans = tried.setting(), tried.plans()
    network = setting.build_network()
    samples = {plan.name: sum(len(rows) for _, rows, _ in plan.parts) for plan in plans if plan.name in where.sources}
    plan = RunPlan(
        dry=dry_run(tried.method, plans, setting, network, rounds=2).of(2),
        dry_samples={site: min(SAMPLES, number) for site, number in samples.items()},
        network=network,
        input_shape=setting.input_shape,
        samples=samples,
        targets=len(where.targets),
        rounds=2,
        trained=8 * sum(where.progress.used.values()),
    )
    foretold = tried.method.traffic(plan)
    up, down = (sum(where.ledger.total[way].values()) for way in ("up", "down"))
    if (up, down) == (foretold.up, foretold.down):
        return ""
    return f"two rounds sent {up} bytes up and {down} down, traffic() says {foretold.up} and {foretold.down}"


def _kept(tried: _Tried) -> str:
    setting = tried.setting(momentum=0.9, reset_optimizer_each_round=False)
    where, state = tried.start(setting)
    given = state.weights.clone()
    if play_round(tried.method, where, state).weights == given:
        return "a round leaves the model as it was"
    return "" if state.weights == given else "a round changes the weights it was given in place; return new ones"


def _work(tried: _Tried) -> str:
    if tried.method.traits.pooled or tried.method.traits.target == "labelled":
        return ""
    where, _ = tried.run(2)
    for site in where.sources:
        announced = tried.method.mini_batches(batches_per_epoch(tried.sizes[site], 8), 2)
        if where.progress.used[site] != announced:
            return f"site '{site}' trained on {where.progress.used[site]} mini-batches, mini_batches() says {announced}"
    return ""


def _learns(tried: _Tried) -> str:
    tried = _Tried(tried.method, tried.network, dict.fromkeys(_SIZES, 40))
    setting = tried.setting(lr=0.1, momentum=0.9)
    where, state = tried.start(setting, _ROUNDS)
    shares: list[float] = []
    while len(shares) < _ROUNDS and (not shares or shares[-1] >= _LEARNED):
        state = play_round(tried.method, where, state)
        where.settle()
        shares.append(_share_of_chance(tried, setting, where, state))
    if shares[-1] < _LEARNED:
        return ""
    return f"after {_ROUNDS} rounds its loss on the sites is {shares[-1]:.2f} of that of guessing, not below {_LEARNED}"


def _share_of_chance(tried: _Tried, setting: Setting, where: LocalFederation, state: State) -> float:
    """The loss on the sites' samples, each with what predicts there; the sites have equally many."""
    model = tried.method.evaluated_network(setting.build_network(), len(tried.sizes))
    domains = [_images(name, size) for name, size in tried.sizes.items()]
    if tried.method.traits.target == "labelled":
        domains = [_images("target", 14)]
    losses: list[float] = []
    for domain in domains:
        model.load_state_dict(dict(where.own_weights(domain.name, state.weights)))
        inputs, labels = torch.from_numpy(domain.inputs).float() / 255, torch.from_numpy(domain.labels)
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model.eval()((inputs - 0.5) / 0.25), labels)
        losses.append(loss.item())
    return sum(losses) / len(losses) / math.log(_CLASSES)


_PROMISES: Mapping[str, Callable[[_Tried], str]] = {
    "same seed, same weights": _same_seed,
    "the order of sites does not matter": _order,
    "only declared kinds leave a site": _declared,
    "a dry run foretells the bytes": _bytes,
    "a round returns a new model": _kept,
    "as much work as announced": _work,
    "it learns": _learns,
}
