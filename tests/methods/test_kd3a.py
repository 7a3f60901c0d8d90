"""KD3A: Algorithm 1 written out, the numbers of section 7.7, every option of 7.4, what travels, sites of odd sizes."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import CNN, LINEAR, MLP, NORMED, domains, federation, run, step_on, vectors
from torch import Tensor, nn

from fedshift.data.domain import Domain
from fedshift.errors import TrainingDiverged, UserError
from fedshift.experiment.folder import RunFolder
from fedshift.experiment.loop import check_fit
from fedshift.experiment.schema import parse
from fedshift.federation.federation import Answer, Federation, Request
from fedshift.federation.local import LocalFederation
from fedshift.federation.messages import Update
from fedshift.federation.pool import WorkerPool
from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.methods import teachers
from fedshift.methods.base import RunPlan, State
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.kd3a import KD3A, Aggregate
from fedshift.models.network import Network
from fedshift.weights import Weights, is_buffer

SITES = {"north": 41, "east": 19, "south": 9}
"""Not in the order of the alphabet, so that a mix-up of names and places shows."""
BUDGET = 20
RATE = 0.3
# Between them lie the confidences of the tiny teachers: some samples have three voters, some none.
GATES: dict[str, Any] = {"gate_start": 0.6, "gate_end": 0.9}
RELEASED: dict[str, Any] = {
    "vote": "top1",
    "labels": "hard",
    "target_share": "confident",
    "share_momentum": 0.9,
    "batch_norm": "linear",
    "teacher_statistics": "batch",
    "private_classifier": True,
    "mixup": 2.0,
}
"""As the released code has it."""


def kd3a(**options: Any) -> KD3A:
    return KD3A(**{**GATES, **options})


def site_of(where: Federation, name: str) -> Site:
    assert isinstance(where, LocalFederation)
    return where._runners[name].site


def shifted(name: str, number: int) -> Domain:
    """Vectors whose classes overlap, elsewhere at each site; in the east every label is one too high."""
    plain, draws = vectors(name, number), np.random.default_rng(number)
    noise = 0.8 * draws.normal(size=(number, 5)) + 0.3 * draws.normal(size=5)
    labels = (plain.labels + (name == "east")) % 3
    return Domain(name, (np.asarray(plain.inputs) + noise).astype(np.float32), labels)


def around(
    method: KD3A,
    sites: Mapping[str, int] = SITES,
    network: Mapping[str, object] = NORMED,
    rounds: int = 2,
    **options: Any,
) -> Federation:
    """Shifted sources and a shifted target."""
    found = [*(shifted(name, number) for name, number in sites.items()), shifted("target", 14)]
    whole: dict[str, Any] = {"lr": RATE, "budget": BUDGET, "roles": {"target": "target"}, **options}
    return federation(method, found, network, rounds=rounds, **whole)


@functools.cache
def warm_start(batch_norm: bool = True) -> Weights:
    """A common start that knows something, so that what a source adds to it shows."""
    found = [shifted("north", 41), shifted("south", 9)]
    return run(FedAvg(), found, NORMED if batch_norm else MLP, rounds=6, lr=0.1, momentum=0.9)[0].weights


def rounds_of(method: KD3A, rounds: int = 2, batch_norm: bool = True, **options: Any) -> tuple[list[State], Federation]:
    """The states after each round from the warm start, and the federation."""
    where = around(method, network=NORMED if batch_norm else MLP, rounds=rounds, **options)
    states = [method.start(where, warm_start(batch_norm))]
    for _ in range(rounds):
        states.append(step_on(method, where, states[-1]))
    return states[1:], where


# Algorithm 1, written out ---------------------------------------------------------------------------------------------


def first_of_largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: (values[place], -place))


def mean_row(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def ballot(rows: Sequence[Sequence[float]], gate: float, vote: str) -> tuple[list[float], float, int]:
    """p, n_p and the winning class of one sample, whose teachers say ``rows`` (section 7.1, step 3)."""
    if vote == "mean":
        return mean_row(rows), 1.0, first_of_largest(mean_row(rows))
    passing = [row for row in rows if max(row) > gate]
    votes = [0.0] * len(rows[0])
    for row in passing or rows:
        for number, probability in enumerate(row):
            votes[number] += probability if vote == "rows" or number == first_of_largest(row) else 0.0
    winner = first_of_largest(votes)
    agreeing = [row for row in passing if first_of_largest(row) == winner]
    return mean_row(agreeing or rows), len(agreeing) or 0.001, winner


def quality(samples: Iterable[Sequence[Sequence[float]]], gate: float, members: Sequence[int], vote: str) -> float:
    """Q(S) of step 4: the vote held among ``members`` alone; the code's has no value without support (7.4.4)."""
    total = 0.0
    for rows in samples if members else ():
        probabilities, support, _ = ballot([rows[member] for member in members], gate, vote)
        total += support * max(probabilities) if support >= 1 or vote == "rows" else 0.0
    return total


def focus_of(samples: Sequence[Sequence[Sequence[float]]], gate: float, vote: str, rule: str) -> list[float]:
    """Consensus focus of every teacher, negative values as 0 (equation 8, or the mean over all orders)."""
    everyone = range(len(samples[0]))
    if rule == "leave_one_out":
        whole = quality(samples, gate, everyone, vote)
        without = [quality(samples, gate, [one for one in everyone if one != left], vote) for left in everyone]
        return [max(0.0, whole - value) for value in without]
    gains = [0.0] * len(everyone)
    for order in itertools.permutations(everyone):
        for place, teacher in enumerate(order):
            gains[teacher] += quality(samples, gate, sorted(order[: place + 1]), vote)
            gains[teacher] -= quality(samples, gate, sorted(order[:place]), vote)
    return [max(0.0, gain / math.factorial(len(everyone))) for gain in gains]


def norms_of(network: nn.Module) -> dict[str, nn.BatchNorm1d]:
    return {name: module for name, module in network.named_modules() if isinstance(module, nn.BatchNorm1d)}


def moments(layer: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """What enters the layer on average, and its square."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var + layer.running_mean.square()


def seen_at(site: Site, network: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """By layer, the same of a site's data: the mean over its batches of their mean and unbiased variance."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for batch in site.all_batches():
        # A momentum of 1 leaves the batch's own statistics.
        alone = copy.deepcopy(network).train()
        for module in norms_of(alone).values():
            module.momentum = 1.0
        with torch.no_grad():
            alone(batch.inputs)
        for layer, module in norms_of(alone).items():
            assert module.running_mean is not None
            assert module.running_var is not None
            seen.setdefault(layer, []).append((module.running_mean, module.running_var))
    means = {layer: [torch.stack(part).mean(0) for part in zip(*pairs, strict=True)] for layer, pairs in seen.items()}
    return {layer: (mean, variance + mean.square()) for layer, (mean, variance) in means.items()}


def scatter(site: Site, network: Network) -> float:
    """The gap statistic of the target's features: half the mean squared distance within each cluster, added up."""
    from sklearn.cluster import KMeans

    with torch.no_grad():
        features = torch.cat([network.eval().features(batch.inputs) for batch in site.all_batches()])
    clusters = KMeans(min(3, len(torch.unique(features, dim=0))), n_init=4, random_state=derive_seed(site.seed) % 2**32)
    numbers = clusters.fit_predict(features.numpy())
    total = 0.0
    for number in set(numbers.tolist()):
        cluster = features[torch.from_numpy(numbers == number)].double()
        total += float((cluster[:, None] - cluster[None]).square().sum()) / (2 * len(cluster))
    return total


class Algorithm:
    """Algorithm 1 with its options, every sum written out; draws and batches are those of the sites."""

    def __init__(self, method: KD3A, network: Mapping[str, object] = NORMED) -> None:
        where = around(method, network=network)
        self.method = method
        self.sites = {name: site_of(where, name) for name in (*SITES, "target")}
        self.own: dict[str, Weights] = {}
        self.used: Counter[str] = Counter()
        self.exchange = 0
        self.shares: dict[str, float] = {}
        self.confident = 0.0

    def begin(self, name: str) -> Site:
        used = self.used[name]
        self.sites[name].begin(Envelope(self.exchange, (self.exchange + 1) // 2, used / BUDGET, BUDGET - used))
        return self.sites[name]

    def descend(self, site: Site, model: Network, loss_of: Any, exchanges: float) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        for batch in site.batches(steps=max(1, round(site.batches_per_epoch / exchanges))):
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
            self.used[site.name] += 1
        private = ("classifier.",) if self.method.private_classifier else ()
        self.own[site.name] = Weights(
            {
                name: tensor
                for name, tensor in site.weights_of(model).items()
                if name.startswith(private) or (self.method.batch_norm == "off" and is_buffer(name))
            }
        )

    def begun_from(self, weights: Weights, site: Site) -> Network:
        return site.model(weights.merge(self.own.get(site.name, {})))

    def round(self, weights: Weights) -> Weights:
        method, models = self.method, dict[str, Network]()
        self.exchange += 1
        for name in SITES:  # 1, 2
            site = self.begin(name)
            model = models[name] = self.begun_from(weights, site)
            self.descend(
                site,
                model,
                lambda batch, model=model: F.cross_entropy(model(batch.inputs), batch.targets),
                method.aggregations_per_epoch,
            )
        self.exchange += 1
        target = self.begin("target")
        gate = method.gate_start + (method.gate_end - method.gate_start) * self.used["target"] / BUDGET
        came = copy.deepcopy(models)
        for model in models.values():
            model.requires_grad_(False).train(method.teacher_statistics == "batch")
        student = self.begun_from(weights, target)
        said = self.distil(target, student, models, gate)  # 3 to 6
        previous = self.shares
        self.shares = self.weigh(target, weights, came, models, said, gate)  # 7 to 9
        self.confident = sum(max(map(max, rows)) > gate for rows in said) / len(said)
        if previous and method.share_momentum:
            old, new = method.share_momentum, 1 - method.share_momentum
            self.shares = {name: old * previous[name] + new * share for name, share in self.shares.items()}
        return self.merged({**models, "target": student}).merge(self.own["target"])  # 10

    def distil(
        self, target: Site, student: Network, models: Mapping[str, Network], gate: float
    ) -> list[list[list[float]]]:
        """Train the student; returns what the teachers said of each sample."""
        method, said = self.method, list[list[list[float]]]()
        sources = {name: self.shares.get(name, number) for name, number in SITES.items()}
        whole = sum(sources.values())
        entered: dict[str, Tensor] = {}
        for layer, module in norms_of(student).items():
            module.register_forward_pre_hook(lambda _, inputs, layer=layer: entered.update({layer: inputs[0]}))

        def loss_of(batch: Batch) -> Tensor:
            rows = torch.stack([model(batch.inputs).softmax(1) for model in models.values()], 1).tolist()
            said.extend(rows)
            votes = [ballot(row, gate, method.vote) for row in rows]
            labels = torch.tensor([probabilities for probabilities, _, _ in votes])
            support = torch.tensor([support for _, support, _ in votes])
            if method.labels == "hard":
                labels = F.one_hot(torch.tensor([winner for _, _, winner in votes]), 3).float()
                support = (support >= 1).float()
            inputs = batch.inputs
            if method.mixup:
                lam = float(torch.distributions.Beta(method.mixup, method.mixup).sample())
                order = torch.randperm(len(inputs))
                inputs = lam * inputs + (1 - lam) * inputs[order]
                labels = lam * labels + (1 - lam) * labels[order]
            logarithms = student(inputs).log_softmax(1)
            divergence = (torch.special.xlogy(labels, labels) - labels * logarithms).sum(1)
            loss: Tensor = (support * divergence).mean()
            for name, model in models.items() if method.batch_norm == "loss" else ():
                for layer, module in norms_of(model).items():
                    mean, square = moments(module)
                    first = (entered[layer].mean(0) - mean).square().sum()
                    second = (entered[layer].square().mean(0) - square).square().sum()
                    loss = loss + method.batch_norm_weight * sources[name] / whole * (first + second)
            return loss

        self.descend(target, student, loss_of, max(1.0, method.aggregations_per_epoch))
        return said

    def weigh(
        self,
        target: Site,
        weights: Weights,
        came: Mapping[str, Network],
        models: Mapping[str, Network],
        said: Sequence[Sequence[Sequence[float]]],
        gate: float,
    ) -> dict[str, float]:
        method, counts = self.method, list(SITES.values())
        target_share = target.samples / (sum(counts) + target.samples)
        if method.target_share == "confident":
            target_share = sum(max(map(max, rows)) > gate for rows in said) / len(said) / (len(models) + 1)
        if method.focus in ("shapley", "leave_one_out"):
            values = focus_of(said, gate, "top1" if method.vote == "top1" else "rows", method.focus)
            if method.target_share == "samples":
                values = [number * value for number, value in zip(counts, values, strict=True)]
        elif method.focus == "samples":
            values = [float(number) for number in counts]
        elif method.focus == "h_divergence":
            values = []
            for number, model in zip(counts, came.values(), strict=True):
                distance, channels, here = 0.0, 0, seen_at(target, model)
                for layer, module in norms_of(model).items():
                    for ours, theirs in zip(moments(module), here[layer], strict=True):
                        distance += float((ours - theirs).square().sum())
                    channels += module.num_features
                values.append(number * math.exp(-distance / channels))
        else:
            before = scatter(target, target.model(weights))
            # copies: a look at a model must not leave it in another mode
            values = [math.exp(1 - scatter(target, copy.deepcopy(model)) / before) for model in models.values()]
        shares = [(1 - target_share) * value / sum(values) for value in values]
        return {**dict(zip(models, shares, strict=True)), "target": target_share}

    def merged(self, models: Mapping[str, Network]) -> Weights:
        states = {name: model.state_dict() for name, model in models.items()}
        out: dict[str, Tensor] = {}
        for key, like in next(iter(states.values())).items():
            if not like.is_floating_point():
                out[key] = torch.stack([state[key] for state in states.values()]).amax(0)
                continue
            value = torch.stack([share * states[name][key].double() for name, share in self.shares.items()]).sum(0)
            if key.endswith("running_var") and self.method.batch_norm == "moments":
                partner = key.replace("running_var", "running_mean")
                means = torch.stack([states[name][partner].double() for name in self.shares])
                shares = torch.tensor(list(self.shares.values()), dtype=torch.float64)[:, None]
                value = value + (shares * means.square()).sum(0) - (shares * means).sum(0).square()
            out[key] = value.float()
        return Weights(out)


EQUATIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "code": RELEASED,
    "vote of top-1": {"vote": "top1"},
    "mean of the teachers": {"vote": "mean"},
    "hard labels": {"labels": "hard"},
    "leave-one-out": {"focus": "leave_one_out"},
    "shares of samples": {"focus": "samples"},
    "H-divergence": {"focus": "h_divergence"},
    "information gain": {"focus": "information_gain"},
    "confident share": {"target_share": "confident"},
    "momentum of shares": {"share_momentum": 0.7},
    "variances averaged": {"batch_norm": "linear"},
    "statistics in the loss": {"batch_norm": "loss"},
    "statistics in the loss, weighed": {"batch_norm": "loss", "batch_norm_weight": 0.3},
    "statistics at home": {"batch_norm": "off"},
    "teachers on batches": {"teacher_statistics": "batch"},
    "teachers on batches, H-divergence": {"teacher_statistics": "batch", "focus": "h_divergence"},
    "teachers on batches, information gain": {"teacher_statistics": "batch", "focus": "information_gain"},
    "heads at home": {"private_classifier": True},
    "without mixup": {"mixup": 0.0},
    "more mixup": {"mixup": 2.0},
    "twice an epoch": {"aggregations_per_epoch": 2.0},
    "every second epoch": {"aggregations_per_epoch": 0.5},
}


def check_rounds(method: KD3A, batch_norm: bool = True) -> None:
    """Two rounds of the method beside two of `Algorithm`."""
    states, where = rounds_of(method, batch_norm=batch_norm)
    with torch.random.fork_rng():
        written, weights = Algorithm(method, NORMED if batch_norm else MLP), warm_start(batch_norm)
        for state in states:
            weights = written.round(weights)
            assert state.report["aggregation_weights"] == pytest.approx(written.shares, abs=2e-5)
            assert sum(state.report["aggregation_weights"].values()) == pytest.approx(1, abs=1e-12)
            assert state.report["confident"] == pytest.approx(written.confident, abs=1e-12)
            assert dict(state.numbers) == state.report["aggregation_weights"]
            for key, tensor in weights.items():
                torch.testing.assert_close(state.weights[key], tensor, atol=2e-5, rtol=1e-4)
            weights = state.weights  # so that rounding does not add up
    assert where.progress.used == written.used


@pytest.mark.parametrize("case", EQUATIONS)
def test_two_rounds_are_those_of_the_equations(case: str) -> None:
    check_rounds(kd3a(**EQUATIONS[case]))


@pytest.mark.parametrize("case", ["paper", "code", "heads at home"])
def test_two_rounds_without_batch_norm(case: str) -> None:
    """As the paper's network for Amazon Review is."""
    check_rounds(kd3a(**EQUATIONS[case]), batch_norm=False)


def test_the_warm_start_puts_the_equations_to_the_test() -> None:
    """Some samples have no confident teacher, shares are not those of the samples, and statistics differ."""
    states, where = rounds_of(kd3a())
    assert any(0 < state.report["confident"] < 1 for state in states), [state.report for state in states]
    shares = states[0].report["aggregation_weights"]
    whole = sum(SITES.values()) + 14
    assert max(abs(shares[name] - number / whole) for name, number in SITES.items()) > 0.05
    assert shares["east"] < 0.5 * SITES["east"] / whole
    updates = where.ask(kd3a_of(where).fit, to=where.sources, weights=states[0].weights)
    means = [update.weights["features.hidden1.1.running_mean"] for update in updates]
    assert float((means[0] - means[1]).abs().max()) > 0.05


def kd3a_of(where: Federation) -> KD3A:
    assert isinstance(where.method, KD3A)
    return where.method


# Worked numbers (section 7.7) -----------------------------------------------------------------------------------------

FIRST = ((0.95, 0.03, 0.02), (0.92, 0.05, 0.03), (0.02, 0.96, 0.02))
SECOND = ((0.91, 0.05, 0.04), (0.10, 0.30, 0.60), (0.05, 0.93, 0.02))
STUDENT = (0.7, 0.2, 0.1)
NUMBERS = {"south": 100, "north": 200, "east": 300}


def saying(*rows: Sequence[float]) -> Weights:
    """A linear network that says ``rows[i]`` of the i-th unit vector."""
    return Weights(
        {"classifier.weight": torch.tensor(rows).log().T.contiguous(), "classifier.bias": torch.zeros(len(rows[0]))}
    )


def told(
    method: KD3A,
    teachers: Sequence[Sequence[Sequence[float]]],
    samples: int,
    numbers: Mapping[str, int] = NUMBERS,
    previous: Mapping[str, float] | None = None,
    student: Sequence[float] = STUDENT,
    **options: Any,
) -> Aggregate:
    """The target's answer when it holds every unit vector equally often and ``teachers[k][i]`` is said of the i-th."""
    kinds = len(teachers[0])
    inputs = np.eye(kinds, dtype=np.float32)[np.arange(samples) % kinds]
    target = Domain("target", inputs, np.zeros(samples, np.int64))
    found = [Domain(name, inputs[:2], np.zeros(2, np.int64)) for name in list(numbers)[: len(teachers)]]
    where = federation(method, [*found, target], LINEAR, roles={"target": "target"}, **options)
    models = {domain.name: saying(*rows) for domain, rows in zip(found, teachers, strict=True)}
    return where.ask(
        method.distil,
        to=["target"],
        weights=saying(*[student] * kinds),
        models=models,
        samples={name: numbers[name] for name in models},
        previous=previous or {},
    ).only()


def of_first(gate: float = 0.9, **options: Any) -> KD3A:
    return KD3A(gate_start=gate, gate_end=gate, **{"mixup": 0, **options})


TEACHERS_OF_ONE = [[row] for row in FIRST]
TEACHERS_OF_TWO = list(zip(FIRST, SECOND, strict=True))


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({}, 0.343232),  # 2 · KL
        ({"labels": "hard"}, 0.356675),  # −log 0.7
        ({"vote": "top1"}, 0.343232),  # the same class wins
        ({"gate": 0.94}, 0.02 * math.log(0.02 / 0.7) + 0.96 * math.log(0.96 / 0.2) + 0.02 * math.log(0.02 / 0.1)),
        ({"gate": 0.94, "labels": "hard"}, -math.log(0.2)),
        ({"vote": "mean", "labels": "hard"}, -math.log(0.7)),
    ],
)
def test_the_loss_of_the_worked_sample(options: dict[str, Any], loss: float) -> None:
    """One mini-batch of equal samples: the loss before the first step."""
    assert told(of_first(**options), TEACHERS_OF_ONE, 6).loss == pytest.approx(loss, abs=2e-6)


@pytest.mark.parametrize("vote", ["rows", "top1"])
def test_nobody_is_confident(vote: str) -> None:
    """Support 0.001 of the mean of all; hard labels have no weight, so nothing is learned from them."""
    mean = mean_row(FIRST)
    divergence = sum(p * math.log(p / q) for p, q in zip(mean, STUDENT, strict=True))
    soft = told(of_first(0.97, vote=vote), TEACHERS_OF_ONE, 6)
    assert soft.loss == pytest.approx(0.001 * divergence, rel=1e-4)
    assert soft.confident == 0
    hard = told(of_first(0.97, vote=vote, labels="hard"), TEACHERS_OF_ONE, 6)
    assert hard.loss == 0
    # Untouched: θ_T is the start, which every teacher's share is added to.
    shares = {**hard.shares, "target": hard.target_share}
    models = {**{name: saying(row) for name, row in zip(hard.shares, FIRST, strict=True)}, "target": saying(STUDENT)}
    for key, tensor in hard.weights.items():
        expected = torch.stack([share * models[name][key].double() for name, share in shares.items()]).sum(0)
        torch.testing.assert_close(tensor, expected.float(), atol=1e-6, rtol=1e-6)
    confident = told(of_first(0.97, vote=vote, target_share="confident"), TEACHERS_OF_ONE, 6)
    assert confident.target_share == 0
    if vote == "top1":  # no value at all: all share alike
        assert list(confident.shares.values()) == pytest.approx([1 / 3] * 3)


SHARES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    # N = (100, 200, 300) and the target's 400; its own share comes last
    "Shapley": ({}, (0.143122, 0.177222, 0.279656, 0.4)),
    "leave-one-out": ({"focus": "leave_one_out"}, (0.195699, 0.391398, 0.012903, 0.4)),
    "samples": ({"focus": "samples"}, (0.1, 0.2, 0.3, 0.4)),
    "code": ({"vote": "top1", "target_share": "confident"}, (0.3304, 0.2045, 0.2152, 0.25)),
    "samples and confident": ({"focus": "samples", "target_share": "confident"}, (0.125, 0.25, 0.375, 0.25)),
}


@pytest.mark.parametrize("case", SHARES)
def test_the_worked_shares(case: str) -> None:
    options, shares = SHARES[case]
    found = told(of_first(**options), TEACHERS_OF_TWO, 400)
    assert list(found.shares) == list(NUMBERS)
    assert [*found.shares.values(), found.target_share] == pytest.approx(shares, abs=6e-5)
    assert found.confident == 1


def test_the_worked_step_of_momentum() -> None:
    method = of_first(vote="top1", target_share="confident", share_momentum=0.9)
    alike = dict.fromkeys([*NUMBERS, "target"], 0.25)
    found = told(method, TEACHERS_OF_TWO, 400, previous=alike)
    assert [*found.shares.values(), found.target_share] == pytest.approx((0.2580, 0.2454, 0.2465, 0.25), abs=6e-5)
    first = told(method, TEACHERS_OF_TWO, 400)  # nothing to go by in the first round
    assert [*first.shares.values(), first.target_share] == pytest.approx(SHARES["code"][1], abs=6e-5)


def test_the_share_of_confident_samples() -> None:
    """At 0.955 one teacher is sure of the first kind of sample and none of the second."""
    assert told(of_first(0.955), TEACHERS_OF_TWO, 400).confident == 0.5
    found = told(of_first(0.955, target_share="confident"), TEACHERS_OF_TWO, 400)
    assert found.target_share == pytest.approx(0.5 / 4)
    assert sum(found.shares.values()) == pytest.approx(1 - 0.5 / 4)


def test_negative_focus_counts_as_none() -> None:
    """The two teachers of 7.7.5 bring nothing: they share alike, whatever their numbers of samples."""
    teachers = [[(0.95, 0.05, 1e-9)], [(1e-9, 0.91, 0.09)]]
    found = told(of_first(focus="leave_one_out"), teachers, 300)
    assert list(found.shares.values()) == pytest.approx([0.25, 0.25])
    assert found.target_share == 0.5


# Options --------------------------------------------------------------------------------------------------------------

IDENTITIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a label is a name": ({"label": "mine"}, {}),
    "the weight of a loss that is not there": ({"batch_norm_weight": 5.0}, {}),
    "orders of a focus that is not there": ({"focus_permutations": 2}, {"focus": "samples"}),
    "a gate that nobody asks": ({"gate_start": 0.2, "gate_end": 0.3}, {"vote": "mean", "focus": "samples"}),
}


@pytest.mark.parametrize("case", IDENTITIES)
def test_an_option_that_must_not_change_the_weights(case: str) -> None:
    changed, beside = IDENTITIES[case]
    assert rounds_of(kd3a(**{**beside, **changed}))[0][-1].weights == rounds_of(kd3a(**beside))[0][-1].weights


def test_predictions_that_are_too_many_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch goes over all samples, so judging what training saw is judging them all."""
    (kept, _), _ = rounds_of(kd3a())
    monkeypatch.setattr(teachers, "_KEPT_BYTES", 0)
    (streamed, _), _ = rounds_of(kd3a())
    assert streamed.report["confident"] == kept.report["confident"]
    assert streamed.report["aggregation_weights"] == pytest.approx(kept.report["aggregation_weights"])
    for name, tensor in kept.weights.items():
        torch.testing.assert_close(streamed.weights[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_norm", ["linear", "off"])
def test_batch_norm_options_of_a_network_without_it(batch_norm: str) -> None:
    (_, found), _ = rounds_of(kd3a(batch_norm=batch_norm), batch_norm=False)
    (_, default), _ = rounds_of(kd3a(), batch_norm=False)
    assert found.weights == default.weights


SHARES_ALONE = ["leave-one-out", "shares of samples", "H-divergence", "information gain", "confident share"]
STUDENT_ALONE = ["mean of the teachers", "hard labels", "statistics in the loss", "without mixup", "more mixup"]


class Sick(KD3A):
    """KD3A whose site ``south`` sends another model in the second round: ``times`` its own."""

    times: float

    def fit(self, site: Site, weights: Weights) -> Update:
        update = super().fit(site, weights)
        if site.name != "south" or site.envelope.round != 2:
            return update
        sick = {
            name: tensor * self.times if tensor.is_floating_point() and not is_buffer(name) else tensor
            for name, tensor in update.weights.items()
        }
        return Update(Weights(sick), update.samples, update.loss)


def sick_rounds(rounds: int, quorum: int | None, **options: Any) -> tuple[list[State], Federation]:
    method = Sick(**GATES, **options)
    where = around(method, rounds=rounds)
    where.quorum = quorum
    states = [method.start(where, warm_start())]
    for _ in range(rounds):
        states.append(step_on(method, where, states[-1]))
    return states[1:], where


@pytest.mark.parametrize("times", [math.nan, 1e30])
@pytest.mark.parametrize(
    "options",
    [{}, {"share_momentum": 0.7}, {"batch_norm": "loss", "batch_norm_weight": 0.01}, {"teacher_statistics": "batch"}],
)
def test_a_source_that_misses_a_round_and_comes_back(times: float, options: dict[str, Any]) -> None:
    """Its model is no number, or predicts none: the others go on, it is named, and the next round counts it again."""
    states, where = sick_rounds(3, 2, times=times, **options)
    first, second, third = (state.report["aggregation_weights"] for state in states)
    assert set(first) == set(third) == {*SITES, "target"}
    assert set(second) == {*SITES, "target"} - {"south"}
    for shares in (first, second, third):
        assert sum(shares.values()) == pytest.approx(1, abs=1e-12)
        assert all(share >= 0 for share in shares.values())
    # What the absent site would have counted goes to all in proportion, not to the target alone.
    assert second["target"] < 2 * first["target"]
    assert "'south'" in where.missing["south"]
    assert "round 2" in where.missing["south"]
    assert all(tensor.isfinite().all() for state in states for tensor in state.weights.values())


@pytest.mark.parametrize("times", [math.nan, 1e30])
def test_too_few_are_left(times: float) -> None:
    for quorum in (None, len(SITES)):
        with pytest.raises(TrainingDiverged, match=r"'south'.* in round 2"):
            sick_rounds(2, quorum, times=times)


MERGING_ALONE = ["variances averaged", "statistics at home", "heads at home"]


@pytest.mark.parametrize("case", [*SHARES_ALONE, *STUDENT_ALONE, *MERGING_ALONE])
def test_an_option_changes_nothing_else(case: str) -> None:
    """In the first round: whose loss, whose share."""
    (found,), _ = rounds_of(kd3a(**EQUATIONS[case]), rounds=1)
    (default,), _ = rounds_of(kd3a(), rounds=1)
    losses, others = found.report["losses"], default.report["losses"]
    assert {name: losses[name] for name in SITES} == {name: others[name] for name in SITES}
    assert (losses["target"] != others["target"]) == (case in STUDENT_ALONE)
    shares, before = found.report["aggregation_weights"], default.report["aggregation_weights"]
    assert (shares != before) == (case in SHARES_ALONE)
    assert (shares["target"] != before["target"]) == (case == "confident share")
    assert found.report["confident"] == default.report["confident"]
    unlike = {name for name, tensor in found.weights.items() if not torch.equal(tensor, default.weights[name])}
    if case == "variances averaged":
        assert unlike == {name for name in found.weights if name.endswith("running_var")}
    elif case == "statistics at home":
        assert unlike == {name for name in found.weights if is_buffer(name)}
    elif case == "heads at home":
        assert unlike == {"classifier.weight", "classifier.bias"}


def test_momentum_begins_in_the_second_round() -> None:
    (first, second), _ = rounds_of(kd3a(share_momentum=0.9))
    (one, two), _ = rounds_of(kd3a())
    assert first.weights == one.weights
    assert first.report == one.report
    old, new = first.report["aggregation_weights"], two.report["aggregation_weights"]
    expected = {name: 0.9 * old[name] + 0.1 * new[name] for name in old}
    assert second.report["aggregation_weights"] == pytest.approx(expected, abs=1e-12)  # of the same models


def test_the_gate_rises_with_the_work_done() -> None:
    """What counts is the target's share of its mini-batches, not the round."""
    asked: list[float] = []

    class Watched(KD3A):
        def _consensus(self, predictions: Tensor, gate: float) -> Any:
            asked.append(gate)
            return super()._consensus(predictions, gate)

    run(Watched(gate_start=0.8, gate_end=0.95), budget={**dict.fromkeys(("large", "small", "one"), 40), "target": 8},
        rounds=4)  # fmt: skip
    assert asked == pytest.approx([gate for gate in (0.8, 0.8375, 0.875, 0.9125) for _ in range(2)])


@pytest.mark.parametrize(
    ("exchanges", "used"),
    [
        (1.0, {"large": 5, "small": 1, "one": 1, "target": 2}),
        (0.5, {"large": 10, "small": 2, "one": 2, "target": 2}),
        (0.2, {"large": 25, "small": 5, "one": 5, "target": 2}),
        (2.0, {"large": 2, "small": 1, "one": 1, "target": 1}),
        (10.0, {"large": 1, "small": 1, "one": 1, "target": 1}),
    ],
)
def test_aggregations_per_epoch(exchanges: float, used: dict[str, int]) -> None:
    method = kd3a(aggregations_per_epoch=exchanges)
    _, where = run(method, rounds=2)
    assert where.progress.used == {name: 2 * number for name, number in used.items()}
    assert where.progress.exchange == 4  # one up and one down in each round, however long it is
    for name, per_epoch in (("large", 5), ("small", 1), ("one", 1)):
        assert method.mini_batches(per_epoch, 2) == 2 * used[name]
    assert method.target_mini_batches(2, 2) == 2 * used["target"]


@pytest.mark.parametrize(
    ("exchanges", "batches", "per_round"),
    [(0.2, 250, 1250), (0.5, 250, 500), (2, 250, 125), (10, 250, 25), (100, 250, 2)],
)
def test_mini_batches_of_a_round_are_those_of_the_paper(exchanges: float, batches: int, per_round: int) -> None:
    """Digit-5: 25,000 samples in batches of 100 (7.7.11); below 1 the sources pass several times over them."""
    method = KD3A(aggregations_per_epoch=exchanges)
    assert method.mini_batches(batches, 8) == 8 * per_round
    assert method.target_mini_batches(batches, 8) == 8 * min(per_round, batches)


# What stays at a site -------------------------------------------------------------------------------------------------


def test_heads_stay_at_their_sites() -> None:
    (first, last), where = rounds_of(kd3a(private_classifier=True))
    heads = {name: site_of(where, name).memory.weights("private") for name in (*SITES, "target")}
    for head in heads.values():
        assert set(head) == {"classifier.weight", "classifier.bias"}
    for one, other in itertools.combinations(heads, 2):
        assert heads[one] != heads[other]
    assert last.weights.select("classifier") == heads["target"]
    assert last.weights != first.weights
    assert "private" not in site_of(rounds_of(kd3a())[1], "north").memory


def test_statistics_stay_at_their_sites() -> None:
    """A source goes on from its own statistics and takes over the aggregate's weights."""
    method = kd3a(batch_norm="off")
    (state,), where = rounds_of(method, rounds=1)
    kept = {name: site_of(where, name).memory.weights("private") for name in (*SITES, "target")}
    for weights in kept.values():
        assert set(weights) == {name for name in state.weights if is_buffer(name)}
    assert state.weights.select(is_buffer) == kept["target"]
    assert kept["north"] != kept["east"]
    site = site_of(where, "north")
    site.begin(Envelope(9, 2, 0.0, 0))  # no budget: nothing is trained
    update = method.fit(site, state.weights)
    assert update.weights.select(is_buffer) == kept["north"]
    assert update.weights.without(is_buffer) == state.weights.without(is_buffer)


@pytest.mark.parametrize("case", ["heads at home", "statistics at home", "momentum of shares", "code"])
def test_a_run_goes_on_from_its_files(case: str, tmp_path: Path) -> None:
    """Saved after every round and loaded into fresh sites: the same bits as in one go."""
    method = kd3a(**EQUATIONS[case])
    options: dict[str, Any] = {"reset_optimizer_each_round": False, "momentum": 0.9}
    whole, _ = rounds_of(method, 3, **options)
    folder = RunFolder(tmp_path, {"name": case})
    state, header = State(warm_start()), None
    for _ in range(3):
        where = around(method, rounds=3, **options)
        if header is not None:
            where.progress.exchange, where.progress.used = header["exchange"], header["used"]
            where.load_memory(folder.memory, header["memory"])
        state = step_on(method, where, state)
        now = {"exchange": where.progress.exchange, "used": where.progress.used}
        folder.save_checkpoint(state, where.save_memory(folder.memory), now)
        found = folder.load_checkpoint()
        assert found is not None
        state, header = found
    assert state.weights == whole[-1].weights
    assert state.numbers == whole[-1].numbers


# What travels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sites", [SITES, {"east": 19, "south": 9}, {"alone": 11}])
def test_what_travels(sites: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up K models, down to the target those and the aggregate before, up the aggregate, down to every source."""
    start = warm_start()  # before anybody listens
    method, delivered = kd3a(), list[tuple[str, Request]]()

    def deliver(self: LocalFederation, step: str, requests: Iterator[Request]) -> Iterator[Answer[Any]]:
        def seen() -> Iterator[Request]:
            for request in requests:
                delivered.append((step, request))
                yield request

        yield from original(self, step, seen())

    original = LocalFederation.deliver
    monkeypatch.setattr(LocalFederation, "deliver", deliver)
    where = around(method, sites)
    first = step_on(method, where, State(start))
    second = step_on(method, where, first)
    size, number = start.nbytes, len(sites)
    expected = Counter[tuple[int, str, str, str, int]]()
    for exchange, remembered in ((1, 0), (3, 8 * (number + 1))):
        for name in sites:
            expected[exchange, name, "down", "weights", size] += 1
            for field, bytes_ in (("weights", size), ("samples", 8), ("loss", 8)):
                expected[exchange, name, "up", field, bytes_] += 1
        for field, bytes_ in (("weights", size), ("models", number * size), ("samples", 8 * number)):
            expected[exchange + 1, "target", "down", field, bytes_] += 1
        if remembered:
            expected[exchange + 1, "target", "down", "previous", remembered] += 1
        for field, bytes_ in (("weights", size), ("shares", 8 * number)):
            expected[exchange + 1, "target", "up", field, bytes_] += 1
        for field in ("target_share", "confident", "loss"):
            expected[exchange + 1, "target", "up", field, 8] += 1
    entries = where.ledger.entries
    assert (
        Counter((entry.exchange, entry.site, entry.direction, entry.field, entry.bytes) for entry in entries)
        == expected
    )
    assert {entry.kind for entry in entries} == {"weights", "numbers"}
    traffic = method.traffic(RunPlan(size, sites, 2))
    assert sum(where.ledger.total["up"].values()) == traffic.up
    assert sum(where.ledger.total["down"].values()) == traffic.down
    # A source gets the aggregate and nothing beside it, no model of another source.
    to_sources = [request for _, request in delivered if request.site != "target"]
    assert len(to_sources) == 2 * number
    assert all(list(request.content) == ["weights"] for request in to_sources)
    for request, before in zip(to_sources, [start] * number + [first.weights] * number, strict=True):
        assert request.content["weights"] == before
    assert second.weights != first.weights


def test_bytes_of_domainnet() -> None:
    """The paper's count, without the coordinator's second leg: 2·K·S(θ) a round."""
    traffic = KD3A().traffic(RunPlan(173_250_468, dict.fromkeys("abcde", 1), 1))
    models = (traffic.up - 5 * 16 - 8 * 8 - 173_250_468) + (traffic.down - 5 * 8 - 6 * 173_250_468)
    assert models == 1_732_504_680


# What does not fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"), [({"focus": "h_divergence"}, "h_divergence"), ({"batch_norm": "loss"}, "loss")]
)
def test_options_that_need_batch_norm(options: dict[str, Any], word: str) -> None:
    written = {
        "data": {"name": "rotated_digits", "per_class": 5},
        "protocol": {"kind": "adapt_to_one", "targets": ["D0"]},
        "model": {"name": "mlp", "hidden": [8]},
        "methods": ["fedavg", {"name": "kd3a", **options}],
        "device": "cpu",
    }
    experiment = parse(written)
    with pytest.raises(UserError, match=rf"^kd3a\.{next(iter(options))}: {word} .*the network has none$"):
        check_fit(experiment, experiment.data.build())
    written["model"] = {"name": "mlp", "hidden": [8], "batch_norm": True}
    experiment = parse(written)
    check_fit(experiment, experiment.data.build())


def test_it_needs_a_target() -> None:
    options: dict[str, Any] = {"data": {"name": "rotated_digits"}, "model": "linear", "methods": ["fedavg", "kd3a"]}
    with pytest.raises(UserError, match=r"^methods: kd3a adapts to a target .*protocol: \{kind: adapt_to_one") as said:
        parse(options)
    assert "\n" not in str(said.value)
    assert [method.name for method in parse({**options, "protocol": {"kind": "adapt_to_one"}}).methods]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gate_start": 1.0}, "gate_start"),
        ({"gate_end": -0.1}, "gate_end"),
        ({"share_momentum": 1.0}, "share_momentum"),
        ({"mixup": -0.2}, "mixup"),
        ({"aggregations_per_epoch": 0}, "aggregations_per_epoch"),
        ({"focus_permutations": 0}, "focus_permutations"),
        ({"vote": "majority"}, "vote"),
    ],
)
def test_impossible_options(options: dict[str, Any], field: str) -> None:
    written = {
        "data": {"name": "rotated_digits"},
        "protocol": {"kind": "adapt_to_one"},
        "model": "linear",
        "methods": [{"name": "kd3a", **options}],
    }
    with pytest.raises(UserError, match=rf"^methods\[0\] \(kd3a\)\.{field}: ") as said:
        parse(written)
    assert "\n" not in str(said.value)


# Odd sizes ------------------------------------------------------------------------------------------------------------


def test_one_source() -> None:
    """α_1 = N/(N + N_T) whatever the teacher is worth."""
    found = domains(NORMED, {"alone": 26})
    for options in ({}, {"focus": "leave_one_out"}, {"focus": "samples"}, {"focus_permutations": 5}):
        state, _ = run(kd3a(**options), found, NORMED)
        assert state.report["aggregation_weights"] == pytest.approx({"alone": 26 / 40, "target": 14 / 40})
        state.weights.check_finite("one source")


def test_sampled_orders_of_one_source_are_all_orders() -> None:
    found = domains(NORMED, {"alone": 26})
    sampled, _ = run(kd3a(focus_permutations=5), found, NORMED)
    assert sampled.weights == run(kd3a(), found, NORMED)[0].weights


def test_eleven_sources_sample_the_orders() -> None:
    """Beyond ten sources Shapley values are sampled, with a generator of their own: the same in every run."""
    found = domains(NORMED, {f"site-{number}": 3 + number for number in range(11)})
    method = KD3A(gate_start=0.4, gate_end=0.4)
    state, _ = run(method, found, NORMED, rounds=1)
    again, _ = run(method, found, NORMED, rounds=1)
    assert again.weights == state.weights
    shares = state.report["aggregation_weights"]
    assert len(shares) == 12
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0
    more, _ = run(KD3A(gate_start=0.4, gate_end=0.4, focus_permutations=400), found, NORMED, rounds=1)
    # Both estimate the same values, from other orders.
    assert more.report["aggregation_weights"] != shares
    assert more.report["aggregation_weights"] == pytest.approx(shares, abs=0.02)
    assert again.report["losses"] == more.report["losses"]


@pytest.mark.parametrize("options", [{}, RELEASED, {"focus": "information_gain"}, {"batch_norm": "loss"}])
@pytest.mark.parametrize("samples", [1, 2, 5, 9])
def test_a_small_target(samples: int, options: dict[str, Any]) -> None:
    """Fewer samples than a batch, a last batch of one, fewer samples than classes."""
    found = [*domains(NORMED, {"large": 41, "small": 5}), vectors("few", samples)]
    state, where = run(kd3a(**options), found, NORMED, roles={"few": "target"})
    assert where.targets == ("few",)
    assert where.progress.used["few"] == 2
    state.weights.check_finite("a small target")
    assert all(math.isfinite(loss) for loss in state.report["losses"].values())
    if not options:
        assert state.report["aggregation_weights"]["few"] == pytest.approx(samples / (46 + samples))


def test_one_target_is_needed() -> None:
    """Two targets, or none, are not what the algorithm is about."""
    with pytest.raises(ValueError, match="values to unpack"):
        run(kd3a(), [*domains(NORMED), vectors("b", 9)], NORMED, roles={"large": "target", "b": "target"})


# Engines --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    started = WorkerPool(2, threads=1)
    yield started
    started.close()


@pytest.mark.parametrize("case", ["paper", "code", "statistics in the loss", "statistics at home"])
def test_same_bits_in_a_pool(case: str, pool: WorkerPool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        method = kd3a(**EQUATIONS[case])
        options: dict[str, Any] = {"momentum": 0.9, "reset_optimizer_each_round": False}
        here, one = rounds_of(method, **options)
        there, many = rounds_of(method, pool=pool, **options)
    finally:
        torch.set_num_threads(threads)
    for ours, theirs in zip(here, there, strict=True):
        assert theirs.weights == ours.weights
        assert theirs.report == ours.report
    assert many.progress == one.progress
    assert many.ledger.total == one.ledger.total


def test_dropout_and_augmentation_in_a_pool(pool: WorkerPool) -> None:
    """What draws random numbers by itself: at the target the teachers see what the student sees."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases: list[tuple[dict[str, object], dict[str, Any]]] = [
            ({**NORMED, "dropout": 0.5}, {}),
            (CNN, {"augmentation": "ccst"}),
        ]
        for network, options in cases:
            for method in (kd3a(), kd3a(**RELEASED)):
                here = run(method, network=network, **options)[0]
                assert run(method, network=network, pool=pool, **options)[0].weights == here.weights
    finally:
        torch.set_num_threads(threads)


# What it is for -------------------------------------------------------------------------------------------------------


def test_a_source_that_says_nonsense_counts_little() -> None:
    """Of three equally large sources one has wrong labels: consensus focus finds it, the number of samples cannot."""
    shares: dict[str, dict[str, float]] = {}
    for rule in ("shapley", "leave_one_out", "samples"):
        method = kd3a(focus=rule)
        where = around(method, {"north": 30, "east": 30, "south": 30}, rounds=3, budget=100)
        state = State(warm_start())
        for _ in range(3):
            state = step_on(method, where, state)
        shares[rule] = state.report["aggregation_weights"]
    assert shares["samples"]["east"] == pytest.approx(shares["samples"]["north"])
    for rule in ("shapley", "leave_one_out"):
        assert shares[rule]["east"] < 0.5 * min(shares[rule]["north"], shares[rule]["south"]), shares
