"""Atomic writing of files: a file is complete or absent; and reading of YAML."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError, UserError

_LOCK = ".lock"
"""In a scratch folder: locked as long as its process lives."""


def write_bytes(
    path: Path, data: bytes, *, private: bool = False, flush: bool = True, before: Callable[[], None] | None = None
) -> None:
    """Write a file atomically: write a temporary file beside it, flush that to the disk, rename it.

    Args:
        path: the file. Its folder is made if necessary.
        private: only the user may read it, whatever the umask.
        flush: wait until it is on the disk.
        before: is called last before the file takes its name, and raises an error if it may not.

    Raises:
        UserError: the disk is full or read-only. The message names the file and the reason.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_bytes(Path(folder) / "new" / "file.txt", b"whole")
        ...     (Path(folder) / "new" / "file.txt").read_bytes()
        b'whole'
    """
    side = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")  # machines have processes of equal numbers
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(side, "wb", opener=_private if private else None) as file:
            file.write(data)
            file.flush()
            _keep_owner(file.fileno(), path)
            if flush:
                os.fsync(file.fileno())
        if before is not None:
            before()
        os.replace(side, path)
        if flush:
            flush_folder(path.parent)
    except FedshiftError:
        side.unlink(missing_ok=True)
        raise
    except OSError as error:
        with contextlib.suppress(OSError):
            side.unlink()
        if before is not None:
            before()  # whoever took the folder over removes halves
        raise UserError(f"cannot write {path}: {error.strerror or error}; {_way_out(error)}") from error


def read_text(path: Path, where: str = "") -> str:
    """A file's text, without the mark of its bytes' order. UserError, after ``where``, if it is no readable UTF-8.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     written = (Path(folder) / "names.txt").write_bytes(b"\\xef\\xbb\\xbfNora")
        ...     read_text(Path(folder) / "names.txt")
        'Nora'
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"{where}{path} cannot be read: {why}") from None


def _way_out(error: OSError) -> str:
    if isinstance(error, NotADirectoryError | FileExistsError):
        return "a folder of this path is a file: choose another folder"
    return "free some space or choose another folder"


LONGEST_NAME = 255
"""Bytes of the longest name that common file systems take."""


def names_a_folder(name: str) -> bool:
    """Whether a name is that of one folder, and of none above, beside or hidden.

    Example:
        >>> [names_a_folder(name) for name in ("D0", "..", "a/b", ".git", "")]
        [True, False, False, False, False]
    """
    plain = bool(name) and not name.startswith(".") and "/" not in name and "\\" not in name and name.isprintable()
    return plain and len(name.encode(errors="replace")) <= LONGEST_NAME


def below(root: Path, *names: str) -> Path:
    """The path of these names below a folder, for names that come from a file and may be anybody's.

    Args:
        names: of folders, and last of a folder or file.

    Raises:
        UserError: a name is not one of a folder, or a link on the way leads out of ``root``.

    Example:
        >>> below(Path("runs"), "fedavg", "D0").as_posix()
        'runs/fedavg/D0'
    """
    for name in names:
        if not names_a_folder(name):
            raise UserError(f"{root}: {name[:80]!r} cannot name a folder below it: the file that says so is not sound")
    path = root.joinpath(*names)
    if not path.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{path} leads out of {root} by a link: remove the link")
    return path


def set_aside(path: Path) -> Path | None:
    """Give a file another name beside it, the first of ``name-1.ext``, ``name-2.ext`` … that is free.

    Returns:
        The new name; None if the file does not exist.

    Raises:
        UserError: it cannot be renamed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (Path(folder) / "log.jsonl").touch()
        ...     set_aside(Path(folder) / "log.jsonl").name
        'log-1.jsonl'
    """
    if not path.exists():
        return None
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    try:
        path.rename(aside)
    except OSError as error:
        raise UserError(f"cannot rename {path}: {error.strerror or error}") from None
    return aside


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: a file that was renamed could be gone after a power cut.

    Example:
        >>> import tempfile
        >>> flush_folder(Path(tempfile.mkdtemp()))
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def opened_lock(path: Path) -> Iterator[int]:
    """Open a file that processes lock; it is made if it is not there. Closing it gives the lock back.

    Raises:
        UserError: it cannot be opened.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, opened_lock(Path(folder) / "lock") as handle:
        ...     fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if somebody has it
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _private(str(path), os.O_RDWR | os.O_CREAT)
        _keep_owner(handle, path)
    except OSError as error:
        raise UserError(f"cannot open {path}: {error.strerror}") from None
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Wait until no other process is in a block with the same lock, and keep others out of this one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, hold_lock(Path(folder) / "lock"):
        ...     pass  # read a file, change it, write it
    """
    with opened_lock(path) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class ScratchFolder:
    """A folder for the temporary files of this process, which `remove` removes.

    Folders that killed processes left are removed when the next one is made: nobody holds their lock.
    """

    def __init__(self, name: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"fedshift-{name}-")
        self.path = Path(self._folder.name)
        unlocked = self.path / f"{_LOCK}.part"
        self._lock = open(unlocked, "ab")  # noqa: SIM115 - held as long as the folder is there
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.replace(unlocked, self.path / _LOCK)
        for other in self.path.parent.glob(f"fedshift-{name}-*"):
            with contextlib.suppress(OSError), open(other / _LOCK, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other)

    def remove(self) -> None:
        """Remove the folder and all in it."""
        self._folder.cleanup()
        self._lock.close()


def _keep_owner(handle: int, path: Path) -> None:
    """As the administrator, leave a file to whoever had it, or has its folder: a service with a user of its own."""
    if os.geteuid() == 0:
        before = path.stat() if path.exists() else None
        owner = before if before is not None and before.st_uid != 0 else path.parent.stat()
        with contextlib.suppress(OSError):
            os.fchown(handle, owner.st_uid, owner.st_gid)


def _private(path: str, flags: int) -> int:
    """Open a file that only its user can read."""
    handle = os.open(path, flags, 0o600)
    os.fchmod(handle, 0o600)  # it may have been left there with other rights
    return handle


def make_private(folder: Path) -> None:
    """Let only the user read a folder and everything in it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "file.txt"
        ...     file.touch(0o644)
        ...     make_private(Path(folder))
        ...     oct(file.stat().st_mode)[-3:]
        '600'
    """
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            os.chmod(path, 0o700 if path.is_dir() else 0o600)


def yaml_bytes(content: Mapping[str, Any]) -> bytes:
    """A mapping as YAML, in the form in which a run's settings are written.

    Example:
        >>> yaml_bytes({"rounds": 2, "name": "demo"}).decode().split()
        ['rounds:', '2', 'name:', 'demo']
    """
    import yaml

    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(content, Dumper=dumper, sort_keys=False, allow_unicode=True)
    return text.encode()


def plain_yaml(text: str | bytes) -> Any:
    """Read YAML of plain values; it can make no other objects. The parser is the fast one where that is installed.

    Raises:
        yaml.YAMLError: the text is malformed.

    Example:
        >>> plain_yaml("{rounds: 5, seeds: [0, 1]}")
        {'rounds': 5, 'seeds': [0, 1]}
    """
    import yaml  # what only writes files need not import it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def edited_yaml(text: str, where: object) -> Any:
    """Read YAML that a person wrote, as `plain_yaml` does, but refuse a key that occurs twice: one would be lost.

    Raises:
        UserError: a key occurs twice in one mapping.
        yaml.YAMLError: the text is malformed.

    Example:
        >>> edited_yaml("{rounds: 5, rounds: 50}", "e.yaml")
        Traceback (most recent call last):
        fedshift.errors.UserError: e.yaml, line 1: 'rounds' is set twice, first in line 1: keep one of the two
    """
    import yaml

    waiting = [yaml.compose(text, Loader=yaml.SafeLoader)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                line, name = key.start_mark.line + 1, str(key.value)
                if name in lines:
                    raise UserError(
                        f"{where}, line {line}: '{name}' is set twice, first in line {lines[name]}: keep one of the two"
                    )
                lines[name] = line
                waiting.append(value)
    return plain_yaml(text)
