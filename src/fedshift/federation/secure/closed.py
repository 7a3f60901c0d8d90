"""Sealed models where nobody can open them: their names, shapes and types are known, their numbers are not.

Server code has a sealed model as `Weights` whose tensors are `ClosedTensor`s. It can choose among them, rename them and
put them together with others, but not compute with them. So a method's server code is the same with and without seals.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, NonNegativeInt, TypeAdapter
from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.federation.messages import DTYPES, Content, Sealed
from fedshift.federation.plain_values import Frozen
from fedshift.weights import NamedTensors, Weights

Shape = tuple[str, str, tuple[int, ...]]
"""Name, type and size of a tensor."""
_PARTS = ("said", "sealed", "signature", "certificate")
_PLACES = "places"
_MOST_BOXES = 1000
_BYTES_MORE, _BYTES_OF_NAME = 1 << 16, 2_000
_SMALLEST = 5
"""Bytes of a sealed model are at least a fifth of its tensors': 8-bit wires have a quarter."""
_DTYPES = {str(dtype): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Passage:
    """The way of one sealed field of a reply."""

    run: str
    exchange: int
    call: str
    field: str
    sender: str
    readers: tuple[str, ...]

    @property
    def text(self) -> bytes:
        """What the models are sealed with, beside the key."""
        whole = [self.run, self.exchange, self.call, self.field, self.sender, sorted(self.readers)]
        return json.dumps(["fedshift sealed models 2", *whole]).encode()


def _check_dtype(dtype: str) -> str:
    if dtype not in _DTYPES:
        raise ValueError("there is no such type of tensors")
    return dtype


class _Said(Frozen):
    """What a box says of itself: its way, its keys as hexadecimal digits, and the tensors of each model."""

    way: tuple[str, int, str, str, str]
    keys: dict[str, tuple[str, str]]
    models: dict[str, list[tuple[str, Annotated[str, AfterValidator(_check_dtype)], tuple[NonNegativeInt, ...]]]]


_PLACES_OF_BOXES = TypeAdapter(list[tuple[NonNegativeInt, str, str]], config=ConfigDict(strict=True))


@dataclass(frozen=True, eq=False)
class Box:
    """What a site sealed of one reply: a model, or several by site."""

    passage: Passage  # where from, and for whom
    keys: Mapping[str, tuple[bytes, bytes]]  # reader → its public key, and the box's key sealed for it
    models: Mapping[str, Sequence[Shape]]  # how each model looks, by site; one model alone is under the empty name
    content: Mapping[str, Tensor]  # the parts as tensors of bytes (n,)

    @staticmethod
    def description(passage: Passage, keys: Mapping[str, tuple[bytes, bytes]], models: Mapping[str, Weights]) -> bytes:
        """What a box says of itself."""
        whole = {
            "way": [passage.run, passage.exchange, passage.call, passage.field, passage.sender],
            "keys": {reader: [public.hex(), key.hex()] for reader, (public, key) in sorted(keys.items())},
            "models": {
                site: [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in model.items()]
                for site, model in models.items()
            },
        }
        return json.dumps(whole).encode()

    @staticmethod
    def of(description: bytes, sealed: bytes, signature: bytes, certificate: bytes) -> Sealed:
        """A box as content of a message."""
        parts = zip(_PARTS, (description, sealed, signature, certificate), strict=True)
        return Sealed({name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in parts})

    @staticmethod
    def read(content: Content | None, most: int | None = None) -> Box:
        """The inverse of `of`.

        ``most``: the most bytes of it, see `most_bytes`; None: any number. Raises FedshiftError: it is no box, or too
        large.
        """
        if not isinstance(content, Sealed) or set(content) != set(_PARTS):
            raise FedshiftError("it holds no sealed model")
        for tensor in content.values():
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or (most is not None and len(tensor) > most):
                raise FedshiftError("its sealed model is too large, or not made of bytes")
        try:
            whole = _Said.model_validate_json(bytes_of(content["said"]))
            keys = {reader: (bytes.fromhex(public), bytes.fromhex(key)) for reader, (public, key) in whole.keys.items()}
        except ValueError:
            raise FedshiftError("a sealed model does not say what it is") from None
        shapes = [(_DTYPES[dtype], shape) for model in whole.models.values() for _, dtype, shape in model]
        nbytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes)
        if not 0 < nbytes <= _SMALLEST * len(content["sealed"]) + _BYTES_MORE:
            raise FedshiftError("a sealed model does not say what it is")
        return Box(Passage(*whole.way, tuple(keys)), keys, whole.models, dict(content))

    @staticmethod
    def text_to_sign(passage: Passage, description: bytes, sealed: bytes) -> bytes:
        """What the sender signs: from whom the box is, for whom, and its content."""
        return passage.text + hashlib.sha256(description).digest() + hashlib.sha256(sealed).digest()

    @property
    def signed_text(self) -> bytes:
        """`text_to_sign` of this box."""
        return self.text_to_sign(self.passage, bytes_of(self.content["said"]), bytes_of(self.content["sealed"]))

    def stand_ins(self) -> dict[str, Weights]:
        """Models of zeros that look like those inside, by site."""
        return {
            site: Weights({name: torch.zeros((), dtype=_DTYPES[dtype]).expand(shape) for name, dtype, shape in tensors})
            for site, tensors in self.models.items()
        }

    def closed_models(self) -> dict[str, Weights]:
        """The models inside as server code has them, by site."""
        return {
            site: Weights(
                {name: ClosedTensor((self, site, name), _DTYPES[dtype], shape) for name, dtype, shape in model}
            )
            for site, model in self.models.items()
        }


class ClosedTensor(Tensor):
    """A tensor of a sealed model: only its shape and type are known here.

    Attributes:
        origin: its box, the site's name of the model in it, and its own name in the model.
    """

    origin: tuple[Box, str, str]

    @staticmethod
    def __new__(cls, origin: tuple[Box, str, str], dtype: torch.dtype, shape: Sequence[int]) -> ClosedTensor:
        made: ClosedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.origin = origin
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ClosedTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kind, aten = func.overloadpacket, torch.ops.aten
        if kind in (aten.detach, aten.clone):
            return ClosedTensor(args[0].origin, args[0].dtype, args[0].shape)
        if kind is aten.zeros_like:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        raise FedshiftError("this model is sealed: the server may only hand it on, not read it")


class Package:
    """A model that has sealed parts, taken apart: boxes, and under which names each of their models stands.

    Attributes:
        boxes: each of them once.
        places: number of a box, name of a model in it, what its tensors' names begin with in the whole model.
    """

    def __init__(self, boxes: Sequence[Box], places: Sequence[tuple[int, str, str]]) -> None:
        self.boxes, self.places = boxes, places

    @staticmethod
    def of(weights: Weights) -> tuple[Package, Weights]:
        """Take a model apart into its sealed parts and what is in clear.

        Raises FedshiftError: it has a part of a sealed model, which nobody could open as such.
        """
        clear: dict[str, Tensor] = {}
        result: dict[tuple[int, str], dict[str, str]] = {}
        boxes: dict[int, Box] = {}
        for name, tensor in weights.items():
            if isinstance(tensor, ClosedTensor):
                box, model, inner = tensor.origin
                boxes[id(box)] = box
                result.setdefault((id(box), model), {})[inner] = name
            else:
                clear[name] = tensor
        places: list[tuple[int, str, str]] = []
        numbers = {key: number for number, key in enumerate(boxes)}
        for (key, model), names in result.items():
            inner, name = next(iter(names.items()))
            prefix = name.removesuffix(inner)
            whole = {name: f"{prefix}{name}" for name, _, _ in boxes[key].models[model]}
            if names != whole or sum(len(item) for item in result.values()) + len(clear) != len(weights):
                raise FedshiftError("this model is sealed: the server may only hand it on as a whole")
            places.append((numbers[key], model, prefix))
        return Package([*boxes.values()], places), Weights(clear)

    @property
    def content(self) -> Sealed:
        """The boxes and their places as content of a message."""
        places = torch.frombuffer(bytearray(json.dumps(self.places).encode()), dtype=torch.uint8)
        parts = {f"{n}|{name}": part for n, box in enumerate(self.boxes) for name, part in box.content.items()}
        return Sealed({_PLACES: places, **parts})

    @staticmethod
    def read(content: Content | None, most: int | None = None) -> Package:
        """The inverse of `content`; ``most`` bytes of each box. Raises FedshiftError: it is none."""
        if not isinstance(content, Sealed) or _PLACES not in content or len(content) > 1 + _MOST_BOXES * len(_PARTS):
            raise FedshiftError("it holds no sealed model")
        groups: dict[str, dict[str, Tensor]] = {}
        for name, part in content.items():
            number, _, inner = name.partition("|")
            if inner:
                groups.setdefault(number, {})[inner] = part
        try:
            if content[_PLACES].dtype != torch.uint8:
                raise ValueError
            places = _PLACES_OF_BOXES.validate_json(bytes_of(content[_PLACES]))
        except ValueError:
            raise FedshiftError("a sealed model does not say what it is") from None
        numbers = [str(number) for number in range(len(groups))]
        if set(groups) != set(numbers) or len({(number, model) for number, model, _ in places}) != len(places):
            raise FedshiftError("a sealed model does not say what it is")
        boxes = [Box.read(Sealed(groups[number]), most) for number in numbers]
        if any(number >= len(boxes) or model not in boxes[number].models for number, model, _ in places):
            raise FedshiftError("a sealed model does not say what it is")
        return Package(boxes, places)

    def whole(self, clear: Mapping[str, Tensor], models: Callable[[Box], Mapping[str, Weights]]) -> Weights:
        """The model put together again.

        ``models``: the models in a box, opened or closed. Raises FedshiftError: two tensors have one name.
        """
        opened = [models(box) for box in self.boxes]
        parts = [(prefix, opened[number][model]) for number, model, prefix in self.places]
        result = {f"{prefix}{name}": tensor for prefix, model in parts for name, tensor in model.items()}
        if len(result) != sum(len(model) for _, model in parts) or not result.keys().isdisjoint(clear):
            raise FedshiftError("a sealed model has two tensors of one name")
        return Weights({**clear, **result})

    def sites_in_order(self) -> list[str]:
        """Whose the models are, in the order of their places in the whole model."""
        places = sorted(self.places, key=lambda entry: _numbers(entry[2]))
        return [model or self.boxes[number].passage.sender for number, model, _ in places]


def _numbers(prefix: str) -> list[int]:
    """The numbers in a prefix, by which members.10 is after members.2."""
    return [int(number) for number in re.findall(r"\d+", prefix)]


def most_bytes(size: tuple[int, int], models: int) -> int:
    """The most bytes of a box with so many models, of a network of so many bytes and tensors (``size``)."""
    return _BYTES_MORE + (2 * size[0] + _BYTES_OF_NAME * (size[1] + 1)) * max(1, models)


def bytes_of(part: Tensor) -> bytes:
    """The bytes in a tensor (n,) of uint8."""
    data: bytes = part.numpy().tobytes()
    return data


def is_closed(weights: Mapping[str, Tensor]) -> bool:
    """Whether a model has sealed parts."""
    return any(isinstance(tensor, ClosedTensor) for tensor in weights.values())


def to_sendable(value: Any) -> Any:
    """Content as it is sent: what has sealed parts as packages.

    Raises FedshiftError: a model is sealed in part, which content of a message may not be.
    """
    if isinstance(value, Weights) and is_closed(value):
        package, clear = Package.of(value)
        if clear:
            raise FedshiftError("a model that is sealed in part can be measured and kept, but not sent to a call")
        return package.content
    if isinstance(value, Mapping) and not isinstance(value, NamedTensors):
        return {name: to_sendable(item) for name, item in value.items()}
    return value


def in_two(name: str, weights: Weights) -> dict[str, Content]:
    """A model as content of a message under a name: sealed parts by themselves, and what is in clear by itself."""
    if not is_closed(weights):
        return {name: weights}
    package, clear = Package.of(weights)
    return {name: package.content, f"{name} in clear": clear}


def in_one(name: str, content: Mapping[str, Content]) -> Content | None:
    """The inverse of `in_two`, with its sealed parts still closed; what is no model as it is.

    Raises FedshiftError: its sealed parts cannot be read.
    """
    result, clear = content.get(name), content.get(f"{name} in clear")
    if not isinstance(result, Sealed):
        return result
    return Package.read(result).whole(clear if isinstance(clear, Weights) else {}, Box.closed_models)
