"""Runs a method's calls at one site. Every engine runs its sites through `SiteRunner`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from fedshift.data.domain import Domain, Preprocessing, Rows
from fedshift.data.site_data import SiteData
from fedshift.data.tasks.objective import objective_of
from fedshift.errors import FedshiftError, KindRefused
from fedshift.federation.federation import CallOwner, OnRefusal
from fedshift.federation.messages import Reply, pieces, promised_kinds, reply_class, reply_content
from fedshift.federation.randomness import Draws
from fedshift.federation.replies import About
from fedshift.federation.site import Envelope, LocalFit, Role, Site
from fedshift.federation.site_memory import SiteMemory
from fedshift.federation.training import Training
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.models.products import with_compiler


@dataclass(frozen=True)
class SitePlan:
    """What a site holds and may send."""

    name: str  # the site's name
    role: Role  # whether it is a source or a target
    # (domain, training rows, domain number) of its samples; one part unless the site is a pool
    parts: Sequence[tuple[Domain, Rows, int]]
    unlabelled: Sequence[tuple[Domain, Rows, int]] = ()  # the same, of a target whose samples lie in the pool
    # the same, with the rows that are held out, for a method that uses them
    held_out: Sequence[tuple[Domain, Rows, int]] = ()
    refuse: frozenset[str] = frozenset()  # kinds that only this site refuses to send


@dataclass(frozen=True)
class Setting:
    """What all sites of a run have in common; ``draws``: of every site that trains privately."""

    method: CallOwner
    training: Training
    network: NetworkOptions
    preprocessing: Preprocessing
    input_shape: tuple[int, ...]
    classes: int
    sources: int
    seed: int
    device: str
    refuse: frozenset[str] = frozenset()
    on_refusal: OnRefusal = "stop"
    draws: Mapping[str, Draws] = field(default_factory=dict)

    def build_network(self) -> Network:
        """The network that the method trains, with weights drawn from the seed; the same in every process."""
        network = self.training.network(self.network, self.input_shape, self.classes, self.seed)
        network.objective = objective_of(self.preprocessing)
        network = self.training.prepare(self.method.adapt_network(network, self.sources))
        return with_compiler(network) if self.training.compile else network


def about_sites(plans: Sequence[SitePlan], setting: Setting, network: Network) -> dict[str, About]:
    """What the server knows of each site; ``network``: what sites train, with the weights that the run starts from."""
    shape = tuple(setting.input_shape)
    return {
        plan.name: About(network, sum(len(rows) for _, rows, _ in plan.parts), shape, setting.classes, setting.training)
        for plan in plans
    }


class SiteRunner:
    """Holds one site and runs a method's calls at it."""

    def __init__(
        self, plan: SitePlan, setting: Setting, memory: Sequence[str] = (), network: Network | None = None
    ) -> None:
        """Make the site.

        ``setting``: what all sites of the run have in common. ``memory``: names of site memory that the engine itself
        uses, beside the method's. ``network``: what `Setting.build_network` gave; sites of one process can share it,
        since calls train copies. Raises KindRefused: the site refuses a kind that the method declares, and the run may
        not continue without it.
        """
        device = torch.device(setting.device)
        network = (setting.build_network() if network is None else network).to(device)
        self.refuse = {
            **dict.fromkeys(plan.refuse, f"engine.refuse_at.{plan.name}"),
            **dict.fromkeys(setting.refuse, "engine.refuse"),
        }
        refused = sorted(set(self.refuse).intersection(setting.method.calls.shares))
        if refused and setting.on_refusal == "stop":  # before any training; `run` checks each reply again
            raise KindRefused(
                f"site '{plan.name}' refuses to send {refused[0]}, which the method shares: choose another "
                f"method or take the kind out of {self.refuse[refused[0]]}"
            )
        self.method = setting.method
        self.site = Site(
            name=plan.name,
            role=plan.role,
            classes=setting.classes,
            domains=len(plan.parts),
            training=setting.training,
            memory=SiteMemory((*setting.method.calls.kept_at_sites, *memory)),
            seed=setting.seed,
            device=device,
            network=network,
            objective=objective_of(setting.preprocessing),
            exchanges_per_epoch=setting.method.exchanges_per_epoch,
            draws=setting.draws.get(plan.name),
            data=SiteData(plan.parts, setting.preprocessing, setting.training.augmentation, device),
            unlabelled=SiteData(plan.unlabelled, setting.preprocessing, setting.training.augmentation, device)
            if plan.unlabelled
            else None,
            held_out=SiteData(plan.held_out, setting.preprocessing, None, device) if plan.held_out else None,
        )

    def run(self, call: str, envelope: Envelope, content: Mapping[str, Any]) -> tuple[Reply, int]:
        """Run a call; return its reply and the number of mini-batches it trained on.

        Raises FedshiftError: the call does not return a `Reply`. Raises KindRefused: the reply holds, or its type
        promises, a kind that the site refuses to send.
        """
        self._check_promised(call)
        with self._fork_generators():  # dropout draws from torch's own generators, which `begin` seeds
            self.site.begin(envelope)
            self.site.plug_ins = self.method.calls.plug_ins(self.site)
            reply = self.method.calls.run(call, self.site, content)
            for plug_in in self.site.plug_ins:
                plug_in.end()
            self.site.plug_ins = ()
            self.site.end()
        return self._check_reply(call, reply)

    def begin(self, call: str, envelope: Envelope, content: Mapping[str, Any]) -> LocalFit:
        """Run a call up to its training, which the engine does; then `finish` runs the rest.

        Raises FedshiftError: the call cannot be taken apart. Raises KindRefused: as in `run`.
        """
        self._check_promised(call)
        with self._fork_generators():
            self.site.begin(envelope)
        return self.method.calls.in_parts(call, self.site, content)

    def finish(self, call: str, fit: LocalFit, loss: float) -> tuple[Reply, int]:
        """The rest of a call after training with this mean loss; as `run`."""
        reply = fit.reply(loss)
        self.site.end()
        return self._check_reply(call, reply)

    def _fork_generators(self) -> AbstractContextManager[None]:
        """A context whose end restores torch's own generators."""
        cuda = [self.site.device] if self.site.device.type == "cuda" else []
        return torch.random.fork_rng(devices=cuda)

    def _check_reply(self, call: str, reply: object) -> tuple[Reply, int]:
        if not isinstance(reply, Reply):
            raise FedshiftError(f"call {call} returned {type(reply).__name__}, not a Reply")
        for name, kind, _ in pieces(reply_content(reply)):  # before anything leaves the site
            self._check(call, name, kind)
        return reply, self.site.mini_batches

    def _check_promised(self, call: str) -> None:
        if self.refuse:  # what the call's signature promises can be refused before it trains
            promised = reply_class(getattr(self.method.calls.owner(call), call))
            for name, kind in promised_kinds(promised).items() if promised else ():
                self._check(call, name, kind)

    def _check(self, call: str, name: str, kind: str) -> None:
        """Raise KindRefused, naming the rule, for a kind that the site refuses to send."""
        if kind in self.refuse:
            raise KindRefused(
                f"site '{self.site.name}' refuses to send {kind} (field '{name}' of call {call}), rule "
                f"{self.refuse[kind]}"
            )
