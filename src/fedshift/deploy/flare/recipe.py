"""A recipe of FLARE's: an experiment as a job for a FLARE project of your own, its simulator, or its POC mode.

The job holds names and settings, no code: fedshift is installed at the server and at every site, whose
``class_allow_list`` names `CLASSES`. docs/flare.md says what such a project promises, and what only a deployment of
ours does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.deploy.coordinator import check_deployable, check_members
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import Experiment, load, parse
from fedshift.trust import own_words

try:
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
    from nvflare.job_config.api import FedJob
    from nvflare.recipe import PocEnv, SimEnv
    from nvflare.recipe.spec import ExecEnv, Recipe
except ImportError:
    raise UserError("a job of FLARE's needs the package nvflare: pip install 'fedshift[deploy]'") from None

from fedshift.deploy.flare.engine import TASK
from fedshift.deploy.flare.in_project import ProjectCoordinator, ProjectSite
from fedshift.deploy.flare.jobs import TIMES

CLASSES = f"{ProjectCoordinator.__module__}."
"""What ``class_allow_list`` in ``local/resources.json`` of the server and of each site has to hold."""
_ALLOW_LIST = "class_allow_list"


class FedshiftRecipe(Recipe):  # type: ignore[misc]
    """An experiment as a job of FLARE's. ``execute(SimEnv(clients=[...]))`` runs it; ``export(folder)`` writes it.

    UserError if there is a mistake in the experiment, or it needs what only a deployment of fedshift's has.

    Args:
        experiment: an `Experiment`, a mapping with the same fields, or its YAML file; with ``data: {name: sites}`` and
            ``engine: {name: flare}``. Samples of ``data.unseen`` lie at the server.
        sites: names of FLARE's clients that take part, in the order of the experiment.
        largest_message: MiB of the largest message that is sent or accepted.
    """

    def __init__(
        self, experiment: Experiment | Mapping[str, Any] | str | Path, sites: Sequence[str], largest_message: int = 1024
    ) -> None:
        self.experiment = _parse(experiment)
        names = list(sites)
        engine = check_deployable(self.experiment)
        check_members(self.experiment, names, ())
        for field in ("aggregation", "routing"):
            if (asked := getattr(engine, field)) != "plain":
                raise UserError(
                    f"engine.{field}: {asked} keeps models from the server, which FLARE lets run code at its sites "
                    "unless a site forbids it: leave it out, or use fedshift deploy, which locks FLARE down"
                )
        whole = json.loads(json.dumps(self.experiment.dump()))
        try:
            job = FedJob(name=self.experiment.name, min_clients=engine.quorum or len(names))
        except ValueError as error:
            raise UserError(f"name: {error}") from None
        job.set_app_packages(["fedshift"])  # otherwise FLARE copies our modules into the job
        job.to_server(ProjectCoordinator(whole, names, largest_message))
        job.to_server({"server": TIMES})
        for name in names:
            job.to(ProjectSite(largest_message), name, tasks=[TASK])
        self._with_code = False
        super().__init__(job)

    def add_client_file(self, file_path: str, clients: list[str] | None = None) -> None:
        self._with_code = True
        super().add_client_file(file_path, clients)

    def process_env(self, env: ExecEnv) -> None:
        """Let FLARE's simulator build our classes; UserError for its `PocEnv`. FLARE calls this first."""
        if isinstance(env, SimEnv):
            _allow(Path(env.workspace_root) / self.name / "local" / "resources.json")
        if isinstance(env, PocEnv) and not self._with_code:
            raise UserError(
                f"PocEnv makes its sites anew, and they refuse '{CLASSES}': call nvflare poc prepare, add it to "
                f"{_ALLOW_LIST} in local/resources.json of the server and of each site, call nvflare poc start, and "
                "give ProdEnv the administrator's folder"
            )


def _parse(experiment: Experiment | Mapping[str, Any] | str | Path) -> Experiment:
    if isinstance(experiment, Experiment):
        return experiment
    if isinstance(experiment, str | Path):
        return load(Path(experiment), ())
    with own_words():
        return parse(experiment)


def _allow(path: Path) -> None:
    """Add our classes to those that FLARE's simulator may build."""
    settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"format_version": 2}
    listed = settings.get(_ALLOW_LIST, [*DEFAULT_CLASS_ALLOW_LIST])
    settings[_ALLOW_LIST] = [*listed, *({CLASSES} - {*listed})]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
