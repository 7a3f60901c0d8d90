"""Trains one small network at several sites side by side, with the weights of all sites in stacks.

A step of a small network is many short operations, most of whose time is not arithmetic. Here each operation computes
the step of all sites. Sites draw the mini-batches that they draw alone, and results differ from those of one site after
the other by rounding only.

Gradients are written out by hand: for three layers of stacked weights, torch's own take as long as the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn

from fedshift.data.tasks.objective import CLASSES
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.local.stacked_optimizer import StackedOptimizer
from fedshift.federation.site import Batch, LocalFit
from fedshift.federation.training import Training
from fedshift.models.instance_methods import has_method
from fedshift.models.network import Network

STACKED = 64
"""Most sites of a stack. It bounds memory; more were no faster."""


def check_side_by_side(name: str, network: Network, training: Training, *, in_parts: bool, plugged: bool) -> None:
    """Check that the sites of a method can train side by side.

    Args:
        name: of the method.
        network: what its sites train.
        training: how they train.
        in_parts: whether the method gives its calls in parts.
        plugged: whether they have plug-ins.

    Raises:
        UserError: they cannot.
    """
    if not in_parts:
        fault = f"{name} trains in its own way; choose fedavg, fedprox or fedomg"
    elif plugged:
        fault = f"{name} has plug-ins of local training"
    elif training.privacy is not None:
        fault = "training.privacy needs the gradient of each sample"
    elif training.optimizer == "adamw" or training.accumulate > 1:
        fault = "training.optimizer must be sgd or adam, and training.accumulate 1"
    elif training.adapters is not None:
        fault = "training.adapters changes the layers"
    elif training.precision != "float32" or training.matrix_products != "default" or training.compile:
        fault = "training.precision, training.matrix_products and training.compile must be the default"
    elif _layers(network) is None:
        fault = "the network must be linear, or mlp with less than 4,096 inputs, without dropout and batch_norm"
    else:
        return
    raise UserError(f"engine.sites: side_by_side: {fault}; or leave it out")


def _layers(network: nn.Module) -> list[nn.Linear] | None:
    """The layers of a network that is linear layers with ReLU between them; None if it is another one."""
    if type(network) is not Network:
        return None
    parts = list(network.features) if type(network.features) is nn.Sequential else [network.features]
    if not parts or type(parts[0]) is not nn.Flatten:
        return None
    found: list[nn.Module] = []
    for part in parts[1:]:
        if type(part) is not nn.Sequential or len(part) != 2 or type(part[1]) is not nn.ReLU:
            return None
        found.append(part[0])
    found.append(network.classifier)
    layers = [layer for layer in found if type(layer) is nn.Linear and layer.bias is not None]
    if any(has_method(part, "forward") for part in network.modules()):
        return None  # it computes in another way, such as in 16 bits
    trained = all(parameter.requires_grad for parameter in network.parameters())
    return layers if len(layers) == len(found) and trained else None


@torch.no_grad()
def minimise_together(fits: Sequence[LocalFit]) -> list[tuple[float, float]]:
    """`Site.minimise` of several sites, whose networks are alike.

    Args:
        fits: what each site trains, in place.

    Returns:
        For each the mean loss of its mini-batches and that of the first; 0 if there was none.

    Raises:
        FedshiftError: a network or a loss is not one that `check_side_by_side` accepts.
    """
    if not fits:
        return []
    order = sorted(range(len(fits)), key=lambda place: -_steps(fits[place]))  # those that train longest are the first
    stack = _Stack([fits[place] for place in order])
    passes = [fit.site.batches(fit.epochs, fit.steps) for fit in stack.fits]
    while drawn := list(takewhile(lambda batch: batch is not None, (next(one, None) for one in passes))):
        stack.step(drawn)  # type: ignore[arg-type]
    if any(next(one, None) is not None for one in passes):
        raise FedshiftError("a site drew more mini-batches than its epochs have")
    stack.optimizer.keep()
    found = stack.losses()
    return [found[order.index(place)] for place in range(len(fits))]


def _steps(fit: LocalFit) -> int:
    """How many mini-batches a site will train on."""
    wanted = fit.steps if fit.steps is not None else fit.epochs * fit.site.batches_per_epoch
    return min(wanted, fit.site.envelope.mini_batches_left)


class _Stack:
    """The networks of some sites. Each tensor has a row for every site, in the order of ``fits``."""

    def __init__(self, fits: Sequence[LocalFit]) -> None:
        self.fits = fits
        if _layers(fits[0].model) is None or any(fit.site.plug_ins for fit in fits):
            raise FedshiftError("these sites cannot train side by side")
        own = [list(fit.model.parameters()) for fit in fits]  # weight and bias of each layer, in order
        self.tensors = [torch.stack([value.detach() for value in values]) for values in zip(*own, strict=True)]
        for place, parameters in enumerate(own):
            for parameter, whole in zip(parameters, self.tensors, strict=True):
                parameter.data = whole[place]
        self.optimizer = StackedOptimizer(fits, own, self.tensors)
        self.regularised = any(fit.regulariser is not None for fit in fits)
        if self.regularised:  # what autograd adds to a site's gradient is added to the stack
            for place, parameters in enumerate(own):
                for parameter, slopes in zip(parameters, self.optimizer.slopes, strict=True):
                    parameter.grad = slopes[place]
        self._number = 0
        self._totals = torch.zeros(len(fits), dtype=torch.float64, device=self.tensors[0].device)
        self._first: Tensor | None = None

    def step(self, drawn: Sequence[Batch]) -> None:
        """One step at the first sites, down the gradients of these mini-batches."""
        number = len(drawn)
        if number != self._number:
            self._shrink(number)
        inputs, shares = _in_one(drawn)
        read = [inputs]
        for weight, bias in self._layers:
            if len(read) > 1:
                read[-1].clamp_min_(0)
            read.append(torch.baddbmm(bias, read[-1], weight.transpose(1, 2)))
        losses, slopes = self._losses(read.pop(), drawn, shares)
        for layer in range(len(self._layers) - 1, -1, -1):
            self.optimizer.add(layer, slopes, read[layer])
            if layer:
                weight, _ = self._layers[layer]
                slopes = torch.ops.aten.threshold_backward(torch.bmm(slopes, weight), read[layer], 0)
        if self.regularised:
            losses = losses + self._regularise(number)
        self.optimizer.step()
        self._totals[:number] += losses
        if self._first is None:
            self._first = self._totals.clone()

    def _shrink(self, number: int) -> None:
        """Go on with the first so many sites only."""
        self._number = number
        self.optimizer.shrink(number)
        pairs = zip(self.tensors[::2], self.tensors[1::2], strict=True)
        self._layers = [(weight[:number], bias[:number].unsqueeze(1)) for weight, bias in pairs]

    def _losses(self, scores: Tensor, drawn: Sequence[Batch], shares: Tensor) -> tuple[Tensor, Tensor]:
        """The losses (sites,), and the gradients of the scores.

        Args:
            scores: (sites, b, outputs).
            drawn: the mini-batches.
            shares: (sites, b), the share of each row in the mean over its mini-batch; 0 beyond its end.
        """
        if self.fits[0].site.objective == CLASSES:
            labels = _padded([batch.targets for batch in drawn]).unsqueeze(2)
            said = scores.log_softmax(2)
            losses = said.gather(2, labels).squeeze(2).mul_(shares).sum(1).neg_()
            slopes = said.exp_().scatter_add_(2, labels, said.new_full((1, 1, 1), -1.0).expand(labels.shape))
            return losses, slopes.mul_(shares.unsqueeze(2))
        with torch.enable_grad():
            scores.requires_grad_()
            pairs = zip(self.fits, scores, drawn, strict=False)
            found = [fit.site.objective.loss(said[: len(batch.rows)], batch.targets) for fit, said, batch in pairs]
            losses = torch.stack(found)
            (slopes,) = torch.autograd.grad(losses.sum(), scores)
        return losses.detach(), slopes

    def _regularise(self, number: int) -> Tensor:
        """Add the gradients of the part of the loss that depends on no sample; return its values (sites,)."""
        values = torch.zeros(number, device=self._totals.device)
        for place, fit in enumerate(self.fits[:number]):
            if fit.regulariser is not None:
                with torch.enable_grad():
                    value = fit.regulariser()
                    value.backward()  # type: ignore[no-untyped-call]
                values[place] = value.detach()
        return values

    def losses(self) -> list[tuple[float, float]]:
        """For each site the mean loss, and that of the first mini-batch."""
        steps = [max(1, fit.site.mini_batches) for fit in self.fits]
        means = [total / number for total, number in zip(self._totals.tolist(), steps, strict=True)]
        return list(zip(means, means if self._first is None else self._first.tolist(), strict=True))


def _in_one(drawn: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """The inputs of mini-batches (sites, b, d), and the share of each row in its own; shorter ones end in zeros."""
    inputs = _padded([batch.inputs.flatten(1) for batch in drawn])
    longest = inputs.shape[1]
    shares = inputs.new_full(inputs.shape[:2], 1 / longest)
    for row, batch in zip(shares, drawn, strict=True):
        if (length := batch.rows.shape[0]) < longest:
            row[:length] = 1 / length
            row[length:] = 0
    return inputs, shares


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Tensors (b, …), of which some may be shorter, as one; what they lack is zero."""
    lengths = [part.shape[0] for part in parts]  # len() of a tensor takes longer
    if len(set(lengths)) == 1:
        return torch.stack(list(parts))
    whole = parts[0].new_zeros(len(parts), max(lengths), *parts[0].shape[1:])
    for row, part, length in zip(whole, parts, lengths, strict=True):
        row[:length] = part
    return whole
