"""What a pool tells its workers, and what these answer: a frozen model each. `setting_json` has the setting."""

from __future__ import annotations

from typing import Any, Literal

from fedshift.data.domain import Scale
from fedshift.federation.plain_values import Frozen
from fedshift.federation.setting_json import SettingRecipe
from fedshift.federation.site import Envelope, Role


class Command(Frozen):
    """A command of any kind."""

    do: str
    pieces: tuple[str, ...] = ()
    """Files with further content."""

    def plain(self) -> dict[str, Any]:
        """The command as the header of a message."""
        return {"do": self.do, **self.model_dump(mode="json", by_alias=True, exclude_unset=True)}


class SettingCommand(Command):
    """Begins a setting, and forgets the sites of the one before."""

    do: Literal["setting"] = "setting"
    setting: SettingRecipe


class SharedRows(Frozen):
    """Rows of a domain: its name, the folder with its samples, its number. The content of the message has the rows."""

    name: str
    folder: str
    number: int
    scale: Scale | None = None


class SiteCommand(Command):
    """Makes a site, as a `SitePlan` says."""

    do: Literal["site"] = "site"
    name: str
    role: Role
    refuse: tuple[str, ...]
    parts: tuple[SharedRows, ...]
    unlabelled: tuple[SharedRows, ...]
    held_out: tuple[SharedRows, ...]


class CallCommand(Command):
    """Runs a call at a site."""

    do: Literal["call"] = "call"
    site: str
    call: str
    envelope: Envelope


class OwnCommand(Command):
    """Asks for a site's own weights."""

    do: Literal["own"] = "own"
    site: str


class SaveCommand(Command):
    """Saves a site's memory in a folder, in files of this version."""

    do: Literal["save"] = "save"
    site: str
    folder: str
    version: int


class LoadCommand(Command):
    """Loads a site's memory from these files of a folder."""

    do: Literal["load"] = "load"
    site: str
    folder: str
    files: dict[str, str]


KINDS: dict[str, type[Command]] = {
    "setting": SettingCommand,
    "site": SiteCommand,
    "call": CallCommand,
    "own": OwnCommand,
    "save": SaveCommand,
    "load": LoadCommand,
}
"""Every command that a worker knows."""


class Done(Frozen):
    """The command was obeyed. ``file`` has the content of the answer, where that is large."""

    file: str = ""


class CallDone(Done):
    """A call ran: the class of its reply, and the mini-batches that it trained on."""

    reply: str
    mini_batches: int


class Saved(Done):
    """The files of a site's memory, by entry."""

    files: dict[str, str]


class Failed(Frozen):
    """The error of a worker: the name of its class, and its text."""

    error: str
    message: str
