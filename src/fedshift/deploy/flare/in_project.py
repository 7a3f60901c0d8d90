"""What FLARE builds in a job of fedshift's in a FLARE project of your own: a controller at the server, an executor.

Both are those of our deployments, without our kits: the folder of the run lies in that of FLARE's job, and a site finds
its SITE.yaml among its own FLARE settings. What such a project promises is in docs/flare.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from fedshift.deploy.coordinator import EXPERIMENT, PROGRESS, coordinate
from fedshift.deploy.flare.engine import SITE, CoordinatingController, FlareSite
from fedshift.deploy.json_files import append_event
from fedshift.deploy.site_server import SiteProgram, open_site
from fedshift.errors import FedshiftError, UserError
from fedshift.json_objects import write_object

FOLDER = "fedshift"
"""The folder of the run, in that of FLARE's job at the server."""
SITE_FILE = "SITE.yaml"


class ProjectCoordinator(CoordinatingController):
    """The server's side: runs a whole experiment.

    Args:
        experiment: as in experiment.json of a deployment.
        sites: names of FLARE's clients that take part, in the order of the experiment.
        largest_message: MiB of the largest message that is sent or accepted.
    """

    def __init__(self, experiment: Mapping[str, Any], sites: Sequence[str], largest_message: int = 1024) -> None:
        super().__init__()
        # FLARE writes the job's settings from these attributes.
        self.experiment, self.sites, self.largest_message = experiment, sites, largest_message

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the experiment. FLARE calls this. An error of ours ends the job with its one line."""
        folder = Path(fl_ctx.get_workspace().get_run_dir(str(fl_ctx.get_job_id()))) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_object(folder / EXPERIMENT, self.experiment)
        transport = self.transport(fl_ctx, abort_signal, lambda: None, self.largest_message)
        try:
            coordinate(folder, transport, self.sites)
        except FedshiftError as error:
            append_event(folder / PROGRESS, {"what": "job", "is": "failed", "reason": str(error)})
            self.system_panic(str(error), fl_ctx)


class ProjectSite(FlareSite):
    """A site's side.

    Args:
        largest_message: MiB of the largest message that is sent or accepted.
    """

    def __init__(self, largest_message: int = 1024) -> None:
        super().__init__()
        self.largest_message = largest_message

    def open(self, fl_ctx: FLContext) -> SiteProgram:
        """Make the program of the site's SITE.yaml; UserError for the file of another site."""
        name = str(fl_ctx.get_identity_name())
        path = site_file(name, Path(fl_ctx.get_workspace().get_site_config_dir()))
        program = open_site(path, in_service=True)
        if program.name != name:
            raise UserError(f"{path}: site: it says '{program.name}', and FLARE calls this site '{name}'")
        return program

    def largest(self) -> int:
        return self.largest_message


def site_file(site: str, settings: Path) -> Path:
    """Where a site's SITE.yaml is. The people of the site say so, not the job.

    Returns what the environment variable `SITE` says, with ``{site}`` for the name; else the file in ``settings``.

    Args:
        settings: the folder of its own FLARE settings, ``local``.
    """
    given = os.environ.get(SITE)
    return Path(given.replace("{site}", site)) if given else settings / SITE_FILE
