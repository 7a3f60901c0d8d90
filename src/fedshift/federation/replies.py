"""What a reply may hold: in type, shape, value and size, the same in every engine.

The classes of replies say the types and ranges that never change, and a method's `bounds` what depends on the run. The
rest follows from the request and the network: models look as the site was sent, as the network, or as those of most
sites. A reply that holds anything else is refused, and its site counts as lost in this exchange.

What only a message from another machine holds is checked in `fedshift.deploy.remote.requests`.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, NoReturn, Protocol

import torch
from torch import Tensor

from fedshift.errors import FedshiftError, TrainingDiverged
from fedshift.federation.messages import (
    DTYPES,
    LARGEST_INTEGER,
    LARGEST_NUMBER,
    Between,
    Reply,
    field_types,
    leaves,
    reply_class,
    text_bytes,
)
from fedshift.federation.training import Training
from fedshift.functional.averaging import float64_pieces, is_buffer
from fedshift.models.network import Network
from fedshift.weights import NamedTensors, Weights

LARGEST_VALUE = 1e6
"""Largest value in tensors other than models, unless a method sets another. No network trains on larger values."""
GROWTH = 20.0
"""How far a model may be from the one that the site was sent, in parts of its norm plus 1.

Honest models of the golden runs are at most 0.72 of the norm away. Without a limit, one finite model of 3e38 would
enter the mean, and training would diverge at all other sites.
"""
LARGEST_MEAN, LARGEST_VARIANCE, LARGEST_COUNTER = 1e9, 1e18, 2**31
"""Largest values of BatchNorm's running statistics, which depend on the scale of the data and not on training."""
FEWEST_TENSORS = 1000
"""Tensors that a reply may always hold; more if the request and the network have more."""
Described = frozenset[tuple[str, tuple[tuple[int, ...], torch.dtype]]]
"""Names, shapes and types of tensors."""
Layout = frozenset[tuple[str, Described]]
"""The models in the open fields of a reply, by field (and key, where a field holds several models)."""


# What methods declare -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensors:
    """How the tensors of a field must look."""

    # the shape of each tensor, by name. None in place of the first size stands for 1 to ``rows`` rows.
    shapes: Mapping[str, tuple[int | None, ...]]
    rows: int = 0  # most rows where the first size is None
    low: float = -LARGEST_VALUE  # the smallest value
    high: float = LARGEST_VALUE  # the largest value
    dtype: torch.dtype = torch.float32  # the type of all of them
    may_be_empty: bool = False  # whether the field may hold no tensor at all


Bounds = Mapping[str, Tensors | Between]
"""What fields of a reply may hold, by field."""


@dataclass(frozen=True)
class About:
    """What the server knows of one site before it asks: what replies are checked against."""

    network: Network  # what sites train, with the weights that the run starts from
    samples: int  # training samples of the site, as it said when it joined
    input_shape: tuple[int, ...]  # of one sample
    classes: int  # how many classes there are
    training: Training  # how sites train


# Checks of a reply ----------------------------------------------------------------------------------------------------


class Owners(Protocol):
    """Which object has the call of a name: the method, or its preparation of the samples."""

    def owner(self, call: str) -> Any: ...


class HasCalls(Protocol):
    """What is needed of a method."""

    @property
    def calls(self) -> Owners: ...


def reply_type(method: HasCalls, call: str) -> type[Reply]:
    """The class of reply that a call of ``method`` returns.

    Raises FedshiftError: ``call`` does not name a call, but a private name or server code.
    """
    named = isinstance(call, str) and not call.startswith("_")
    function = getattr(type(method.calls.owner(call)), call, None) if named else None
    if inspect.isfunction(function):
        parameters = list(inspect.signature(function).parameters)
        kind = reply_class(function)
        if parameters[1:2] == ["site"] and kind is not None:
            return kind
    raise FedshiftError(f"'{call}' is not a call of {type(method).__name__}")


def checked_reply(kind: type[Reply], content: Mapping[str, Any]) -> Reply:
    """Build a reply of class ``kind`` from ``content``.

    Raises FedshiftError: the names or types of the fields differ from those of the class, or a number is out of range.
    """
    names = {field.name for field in fields(kind)}
    if set(content) != names:
        raise FedshiftError(f"a {kind.__name__} has the fields {sorted(names)}, not {sorted(map(repr, content))}")
    _check_types(kind, content)
    return kind(**content)


def _check_types(kind: type[Reply], content: Mapping[str, Any]) -> None:
    for name, expected in field_types(kind).items():
        if not fits(content[name], expected):
            value = content[name]
            text = f"{value:g}" if isinstance(value, float) else f"a {type(value).__name__}"
            raise FedshiftError(f"'{name}' of a {kind.__name__} cannot be {text}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type and within its range. Numbers are finite, and integers fit into a float."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        inner, *marks = typing.get_args(kind)
        return fits(value, inner) and all(_within(value, mark) for mark in marks if isinstance(mark, Between))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner = typing.get_args(kind)[1]
        if not isinstance(value, Mapping) or isinstance(value, NamedTensors):
            return False
        of_tensors = isinstance(inner, type) and issubclass(inner, NamedTensors)
        return bool(value or not of_tensors) and all(
            isinstance(key, str) and fits(item, inner) for key, item in value.items()
        )
    if origin is not None:  # a union, or a choice of words
        return any(fits(value, part) if not isinstance(part, str) else value == part for part in typing.get_args(kind))
    if kind is float and isinstance(value, float):
        return abs(value) <= LARGEST_NUMBER
    if kind is int or kind is float:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INTEGER
    return isinstance(value, kind) if isinstance(kind, type) else False


def _within(value: Any, range_: Between) -> bool:
    return bool(range_.low <= value <= range_.high)


class ReplyCheck:
    """Checks the replies of a run.

    ``all_sites``: whether ``about`` has all sites of the run; a site knows only of itself.
    """

    def __init__(self, method: HasCalls, about: Mapping[str, About], all_sites: bool = True) -> None:
        self._method, self._about, self._all_sites = method, about, all_sites
        first = next(iter(about.values()), None)
        start = first.network.state_dict() if first is not None else {}
        self._start = {name: tensor.detach().cpu() for name, tensor in start.items()}
        self._models = TensorCheck(self._start)

    @property
    def start(self) -> Weights:
        """The model that the run starts from."""
        return Weights(self._start)

    @property
    def size(self) -> tuple[int, int]:
        """Bytes and number of the network's tensors."""
        return self.start.nbytes, len(self._start)

    def samples_of(self, site: str) -> int:
        """Training samples of a site, as it said when it joined."""
        return self._about[site].samples

    def most_tensors(self, sent: Mapping[str, Any]) -> int:
        """How many tensors a reply to a request of ``sent`` can have at most."""
        sent_tensors = sum(len(value) for _, value in leaves(sent) if isinstance(value, NamedTensors))
        return max(FEWEST_TENSORS, 2 * (sent_tensors + len(self._start) * (1 + len(self._about))))

    def check(
        self, call: str, site: str, kind: type[Reply], content: Mapping[str, Any], sent: Mapping[str, Any]
    ) -> Layout | None:
        """Check one reply.

        Returns the models in open fields, for `odd_ones`; None if there are none, or they are known to be right. Raises
        FedshiftError: the reply is not what the call promises. Raises TrainingDiverged: a tensor holds NaN or infinite
        numbers, or a model is too far from the one that was sent.
        """
        about = self._about[site]
        _check_types(kind, content)
        self._check_numbers(content, about)
        bounds: Bounds = self._method.calls.owner(call).bounds(call, about)
        for name, bound in bounds.items():
            _check_bound(name, content[name], bound)
        layout = self._models.check(call, kind, content, sent, bounds)
        for name, value in content.items():
            self._check_values(name, value, sent.get(name), name in bounds)
        return layout

    def check_field(self, call: str, kind: type[Reply], field: str, value: Any, sent: Mapping[str, Any]) -> None:
        """Check one field of a reply of any site, whose other fields are not here; arguments as for `check`.

        Raises FedshiftError: it is not what the call promises.
        """
        if not fits(value, field_types(kind).get(field, Weights)):
            raise FedshiftError(f"'{field}' of a {kind.__name__} cannot be a {type(value).__name__}")
        of_all: Bounds = self._method.calls.owner(call).bounds(call, next(iter(self._about.values())))
        bounds = {name: bound for name, bound in of_all.items() if name == field}
        for bound in bounds.values():
            _check_bound(field, value, bound)
        layout = self._models.check(call, kind, {field: value}, sent, bounds)
        odd = self._models.odd_ones(call, {"": layout}, 1) if layout is not None else {}
        for reason in odd.values():
            raise FedshiftError(reason)
        self._check_values(field, value, sent.get(field), field in bounds)

    def odd_ones(self, call: str, layouts: Mapping[str, Layout], asked: int) -> dict[str, str]:
        """Find the replies whose open fields differ from those of most sites, see `TensorCheck.odd_ones`."""
        return self._models.odd_ones(call, layouts, asked)

    def _check_numbers(self, content: Mapping[str, Any], about: About) -> None:
        samples = content.get("samples")
        if isinstance(samples, int) and not min(1, about.samples) <= samples <= about.samples:
            raise FedshiftError(f"it claims {samples} samples, of {about.samples}")
        for name, value in content.items():
            if not isinstance(value, Mapping) or isinstance(value, NamedTensors):
                continue
            strangers = [key for key in value if key not in self._about]
            if strangers and self._all_sites:
                raise FedshiftError(f"'{name}' has an entry for {strangers[0][:40]!r}, which is no site of this run")
        for path, value in leaves(content):
            if isinstance(value, str):
                text_bytes(path, value)

    def _check_values(self, name: str, value: Any, sent: Any, declared: bool) -> None:
        if isinstance(value, Mapping) and not isinstance(value, NamedTensors):
            for key, item in value.items():
                self._check_values(
                    f"{name}/{key}", item, sent.get(key) if isinstance(sent, Mapping) else None, declared
                )
            return
        if not isinstance(value, NamedTensors):
            return
        wrong = [str(tensor.dtype) for tensor in value.values() if tensor.dtype not in DTYPES]
        if wrong:
            raise FedshiftError(f"'{name}' holds numbers of the type {wrong[0]}, which does not travel")
        if isinstance(value, Weights) and not declared:  # what is declared has a range of its own
            _check_model(name, value, sent if isinstance(sent, Weights) else self._start)
        else:
            value.check_finite(f"'{name}'")


def _check_bound(name: str, value: Any, bound: Tensors | Between) -> None:
    """Raise FedshiftError unless a field holds what its method declares."""
    if isinstance(bound, Between):
        if not _within(value, bound):
            raise FedshiftError(f"'{name}' is {value:g}, not between {bound.low:g} and {bound.high:g}")
        return
    if bound.may_be_empty and not value:
        return
    if value.keys() != bound.shapes.keys():
        raise FedshiftError(f"'{name}' holds the tensors {_few(value)}, not {_few(bound.shapes)}")
    for key, expected in bound.shapes.items():
        tensor: Tensor = value[key]
        shape = tuple(tensor.shape)
        rows_fit = not expected or expected[0] is not None or (bool(shape) and 1 <= shape[0] <= bound.rows)
        sizes = shape if not expected or expected[0] is not None else (None, *shape[1:])
        if sizes != expected or not rows_fit or tensor.dtype != bound.dtype:
            of = f" with at most {bound.rows} rows" if None in expected else ""
            raise FedshiftError(f"'{name}/{key}' is {shape} {tensor.dtype}, not {expected} {bound.dtype}{of}")
        low, high = (number.item() for number in torch.aminmax(tensor))
        if not bound.low <= low <= high <= bound.high and math.isfinite(low + high):  # not finite: said in other words
            raise FedshiftError(f"'{name}/{key}' holds {low:g} to {high:g}, not {bound.low:g} to {bound.high:g}")


def _check_model(name: str, model: Weights, before: Mapping[str, Tensor]) -> None:
    """Check that training can lead to a model from ``before``, which the site began with.

    Raises FedshiftError: a running statistic or a counter is out of range. Raises TrainingDiverged: the model is too
    far away, or holds NaN or infinite numbers.
    """
    near = {
        key: (tensor, start.to(tensor.device))
        for key, tensor in model.items()
        if (start := before.get(key)) is not None  # None: a model of another kind, such as a gradient
        and (tensor.numel() and tensor.is_floating_point() and start.shape == tensor.shape and not is_buffer(key))
    }
    far = norm = 0.0
    for now, then in float64_pieces(near.values()):
        norm += torch.dot(then, then).item()
        gap = now - then
        far += torch.dot(gap, gap).item()
    if len(near) < len(model) or not math.isfinite(far):  # a finite sum has finite parts
        model.check_finite(f"'{name}'")
    for key, tensor in model.items():
        if key in near or not tensor.numel():
            continue
        if not tensor.is_floating_point():
            low, high = torch.aminmax(tensor)
            if low.item() < 0 or high.item() > LARGEST_COUNTER:
                _out_of_range(name, key, 0, LARGEST_COUNTER)
        elif is_buffer(key):
            spread = key.endswith("running_var")
            most, least = (LARGEST_VARIANCE, 0.0) if spread else (LARGEST_MEAN, -LARGEST_MEAN)
            low, high = torch.aminmax(tensor)
            if low.item() < least or high.item() > most:
                _out_of_range(name, key, least, most)
    if far**0.5 > GROWTH * (norm**0.5 + 1):
        raise TrainingDiverged(
            f"'{name}' is {far**0.5:.3g} away from the model that the site began with, whose norm is {norm**0.5:.3g}: "
            f"more than {GROWTH:g} times that norm plus 1; if the site is honest, lower training.lr"
        )


def _out_of_range(name: str, key: str, low: float, high: float) -> NoReturn:
    raise FedshiftError(f"'{name}': tensor '{key}' holds numbers that are not between {low:g} and {high:g}")


def _few(names: Collection[str]) -> str:
    shown = sorted(name[:40] for name in names)
    return f"{shown[:5]}" + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


# Models in replies ----------------------------------------------------------------------------------------------------


class TensorCheck:
    """Checks the models (`Weights`) in replies.

    If the request carried a field of the same name, the reply's tensors must have the same names, shapes and types. If
    not, the field is *open*. In an open field, tensors named as the network's must be the whole network. Other tensors
    (a single classifier, say) must be as in the replies of most sites of the exchange. So no single reply decides how
    the others must look.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._like = _layout_of(like)
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

        ``declared``: fields whose tensors the method declares, which are not looked at here. Returns the models in open
        fields, for `odd_ones`; None if there are none, or they are known to be right. Raises FedshiftError: a model
        differs from the one sent, an open field holds only a part of the network, or it differs from what sites agreed
        on in an earlier exchange.
        """
        hints = field_types(kind)
        unknown: dict[str, Described] = {}
        any_open = False
        for name, value in content.items():
            if name in declared or not _may_be_weights(hints.get(name)):
                continue
            if isinstance(value, NamedTensors) and not isinstance(value, Weights):
                continue
            models, expected = _models(name, value), _models(name, sent.get(name))
            if not expected:
                any_open = True
                for path, described in models.items():
                    self._check_open(path, described)
                unknown |= models
            elif models != expected:
                raise FedshiftError(f"'{_odd(models, expected)}' holds other tensors than the site was sent")
        if not any_open:
            return None
        layout, agreed = frozenset(unknown.items()), self._agreed.get(call)
        if agreed is not None and layout != agreed:
            raise FedshiftError(f"'{_odd(unknown, dict(agreed))}' holds other tensors than in replies before")
        return layout if agreed is None else None

    def _check_open(self, path: str, tensors: Described) -> None:
        """Raise FedshiftError if tensors share names with the network's, but are not exactly the network's."""
        result, of_network = dict(tensors), dict(self._like)
        for name in sorted(result.keys() & of_network.keys()):
            if result[name] != of_network[name]:
                (shape, dtype), (right, right_dtype) = result[name], of_network[name]
                raise FedshiftError(
                    f"'{path}': tensor '{name}' is {shape} {dtype}, the network's is {right} {right_dtype}"
                )
        if result.keys() & of_network.keys() and tensors != self._like:
            raise FedshiftError(f"'{path}' holds a part of the network's tensors, or others beside them")

    def odd_ones(self, call: str, layouts: Mapping[str, Layout], asked: int) -> dict[str, str]:
        """Find the replies whose open fields differ from those of most sites.

        In a tie, the layout that is the network, or a module of it, wins. If that decides nothing, all replies are
        refused, since nobody knows who is right. A layout that more than half of the sites asked have sent is also
        required in later exchanges of the call. A site that is asked alone must send the network, or a module of it:
        a method whose target sends other models declares them in its `bounds`.

        ``layouts``: the open fields of each reply, by site. Returns why a reply is refused, by site.
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
        prefixes = (full_name.removesuffix(name) for full_name, _ in self._like if full_name.endswith(f".{name}"))
        return any(
            tensors
            == {
                (full_name.removeprefix(prefix), rest) for full_name, rest in self._like if full_name.startswith(prefix)
            }
            for prefix in prefixes
        )


def _layout_of(tensors: Mapping[str, Tensor]) -> Described:
    return frozenset((name, (tuple(tensor.shape), tensor.dtype)) for name, tensor in tensors.items())


def _models(name: str, value: Any) -> dict[str, Described]:
    return {path: _layout_of(result) for path, result in leaves({name: value}) if isinstance(result, Weights)}


def _odd(layouts: Mapping[str, Described], expected: Mapping[str, Described]) -> str:
    """The first field in which two layouts differ."""
    return min(path for path in layouts.keys() | expected.keys() if layouts.get(path) != expected.get(path))


def _may_be_weights(kind: Any) -> bool:
    """Whether a field of this type can hold a model, or several by site."""
    if isinstance(kind, type) and issubclass(Weights, kind):
        return True
    return any(_may_be_weights(part) for part in typing.get_args(kind))
