"""Models that a site seals for others or for itself, so that the coordinator carries them and cannot read them.

Models are encrypted with a key that is used once (ChaCha20-Poly1305), and that key for each reader with HPKE (RFC 9180:
X25519, HKDF-SHA256, ChaCha20-Poly1305), both of the package cryptography. What is sealed is bound to its passage: run,
exchange, call, field, sender and readers. HPKE says nothing of who sealed, so the sender signs, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from fedshift.deploy.crypto.keys import RunKey
from fedshift.errors import Refused, UserError
from fedshift.federation.secure.closed import Box, Passage, bytes_of
from fedshift.weights import Weights

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
except ImportError:
    raise UserError(
        "engine.routing: sealed needs the package cryptography, 47 or later: pip install 'fedshift[deploy]'"
    ) from None

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_KEY = 32
_NONCE = bytes(12)
"""The key of a box is used once, so its nonce need not differ."""


class SealingKey(RunKey):
    """The key of a run that others seal models with for one site."""

    def open(self, box: Box, reader: str) -> bytes:
        """Decrypt what is in a box; Refused if it was changed, or sealed with another key or for another passage."""
        way = box.passage
        try:
            public, wrapped = box.keys.get(reader, (b"", b""))
            if public != self.public:
                raise ValueError
            secret = _SUITE.decrypt(wrapped, self._key, info=_purpose(way, reader))
            return ChaCha20Poly1305(secret).decrypt(_NONCE, bytes_of(box.content["sealed"]), way.text)
        except (InvalidTag, ValueError):
            raise Refused(
                f"site '{reader}': the model of '{way.sender}' was not sealed for this site's key, or it was changed"
            ) from None


def key_text(run: str, site: str, public: bytes) -> bytes:
    """What a site signs of its key."""
    return json.dumps(["fedshift sealing key 1", run, site, public.hex()]).encode()


def seal_for(
    keys: Mapping[str, bytes], plain: bytes, passage: Passage, models: Mapping[str, Weights]
) -> tuple[bytes, bytes]:
    """Encrypt models with a key that is used once, and that key for each reader.

    Args:
        models: the models by site, whose looks are told in clear.

    Returns:
        What the box says of itself, and what is sealed.

    Raises:
        Refused: a key is none.
    """
    secret = os.urandom(_KEY)
    wrapped: dict[str, tuple[bytes, bytes]] = {}
    for reader, public in keys.items():
        try:
            reader_key = X25519PublicKey.from_public_bytes(public)
            wrapped[reader] = public, _SUITE.encrypt(secret, reader_key, info=_purpose(passage, reader))
        except ValueError:  # a point of low order, or of another length
            raise Refused(f"site '{passage.sender}': the key of '{reader}' is none") from None
    return Box.description(passage, wrapped, models), ChaCha20Poly1305(secret).encrypt(_NONCE, plain, passage.text)


def _purpose(passage: Passage, reader: str) -> bytes:
    """What the key of a box is sealed for."""
    return passage.text + json.dumps(reader).encode()
