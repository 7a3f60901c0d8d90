"""KD3A's Algorithm 1 with its options, every sum written out."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from kd3a_setting import BUDGET, RATE, RELEASED, SITES, around
from lost import site_of
from tiny import NORMED
from torch import Tensor, nn

from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.functional.averaging import is_buffer
from fedshift.methods.federated.kd3a import KD3A
from fedshift.models.network import Network
from fedshift.weights import Weights


def first_of_largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: (values[place], -place))


def mean_row(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def ballot(rows: Sequence[Sequence[float]], gate: float, vote: str) -> tuple[list[float], float, int]:
    """p, n_p and the winning class of one sample, from its teachers' probabilities ``rows`` (KD3A's knowledge vote)."""
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
    """Q(S) of KD3A's equation 7: the vote among ``members`` alone. The released code's is 0 without support."""
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
        aggregate = self.merged({**models, "target": student}).merge(self.own["target"])  # 10
        if method.batch_norm == "loss":
            return self.aligned(target, aggregate, {**models, "target": student})
        return aggregate

    def aligned(self, target: Site, weights: Weights, models: Mapping[str, Network]) -> Weights:
        """Line 16: the aggregate trained for (12) with all models' statistics, by the shares of this round."""
        network, entered = target.model(weights), dict[str, Tensor]()
        for layer, module in norms_of(network).items():
            module.register_forward_pre_hook(lambda _, inputs, layer=layer: entered.update({layer: inputs[0]}))

        def loss_of(batch: Batch) -> Tensor:
            network(batch.inputs)
            loss = torch.zeros(())
            for name, model in models.items():
                for layer, module in norms_of(model).items():
                    mean, square = moments(module)
                    first = (entered[layer].mean(0) - mean).square().sum()
                    second = (entered[layer].square().mean(0) - square).square().sum()
                    loss = loss + self.method.batch_norm_weight * self.shares[name] * (first + second)
            return loss

        kept = self.own["target"]
        self.descend(target, network, loss_of, max(1.0, self.method.aggregations_per_epoch))
        self.own["target"] = kept
        return target.weights_of(network)

    def distil(
        self, target: Site, student: Network, models: Mapping[str, Network], gate: float
    ) -> list[list[list[float]]]:
        """Train the student; returns what the teachers said of each sample."""
        method, said = self.method, list[list[list[float]]]()

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
    "Shapley values": {"focus": "shapley"},
    "shares of samples": {"focus": "samples"},
    "H-divergence": {"focus": "h_divergence"},
    "information gain": {"focus": "information_gain"},
    "confident share": {"target_share": "confident"},
    "momentum of shares": {"share_momentum": 0.7},
    "variances averaged": {"batch_norm": "linear"},
    "statistics in the loss": {"batch_norm": "loss", "batch_norm_weight": 0.01},
    "statistics in the loss, often": {"batch_norm": "loss", "batch_norm_weight": 0.03, "aggregations_per_epoch": 2.0},
    "statistics in the loss, heads at home": {
        "batch_norm": "loss",
        "batch_norm_weight": 0.01,
        "private_classifier": True,
    },
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
