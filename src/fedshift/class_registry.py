"""Classes by name: data sets, networks, methods. A class is imported only when it is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from fedshift.errors import UserError, nearest
from fedshift.import_paths import USER_MODULE, imported_beside

T = TypeVar("T")


class ClassRegistry(Generic[T]):
    """Maps names to classes without importing them.

    ``name in registry`` and `names` import nothing.

    Args:
        what: what one entry is, for messages, such as ``"data set"``.
        base: the class that every entry derives from.
        places: name → ``package.module:Class``, in the order of the documentation.
        elsewhere: what to write for an unknown name that is known as something else, or "".
        own_module: imports a user's own module, if somebody trusts it (`trust.own_module`): a name may then also be
            ``file.py:Class`` or ``package.module:Class``. None: it may not.
    """

    def __init__(
        self,
        what: str,
        base: type[Any],
        places: Mapping[str, str],
        *,
        elsewhere: Callable[[str], str] = lambda name: "",
        own_module: Callable[[str, str, Path | None], ModuleType] | None = None,
    ) -> None:
        self.what = what
        self.base = base
        self.places = dict(places)
        self.elsewhere = elsewhere
        self.own_module = own_module

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def names(self) -> tuple[str, ...]:
        """The registered names, in the order of the documentation."""
        return tuple(self.places)

    def name_in(self, options: Mapping[str, object], field: str) -> str:
        """The name in a section of an experiment file. UserError if there is no name, or it is not a string."""
        name = options.get("name")
        if not isinstance(name, str):
            raise UserError(f"{field}: give the name of a {self.what}; {nearest('', self.places)}")
        return name

    def find(self, name: str, *, folder: Path | None = None, permit: Callable[[str], None] | None = None) -> type[T]:
        """The class of that name.

        Args:
            name: a registered name or, with ``own_module``, the import path of a user's class.
            folder: where a relative ``file.py`` is looked up first. The working directory is next.
            permit: called with the name before anything is imported. It raises to refuse.

        Raises:
            UserError: there is no such name, file, module or class. The message names the nearest known one.
        """
        if permit is not None:
            permit(name)
        origin = self.places.get(name, name if self.own_module else "")
        module_name, colon, attribute = origin.rpartition(":")
        if not colon:
            hint = "; your own: file.py:Class" if self.own_module else ""
            raise UserError(f"unknown {self.what} '{name}'; {self.elsewhere(name)}{nearest(name, self.places)}{hint}")
        if name in self.places or self.own_module is None:
            return cast(type[T], getattr(importlib.import_module(module_name), attribute))
        module = self.own_module(f"{self.what} '{name}'", module_name, folder)
        classes = {
            key: kind
            for key, kind in vars(module).items()
            if isinstance(kind, type) and issubclass(kind, self.base) and made_in(module, kind)
        }
        if attribute not in classes:
            raise UserError(
                f"{module_name} has no {self.what} '{attribute}' of its own (a class derived from "
                f"{self.base.__name__}); {nearest(attribute, classes)}"
            )
        return cast(type[T], classes[attribute])


def made_in(module: ModuleType, thing: Any) -> bool:
    """Whether a class or function was made in a module, in its package, or in a file beside it that it imports.

    What it merely imports from elsewhere is not called: a name in an experiment file would reach any function.

    Example:
        >>> from fedshift import errors
        >>> made_in(errors, errors.UserError), made_in(errors, len)
        (True, False)
    """
    made = str(getattr(thing, "__module__", ""))
    if made == module.__name__:
        return True
    file, module_file = getattr(sys.modules.get(made), "__file__", None), module.__file__
    if made.startswith(USER_MODULE) or not module_file or not file:
        return False
    if module.__name__.startswith(USER_MODULE):
        return file in imported_beside(Path(module_file))
    return made.partition(".")[0] == module.__name__.partition(".")[0]
