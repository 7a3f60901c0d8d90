"""Content that may travel between sites and server, and how it is written as bytes.

Every piece of content has a *kind*, which its type in a call's signature shows. The ledger counts bytes by kind, and a
site's policy may refuse a kind. Messages are safetensors with a JSON header. There is no pickle, so reading a message
never runs code.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from safetensors.torch import save_file
from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.weights import NamedTensors, Weights

NUMBERS = "numbers"
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Number types that may travel. torch cannot compute the extremes of others, such as 8-bit floats."""
_DTYPES = frozenset(("F32", "F64", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"))
"""Their names in safetensors."""
MOST_TENSORS = 100_000
"""The most tensors in one message."""
_BYTES_OF_NAME = 2_000
"""Bytes that a message may use to name and describe one tensor."""
BYTES_PER_NUMBER = 8
LONGEST_TEXT = 64
LARGEST_INTEGER = 2**53
"""Larger integers from a site are refused, since they would overflow where they become floats."""
LARGEST_NUMBER = 3.4028235e38
"""The largest float32. A loss beyond it is no loss, and a sum of such numbers would overflow."""


class Statistics(NamedTensors):
    """Summaries over many samples: means, variances, counts, class centroids."""

    kind: ClassVar[str] = "statistics"


class Styles(NamedTensors):
    """Styles of single images or of all images of a site: a few numbers per channel."""

    kind: ClassVar[str] = "styles"


class Spectra(NamedTensors):
    """Amplitude spectra of single images. They reveal something of each image."""

    kind: ClassVar[str] = "spectra"


class Features(NamedTensors):
    """A network's outputs for single samples, or gradients with respect to them. They reveal something of each."""

    kind: ClassVar[str] = "features"


class RawData(NamedTensors):
    """Samples themselves. Only pooled methods move them, and the ledger counts them."""

    kind: ClassVar[str] = "raw_data"


class Masked(NamedTensors):
    """What a site adds to a sum under secure aggregation: integers that reveal nothing without the other sites'."""

    kind: ClassVar[str] = "masked"


class Sealed(NamedTensors):
    """A model that one site sealed for another: bytes that only the receiver can open."""

    kind: ClassVar[str] = "sealed"


KINDS: dict[str, type[NamedTensors]] = {
    cls.kind: cls for cls in (Weights, Statistics, Styles, Spectra, Features, RawData, Masked, Sealed)
}

Number = int | float | bool | str
Content = NamedTensors | Number | Mapping[str, "NamedTensors | Number"]
"""One piece of content: named tensors, a number, or several of these by site name."""


@dataclass(frozen=True)
class PerSite:
    """Content that differs between the sites asked: ``PerSite({"a": for_a, "b": for_b})``."""

    of: Mapping[str, Content]


@dataclass(frozen=True)
class Between:
    """The range of a number, ends included."""

    low: float
    high: float


Share = Annotated[float, Between(0, 1)]
"""A part of a whole."""
NotNegative = Annotated[float, Between(0, LARGEST_NUMBER)]
Count = Annotated[int, Between(0, LARGEST_INTEGER)]


@dataclass(frozen=True)
class Reply:
    """Base class of what a call returns: a frozen dataclass whose fields are typed content."""


@dataclass(frozen=True)
class Update(Reply):
    """The usual reply of a training call: the trained model, the number of training samples, the mean loss."""

    weights: Weights
    samples: Count
    loss: float


def pieces(content: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """List the pieces of ``content`` as ``(field, kind, bytes)``.

    Raises FedshiftError: a value is of a type that may not travel, or a text is too long.
    """
    for name, value in content.items():
        if isinstance(value, NamedTensors):
            yield name, value.kind, value.nbytes
        elif isinstance(value, bool | int | float):
            yield name, NUMBERS, BYTES_PER_NUMBER
        elif isinstance(value, str):
            yield name, NUMBERS, text_bytes(name, value)
        elif isinstance(value, Mapping):
            yield from ((name, kind, size) for _, kind, size in pieces(value))
        else:
            raise FedshiftError(
                f"'{name}' is a {type(value).__name__}, which may not travel: wrap tensors in Weights, Statistics, "
                "Spectra or Features, or send a number"
            )


def text_bytes(name: str, value: str) -> int:
    """The bytes of a text.

    Raises FedshiftError: it is too long, or holds halves of characters, which cannot be written as UTF-8.
    """
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise FedshiftError(f"'{name}' is a text that is not Unicode") from None
    if size > LONGEST_TEXT:
        raise FedshiftError(f"'{name}' is a text of {len(value)} characters: only short names travel as numbers")
    return size


def leaves(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """List the named tensors and numbers in ``content`` with their paths, such as ``models/north``."""
    for name, value in content.items():
        if isinstance(value, Mapping) and not isinstance(value, NamedTensors):
            yield from leaves(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def reply_content(reply: Reply) -> dict[str, Content]:
    """The fields of a reply by name; nothing is copied."""
    return {field.name: getattr(reply, field.name) for field in fields(reply)}


def reply_class(call: Callable[..., Any]) -> type[Reply] | None:
    """The reply class in a call's return annotation; None where there is none."""
    try:
        kind = typing.get_type_hints(call).get("return")
    except NameError:
        return None
    return kind if isinstance(kind, type) and issubclass(kind, Reply) else None


def field_types(reply: type[Reply]) -> dict[str, Any]:
    """The types of a reply's fields with their ranges, by field; none for a class whose types cannot be looked up."""
    if reply not in _FIELD_TYPES:  # looking them up takes longer than checking a small reply
        try:
            hints = typing.get_type_hints(reply, include_extras=True)
            _FIELD_TYPES[reply] = {field.name: hints[field.name] for field in fields(reply)}
        except NameError:  # a class made inside a function
            _FIELD_TYPES[reply] = {}
    return _FIELD_TYPES[reply]


_FIELD_TYPES: dict[type[Reply], dict[str, Any]] = {}


_PROMISED: dict[type[Reply], Mapping[str, str]] = {}


def promised_kinds(reply: type[Reply]) -> Mapping[str, str]:
    """The kind of each field of a reply class, by field. Fields whose type does not tell the kind are left out."""
    if reply not in _PROMISED:  # every site asks
        _PROMISED[reply] = _promised_kinds(reply)
    return _PROMISED[reply]


def _promised_kinds(reply: type[Reply]) -> dict[str, str]:
    try:
        hints = typing.get_type_hints(reply)
    except NameError:
        return {}
    result: dict[str, str] = {}
    for part in fields(reply):
        kind, origin = hints[part.name], typing.get_origin(hints[part.name])
        if isinstance(origin, type) and issubclass(origin, Mapping):
            kind = typing.get_args(kind)[1]
        if not isinstance(kind, type) or kind is NamedTensors:
            continue
        if issubclass(kind, NamedTensors):
            result[part.name] = kind.kind
        elif issubclass(kind, bool | int | float | str):
            result[part.name] = NUMBERS
    return result


def encode(content: Mapping[str, Content], header: Mapping[str, object] | None = None) -> bytes:
    """Write ``content`` as safetensors bytes, with an optional JSON ``header``. `decode` is the exact inverse."""
    return save_tensors(*_parts(content, header))


def encode_file(path: Path, content: Mapping[str, Content]) -> None:
    """Write ``content`` to a file, without a copy in memory. `decode_file` is the exact inverse.

    Raises OSError, SafetensorError: the file cannot be written.
    """
    tensors, metadata = _parts(content)
    save_file(tensors, path, metadata)


def _parts(
    content: Mapping[str, Content], header: Mapping[str, object] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a message."""
    tensors: dict[str, Tensor] = {}
    layout: dict[str, object] = {}
    for name, value in content.items():
        layout[name] = _laid_out(name, value, tensors)
    # One metadata entry: safetensors writes several in any order, and equal messages must have equal bytes.
    metadata = {"message": json.dumps({"content": layout, "header": dict(header or {})})}
    return unshare(tensors), metadata


# This is not a closure inside `_parts`: a closure that calls itself is a reference cycle, which would keep every
# message's tensors in memory until the garbage collector runs.


def _laid_out(path: str, value: Any, tensors: dict[str, Tensor]) -> object:
    """Describe ``value`` as JSON and add its tensors to ``tensors``, under names that begin with ``path``."""
    if isinstance(value, NamedTensors):
        for key, tensor in value.items():
            tensors[f"{path}|{key}"] = tensor.detach().cpu().contiguous()
        return {"kind": value.kind, "keys": list(value)}
    if isinstance(value, Mapping):
        return {"by_site": {key: _laid_out(_below(path, key), item, tensors) for key, item in value.items()}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return {"number": value}


def decode(
    data: bytes, most_tensors: int = MOST_TENSORS, largest_layout: int | None = None
) -> tuple[dict[str, Content], dict[str, Any]]:
    """Read the content and header that `encode` wrote.

    ``most_tensors``: messages with more tensors are refused before any is read. ``largest_layout``: messages that
    describe their tensors in more bytes are refused before these are read. Raises FedshiftError: ``data`` is not such a
    message.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        most = min(len(data), _BYTES_OF_NAME * max(1000, most_tensors))
        if length > (most if largest_layout is None else min(most, largest_layout)):
            raise ValueError("the header is too long")
        described = json.loads(data[8 : 8 + length])
        metadata = described.pop("__metadata__")
        if len(described) > most_tensors or not _DTYPES.issuperset(item["dtype"] for item in described.values()):
            raise ValueError("too many tensors, or types that do not travel")
        if "message" in metadata:
            whole = json_of(metadata["message"])
            layout, header = whole["content"], whole["header"]
        else:  # a checkpoint of an older version
            layout, header = json.loads(metadata["content"]), json.loads(metadata["header"])
        tensors = load_tensors(data)
        return {name: _read(name, entry, tensors) for name, entry in layout.items()}, dict(header)
    except Exception as error:
        raise FedshiftError("a message is damaged or was not written by fedshift") from error


def decode_file(path: Path) -> dict[str, Content]:
    """The content of a file that `encode` filled. Its numbers stay in the file and are read when they are used."""
    with safe_open(path, framework="pt") as file:
        layout = json_of(file.metadata()["message"])["content"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    return {name: _read(name, entry, tensors) for name, entry in layout.items()}


def json_of(text: str) -> Any:
    """Read JSON.

    Raises ValueError: it is none, or has texts that cannot be written as UTF-8 (halves of characters, ``"\ud800"``).
    Raises RecursionError: it is nested too deeply.
    """
    text.encode()  # UnicodeEncodeError is a ValueError
    value = json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _read(path: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], inside: bool = False) -> Content:
    """The inverse of `_laid_out`: the content that ``entry`` describes. ``inside``: of a mapping by site."""
    if "kind" in entry:
        return KINDS[entry["kind"]]({key: tensors[f"{path}|{key}"] for key in entry["keys"]})
    if "by_site" in entry:
        if inside:
            raise FedshiftError(f"'{path}' is a mapping inside another one, which may not travel")
        return {
            key: _read(_below(path, key), item, tensors, inside=True)  # type: ignore[misc]
            for key, item in entry["by_site"].items()
        }
    if "float" in entry:
        return float(entry["float"])
    number: Number = entry["number"]
    if not isinstance(number, bool | int | float | str):  # the message may come from anybody
        raise FedshiftError(f"'{path}' is a {type(number).__name__}, which may not travel")
    return number


def _below(path: str, key: str) -> str:
    """The path of ``key`` below ``path``. Separators in ``key`` are escaped, so two paths are never equal."""
    return f"{path}/{key.replace('%', '%25').replace('/', '%2F').replace('|', '%7C')}"


def unshare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, copied where one shares memory with an earlier one, which safetensors refuses to write."""
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone(memory_format=torch.contiguous_format) if pointer in seen else tensor
        seen.add(pointer)
    return out


def known_kinds() -> tuple[str, ...]:
    """Every kind of content, as a policy may name it."""
    return (*KINDS, NUMBERS)
