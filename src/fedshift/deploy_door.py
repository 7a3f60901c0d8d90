"""The one door to `fedshift.deploy`, the rooms of a real federation. The library works without them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

ROOMS = "fedshift.deploy"


def deploy_entrance() -> ModuleType | None:
    """The module `fedshift.deploy.entrance`, which says what the rooms add to the library; None without them."""
    return importlib.import_module(f"{ROOMS}.entrance") if find_spec(ROOMS) is not None else None
