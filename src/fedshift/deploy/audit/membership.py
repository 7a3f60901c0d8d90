"""Audits whether a trained model tells which of a site's samples it was trained on.

The audit trains the experiment's first method several times. Each time a coin decides for every sample of one site
whether it takes part. The attacker sees the trained model and all samples, knows everything but the coins, and guesses
them. The share of right guesses bounds ε from below (Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training
Run, NeurIPS 2023): with ε and δ = 0, guesses are right no more often than coins of probability e^ε/(e^ε + 1) show
heads. A group of samples has one coin. What an attack finds while it hardly ever accuses wrongly is counted apart
(Carlini et al.: Membership Inference Attacks From First Principles, IEEE S&P 2022).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import binomtest

from fedshift.data.domain import DataSet
from fedshift.data.site_data import SiteData
from fedshift.deploy.audit.leakage import target_and_site
from fedshift.errors import UserError
from fedshift.experiment.budgets import site_budget
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.environment import threads_set, versions
from fedshift.experiment.features import build_data
from fedshift.experiment.fits.side_by_side import trains_side_by_side
from fedshift.experiment.plan import Plan, PlannedRun, Run
from fedshift.experiment.protocols.base import Split
from fedshift.federation.local.cards import resolve_device
from fedshift.federation.local.in_process import LocalFederation
from fedshift.functional.membership import found_at, likelihood_ratios, scaled_confidence
from fedshift.methods.rounds import play_round, start_run
from fedshift.methods.screening import screening_of
from fedshift.models.network import Network
from fedshift.weights import Weights

Guesses = Literal["loss", "calibrated", "likelihood"]
_SURE = 0.2
"""Share of the samples that the attacker calls members with most confidence, and as many no members."""
_LEVEL = 0.95
_RATES = (0.01, 0.001)
"""Rates of false positives at which the members that are found are counted."""
FEWEST_SHADOWS = 4
"""With fewer shadow models too many samples are in none, or in all: there is nothing to fit."""


@dataclass(frozen=True)
class AtRate:
    """What an attack finds at a rate of false positives that the other trainings' scores set."""

    rate: float  # the share of the others that may be taken for members
    false: int  # how many were
    others: int  # of how many
    caught: int  # how many members were found
    members: int  # of how many
    low: float  # lower 95 % bound of the share of members that is found (Clopper and Pearson), two-sided
    high: float  # its upper bound


@dataclass(frozen=True)
class MembershipAttack:
    """How well one attack guesses."""

    # ``loss``: the lower the loss, the likelier a member (Yeom et al., CSF 2018). ``calibrated``: the same less the
    # mean over the other trainings, which says how hard a sample is (Watson et al., ICLR 2022). ``likelihood``:
    # `likelihood_ratios` (LiRA, Carlini et al., IEEE S&P 2022). The first half of the trainings are shadow models, and
    # the others are attacked: scores that depended on coins which are guessed would make the bounds wrong. Left out
    # with fewer shadow models than `FEWEST_SHADOWS`.
    name: Guesses
    guesses: int  # how many coins were guessed: of each training the fifth with the highest scores, and the lowest
    right: int  # how many of them rightly
    low: float  # lower 95 % bound of the share that is right (Clopper and Pearson), two-sided
    high: float  # its upper bound
    auc: float  # area under the curve of all samples' scores, the mean over the trainings; 50 is a guess
    epsilon: float  # ε is at least this, with 95 % confidence (one-sided), for δ = 0
    at_rates: tuple[AtRate, ...]  # what it finds at low rates of false positives


@dataclass(frozen=True)
class MembershipAudit:
    """The result of `audit_membership`. ``claimed``: ε and δ of a training, None without ``training.privacy``."""

    experiment: dict[str, Any]
    data: str
    fingerprint: str
    site: str
    target: str
    method: str
    units: int
    unit: Literal["sample", "group"]
    trainings: int
    claimed: tuple[float, float] | None
    accuracy_of_members: float
    accuracy_of_others: float
    attacks: tuple[MembershipAttack, ...]
    device: str
    threads: int
    versions: dict[str, str]
    seconds: float
    processor_seconds: float

    def record(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "attacks": [asdict(attack, dict_factory=_record_fields) for attack in self.attacks]}


def _record_fields(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """A record as it is stored, where `AtRate.caught` is called found."""
    return {"found" if name == "caught" else name: value for name, value in fields}


def audit_membership(
    experiment: Experiment,
    *,
    site: str | None = None,
    trainings: int = 8,
    trained: Callable[[int], None] = lambda number: None,
) -> MembershipAudit:
    """Train with coins, and guess them.

    UserError if the site is unknown, or the method's model is not one of the experiment's network.

    Args:
        experiment: the experiment; its first method and seed count, and further trainings have other seeds.
        site: name of a source; None means the first one.
        trainings: how many times the method trains.
        trained: is called after each.
    """
    began, worked = time.perf_counter(), time.process_time()
    if trainings < 2:
        raise UserError("--trainings: at least 2, since the calibrated attack compares each with the others")
    plan = _Coins(experiment, experiment.protocol.taking_part(build_data(experiment)))
    if plan.data.task != "classification":
        raise UserError(f"data set {plan.data.name} is for {plan.data.task}, and the audit only attacks classification")
    plan.target, plan.site = target_and_site(plan, site)
    check_fit(plan)
    method, first = experiment.methods[0], experiment.protocol.seeds[0]
    runs = [PlannedRun(plan, Run(method, plan.target, first + number)) for number in range(trainings)]
    device, threads = resolve_device(experiment.device), experiment.engine.thread_count()
    seen = []
    with threads_set(threads):
        for number, planned in enumerate(runs):
            seen.append([plan.by_unit(run) for run in _observe(_model(planned, device), planned.data, plan, device)])
            trained(number)
    losses, confidence, hits = (np.stack(each) for each in zip(*seen, strict=True))
    coins = np.stack([plan.coins(run.run.seed) for run in runs])
    rest = (losses.sum(0) - losses) / (trainings - 1)
    attacks = [guess_coins("loss", -losses, coins), guess_coins("calibrated", rest - losses, coins)]
    if (half := trainings // 2) >= FEWEST_SHADOWS:
        known, shadows = torch.from_numpy(confidence), torch.from_numpy(coins[:half])
        ratios = likelihood_ratios(known[half:], known[:half], shadows).numpy()
        attacks.append(guess_coins("likelihood", ratios, coins[half:]))
    privacy = runs[0].privacy.get(plan.site)
    return MembershipAudit(
        experiment=experiment.dump(),
        data=plan.data.name,
        fingerprint=plan.fingerprint,
        site=plan.site,
        target=plan.target,
        method=method.display,
        units=coins.shape[1],
        unit="group" if plan.in_groups(plan.site, plan.candidates) else "sample",
        trainings=trainings,
        claimed=None if privacy is None else (max(run.privacy[plan.site].epsilon for run in runs), privacy.delta),
        accuracy_of_members=100 * float(hits[coins].mean()),
        accuracy_of_others=100 * float(hits[~coins].mean()),
        attacks=tuple(attacks),
        device=device,
        threads=threads,
        versions=versions(),
        seconds=time.perf_counter() - began,
        processor_seconds=time.process_time() - worked,
    )


def guess_coins(name: Guesses, scores: NDArray[np.float64], coins: NDArray[np.bool_]) -> MembershipAttack:
    """Guess from scores, (trainings, units), which are higher for likelier members, and compare with the coins."""
    sure = max(1, int(_SURE * scores.shape[1]))
    order = np.argsort(scores, axis=1, kind="stable")
    members = np.take_along_axis(coins, order, axis=1)
    right, guesses = int(members[:, -sure:].sum() + (~members[:, :sure]).sum()), 2 * sure * len(scores)
    both = binomtest(right, guesses).proportion_ci(_LEVEL, method="exact")
    least = float(binomtest(right, guesses, alternative="greater").proportion_ci(_LEVEL, method="exact").low)
    epsilon = max(0.0, math.log(least / (1 - least))) if 0 < least < 1 else 0.0
    areas = [_auc(score, coin) for score, coin in zip(scores, coins, strict=True) if 0 < coin.sum() < len(coin)]
    rates = tuple(_at_rate(scores, coins, rate) for rate in _RATES) if len(scores) > 1 else ()
    return MembershipAttack(
        name, guesses, right, float(both.low), float(both.high), 100 * float(np.mean(areas)), epsilon, rates
    )


def _at_rate(scores: NDArray[np.float64], coins: NDArray[np.bool_], rate: float) -> AtRate:
    result, false = found_at(torch.from_numpy(scores), torch.from_numpy(coins), rate)
    members = int(coins.sum())
    bounds = binomtest(result, members).proportion_ci(_LEVEL, method="exact")
    return AtRate(rate, false, coins.size - members, result, members, float(bounds.low), float(bounds.high))


def _auc(scores: NDArray[np.float64], coins: NDArray[np.bool_]) -> float:
    """The probability that a member scores higher than another sample; equal scores count half."""
    inside, outside = scores[coins], scores[~coins]
    above = (inside[:, None] > outside).mean() + 0.5 * (inside[:, None] == outside).mean()
    return float(above)


class _Coins(Plan):
    """A plan in which coins choose the training samples of one site, anew for each seed."""

    target = site = ""

    def _split(self, target: str, seed: int) -> Split:
        first = self.experiment.protocol.seeds[0]
        split = super()._split(target, first)
        if self.site not in split.train:
            return split
        rows = self.candidates[self.coins(seed)[self._unit_numbers]]
        return replace(split, train={**split.train, self.site: rows if len(rows) else self.candidates[:1]})

    @property
    def candidates(self) -> NDArray[np.int64]:
        """The site's samples that a coin is thrown for: those that would train and those that would be held out."""
        split = super()._split(self.target, self.experiment.protocol.seeds[0])
        return np.sort(np.concatenate([split.train[self.site], split.held_out[self.site]])).astype(np.int64)

    @property
    def _unit_numbers(self) -> NDArray[np.int64]:
        """The number of each candidate's group; its own number where all are apart."""
        groups, rows = self.data.domains[self.site].groups, self.candidates
        return np.arange(len(rows)) if groups is None else np.unique(groups[rows], return_inverse=True)[1].reshape(-1)

    def coins(self, seed: int) -> NDArray[np.bool_]:
        """Which units take part in the training with this seed."""
        units = int(self._unit_numbers.max()) + 1
        return np.random.default_rng([seed, 23]).random(units) < 0.5

    def by_unit(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of each unit's samples."""
        position = self._unit_numbers
        return np.asarray(np.bincount(position, values) / np.bincount(position))


def _model(planned: PlannedRun, device: str) -> Network:
    """The model that the run ends with, in evaluation mode."""
    method, engine = planned.run.method, planned.experiment.engine
    setting = planned.setting(device)
    network = setting.build_network().to(device)
    plans = planned.sites(planned.shown_data)
    federation = LocalFederation(
        plans,
        setting,
        budget=site_budget(planned.budget, plans),
        rounds=max(1, planned.rounds),
        quorum=engine.quorum,
        on_refusal=engine.on_refusal,
        sums_only=engine.sums_only,
        per_round=planned.drawn,
        side_by_side=trains_side_by_side(engine, method, setting, network),
    )
    start = Weights({name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()})
    federation.screening = screening_of(method, start)
    state = start_run(method, federation, start)
    federation.settle()
    while state.round < federation.rounds and not federation.is_exhausted():
        state = play_round(method, federation, state)
        federation.settle()
    evaluated = method.evaluated_network(network, len(planned.split.train)).to(device)
    evaluated.load_state_dict(dict(state.weights))
    return evaluated.eval()


@torch.no_grad()
def _observe(network: Network, data: DataSet, plan: _Coins, device: str) -> tuple[NDArray[np.float64], ...]:
    """What the attacker sees of each candidate: its loss, its scaled confidence, and whether its class is predicted."""
    view = SiteData([(data.domains[plan.site], plan.candidates, 0)], data.preprocessing, None, device)
    seen = []
    for inputs, labels, _ in view.all_batches(256):
        scores = network(inputs)
        losses, right = F.cross_entropy(scores, labels, reduction="none"), scores.argmax(1) == labels
        seen.append(torch.stack([losses.double(), scaled_confidence(scores, labels), right.double()]).cpu())
    return tuple(torch.cat(seen, 1).numpy())
