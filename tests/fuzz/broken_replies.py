"""Mutations of replies: of every field, of the header, of how models are packed, and of the bytes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from replay import Told
from safetensors.torch import save
from torch import Tensor

from fedshift.deploy.remote.wire import Body, Message, body_of, narrow, seal
from fedshift.federation.messages import KINDS, Content, encode
from fedshift.weights import NamedTensors

Field = Callable[[Any, random.Random], Any]

TEXTS = ("", "north", "\ud800", "x" * 65, "x" * 5_000, "\x1b[2J", "../../x", "\0", "é" * 40, "$x$", "=1+1")
NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2**31, 2**53 + 1, 2**63, 10**400, -(10**400), True, False, None),
    *(0.5, -0.5, 1e6, 1e30, 1.7e308, -1.7e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *TEXTS,
)
DTYPES = (
    *(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
)
SHAPES = ((), (0,), (1,), (7,), (0, 3), (1, 1), (2, 3, 4), (1,) * 30, (50_000,))
VALUES = (float("nan"), float("inf"), 3e38, -3e38, 1e30, -1e30, 1e7, -1e7, 1e3, -1.0, 0.0, -0.0, 1e-45)


def broken(said: Told, content: dict[str, Content], honest: Body, draws: random.Random) -> Message:
    """One to three mutations of a reply; ``honest``: its content as bytes."""
    kind = draws.random()
    if kind < 0.6:
        for _ in range(draws.choice((1, 1, 1, 2, 3))):
            content = _fields(content, draws)
        return _sealed(said, _body(content, draws))
    if kind < 0.75:
        return _sealed(_header(said, draws), honest)
    if kind < 0.85:
        return _sealed(said, _packed(content, draws))
    return _bytes(_sealed(said, honest), draws)


def _fields(content: dict[str, Content], draws: random.Random) -> dict[str, Content]:
    """One field changed, or left out, added or renamed."""
    name = draws.choice(list(content)) if content else "x"
    what = draws.random()
    if what < 0.85 and content:
        return {**content, name: _value(content[name], draws)}
    rest = {key: value for key, value in content.items() if key != name}
    if what < 0.9:
        return rest
    return {**(rest if what < 0.95 else content), draws.choice(("more", *TEXTS)): content.get(name, 1)}


def _value(value: Any, draws: random.Random) -> Any:
    if draws.random() < 0.1:
        return draws.choice((*NUMBERS, {}, {"north": 1}, {"north": {"south": {"east": 1}}}, _some(draws)))
    if isinstance(value, NamedTensors):
        return _tensors(value, draws)
    if isinstance(value, Mapping):
        return _mapping(value, draws)
    return draws.choice(NUMBERS)


def _some(draws: random.Random) -> NamedTensors:
    """Tensors of any kind that nobody asked for."""
    return KINDS[draws.choice(list(KINDS))]({"x": torch.zeros(draws.choice(((), (1,), (3, 4))))})


def _mapping(value: Mapping[str, Any], draws: random.Random) -> dict[str, Any]:
    what, key = draws.random(), draws.choice(list(value) or ["north"])
    if what < 0.6 and value:
        return {**value, key: _value(value[key], draws)}
    if what < 0.75:
        return {name: item for name, item in value.items() if name != key}
    return {**value, draws.choice(("stranger", *TEXTS)): value.get(key, 0.5)}


def _tensors(value: NamedTensors, draws: random.Random) -> NamedTensors:
    """One tensor or all of them in another type, shape or name, or with other numbers."""
    tensors, kind = dict(value), type(value)
    what, name = draws.random(), draws.choice(list(tensors) or ["x"])
    if what < 0.05:
        kind = KINDS[draws.choice(list(KINDS))]
    elif what < 0.1:
        tensors.pop(name, None)
    elif what < 0.15:
        tensors[draws.choice(("more", "running_var", "a|b", *TEXTS))] = torch.zeros(3)
    elif what < 0.17:
        tensors = {f"{number}": torch.zeros(0) for number in range(draws.choice((0, 0, 0, 900, 1100)))}
    elif what < 0.22:
        tensors = {draws.choice(TEXTS): tensor for tensor in tensors.values()}
    else:
        chosen = list(tensors) if draws.random() < 0.3 else [name]
        change = draws.choice((_as_type, _in_shape, _with_values, _with_values, _with_one, _scaled))
        for one in chosen:
            tensors[one] = change(tensors.get(one, torch.ones(1)), draws)
    return kind(tensors)


def _as_type(tensor: Tensor, draws: random.Random) -> Tensor:
    return tensor.to(draws.choice(DTYPES))


def _in_shape(tensor: Tensor, draws: random.Random) -> Tensor:
    what = draws.randrange(5)
    if what == 0:
        return torch.zeros(draws.choice(SHAPES), dtype=tensor.dtype)
    if what == 1:
        return tensor[None].contiguous()
    if what == 2:
        return tensor.flatten()
    if what == 3 and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous()
    return torch.cat([tensor, tensor]) if tensor.dim() else tensor.repeat(3)


def _with_values(tensor: Tensor, draws: random.Random) -> Tensor:
    if not tensor.is_floating_point():
        return torch.full_like(tensor, draws.choice((-1, -(2**63), 2**63 - 1, 0)) if tensor.dtype == torch.int64 else 1)
    return torch.full(tensor.shape, draws.choice(VALUES)).to(tensor.dtype)


def _with_one(tensor: Tensor, draws: random.Random) -> Tensor:
    changed = tensor.float().clone()
    if changed.numel():
        changed = changed.flatten()
        changed[draws.randrange(changed.numel())] = draws.choice(VALUES)
    return changed.reshape(tensor.shape).to(tensor.dtype)


def _scaled(tensor: Tensor, draws: random.Random) -> Tensor:
    return (tensor.float() * draws.choice((-1, 0, 2, 10, 1000, 10**6))).to(tensor.dtype)


def _body(content: Mapping[str, Any], draws: random.Random) -> Body:
    """Content as bytes; what cannot be written as safetensors is left out of it."""
    wire = draws.choice((*["float32"] * 8, "bf16", "int8"))
    while True:
        try:
            return body_of(content, wire)
        except Exception:  # a type or a name that no sender can write
            if wire != "float32":
                wire = "float32"
                continue
            if not content:
                raise
            content = dict(list(content.items())[:-1])


def _packed(content: Mapping[str, Any], draws: random.Random) -> Body:
    """Models packed in 8 or 16 bits, with a manifest or an array that does not fit."""
    crossing, manifest = narrow(content, draws.choice(("int8", "bf16")))
    manifest = json.loads(json.dumps(manifest))
    if manifest:
        path = draws.choice(list(manifest))
        parts, what = manifest[path], draws.randrange(9)
        if what == 0:
            manifest[path] = parts + [["empty", "torch.float32", [0]]] * draws.choice((1, 1, 900, 1100))
        elif what == 1:
            manifest[path] = parts[:-1]
        elif what == 2:
            parts[0][2] = draws.choice(([-1], [2**40], [2**31, 2**31], [True], ["3"], None, 3, [1] * 1000, [1.0]))
        elif what == 3:
            parts[0][1] = draws.choice(("torch.float8_e4m3fn", "torch.float64", "", None, ["torch.float32"]))
        elif what == 4:
            parts[0][0] = draws.choice((*TEXTS, 3, None, ["a"]))
        elif what == 5:
            manifest = draws.choice(([], 3, "x", {"x": 3}, {path: 3}, {path: [[]]}, {path: None}))
        else:
            spoilt = dict(crossing[path.partition("/")[0]].items())
            key = draws.choice(list(spoilt))
            if isinstance(spoilt[key], Tensor):
                spoilt[key] = draws.choice((_in_shape, _as_type, _with_values))(spoilt[key], draws)
                crossing[path.partition("/")[0]] = type(crossing[path.partition("/")[0]])(spoilt)
    return _written(crossing, {"packed": manifest})


def _written(content: Mapping[str, Any], header: Mapping[str, Any]) -> Body:
    try:
        data = encode(content, header)
    except Exception:
        data = encode({}, {"packed": {}})
    return Body(data, hashlib.sha256(data).hexdigest(), content)


def _header(said: Told, draws: random.Random) -> Told:
    """Another header: claims, memory, another request's answer, or a forged error."""
    what = draws.randrange(4)
    if what == 0:
        return {
            **said,
            draws.choice(list(said)): draws.choice((*NUMBERS[:11], *TEXTS, {}, [], {"a": 1}, {"\ud800": "x"})),
        }
    if what == 1:
        error = draws.choice(
            ("Refused", "KindRefused", "TrainingDiverged", "UserError", "Lost", "", 3, None, "__init__")
        )
        told = draws.choice(("site 'south' refuses to send weights", "site 'west' diverged", *TEXTS, None, 3, {}))
        return {**said, "error": error, "message": told}
    if what == 2:
        return {
            **said,
            "memory": {f"{number}": "x" * draws.choice((1, 1000)) for number in range(draws.choice((1, 9, 300)))},
        }
    return {key: value for key, value in said.items() if key != draws.choice(list(said))}


def _sealed(said: Told, body: Body) -> Message:
    try:
        return seal(said, body)
    except ValueError:  # NaN, or halves of characters: written as another sender would
        text = json.dumps(said)
        return Message(text, body.data, _digest(text, body.data))


def _digest(header: str, body: bytes) -> str:
    return hashlib.sha256(f"{hashlib.sha256(body).hexdigest()}\n{header}".encode(errors="replace")).hexdigest()


def _bytes(message: Message, draws: random.Random) -> Message:
    """Bytes flipped, cut off or put in, in the body or the header; nearly always with a digest that fits."""
    body, header = bytearray(message.body), message.header
    what = draws.randrange(6)
    if what == 0:
        for _ in range(draws.choice((1, 3, 50))):
            body[draws.randrange(len(body))] = draws.randrange(256)
    elif what == 1:
        del body[draws.randrange(len(body)) :]
    elif what == 2:
        place = draws.randrange(min(len(body), 2000))  # where safetensors has its header
        body[place : place + draws.randrange(9)] = bytes(draws.randrange(256) for _ in range(draws.randrange(9)))
    elif what == 3:
        body[:8] = draws.choice((0, 2**63, 2**40, len(body), 7)).to_bytes(8, "little")
    elif what == 4:
        place = draws.randrange(len(header))
        header = header[:place] + draws.choice(("\ud800", "{" * 3000, "\\ud800", "[", '"', "9" * 5000)) + header[place:]
    else:
        names = {draws.choice(("x", "y")): torch.zeros(3)}
        body = bytearray(save(names, {"message": draws.choice(("", "{}", "[" * 5000, '{"content": 3, "header": {}}'))}))
    changed = bytes(body)
    digest = message.digest if draws.random() < 0.05 else _digest(header, changed)
    return Message(header, changed, digest)
