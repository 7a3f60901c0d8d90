"""Import paths, by which another process finds the same class."""

from __future__ import annotations

import hashlib
import importlib
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

CHILD = "FEDSHIFT_CHILD"
"""Environment variable set in worker processes. A method's file that they import must not start an experiment."""
USER_MODULE = "fedshift_user_"
"""Prefix of the names of modules that `import_file` makes."""


def find(place: str) -> Any:
    """The object at ``package.module:Name`` or ``/path/file.py:Name``.

    Example:
        >>> find("fedshift.weights:Weights").__name__
        'Weights'
    """
    module_name, _, attribute = place.rpartition(":")
    module = importlib.import_module(module_name) if not module_name.endswith(".py") else import_file(module_name)
    found = module
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def import_file(path: str) -> ModuleType:
    """Import a user's Python file as a module. A file is imported once until its content changes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "own.py").write_text("ANSWER = 42")
        ...     import_file(f"{folder}/own.py").ANSWER
        42
    """
    whole = Path(path).resolve()
    text = whole.read_bytes()
    checksum = hashlib.sha256(text).hexdigest()
    # With the checksum in its name, an edited file becomes another module, and results name the code that ran.
    name = f"{USER_MODULE}{whole.stem}_{zlib.crc32(str(whole).encode()):08x}_{checksum[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(whole)
    module.__dict__["__sha256__"] = checksum
    sys.modules[name] = module
    try:
        exec(compile(text, str(whole), "exec"), module.__dict__)  # a file that the user named # nosec B102
    except BaseException:
        del sys.modules[name]  # do not keep half a module
        raise
    return module


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
