"""Import paths, by which another process finds the same class."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

CHILD = "FEDSHIFT_CHILD"
"""Environment variable set in worker processes. A method's file that they import must not start an experiment."""
USER_MODULE = "fedshift_user_"
"""Prefix of the names of modules that `import_file` makes."""


def find(path: str) -> Any:
    """The object at ``package.module:Name`` or ``/path/file.py:Name``.

    Example:
        >>> find("fedshift.weights:Weights").__name__
        'Weights'
    """
    module_name, _, attribute = path.rpartition(":")
    module = importlib.import_module(module_name) if not module_name.endswith(".py") else import_file(module_name)
    result = module
    for part in attribute.split("."):
        result = getattr(result, part)
    return result


class Source(NamedTuple):
    """A user's file as it was read."""

    path: Path  # the file
    text: bytes  # its content
    beside: dict[str, bytes]  # the files beside it that it imports: path → content
    sha256: str  # the checksum of all of them


def read_source(path: str) -> Source:
    """Read a user's file, and those beside it that it imports, without running anything.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "own.py").write_text("raise SystemExit")
        ...     read_source(f"{folder}/own.py").text
        b'raise SystemExit'
    """
    whole = Path(path).resolve()
    text = whole.read_bytes()
    beside = imported_beside(whole)
    return Source(whole, text, beside, _checksum(text, beside))


def import_file(path: str) -> ModuleType:
    """`import_source` of a file that is read now.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "own.py").write_text("ANSWER = 42")
        ...     import_file(f"{folder}/own.py").ANSWER
        42
    """
    return import_source(read_source(path))


def import_source(source: Source) -> ModuleType:
    """Import a user's Python file as a module, once until its content changes: what was read is what runs.

    Files beside it that it imports count as its content: ``__sha256__`` of the module is the checksum of all of them.

    Raises:
        ImportError: a file beside it has changed since it was read.

    Example:
        >>> import_source(Source(Path("/nowhere/own.py"), b"ANSWER = 42", {}, "a checksum")).ANSWER
        42
    """
    whole, text, beside, checksum = source
    # With the checksum in its name, an edited file becomes another module, and results name the code that ran.
    name = f"{USER_MODULE}{whole.stem}_{zlib.crc32(str(whole).encode()):08x}_{checksum[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(whole)
    module.__dict__["__sha256__"] = checksum
    sys.modules[name] = module
    try:
        with _importable(whole.parent, beside):
            exec(compile(text, str(whole), "exec"), module.__dict__)  # a file that the user named # nosec B102
    except BaseException:
        del sys.modules[name]  # do not keep half a module
        raise
    return module


def package_source(name: str) -> tuple[Path, str]:
    """Where a module's top package is, or its file, and the checksum of all its Python files. Nothing is imported.

    Raises:
        ImportError: there is no such module.

    Example:
        >>> package_source("fedshift.errors")[0].name
        'fedshift'
    """
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module that is running, such as __main__, may have none
        spec = None
    if spec is None:
        raise ImportError(f"No module named '{top}'")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob("*.py")) or [Path(str(spec.origin))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return folders[0] if folders else files[0], digest.hexdigest()


def imported_beside(path: Path) -> dict[str, bytes]:
    """The files beside a user's file that it imports, also through one another: path → content.

    Of a package beside it all files count.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     texts = {"own": "import json, losses", "losses": "WEIGHT = 2", "unused": ""}
        ...     files = {name: Path(folder) / f"{name}.py" for name in texts}
        ...     _ = [file.write_text(texts[name]) for name, file in files.items()]
        ...     [(Path(file).name, content) for file, content in imported_beside(files["own"]).items()]
        [('losses.py', b'WEIGHT = 2')]
    """
    result: dict[str, bytes] = {}
    waiting = [path]
    while waiting:
        for top in _imported_names(waiting.pop()):
            module, package = path.parent / f"{top}.py", path.parent / top
            for file in [module] if module.is_file() else sorted(package.rglob("*.py")):
                if file != path and str(file) not in result:
                    result[str(file)] = file.read_bytes()
                    waiting.append(file)
    return dict(sorted(result.items()))


def _imported_names(path: Path) -> set[str]:
    """The first part of the name of each module that a file imports, but for Python's own and fedshift."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return set()  # its import says it
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"fedshift"}


def _checksum(text: bytes, beside: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(text)
    for path, content in beside.items():
        digest.update(f"{Path(path).name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


_BESIDE: dict[str, bytes] = {}
"""Files beside users' files that were imported, with the content that they had."""


@contextmanager
def _importable(parent: Path, beside: Mapping[str, bytes]) -> Iterator[None]:
    """Let a user's file import those beside it, anew if they have changed or another folder's were imported."""
    if not beside:
        yield
        return
    folder = str(parent)
    changed = any(_BESIDE.get(file) != content for file, content in beside.items())
    tops = {Path(file).relative_to(parent).parts[0].removesuffix(".py") for file in beside}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file in _BESIDE and name.partition(".")[0] in tops and (changed or file not in beside):
            del sys.modules[name]
    importlib.invalidate_caches()  # files may be newer than what Python remembers of their folder
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # nothing is left in the user's folder
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = written
    if any(not Path(file).is_file() or Path(file).read_bytes() != content for file, content in beside.items()):
        raise ImportError(f"files in {parent} changed while they were imported")
    _BESIDE.update(beside)
    if folder not in sys.path:
        sys.path.append(folder)  # for what its functions import when they are called


def place_of(kind: type) -> str:
    """The import path at which `find` finds a class.

    Example:
        >>> from fedshift.weights import Weights
        >>> place_of(Weights)
        'fedshift.weights:Weights'
    """
    module = sys.modules[kind.__module__]
    file = module.__file__ if kind.__module__.startswith((USER_MODULE, "__main__")) else None
    return f"{file or kind.__module__}:{kind.__qualname__}"
