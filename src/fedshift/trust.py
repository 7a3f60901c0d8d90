"""Code that a file names runs only if a person trusts it.

An experiment file, a SITE.yaml and the like may name a user's own code: ``file.py:Class`` or ``package.module:Class``.
`own_module` imports such code, and `allow` stands before it. It lets pass

* what was trusted before, by path and SHA-256: in this process, or by this user in ``trusted.json``;
* what `asks` is told: a person at a terminal says yes, or wrote ``--trust`` or ``trust=True``;
* what the caller wrote in Python itself, within `own_words`;
* in a worker process, what its parent let pass.

Everything else is refused before it is imported. Python's own modules and other installed packages are always refused,
unless a package says that it requires fedshift.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from fedshift.errors import UserError
from fedshift.files import write_bytes
from fedshift.import_paths import CHILD, import_source, package_source, read_source

INHERITED = "FEDSHIFT_TRUSTED"
"""Environment variable in which a worker process is told what its parent let pass: path → SHA-256, as JSON."""
_FILE = "trusted.json"


class Code(NamedTuple):
    """Code that is about to be imported."""

    what: str  # what it is for, such as ``model 'net.py:Net'``
    path: Path  # the file, or the folder of a package
    sha256: str  # the checksum of the file and of the files beside it that it imports, or of the package's files

    @property
    def shown(self) -> str:
        """The code in words."""
        return f"{self.what} runs the code in {self.path}, SHA-256 {self.sha256}"


Ask = Callable[[Code], bool]
_ask: ContextVar[Ask | None] = ContextVar("ask", default=None)
_passed: dict[str, set[str]] = {}
"""What this process let pass: path → checksums."""


def allow(code: Code) -> None:
    """Let code be imported. UserError if nobody trusts it."""
    path = str(code.path)
    if code.sha256 in _passed.get(path, ()):
        return
    if os.environ.get(CHILD):
        shown = inherited_trust().get(path, [code.sha256])
        if code.sha256 not in shown:
            raise UserError(f"{code.what}: {path} has changed since the run began: start it again")
        return
    ask = _ask.get()
    if not _is_remembered(code) and (ask is None or not ask(code)):
        raise UserError(f"{code.shown}, which nobody has trusted: read it, then add --trust (in Python trust=True)")
    _passed.setdefault(path, set()).add(code.sha256)


def for_children() -> dict[str, str]:
    """Environment of worker processes, which import only what this process let pass, and as it was then."""
    return {INHERITED: json.dumps({path: sorted(some) for path, some in _passed.items()})}


def inherited_trust() -> Mapping[str, list[str]]:
    """What a worker's parent let pass: path → checksums."""
    result: Mapping[str, list[str]] = json.loads(os.environ.get(INHERITED, "{}"))
    return result


@contextmanager
def asks(ask: Ask) -> Iterator[None]:
    """Within it, ``ask`` is told of code that is not trusted yet, and says whether it is. A yes is remembered."""

    def remembering(code: Code) -> bool:
        trusted = ask(code)
        if trusted:
            remember(code)
        return trusted

    token = _ask.set(remembering)
    try:
        yield
    finally:
        _ask.reset(token)


@contextmanager
def own_words() -> Iterator[None]:
    """Within it, the caller named the code in Python or on the command line: that is trust. It is not remembered."""
    token = _ask.set(lambda code: True)
    try:
        yield
    finally:
        _ask.reset(token)


def trust_file() -> Path:
    """The file of what this user trusts: in ``FEDSHIFT_CONFIG``, else where the system keeps settings."""
    chosen = os.environ.get("FEDSHIFT_CONFIG")
    if chosen:
        return Path(chosen) / _FILE
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fedshift" / _FILE


def remember(code: Code) -> None:
    """Trust code from now on, for this user. UserError if the list cannot be written."""
    file, known = trust_file(), _read_known()
    known[str(code.path)] = sorted({*known.get(str(code.path), []), code.sha256})
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes(file, (json.dumps(known, indent=1, sort_keys=True) + "\n").encode(), private=True)
    except OSError as error:
        raise UserError(
            f"cannot remember in {file} what is trusted ({error.strerror}): set FEDSHIFT_CONFIG to a folder of your own"
        ) from None


def _is_remembered(code: Code) -> bool:
    return code.sha256 in _read_known().get(str(code.path), [])


def _read_known() -> dict[str, list[str]]:
    """What this user trusts: path → checksums."""
    file = trust_file()
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        result = None
    if isinstance(result, dict) and all(
        isinstance(some, list) and all(isinstance(item, str) for item in some) for some in result.values()
    ):
        return result
    raise UserError(f"{file}, the list of code that you trust, cannot be read: remove it, and trust the code again")


def own_module(what: str, name: str, folder: Path | None) -> ModuleType:
    """A user's own module, if somebody trusts it.

    Args:
        name: ``file.py`` or ``package.module``.
        folder: where a relative ``file.py`` is looked up first. The working directory is next.

    Raises:
        UserError: there is no such file or module, it cannot be read, or nobody trusts it.
    """
    try:
        if not name.endswith(".py"):
            return _own_package(what, name)
        beside = (folder or Path()) / name
        result = next((file for file in (beside, Path(name)) if file.exists()), None)
        if result is None:
            raise UserError(f"{what}: there is no file {beside}")
        source = read_source(str(result))
        allow(Code(what, source.path, source.sha256))
        return import_source(source)
    except SystemExit:
        raise UserError(
            f"{what}: {name} ends Python while it is imported: put what it runs as a script under "
            'if __name__ == "__main__":'
        ) from None
    except (ImportError, OSError, SyntaxError) as error:
        raise UserError(f"{what} cannot be imported: {error}") from error


def _own_package(what: str, name: str) -> ModuleType:
    """A module of a package: one that is installed requires fedshift, another is shown first."""
    if not check_package(what, name):
        path, checksum = package_source(name)
        allow(Code(what, path, checksum))
        module = importlib.import_module(name)
        if package_source(name) != (path, checksum):
            raise ImportError(f"{path} changed while it was imported")
        return module
    return importlib.import_module(name)


def check_package(what: str, name: str) -> bool:
    """Whether a module is of an installed package that requires fedshift, and may be imported unasked.

    Args:
        name: ``package.module``.

    Returns:
        False for a module of no installed package: its files are to be shown.

    Raises:
        UserError: it is Python's own, or of a package that does not require fedshift.
    """
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        raise UserError(f"{what}: {top} is a module of Python, and none of yours: name a file.py or a package of yours")
    packages = () if top == "fedshift" else metadata.packages_distributions().get(top, ())
    if packages and not any(_requires_fedshift(package) for package in packages):
        raise UserError(
            f"{what}: {top} is the installed package {packages[0]}, which does not require fedshift: write a file.py "
            "that imports it, and name that"
        )
    return bool(packages) or top == "fedshift"


def _requires_fedshift(package: str) -> bool:
    return any(re.match(r"fedshift(?![\w.-])", need) for need in metadata.requires(package) or ())
