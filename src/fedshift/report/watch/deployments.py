"""Deployments on the page of running experiments: what their coordinators know, where the rooms of deployments are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedshift.deploy_door import deploy_room


@dataclass(frozen=True)
class SeenSite:
    """What a site was last heard of."""

    name: str  # the site
    last: str  # the last event, such as "answered fit, round 3"
    age: float | None  # seconds since then; None if there was none
    # why the others go on without its replies, such as "lost since round 2 (fit): no answer"; "" if they do not. It
    # stands until the site answers again, also while it is asked anew
    trouble: str = ""
    since: float | None = None  # seconds since the first loss or refusal of those; None without
    lost: bool = False  # whether it does not answer at all; else it answers, and its replies are refused


@dataclass(frozen=True)
class Deployed:
    """A deployment at its coordinator."""

    state: str  # waiting, running, finished, failed or aborted
    message: str  # what it waits for, or why it failed; "" if nothing was said
    stopped: str  # why nothing goes on, if the coordinator's service does not run; "" if it does or need not
    sites: tuple[SeenSite, ...]  # the sites of the project, until the deployment has ended
    warnings: tuple[str, ...]  # what it warned of, the last first
    runs: int  # number of its runs; 0 until all sites have answered


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
