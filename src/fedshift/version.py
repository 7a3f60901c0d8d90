"""The version of fedshift that is installed."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    """The version that was installed, which the tags of the repository give."""
    try:
        return metadata.version("fedshift")
    except metadata.PackageNotFoundError:  # run from its folder, without an installation
        return "0+unknown"
