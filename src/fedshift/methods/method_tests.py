"""How tests run a method on a few made-up samples: values of its options, and options and rates of its golden run."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class Try:
    """Values of an option, each of which must give another result than the default and than each other."""

    values: tuple[Any, ...]  # what is tried
    beside: Mapping[str, Any] = field(default_factory=dict)  # other options that the default has too
    where: str = ""  # the set-up, a name of ``SETUPS`` in ``tests/methods/test_options.py``; empty is the method's


def tries(*values: Any, where: str = "", **beside: Any) -> tuple[Try, ...]:
    """One `Try`, for a table of options.

    Example:
        >>> tries(0.0, 3.0)[0].values
        (0.0, 3.0)
    """
    return (Try(values, beside, where),)


@dataclass(frozen=True, kw_only=True)
class MethodTests:
    """What tests need to know of a method so that each of its options shows in a short run. Every part has a default.

    Attributes:
        where: the set-up of its runs.
        beside: options of its runs that keep them short, or make its parts matter in a short one.
        options: what is tried of an option whose values from `other_values` do not show. Subclasses inherit these.
        elsewhere: options, and their values, that have tests of their own; of one that is none of a few values, all.
        golden: options of its golden run.
        rates: learning rates of its golden run on images and on vectors, with which it learns and is not done.
    """

    where: str = "images"
    beside: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, tuple[Try, ...]] = field(default_factory=dict)
    elsewhere: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    golden: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[float, float] = (0.02, 0.02)

    def derive(self, written: MethodTests) -> MethodTests:
        """Those of a subclass, which inherits the options alone."""
        return replace(written, options={**self.options, **written.options})


def other_values(annotation: Any, default: Any) -> tuple[Any, ...]:
    """Other values of an option of this type; none where the type does not say any.

    Example:
        >>> other_values(bool, True), other_values(Literal["mean", "median"], "mean"), other_values(int | None, 3)
        ((False,), ('median',), (4,))
        >>> other_values(float, 0.1)
        (0.0, 0.30000000000000004)
    """
    kind = _plain(annotation)
    if get_origin(kind) is Literal:
        return tuple(value for value in get_args(kind) if value != default)
    if kind is bool:
        return (not default,)
    if kind is int:
        return (2,) if default is None else (default + 1,)
    if kind is float:
        return (0.0, 3 * default) if default else (1.0,)
    return ()


def _plain(annotation: Any) -> Any:
    """The type without bounds and without None."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return _plain(kinds[0]) if len(kinds) == 1 else None
    return annotation
