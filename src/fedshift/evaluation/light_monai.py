"""MONAI's metrics without the rest of MONAI, whose import takes 6 seconds of a processor; with its metrics alone 2."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fedshift.extras import import_extra, is_program

_APPS = "monai.apps"


def metrics(what: str) -> Any:
    """``monai.metrics``. Only fedshift's own programs are spared the rest: in a user's process MONAI is imported whole.

    Raises:
        UserError: MONAI is not installed.

    Example:
        >>> metrics("HD95").__name__  # doctest: +SKIP
        'monai.metrics'
    """
    if is_program() and "monai" not in sys.modules:
        before = set(sys.modules)
        try:
            return _metrics_alone()
        except Exception:  # of any kind: another version of MONAI needs more of itself
            for name in set(sys.modules) - before:
                if name.partition(".")[0] == "monai":
                    del sys.modules[name]
    return import_extra("monai.metrics", extra="volumes", what=what)


class _LaterApps(ModuleType):
    """Takes the place of ``monai.apps``, which imports nearly all of MONAI. It is run when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("_is_run"):
            raise AttributeError(name)
        self._is_run = True
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _metrics_alone() -> Any:
    with _no_walk():
        monai: Any = importlib.import_module("monai")
    monai.utils.module.walk_packages = pkgutil.walk_packages
    monai.__getattr__ = _part  # what it would have imported comes when it is used
    spec = importlib.util.find_spec(_APPS)
    assert spec is not None
    apps = _LaterApps(_APPS)
    apps.__spec__, apps.__path__ = spec, list(spec.submodule_search_locations or ())
    sys.modules[_APPS] = monai.apps = apps
    importlib.import_module("monai.data")  # first: it and monai.transforms import each other
    return importlib.import_module("monai.metrics")


def _part(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return importlib.import_module(f"monai.{name}")
    except ModuleNotFoundError:
        raise AttributeError(name) from None


@contextmanager
def _no_walk() -> Iterator[None]:
    """Within it, MONAI finds none of its own modules to import."""
    walk: Any = pkgutil.walk_packages
    pkgutil.walk_packages = lambda *_, **__: iter(())
    try:
        yield
    finally:
        pkgutil.walk_packages = walk
