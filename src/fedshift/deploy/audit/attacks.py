"""Gradient-leakage attacks on a site or a sum of sites: searches, inversion of the first layer, measures of success."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.data.domain import DataSet
from fedshift.deploy.audit.cases import Case
from fedshift.deploy.audit.gradient_search import Attack, Attacked, Attempt, Exchange, Search, Sent, Space, Watcher
from fedshift.federation.messages import Update
from fedshift.federation.private_training import gradients_of, per_sample_gradients
from fedshift.federation.randomness import generator
from fedshift.federation.secure.integer_sums import Total, Weighing, contribution
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.functional import leakage
from fedshift.functional.differential_privacy import clipped_sum, gaussian
from fedshift.models.network import Network, rate_factors
from fedshift.models.wide import WideLinear
from fedshift.weights import Weights

_AT_ONCE = 256  # samples that are compared at a time


@dataclass(frozen=True)
class _Found:
    """What an attack found: inputs (b, …), labels (empty if unknown), how it found the labels, its distance."""

    inputs: Tensor
    labels: list[int]
    labels_by: str
    distance: float | None


class Attacker:
    """Attacks at one size of mini-batch: on what a site sends, or on the sum of what several send.

    Args:
        size: samples in a mini-batch of a site.
    """

    def __init__(
        self, sites: Sequence[Site], data: DataSet, size: int, iterations: int, starts: int, watcher: Watcher
    ) -> None:
        self.sites, self.site, self.size = sites, sites[0], size
        self.classes = data.classes
        self.iterations, self.starts, self.watcher = iterations, starts, watcher
        network = seen_by_attacker(self.site.network)
        self.attacked = Attacked(
            network=network,
            trained=[parameter for parameter in network.parameters() if parameter.requires_grad],
            space=Space(data.preprocessing, data.input_shape, self.site.device),
            size=size,
            shape=data.input_shape,
            classes=len(data.classes),
            device=self.site.device,
        )
        self.first = _fully_connected(self.attacked.network, math.prod(data.input_shape)) if size == 1 else None
        self.samples = sum(site.samples for site in sites)

    def cases(self, exchange: Exchange, searches: Sequence[Search]) -> Iterator[Case]:
        """Attack one exchange: by each search, then by inverting the first layer if it can be inverted."""
        cuda = [self.site.device] if self.site.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            for site in self.sites:
                site.begin(Envelope(exchange=1, round=1, progress=0.0, mini_batches_left=2**31))
            sent = self._batch() if exchange == "batch" else self._epoch()
        whole, number = self.attacked, len(self.sites)
        if exchange == "batch":  # in a sum, the samples of every site are searched for together
            shares = tuple(site.samples / self.samples for site in self.sites)
            self.attacked = replace(whole, size=self.size * number, shares=shares)
        attacks: list[Attack] = [*searches]
        if self.first is not None:
            attacks.append("analytic")
        for attack in attacks:
            began = time.perf_counter()
            of = f", sum of {number} sites" if number > 1 else ""
            self.watcher.case(f"{exchange}, {self.size}, {attack}{of}")
            result = self._invert(sent) if attack == "analytic" else self._search(attack, sent)
            yield self._measure(attack, sent, result, began)
        self.attacked = whole

    def _batch(self) -> Sent:
        """The gradient of cross-entropy on one mini-batch of each site."""
        gradients: list[list[Tensor]] = []
        batches: list[tuple[Tensor, Tensor]] = []
        for site in self.sites:
            rows = torch.randperm(site.samples, generator=self._draws("rows", site))[: self.size]
            inputs, labels, _ = site.data.batch(rows, self._draws("augmentation", site))
            gradients.append(_gradient_sent(site, inputs, labels))
            batches.append((inputs, labels))
        inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return Sent("batch", self._mean(gradients), 0, (inputs, labels))

    def _epoch(self) -> Sent:
        """The models after one local epoch, turned into a mean gradient as the attacker does."""
        training = self.site.training
        after: list[list[Tensor]] = []
        number = 0.0
        for site in self.sites:
            model = site.model()
            site.minimise(_cross_entropy(model), model, epochs=1)
            after.append([parameter.detach() for parameter in model.parameters() if parameter.requires_grad])
            gradients = (
                leakage.gradients_in_update(site.mini_batches, training.momentum, training.nesterov)
                if training.optimizer == "sgd"
                else site.mini_batches  # Adam's steps do not show the gradients' scale
            )
            number += gradients * (site.samples / self.samples)
        before = [parameter.detach() for parameter in self.attacked.trained]
        gradient = leakage.pseudo_gradient(before, self._mean(after), self.site.learning_rate)
        decay = training.weight_decay
        rates = rate_factors([self.attacked.network])
        steps = [number * rates[parameter] for parameter in self.attacked.trained]
        gradient = [part / each - decay * weight for part, each, weight in zip(gradient, steps, before, strict=True)]
        return Sent("epoch", gradient, sum(site.mini_batches for site in self.sites), None)

    def _mean(self, tensors: Sequence[list[Tensor]]) -> list[Tensor]:
        """What the server sees of the sites' tensors: those of a single one, or the mean by secure aggregation."""
        if len(self.sites) == 1:
            return tensors[0]
        total = Total()
        weighing = Weighing.of("samples", [site.samples for site in self.sites])
        for site, of_site in zip(self.sites, tensors, strict=True):
            named = Weights({str(number): tensor.cpu() for number, tensor in enumerate(of_site)})
            total.add(site.name, contribution(Update(named, site.samples, 0.0), weighing))
        mean = total.mean().model()
        return [mean[str(number)].to(self.site.device) for number in range(len(mean))]

    def _search(self, attack: Search, sent: Sent) -> _Found:
        """Search for samples whose gradient is the one that was sent; return the best of several attempts.

        Labels are inferred from the last layer's bias if that is exact (one sample) or the attack takes labels as given
        (cosine). Otherwise they are searched for, too.
        """
        labels = self._labels(sent)
        fixed = labels if self.attacked.size == 1 or attack == "cosine" else None
        best: Attempt | None = None
        for start in range(self.starts):
            draws = self._draws(f"{sent.exchange} {attack} {start}")
            attempt = Attempt(self.attacked, attack, sent, fixed, draws, self.iterations, self.watcher)
            attempt.run()
            if best is None or attempt.distance < best.distance:
                best = attempt
        assert best is not None
        by = "optimised with the samples" if fixed is None else "sign" if self.attacked.size == 1 else "counts"
        return _Found(self.attacked.space.inputs(best.dummies), best.logits.argmax(1).tolist(), by, best.distance)

    def _invert(self, sent: Sent) -> _Found:
        """Compute the first layer's input from its gradients alone."""
        assert self.first is not None
        weight, bias = self._gradient(sent, self.first.weight), self._gradient(sent, self.first.bias)
        assert weight is not None
        assert bias is not None
        rows = weight.t() if isinstance(self.first, WideLinear) else weight
        inputs = leakage.invert_linear(rows, bias).view(1, *self.site.data.input_shape)
        labels = self._labels(sent) if self.attacked.size == 1 else None
        return _Found(inputs, labels or [], "sign" if labels else "nothing", None)

    def _labels(self, sent: Sent) -> list[int] | None:
        """Infer labels from the gradient of the last layer's bias; None if it has no bias."""
        last = self.attacked.network.classifier
        gradient = self._gradient(sent, last.bias) if isinstance(last, nn.Linear) else None
        if gradient is None:
            return None
        noise = torch.randn(64, *self.site.data.input_shape, generator=self._draws("noise")).to(self.site.device)
        with torch.no_grad():
            expected = self.attacked.network(self.attacked.space.inputs(noise)).softmax(1).mean(0)
        return leakage.infer_labels(gradient, expected, self.attacked.size)

    def _gradient(self, sent: Sent, parameter: Tensor | None) -> Tensor | None:
        """The gradient that was sent of one parameter of the attacker's network; None if it is not trained."""
        pairs = zip(self.attacked.trained, sent.gradient, strict=True)
        return next((gradient for trained, gradient in pairs if trained is parameter), None)

    def _measure(self, attack: Attack, sent: Sent, result: _Found, began: float) -> Case:
        """Compare reconstructions, and the sites' mean sample, with the originals that they resemble most."""
        images = self.attacked.space.images
        shown = self.attacked.space.comparable(result.inputs)
        sums = [self.attacked.space.comparable(inputs).sum(0) for inputs in self._all_inputs()]
        guess = (torch.stack(sums).sum(0) / self.samples).expand_as(shown)
        originals, labels, number = self._beside(shown, sent)
        errors, likeness = _alike(shown, originals)
        guess_errors, guess_likeness = _alike(guess, self._beside(guess, sent)[0])
        true, guessed = Counter(labels.tolist()), Counter(result.labels)
        return Case(
            exchange=sent.exchange,
            attack=attack,
            sites=len(self.sites),
            batch=self.size,
            steps=sent.steps,
            distance=result.distance,
            mse=errors,
            psnr=tuple(map(leakage.psnr, errors)) if images else None,
            ssim=likeness if images else None,
            correlation=None if images else likeness,
            guess_mse=fmean(guess_errors),
            guess_psnr=fmean(map(leakage.psnr, guess_errors)) if images else None,
            guess_ssim=fmean(guess_likeness) if images else None,
            guess_correlation=None if images else fmean(guess_likeness),
            labels=tuple(self.classes[label] for label in labels.tolist()),
            inferred=tuple(self.classes[label] for label in result.labels),
            labels_by=result.labels_by,
            labels_right=(true & guessed).total() if result.labels and number == len(shown) else None,
            seconds=time.perf_counter() - began,
            originals=originals.cpu().numpy(),
            reconstructions=shown.cpu().numpy(),
        )

    def _beside(self, shown: Tensor, sent: Sent) -> tuple[Tensor, Tensor, int]:
        """The most similar original of each of ``shown``, its label, and the number of originals compared."""
        if sent.batch is not None:
            originals, labels = self.attacked.space.comparable(sent.batch[0]), sent.batch[1]
            result = leakage.best_match(leakage.mean_squared_errors(shown, originals)).to(labels.device)
            return originals[result], labels[result], len(labels)
        errors = [
            leakage.mean_squared_errors(shown, self.attacked.space.comparable(inputs)) for inputs in self._all_inputs()
        ]
        beside = [self._original(row) for row in leakage.best_match(torch.cat(errors, dim=1)).tolist()]
        originals, labels = (torch.cat(parts) for parts in zip(*beside, strict=True))
        return originals, labels, self.samples

    def _original(self, row: int) -> tuple[Tensor, Tensor]:
        """A sample as it is compared, and its label; ``row`` counts over all sites."""
        for site in self.sites:
            if row < site.samples:
                break
            row -= site.samples
        inputs, labels, _ = site.data.batch(torch.tensor([row]))
        return self.attacked.space.comparable(inputs), labels

    def _all_inputs(self) -> Iterator[Tensor]:
        """The samples of all sites, one site after the other."""
        for site in self.sites:
            for inputs, _, _ in site.data.all_batches(_AT_ONCE):
                yield inputs

    def _draws(self, purpose: str, site: Site | None = None) -> torch.Generator:
        """The generator of a purpose: at a ``site``, or of the attacker."""
        of = purpose if site is not None or len(self.sites) == 1 else f"sum {purpose}"
        return generator(self.site.seed, (site or self.site).name, "leakage", self.size, of)


def _cross_entropy(model: Network) -> Callable[[Batch], Tensor]:
    return lambda batch: F.cross_entropy(model(batch.inputs), batch.targets)


def _gradient_sent(site: Site, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """The gradient of a mini-batch that a site sends: plain, or clipped and noisy where it trains privately."""
    model = site.model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    privacy, draws = site.training.privacy, site.draws
    if privacy is None or draws is None:
        result = torch.autograd.grad(F.cross_entropy(model(inputs), labels), trained, materialize_grads=True)
        return [part.detach() for part in result]
    with per_sample_gradients(model):
        F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        sums = clipped_sum(gradients_of(trained, len(inputs)), privacy.clip_norm)
    noise, scale = draws.generator(1, "audit"), draws.noise_multiplier * privacy.clip_norm
    noisy = [total.double() + scale * gaussian(total.shape, noise).to(total.device) for total in sums]
    return [(total / len(inputs)).float() for total in noisy]


def seen_by_attacker(network: Network) -> Network:
    """A copy in training mode, but without dropout, since an attacker does not know the masks."""
    network = copy.deepcopy(network).train()
    for module in network.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            module.eval()
    return network


def _fully_connected(network: Network, inputs: int) -> nn.Linear | WideLinear | None:
    """The first layer with weights, if it is fully connected, has a bias, is trained and reads a whole sample."""
    for module in network.modules():
        if next(module.children(), None) is not None or isinstance(module, nn.Flatten | nn.Identity | nn.Dropout):
            continue
        if not isinstance(module, nn.Linear | WideLinear) or module.in_features != inputs or module.bias is None:
            return None
        return module if module.weight.requires_grad and module.bias.requires_grad else None
    return None


def _alike(shown: Tensor, originals: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean squared error of each pair, and SSIM of images or correlation of vectors."""
    errors = (shown - originals).square().flatten(1).mean(1)
    alike = leakage.ssim(shown, originals) if shown.dim() == 4 else leakage.correlation(shown, originals)
    return tuple(errors.tolist()), tuple(alike.tolist())
