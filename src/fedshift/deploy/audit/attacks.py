"""Gradient-leakage attacks on a site or a sum of sites: searches, inversion of the first layer, measures of success.

Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS 2019. Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients.
NeurIPS 2020.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from fedshift.data.domain import DataSet, Preprocessing
from fedshift.data.transforms import normalise
from fedshift.extras import compiler_comes_later
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

Exchange = Literal["batch", "epoch"]
"""What the site sent: the gradient of a mini-batch, or the model after an epoch."""
Search = Literal["l2", "cosine"]
"""The distance between gradients: squared (Zhu et al.) or cosine (Geiping et al.)."""
Attack = Literal[Search, "analytic"]
"""A search, or inversion of the first layer."""

_STEP = 0.1
_VARIATION = 1e-2
_FALLS = (3 / 8, 5 / 8, 7 / 8)
"""Adam's step, the weight of total variation, and the shares of the search at which the step falls to a tenth
(Geiping et al.)."""
_LBFGS_STEPS = 20
_HISTORY = 100
"""Iterations of L-BFGS per call, and the length of its history (Zhu et al.)."""
_SPREAD = 1 / 3
"""Standard deviation of the noise that an attack on images starts from, around mid-grey, for pixels in [0, 1]."""


class Watcher:
    """Reports the progress of an audit. This one does nothing; the command line draws a bar."""

    def begin(self, evaluations: int) -> None:
        """An audit begins; it evaluates a gradient so many times."""

    def case(self, title: str) -> None:
        """An attack begins."""

    def advance(self, number: int) -> None:
        """So many further evaluations are done."""


@dataclass(frozen=True)
class Sent:
    """What one site sent, or the mean of what several did, as the attacker reads it."""

    exchange: Exchange  # what kind of exchange it was
    gradient: list[Tensor]  # the gradient of a mean loss, by parameter
    steps: int  # optimiser steps behind it
    # inputs and labels of the mini-batches behind it; None if all samples of the sites are
    batch: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Attacked:
    """What the attacker knows: the network in training mode, its trained parameters, and of the samples behind the
    gradient the number (``size``), the shape and the number of classes; and the ``shares`` of the sites in a mean, each
    with an equal part of these samples in mini-batches of its own.
    """

    network: Network
    trained: Sequence[nn.Parameter]
    space: Space
    size: int
    shape: tuple[int, ...]
    classes: int
    device: torch.device
    shares: tuple[float, ...] = (1.0,)


class Attempt:
    """One search, which starts from noise. It keeps the samples, logits and distance of its best evaluation.
    ``labels``: labels of the samples; None to search for them, too."""

    def __init__(
        self,
        attacked: Attacked,
        attack: Search,
        sent: Sent,
        labels: list[int] | None,
        draws: torch.Generator,
        iterations: int,
        watcher: Watcher,
    ) -> None:
        self._attacked, self._attack, self._sent, self._watcher = attacked, attack, sent, watcher
        noise = torch.randn(attacked.size, *attacked.shape, generator=draws)
        self._dummies = noise.to(attacked.device).requires_grad_()
        self._labels: Tensor | None = None
        if labels is None:
            self._logits = torch.randn(attacked.size, attacked.classes, generator=draws).to(attacked.device)
            self._free = [self._dummies, self._logits.requires_grad_()]
        else:
            self._labels = torch.tensor(labels, device=attacked.device)
            self._logits = F.one_hot(self._labels, attacked.classes).float()
            self._free = [self._dummies]
        self._left = iterations
        self._last = 0.0
        self.distance = math.inf
        self.dummies, self.logits = self._dummies.detach().clone(), self._logits.detach().clone()

    def run(self) -> None:
        """Search until the evaluations are used up or the search makes no progress."""
        compiler_comes_later()
        if self._attack == "l2":
            self._lbfgs()
        else:
            self._signed_adam()
        self._watcher.advance(self._left)

    def _lbfgs(self) -> None:
        """Zhu et al.: L-BFGS without a line search."""
        optimizer = torch.optim.LBFGS(self._free, history_size=_HISTORY, tolerance_grad=0, tolerance_change=0)
        while self._left > 0 and math.isfinite(self._last):
            steps = min(_LBFGS_STEPS, self._left)
            optimizer.param_groups[0].update(max_iter=steps, max_eval=steps)
            before = self._left
            optimizer.step(self._evaluate)  # type: ignore[no-untyped-call]
            if steps > 1 and before - self._left == 1:  # it finds no descent direction
                return

    def _signed_adam(self) -> None:
        """Geiping et al.: Adam on the sign of the gradient, with smaller steps at the end. Pixels stay in range."""
        optimizer = torch.optim.Adam(self._free, lr=_STEP)
        falls = [max(1, round(share * self._left)) for share in _FALLS]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls)
        while self._left > 0:
            self._evaluate()
            if not math.isfinite(self._last):
                return
            for tensor in self._free:
                assert tensor.grad is not None
                tensor.grad.sign_()
            optimizer.step()
            schedule.step()
            self._attacked.space.clamp_(self._dummies)

    def _evaluate(self) -> Tensor:
        """The distance at the current samples. Its gradient goes to their ``grad``."""
        attacked = self._attacked
        targets = self._logits.softmax(1) if self._labels is None else self._labels
        inputs, sites = attacked.space.inputs(self._dummies), len(attacked.shares)
        parts = zip(attacked.shares, inputs.chunk(sites), targets.chunk(sites), strict=True)
        loss = torch.stack([share * F.cross_entropy(attacked.network(part), of) for share, part, of in parts]).sum()
        gradient = torch.autograd.grad(loss, attacked.trained, create_graph=True, materialize_grads=True)
        if self._attack == "l2":
            distance = leakage.squared_distance(gradient, self._sent.gradient)
        else:
            distance = leakage.cosine_distance(gradient, self._sent.gradient)
            if attacked.space.images:
                distance = distance + _VARIATION * leakage.total_variation(self._dummies)
        for tensor, part in zip(
            self._free, torch.autograd.grad(distance, self._free, materialize_grads=True), strict=True
        ):
            tensor.grad = part
        self._last = float(distance.detach())
        if self._last < self.distance:
            self.distance = self._last
            self.dummies, self.logits = self._dummies.detach().clone(), self._logits.detach().clone()
        self._left -= 1
        self._watcher.advance(1)
        return distance.detach()


class Space:
    """The space of a search: for images, deviations from mid-grey; for vectors, the network's own inputs."""

    def __init__(self, preprocessing: Preprocessing, shape: tuple[int, ...], device: torch.device) -> None:
        self.preprocessing, self.images = preprocessing, len(shape) == 3
        self._shift = normalise(torch.zeros(1, *shape, device=device), preprocessing)
        self._scale = normalise(torch.ones(1, *shape, device=device), preprocessing) - self._shift

    def inputs(self, dummies: Tensor) -> Tensor:
        """What the network reads."""
        return normalise(0.5 + _SPREAD * dummies, self.preprocessing) if self.images else dummies

    def clamp_(self, dummies: Tensor) -> None:
        """Clamp pixels to [0, 1]. The range of vectors is not known."""
        if self.images:
            dummies.detach().clamp_(-0.5 / _SPREAD, 0.5 / _SPREAD)

    def comparable(self, inputs: Tensor) -> Tensor:
        """What is compared: pixels in [0, 1], or vectors as the network reads them."""
        inputs = inputs.detach()
        return ((inputs - self._shift) / self._scale).clamp(0, 1) if self.images else inputs


_LEVEL = 0.95


@dataclass(frozen=True)
class Case:
    """The result of one attack on one exchange of a site, or on the sum that secure aggregation shows of several.

    Each reconstruction is compared with the original that it resembles most, no original twice: of the mini-batches, or
    of all training samples for an epoch. Pixels are in [0, 1], features as the network reads them.
    """

    exchange: Exchange
    attack: Attack
    sites: int  # how many sites are in the sum; 1 for what a single site sent
    batch: int  # samples in a mini-batch of a site
    steps: int  # optimiser steps behind what was sent, of all sites together; 0 for gradients
    distance: float | None  # the lowest distance between the gradients that a search reached
    mse: tuple[float, ...]  # mean squared error of each reconstruction
    psnr: tuple[float, ...] | None  # peak signal-to-noise ratio of each reconstruction in dB; None for feature vectors
    ssim: tuple[float, ...] | None  # structural similarity of each reconstruction; None for feature vectors
    correlation: tuple[float, ...] | None  # correlation of each reconstruction; None for images
    # what the sites' mean sample scores in place of every reconstruction; likewise the other ``guess_…``
    guess_mse: float
    guess_psnr: float | None
    guess_ssim: float | None
    guess_correlation: float | None
    labels: tuple[str, ...]  # labels of the originals, in the order of the reconstructions
    inferred: tuple[str, ...]  # labels that the attacker inferred
    labels_by: str
    # how many labels of the batch are right; None if more samples were behind what was sent than the attacker
    # reconstructs
    labels_right: int | None
    seconds: float
    originals: npt.NDArray[np.float32] = field(repr=False)  # the originals, of the first repeat
    reconstructions: npt.NDArray[np.float32] = field(repr=False)  # the reconstructions, of the first repeat
    repeats: int = 1  # how many times the sites sent something else, and it was attacked
    # of the mean SSIM or correlation, 95 % bounds over the repeats (Student's t); None without repeats
    bounds: tuple[float, float] | None = None

    @property
    def likeness(self) -> tuple[float, ...]:
        """SSIM of images, correlation of vectors."""
        likeness = self.correlation if self.ssim is None else self.ssim
        assert likeness is not None
        return likeness

    def record(self) -> dict[str, Any]:
        """Plain data without the samples. Infinite numbers, such as the PSNR of an exact copy, are None."""
        return {key: _plain(value) for key, value in vars(self).items() if key not in ("originals", "reconstructions")}


def together(repeats: Sequence[Case]) -> Case:
    """One case of several of the same attack: all reconstructions, and how sure their mean likeness is.

    Reconstructions of one repeat are not independent, so the bounds are those of the means of the repeats.
    """
    first = repeats[0]
    if len(repeats) == 1:
        return first
    joined: dict[str, Any] = {}
    for name in ("mse", "psnr", "ssim", "correlation", "labels", "inferred"):
        if getattr(first, name) is not None:
            joined[name] = tuple(value for case in repeats for value in getattr(case, name))
    for name in ("guess_mse", "guess_psnr", "guess_ssim", "guess_correlation"):
        if getattr(first, name) is not None:
            joined[name] = fmean(getattr(case, name) for case in repeats)
    right = [case.labels_right for case in repeats if case.labels_right is not None]
    distances = [case.distance for case in repeats if case.distance is not None]
    means = [fmean(case.likeness) for case in repeats]
    half = float(stats.t.ppf((1 + _LEVEL) / 2, len(means) - 1) * stats.sem(means))
    return replace(
        first,
        **joined,
        distance=fmean(distances) if distances else None,
        labels_right=sum(right) if right else None,
        seconds=sum(case.seconds for case in repeats),
        repeats=len(repeats),
        bounds=(fmean(means) - half, fmean(means) + half),
    )


def _plain(value: Any) -> Any:
    """A value for JSON: tuples as lists, and None for infinite numbers and NaN."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_AT_ONCE = 256  # samples that are compared at a time


@dataclass(frozen=True)
class _Found:
    """What an attack found: inputs (b, …), labels (empty if unknown), how it found the labels, its distance."""

    inputs: Tensor
    labels: list[int]
    labels_by: str
    distance: float | None


class Attacker:
    """Attacks at one size of mini-batch: on what a site sends, or on the sum of what several send. ``size``: samples in
    a mini-batch of a site."""

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
