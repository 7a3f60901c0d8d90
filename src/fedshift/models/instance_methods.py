"""A method of one module in place of its class's: another forward pass, or a training mode that stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def with_method(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Give a module a method of its own. Its class, its weights and their names stay; a deep copy has the method, too.

    ``module``: changed in place. ``name``: of the method, such as ``forward``. ``function``: takes the module first, as
    in a class.
    """
    # A bound method, since `copy.deepcopy` binds it to the copy; it would share any other function's module.
    setattr(module, name, MethodType(function, module))


def without_method(module: nn.Module, name: str) -> None:
    """Take away what `with_method` gave, so that the class's method counts again."""
    vars(module).pop(name, None)


def has_method(module: nn.Module, name: str) -> bool:
    """Whether a module has a method of its own of this name."""
    return name in vars(module)


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """The function behind a module's method: its own, or else its class's."""
    instance_method: Any = vars(module).get(name)
    function: Callable[..., Any] = getattr(type(module), name) if instance_method is None else instance_method.__func__
    return function


def stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """``train`` of a module that stays in evaluation mode: whatever mode is asked for, its class's ``train(False)``."""
    kind: Any = type(module)
    kind.train(module, False)
    return module
