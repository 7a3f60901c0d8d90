"""Keys of secure aggregation: one per site and run, signed by the site, and what two sites derive from theirs.

X25519 for agreement, HKDF with SHA-256 for what is derived, ChaCha20-Poly1305 for shares on their way through the
server: all from the package cryptography. Every derived key is bound to one sum by its *binding*, a digest of run,
exchange, call, roster and the content that was sent. So sites that were sent different models have different masks,
which do not cancel.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PlainSerializer

from fedshift.encryption import read_private, write_private
from fedshift.errors import Refused, UserError
from fedshift.federation.plain_values import Frozen
from fedshift.federation.secure.integer_sums import threshold

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise UserError(
        "deployment and secure aggregation need the package cryptography: pip install 'fedshift[deploy]'"
    ) from None

_NONCE = 12
_KEY = 32


@dataclass(frozen=True)
class KeyCard:
    """A site's public key for one run, with its signature over run, name and key, and the certificate (DER) of that."""

    site: str
    public: bytes
    signature: bytes
    certificate: bytes = b""


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: Any) -> bytes:
    if isinstance(text, bytes):  # made here: no JSON has bytes
        return text
    if not isinstance(text, str):
        raise ValueError("it is no text in base 64")
    return base64.b64decode(text, validate=True)


Encoded = Annotated[bytes, BeforeValidator(_decode), PlainSerializer(_text)]
"""Bytes that a message holds as text in base 64."""
KeyEntry = tuple[Encoded, Encoded, Encoded]
"""A key card without the site's name: key, signature, certificate."""


class KeyAnswer(Frozen):
    """What a site answers that is asked for its key of a run."""

    card: KeyEntry

    def of(self, site: str) -> KeyCard:
        """The card of the site that answered."""
        return KeyCard(site, *self.card)


@dataclass(frozen=True)
class Order:
    """What a sum is of: equal at all sites, or masks do not cancel.

    Attributes:
        call: the call whose replies are summed.
        content: SHA-256 of the content that was sent, in hexadecimal; each site computes it from what it got.
        cards: the key cards of the roster, by name in order.
        threshold: how many sites must tell shares; 0: more than half.
    """

    run: str
    exchange: int
    call: str
    content: str
    cards: tuple[KeyCard, ...]
    threshold: int = 0

    @property
    def needed(self) -> int:
        """How many sites must answer both exchanges."""
        return self.threshold or threshold(len(self.cards))

    @property
    def roster(self) -> tuple[str, ...]:
        """Names of the sites that were asked."""
        return tuple(card.site for card in self.cards)

    @property
    def binding(self) -> bytes:
        """The digest that all keys of the sum are bound to."""
        keys = [[card.site, card.public.hex()] for card in self.cards]
        whole = ["fedshift secure sum 2", self.run, self.exchange, self.call, self.content, keys, self.needed]
        return hashlib.sha256(json.dumps(whole).encode()).digest()


def signed_text(run: str, site: str, public: bytes) -> bytes:
    """What a site signs."""
    return json.dumps(["fedshift secure key 1", run, site, public.hex()]).encode()


def commitment(binding: bytes, secret: bytes) -> bytes:
    """A digest by which the server knows that shares gave the right secret. It does not show the 256 random bits."""
    return hashlib.sha256(b"seed" + binding + secret).digest()


class RunKey:
    """A site's own key of a run."""

    def __init__(self, key: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(key)
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def of(cls, file: Path) -> Self:
        """The key in a file, which is made if it is not there."""
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_private(file, os.urandom(_KEY))
        return cls(read_private(file, f"restore it, or delete {file.parent} and run again"))


class PrivateKey(RunKey):
    """The key of a run with which a site masks, and seals shares."""

    def mask_seed(self, order: Order, site: str, other: KeyCard) -> bytes:
        """s_uv, which both sites derive alike."""
        return self._derive(order, other, ["mask", *sorted((site, other.site))])

    def seal(self, order: Order, site: str, other: KeyCard, plain: bytes) -> bytes:
        """Encrypt shares of ``site`` for ``other``."""
        nonce = os.urandom(_NONCE)
        key = self._derive(order, other, ["shares", site, other.site])
        return nonce + ChaCha20Poly1305(key).encrypt(nonce, plain, order.binding)

    def open(self, order: Order, site: str, sender: KeyCard, sealed: bytes) -> bytes:
        """Decrypt what ``sender`` sealed for ``site``; Refused if it did not, or for another sum."""
        key = self._derive(order, sender, ["shares", sender.site, site])
        try:
            return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE], sealed[_NONCE:], order.binding)
        except (InvalidTag, ValueError):
            raise Refused(f"site '{site}': the shares of '{sender.site}' were not sealed for this sum") from None

    def confirmation(self, order: Order, sender: str, receiver: str, other: KeyCard, answered: Sequence[str]) -> bytes:
        """The code by which ``sender`` confirms to ``receiver`` who answered. Only these two can compute it.

        Args:
            other: the card of the one of the two that is not this site.
        """
        key = self._derive(order, other, ["confirm", sender, receiver])
        return hmac.digest(key, json.dumps(list(answered)).encode(), hashlib.sha256)

    def _derive(self, order: Order, other: KeyCard, purpose: Sequence[str]) -> bytes:
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(other.public))
        except ValueError:  # a point of low order, or of another length
            raise Refused(f"the key of site '{other.site}' is none") from None
        info = json.dumps(purpose).encode()
        return HKDF(algorithm=SHA256(), length=_KEY, salt=order.binding, info=info).derive(secret)


def same_keys(known: Mapping[str, str], cards: Sequence[KeyCard]) -> dict[str, str]:
    """The keys that a site has seen in a run, with those of ``cards``; Refused if one is another than before."""
    result = dict(known)
    for card in cards:
        if result.setdefault(card.site, card.public.hex()) != card.public.hex():
            raise Refused(
                f"site '{card.site}' has another key than before in this run; it counts as lost until the run ends"
            )
    return result
