"""Plug-ins of local training: they change what a site does with a mini-batch, whatever the method's loss is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fedshift.errors import FedshiftError
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.models.network import Network

if TYPE_CHECKING:
    from fedshift.federation.site import Batch, Site

LossOf = Callable[["Batch"], Tensor]


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

    def attached(self, model: Network) -> AbstractContextManager[object]:
        """A context in which ``model`` trains."""
        return nullcontext()

    def loss(self, loss_of: LossOf, batch: Batch) -> Tensor:
        """The loss of a mini-batch, computed with the method's loss."""
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


def regularised(loss_of: Callable[[Any], Tensor], regulariser: Callable[[], Tensor] | None) -> Callable[[Any], Tensor]:
    """A loss plus a regulariser that depends on no sample; None: no regulariser."""
    if regulariser is None:
        return loss_of

    def whole(batch: Any) -> Tensor:
        added = regulariser()
        return loss_of(batch) + added

    return whole


@contextmanager
def plugged(
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
            attached.enter_context(plug_in.attached(plug_in.model))
        for plug_in in reversed(plug_ins):
            loss_of = partial(plug_in.loss, loss_of)
        yield loss_of, [plug_in for plug_in in plug_ins if plug_in.head is not None]
