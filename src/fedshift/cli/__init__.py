"""The command line: one file per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import atexit
import errno
import gc
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

from fedshift.extras import runs_program

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Disk errors that are not bugs: full, over quota, read-only."""


def main() -> None:
    """Entry point of ``fedshift``. Exit codes: 0 done, 1 failure, 2 a user's mistake, 130 interrupted."""
    # Schedulers stop programs with SIGTERM. Treat it as Ctrl-C, so that workers stop and temporary files are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs_program("fedshift")
    atexit.register(_leave_garbage)
    try:
        sys.exit(exit_code("fedshift", _command))
    except KeyboardInterrupt:
        sys.exit(130)


def _leave_garbage() -> None:
    """Keep Python from searching all of torch's objects for garbage at exit, which takes two thirds of a second.

    Triton, which some of torch's parts import, would print a page of what was left.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _command() -> Callable[..., Any]:
    from fedshift.cli.app import command

    return command()


def exit_code(name: str, command: Callable[[], Callable[..., Any]]) -> int:
    """Run the command line ``name`` and return its exit code. A user's mistake is printed as one line."""
    import typer

    from fedshift.errors import OUT_OF_MEMORY, FedshiftError, is_out_of_memory
    from fedshift.text import printable

    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # one line, without the code
    try:
        return int(command()(prog_name=name, standalone_mode=False) or 0)
    except FedshiftError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except typer.Abort:  # typer turns Ctrl-C into this
        return 130
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        path = f" {error.filename}" if error.filename else ""
        print(f"error: cannot write{path}: {error.strerror}; free some space or choose another folder", file=sys.stderr)
        return 2
    except Exception as error:
        if is_out_of_memory(error):
            print(f"error: {OUT_OF_MEMORY}", file=sys.stderr)
            return 2
        # Typer's error for a wrong option. It has no importable class: some versions of typer bundle their own click.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            where = getattr(getattr(error, "ctx", None), "command_path", name)
            print(f"error: {error.format_message()} (see {where} --help)", file=sys.stderr)
        return 2
