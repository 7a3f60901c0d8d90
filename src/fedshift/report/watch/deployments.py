"""Deployments on the page of running experiments: what their coordinators know, where the rooms of deployments are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedshift.deploy_door import deploy_room


@dataclass(frozen=True)
class SeenSite:
    """What a site was last heard of.

    Attributes:
        name: the site.
        last: the last event, such as "answered fit, round 3".
        age: seconds since then; None if there was none.
        trouble: why the others go on without its replies, such as "lost since round 2 (fit): no answer"; "" if they do
            not. It stands until the site answers again, also while it is asked anew.
        since: seconds since the first loss or refusal of those; None without.
        lost: whether it does not answer at all; else it answers, and its replies are refused.
    """

    name: str
    last: str
    age: float | None
    trouble: str = ""
    since: float | None = None
    lost: bool = False


@dataclass(frozen=True)
class Deployed:
    """A deployment at its coordinator.

    Attributes:
        state: waiting, running, finished, failed or aborted.
        message: what it waits for, or why it failed; "" if nothing was said.
        stopped: why nothing goes on, if the coordinator's service does not run; "" if it does or need not.
        sites: the sites of the project, until the deployment has ended.
        warnings: what it warned of, the last first.
        runs: number of its runs; 0 until all sites have answered.
    """

    state: str
    message: str
    stopped: str
    sites: tuple[SeenSite, ...]
    warnings: tuple[str, ...]
    runs: int


def deployments_in(root: Path) -> list[Path]:
    """The folders of the deployments in or below ``root``."""
    watched = deploy_room("watched")
    folders: list[Path] = watched.deployments_in(root) if watched is not None else []
    return folders


def deployment_at(folder: Path) -> Deployed | None:
    """What is known of the deployment in ``folder``; None if there is none."""
    watched = deploy_room("watched")
    deployment: Deployed | None = watched.deployment_status(folder) if watched is not None else None
    return deployment
