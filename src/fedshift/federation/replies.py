"""What a reply from another machine may hold: nothing that its step does not promise, in type, shape or value."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.federation.federation import StepOwner
from fedshift.federation.messages import Reply, returned
from fedshift.weights import NamedTensors, Weights


def reply_type(method: StepOwner, step: str) -> type[Reply]:
    """What a step of ``method`` returns. Raises FedshiftError when ``step`` is no step: a private name, server code."""
    named = isinstance(step, str) and not step.startswith("_")
    function = getattr(type(method.step_owner(step)), step, None) if named else None
    if inspect.isfunction(function):
        parameters = list(inspect.signature(function).parameters)
        kind = returned(function)
        if parameters[1:2] == ["site"] and kind is not None:
            return kind
    raise FedshiftError(f"'{step}' is not a step of {type(method).__name__}")


def checked_reply(kind: type[Reply], content: Mapping[str, Any]) -> Reply:
    """``content`` as a reply of the class a step promises. Raises FedshiftError where names or kinds differ."""
    expected = typing.get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    if set(content) != names:
        raise FedshiftError(f"a {kind.__name__} has the fields {sorted(names)}, not {sorted(map(str, content))}")
    for name in names:
        if not _fits(content[name], expected[name]):
            raise FedshiftError(f"'{name}' of a {kind.__name__} is a {type(content[name]).__name__}")
    return kind(**content)


def _fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        inner = typing.get_args(kind)[1]
        return (
            isinstance(value, Mapping)
            and not isinstance(value, NamedTensors)
            and all(_fits(item, inner) for item in value.values())
        )
    if origin is not None:  # a union
        return any(_fits(value, part) for part in typing.get_args(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else False


class TensorCheck:
    """Which tensors replies may hold. like: the network's, to check models (`Weights`) against."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._like = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in like.items()}
        self._seen: dict[tuple[str, str], Any] = {}

    def check(self, step: str, content: Mapping[str, Any]) -> None:
        """Raises FedshiftError for numbers that are not finite and shapes that are not those of the network, or not
        those that the step's replies held before.
        """
        for name, value in content.items():
            for path, tensors in _named(name, value):
                tensors.check_finite(f"'{path}'")
                if not isinstance(tensors, Weights):
                    continue
                shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
                for key, shape in shapes.items():
                    if key in self._like and shape != self._like[key]:
                        raise FedshiftError(
                            f"'{path}': tensor '{key}' is {shape[0]} {shape[1]}, the network's is {self._like[key][0]} "
                            f"{self._like[key][1]}"
                        )
                if self._seen.setdefault((step, path), shapes) != shapes:
                    raise FedshiftError(f"'{path}' holds other tensors than in replies before")


def _named(path: str, value: Any) -> Iterator[tuple[str, NamedTensors]]:
    if isinstance(value, NamedTensors):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{path}/{key}", item)


def checked_measures(value: Any) -> dict[str, Any]:
    """``{accuracy, samples, classes: [[right, of] or None]}`` as a site says it. Raises FedshiftError if it is not."""
    try:
        accuracy, samples, classes = float(value["accuracy"]), int(value["samples"]), list(value["classes"])
        pairs = [None if pair is None else (int(pair[0]), int(pair[1])) for pair in classes]
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise FedshiftError("what it measured cannot be read") from error
    if not (0 <= accuracy <= 100 and samples >= 1 and all(pair is None or 0 <= pair[0] <= pair[1] for pair in pairs)):
        raise FedshiftError("what it measured is not an accuracy")
    return {"accuracy": accuracy, "samples": samples, "classes": pairs}
