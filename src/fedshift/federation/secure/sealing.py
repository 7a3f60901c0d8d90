"""Models that one site seals for another, so that the coordinator carries them and cannot read them.

HPKE (RFC 9180) of the package cryptography: X25519, HKDF-SHA256, ChaCha20-Poly1305. What is sealed is bound to its
passage: run, exchange, call, field, sender and receiver. HPKE says nothing of who sealed, so the sender signs, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedshift.encryption import read_private, write_private
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.federation.messages import Content, Sealed

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
except ImportError:
    raise UserError(
        "engine.routing: sealed needs the package cryptography, 47 or later: pip install 'fedshift[deploy]'"
    ) from None

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_KEY = 32
_MOST_OF_SENDER = 1 << 14
"""Bytes of a signature, or of a certificate."""
_BYTES_MORE = 1 << 16
_BYTES_OF_NAME = 2_000


@dataclass(frozen=True)
class Passage:
    """The way of one sealed model."""

    run: str
    exchange: int
    call: str
    field: str
    sender: str
    receiver: str

    @property
    def text(self) -> bytes:
        """What the model is sealed with, beside the key."""
        whole = [self.run, self.exchange, self.call, self.field, self.sender, self.receiver]
        return json.dumps(["fedshift sealed model 1", *whole]).encode()

    def signed_text(self, sealed: bytes) -> bytes:
        """What the sender signs."""
        return self.text + hashlib.sha256(sealed).digest()


class SealingKey:
    """The key of a run that others seal models with for one site."""

    def __init__(self, key: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(key)
        self.public = self._key.public_key().public_bytes_raw()

    @staticmethod
    def of(file: Path) -> SealingKey:
        """The key in a file, which is made if it is not there."""
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_private(file, os.urandom(_KEY))
        return SealingKey(read_private(file))

    def open(self, sealed: bytes, passage: Passage) -> bytes:
        """Decrypt a model.

        Raises:
            Refused: it was not sealed with this key, was changed, or was sealed for another passage.
        """
        try:
            return _SUITE.decrypt(sealed, self._key, info=passage.text)
        except (InvalidTag, ValueError):
            raise Refused(
                f"site '{passage.receiver}': the model of '{passage.sender}' was not sealed for this site's key and "
                f"for exchange {passage.exchange} of this run, or it was changed"
            ) from None


def key_text(run: str, site: str, public: bytes) -> bytes:
    """What a site signs of its key."""
    return json.dumps(["fedshift sealing key 1", run, site, public.hex()]).encode()


def seal_for(public: bytes, plain: bytes, passage: Passage) -> bytes:
    """Encrypt a model for the site that has the public key.

    Raises:
        Refused: the key is none.
    """
    try:
        return _SUITE.encrypt(plain, X25519PublicKey.from_public_bytes(public), info=passage.text)
    except ValueError:  # a point of low order, or of another length
        raise Refused(f"site '{passage.sender}': the key of '{passage.receiver}' is none") from None


def sealed_content(sealed: bytes, signature: bytes, certificate: bytes) -> Sealed:
    """A sealed model as content of a message."""
    return Sealed({"sealed": _tensor(sealed), "signature": _tensor(signature), "certificate": _tensor(certificate)})


def parts_of(content: Content | None, model_bytes: int, tensors: int) -> tuple[bytes, bytes, bytes]:
    """Sealed model, signature and certificate in content of a message.

    Args:
        content: what should be `sealed_content`.
        model_bytes: of the network.
        tensors: how many the network has.

    Raises:
        FedshiftError: it is none, or too large for a model.
    """
    most = {"sealed": 2 * model_bytes + _BYTES_MORE + _BYTES_OF_NAME * tensors}
    if not isinstance(content, Sealed) or set(content) != {"sealed", "signature", "certificate"}:
        raise FedshiftError("it holds no sealed model")
    for name, tensor in content.items():
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or len(tensor) > most.get(name, _MOST_OF_SENDER):
            raise FedshiftError("its sealed model is too large, or not made of bytes")
    sealed, signature, certificate = (
        content[name].numpy().tobytes() for name in ("sealed", "signature", "certificate")
    )
    return sealed, signature, certificate


def _tensor(data: bytes) -> Tensor:
    """uint8 (bytes,)."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
