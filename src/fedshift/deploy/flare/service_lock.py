"""The lock that a role's service holds as long as it lives, which says whether it runs, and lets no second one run.

A process number in a file says less: after a kill it may be another process's, and in a container it is always 1.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedshift.errors import UserError
from fedshift.files import opened_lock

if TYPE_CHECKING:
    from fedshift.deploy.flare.kits import Kit

LOCK = "service.lock"
_SECONDS = 2.0
"""How long a service waits for the lock: whoever looks whether one runs has it for a moment, as has one that ends."""


@contextmanager
def only_service(kit: Kit) -> Iterator[None]:
    """Let no other service of the kit run inside the block, nor what this process starts keep the lock."""
    with opened_lock(kit.folder / LOCK) as file:
        deadline = time.monotonic() + _SECONDS
        while not _take(file):
            if time.monotonic() > deadline:
                number = _number(file)
                who = f" (process {number})" if number else ""
                raise UserError(f"{kit.role} '{kit.name}' runs already{who}; stop it first")
            time.sleep(0.05)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield


def holder(kit: Kit) -> int | None:
    """The number of the service's process, in its own container if it has one; None if no service runs."""
    if not (kit.folder / LOCK).exists():
        return None
    with opened_lock(kit.folder / LOCK) as file:
        return None if _take(file) else _number(file)


def _take(file: int) -> bool:
    """Take the lock, unless somebody has it. It is given back when the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _number(file: int) -> int:
    text = os.pread(file, 20, 0)
    return int(text) if text.isdigit() else 0
