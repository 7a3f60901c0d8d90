"""What a site holds: its data as mini-batches, optimisers, random generators, its memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedshift.data.site_data import SiteData, batches_per_epoch, epoch_batches, mixed_order, poisson_batches
from fedshift.data.tasks.objective import CLASSES, Objective
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.randomness import Draws, derive_seed, generator
from fedshift.federation.site_memory import SiteMemory, begin_momentum, load_optimizer, optimizer_state
from fedshift.federation.training import Training
from fedshift.models.network import Network, freeze_backbone, rate_factors, waiting_parameters

Role = Literal["source", "target"]


@dataclass(frozen=True)
class Batch:
    """A mini-batch on the device.

    Attributes:
        inputs: (b, …) float32.
        labels: (b,) int64, masks, or float32 values in the label's unit; None at an unlabelled target.
        domains: (b,) int64, the number of each sample's domain; all equal unless the site is a pool.
        rows: (b,) int64, the samples' numbers at this site.
    """

    inputs: Tensor
    labels: Tensor | None
    domains: Tensor
    rows: Tensor

    def part(self, rows: slice) -> Batch:
        """Some of the samples."""
        labels = None if self.labels is None else self.labels[rows]
        return Batch(self.inputs[rows], labels, self.domains[rows], self.rows[rows])

    @property
    def targets(self) -> Tensor:
        """The labels.

        Raises:
            FedshiftError: the site has none.
        """
        if self.labels is None:
            raise FedshiftError("a call asked an unlabelled target for labels")
        return self.labels


def halves_of(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The first half of every batch, then its second half, which has the odd sample; a sample alone is one half."""
    for batch in batches:
        cut = max(1, len(batch.inputs) // 2)
        yield batch.part(slice(cut))
        if len(batch.inputs) > cut:
            yield batch.part(slice(cut, None))


def join_batches(*batches: Batch) -> Batch:
    """Labelled batches, one behind the other."""
    return Batch(
        torch.cat([batch.inputs for batch in batches]),
        torch.cat([batch.targets for batch in batches]),
        torch.cat([batch.domains for batch in batches]),
        torch.cat([batch.rows for batch in batches]),
    )


def parts_of(batch_size: int, domains: int) -> list[int]:
    """A mini-batch divided over so many domains, as evenly as it goes.

    Raises:
        UserError: a domain would have less than two samples, and BatchNorm cannot train on one.

    Example:
        >>> parts_of(64, 5)
        [13, 13, 13, 13, 12]
    """
    if batch_size < 2 * domains:
        raise UserError(
            f"training.batch_size: {batch_size} samples, divided over {domains} domains, are less than two of each: "
            "raise it, or write domain_batches: full"
        )
    return [batch_size // domains + (number < batch_size % domains) for number in range(domains)]


@dataclass(frozen=True)
class Envelope:
    """What the engine tells a site besides the content: exchange, round, share of the budget used, batches left."""

    exchange: int
    round: int
    progress: float
    mini_batches_left: int


@dataclass
class SiteBase:
    """A site without what trains: it holds data, memory and the network, and gives batches and optimisers."""

    name: str
    role: Role
    classes: int
    domains: int
    training: Training
    memory: SiteMemory
    seed: int
    device: torch.device
    network: Network = field(repr=False)
    data: SiteData = field(repr=False)
    unlabelled: SiteData | None = field(default=None, repr=False)
    held_out: SiteData | None = field(default=None, repr=False)
    scratch: dict[str, Any] = field(default_factory=dict, repr=False)
    exchanges_per_epoch: int = 1
    objective: Objective = CLASSES
    draws: Draws | None = None
    mini_batches: int = 0
    worked: float = 1.0
    """The share of the training that this exchange's call wanted and its budget let it do, the least of its parts."""
    _orders: int = 0
    _done: int = 0
    _rates: list[float] = field(default_factory=list, repr=False)
    _scheduled: list[tuple[torch.optim.Optimizer, float]] = field(default_factory=list, repr=False)
    generator: torch.Generator = field(default_factory=torch.Generator, repr=False)
    envelope: Envelope = field(default_factory=lambda: Envelope(0, 0, 0.0, 0))

    def begin(self, envelope: Envelope) -> None:
        """Start an exchange. Its generators depend on the seed, the site and the exchange alone."""
        self.envelope = envelope
        if self.training.thaw_after:  # sites of one process share the network, and are all in this round
            freeze_backbone(self.network, envelope.round <= self.training.thaw_after)
        self.mini_batches = self._orders = self._done = 0
        self.worked = 1.0
        self._rates, self._scheduled = [], []
        # Another word would draw other numbers.
        self.generator = generator(self.seed, self.name, envelope.exchange, "step")
        seed = derive_seed(self.seed, self.name, envelope.exchange, "torch")
        if self.device.type == "cpu":  # torch.manual_seed formats the call stack for every accelerator not in use
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def end(self) -> None:
        """End an exchange. Drop the optimisers, and with them the trained model: a site keeps neither."""
        self._scheduled = []

    @property
    def samples(self) -> int:
        """N_k: the number of training samples at this site."""
        return self.data.samples

    @property
    def batches_per_epoch(self) -> int:
        """Mini-batches of one pass over this site's data; in a round, of the part of it that an exchange trains on."""
        whole = batches_per_epoch(self.samples, self.training.batch_size)
        return -(-whole // self.exchanges_per_epoch) if self.envelope.round else whole

    @property
    def learning_rate(self) -> float:
        """η: the learning rate at this point of the run."""
        progress, left = self.envelope.progress, self.envelope.mini_batches_left
        if self.training.lr_step == "mini_batch" and left:
            progress += (1 - progress) * self._done / left
        return self.training.learning_rate(progress)

    @property
    def mean_learning_rate(self) -> float:
        """The mean learning rate of this exchange's mini-batches."""
        return sum(self._rates) / len(self._rates) if self._rates else self.learning_rate

    def generator_for(self, purpose: str) -> torch.Generator:
        """A generator for one purpose in this exchange. Draws for other purposes do not change it."""
        return generator(self.seed, self.name, self.envelope.exchange, purpose)

    def optimizer(
        self, *modules: nn.Module, memory: str | None = None, keep: bool = False, rate: float | None = None
    ) -> torch.optim.Optimizer:
        """The experiment's optimiser over the modules' parameters. `minimise` makes one by itself.

        Args:
            modules: what it trains.
            memory: the entry of the site's memory that `remember_optimizer` keeps its momentum in.
            keep: whether the method keeps momentum where the experiment resets it each round.
            rate: a learning rate that stays as it is; None: the experiment's, with its schedule.
        """
        parameters = [parameter for module in modules for parameter in module.parameters()]
        factors = rate_factors(modules) if self.training.layer_rates else None
        waiting = waiting_parameters(modules) if self.training.thaw_after else ()
        first = self.learning_rate if rate is None else rate
        optimizer = self.training.build_optimizer(parameters, first, factors, waiting)
        kept = keep or not self.training.reset_optimizer_each_round
        if memory is not None and kept and memory in self.memory:
            load_optimizer(optimizer, self.memory[memory])
            if self.training.thaw_after:
                begin_momentum(optimizer)
        if rate is None:
            self._scheduled.append((optimizer, first))
        return optimizer

    def remember_optimizer(self, optimizer: torch.optim.Optimizer, memory: str, keep: bool = False) -> None:
        """Keep momentum for the next exchange, if the experiment does so or ``keep`` is true."""
        if keep or not self.training.reset_optimizer_each_round:
            self.memory[memory] = optimizer_state(optimizer)

    def batches(self, epochs: int = 1, steps: int | None = None) -> Iterator[Batch]:
        """Iterate over shuffled, augmented training batches.

        Ends early when the site has used its budget of mini-batches, so every method of an experiment does equal work.

        Args:
            epochs: passes over the site's data, of `batches_per_epoch` each.
            steps: mini-batches; if given, ``epochs`` does not count.
        """
        again = f" {self._orders}" if self._orders else ""  # a second call in one exchange draws another order
        self._orders += 1
        orders = self._passes(f"batches{again}")
        augmentation = None if self.data.deterministic else self.generator_for(f"augmentation{again}")
        if steps is None and self.exchanges_per_epoch > 1:
            steps = epochs * self.batches_per_epoch
        wanted = steps if steps is not None else math.inf
        passes = epochs if steps is None else math.inf
        done, epoch = 0, 0
        while epoch < passes and done < wanted:
            for rows in self.data.read_ahead(next(orders), self.training.loader_workers):
                if done >= wanted:
                    return
                if self.mini_batches >= self.envelope.mini_batches_left:
                    whole = steps if steps is not None else epochs * self.batches_per_epoch
                    self.worked = min(self.worked, done / whole)
                    return
                inputs, labels, domains = self.data.batch(rows, augmentation if len(rows) else None)
                done += 1
                self._count(1)
                yield Batch(inputs, labels if self.role == "source" else None, domains, rows)
            epoch += 1

    def _passes(self, purpose: str) -> Iterator[Iterable[Tensor]]:
        """For each pass over the data the rows of its mini-batches: every sample once, or as many Poisson batches."""
        size = self.training.batch_size
        if self.draws is None:
            order = self.generator_for(purpose)
            chances = self.training.chances(self.data.labels) if self.role == "source" else None
            while True:
                yield epoch_batches(self.samples, size, order, chances)
        draws = self.draws.generator(self.envelope.exchange, purpose)
        while True:
            yield poisson_batches(self.data, size, self.batches_per_epoch, draws)

    def domain_batches(self, steps: int, *, split: bool = False) -> Iterator[tuple[tuple[Batch, ...], Batch | None]]:
        """Iterate ``steps`` times, at a pool, over a mini-batch of every source domain and one of the target.

        The target's batch has no labels, and is None where the pool holds no target. Each mini-batch counts against
        the budget. A domain that runs out of samples starts again. Ends early like `batches`.

        Args:
            steps: how often.
            split: whether these are the parts of one mini-batch, which counts once.

        Raises:
            UserError: a mini-batch cannot be divided over so many domains.
        """
        numbers = self.data.domain_numbers.cpu()
        whole, domains = self.training.batch_size, self.domains + (self.unlabelled is not None)
        sizes = parts_of(whole, domains) if split else [whole] * domains
        sources = [
            self._endless(self.data, torch.nonzero(numbers == number).flatten(), f"domain {number}", sizes[number])
            for number in range(self.domains)
        ]
        target = self._endless(self.unlabelled, None, "target", sizes[-1]) if self.unlabelled is not None else None
        for _ in range(steps):
            if self.mini_batches >= self.envelope.mini_batches_left:
                return
            self._count(1 if split else domains)
            yield tuple(next(source) for source in sources), next(target) if target is not None else None

    def paired_batches(self, steps: int) -> Iterator[Batch]:
        """Iterate ``steps`` times, at a pool, over a mini-batch of two source domains drawn anew, half of each.

        The halves are equally long, one behind the other. Each mini-batch counts against the budget. With one domain
        both halves are its own. Ends early like `batches`.
        """
        draws = self.generator_for("pairs of domains")
        halves = [halves_of(self.domain_stream(number, "half")) for number in range(self.domains)]
        for _ in range(steps):
            if self.mini_batches >= self.envelope.mini_batches_left:
                return
            self._count(1)
            order = torch.randperm(self.domains, generator=draws).tolist()
            first, second = next(halves[order[0]]), next(halves[order[1 % self.domains]])
            size = min(len(first.inputs), len(second.inputs))
            yield join_batches(first.part(slice(size)), second.part(slice(size)))

    def domain_stream(self, domain: int, purpose: str) -> Iterator[Batch]:
        """A pool's mini-batches of one source domain, without end: what is looked at and not trained on.

        They count against no budget. The same domain and purpose begin with the same batch in an exchange.
        """
        rows = torch.nonzero(self.data.domain_numbers.cpu() == domain).flatten()
        return self._endless(self.data, rows, f"{purpose} of domain {domain}")

    def looks(self, purpose: str) -> Iterator[Batch]:
        """Training mini-batches without end, shuffled and augmented: what is looked at and not trained on.

        They count against no budget. The same purpose begins with the same batch in an exchange.
        """
        return self._endless(self.data, None, purpose)

    def _count(self, number: int) -> None:
        """Count mini-batches that are about to be trained on, and set the learning rates of their step."""
        self._done = self.mini_batches
        self.mini_batches += number
        if self.training.lr_step == "exchange":
            return
        rate = self.learning_rate
        self._rates.append(rate)
        for index, (optimizer, before) in enumerate(self._scheduled):
            for group in optimizer.param_groups:
                group["lr"] *= rate / before  # a method may have set a multiple of the rate
            self._scheduled[index] = optimizer, rate

    def _endless(self, data: SiteData, rows: Tensor | None, purpose: str, size: int | None = None) -> Iterator[Batch]:
        """Mini-batches of ``rows``, or of all rows, pass after pass. Unlabelled data give no labels."""
        order, augmentation = self.generator_for(f"{purpose} order"), self.generator_for(f"{purpose} augmentation")
        whole = data.labels.cpu() if rows is None else data.labels.cpu()[rows]
        chances = None if data is self.unlabelled else self.training.chances(whole)
        while True:
            for places in epoch_batches(len(whole), size or self.training.batch_size, order, chances):
                chosen = places if rows is None else rows[places]
                inputs, labels, domains = data.batch(chosen, augmentation)
                yield Batch(inputs, None if data is self.unlabelled else labels, domains, chosen)

    def all_batches(self, *, mixed: bool = False) -> Iterator[Batch]:
        """Every training sample once, in order, without augmentation. It does not count as training.

        Args:
            mixed: in an order that mixes classes, for what is computed batch by batch. Files are often sorted by class.
        """
        order = mixed_order(self.data.samples) if mixed else None
        return self._once(self.data, max(self.training.batch_size, 256), order)

    def held_out_batches(self) -> Iterator[Batch]:
        """Held-out samples, as `all_batches`. None unless the method ``uses_held_out`` and the protocol has any."""
        return self._once(self.held_out, 256) if self.held_out is not None else iter(())

    def _once(self, data: SiteData, size: int, order: Tensor | None = None) -> Iterator[Batch]:
        order = torch.arange(data.samples) if order is None else order
        for number, (inputs, labels, domains) in enumerate(data.all_batches(size, order)):
            rows = order[number * size : (number + 1) * size]
            yield Batch(inputs, labels if self.role == "source" else None, domains, rows)
