"""The local engine without worker processes: all sites in this process, one after the other or side by side."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError, KindRefused, TrainingDiverged
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.federation import Federation
from fedshift.federation.local.stacked import minimise_together, sites_of_a_stack
from fedshift.federation.site import LocalFit, Role
from fedshift.federation.site_runner import Setting, SitePlan, SiteRunner, about_sites
from fedshift.weights import Weights


def names_of(plans: Sequence[SitePlan], role: Role) -> list[str]:
    """The names of the sites that have a role."""
    return [plan.name for plan in plans if plan.role == role]


class LocalFederation(Federation):
    """Sites in this process, one after the other; or ``side_by_side``, in stacks of a few sites each."""

    def __init__(
        self, plans: Sequence[SitePlan], setting: Setting, *, side_by_side: bool = False, **options: Any
    ) -> None:
        network = setting.build_network()
        runners = {plan.name: SiteRunner(plan, setting, network=network) for plan in plans}
        super().__init__(
            setting.method,
            about=about_sites(plans, setting, network),
            sources=names_of(plans, "source"),
            targets=names_of(plans, "target"),
            seed=setting.seed,
            **options,
        )
        self._runners = runners
        self._side_by_side = side_by_side
        self._stacked = sites_of_a_stack(network)

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        if self._side_by_side:
            while stack := list(islice(requests, self._stacked)):
                yield from self._together(call, stack)
            return
        for request in requests:
            try:
                reply, mini_batches = self._runners[request.site].run(call, request.envelope, request.content)
            except (TrainingDiverged, KindRefused) as error:
                yield Missing(request.site, error)
                continue
            finally:
                self._forget(request.site)
            yield Answer(request.site, reply, mini_batches)

    def _together(self, call: str, requests: Sequence[Request]) -> Iterator[Answer[Any] | Missing]:
        """Train the sites of these requests side by side."""
        fits: dict[str, LocalFit] = {}
        lost: dict[str, FedshiftError] = {}
        for request in requests:
            try:
                fits[request.site] = self._runners[request.site].begin(call, request.envelope, request.content)
            except KindRefused as error:
                lost[request.site] = error
        trained = dict(zip(fits, minimise_together(list(fits.values())), strict=True))
        for request in requests:
            name = request.site
            try:
                if name in lost:
                    raise lost[name]
                mean, first = trained[name]
                fits[name].site.check_loss(mean, first)
                reply, mini_batches = self._runners[name].finish(call, fits.pop(name), mean)
            except (TrainingDiverged, KindRefused) as error:
                yield Missing(name, error)
                continue
            finally:
                self._forget(name)
            yield Answer(name, reply, mini_batches)

    def _forget(self, site: str) -> None:
        """Free what a site converted where sites are drawn, else thousands of them would keep their samples twice."""
        if self.per_round is not None:
            self._runners[site].site.data.forget()

    def own_weights(self, site: str, weights: Weights) -> Weights:
        return self.method.own_weights(weights, self._runners[site].site.memory) if site in self._runners else weights

    def save_memory(self, folder: Path) -> dict[str, dict[str, str]]:
        return {
            name: runner.site.memory.save(folder / name, self.progress.exchange)
            for name, runner in self._runners.items()
        }

    def load_memory(self, folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
        for name, runner in self._runners.items():
            runner.site.memory.load(folder / name, files.get(name, {}))
