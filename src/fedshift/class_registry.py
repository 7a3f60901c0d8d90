"""Classes by name: data sets, networks, methods. A class is imported only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from fedshift.errors import UserError, nearest
from fedshift.import_paths import import_file

T = TypeVar("T")


class ClassRegistry(Generic[T]):
    """Maps names to classes without importing them.

    ``name in registry`` and `names` import nothing.

    Args:
        what: what one entry is, for messages, such as ``"data set"``.
        base: the class that every entry derives from.
        places: name → ``package.module:Class``, in the order of the documentation.
        own: whether a name may also be ``file.py:Class`` or ``package.module:Class``, a user's own class.
    """

    def __init__(self, what: str, base: type[Any], places: Mapping[str, str], *, own: bool = False) -> None:
        self.what = what
        self.base = base
        self.places = dict(places)
        self.own = own

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def names(self) -> tuple[str, ...]:
        """The registered names, in the order of the documentation."""
        return tuple(self.places)

    def name_in(self, options: Mapping[str, object], field: str) -> str:
        """The name in a section of an experiment file.

        Args:
            options: the section.
            field: Path of its name in the file, for the message.

        Raises:
            UserError: there is no name, or it is not a string.
        """
        name = options.get("name")
        if not isinstance(name, str):
            raise UserError(f"{field}: give the name of a {self.what}; {nearest('', self.places)}")
        return name

    def find(self, name: str, *, folder: Path | None = None, permit: Callable[[str], None] | None = None) -> type[T]:
        """The class of that name.

        Args:
            name: a registered name or, if ``own``, the import path of a user's class.
            folder: where a relative ``file.py`` is looked up first. The working directory is next.
            permit: called with the name before anything is imported. It raises to refuse.

        Raises:
            UserError: there is no such name, file, module or class. The message names the nearest known one.
        """
        if permit is not None:
            permit(name)
        place = self.places.get(name, name if self.own else "")
        module_name, colon, attribute = place.rpartition(":")
        if not colon:
            hint = "; your own: file.py:Class" if self.own else ""
            raise UserError(f"unknown {self.what} '{name}'; {nearest(name, self.places)}{hint}")
        if name in self.places:
            return cast(type[T], getattr(importlib.import_module(module_name), attribute))
        return self._own_class(name, module_name, attribute, folder)

    def _own_class(self, name: str, module_name: str, attribute: str, folder: Path | None) -> type[T]:
        module = own_module(f"{self.what} '{name}'", module_name, folder)
        classes = {
            key: kind for key, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, self.base)
        }
        if attribute not in classes:
            made_there = [key for key, kind in classes.items() if kind.__module__ == module.__name__]
            raise UserError(
                f"{module_name} has no {self.what} '{attribute}' (a class derived from {self.base.__name__}); "
                f"{nearest(attribute, made_there)}"
            )
        return cast(type[T], classes[attribute])


def own_module(what: str, name: str, folder: Path | None) -> ModuleType:
    """A user's own module.

    Args:
        what: what it is imported for, for the message.
        name: ``file.py`` or ``package.module``.
        folder: where a relative ``file.py`` is looked up first. The working directory is next.

    Raises:
        UserError: there is no such file or module, or it cannot be read.
    """
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        beside = (folder or Path()) / name
        found = next((file for file in (beside, Path(name)) if file.exists()), None)
        if found is None:
            raise UserError(f"{what}: there is no file {beside}")
        return import_file(str(found))
    except SystemExit:
        raise UserError(
            f"{what}: {name} ends Python while it is imported: put what it runs as a script under "
            'if __name__ == "__main__":'
        ) from None
    except (ImportError, OSError, SyntaxError) as error:
        raise UserError(f"{what} cannot be imported: {error}") from error
