"""The local engine without worker processes: all sites in this process, one after the other."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.errors import KindRefused, TrainingDiverged
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.federation import Federation
from fedshift.federation.site import Role
from fedshift.federation.site_runner import Setting, SitePlan, SiteRunner, about_sites


def names_of(plans: Sequence[SitePlan], role: Role) -> list[str]:
    """The names of the sites that have a role."""
    return [plan.name for plan in plans if plan.role == role]


class LocalFederation(Federation):
    """Sites in this process, one after the other."""

    def __init__(self, plans: Sequence[SitePlan], setting: Setting, **options: Any) -> None:
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

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        for request in requests:
            try:
                reply, mini_batches = self._runners[request.site].run(call, request.envelope, request.content)
            except (TrainingDiverged, KindRefused) as error:
                yield Missing(request.site, error)
                continue
            yield Answer(request.site, reply, mini_batches)

    def save_memory(self, folder: Path) -> dict[str, dict[str, str]]:
        return {
            name: runner.site.memory.save(folder / name, self.progress.exchange)
            for name, runner in self._runners.items()
        }

    def load_memory(self, folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
        for name, runner in self._runners.items():
            runner.site.memory.load(folder / name, files.get(name, {}))
