"""Trains a network at several sites side by side, with the weights of all sites in stacks (torch.func).

A step of a small network is many short operations, most of whose time is not arithmetic. Here each operation computes
the step of all sites. Sites draw the mini-batches that they draw alone, and results differ from those of one site after
the other by rounding only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fedshift.data.tasks.objective import CLASSES
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.local.stacked_optimizer import StackedOptimizer
from fedshift.federation.site import Batch, LocalFit
from fedshift.federation.training import Training
from fedshift.models.instance_methods import has_method
from fedshift.models.made_up import made_up
from fedshift.models.network import Network, copy_with

STACKED = 64
"""Most sites of a stack; more were no faster."""
_STACKED_NUMBERS = 1 << 26
"""Most weights of a stack, which bounds memory."""
_FASTER_BELOW = 1e7
"""Operations of a step below which torch.func was faster on a processor (benchmarks/speed.md)."""


def check_side_by_side(
    name: str, network: Network, training: Training, input_shape: Sequence[int], *, in_parts: bool, plugged: bool
) -> None:
    """Refuse sites that cannot train side by side; arguments as of `no_side_by_side`. Raises UserError: they cannot."""
    if fault := no_side_by_side(name, network, training, input_shape, in_parts=in_parts, plugged=plugged):
        raise UserError(f"engine.sites: side_by_side: {fault}; or leave it out")


def no_side_by_side(
    name: str, network: Network, training: Training, input_shape: Sequence[int], *, in_parts: bool, plugged: bool
) -> str:
    """Why the sites of a method cannot train side by side; empty if they can.

    ``in_parts``: whether the method gives its calls in parts.
    """
    fault = ""
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
    else:
        fault = _no_stack(network, input_shape)
    return fault


def sites_of_a_stack(network: nn.Module) -> int:
    """How many sites train side by side."""
    numbers = sum(value.numel() for value in network.parameters())
    return max(1, min(STACKED, _STACKED_NUMBERS // max(1, numbers)))


def _no_stack(network: Network, input_shape: Sequence[int]) -> str:
    """Why a network cannot train in a stack; empty if it can."""
    modules = list(network.modules())
    if any(isinstance(module, _NormBase) for module in modules):
        return "the network must be without batch_norm, which looks at whole mini-batches"
    if any(isinstance(module, _DropoutNd) and module.p > 0 for module in modules):
        return "the network must be without dropout, whose draws would be others"
    copy = copy_with(network)
    tensors = {name: torch.stack([value, value]) for name, value in _tensors(copy).items()}
    inputs = made_up(network, 2, tuple(input_shape)).to(next(iter(tensors.values())).device)
    try:
        _scores(copy, tensors, torch.stack([inputs, inputs]))
    except (RuntimeError, ValueError, TypeError) as error:
        return f"torch.func cannot stack the network ({str(error).partition(chr(10))[0]:.100})"
    return ""


def faster_side_by_side(network: Network, input_shape: Sequence[int], batch_size: int) -> bool:
    """Whether sites of a network that can train side by side are faster so, by what was measured on processors."""
    if _layers(network) is not None:
        return True
    # A multiplication and an addition for each weight, forward; a backward pass takes twice as many.
    return 6 * _products(network, input_shape) * batch_size <= _FASTER_BELOW


@torch.no_grad()
def _products(network: Network, input_shape: Sequence[int]) -> float:
    """How often a network multiplies by a weight for one sample, products of activations not counted."""
    made, result = copy_with(network), [0.0]

    def count(layer: nn.Module, _: object, given: object) -> None:
        values = given if isinstance(given, Tensor) else next(iter(given))  # type: ignore[call-overload]
        weights = [value for value in layer.parameters(recurse=False) if value.dim() > 1]
        result[0] += sum(weight.numel() * values.numel() / weight.shape[0] for weight in weights)

    for layer in made.modules():
        layer.register_forward_hook(count)
    made(made_up(network, 1, tuple(input_shape)).to(next(network.parameters()).device))
    return result[0]


def _layers(network: nn.Module) -> list[nn.Linear] | None:
    """The layers of a network that is linear layers with ReLU between them; None if it is another one."""
    if type(network) is not Network or any(has_method(part, "forward") for part in network.modules()):
        return None
    parts = list(network.features) if type(network.features) is nn.Sequential else [network.features]
    if not parts or type(parts[0]) is not nn.Flatten:
        return None
    result: list[nn.Module] = []
    for part in parts[1:]:
        if type(part) is not nn.Sequential or len(part) != 2 or type(part[1]) is not nn.ReLU:
            return None
        result.append(part[0])
    result.append(network.classifier)
    layers = [layer for layer in result if type(layer) is nn.Linear and layer.bias is not None]
    if any(has_method(part, "forward") for part in network.modules()):
        return None  # it computes in another way, such as in 16 bits
    trained = all(parameter.requires_grad for parameter in network.parameters())
    return layers if len(layers) == len(result) and trained else None


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """What a network computes with, by name."""
    named = (*network.named_parameters(), *network.named_buffers())
    return {name: value.detach() for name, value in named}


def _scores(network: nn.Module, tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """What the network gives at each site, (sites, b, outputs), with stacked tensors and inputs (sites, b, …)."""

    def at_one(tensors: dict[str, Tensor], read: Tensor) -> Tensor:
        given: Tensor = functional_call(network, tensors, (read,))
        return given

    scores: Tensor = torch.vmap(at_one)(dict(tensors), inputs)
    return scores


@torch.no_grad()
def minimise_together(fits: Sequence[LocalFit]) -> list[tuple[float, float]]:
    """`Site.minimise` of several sites, whose networks are alike.

    ``fits``: what each site trains, in place. Returns for each the mean loss of its mini-batches and that of the first;
    0 if there was none. Raises FedshiftError: a network or a loss is not one that `check_side_by_side` accepts.
    """
    if not fits:
        return []
    order = sorted(range(len(fits)), key=lambda index: -_steps(fits[index]))  # those that train longest are the first
    kind = _Stack if _layers(fits[0].model) is None else _Layers
    stack = kind([fits[index] for index in order])
    passes = [fit.site.batches(fit.epochs, fit.steps) for fit in stack.fits]
    while drawn := list(takewhile(lambda batch: batch is not None, (next(pass_, None) for pass_ in passes))):
        stack.step(drawn)  # type: ignore[arg-type]
    if any(next(pass_, None) is not None for pass_ in passes):
        raise FedshiftError("a site drew more mini-batches than its epochs have")
    stack.optimizer.keep()
    losses = stack.losses()
    return [losses[order.index(index)] for index in range(len(fits))]


def _steps(fit: LocalFit) -> int:
    """How many mini-batches a site will train on."""
    wanted = fit.steps if fit.steps is not None else fit.epochs * fit.site.batches_per_epoch
    return min(wanted, fit.site.envelope.mini_batches_left)


class _Stack:
    """The networks of some sites. Each tensor has a row for every site, in the order of ``fits``."""

    by_layer = False

    def __init__(self, fits: Sequence[LocalFit]) -> None:
        self.fits = fits
        if any(fit.site.plug_ins for fit in fits):
            raise FedshiftError("these sites cannot train side by side")
        self.network = fits[0].model
        named = [dict(fit.model.named_parameters()) for fit in fits]
        self.trained = [name for name, value in named[0].items() if value.requires_grad]
        alike = [_tensors(fit.model) for fit in fits]
        self.tensors = {name: torch.stack([values[name] for values in alike]) for name in alike[0]}
        for index, by_name in enumerate(named):
            for name, parameter in by_name.items():
                parameter.data = self.tensors[name][index]
        trainable = [[parameters[name] for name in self.trained] for parameters in named]
        self.optimizer = StackedOptimizer(fits, trainable, [self.tensors[name] for name in self.trained], self.by_layer)
        if self.optimizer.regularised:  # what autograd adds to a site's gradient is added to the stack
            for index, parameters in enumerate(trainable):
                for parameter, slopes in zip(parameters, self.optimizer.slopes, strict=True):
                    parameter.grad = slopes[index]
        self._number = 0
        self._totals = torch.zeros(len(fits), dtype=torch.float64, device=fits[0].site.device)
        self._first: Tensor | None = None

    def step(self, drawn: Sequence[Batch]) -> None:
        """One step at the first sites, down the gradients of these mini-batches."""
        number = len(drawn)
        if number != self._number:
            self._number = number
            self.optimizer.shrink(number)
            self._shrink({name: whole[:number] for name, whole in self.tensors.items()})
        losses = self._slopes(drawn, *_in_one(drawn))
        if self.optimizer.regularised:
            losses = losses + self._regularise(number)
        self.optimizer.step()
        self._totals[:number] += losses
        if self._first is None:
            self._first = self._totals.clone()

    def _shrink(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with these rows of the tensors only."""
        self._now = {name: whole.detach() for name, whole in tensors.items()}
        for name in self.trained:
            self._now[name].requires_grad_()

    def _slopes(self, drawn: Sequence[Batch], inputs: Tensor, shares: Tensor) -> Tensor:
        """Give the optimiser the gradients of mini-batches; return their losses (sites,)."""
        with torch.enable_grad():
            scores = _scores(self.network, self._now, inputs)
        losses, slopes = self._losses(scores.detach(), drawn, shares)
        trained = [self._now[name] for name in self.trained]
        self.optimizer.take(torch.autograd.grad(scores, trained, slopes, materialize_grads=True))
        return losses

    def _losses(self, scores: Tensor, drawn: Sequence[Batch], shares: Tensor) -> tuple[Tensor, Tensor]:
        """The losses (sites,), and the gradients of the scores.

        ``scores``: (sites, b, outputs). ``shares``: (sites, b), the share of each row in the mean over its mini-batch;
        0 beyond its end.
        """
        if self.fits[0].site.objective == CLASSES:
            labels = _pad([batch.targets for batch in drawn]).unsqueeze(2)
            predicted = scores.log_softmax(2)
            losses = predicted.gather(2, labels).squeeze(2).mul_(shares).sum(1).neg_()
            slopes = predicted.exp_().scatter_add_(2, labels, predicted.new_full((1, 1, 1), -1.0).expand(labels.shape))
            return losses, slopes.mul_(shares.unsqueeze(2))
        with torch.enable_grad():
            scores.requires_grad_()
            pairs = zip(self.fits, scores, drawn, strict=False)
            result = [
                fit.site.objective.loss(predicted[: len(batch.rows)], batch.targets) for fit, predicted, batch in pairs
            ]
            losses = torch.stack(result)
            (slopes,) = torch.autograd.grad(losses.sum(), scores)
        return losses.detach(), slopes

    def _regularise(self, number: int) -> Tensor:
        """Add the gradients of the part of the loss that depends on no sample; return its values (sites,)."""
        values = torch.zeros(number, device=self._totals.device)
        for index, fit in enumerate(self.fits[:number]):
            if fit.regulariser is not None:
                with torch.enable_grad():
                    value = fit.regulariser()
                    value.backward()  # type: ignore[no-untyped-call]
                values[index] = value.detach()
        return values

    def losses(self) -> list[tuple[float, float]]:
        """For each site the mean loss, and that of the first mini-batch."""
        steps = [max(1, fit.site.mini_batches) for fit in self.fits]
        means = [total / number for total, number in zip(self._totals.tolist(), steps, strict=True)]
        return list(zip(means, means if self._first is None else self._first.tolist(), strict=True))


class _Layers(_Stack):
    """Linear layers with ReLU between them. Their gradients are written out by hand: torch's take as long as the
    products, and these can be added to the momentum as they are made.
    """

    by_layer = True

    def _shrink(self, tensors: Mapping[str, Tensor]) -> None:
        weights, biases = ([tensors[name] for name in self.trained[begin::2]] for begin in (0, 1))
        self._pairs = [(weight, bias.unsqueeze(1)) for weight, bias in zip(weights, biases, strict=True)]

    def _slopes(self, drawn: Sequence[Batch], inputs: Tensor, shares: Tensor) -> Tensor:
        read = [inputs.flatten(2)]
        for weight, bias in self._pairs:
            if len(read) > 1:
                read[-1].clamp_min_(0)
            read.append(torch.baddbmm(bias, read[-1], weight.transpose(1, 2)))
        losses, slopes = self._losses(read.pop(), drawn, shares)
        for layer in range(len(self._pairs) - 1, -1, -1):
            self.optimizer.add(layer, slopes, read[layer])
            if layer:
                weight, _ = self._pairs[layer]
                slopes = torch.ops.aten.threshold_backward(torch.bmm(slopes, weight), read[layer], 0)
        return losses


def _in_one(drawn: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """The inputs of mini-batches (sites, b, …), and the share of each row in its own; shorter ones end in zeros."""
    inputs = _pad([batch.inputs for batch in drawn])
    longest = inputs.shape[1]
    shares = torch.full(inputs.shape[:2], 1 / longest, device=inputs.device)
    for row, batch in zip(shares, drawn, strict=True):
        if (length := batch.rows.shape[0]) < longest:
            row[:length] = 1 / length
            row[length:] = 0
    return inputs, shares


def _pad(parts: Sequence[Tensor]) -> Tensor:
    """Tensors (b, …), of which some may be shorter, as one; what they lack is zero."""
    lengths = [part.shape[0] for part in parts]  # len() of a tensor takes longer
    if len(set(lengths)) == 1:
        return torch.stack(list(parts))
    whole = parts[0].new_zeros(len(parts), max(lengths), *parts[0].shape[1:])
    for row, part, length in zip(whole, parts, lengths, strict=True):
        row[:length] = part
    return whole
