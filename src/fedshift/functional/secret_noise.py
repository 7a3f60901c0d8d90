"""Random numbers that only the holder of a secret can draw: ChaCha20's key stream as uniform and normal numbers."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedshift.errors import UserError

SECRET_BYTES = 32


class SecretStream:
    """An endless stream of random numbers for one purpose. The same secret and purpose give the same numbers.

    ``secret``: 32 bytes of the operating system. ``purpose``: what the numbers are for; each purpose has a key of its
    own, HMAC-SHA256(secret, purpose). Raises UserError: the package cryptography is not installed.

    Example:
        >>> one, again, other = (SecretStream(b"s" * 32, purpose) for purpose in ("noise", "noise", "batches"))
        >>> first = one.uniform(3)
        >>> bool((first == again.uniform(3)).all()), bool((first == other.uniform(3)).any())
        (True, False)
    """

    def __init__(self, secret: bytes, purpose: str) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
        except ImportError:
            raise UserError(
                "noise from a secret needs the package cryptography: pip install 'fedshift[deploy]'"
            ) from None
        key = hmac.digest(secret, purpose.encode(), hashlib.sha256)
        self._cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    def uniform(self, number: int) -> Tensor:
        """``number`` float64 in [0, 1), each a multiple of 2⁻⁵³."""
        bits = np.frombuffer(self._cipher.update(bytes(8 * number)), dtype="<u8")
        return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal float64, by the formula of Box and Muller."""
        number = math.prod(shape)
        half = -(-number // 2)
        drawn = self.uniform(2 * half)
        radius, angle = (-2 * (1 - drawn[:half]).log()).sqrt(), 2 * math.pi * drawn[half:]
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:number].reshape(tuple(shape))


Source = torch.Generator | SecretStream
"""Where random numbers come from: a seed that others may know, or a secret."""


def uniform(number: int, source: Source) -> Tensor:
    """``number`` float64 in [0, 1).

    Example:
        >>> drawn = uniform(1000, torch.Generator().manual_seed(0))
        >>> drawn.dtype, bool(drawn.min() >= 0), bool(drawn.max() < 1), round(drawn.mean().item(), 1)
        (torch.float64, True, True, 0.5)
    """
    if isinstance(source, SecretStream):
        return source.uniform(number)
    return torch.rand(number, generator=source, dtype=torch.float64)


def normal(shape: Sequence[int], source: Source) -> Tensor:
    """Standard normal float64.

    Example:
        >>> drawn = normal((50, 200), torch.Generator().manual_seed(0))
        >>> drawn.shape, bool(drawn.mean().abs() < 0.1), round(drawn.std().item(), 1)
        (torch.Size([50, 200]), True, 1.0)
    """
    if isinstance(source, SecretStream):
        return source.normal(shape)
    return torch.randn(tuple(shape), generator=source, dtype=torch.float64)
