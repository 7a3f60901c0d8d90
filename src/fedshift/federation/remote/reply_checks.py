"""What a reply from another machine may hold: nothing that its step does not promise, in type, shape or value."""

from __future__ import annotations

import inspect
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.federation.federation import StepOwner
from fedshift.federation.messages import Reply, returned
from fedshift.weights import NamedTensors, Weights

LARGEST_INTEGER = 2**53
"""A site's integers become floats on the way, and one of any size would overflow there."""

Tensors = frozenset[tuple[str, tuple[tuple[int, ...], torch.dtype]]]
"""Names, shapes and types."""
Layout = frozenset[tuple[str, Tensors]]
"""What the open fields of a reply hold, by field (and key, where a field has several models)."""


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
    if kind is int or (kind is float and not isinstance(value, float)):
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INTEGER
    return isinstance(value, kind) if isinstance(kind, type) else False


class TensorCheck:
    """Which models (`Weights`) replies may hold. like: the network's tensors.

    Where the request carried a field of the same name, the site sends back what it was sent: the same names, shapes and
    types. Where it did not, the field is *open*: tensors named as the network's are the whole network, others (a single
    classifier, say) are as in the replies of most sites of the exchange. No single reply says how the others must be.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._like = _described(like)
        self._agreed: dict[str, Layout] = {}

    def check(self, step: str, kind: type[Reply], content: Mapping[str, Any], sent: Mapping[str, Any]) -> Layout | None:
        """The models of open fields, for `odd_ones`; None when the reply has none, or they are known to be right.

        content: of a reply of the class ``kind``. sent: of the request that it answers. Raises FedshiftError for
        numbers that are not finite, a model that is not as it was sent, part of a network in an open field, and open
        fields that are not as sites agreed on in an exchange before.
        """
        for name, value in content.items():
            for path, tensors in _named(name, value):
                tensors.check_finite(f"'{path}'")
        hints = typing.get_type_hints(kind)
        unknown: dict[str, Tensors] = {}
        any_open = False
        for name, value in content.items():
            if not _may_be_weights(hints[name]) or (isinstance(value, NamedTensors) and not isinstance(value, Weights)):
                continue
            found, expected = _models(name, value), _models(name, sent.get(name))
            if not expected:
                any_open = True
                for path, described in found.items():
                    self._check_open(path, described)
                unknown |= found
            elif found != expected:
                raise FedshiftError(f"'{_odd(found, expected)}' holds other tensors than the site was sent")
        if not any_open:
            return None
        layout, agreed = frozenset(unknown.items()), self._agreed.get(step)
        if agreed is not None and layout != agreed:
            raise FedshiftError(f"'{_odd(unknown, dict(agreed))}' holds other tensors than in replies before")
        return layout if agreed is None else None

    def _check_open(self, path: str, tensors: Tensors) -> None:
        """Raises FedshiftError for tensors of the network that are not the whole of it."""
        found, own = dict(tensors), dict(self._like)
        for name in sorted(found.keys() & own.keys()):
            if found[name] != own[name]:
                (shape, dtype), (right, right_dtype) = found[name], own[name]
                raise FedshiftError(
                    f"'{path}': tensor '{name}' is {shape} {dtype}, the network's is {right} {right_dtype}"
                )
        if found.keys() & own.keys() and tensors != self._like:
            raise FedshiftError(f"'{path}' holds a part of the network's tensors, or others beside them")

    def odd_ones(self, step: str, layouts: Mapping[str, Layout], asked: int) -> dict[str, str]:
        """Why replies are refused, by site: what their open fields hold is not what most sites sent.

        Between as many sites on either side the network's tensors, or those of a module of it, count before others.
        Where that does not tell either, all are refused, for nobody knows who is right. What more than half of the
        sites ``asked`` sent holds in later exchanges of the step as well.
        """
        votes = Counter(layouts.values())
        worth = {layout: (number, self._nearness(layout)) for layout, number in votes.items()}
        best = [layout for layout in votes if worth[layout] == max(worth.values())]
        if len(best) == 1 and 2 * votes[best[0]] > asked:
            self._agreed[step] = best[0]
        reasons: dict[str, str] = {}
        for site, layout in layouts.items():
            if best == [layout]:
                continue
            other = best[0] if layout != best[0] else best[1]
            more = " than most sites'" if len(best) == 1 else " than another site's, and no majority tells who is right"
            reasons[site] = f"'{_odd(dict(layout), dict(other))}' holds other tensors{more}"
        return reasons

    def _nearness(self, layout: Layout) -> int:
        """2: nothing but whole networks; 1: these or whole modules of it, named as in themselves; 0: neither."""
        return min((2 if tensors == self._like else int(self._is_module(tensors)) for _, tensors in layout), default=0)

    def _is_module(self, tensors: Tensors) -> bool:
        if not tensors:
            return False
        name, _ = min(tensors)
        prefixes = (own.removesuffix(name) for own, _ in self._like if own.endswith(f".{name}"))
        return any(
            tensors == {(own.removeprefix(prefix), rest) for own, rest in self._like if own.startswith(prefix)}
            for prefix in prefixes
        )


def _described(tensors: Mapping[str, Tensor]) -> Tensors:
    return frozenset((name, (tuple(tensor.shape), tensor.dtype)) for name, tensor in tensors.items())


def _models(name: str, value: Any) -> dict[str, Tensors]:
    return {path: _described(tensors) for path, tensors in _named(name, value) if isinstance(tensors, Weights)}


def _odd(found: Mapping[str, Tensors], expected: Mapping[str, Tensors]) -> str:
    """The first field in which they differ."""
    return min(path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path))


def _may_be_weights(kind: Any) -> bool:
    """Whether a field of this type can hold a model, by itself or by site."""
    if isinstance(kind, type) and issubclass(Weights, kind):
        return True
    return any(_may_be_weights(part) for part in typing.get_args(kind))


def _named(path: str, value: Any) -> Iterator[tuple[str, NamedTensors]]:
    if isinstance(value, NamedTensors):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{path}/{key}", item)


def checked_measures(value: Any, classes: int) -> dict[str, Any]:
    """``{accuracy, samples, classes: [[right, of] or None]}`` as a site says it, with one entry per class.

    Raises FedshiftError if it is not, or cannot be.
    """
    try:
        said, samples, pairs = value["accuracy"], value["samples"], value["classes"]
        pairs = [None if pair is None else (pair[0], pair[1]) for pair in pairs]
    except (TypeError, KeyError, IndexError) as error:
        raise FedshiftError("what it measured cannot be read") from error
    counts = [samples, *(number for pair in pairs if pair for number in pair)]
    if not (_fits(said, float) and all(_fits(count, int) for count in counts)):
        raise FedshiftError("what it measured cannot be read")
    if not (0 <= said <= 100 and samples >= 1 and all(0 <= pair[0] <= pair[1] <= samples for pair in pairs if pair)):
        raise FedshiftError("what it measured is not an accuracy")
    if len(pairs) != classes:
        raise FedshiftError(f"it measured {len(pairs)} classes, the experiment has {classes}")
    return {"accuracy": float(said), "samples": samples, "classes": pairs}
