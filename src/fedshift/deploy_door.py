"""The one door to `fedshift.deploy`, the rooms of a real federation. The library works without them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

ROOMS = "fedshift.deploy"


def deploy_room(name: str) -> ModuleType | None:
    """A module of the rooms that adds to the library: ``entrance`` commands, ``watched`` what deployments do.

    None without the rooms.
    """
    return importlib.import_module(f"{ROOMS}.{name}") if find_spec(ROOMS) is not None else None
