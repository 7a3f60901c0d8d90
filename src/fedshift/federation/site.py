"""A site as the calls of a method see it, and plug-ins: they change what it does with a mini-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedshift.data.transforms import normalise, to_pixels
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.federation.private_training import minimise_privately
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.site_base import Batch, Envelope, Role, SiteBase
from fedshift.federation.steps import Steps
from fedshift.federation.training import has_exploded
from fedshift.models.network import Network, copy_with
from fedshift.weights import Weights

__all__ = ["Batch", "Envelope", "LocalFit", "LossOf", "PlugIn", "Role", "Site"]

M = TypeVar("M", bound=nn.Module)
B = TypeVar("B")
LossOf = Callable[[Batch], Tensor]


@dataclass
class Site(SiteBase):
    """The site that a call runs at. The engine makes it; a method cannot tell which engine it is."""

    plug_ins: Sequence[PlugIn] = ()

    @property
    def fixed_inputs(self) -> bool:
        """Whether no augmentation changes the training samples, so that a call may keep what it computed from them."""
        return self.data.deterministic and not any(plug_in.changes_inputs for plug_in in self.plug_ins)

    def model(self, weights: Weights | None = None) -> Network:
        """A copy of the experiment's network on this site's device, in training mode, with ``weights`` if given."""
        return copy_with(self.network, weights)

    def place(self, module: M) -> M:
        """Move a module of the method's own to this site's device; it multiplies matrices as the network does."""
        return self.training.prepare(module.to(self.device))

    def pixels(self, inputs: Tensor) -> Tensor:
        """A batch's images or volumes before normalisation: (b, c, …), values in [0, 1]."""
        return to_pixels(inputs, self.data.preprocessing)

    def inputs_of(self, pixels: Tensor) -> Tensor:
        """The inverse of `pixels`: normalised images, in the memory format of a batch."""
        values = normalise(pixels, self.data.preprocessing)
        if values.dim() != 4:
            return values
        values = values.contiguous(memory_format=torch.channels_last)
        _, channels, height, width = values.shape
        # With one channel, NCHW and NHWC have the same layout in memory. Channels-last strides keep PyTorch from
        # choosing convolutions that are 1.5 times slower.
        return values.as_strided(values.shape, (channels * height * width, 1, channels * width, channels))

    def minimise(
        self,
        loss_of: Callable[[Batch], Tensor],
        *modules: nn.Module,
        epochs: int = 1,
        steps: int | None = None,
        optimizers: Iterable[torch.optim.Optimizer] | None = None,
        remember: str | None = None,
        regulariser: Callable[[], Tensor] | None = None,
    ) -> float:
        """Train on shuffled mini-batches: for each one a step down the gradient of ``loss_of(batch)``.

        Args:
            loss_of: the loss of a mini-batch, a scalar; for private training the mean of a loss of each sample.
            modules: what is trained.
            epochs: passes over the site's data, unless ``steps`` says how many mini-batches.
            steps: mini-batches, however many passes that takes.
            optimizers: stepped together; by default one over all modules, as the experiment describes it.
            remember: the entry of the site's memory in which that optimiser's momentum stays for the next exchange,
                if the experiment keeps momentum (``training.reset_optimizer_each_round: false``). Optimisers that are
                given are remembered with `remember_optimizer`.
            regulariser: a part of the loss that depends on no sample. Private training adds no noise to it.

        Returns:
            The mean loss of the mini-batches; 0 if there was none, and in private training, where no loss may leave.

        Raises:
            TrainingDiverged: the loss is not a number or explodes; the message names site, round and learning rate.
        """
        batches = self.batches(epochs, steps)
        if self.training.privacy is not None:
            if self.plug_ins:
                raise FedshiftError("no plug-in goes with private training")
            return minimise_privately(self, batches, loss_of, modules, optimizers, remember, regulariser)
        whole = with_regulariser(loss_of, regulariser)
        return self.minimise_over(batches, whole, *modules, optimizers=optimizers, remember=remember)

    def minimise_over(
        self,
        batches: Iterable[B],
        loss_of: Callable[[B], Tensor],
        *modules: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer] | None = None,
        remember: str | None = None,
    ) -> float:
        """`minimise` over given batches, such as those of `domain_batches`."""
        if remember is not None and optimizers is not None:
            raise FedshiftError("minimise remembers the optimiser that it makes, not those that are given")
        if self.training.privacy is not None:
            raise FedshiftError("training.privacy: only Site.minimise trains privately, not minimise_over")
        steppers = list(optimizers) if optimizers is not None else [self.optimizer(*modules, memory=remember)]
        losses: list[Tensor] = []  # read once at the end: a look at each would make an accelerator wait
        with with_plug_ins(self.plug_ins, modules[0], loss_of) as (whole_loss, heads):
            trained = [*modules, *(plug_in.head for plug_in in heads if plug_in.head is not None)]
            stepped = [*steppers, *(plug_in.optimizer for plug_in in heads if plug_in.optimizer is not None)]
            clipped = trained if self.training.clip_norm is not None else ()
            parameters = [value for module in clipped for value in module.parameters() if value.requires_grad]
            steps = Steps(self.training, stepped, self.device)
            for batch in batches:
                steps.begin()
                if self.training.accumulate == 1:
                    loss = whole_loss(batch)
                    steps.add(loss)
                else:
                    loss = self._in_parts(batch, whole_loss, steps)
                steps.step(parameters)
                losses.append(loss.detach())
        values = torch.stack(losses).cpu().double() if losses else torch.zeros(1)
        mean = float(values.mean())
        self.check_loss(mean, float(values[0]))
        if remember is not None:
            self.remember_optimizer(steppers[0], remember)
        return mean

    def _in_parts(self, batch: object, loss_of: Callable[[Any], Tensor], steps: Steps) -> Tensor:
        """The loss of a mini-batch whose gradient is added up over its parts, each with its share of the samples.

        Raises:
            UserError: it is no plain mini-batch.
        """
        if not isinstance(batch, Batch):
            raise UserError("training.accumulate: this method draws several mini-batches for a step: leave it out")
        whole, loss = len(batch.inputs), torch.zeros((), device=batch.inputs.device)
        for rows in torch.arange(whole).tensor_split(min(whole, self.training.accumulate)):
            part = loss_of(batch.part(slice(int(rows[0]), int(rows[-1]) + 1))) * (len(rows) / whole)
            steps.add(part)
            loss = loss + part.detach()
        return loss

    def check_loss(self, mean: float, first: float) -> None:
        """Check the mean loss of an exchange's mini-batches beside the first of them.

        Raises:
            TrainingDiverged: it is not a number or explodes.
        """
        if not math.isfinite(mean) or has_exploded(mean, first):
            raise TrainingDiverged(
                f"training turned to {mean} at site '{self.name}' in round {self.envelope.round} with learning rate "
                f"{self.learning_rate:g}: lower training.lr or set training.clip_norm"
            )

    def weights_of(self, module: nn.Module) -> Weights:
        """Copy a module's weights and buffers as content that can be sent."""
        state, form = module.state_dict().items(), torch.contiguous_format
        return Weights({key: tensor.detach().cpu().clone(memory_format=form) for key, tensor in state})


@dataclass(frozen=True)
class LocalFit:
    """A call that calls `Site.minimise` once, in parts: what it minimises, and the reply that it makes of the loss.

    An engine that is given calls in parts can train the models of several sites together.
    """

    site: Site
    model: Network
    loss_of: LossOf
    reply: Callable[[float], Any]
    epochs: int = 1
    steps: int | None = None
    remember: str | None = None
    regulariser: Callable[[], Tensor] | None = None

    def carry_out(self) -> Any:
        """The reply, after training at this site alone."""
        loss = self.site.minimise(
            self.loss_of,
            self.model,
            epochs=self.epochs,
            steps=self.steps,
            remember=self.remember,
            regulariser=self.regulariser,
        )
        return self.reply(loss)


class PlugIn:
    """Base of the plug-ins. Each exchange has its own, made before the call and ended after it.

    A head is a module that trains beside the model. It stays at its site, in the entry ``name`` of the site's memory,
    and has an optimiser of its own. All sites begin with the same head.

    Attributes:
        name: of its entry in the site's memory.
        changes_inputs: whether the method's loss sees other inputs than the site's samples.
    """

    name: ClassVar[str]
    changes_inputs: ClassVar[bool] = False

    def __init__(self, site: Site) -> None:
        self.site = site
        self.model: Network | None = None
        self.head: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def make_head(self, model: Network) -> nn.Module | None:
        """What trains beside the model; None: nothing."""
        return None

    def attach(self, model: Network) -> AbstractContextManager[object]:
        """A context in which ``model`` trains."""
        return nullcontext()

    def loss(self, loss_of: LossOf, batch: Batch) -> Tensor:
        """The loss of a mini-batch, computed with the method's loss.

        A pooled method may draw a batch of each domain. A plug-in that reads more than one batch is not for such a
        method (``unfit_plug_ins``); `with_labelled` changes the batches of each.
        """
        return loss_of(batch)

    def begin(self, model: Network) -> None:
        """Called before the model trains, possibly more than once in an exchange."""
        if self.model is not None:
            return
        self.model, site = model, self.site
        with drawn_from(derive_seed(site.seed, "plug-in", self.name)):
            head = self.make_head(model)
        if head is not None:
            if self.name in site.memory:
                head.load_state_dict(dict(site.memory.weights(self.name)))
            self.head = site.place(head).train()
            self.optimizer = site.optimizer(self.head, memory=f"{self.name}_optimizer")

    def end(self) -> None:
        """Called after the call. Keeps the head and its momentum.

        Raises:
            FedshiftError: the call trained without it.
        """
        if self.model is None and self.site.mini_batches:
            raise FedshiftError(
                f"local: {self.name} changes what Site.minimise does, and this method trains without it"
            )
        if self.head is not None and self.optimizer is not None:
            self.site.memory[self.name] = self.site.weights_of(self.head)
            self.site.remember_optimizer(self.optimizer, f"{self.name}_optimizer")


def with_labelled(drawn: Any, change: Callable[[Batch], Batch]) -> Any:
    """What a step trains on, with every labelled batch changed: a batch, or one of each domain, as a method draws them.

    Args:
        drawn: a batch, or tuples of batches and of what else the method says of a step.
        change: gives another batch with as many samples.

    Example:
        >>> rows = torch.arange(2)
        >>> source, target = Batch(rows, rows, rows, rows), Batch(rows, None, rows, rows)
        >>> sources, other = with_labelled(((source, source), target), lambda batch: batch.part(slice(1)))
        >>> [len(batch.inputs) for batch in (*sources, other)]
        [1, 1, 2]
    """
    if isinstance(drawn, Batch):
        return drawn if drawn.labels is None else change(drawn)
    return tuple(with_labelled(part, change) for part in drawn) if isinstance(drawn, tuple) else drawn


def with_regulariser(
    loss_of: Callable[[Any], Tensor], regulariser: Callable[[], Tensor] | None
) -> Callable[[Any], Tensor]:
    """A loss plus a regulariser that depends on no sample; None: no regulariser."""
    if regulariser is None:
        return loss_of

    def whole(batch: Any) -> Tensor:
        added = regulariser()
        return loss_of(batch) + added

    return whole


@contextmanager
def with_plug_ins(
    plug_ins: Sequence[PlugIn], model: nn.Module, loss_of: Callable[[Any], Tensor]
) -> Iterator[tuple[Callable[[Any], Tensor], list[PlugIn]]]:
    """The loss with all plug-ins at work, the first of them outermost; and those that have heads.

    Args:
        plug_ins: of the exchange.
        model: what trains.
        loss_of: the method's loss of a mini-batch.

    Raises:
        FedshiftError: the method does not train a whole network.
    """
    with ExitStack() as attached:
        for plug_in in plug_ins:  # all heads first: one may hold a copy of the model, which must have no hooks
            if not isinstance(model, Network):
                raise FedshiftError(f"local: {plug_in.name} needs a whole network, and this method trains parts")
            plug_in.begin(model)
        for plug_in in plug_ins:
            assert plug_in.model is not None
            attached.enter_context(plug_in.attach(plug_in.model))
        for plug_in in reversed(plug_ins):
            loss_of = partial(plug_in.loss, loss_of)
        yield loss_of, [plug_in for plug_in in plug_ins if plug_in.head is not None]
