"""Start-up kits: the project's file, the certificates and settings that FLARE's own provisioning makes of it, and what
can be wrong with a kit before anything is started.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import re
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from fedshift.errors import FedshiftError, UserError
from fedshift.files import write_bytes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")
_DRIVERS = Path(__file__).parent / "flare_drivers"
_COORDINATOR_CLASS = "fedshift.federation.flare.FlareCoordinator"
_SITE_CLASS = "fedshift.federation.flare.FlareSite"
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
"""What the coordinator may have FLARE do. No code of a job's own, no shell commands, at any site."""
_DATES = ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "SSLV3_ALERT_BAD_CERTIFICATE", 9, 10)
"""How TLS says that a certificate is out of its dates: the other side's alerts (the second: not valid yet), and the
verification's codes here, X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
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
"""


class Project(BaseModel):
    """The project's file: who takes part, and where the coordinator can be reached."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="the project's name")
    contact: str = Field(description="an e-mail address; the coordinator's administrator is called by it")
    server: str = Field(description="the name under which sites reach the coordinator; localhost: this machine alone")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(8002, description="the coordinator's one port")
    scheme: Literal["tcp", "grpc", "http"] = Field(
        "tcp", description="what TLS carries: tcp is fastest; grpc and http pass proxies that look for them"
    )
    valid_days: PositiveInt = Field(360, description="days until the certificates expire")
    sites: tuple[str, ...] = Field(min_length=1, description="names of the sites, in the order of the experiment")

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("letters, digits and '-' only")
        return name

    @field_validator("contact")
    @classmethod
    def _contact(cls, contact: str) -> str:
        if not _MAIL.fullmatch(contact):
            raise ValueError("must be an e-mail address, such as team@example.org")
        return contact

    @field_validator("sites")
    @classmethod
    def _sites(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        for site in sites:
            if not _NAME.fullmatch(site) or site in ("sites", "server", "coordinator"):
                raise ValueError(f"'{site}' cannot be a site's name: letters, digits and '-' only, no reserved word")
            if [name.lower() for name in sites].count(site.lower()) > 1:
                raise ValueError(f"two sites are called '{site}'")
        return sites


def load_project(path: Path) -> Project:
    """The project in a YAML file. Raises UserError, one line, for a mistake in it."""
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(options, dict):
            raise UserError(f"{path}: a project's file is a mapping of name, contact, server, port, sites")
        return Project.model_validate(options)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the project's file {path}: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise UserError(f"{path}: {place}: {fault['msg'].removeprefix('Value error, ')}") from None


# Provisioning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provisioned:
    """Where the kits lie. ``new``: those that were made now; others were there and are left as they are."""

    folder: Path
    coordinator: Path
    sites: Mapping[str, Path]
    new: tuple[str, ...]


def provision(project: Project, out: Path, *, renew: bool = False) -> Provisioned:
    """Make a kit for the coordinator and one per site below ``out``; running it again adds sites that are new.

    ``renew`` makes all of them anew, with a new authority: every kit has to be handed out again.
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
    """Local settings of FLARE: which classes run, who may do what, and nothing of it outside the kit's folder."""
    local = kit / "flare" / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    # The third is FLARE's own, which it adds to every job; without a streamer in the parent it sends nothing.
    resources["class_allow_list"] = [
        _COORDINATOR_CLASS if coordinator else _SITE_CLASS,
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
        # FLARE's manager of GPUs would refuse jobs on machines it thinks are busy; a site says itself what it uses.
    (local / "resources.json").write_text(json.dumps(resources, indent=2))
    # What a role's own processes say to each other goes through a socket in the kit, and not through a loopback port.
    internal = {"scheme": "unix", "resources": {"folder": str(channel(kit))}}
    channels = {"allow_adhoc_conns": False, "comm_driver_path": str(_DRIVERS), "internal": internal}
    (local / "comm_config.json").write_text(json.dumps(channels, indent=2))
    rights = {"format_version": "1.0", "permissions": {"project_admin": _RIGHTS}}
    (local / "authorization.json").write_text(json.dumps(rights, indent=2))


def channel(kit: Path) -> Path:
    """The folder of the socket through which a role's own processes speak to each other."""
    return kit.resolve() / "channel"


def empty_channel(kit: Path) -> None:
    """Make that folder, for its user alone, without sockets that an earlier process left.

    Raises UserError where the system takes no path as long as the socket's would be.
    """
    folder = channel(kit)
    if sys.platform != "linux" and len(os.fsencode(folder)) > 90:
        raise UserError(f"{kit}: this path is too long for a socket in it (90 characters): put the kit elsewhere")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def relocate(kit: Path) -> None:
    """Have a kit that was moved keep FLARE's files below its present place."""
    if (kit / "flare" / "local" / "resources.json.default").exists():
        _settle(kit, coordinator=load_kit(kit).role == "coordinator")


# A kit ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kit:
    """A start-up kit that was found."""

    folder: Path
    role: Literal["coordinator", "site"]
    name: str
    project: Project

    @property
    def flare(self) -> Path:
        return self.folder / "flare"


def load_kit(folder: Path, role: str | None = None) -> Kit:
    """The kit in ``folder``. Raises UserError when it is none, or one of another role."""
    try:
        found = json.loads((folder / "kit.json").read_text(encoding="utf-8"))
        kit = Kit(folder.resolve(), found["role"], found["name"], Project.model_validate(found["project"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder} holds no start-up kit (kit.json): unpack the one you were given there, or say where it is"
        ) from None
    if role is not None and kit.role != role:
        raise UserError(f"{folder} is the kit of a {kit.role}, not of a {role}")
    return kit


def check_certificates(kit: Kit, now: datetime.datetime | None = None) -> datetime.datetime:
    """When the kit's certificate expires. Raises UserError for one that is missing, expired, not valid yet, of another
    name or of another project's authority.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509.oid import NameOID

    now = now or datetime.datetime.now(datetime.UTC)
    startup = kit.flare / "startup"
    own = "server" if kit.role == "coordinator" else "client"
    found: dict[str, x509.Certificate] = {}
    for file in (f"{own}.crt", "rootCA.pem"):
        try:
            found[file] = x509.load_pem_x509_certificate((startup / file).read_bytes())
        except (OSError, ValueError):
            raise UserError(f"the kit in {kit.folder} lacks a readable {file}: unpack it again, whole") from None
    if not (startup / f"{own}.key").exists():
        raise UserError(f"the kit in {kit.folder} lacks {own}.key: unpack it again, whole")
    certificate, root = found[f"{own}.crt"], found["rootCA.pem"]
    for what, one in (("certificate", certificate), ("authority", root)):
        if now < one.not_valid_before_utc:
            raise UserError(
                f"the kit's {what} is valid from {one.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and this machine's "
                f"clock says {now:%Y-%m-%d %H:%M} UTC: set the clock, or ask for a new kit"
            )
        if now > one.not_valid_after_utc:
            raise UserError(
                f"the kit's {what} expired at {one.not_valid_after_utc:%Y-%m-%d %H:%M} UTC (this machine's clock says "
                f"{now:%Y-%m-%d %H:%M} UTC): ask {kit.project.contact} for a new kit"
            )
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    expected = kit.project.server if kit.role == "coordinator" else kit.name
    if not names or names[0].value != expected:
        raise UserError(f"the kit's certificate is for '{str(names[0].value) if names else ''}', not for '{expected}'")
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        raise UserError(
            f"the kit's certificate is not of its authority: ask {kit.project.contact} for a whole kit"
        ) from None
    return min(certificate.not_valid_after_utc, root.not_valid_after_utc)


def check_reachable(kit: Kit, seconds: float = 5.0) -> str | None:
    """Why the coordinator cannot be reached from here; None when it can.

    Raises UserError when what answers there is not the coordinator of this project, or does not accept this kit.
    """
    address = (kit.project.server, kit.project.port)
    startup = kit.flare / "startup"
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.check_hostname = False  # FLARE's own check is by the authority, too: the name may be an alias
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    try:
        with socket.create_connection(address, timeout=seconds) as plain, context.wrap_socket(plain) as connection:
            connection.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                connection.recv(1)  # a certificate that is not accepted is only said now
            return None
    except ssl.SSLError as error:
        if error.reason in _DATES or getattr(error, "verify_code", None) in _DATES:
            raise UserError(
                f"{address[0]} port {address[1]}: a certificate is not valid yet or no longer, by this machine's "
                f"clock ({datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC) or the coordinator's: compare the "
                f"clocks; if both are right, ask {kit.project.contact} for new kits"
            ) from None
        raise UserError(
            f"{address[0]} port {address[1]} does not accept this kit, or is not the coordinator of project "
            f"'{kit.project.name}' ({error.reason or error}): ask {kit.project.contact} for a new kit"
        ) from None
    except OSError as error:
        return f"{address[0]} port {address[1]}: {error.strerror or error}"


def check_port(kit: Kit, seconds: float = 10.0) -> None:
    """Raises UserError when something else listens on the coordinator's port, and still does after some seconds: what
    was killed a moment ago may hold it that long.
    """
    deadline = time.monotonic() + seconds
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1" if kit.project.server == "localhost" else "", kit.project.port))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"port {kit.project.port} cannot be used ({error.strerror}): end what listens there, or "
                        "provision with another port"
                    ) from None
        time.sleep(0.2)


def job_folder(kit: Kit, deployment: str, sites: int, folder: Path) -> Path:
    """Write the FLARE job of a deployment: names and settings, no code."""
    shutil.rmtree(folder, ignore_errors=True)
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    meta = {"name": deployment, "resource_spec": {}, "deploy_map": {"app": ["@ALL"]}, "min_clients": sites}
    server = {
        "format_version": 2,
        # Sites ask for tasks this often (seconds); FLARE's 2 would be most of a short exchange.
        "server": {"task_request_interval": 0.1, "heart_beat_timeout": 600},
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [{"id": "fedshift", "path": _COORDINATOR_CLASS, "args": {"deployment": deployment}}],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["fedshift"], "executor": {"path": _SITE_CLASS, "args": {}}}],
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (config / "config_fed_client.json").write_text(json.dumps(client))
    return folder
