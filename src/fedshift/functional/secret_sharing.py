"""Shamir's secret sharing: any `threshold` of the shares give the secret back, fewer tell nothing about it.

Shamir: How to Share a Secret. Communications of the ACM 22(11), 1979. Python's integers do not take the same time for
all values, so whoever can time a site's arithmetic precisely could learn about shares; the coordinator cannot.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence

from fedshift.errors import FedshiftError

PRIME = 2**256 + 297
"""The smallest prime above 2^256: every 32-byte secret is below it."""
SECRET_BYTES = 32
SHARE_BYTES = 33


def split_secret(secret: bytes, holders: int, threshold: int) -> list[bytes]:
    """Shares of a secret: the values at 1, 2, … of a random polynomial of degree ``threshold − 1`` through it.

    ``secret``: 32 bytes. ``holders``: how many shares. ``threshold``: how many of them are needed, 1 to ``holders``.

    Example:
        >>> shares = split_secret(b"x" * 32, holders=3, threshold=2)
        >>> join_shares({1: shares[0], 3: shares[2]}, threshold=2) == b"x" * 32
        True
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= holders:
        raise FedshiftError("a secret has 32 bytes, and a threshold is at least 1 and at most the number of holders")
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value_at(coefficients, index).to_bytes(SHARE_BYTES) for index in range(1, holders + 1)]


def join_shares(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret that shares belong to. Shares beyond the threshold are checked against it.

    ``shares``: the share at each place, 1 to the number of holders. ``threshold``: as in `split_secret`. Raises
    FedshiftError: there are too few shares, or they do not fit together.

    Example:
        >>> line = {1: (5).to_bytes(33), 2: (7).to_bytes(33)}  # 3 + 2x
        >>> int.from_bytes(join_shares(line, threshold=2))
        3
    """
    places = sorted(shares)
    if len(places) < threshold:
        raise FedshiftError(f"a secret needs {threshold} shares, {len(places)} were given")
    values = {index: int.from_bytes(shares[index]) for index in places}
    if any(len(shares[index]) != SHARE_BYTES or values[index] >= PRIME for index in places):
        raise FedshiftError("a share is no number below the prime")
    used = places[:threshold]
    for index in (0, *places[threshold:]):
        factors = _lagrange(tuple(used), index)
        result = sum(factor * values[at] for factor, at in zip(factors, used, strict=True)) % PRIME
        if index == 0:
            secret = result
        elif result != values[index]:
            raise FedshiftError("the shares of a secret do not fit together")
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise FedshiftError("the shares of a secret do not fit together")
    return secret.to_bytes(SECRET_BYTES)


def _value_at(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


@functools.lru_cache(1024)  # the same for all secrets that the same holders share
def _lagrange(places: tuple[int, ...], at: int) -> tuple[int, ...]:
    """The factors of the values at ``places`` in the value ``at`` another place."""
    factors = []
    for position in places:
        above = below = 1
        for other in places:
            if other != position:
                above = above * (at - other) % PRIME
                below = below * (position - other) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
