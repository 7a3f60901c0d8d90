"""Packages that only some features need. They are imported when the feature is used."""

from __future__ import annotations

import importlib
from typing import Any

from fedshift.errors import UserError


def needed(module: str, *, extra: str, what: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: the module, such as ``pandas``.
        extra: the extra of fedshift that installs it.
        what: what needs it, for the message.

    Raises:
        UserError: the package is not installed. The message names the extra.

    Example:
        >>> needed("no_such_package", extra="tables", what="to_frame")
        Traceback (most recent call last):
        fedshift.errors.UserError: to_frame needs the package no_such_package: pip install 'fedshift[tables]'
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{what} needs the package {package}: pip install 'fedshift[{extra}]'") from None
