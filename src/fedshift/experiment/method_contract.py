"""What every method promises, tried on made-up sites: ``fedshift.check_method(MyMethod)``, in a notebook or a test."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from fedshift.data.domain import Domain, Preprocessing
from fedshift.data.site_data import batches_per_epoch
from fedshift.errors import TrainingDiverged, UserError
from fedshift.experiment.config.error_messages import describe
from fedshift.experiment.costs import SAMPLES, dry_run
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import known_kinds
from fedshift.federation.site_runner import Setting, SitePlan
from fedshift.federation.training import Training
from fedshift.methods.base import Method, RunPlan, Samples, State, work_of
from fedshift.methods.rounds import play_round, start_run
from fedshift.models import registry as models
from fedshift.models.network_options import NetworkOptions
from fedshift.models.own.forward_trial import line_of
from fedshift.weights import Weights

_SIZES = {"large": 41, "small": 5, "single": 1}
"""Samples of the sites; a mini-batch has 8, so one has a last batch of one and one has a single sample."""
_CLASSES, _SIDE, _WIDTH, _ROUNDS = 3, 12, 5, 6
_NETWORK = {"name": "mnist_cnn", "channels": [3, 4], "hidden": 6}
_NORMED = {"name": "mlp", "hidden": [8, 6], "batch_norm": True}
_NORMED_ON_IMAGES = {"name": "digit_cnn", "variant": "paper"}
_RATES, _LEARNED = (0.1, 0.02), 0.85
"""The loss that a method must fall below at one of the rates, as a part of that of equal probabilities."""
_REMEMBERED: Mapping[str, Any] = {"momentum": 0.9, "reset_optimizer_each_round": False}
"""Momentum that sites keep, so that their memory matters."""


def check_method(kind: type[Method], network: str | Mapping[str, Any] | None = None, **options: Any) -> None:
    """Hold a method of your own to what every method promises. It takes a few seconds.

    It trains on three small sites of made-up samples with three classes.

    Args:
        kind: the class.
        network: name, or name and options, of a network for small grey images; by default a small CNN, and a network
            with batch normalisation where the method must learn.
        options: of the method, beside those of its trait ``small``.

    Raises:
        UserError: the class is no whole method, which is one line; or promises are broken, one line for each.

    Example:
        >>> from fedshift.methods import FedAvg
        >>> check_method(FedAvg)
    """
    method = _method_of(kind, options)
    if network is not None:
        chosen = models.parse({"name": network} if isinstance(network, str) else network, permit=models.any_code)
        first = learner = _Trial(method, chosen, _Images())
    else:
        first, learner = _Trial(method, models.parse(_NETWORK), _Images()), _learner(method)
    broken = dict(_broken(first, learner))
    if len(broken) == len(_PROMISES) and len(set(broken.values())) == 1:
        raise UserError(f"{kind.__name__} keeps no promise: {next(iter(broken.values()))}")
    if broken:
        lines = [f"{promise}: {why}" for promise, why in broken.items()]
        raise UserError("\n".join([f"{kind.__name__} breaks {len(broken)} of {len(_PROMISES)} promises", *lines]))


def _method_of(kind: type[Method], options: Mapping[str, Any]) -> Method:
    """A method with these options.

    Raises:
        UserError: ``kind`` is no class of a whole method, or the options do not fit.
    """
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        what = f"an object of {type(kind).__name__}: give the class" if isinstance(kind, Method) else repr(kind)
        raise UserError(f"check_method: takes a class that derives from fedshift.Method, got {what}")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise UserError(
            f"check_method: {kind.__name__} has no {' and no '.join(missing)}: write them, or derive from "
            "fedshift.methods.LocalTraining, which trains at sites, or FedAvg, which also has the mean"
        )
    if not kind.traits.name:
        raise UserError(f'check_method: {kind.__name__} has no name: write traits = Method.traits.derive(name="…")')
    try:
        return kind(**{**kind.traits.small, **options})
    except ValidationError as error:
        raise UserError(describe(error, kind.__name__, kind)) from None


def _learner(method: Method) -> _Trial:
    try:
        method.check_samples(Samples((_WIDTH,)))
    except UserError:
        return _Trial(method, models.parse(_NORMED_ON_IMAGES), _Images())
    return _Trial(method, models.parse(_NORMED), _Vectors())


def _broken(first: _Trial, learner: _Trial) -> Iterator[tuple[str, str]]:
    for promise, keeps in _PROMISES.items():
        try:
            why = keeps(learner if keeps is _learns else first)
        except Exception as error:
            why = f"{type(error).__name__}{line_of(error)}: {error}".partition("\n")[0]
        if why:
            yield promise, why


class _Images:
    """Noisy pictures of one fixed pattern per class, a little brighter or darker at each site."""

    kind = Preprocessing(kind="image", channels=1, size=_SIDE, mean=(0.5,), std=(0.25,))
    shape: tuple[int, ...] = (1, _SIDE, _SIDE)

    def domain(self, name: str, number: int) -> Domain:
        patterns = np.random.default_rng(7).integers(40, 200, (_CLASSES, *self.shape))
        draws, labels = np.random.default_rng(sum(name.encode())), np.arange(number, dtype=np.int64) % _CLASSES
        noise = draws.integers(-40, 41, (number, *self.shape)) + draws.integers(-15, 16)
        return Domain(name, np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8), labels)

    def tensor(self, domain: Domain) -> torch.Tensor:
        return (torch.from_numpy(domain.inputs).float() / 255 - 0.5) / 0.25


class _Vectors:
    """Noisy vectors around one fixed centre per class, shifted at each site."""

    kind = Preprocessing(kind="features")
    shape: tuple[int, ...] = (_WIDTH,)

    def domain(self, name: str, number: int) -> Domain:
        centres = np.random.default_rng(8).normal(size=(_CLASSES, _WIDTH))
        draws, labels = np.random.default_rng(sum(name.encode())), np.arange(number, dtype=np.int64) % _CLASSES
        noise = draws.normal(size=(number, _WIDTH)) * 0.3 + draws.normal(size=_WIDTH) * 0.3
        return Domain(name, (centres[labels] + noise).astype(np.float32), labels)

    def tensor(self, domain: Domain) -> torch.Tensor:
        return torch.from_numpy(domain.inputs)


@dataclass(frozen=True, eq=False)
class _Trial:
    """A method, and the sites on which it is tried."""

    method: Method
    network: NetworkOptions
    samples: _Images | _Vectors
    sizes: Mapping[str, int] = field(default_factory=lambda: _SIZES)
    target: int = 14

    @property
    def is_one_site(self) -> bool:
        return self.method.traits.pooled or self.method.traits.target == "labelled"

    @property
    def trains(self) -> bool:
        return any(work(9, 3) for work in work_of(self.method))

    def plans(self) -> list[SitePlan]:
        """The sites in their order; a pool, and a target without labels, where the method needs them."""
        traits, domains = self.method.traits, [self.samples.domain(*site) for site in self.sizes.items()]
        parts = [(domain, np.arange(len(domain)), number) for number, domain in enumerate(domains)]
        target = []
        if traits.needs_target:
            target = [(self.samples.domain("target", self.target), np.arange(self.target), len(parts))]
        if traits.target == "labelled":
            return [SitePlan("target", "source", target)]
        if traits.pooled:
            return [SitePlan("pool", "source", parts, target)]
        sources = [SitePlan(part[0].name, "source", [part]) for part in parts]
        return sources + [SitePlan("target", "target", [part]) for part in target]

    def setting(self, seed: int = 3, **training: Any) -> Setting:
        """What all sites of a run have in common. They refuse what the method does not declare."""
        asked = Training(**{"batch_size": 8, "lr": 0.05, "rounds": 2, **_REMEMBERED, **training})
        refused = frozenset(set(known_kinds()) - set(self.method.calls.shares))
        samples, sources = self.samples, len(self.sizes)
        return Setting(
            self.method, asked, self.network, samples.kind, samples.shape, _CLASSES, sources, seed, "cpu", refused
        )

    def start(self, setting: Setting, rounds: int = 2, budget: int = 0) -> tuple[LocalFederation, State]:
        """The sites and the state before the first round."""
        plans = self.plans()
        each = budget or (24 if self.method.traits.pooled else 60)
        where = LocalFederation(plans, setting, budget={plan.name: each for plan in plans}, rounds=rounds)
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

    @functools.cached_property
    def first(self) -> Weights:
        """The model after a round."""
        return self.run(1)[1].weights

    @functools.cached_property
    def sites(self) -> LocalFederation:
        """The sites after two rounds."""
        return self.run(2)[0]


# The promises: what is wrong, or "" ---------------------------------------------------------------------------------


def _same_seed(trial: _Trial) -> str:
    first = trial.first
    torch.rand(3)  # what the caller drew before must not matter
    if trial.run(1)[1].weights != first:
        return "two runs of one seed differ; draw with site.generator or federation.seed alone"
    same = trial.trains and trial.run(1, seed=4)[1].weights == first
    return "another seed gives the same weights" if same else ""


def _order(trial: _Trial) -> str:
    if trial.is_one_site:
        return ""
    first = trial.first
    second = replace(trial, sizes={name: trial.sizes[name] for name in ("single", "large", "small")}).first
    far = [name for name in first if not torch.allclose(first[name], second[name], atol=1e-6, rtol=1e-5)]
    return f"the order in which sites are asked changes '{far[0]}'; take sites by name" if far else ""


def _declared_kinds(trial: _Trial) -> str:
    declared = trial.method.calls.shares
    sent = sorted(set(trial.sites.ledger.total["up"]) - set(declared))
    return f"{', '.join(sent)} left a site, and its calls promise {', '.join(declared)}" if sent else ""


def _bytes(trial: _Trial) -> str:
    # Whole mini-batches, so that their number says how many samples were drawn.
    trial = replace(trial, sizes={"large": 40, "small": 8, "single": 8}, target=16)
    where, setting, plans = trial.sites, trial.setting(), trial.plans()
    network = setting.build_network()
    samples = {plan.name: sum(len(rows) for _, rows, _ in plan.parts) for plan in plans if plan.name in where.sources}
    plan = RunPlan(
        dry=dry_run(trial.method, plans, setting, network, rounds=2).of(2),
        dry_samples={site: min(SAMPLES, number) for site, number in samples.items()},
        network=network,
        input_shape=setting.input_shape,
        samples=samples,
        targets=len(where.targets),
        rounds=2,
        trained=8 * sum(where.progress.used.values()),
    )
    foretold = trial.method.traffic(plan)
    up, down = (sum(where.ledger.total[way].values()) for way in ("up", "down"))
    if (up, down) == (foretold.up, foretold.down):
        return ""
    return f"two rounds sent {up} bytes up and {down} down, traffic() says {foretold.up} and {foretold.down}"


def _new_model(trial: _Trial) -> str:
    where, state = trial.start(trial.setting())
    given = state.weights.clone()
    if play_round(trial.method, where, state).weights == given and trial.trains:
        return "a round leaves the model as it was"
    return "" if state.weights == given else "a round changes the weights it was given in place; return new ones"


def _work(trial: _Trial) -> str:
    if trial.is_one_site:
        return ""
    for site in trial.sites.sources:
        announced = trial.method.mini_batches(batches_per_epoch(trial.sizes[site], 8), 2)
        used = trial.sites.progress.used[site]
        if used != announced:
            return f"site '{site}' trained on {used} mini-batches, mini_batches() says {announced}"
    return ""


def _learns(trial: _Trial) -> str:
    if not trial.trains:
        return ""
    shares = []
    for rate in _RATES:
        try:
            shares.append(_least_loss(trial, rate))
        except TrainingDiverged:
            continue
        if shares[-1] < _LEARNED:
            return ""
    if not shares:
        return f"it diverges at learning rates {_RATES[0]} and {_RATES[1]}"
    return (
        f"after {_ROUNDS} rounds its loss on the sites is {min(shares):.2f} of that of guessing, not below {_LEARNED}"
    )


def _least_loss(trial: _Trial, rate: float) -> float:
    """The loss on the sites' samples as a part of that of equal probabilities, after at most so many rounds."""
    traits, setting = trial.method.traits, trial.setting(lr=rate)
    # A step of a pool with a target takes a batch of every domain.
    where, state = trial.start(setting, _ROUNDS, 240 if traits.pooled and traits.needs_target else 60)
    shares: list[float] = []
    while len(shares) < _ROUNDS and (not shares or shares[-1] >= _LEARNED):
        state = play_round(trial.method, where, state)
        where.settle()
        shares.append(_share_of_chance(trial, setting, where, state))
    return shares[-1]


def _share_of_chance(trial: _Trial, setting: Setting, where: LocalFederation, state: State) -> float:
    """The loss on the sources' samples, each with what predicts there."""
    model = trial.method.evaluated_network(setting.build_network(), len(trial.sizes)).eval()
    sites = {"target": trial.target} if trial.method.traits.target == "labelled" else trial.sizes
    total = 0.0
    for domain in (trial.samples.domain(*site) for site in sites.items()):
        model.load_state_dict(dict(where.own_weights(domain.name, state.weights)))
        with torch.no_grad():
            scores = model(trial.samples.tensor(domain))
        total += torch.nn.functional.cross_entropy(scores, torch.from_numpy(domain.labels), reduction="sum").item()
    return total / sum(sites.values()) / math.log(_CLASSES)


_PROMISES: Mapping[str, Callable[[_Trial], str]] = {
    "same seed, same weights": _same_seed,
    "the order of sites does not matter": _order,
    "only declared kinds leave a site": _declared_kinds,
    "a dry run foretells the bytes": _bytes,
    "a round returns a new model": _new_model,
    "as much work as announced": _work,
    "it learns": _learns,
}
