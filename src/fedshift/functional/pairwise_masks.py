"""Masks that cancel in a sum: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning.

CCS 2017, section 4. The masked input of site u is

    y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(s_uv) − Σ_{v<u} PRG(s_uv)   modulo 2^64

with a self mask of its own seed b_u, and a mask for every other site v of the roster, whose seed s_uv both know. In the
sum over all sites the pairwise masks cancel. The self masks of those that answered are taken off, and the pairwise
masks between them and those that did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedshift.errors import UserError

_PIECE = 1 << 15  # numbers: a quarter of a megabyte, which stays in the processor's cache


def add_stream(numbers: Tensor, seed: bytes, sign: int = 1) -> None:
    """Add (or with ``sign`` −1, take off) the key stream of ChaCha20 under ``seed``, in place.

    ``numbers``: int64 (n,), contiguous. ``seed``: 32 bytes, for one stream only: the nonce is always zero. ``sign``: 1
    or −1.

    Example:
        >>> numbers = torch.tensor([1, 2])
        >>> add_stream(numbers, b"s" * 32)
        >>> add_stream(numbers, b"s" * 32, sign=-1)
        >>> numbers
        tensor([1, 2])
    """
    stream = _stream(seed)
    if not len(numbers):
        return
    zeros = bytes(8 * min(_PIECE, len(numbers)))
    piece = bytearray(len(zeros))
    mask = torch.frombuffer(piece, dtype=torch.int64)
    for begin in range(0, len(numbers), _PIECE):
        part = numbers[begin : begin + _PIECE]
        stream.update_into(zeros, piece)  # the last piece may be longer than what is left
        if sign > 0:
            part += mask[: len(part)]
        else:
            part -= mask[: len(part)]


def add_masks(numbers: Tensor, site: str, own_seed: bytes, pair_seeds: Mapping[str, bytes]) -> Tensor:
    """y_u: a site's numbers under its masks.

    ``numbers``: x_u, int64 (n,). ``site``: u. ``own_seed``: b_u. ``pair_seeds``: s_uv by the name of v. Sites are
    ordered by name.

    Example:
        >>> first = add_masks(torch.tensor([1]), "a", b"1" * 32, {"b": b"p" * 32})
        >>> second = add_masks(torch.tensor([2]), "b", b"2" * 32, {"a": b"p" * 32})
        >>> total = first + second
        >>> unmask(total, [b"1" * 32, b"2" * 32], {})
        >>> total
        tensor([3])
    """
    out = numbers.clone()
    add_stream(out, own_seed)
    for other, seed in pair_seeds.items():
        add_stream(out, seed, _sign(site, other))
    return out


def unmask(
    total: Tensor,
    own_seeds: Iterable[bytes],
    pair_seeds: Mapping[tuple[str, str], bytes],
) -> None:
    """Take the masks off a sum of masked inputs, in place.

    ``total``: Σ y_u over the sites that answered, int64 (n,). ``own_seeds``: b_u of each of these. ``pair_seeds``: s_uv
    by (u, v): u answered, v of the roster did not.

    Example:
        >>> total = add_masks(torch.tensor([1]), "a", b"1" * 32, {"b": b"p" * 32})
        >>> unmask(total, [b"1" * 32], {("a", "b"): b"p" * 32})
        >>> total
        tensor([1])
    """
    for seed in own_seeds:
        add_stream(total, seed, -1)
    for (site, other), seed in pair_seeds.items():
        add_stream(total, seed, -_sign(site, other))


def _sign(site: str, other: str) -> int:
    return 1 if site < other else -1


def _stream(seed: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError:
        raise UserError("secure aggregation needs the package cryptography: pip install 'fedshift[deploy]'") from None
    return Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
