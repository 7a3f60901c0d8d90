"""Secure sums: the keys of sites, the protocol of masked sums at a site, and at the server that takes the masks off.

**Keys.** One per site and run, signed by the site: X25519 for agreement, HKDF with SHA-256 for what is derived,
ChaCha20-Poly1305 for shares on their way through the server, all from the package cryptography. Every derived key is
bound to one sum by its *binding*, a digest of run, exchange, call, roster and the content that was sent. So sites that
were sent different models have different masks, which do not cancel.

**At a site.** It masks its numbers once, and once helps to take masks off the sum. What it did is on its disk before
anything leaves, so neither a restart nor a coordinator that asks again makes it mask one update under two rosters, or
tell shares for two sets of survivors. Before sites tell shares they confirm to each other who answered: shares for
different sets, one set at each site, could together unmask a sum of too few.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import BeforeValidator, PlainSerializer
from torch import Tensor

from fedshift.encryption import read_private, write_private
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.federation.plain_values import Frozen
from fedshift.federation.secure.integer_sums import threshold
from fedshift.files import hold_lock, write_bytes
from fedshift.functional.pairwise_masks import add_masks, unmask
from fedshift.functional.secret_sharing import SECRET_BYTES, SHARE_BYTES, join_shares, split_secret
from fedshift.json_objects import read_object, write_object

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

    @property
    def entry(self) -> KeyEntry:
        """The card without the site's name, as it stands in a message."""
        return self.public, self.signature, self.certificate


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
    """What a sum is of: equal at all sites, or masks do not cancel."""

    run: str
    exchange: int
    call: str  # the call whose replies are summed
    content: str  # SHA-256 of the content that was sent, in hexadecimal; each site computes it from what it got
    cards: tuple[KeyCard, ...]  # the key cards of the roster, by name in order
    threshold: int = 0  # how many sites must tell shares; 0: more than half

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
        """The code by which ``sender`` confirms to ``receiver`` who answered. Only these two can compute it. ``other``:
        the card of the one of the two that is not this site."""
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


_REMEDY = "restore it, or run again under another name: without it, this site could mask an update twice"
Verify = Callable[[KeyCard, bytes], bool]
"""Whether a card's signature over a text is that of the certificate of the card's site."""


@dataclass(frozen=True)
class Upload:
    """What leaves a site in the first exchange."""

    numbers: Tensor  # y_u, int64 (n,)
    sealed: Mapping[str, bytes]  # for each site of the roster its shares of this site's seeds, encrypted
    # of the self seed under the site's own name, and of the pairwise seeds under the others'
    commitments: Mapping[str, bytes]


@dataclass(frozen=True)
class Revealed:
    """What leaves a site at the end of the second exchange: its shares of the self seeds of those that answered, by
    name; and of the pairwise seeds between these and those that did not, by both names."""

    self_seeds: Mapping[str, bytes]
    pairs: Mapping[tuple[str, str], bytes]


class SecureSite:
    """The protocol at one site, for one run. ``smallest_sum``: the fewest sites whose sum it helps to unmask;
    ``colluders``: how many sites may work with a server that lies, without a sum of too few being unmasked."""

    def __init__(
        self,
        site: str,
        run: str,
        folder: Path,
        sign: Callable[[bytes], bytes],
        verify: Verify,
        smallest_sum: int = 3,
        certificate: bytes = b"",
        colluders: int = 0,
    ) -> None:
        self.site, self.run, self.smallest_sum, self.colluders = site, run, smallest_sum, colluders
        self._folder, self._sign, self._verify, self._certificate = folder, sign, verify, certificate
        folder.mkdir(parents=True, exist_ok=True)
        self._key = PrivateKey.of(folder / "key")

    def card(self) -> KeyCard:
        """Its signed key."""
        signature = self._sign(signed_text(self.run, self.site, self._key.public))
        return KeyCard(self.site, self._key.public, signature, self._certificate)

    def kept_upload(self, order: Order) -> Upload | None:
        """The upload that was made for this order; None if this exchange was not masked yet. Refused if the roster is
        too small, a key is not its site's, or this exchange was masked for another order."""
        self._check(order)
        upload, masked_for = self._file(order, "upload"), self._masked_for(order)
        if masked_for is None:
            return None
        if masked_for != order.binding.hex():
            raise Refused(
                f"site '{self.site}' has masked its reply of exchange {order.exchange} for another roster or content, "
                "and masks it only once"
            )
        if not upload.exists():
            raise Refused(f"site '{self.site}' has answered exchange {order.exchange}, which is over")
        return _read(read_private(upload, _REMEDY))

    def mask(self, order: Order, numbers: Tensor, *, whole: bool = False) -> Upload:
        """The first exchange.

        Refused if the roster is too small, a key is not its site's, or this exchange was masked for another order.
        ``order``: what the sum is of; ``content`` is the digest of what this site itself was sent. ``whole``: whether
        this site helps to unmask only the sum of the whole roster.
        """
        with self._alone():
            return self._mask(order, numbers, whole)

    def _mask(self, order: Order, numbers: Tensor, whole: bool) -> Upload:
        before = self.kept_upload(order)
        if before is not None:
            return before
        self_seed = os.urandom(SECRET_BYTES)  # never from the run's seed, which the server knows
        others = [card for card in order.cards if card.site != self.site]
        seeds = {card.site: self._key.mask_seed(order, self.site, card) for card in others}
        every, parts = {self.site: self_seed, **seeds}, (len(order.roster), order.needed)
        shares = {name: split_secret(secret, *parts) for name, secret in every.items()}
        upload = Upload(
            add_masks(numbers, self.site, self_seed, seeds),
            {
                card.site: self._key.seal(
                    order, self.site, card, b"".join(shares[name][index] for name in order.roster)
                )
                for index, card in enumerate(order.cards)
            },
            {name: commitment(order.binding, secret) for name, secret in every.items()},
        )
        write_private(self._file(order, "upload"), _to_bytes(upload))
        if whole:
            write_bytes(self._file(order, "whole"), b"", private=True)
        write_object(self._file(order, "masked.json"), {"binding": order.binding.hex()}, private=True)
        return upload

    def confirm(self, order: Order, answered: Sequence[str]) -> dict[str, bytes]:
        """The second exchange begins: confirm who answered, for one set of sites only.

        Returns for each other of these sites a code that only it can check. Refused if this site did not mask for
        ``order``, the sum is of too few sites, or it confirmed another set.
        """
        with self._alone():
            survivors = self._settle_survivors(order, answered)
            others = [card for card in order.cards if card.site in survivors and card.site != self.site]
            return {card.site: self._key.confirmation(order, self.site, card.site, card, survivors) for card in others}

    def reveal(
        self, order: Order, answered: Sequence[str], sealed: Mapping[str, bytes], confirmed: Mapping[str, bytes]
    ) -> Revealed:
        """The second exchange ends: tell the shares that unmask the sum.

        Args:
            sealed: what each of these sites sealed for this one.
            confirmed: the codes by which they confirm to this one who answered.

        Raises:
            Refused: as in `confirm`; or less than a majority of the roster confirms this set.
        """
        with self._alone():
            return self._reveal(order, self._settle_survivors(order, answered), sealed, confirmed)

    def _settle_survivors(self, order: Order, answered: Sequence[str]) -> list[str]:
        """The sites in the sum, by name. This site works for no other set of them, now that it is written down."""
        if self._masked_for(order) != order.binding.hex():
            raise Refused(f"site '{self.site}' did not mask its reply for this roster and content")
        survivors = sorted(set(answered))
        if len(survivors) != len(answered) or not set(survivors) <= set(order.roster) or self.site not in survivors:
            raise Refused(f"site '{self.site}': those who answered are not sites of the roster, each once")
        needed = max(order.needed, self.smallest_sum)
        if len(survivors) < needed:
            raise Refused(f"site '{self.site}' unmasks sums of at least {needed} sites, not {len(survivors)}")
        if self._file(order, "whole").exists() and survivors != list(order.roster):
            lost = next(site for site in order.roster if site not in survivors)
            raise Refused(
                f"site '{self.site}' unmasks no sum without site '{lost}', which it masked for: two sums that differ "
                "by a few sites show these (rule policy.roster); wait for it, or write training.privacy"
            )
        done = self._file(order, "confirmed.json")
        if not done.exists():
            write_object(done, {"survivors": survivors}, private=True)
        elif read_object(done, _REMEDY)["survivors"] != survivors:
            raise Refused(f"site '{self.site}' has confirmed exchange {order.exchange} for other sites already")
        return survivors

    def _reveal(
        self, order: Order, survivors: Sequence[str], sealed: Mapping[str, bytes], confirmed: Mapping[str, bytes]
    ) -> Revealed:
        agreed = {self.site} | {
            card.site
            for card in order.cards
            if card.site in survivors
            and card.site != self.site
            and card.site in confirmed
            and hmac.compare_digest(
                self._key.confirmation(order, card.site, self.site, card, survivors), confirmed[card.site]
            )
        }
        # Two sets cannot both have a majority, since each site confirms one.
        if len(agreed) < order.needed:
            raise Refused(
                f"site '{self.site}': {len(agreed)} of {len(order.roster)} sites confirm who answered exchange "
                f"{order.exchange}, which is no majority"
            )
        self_shares: dict[str, bytes] = {}
        pairs: dict[tuple[str, str], bytes] = {}
        for card in order.cards:
            if card.site not in survivors:
                continue
            plain = self._key.open(order, self.site, card, sealed.get(card.site, b""))
            if len(plain) != SHARE_BYTES * len(order.roster):
                raise Refused(f"site '{self.site}': '{card.site}' sealed shares of another roster")
            for index, name in enumerate(order.roster):
                share = plain[index * SHARE_BYTES : (index + 1) * SHARE_BYTES]
                if name == card.site:
                    self_shares[name] = share
                elif name not in survivors:  # of two that answered the pairwise masks cancel, and stay secret
                    pairs[card.site, name] = share
        return Revealed(self_shares, pairs)

    def once(self, about: str, question: str) -> None:
        """Note that a call asks about a model that this site keeps. Refused if something else was asked about it
        before. ``about``: a digest of the model; ``question``: a digest of all that the answer depends on beside it."""
        with self._alone():
            file = self._folder / "asked.json"
            asked = read_object(file, _REMEDY)
            if asked.setdefault(about, question) != question:
                raise Refused(f"site '{self.site}' was asked about this model before, and answers that once")
            write_object(file, asked, private=True)

    def forget_uploads(self, exchange: int) -> None:
        """Remove the kept uploads of all exchanges up to this one. That they were made stays on record."""
        for file in self._folder.glob("*-upload"):
            if int(file.name.split("-")[0]) <= exchange:
                file.unlink()

    def _alone(self) -> AbstractContextManager[None]:
        """Keep other processes of this site out, or two that are asked at once would each find that it did nothing."""
        return hold_lock(self._folder / "lock")

    def _check(self, order: Order) -> None:
        if order.run != self.run:
            raise Refused(f"site '{self.site}' has no key for run '{order.run}'")
        if list(order.roster) != sorted(set(order.roster)) or self.site not in order.roster:
            raise Refused(f"site '{self.site}': the roster is not a list of names in order with its own")
        if len(order.roster) < self.smallest_sum:
            raise Refused(f"site '{self.site}' takes part in sums of at least {self.smallest_sum} sites")
        least = threshold(len(order.roster), self.colluders)
        if not least <= order.needed <= len(order.roster):
            raise Refused(
                f"site '{self.site}' takes part in a sum of {len(order.roster)} sites if at least {least} of them have "
                f"to unmask it, not {order.needed} (rule policy.colluders: {self.colluders})"
            )
        for card in order.cards:
            if not self._verify(card, signed_text(self.run, card.site, card.public)):
                raise Refused(f"site '{self.site}': the key of '{card.site}' is not signed by its certificate")
        pins = self._folder / "pins.json"
        known = read_object(pins, _REMEDY)
        result = same_keys({**known, self.site: self._key.public.hex()}, order.cards)
        if result != known:
            write_object(pins, result, private=True)

    def _masked_for(self, order: Order) -> str | None:
        """The binding of the order that this exchange was masked for; None if it was not masked."""
        binding: str | None = read_object(self._file(order, "masked.json"), _REMEDY).get("binding")
        return binding

    def _file(self, order: Order, what: str) -> Path:
        return self._folder / f"{int(order.exchange)}-{re.sub(r'[^A-Za-z0-9_]', '-', order.call)}-{what}"


def _to_bytes(upload: Upload) -> bytes:
    head = {
        "sealed": {name: value.hex() for name, value in upload.sealed.items()},
        "commitments": {name: value.hex() for name, value in upload.commitments.items()},
    }
    return json.dumps(head).encode() + b"\n" + upload.numbers.numpy().tobytes()


def _read(data: bytes) -> Upload:
    head, _, body = data.partition(b"\n")
    result = {
        part: {name: bytes.fromhex(value) for name, value in held.items()} for part, held in json.loads(head).items()
    }
    numbers = torch.frombuffer(bytearray(body), dtype=torch.int64)
    return Upload(numbers, result["sealed"], result["commitments"])


_TRIES = 2000
"""Sets of shares that are tried for one seed where some shares are wrong: all of up to 13 sites."""


class SecureSum:
    """One sum. Uploads are added as they come; only their sealed shares and commitments are kept."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.total: Tensor | None = None
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self._commitments: dict[str, Mapping[str, bytes]] = {}
        self._wrong: set[int] = set()
        """Places of sites that told a wrong share. Of later seeds theirs are tried last."""

    @property
    def answered(self) -> list[str]:
        """The sites whose uploads are in the sum, by name."""
        return sorted(self._sealed)

    def add(self, site: str, upload: Upload) -> None:
        """Add a site's upload. FedshiftError if it is of another length or roster, or the site's second. Then it is not
        in the sum."""
        numbers, roster = upload.numbers, set(self.order.roster)
        if site not in roster or site in self._sealed:
            raise FedshiftError(f"site '{site}' has no place in this sum")
        if numbers.dtype != torch.int64 or numbers.dim() != 1 or set(upload.sealed) != roster:
            raise FedshiftError(f"the upload of site '{site}' is not one of this roster")
        if set(upload.commitments) != roster:
            raise FedshiftError(f"site '{site}' does not commit to its seeds")
        if self.total is None:
            self.total = numbers.clone()
        elif len(numbers) != len(self.total):
            raise FedshiftError(f"site '{site}' sends {len(numbers)} numbers, the others {len(self.total)}")
        else:
            self.total += numbers
        self._sealed[site], self._commitments[site] = upload.sealed, upload.commitments

    def sealed_for(self, site: str) -> dict[str, bytes]:
        """What those that answered sealed for a site."""
        return {sender: sealed[site] for sender, sealed in self._sealed.items()}

    def unmask_total(self, revealed: Mapping[str, Revealed]) -> Tensor:
        """The sum, (n,), from what the sites revealed. FedshiftError if too few sites answered, or too many of them
        with wrong shares."""
        needed = self.order.needed
        if self.total is None or len(self._sealed) < needed or len(revealed) < needed:
            raise FedshiftError(
                f"secure aggregation needs {needed} of {len(self.order.roster)} sites in both exchanges; "
                f"{len(self._sealed)} answered the first and {len(revealed)} the second"
            )
        lost = [name for name in self.order.roster if name not in self._sealed]
        self_seeds = {
            name: self._seed(name, name, {by: shares.self_seeds.get(name, b"") for by, shares in revealed.items()})
            for name in self.answered
        }
        pairs = {
            (name, other): self._seed(
                name, other, {by: shares.pairs.get((name, other), b"") for by, shares in revealed.items()}
            )
            for name in self.answered
            for other in lost
        }
        total = self.total.clone()
        unmask(total, self_seeds.values(), pairs)
        return total

    def _seed(self, site: str, of: str, shares: Mapping[str, bytes]) -> bytes:
        """The seed of ``site`` that its commitment ``of`` belongs to."""
        needed = self.order.needed
        places = {self.order.roster.index(by) + 1: share for by, share in shares.items() if by in self.order.roster}
        ordered = sorted(places, key=lambda number: (number in self._wrong, number))
        for chosen, dropped in itertools.islice(_choices(ordered, needed), _TRIES):
            try:
                secret = join_shares({number: places[number] for number in chosen}, needed)
            except FedshiftError:
                continue
            if commitment(self.order.binding, secret) == self._commitments[site][of]:
                self._wrong |= dropped
                return secret
        raise FedshiftError(f"the shares of the seeds of site '{site}' do not fit together: sites sent wrong ones")


def _choices(places: Sequence[int], needed: int) -> Iterator[tuple[tuple[int, ...], set[int]]]:
    """Sets of ``needed`` places, and those dropped for each: first none, then every single one, then every two.

    The fewest that have to be dropped are all wrong: if one was not, the others alone would do.
    """
    for number in range(len(places) - needed + 1):
        for dropped in itertools.combinations(range(len(places)), number):
            left = [at for at in range(len(places)) if at not in dropped][:needed]
            if not dropped or dropped[-1] < left[-1]:  # otherwise it was tried with fewer dropped
                yield tuple(places[at] for at in left), {places[at] for at in dropped}
