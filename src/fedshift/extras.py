"""Packages that only some features need, and torch's compiler. They are imported when the feature is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fedshift.errors import UserError


def import_extra(module: str, *, extra: str, what: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: the module, such as ``pandas``.
        extra: the extra of fedshift that installs it.

    Raises:
        UserError: the package is not installed. The message names the extra.

    Example:
        >>> import_extra("no_such_package", extra="tables", what="to_frame")
        Traceback (most recent call last):
        fedshift.errors.UserError: to_frame needs the package no_such_package: pip install 'fedshift[tables]'
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{what} needs the package {package}: pip install 'fedshift[{extra}]'") from None


def reports_installed(what: str) -> None:
    """Whether there is all that runs are recorded and shown with, before hours are spent on them.

    Raises:
        UserError: a package of the extra ``report`` is not installed.

    Example:
        >>> reports_installed("fedshift run")
    """
    for package in ("matplotlib", "pyarrow", "sklearn"):
        if find_spec(package) is None:
            raise UserError(f"{what} needs the package {package}: pip install 'fedshift[report]'")


COMPILER = "torch._dynamo"
_programs: list[str] = []
"""Which of fedshift's programs this process runs; none in a process of the user's own Python."""


class _LaterCompiler(ModuleType):
    """Takes the place of ``torch._dynamo``. It serves torch's optimisers itself; any other use imports the compiler."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self._marked: list[Callable[..., Any]] = []

    def disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Return the function unchanged: nothing is compiled yet. torch stores the result beside the function."""
        self._marked.append(function)
        return function

    def graph_break(self) -> None:
        """Nothing is compiled yet."""

    def __getattr__(self, name: str) -> Any:
        """Import the compiler and return its attribute. From then on torch uses the compiler itself."""
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        for function in self._marked:
            vars(function).pop("__dynamo_disable", None)
        return getattr(importlib.import_module(COMPILER), name)


def runs_program(name: str) -> None:
    """Say that this process runs one of fedshift's own programs, such as a worker, and not the user's Python."""
    _programs.append(name)


def is_program() -> bool:
    """Whether this process runs one of fedshift's own programs."""
    return bool(_programs)


def compiler_comes_later() -> bool:
    """Let torch's optimisers work without torch's compiler, until somebody uses the compiler in this process.

    Optimisers import the compiler only to mark what it must not compile. The import costs 150 MB and a second. Only
    fedshift's own programs are spared it: in a user's process no module of torch is replaced.

    Returns whether the compiler is still not imported.
    """
    if COMPILER not in sys.modules and _programs:
        torch: Any = importlib.import_module("torch")
        sys.modules[COMPILER] = torch._dynamo = _LaterCompiler()
    return isinstance(sys.modules.get(COMPILER), _LaterCompiler)
