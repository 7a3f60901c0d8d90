"""``fedshift project try``: a whole federation on this machine, for an experiment whose data are here."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedshift.cli.console import say
from fedshift.data.databases import Database
from fedshift.data.domain import DataSet, Domain, SparseRows
from fedshift.data.splits import TEST, TRAIN
from fedshift.deploy.flare import roles
from fedshift.errors import UserError
from fedshift.experiment.config.engine_section import FlareEngine, LocalEngine
from fedshift.experiment.config.experiment import Experiment, load, parse
from fedshift.federation.local.cards import cards_of

_SENT = ("weights", "numbers", "accuracy", "metrics", "statistics", "styles", "spectra", "features")


def try_project(path: Path | None, overrides: Sequence[str], runs: Path, port: int | None, keep: Path | None) -> None:
    """Run a whole federation on this machine: one process per role, TLS over loopback, a data file per site."""
    experiment = load(path, overrides) if path else load(Path(__file__).with_name("try.yaml"), overrides)
    roles.check_installed()
    if keep is not None:
        play(experiment, keep, runs, port)
        return
    with tempfile.TemporaryDirectory(prefix="fedshift-try-", ignore_cleanup_errors=True) as folder:
        play(experiment, Path(folder), runs, port)


def play(experiment: Experiment, folder: Path, runs: Path, port: int | None) -> Path:
    """Play a whole federation for an experiment with data here; return the folder of the results."""
    from fedshift.deploy.cli.deploy import follow
    from fedshift.experiment.runs.run_folder import check_place

    folder.mkdir(parents=True, exist_ok=True)
    deployed, sites = spread(experiment, folder)
    check_place(deployed, runs / deployed.name)  # fails before anything starts
    project = {
        "name": "try",
        "contact": "try@fedshift.example.org",
        "server": "localhost",
        "port": port or roles.free_port(),
        "sites": list(sites),
    }
    file = folder / "project.yaml"
    file.write_text(yaml.safe_dump(project))
    made = roles.provision(roles.load_project(file), folder, lambda new: None)
    shutil.rmtree(made.folder / "authority")  # its key is not encrypted, and nobody needs it any more
    for site, options in sites.items():
        (made.sites[site] / "SITE.yaml").write_text(yaml.safe_dump(options))
    say(f"starting a coordinator and {len(sites)} sites on this machine …", stderr=True)
    with roles.running_services(made.coordinator, made.sites.values()):
        return follow(made.coordinator, deployed, runs)


def spread(experiment: Experiment, folder: Path) -> tuple[Experiment, dict[str, dict[str, object]]]:
    """Write each site's data below ``folder``; return the experiment to deploy and each SITE.yaml's content."""
    data = experiment.protocol.taking_part(experiment.data.build())
    targets = experiment.protocol.targets_of(data)
    at_coordinator = targets if experiment.protocol.unseen and len(targets) == 1 else ()
    files = getattr(experiment.data, "sites", None)  # of arrays and tables: each site uses its own file unchanged
    if not isinstance(files, Mapping) or not all(isinstance(file, Path | Database) for file in files.values()):
        files = None

    def data_section(names: Sequence[str]) -> dict[str, object]:
        if files is not None:
            whole = experiment.data.model_dump(mode="json", exclude={"statistics_from"})
            whole["sites"] = {
                name: str(file.resolve() if isinstance(file := files[name], Path) else file) for name in names
            }
            return whole
        return _arrays_section(data, names, folder)

    sites: dict[str, dict[str, object]] = {}
    threads = experiment.engine.threads or 1
    for name, domain in data.domains.items():
        if files is None:
            _write(folder / "data" / f"{name}.npz", domain)
        if name not in at_coordinator:
            sites[name] = {
                "site": name,
                "kit": ".",
                "data": data_section([name]),
                "classes": list(data.classes),
                "device": "auto" if cards_of(experiment.device) else experiment.device,
                "threads": threads,
                "policy": {
                    "send": [kind for kind in _SENT if kind not in experiment.engine.refuse_at.get(name, ())],
                    # These data lie on one machine, and an experiment shall run as it does in a simulation.
                    "smallest_group": 1,
                    "splits": "all",
                    "exposure": 1,
                    "rounds_per_day": None,
                    "measurements_per_day": None,
                },
            }
    engine = experiment.engine if isinstance(experiment.engine, FlareEngine) else FlareEngine(threads=threads)
    if isinstance(experiment.engine, LocalEngine):
        engine = engine.model_copy(
            update={
                name: getattr(experiment.engine, name) for name in ("refuse", "quorum", "on_refusal", "aggregation")
            }
        )
    whole = experiment.dump() | {
        "data": {"name": "sites", "unseen": data_section(at_coordinator) if at_coordinator else None},
        "engine": engine.model_dump(mode="json"),
    }
    return parse(json.loads(json.dumps(whole))), sites


def _write(path: Path, domain: Domain) -> None:
    if isinstance(domain.inputs, SparseRows) or (domain.train_rows is not None and not domain.fixed_split):
        raise UserError(f"data: '{domain.name}' cannot be written as an .npz file for a site; use another data set")
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"x": domain.inputs, "y": domain.labels}
    if domain.groups is not None:
        arrays["groups"] = domain.groups
    if domain.fixed_split:
        arrays["split"] = np.where(np.isin(np.arange(len(domain)), domain.described), TRAIN, TEST)
    np.savez(path, **arrays)


def _arrays_section(data: DataSet, names: Sequence[str], folder: Path) -> dict[str, object]:
    files = {name: str((folder / "data" / f"{name}.npz").resolve()) for name in names}
    described: dict[str, object] = {"name": "arrays", "sites": files, "classes": list(data.classes)}
    if data.preprocessing.mean is not None and data.preprocessing.std is not None:
        described |= {"mean": list(data.preprocessing.mean), "std": list(data.preprocessing.std)}
    return described
