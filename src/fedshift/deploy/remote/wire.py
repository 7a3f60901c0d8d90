"""Messages as they cross a network: a header of plain values, a body of bytes, and a digest over both.

All requests and replies are written and read here, so everything that a stranger could send is decoded in one place.
Only JSON and safetensors are parsed. ``wire`` is how weights travel: as they are, as bfloat16, or as 8-bit integers
with one scale per 256 numbers. Rounded weights are packed into one flat array per model, with a manifest of names,
types and shapes. The sender can keep the rounding residual and add it to its next message (error feedback: Seide et
al., 1-bit SGD, Interspeech 2014).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.federation.messages import MOST_TENSORS, Content, decode, encode, json_of, pieces
from fedshift.weights import NamedTensors, Weights

Wire = Literal["float32", "bf16", "int8"]
Residuals = dict[str, Tensor]
"""The rounding residual of each field that was sent, flat bfloat16 (n,)."""

LARGEST_HEADER = 1 << 20
"""Characters of an answer's header. Reading JSON takes time, and a site may send any."""
LARGEST_CARD = 16 << 20
"""Characters of the header of a site's card, and of a request: they name the columns of a table."""
LARGEST_LAYOUT = 32 << 20
"""Bytes in which a message's body describes its tensors."""
BLOCK = 256
"""Numbers that share one scale in 8-bit weights."""
_PIECE = 1024 * BLOCK
_KEPT = "="
_MOST_SIZES = 8
"""Sizes in the shape of a packed tensor."""
_FLOATS = {str(kind): kind for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class Message:
    """One message: ``header`` is JSON text, ``body`` safetensors bytes, ``digest`` SHA-256 over both."""

    header: str
    body: bytes
    digest: str

    @property
    def size(self) -> int:
        """Bytes that cross the network, without the transport's own framing."""
        return len(self.header.encode(errors="replace")) + len(self.body) + len(self.digest)


@dataclass(frozen=True)
class Body:
    """Content as bytes, for all sites that get the same. ``content`` is what crosses, as the ledger counts it."""

    data: bytes
    sha256: str
    content: Mapping[str, Content]


def body_of(content: Mapping[str, Content], wire: Wire = "float32", residuals: Residuals | None = None) -> Body:
    """Write ``content`` as bytes. ``residuals``, if given, are added before rounding and replaced by the new ones."""
    crossing, manifest = narrow(content, wire, residuals)
    data = encode(crossing, {"packed": manifest})
    return Body(data, hashlib.sha256(data).hexdigest(), crossing)


def seal(header: Mapping[str, Any], body: Body) -> Message:
    """Make the message that is sent."""
    text = json.dumps(header, allow_nan=False)
    return Message(text, body.data, _digest(text, body.sha256))


def reseal(message: Message, body: Body) -> Message:
    """A message with another body."""
    return Message(message.header, body.data, _digest(message.header, body.sha256))


def unseal(
    message: Message, most_tensors: int = MOST_TENSORS, largest_header: int = LARGEST_CARD
) -> tuple[dict[str, Any], dict[str, Content], dict[str, Content]]:
    """Read a message: header, content, and the content as it crossed; FedshiftError if `seal` did not write it."""
    if not (isinstance(message.header, str) and isinstance(message.body, bytes) and isinstance(message.digest, str)):
        raise FedshiftError("a message is not a header of text, a body of bytes and a digest")
    if len(message.header) > largest_header:
        raise FedshiftError(f"a message's header has {len(message.header):,} characters, of at most {largest_header:,}")
    if _digest(message.header, hashlib.sha256(message.body).hexdigest()) != message.digest:
        raise FedshiftError("a message was changed on its way: its digest is wrong")
    try:
        header = json_of(message.header)
    except (ValueError, RecursionError) as error:
        raise FedshiftError("a message's header cannot be read") from error
    if not isinstance(header, dict):
        raise FedshiftError("a message's header is not a mapping")
    content, packed = decode(message.body, most_tensors, LARGEST_LAYOUT)
    list(pieces(content))  # nothing but what may travel
    return header, widen(content, packed.get("packed"), most_tensors), content


def error_answer(request: Message | None, error: Exception) -> Message:
    """The answer to a request that failed.

    It must not show a site's samples. So it holds the public text of a FedshiftError, and only the type of any other
    error.
    """
    kind, text = "FedshiftError", f"the site's process failed ({type(error).__name__}); see the site's own log"
    if isinstance(error, FedshiftError):
        kind, text = type(error).__name__, error.public
    try:
        key = json.loads(request.header).get("key") if request and len(request.header) <= LARGEST_CARD else None
    except (ValueError, AttributeError, TypeError, RecursionError):
        key = None
    return seal({"error": kind, "message": text, "answers": key if isinstance(key, str) else None}, body_of({}))


def _digest(header: str, body_sha256: str) -> str:
    return hashlib.sha256(f"{body_sha256}\n{header}".encode(errors="replace")).hexdigest()


# Narrow numbers -------------------------------------------------------------------------------------------------------


def narrow(
    content: Mapping[str, Content], wire: Wire, residuals: Residuals | None = None
) -> tuple[dict[str, Content], dict[str, Any]]:
    """Round the float tensors of every `Weights` and pack them into one flat array. Returns the content as it crosses
    the network, and the manifest that `widen` needs."""
    if wire == "float32":
        return dict(content), {}
    manifest: dict[str, Any] = {}
    return {name: _narrow(name, value, wire, residuals, manifest) for name, value in content.items()}, manifest


def _narrow(path: str, value: Any, wire: Wire, residuals: Residuals | None, manifest: dict[str, Any]) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, NamedTensors):
        return {key: _narrow(f"{path}/{key}", item, wire, residuals, manifest) for key, item in value.items()}
    if not isinstance(value, Weights):
        return value
    floats = {name: tensor for name, tensor in value.items() if str(tensor.dtype) in _FLOATS and tensor.numel()}
    if not floats:
        return value
    flat = torch.cat([tensor.detach().cpu().reshape(-1).to(torch.float32) for tensor in floats.values()])
    before = residuals.get(path) if residuals is not None else None
    sent, left = _round(flat, wire, before if before is not None and len(before) == len(flat) else None)
    if residuals is not None:
        residuals[path] = left
    manifest[path] = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in floats.items()]
    kept = {f"{_KEPT}{name}": tensor for name, tensor in value.items() if name not in floats}
    return Weights({**sent, **kept})


def widen(content: Mapping[str, Content], manifest: Any, most_tensors: int = MOST_TENSORS) -> dict[str, Content]:
    """The inverse of `narrow`, up to rounding. Sizes are compared before anything is widened. FedshiftError if the
    manifest does not fit, or names more than ``most_tensors`` tensors."""
    if not manifest:
        return dict(content)
    try:
        if sum(len(parts) for parts in manifest.values()) > most_tensors:
            raise FedshiftError("a manifest names too many tensors")
        return {name: _widen(name, value, dict(manifest)) for name, value in content.items()}
    except Exception as error:
        raise FedshiftError("a message's packed weights do not fit their manifest") from error


def _widen(path: str, value: Any, manifest: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, NamedTensors):
        return {key: _widen(f"{path}/{key}", item, manifest) for key, item in value.items()}
    if path not in manifest or not isinstance(value, Weights):
        return value
    sizes = [_size(shape) for _, _, shape in manifest[path]]
    flat = _flat_of(value, sum(sizes))
    tensors = {
        name: part.to(_FLOATS[dtype]).reshape(shape).clone()
        for (name, dtype, shape), part in zip(manifest[path], torch.split(flat, sizes), strict=True)
    }
    kept = {name.removeprefix(_KEPT): tensor for name, tensor in value.items() if name.startswith(_KEPT)}
    return Weights({**tensors, **kept})


def _size(shape: Any) -> int:
    """Numbers in a tensor that was packed, which is never empty."""
    if not isinstance(shape, list) or len(shape) > _MOST_SIZES:
        raise FedshiftError("a manifest's shape is no list of a few sizes")
    if not all(type(size) is int and size > 0 for size in shape):
        raise FedshiftError("a manifest's shape holds something else than sizes")
    return math.prod(shape)


def _round(flat: Tensor, wire: Wire, residual: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """Round ``flat`` plus the residual from before, in pieces that fit the processor's cache.

    Returns the rounded array, and its residual in bfloat16, which is small and takes half the memory of float32.
    ``flat``: float32 (n,); overwritten. ``residual``: bfloat16 (n,).
    """
    left = torch.empty(len(flat), dtype=torch.bfloat16)
    if wire == "bf16":
        sent = {"bf16": torch.empty_like(left)}
    else:
        sent = {"int8": torch.empty(len(flat), dtype=torch.int8), "scales": torch.empty(-(-len(flat) // BLOCK))}
    for begin in range(0, len(flat), _PIECE):
        here = slice(begin, begin + _PIECE)
        part = flat[here]
        if residual is not None:
            part += residual[here]
        if wire == "bf16":
            sent["bf16"][here] = part
            part -= sent["bf16"][here]
        else:
            piece = _to_int8(part)
            sent["int8"][here] = piece["int8"]
            sent["scales"][begin // BLOCK : (begin + _PIECE) // BLOCK] = piece["scales"]
            part -= _flat_of(piece, len(part))
        left[here] = part
    return sent, left


def _to_int8(flat: Tensor) -> dict[str, Tensor]:
    """Round blocks of 256 numbers to integers −127…127, with one float32 scale per block."""
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)
    scale = blocks.abs().amax(dim=1) / 127
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    values = torch.round(blocks / steps[:, None]).clamp_(-127, 127).to(torch.int8)
    return {"int8": values.reshape(-1)[: len(flat)].clone(), "scales": scale}


def _flat_of(sent: Mapping[str, Tensor], length: int) -> Tensor:
    """The numbers that a receiver reads from a rounded array, float32 (length,)."""
    array, kind = (sent["bf16"], torch.bfloat16) if "bf16" in sent else (sent["int8"], torch.int8)
    fits = array.dtype == kind and array.shape == (length,)
    if kind == torch.int8:  # scales of another number would be repeated for every block, or for one
        scales = sent["scales"]
        fits = fits and scales.dtype == torch.float32 and scales.shape == (-(-length // BLOCK),)
    if not fits:
        raise FedshiftError("a message's packed weights have another length or type than their manifest says")
    if kind == torch.bfloat16:
        return array.to(torch.float32)
    blocks = torch.nn.functional.pad(array.to(torch.float32), (0, -length % BLOCK))
    return (blocks.reshape(-1, BLOCK) * scales[:, None]).reshape(-1)[:length]
