"""A site's side of a secure sum: it masks its numbers once, and once helps to take masks off the sum.

What it did is on its disk before anything leaves, so neither a restart nor a coordinator that asks again makes it mask
one update under two rosters, or tell shares for two sets of survivors. Before sites tell shares they confirm to each
other who answered: shares for different sets, one set at each site, could together unmask a sum of too few.
"""

from __future__ import annotations

import hmac
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedshift.deploy.crypto.keys import KeyCard, Order, PrivateKey, commitment, same_keys, signed_text
from fedshift.encryption import read_private, write_private
from fedshift.errors import Refused
from fedshift.federation.secure.integer_sums import threshold
from fedshift.files import hold_lock, write_bytes
from fedshift.functional.pairwise_masks import add_masks
from fedshift.functional.secret_sharing import SECRET_BYTES, SHARE_BYTES, split_secret
from fedshift.json_objects import read_object, write_object

_REMEDY = "restore it, or run again under another name: without it, this site could mask an update twice"
Verify = Callable[[KeyCard, bytes], bool]
"""Whether a card's signature over a text is that of the certificate of the card's site."""


@dataclass(frozen=True)
class Upload:
    """What leaves a site in the first exchange.

    Attributes:
        numbers: y_u, int64 (n,).
        sealed: for each site of the roster its shares of this site's seeds, encrypted.
        commitments: of the self seed under the site's own name, and of the pairwise seeds under the others'.
    """

    numbers: Tensor
    sealed: Mapping[str, bytes]
    commitments: Mapping[str, bytes]


@dataclass(frozen=True)
class Revealed:
    """What leaves a site at the end of the second exchange: its shares of the self seeds of those that answered, by
    name; and of the pairwise seeds between these and those that did not, by both names."""

    self_seeds: Mapping[str, bytes]
    pairs: Mapping[tuple[str, str], bytes]


class SecureSite:
    """The protocol at one site, for one run.

    Args:
        smallest_sum: the fewest sites whose sum it helps to unmask.
        colluders: how many sites may work with a server that lies, without a sum of too few being unmasked.
    """

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
        """The upload that was made for this order; None if this exchange was not masked yet.

        Raises:
            Refused: the roster is too small, a key is not its site's, or this exchange was masked for another order.
        """
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

        Args:
            order: what the sum is of; ``content`` is the digest of what this site itself was sent.
            whole: whether this site helps to unmask only the sum of the whole roster.

        Raises:
            Refused: the roster is too small, a key is not its site's, or this exchange was masked for another order.
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
        shares = {name: self._shares(order, secret) for name, secret in {self.site: self_seed, **seeds}.items()}
        upload = Upload(
            add_masks(numbers, self.site, self_seed, seeds),
            {
                card.site: self._key.seal(
                    order, self.site, card, b"".join(shares[name][index] for name in order.roster)
                )
                for index, card in enumerate(order.cards)
            },
            {name: commitment(order.binding, secret) for name, secret in {self.site: self_seed, **seeds}.items()},
        )
        write_private(self._file(order, "upload"), _to_bytes(upload))
        if whole:
            write_bytes(self._file(order, "whole"), b"", private=True)
        write_object(self._file(order, "masked.json"), {"binding": order.binding.hex()}, private=True)
        return upload

    def confirm(self, order: Order, answered: Sequence[str]) -> dict[str, bytes]:
        """The second exchange begins: confirm who answered, for one set of sites only.

        Returns:
            For each other of these sites a code that only it can check.

        Raises:
            Refused: this site did not mask for ``order``, the sum is of too few sites, or it confirmed another set.
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
        """Note that a call asks about a model that this site keeps.

        Args:
            about: a digest of the model.
            question: a digest of all that the answer depends on beside it.

        Raises:
            Refused: something else was asked about it before.
        """
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

    def _shares(self, order: Order, secret: bytes) -> list[bytes]:
        return split_secret(secret, len(order.roster), order.needed)

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
