"""How the models in replies must look: as the site was sent, as the network, or as those of most sites."""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.federation.messages import Reply, field_types, leaves
from fedshift.weights import NamedTensors, Weights

Described = frozenset[tuple[str, tuple[tuple[int, ...], torch.dtype]]]
"""Names, shapes and types of tensors."""
Layout = frozenset[tuple[str, Described]]
"""The models in the open fields of a reply, by field (and key, where a field holds several models)."""


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

    def check(
        self,
        call: str,
        kind: type[Reply],
        content: Mapping[str, Any],
        sent: Mapping[str, Any],
        declared: Collection[str] = (),
    ) -> Layout | None:
        """Check the models in one reply.

        Args:
            call: the call that was asked.
            kind: the class of the reply.
            content: the content of the reply.
            sent: the content of the request.
            declared: fields whose tensors the method declares, which are not looked at here.

        Returns:
            The models in open fields, for `odd_ones`; None if there are none, or they are known to be right.

        Raises:
            FedshiftError: a model differs from the one sent, an open field holds only a part of the network, or it
                differs from what sites agreed on in an earlier exchange.
        """
        hints = field_types(kind)
        unknown: dict[str, Described] = {}
        any_open = False
        for name, value in content.items():
            if name in declared or not _may_be_weights(hints.get(name)):
                continue
            if isinstance(value, NamedTensors) and not isinstance(value, Weights):
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

    def _check_open(self, path: str, tensors: Described) -> None:
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
        required in later exchanges of the call. A site that is asked alone must send the network, or a module of it:
        a method whose target sends other models declares them in its `bounds`.

        Args:
            call: the call that was asked.
            layouts: the open fields of each reply, by site.
            asked: how many sites were asked.

        Returns:
            Why a reply is refused, by site.
        """
        if asked == 1 and any(self._nearness(layout) == 0 for layout in layouts.values()):
            return dict.fromkeys(
                layouts, "it holds a model that is not the network, and no other site tells what it is"
            )
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

    def _is_module(self, tensors: Described) -> bool:
        if not tensors:
            return False
        name, _ = min(tensors)
        prefixes = (own.removesuffix(name) for own, _ in self._like if own.endswith(f".{name}"))
        return any(
            tensors == {(own.removeprefix(prefix), rest) for own, rest in self._like if own.startswith(prefix)}
            for prefix in prefixes
        )


def _described(tensors: Mapping[str, Tensor]) -> Described:
    return frozenset((name, (tuple(tensor.shape), tensor.dtype)) for name, tensor in tensors.items())


def _models(name: str, value: Any) -> dict[str, Described]:
    return {path: _described(found) for path, found in leaves({name: value}) if isinstance(found, Weights)}


def _odd(found: Mapping[str, Described], expected: Mapping[str, Described]) -> str:
    """The first field in which two layouts differ."""
    return min(path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path))


def _may_be_weights(kind: Any) -> bool:
    """Whether a field of this type can hold a model, or several by site."""
    if isinstance(kind, type) and issubclass(Weights, kind):
        return True
    return any(_may_be_weights(part) for part in typing.get_args(kind))
