"""Start-up kits: the project file, a role's kit, and the names of the classes that FLARE runs at each role."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from fedshift.errors import UserError, in_words
from fedshift.federation.plain_values import Frozen
from fedshift.files import edited_yaml

COORDINATOR_CLASS = "fedshift.deploy.flare.engine.FlareCoordinator"
SITE_CLASS = "fedshift.deploy.flare.engine.FlareSite"
"""The classes that FLARE runs in a job, at the coordinator and at a site."""
LAUNCHER_CLASS = "fedshift.deploy.flare.launcher.LockedJobLauncher"
"""The class with which FLARE's client at a site starts a job's process."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")


class Project(BaseModel):
    """A project file: who takes part, and where the coordinator can be reached."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="the project's name")
    contact: str = Field(description="an e-mail address, which also names the coordinator's administrator")
    server: str = Field(description="the name under which sites reach the coordinator; localhost: this machine alone")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(8002, description="the coordinator's one port")
    scheme: Literal["tcp", "grpc", "http"] = Field(
        "tcp", description="what TLS carries: tcp, whose port nobody can hold; grpc and http, where only they pass"
    )
    largest_message: PositiveInt = Field(
        1024, description="MiB of the largest message that a role accepts: models, and all that a call takes or returns"
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


def check_installed() -> None:
    """Raise UserError if FLARE is not installed."""
    if find_spec("nvflare") is None:
        raise UserError("deploying needs NVIDIA FLARE, which is not installed: pip install 'fedshift[deploy]'")


def load_project(path: Path) -> Project:
    """Read a project file; UserError if there is a mistake in it."""
    try:
        options = edited_yaml(path.read_text(encoding="utf-8"), path)
        if not isinstance(options, dict):
            raise UserError(f"{path}: a project's file is a mapping of name, contact, server, port, sites")
        return Project.model_validate(options)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the project's file {path}: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"]))
        raise UserError(f"{path}: {field}: {in_words(fault)}") from None


class _KitFile(Frozen):
    """The file ``kit.json``."""

    role: Literal["coordinator", "site"]
    name: str
    project: Project


@dataclass(frozen=True)
class Kit:
    """A start-up kit that was read."""

    folder: Path
    role: Literal["coordinator", "site"]
    name: str
    project: Project

    @property
    def flare(self) -> Path:
        return self.folder / "flare"


def load_kit(folder: Path, role: str | None = None) -> Kit:
    """Read the kit in ``folder``; UserError if there is none, or one of another role."""
    try:
        file = _KitFile.model_validate_json((folder / "kit.json").read_bytes())
        kit = Kit(folder.resolve(), file.role, file.name, file.project)
    except (OSError, ValidationError):
        raise UserError(
            f"{folder} holds no start-up kit (kit.json): unpack the one you were given there, or say where it is"
        ) from None
    if role is not None and kit.role != role:
        raise UserError(f"{folder} is the kit of a {kit.role}, not of a {role}")
    return kit


def channel(kit: Path) -> Path:
    """The folder of the socket that connects the processes of a role."""
    return kit.resolve() / "channel"


def empty_channel(kit: Path) -> None:
    """Make the folder of the socket anew: readable by its user only, without sockets of earlier processes. UserError if
    the socket's path would be too long for the system."""
    folder = channel(kit)
    if sys.platform != "linux" and len(os.fsencode(folder)) > 90:
        raise UserError(f"{kit}: this path is too long for a socket in it (90 characters): put the kit elsewhere")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
