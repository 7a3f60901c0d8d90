"""Checks of replies from other machines: a reply must hold what its call promises, in type, shape and value."""

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
from fedshift.federation.federation import CallOwner
from fedshift.federation.messages import Reply, Statistics, leaves, returned
from fedshift.federation.remote.policy import ACCURACY
from fedshift.weights import NamedTensors, Weights

LARGEST_INTEGER = 2**53
"""Larger integers from a site are refused, since they would overflow where they become floats."""

Tensors = frozenset[tuple[str, tuple[tuple[int, ...], torch.dtype]]]
"""Names, shapes and types of tensors."""
Layout = frozenset[tuple[str, Tensors]]
"""The tensors in the open fields of a reply, by field (and key, where a field holds several models)."""


def reply_type(method: CallOwner, call: str) -> type[Reply]:
    """The class of reply that a call of ``method`` returns.

    Raises:
        FedshiftError: ``call`` does not name a call, but a private name or server code.
    """
    named = isinstance(call, str) and not call.startswith("_")
    function = getattr(type(method.call_owner(call)), call, None) if named else None
    if inspect.isfunction(function):
        parameters = list(inspect.signature(function).parameters)
        kind = returned(function)
        if parameters[1:2] == ["site"] and kind is not None:
            return kind
    raise FedshiftError(f"'{call}' is not a call of {type(method).__name__}")


def checked_header(header: Mapping[str, Any], left: int) -> tuple[int, dict[str, str]]:
    """Check the header of a reply to a call.

    Args:
        header: the header.
        left: mini-batches that the site had left.

    Returns:
        The mini-batches that the site trained on, and the files of its memory by entry.

    Raises:
        FedshiftError: one of them is missing or impossible.
    """
    mini_batches, memory = header.get("mini_batches"), header.get("memory")
    if not isinstance(mini_batches, int) or isinstance(mini_batches, bool) or mini_batches < 0:
        raise FedshiftError("it does not say how many mini-batches it trained on")
    if mini_batches > left:  # absent sites are charged by this number, too: see `Federation.forfeit`
        raise FedshiftError(f"it claims more mini-batches than the {left} that it had left")
    if not isinstance(memory, dict) or not all(isinstance(item, str) for pair in memory.items() for item in pair):
        raise FedshiftError("it does not say what the site remembers")
    return mini_batches, memory


def checked_reply(kind: type[Reply], content: Mapping[str, Any]) -> Reply:
    """Build a reply of class ``kind`` from ``content``.

    Raises:
        FedshiftError: the names or types of the fields differ from those of the class.
    """
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
    """Checks the models (`Weights`) in replies.

    If the request carried a field of the same name, the reply's tensors must have the same names, shapes and types. If
    not, the field is *open*. In an open field, tensors named as the network's must be the whole network. Other tensors
    (a single classifier, say) must be as in the replies of most sites of the exchange. So no single reply decides how
    the others must look.

    Args:
        like: the network's tensors.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._like = _described(like)
        self._agreed: dict[str, Layout] = {}

    def check(self, call: str, kind: type[Reply], content: Mapping[str, Any], sent: Mapping[str, Any]) -> Layout | None:
        """Check the tensors of one reply.

        Args:
            call: the call that was asked.
            kind: the class of the reply.
            content: the content of the reply.
            sent: the content of the request.

        Returns:
            The models in open fields, for `odd_ones`; None if there are none, or they are known to be right.

        Raises:
            FedshiftError: a number is not finite, a model differs from the one sent, an open field holds only a part of
                the network, or it differs from what sites agreed on in an earlier exchange.
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
        layout, agreed = frozenset(unknown.items()), self._agreed.get(call)
        if agreed is not None and layout != agreed:
            raise FedshiftError(f"'{_odd(unknown, dict(agreed))}' holds other tensors than in replies before")
        return layout if agreed is None else None

    def _check_open(self, path: str, tensors: Tensors) -> None:
        """Raise FedshiftError if tensors share names with the network's, but are not exactly the network's."""
        found, own = dict(tensors), dict(self._like)
        for name in sorted(found.keys() & own.keys()):
            if found[name] != own[name]:
                (shape, dtype), (right, right_dtype) = found[name], own[name]
                raise FedshiftError(
                    f"'{path}': tensor '{name}' is {shape} {dtype}, the network's is {right} {right_dtype}"
                )
        if found.keys() & own.keys() and tensors != self._like:
            raise FedshiftError(f"'{path}' holds a part of the network's tensors, or others beside them")

    def odd_ones(self, call: str, layouts: Mapping[str, Layout], asked: int) -> dict[str, str]:
        """Find the replies whose open fields differ from those of most sites.

        In a tie, the layout that is the network, or a module of it, wins. If that decides nothing, all replies are
        refused, since nobody knows who is right. A layout that more than half of the sites asked have sent is also
        required in later exchanges of the call.

        Args:
            call: the call that was asked.
            layouts: the open fields of each reply, by site.
            asked: how many sites were asked.

        Returns:
            Why a reply is refused, by site.
        """
        votes = Counter(layouts.values())
        worth = {layout: (number, self._nearness(layout)) for layout, number in votes.items()}
        best = [layout for layout in votes if worth[layout] == max(worth.values())]
        if len(best) == 1 and 2 * votes[best[0]] > asked:
            self._agreed[call] = best[0]
        reasons: dict[str, str] = {}
        for site, layout in layouts.items():
            if best == [layout]:
                continue
            other = best[0] if layout != best[0] else best[1]
            more = " than most sites'" if len(best) == 1 else " than another site's, and no majority tells who is right"
            reasons[site] = f"'{_odd(dict(layout), dict(other))}' holds other tensors{more}"
        return reasons

    def _nearness(self, layout: Layout) -> int:
        """2 if each model is the whole network, 1 if each is the network or a whole module of it, else 0."""
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
    """The first field in which two layouts differ."""
    return min(path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path))


def _may_be_weights(kind: Any) -> bool:
    """Whether a field of this type can hold a model, or several by site."""
    if isinstance(kind, type) and issubclass(Weights, kind):
        return True
    return any(_may_be_weights(part) for part in typing.get_args(kind))


def _named(name: str, value: Any) -> Iterator[tuple[str, NamedTensors]]:
    return ((path, leaf) for path, leaf in leaves({name: value}) if isinstance(leaf, NamedTensors))


class Measured(Statistics):
    """Stands in the ledger for a model that was sent to be measured, and for the site's report of it."""

    kind = ACCURACY


def measured_bytes(size: int) -> Measured:
    """Content of ``size`` bytes for the ledger; it takes no memory."""
    return Measured({"bytes": torch.empty(size, dtype=torch.uint8, device="meta")})


def checked_measures(value: Any, classes: int) -> dict[str, Any]:
    """Check a site's report of a measurement.

    Args:
        value: what the site sent.
        classes: how many classes the experiment has.

    Returns:
        ``{accuracy, samples, classes}``; ``classes`` holds (right, of) per class, or None where it is kept back.

    Raises:
        FedshiftError: it is something else, or its numbers are impossible.
    """
    try:
        said, samples, pairs = value["accuracy"], value["samples"], value["classes"]
        pairs = [None if pair is None else (pair[0], pair[1]) for pair in pairs]
    except (TypeError, KeyError, IndexError) as error:
        raise FedshiftError("its measurement cannot be read") from error
    counts = [samples, *(number for pair in pairs if pair for number in pair)]
    if not (_fits(said, float) and all(_fits(count, int) for count in counts)):
        raise FedshiftError("its measurement cannot be read")
    if not (0 <= said <= 100 and samples >= 1 and all(0 <= pair[0] <= pair[1] <= samples for pair in pairs if pair)):
        raise FedshiftError("its measurement is not an accuracy")
    if len(pairs) != classes:
        raise FedshiftError(f"it measured {len(pairs)} classes, the experiment has {classes}")
    return {"accuracy": float(said), "samples": samples, "classes": pairs}
