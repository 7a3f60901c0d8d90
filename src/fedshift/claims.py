"""Claims: one process alone works on a folder, also where locks of one machine do not hold on another.

`fcntl.flock` excludes the processes of one mount. On some network file systems (NFS with ``local_lock``, Lustre with
``localflock``, two FUSE mounts) those of another machine pass. So a process also makes a file ``.claim-NUMBER``, which
succeeds once (O_EXCL), and changes it every few seconds. A process may take over from one that is gone: it makes the
file of the next number, which again succeeds once. Whoever finds that its own file is gone, or that there is a next
one, has lost the folder and stops before it writes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fedshift.errors import FedshiftError, seconds_from
from fedshift.text import one_line

SILENCE = "FEDSHIFT_SILENCE"
"""The variable of the environment with the seconds without a sign after which another machine's claim is void."""
_SILENCE = 90.0
"""Longer than the minute for which an NFS client may show attributes of before."""
_BEATS = 18
"""Signs of life in that time."""
_LARGEST = 4096


class ClaimLost(FedshiftError):
    """Another process took this one's folder over, because it had seen no sign of it for a while."""


class Machine(NamedTuple):
    """Where this process runs: numbers of processes mean the same in the same place."""

    host: str  # the machine's name
    boot: str  # of its present boot, if the system tells
    space: str  # the namespace of process numbers (containers have their own), if the system tells


def machine() -> Machine:
    """Where this process runs.

    Example:
        >>> machine() == machine()
        True
    """
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return Machine(socket.gethostname(), boot, space)


class _Text(BaseModel):
    """What a claim's file says: the process that has the folder, and the number of its signs of life."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # a later version may say more

    machine: Machine
    process: int
    start: str
    token: str
    beat: int = 0

    def write(self, handle: int) -> None:
        os.pwrite(handle, self.model_dump_json().encode(), 0)  # no shorter than what it said before
        os.fsync(handle)

    def describe(self) -> str:
        return one_line(f"process {self.process} on {self.machine.host}"[:200])

    def is_here(self) -> bool:
        return self.machine == machine()

    def is_gone(self) -> bool:
        """Whether the process has ended, as far as its own machine can tell; False of another machine."""
        if not self.is_here():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return bool(self.start) and _start_of(self.process) != self.start


def silence() -> float:
    """The seconds without a sign after which a claim of another machine is void.

    Raises:
        UserError: the variable of the environment is no number above 0.

    Example:
        >>> silence()
        90.0
    """
    return seconds_from(SILENCE, _SILENCE)


class Claim:
    """A process's claim on a folder. `take` it, `check` it before each write, `release` it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> mine, other = Claim(folder), Claim(folder)
        >>> mine.take(), other.take(), other.holder() == f"process {os.getpid()} on {socket.gethostname()}"
        (True, False, True)
        >>> mine.release(); other.take()
        True
        >>> other.release()
    """

    def __init__(self, folder: Path, name: str = ".claim") -> None:
        """``name``: how the names of its files begin."""
        self._folder, self._name = folder, name
        self._number = 0
        """Of this process's file; 0: it has none."""
        self._token = secrets.token_hex(16)
        self._end = threading.Event()
        self._seen = b""
        self._since: float | None = None
        """When another process's file was first seen to say what it says now."""
        self._alive = False

    def take(self) -> bool:
        """Make this process's file. False if another process has the folder, or may have it.

        OSError if the file cannot be written.
        """
        if self._number:
            return True
        last = self._last()
        if last and not self._is_void(last):
            return False
        process = os.getpid()
        text = _Text(machine=machine(), process=process, start=_start_of(process), token=self._token)
        try:
            handle = os.open(self._file(last + 1), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            text.write(handle)
        except BaseException:  # Ctrl-C, too: this process goes on and could not take it again
            self._file(last + 1).unlink(missing_ok=True)
            os.close(handle)
            raise
        mine = self._read(last + 1)
        if mine is None or mine.token != self._token or self._last() != last + 1:
            # This process was stopped, and others took over; or two took over from different files.
            if mine is not None and mine.token == self._token:
                self._file(last + 1).unlink(missing_ok=True)
            os.close(handle)
            return False
        for number in range(1, last + 1):
            self._file(number).unlink(missing_ok=True)
        self._number, self._end = last + 1, threading.Event()
        threading.Thread(target=self._beat, args=(handle, text, self._end, silence() / _BEATS), daemon=True).start()
        return True

    def is_alive(self) -> bool:
        """Whether the other process gave a sign since this one first looked, or runs in the same place."""
        last = self._last()
        return bool(last) and not self._is_void(last) and self._alive

    def doubt(self) -> None:
        """Wait for a new sign of the other process: it may be gone since the last look, however long ago that was."""
        if last := self._last():
            self._is_void(last)
        self._alive = False

    def holder(self) -> str:
        """The process that has the folder, such as "process 312 on server-2"; "" if it is not known."""
        last = self._last()
        text = self._read(last) if last else None
        return "" if text is None else text.describe()

    def check(self) -> None:
        """Do nothing while this process has the folder. ClaimLost if another one took it over."""
        if self._number and not self._is_mine():
            raise ClaimLost(
                f"{self._folder} was taken over by {self.holder() or 'another process'}, which had seen no sign of "
                f"this process for {silence():g} seconds: nothing more is written there"
            )

    def release(self) -> None:
        """Remove this process's file."""
        self._end.set()
        if self._number and self._is_mine():
            self._file(self._number).unlink(missing_ok=True)
        self._number = 0

    def _is_mine(self) -> bool:
        text = self._read(self._number)
        return text is not None and text.token == self._token and not self._file(self._number + 1).exists()

    def _is_void(self, number: int) -> bool:
        """Whether the process of a file is gone, or has been silent for too long on this process's own clock."""
        text, seen, now = self._read(number), self._bytes(number), time.monotonic()
        if text is not None and text.is_gone():
            return True
        if self._since is None or seen != self._seen:  # also where another version writes what this one cannot read
            self._alive = self._since is not None or (text is not None and text.is_here())
            self._seen, self._since = seen, now
        return now - self._since > silence()

    def _last(self) -> int:
        """The largest number of a file; 0 if there is none."""
        numbers = [file.name.removeprefix(f"{self._name}-") for file in self._folder.glob(f"{self._name}-*")]
        return max((int(number) for number in numbers if number.isdecimal()), default=0)

    def _file(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number:06}"

    def _read(self, number: int) -> _Text | None:
        """What a file says; None if it is gone, or half written."""
        try:
            return _Text.model_validate_json(self._bytes(number))
        except ValidationError:
            return None

    def _bytes(self, number: int) -> bytes:
        """The content of a file; empty if it is gone."""
        try:
            with open(self._file(number), "rb") as file:
                return file.read(_LARGEST)
        except OSError:
            return b""

    def _beat(self, handle: int, text: _Text, end: threading.Event, seconds: float) -> None:
        """Change this process's file until it is released. One that is gone is written too, and nobody sees it."""
        while not end.wait(seconds):
            text = text.model_copy(update={"beat": text.beat + 1})
            with contextlib.suppress(OSError):  # a full or absent disk for a while
                text.write(handle)
        os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def hold_claim(path: Path, seconds: float = 0.5) -> Iterator[Claim]:
    """Wait until no other process makes the file ``path``, and keep others from making it.

    Example:
        >>> import tempfile
        >>> with hold_claim(Path(tempfile.mkdtemp()) / "features.part") as claim:
        ...     claim.check()  # before the file takes its name
    """
    with Claim(path.parent, f".{path.name}.claim") as claim:
        while not claim.take():
            time.sleep(seconds)
        yield claim


def _start_of(process: int) -> str:
    """When a process started, in ticks since the boot; "" if it has ended, or if the system does not tell."""
    try:
        known = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if known[0] in "ZX" else known[19]  # a zombie waits for its parent, and does nothing more


_NETWORK = {"nfs", "nfs4", "lustre", "cifs", "smb3", "gpfs", "ceph", "beegfs", "glusterfs", "afs", "9p", "fuse"}


def network_file_system(folder: Path) -> str | None:
    """The kind of file system that a folder is on, if several machines may share it; None if not, or not known.

    Example:
        >>> network_file_system(Path("/proc")) is None
        True
    """
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    there, best, kind = folder.resolve(), Path("/"), ""
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        if (there == mount or mount in there.parents) and len(mount.parts) >= len(best.parts):
            best, kind = mount, after.split()[0]
    return kind if kind.partition(".")[0] in _NETWORK else None
