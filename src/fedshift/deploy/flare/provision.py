"""Makes start-up kits with FLARE's own provisioning, writes our settings over FLARE's, and takes sites out again."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedshift.deploy.flare.certificates import ISSUED, RENEW, Ask, Authority, digest, write_issued
from fedshift.deploy.flare.kits import (
    COORDINATOR_CLASS,
    LAUNCHER_CLASS,
    SITE_CLASS,
    Kit,
    Project,
    channel,
    check_installed,
    load_project,
)
from fedshift.deploy.flare.limits import LARGEST_FRAME, LISTENER
from fedshift.deploy.json_files import plain_object
from fedshift.errors import FedshiftError, UserError, nearest
from fedshift.files import make_private, write_bytes
from fedshift.json_objects import read_object, write_object

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
_SITE_FILE = Path(__file__).with_name("site.yaml")
"""What a site's own file begins as; ``$site`` stands for its name."""


@dataclass(frozen=True)
class Provisioned:
    """Where the kits lie."""

    folder: Path
    coordinator: Path
    sites: Mapping[str, Path]
    new: tuple[str, ...]  # those that were made now; others were there
    # of the others, sites whose kit.json is another one now, and in what: "port 8002 → 9001"
    changed: Mapping[str, tuple[str, ...]]


def provision(project: Project, out: Path, ask: Ask, *, renew: bool = False) -> Provisioned:
    """Make a kit for the coordinator and one per site. Running it again makes kits for new sites only.

    Where the coordinator's address has changed in the project, the kits that are there get another kit.json; with
    another server or contact the coordinator gets new certificates. UserError if the authority's key cannot be read
    with that passphrase; FedshiftError if FLARE cannot make them. ``renew``: make all kits anew, with a new authority.
    Then every kit must be handed out again.
    """
    check_installed()
    folder = out / project.name
    authority_folder, coordinator = folder / "authority", folder / "coordinator"
    for path in (folder, authority_folder):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    if renew:
        passphrase = ask(True)
        shutil.rmtree(authority_folder)
        authority_folder.mkdir(mode=0o700)
        authority = None
    else:
        known = read_object(authority_folder / ISSUED, RENEW, older=True)
        certified = coordinator.exists() and not _address_changes(coordinator, project)
        if certified and all(site in known for site in project.sites):
            return finish(project, folder, known, ())
        authority = Authority.load(authority_folder, project.name, ask)
        passphrase = ask(True) if authority is None else None
    if authority is None:
        new = ("coordinator", *project.sites)
        authority = _make(project, folder, new, None)
        authority.save(authority_folder, passphrase)
    else:
        known = authority.issued
        new = (*(() if certified else ("coordinator",)), *(item for item in project.sites if item not in known))
        _make(project, folder, new, authority)
        authority.save_issued(authority_folder)
    return finish(project, folder, authority.issued, new)


def reissue(project: Project, out: Path, site: str, ask: Ask) -> Provisioned:
    """Make one site's kit anew, with a new key of the same authority. Its SITE.yaml stays."""
    check_installed()
    folder = out / project.name
    if site not in project.sites:
        raise UserError(f"project '{project.name}' has no site '{site}'; {nearest(site, project.sites)}")
    if project.scheme != "tcp":
        raise UserError(
            f"scheme '{project.scheme}' cannot refuse a site's old kit beside its new one: fedshift project provision "
            "--renew makes all kits anew"
        )
    check_certified(project, folder / "coordinator")
    authority = Authority.load(folder / "authority", project.name, ask) if folder.exists() else None
    if authority is None or site not in authority.issued:
        raise UserError(f"{folder} holds no kit of '{site}' yet: fedshift project provision makes it")
    _make(project, folder, (site,), authority)
    authority.save_issued(folder / "authority")
    return finish(project, folder, authority.issued, (site,))


def _make(project: Project, folder: Path, names: Sequence[str], authority: Authority | None) -> Authority:
    """Have FLARE make the kits of some roles, and put them where they belong. ``authority``: None: make one."""
    from cryptography.hazmat.primitives.serialization import Encoding
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import Project as FlareProject
    from nvflare.lighter.entity import participant_from_dict
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner

    by = {"serialized_root_cert": authority.certificate, "root_private_key": authority.key} if authority else {}
    flare = FlareProject(name=project.name, description="", props={"api_version": 3}, **by)
    participants: list[dict[str, Any]] = [{"name": site, "type": "client"} for site in names if site != "coordinator"]
    participants.append({"name": project.server, "type": "server", "fed_learn_port": project.port})
    participants.append({"name": project.contact, "type": "admin", "role": "project_admin"})
    for participant in participants:
        flare.add_participant(participant_from_dict({"org": "fedshift", **participant}))
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme=project.scheme),
        CertBuilder(root_valid_days=project.valid_days),
    ]
    # FLARE writes all keys down in clear. This folder is readable by its owner only, and is gone afterwards.
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder / "authority") as temporary:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            context = Provisioner(temporary, builders).provision(flare)
        made = context.get(CtxKey.CURRENT_PROD_DIR)
        if context.get(CtxKey.BUILD_ERROR) or not made:
            raise FedshiftError(f"FLARE could not make the kits: {' '.join(text.getvalue().split()[-40:])}")
        if authority is None:
            root = context[CtxKey.ROOT_CERT].public_bytes(Encoding.PEM)
            authority = Authority(root, context[CtxKey.ROOT_PRI_KEY], {})
        for name in names:
            _install(project, folder, name, Path(made))
            holder, source = (project.contact,) * 2 if name == "coordinator" else (name, name)
            authority.issued[holder] = digest((Path(made) / source / "startup" / "client.crt").read_bytes())
    return authority


def _install(project: Project, folder: Path, name: str, made: Path) -> None:
    """Copy what FLARE made for a role into its kit, and write our settings over FLARE's."""
    kit = _kits(project, folder)[name]
    (kit / "flare").mkdir(parents=True, exist_ok=True)
    shutil.copytree(made / (project.server if name == "coordinator" else name), kit / "flare", dirs_exist_ok=True)
    for script in (kit / "flare" / "startup").glob("*.sh"):
        script.unlink()  # FLARE's start scripts would start a site without lockdown
    if name == "coordinator":
        shutil.copytree(made / project.contact, kit / "admin", dirs_exist_ok=True)
    elif not (kit / "SITE.yaml").exists():
        text = _SITE_FILE.read_text(encoding="utf-8").replace("$site", name)
        write_bytes(kit / "SITE.yaml", text.encode(), private=True)


def finish(project: Project, folder: Path, issued: Mapping[str, str], new: tuple[str, ...]) -> Provisioned:
    """Write into the kits what the project is, and into the coordinator's whose certificates there are; describe all.

    ``issued``: name → SHA-256 of its certificate. A site that is not named has no kit yet. ``new``: names of the kits
    that were made now.
    """
    kits = _kits(project, folder)
    changed = {name: _changes(kits[name], kits["coordinator"], project) for name in kits if name not in new}
    changed = {name: what for name, what in changed.items() if what}
    for name in (*new, *changed):
        _settle_if_there(kits[name], project, coordinator=name == "coordinator")
    for name in {*new, *changed, "coordinator"}:
        role = "coordinator" if name == "coordinator" else "site"
        whole = {"role": role, "name": name, "project": project.model_dump(mode="json")}
        write_bytes(kits[name] / "kit.json", f"{json.dumps(whole, indent=2)}\n".encode(), private=True)
    changed.pop("coordinator", None)
    for name in new:
        kits[name].parent.chmod(0o700)
        kits[name].chmod(0o700)
        for part in (kits[name] / "flare", kits[name] / "admin"):
            if part.exists():
                make_private(part)
    names = (*project.sites, project.contact)
    write_issued(kits["coordinator"], {name: issued[name] for name in names if name in issued})
    return Provisioned(folder, kits["coordinator"], {site: kits[site] for site in project.sites}, new, changed)


_TOLD = ("server", "port", "scheme", "largest_message", "contact")
"""What a kit tells of the project that matters at a site."""


def _changes(kit: Path, coordinator: Path, project: Project, fields: Sequence[str] = _TOLD) -> tuple[str, ...]:
    """In what a kit differs from the project. One that is not here any more has what the coordinator's kit has."""
    result = plain_object(kit / "kit.json") or plain_object(coordinator / "kit.json")
    before, now = result.get("project", {}), project.model_dump(mode="json")
    return tuple(f"{name} {before[name]} → {now[name]}" for name in fields if before.get(name, now[name]) != now[name])


def _address_changes(coordinator: Path, project: Project) -> tuple[str, ...]:
    """In what the coordinator's certificates differ from the project."""
    return _changes(coordinator, coordinator, project, ("server", "contact"))


def check_certified(project: Project, coordinator: Path) -> None:
    """Raise UserError if the coordinator's certificates are of another server or contact than the project's."""
    if changes := _address_changes(coordinator, project):
        raise UserError(f"the project's file has changed ({', '.join(changes)}): call fedshift project provision first")


def _kits(project: Project, folder: Path) -> dict[str, Path]:
    return {"coordinator": folder / "coordinator", **{site: folder / "sites" / site for site in project.sites}}


def _settle(kit: Path, project: Project, *, coordinator: bool) -> None:
    """Write FLARE's settings: which classes run, who may do what, and no file outside the kit's folder."""
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
        launcher = next(part for part in resources["components"] if part["id"] == "process_launcher")
        launcher["path"] = LAUNCHER_CLASS
    (local / "resources.json").write_text(json.dumps(resources, indent=2))
    # The processes of a role talk through a socket in the kit and not through a port on loopback.
    internal = {"scheme": "unix", "resources": {"folder": str(channel(kit))}}
    channels = {
        "allow_adhoc_conns": False,
        "comm_driver_path": str(_DRIVERS),
        "internal": internal,
        "max_message_size": LARGEST_FRAME - (1 << 20),  # beside a message a frame holds its headers
        "streaming_max_blob_size": project.largest_message << 20,
    }
    (local / "comm_config.json").write_text(json.dumps(channels, indent=2))
    _settle_address(kit, project, coordinator=coordinator)
    rights = {"format_version": "1.0", "permissions": {"project_admin": _RIGHTS}}
    (local / "authorization.json").write_text(json.dumps(rights, indent=2))


def _settle_address(kit: Path, project: Project, *, coordinator: bool) -> None:
    """Write the address of the project's coordinator where FLARE's processes of a role read it."""
    path = kit / "flare" / "startup" / ("fed_server.json" if coordinator else "fed_client.json")
    settings = json.loads(path.read_text())
    server = settings["servers"][0]
    server["service"] |= {"target": f"{project.server}:{project.port}", "scheme": project.scheme}
    if coordinator:
        server |= {"admin_server": project.server, "admin_port": project.port}
        if project.scheme == "tcp":  # our listener in place of FLARE's; sites dial as before
            server["service"]["scheme"] = LISTENER
        _settle_administrator(kit / "admin" / "startup" / "fed_admin.json", project)
    else:
        server["identity"] = project.server
    path.write_text(json.dumps(settings, indent=2))


def _settle_administrator(path: Path, project: Project) -> None:
    settings = json.loads(path.read_text())
    settings["admin"] |= {"username": project.contact, "server_identity": project.server}
    settings["admin"] |= {"host": project.server, "port": project.port, "scheme": project.scheme}
    path.write_text(json.dumps(settings, indent=2))


def _settle_if_there(kit: Path, project: Project, *, coordinator: bool) -> None:
    if (kit / "flare" / "local" / "resources.json.default").exists():
        _settle(kit, project, coordinator=coordinator)


def relocate(kit: Kit) -> None:
    """Adapt FLARE's settings to the kit's folder and its kit.json, and let only the owner read its keys."""
    _settle_if_there(kit.folder, kit.project, coordinator=kit.role == "coordinator")
    kit.folder.chmod(0o700)
    for key in kit.folder.glob("*/startup/*.key"):
        key.chmod(0o600)


# Removal --------------------------------------------------------------------------------------------------------------


def remove(path: Path, out: Path, site: str) -> Provisioned:
    """Remove a site. Its kit is refused from then on; its files stay where they are.

    Repeated after an interruption, it goes on: the project's file is written last. UserError if there is no such site,
    it is the only one, there are no kits, or the file is written so that only a person can change it. ``path``: the
    project's file, of which all other lines stay.
    """
    project = load_project(path)
    if site not in project.sites:
        raise UserError(f"{path}: project '{project.name}' has no site '{site}'; {nearest(site, project.sites)}")
    if len(project.sites) == 1:
        raise UserError(f"{path}: '{site}' is the only site of the project, which needs one")
    folder = out / project.name
    issued = read_object(folder / "authority" / ISSUED, RENEW, older=True)
    if not issued or not (folder / "coordinator" / "kit.json").exists():
        raise UserError(f"{folder} does not hold the kits of the project: say with --out where they are")
    check_certified(project, folder / "coordinator")
    rest = project.model_copy(update={"sites": tuple(item for item in project.sites if item != site)})
    text = without_site(path, rest, site)
    issued.pop(site, None)
    write_object(folder / "authority" / ISSUED, issued, private=True)
    made = finish(rest, folder, issued, ())
    write_bytes(path, text.encode())
    return made


def without_site(path: Path, rest: Project, site: str) -> str:
    """The text of a project's file without a site in its list, and with all else, comments too. UserError if the list
    is written in a way that this does not know. ``rest``: what the new text has to mean."""
    text = path.read_bytes().decode()
    try:
        changed = _cut(text, site)
        if Project.model_validate(yaml.safe_load(changed)) == rest:
            return changed
    except (ValueError, LookupError, yaml.YAMLError):
        pass
    raise UserError(f"{path}: take '{site}' out of sites yourself, then call fedshift project provision {path}")


def _cut(text: str, site: str) -> str:
    """Cut a site's line out of a list of lines, or its entry out of a list in brackets."""
    whole: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    sites = next(value for key, value in whole.value if key.value == "sites").value
    index = next(number for number, node in enumerate(sites) if node.value == site)
    node = sites[index]
    begin, end = node.start_mark.index, node.end_mark.index
    line = text.rfind("\n", 0, begin) + 1
    if text[line:begin].strip() == "-":  # an entry on a line of its own, with the comment behind it
        return text[:line] + text[text.find("\n", end) + 1 or len(text) :]
    if index + 1 < len(sites):
        return text[:begin] + text[sites[index + 1].start_mark.index :]
    return text[: sites[index - 1].end_mark.index] + text[end:]
