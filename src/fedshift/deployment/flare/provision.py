"""Makes start-up kits with FLARE's own provisioning, and writes our settings over FLARE's."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.deployment.flare.kits import COORDINATOR_CLASS, SITE_CLASS, Project, channel, load_kit
from fedshift.errors import FedshiftError
from fedshift.files import write_bytes

_DRIVERS = Path(__file__).parent / "drivers"
_RIGHTS = {
    "submit_job": "any",
    "clone_job": "none",
    "manage_job": "any",
    "download_job": "any",
    "view": "any",
    "operate": "any",
    "shell_commands": "none",
    "byoc": "none",
}
"""What the coordinator may ask of FLARE: no job with code of its own and no shell commands, at any site."""
_SITE_FILE = """\
# What this site holds and what it allows. This file stays here.
site: {site}
kit: .
data: {{name: arrays, sites: {{{site}: data.npz}}}}   # as under data: of an experiment; `fedshift datasets` lists them
# classes: [benign, malignant]   # all classes of the federation, in order, where this site may lack some
device: auto
policy:
  send: [weights, numbers, accuracy]   # also: statistics, spectra, features
  smallest_group: 10
  methods: all   # or a list, such as [fedavg, csac]
  # rounds_per_day: 200
  # requests_per_round: 100
"""


@dataclass(frozen=True)
class Provisioned:
    """Where the kits lie. ``new``: those that were made now; others were there and are left as they are."""

    folder: Path
    coordinator: Path
    sites: Mapping[str, Path]
    new: tuple[str, ...]


def provision(project: Project, out: Path, *, renew: bool = False) -> Provisioned:
    """Make a kit for the coordinator and one per site. Running it again makes kits for new sites only.

    Args:
        project: the project.
        out: the folder to put them in.
        renew: make all kits anew, with a new authority. Then every kit must be handed out again.

    Raises:
        FedshiftError: FLARE cannot make them.
    """
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import Project as FlareProject
    from nvflare.lighter.entity import participant_from_dict
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner

    folder = out / project.name
    authority = folder / "authority"
    if renew:
        shutil.rmtree(authority, ignore_errors=True)
    authority.mkdir(parents=True, exist_ok=True)
    os.chmod(authority, 0o700)
    flare = FlareProject(name=project.name, description="", props={"api_version": 3})
    flare.add_participant(
        participant_from_dict(
            {"name": project.server, "type": "server", "org": "fedshift", "fed_learn_port": project.port}
        )
    )
    for site in project.sites:
        flare.add_participant(participant_from_dict({"name": site, "type": "client", "org": "fedshift"}))
    flare.add_participant(
        participant_from_dict({"name": project.contact, "type": "admin", "org": "fedshift", "role": "project_admin"})
    )
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme=project.scheme),
        CertBuilder(**({} if _authority(authority, project) else {"root_valid_days": project.valid_days})),
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        context = Provisioner(str(authority), builders).provision(flare)
    made = context.get(CtxKey.CURRENT_PROD_DIR)
    if context.get(CtxKey.BUILD_ERROR) or not made:
        raise FedshiftError(f"FLARE could not make the kits: {' '.join(said.getvalue().split()[-40:])}")
    new: list[str] = []
    kits = {"coordinator": folder / "coordinator", **{site: folder / "sites" / site for site in project.sites}}
    for name, kit in kits.items():
        if kit.exists() and not renew:
            continue
        new.append(name)
        (kit / "flare").mkdir(parents=True, exist_ok=True)
        source = Path(made) / (project.server if name == "coordinator" else name)
        shutil.copytree(source, kit / "flare", dirs_exist_ok=True)
        for script in (kit / "flare" / "startup").glob("*.sh"):
            script.unlink()  # FLARE's start scripts would start a site without lockdown
        if name == "coordinator":
            shutil.copytree(Path(made) / project.contact, kit / "admin", dirs_exist_ok=True)
        elif not (kit / "SITE.yaml").exists():
            (kit / "SITE.yaml").write_text(_SITE_FILE.format(site=name))
        _settle(kit, coordinator=name == "coordinator")
        for private in kit.rglob("*.key"):
            os.chmod(private, 0o600)
    for name, kit in kits.items():
        if name == "coordinator" or name in new:
            role = "coordinator" if name == "coordinator" else "site"
            write_bytes(
                kit / "kit.json", _json({"role": role, "name": name, "project": project.model_dump(mode="json")})
            )
    shutil.rmtree(made, ignore_errors=True)
    return Provisioned(folder, kits["coordinator"], {site: kits[site] for site in project.sites}, tuple(new))


def _authority(folder: Path, project: Project) -> bool:
    return (folder / project.name / "state" / "cert.json").exists()


def _settle(kit: Path, *, coordinator: bool) -> None:
    """Write FLARE's local settings: which classes run, who may do what, and no file outside the kit's folder."""
    local = kit / "flare" / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    # FLARE adds the second class to every job. It sends nothing, since the parent has no streamer.
    resources["class_allow_list"] = [
        COORDINATOR_CLASS if coordinator else SITE_CLASS,
        "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",
    ]
    resources["class_list_enforcement_mode"] = "enforce"
    resources["components"] = [
        part for part in resources["components"] if part["id"] not in ("site_log_streamer", "log_receiver")
    ]
    if coordinator:
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(
            kit.resolve() / "flare" / "snapshots"
        )
        for part in resources["components"]:
            if part["id"] == "job_manager":
                part["args"]["uri_root"] = str(kit.resolve() / "flare" / "jobs")
    else:
        resources["allow_log_streaming"] = False
    (local / "resources.json").write_text(json.dumps(resources, indent=2))
    # The processes of a role talk through a socket in the kit and not through a port on loopback.
    internal = {"scheme": "unix", "resources": {"folder": str(channel(kit))}}
    channels = {"allow_adhoc_conns": False, "comm_driver_path": str(_DRIVERS), "internal": internal}
    (local / "comm_config.json").write_text(json.dumps(channels, indent=2))
    rights = {"format_version": "1.0", "permissions": {"project_admin": _RIGHTS}}
    (local / "authorization.json").write_text(json.dumps(rights, indent=2))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def relocate(kit: Path) -> None:
    """Adapt FLARE's settings to the folder that a kit was moved to.

    Raises:
        UserError: the folder holds no kit.
    """
    if (kit / "flare" / "local" / "resources.json.default").exists():
        _settle(kit, coordinator=load_kit(kit).role == "coordinator")
