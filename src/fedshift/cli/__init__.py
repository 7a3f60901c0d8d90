"""The command line: one file per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of ``fedshift``. Exit codes: 0 done, 1 failure, 2 a person's mistake, 130 interrupted."""
    from fedshift.cli.app import app
    from fedshift.errors import FedshiftError

    try:
        app()
    except FedshiftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
