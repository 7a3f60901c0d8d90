"""A gradient-leakage attack by search: it looks for samples whose gradient is the one that a site sent.

Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS 2019. Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients.
NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.data.domain import Preprocessing
from fedshift.data.transforms import normalise
from fedshift.extras import compiler_comes_later
from fedshift.functional import leakage
from fedshift.models.network import Network

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
    """What one site sent, or the mean of what several did, as the attacker reads it.

    Attributes:
        exchange: what kind of exchange it was.
        gradient: the gradient of a mean loss, by parameter.
        steps: optimiser steps behind it.
        batch: inputs and labels of the mini-batches behind it; None if all samples of the sites are.
    """

    exchange: Exchange
    gradient: list[Tensor]
    steps: int
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

    Args:
        labels: labels of the samples; None to search for them, too.
    """

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
