"""Base of the pooled methods with modules besides the model: their rounds, their batches, and these modules.

The model that is evaluated is an ordinary network. Discriminators, second classifiers and the like stay in the pool's
memory, drawn from the experiment's seed. So a model file holds nothing that prediction does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeVar

from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from fedshift.federation.messages import Update
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.site import Batch, Site
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.models.network import Network

B = TypeVar("B")
M = TypeVar("M", bound=nn.Module)


OF_ONE_BATCH = (
    "amplitude_mix",
    "label_gradient",
    "jigsaw",
    "triplets",
    "label_smoothing",
    "mixup",
    "cutmix",
    "sharpness",
)
"""The plug-ins that read a step's samples as one batch, or ask for its loss more than once."""
ITS_OWN = "which has it in its own loss"


class PooledTraining(DeepAll):
    """Base of methods on a pool of all sources, with modules besides the model. A subclass writes `fit`."""

    traits = DeepAll.traits.derive(
        tasks=("classification",),
        memory_names=("optimizer", "parts"),
        tests=MethodTests(options={"domain_batches": tries("split", "full")}),
    )

    def progress(self, site: Site) -> float:
        """The share of the run's mini-batches that are done, with those of the current optimiser step."""
        begun, left = site.envelope.progress, site.envelope.mini_batches_left
        return begun + (1 - begun) * site.mini_batches / max(1, left)

    def parts(self, site: Site, build: Callable[[], M]) -> M:
        """The modules besides the model: drawn from the experiment's seed at first, later from the pool's memory."""
        with drawn_from(derive_seed(site.seed, site.name, "parts")):
            module = build()
        if "parts" in site.memory:
            module.load_state_dict(dict(site.memory.weights("parts")))
        return site.place(module)

    def train(
        self,
        site: Site,
        batches: Iterable[B],
        loss_of: Callable[[B], Tensor],
        model: Network,
        parts: nn.Module | None = None,
        optimizers: Mapping[str, Optimizer] | None = None,
    ) -> Update:
        """Train the model and the modules besides it together, and remember the latter.

        ``optimizers``: entry of the memory → the optimiser that is kept there; None: the experiment's, for all modules.
        """
        modules = [model] if parts is None else [model, parts]
        steppers = optimizers or {"optimizer": site.optimizer(*modules, memory="optimizer")}
        loss = site.minimise_over(batches, loss_of, *modules, optimizers=steppers.values())
        for memory, optimizer in steppers.items():
            site.remember_optimizer(optimizer, memory)
        if parts is not None:
            site.memory["parts"] = site.weights_of(parts)
        return Update(site.weights_of(model), site.samples, loss)


class DomainTraining(PooledTraining):
    """Base of those that need the domains apart: a step draws a batch of each."""

    traits = PooledTraining.traits.derive(
        unfit_plug_ins=dict.fromkeys(OF_ONE_BATCH, "which draws a batch of every domain"),
        tests=MethodTests(options={"domain_batches": tries("split")}),
    )

    domain_batches: Literal["split", "full"] = Field(
        "full",
        description="a step's batches of the domains: full, a mini-batch of each; split, one mini-batch divided over "
        "them, with as many steps as deepall",
    )

    def of_sources(self, site: Site, due: int) -> Iterator[tuple[Batch, ...]]:
        """The sources' part of `of_each`."""
        return (sources for sources, _ in self.of_each(site, due))
