"""Orders of secure sums, and what sites send for them, as they stand in messages between machines.

A request to mask has an entry ``sum`` in its header: how contributions are weighted, the key cards of the roster, and
the envelopes of all its sites. These, the run's setting, the site's role, the split of its data and the body are what
its masks are bound to, so a coordinator that tells sites different things gets masks that do not cancel.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, PlainSerializer
from torch import Tensor

from fedshift.deploy.crypto.at_site import Revealed, Upload
from fedshift.deploy.crypto.keys import KeyCard, Order
from fedshift.errors import FedshiftError, Refused
from fedshift.federation.messages import Content, Masked
from fedshift.federation.plain_values import Frozen
from fedshift.federation.secure.sums import Weighing, threshold
from fedshift.functional.secret_sharing import SHARE_BYTES

_MOST_SITES = 1000
_LARGEST_EXPONENT = 60
_CODE_BYTES = 32
_WIRE_BYTES = 28
"""Nonce and tag of what is sealed."""


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decoded(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("it is no text in base 64")
    return base64.b64decode(text, validate=True)


Encoded = Annotated[bytes, BeforeValidator(_decoded), PlainSerializer(_text)]
"""Bytes that a message holds as text in base 64."""
KeyEntry = tuple[Encoded, Encoded, Encoded]
"""A key card without the site's name: key, signature, certificate."""


class KeyAnswer(Frozen):
    """What a site answers that is asked for its key of a run."""

    card: KeyEntry

    def of(self, site: str) -> KeyCard:
        """The card of the site that answered."""
        return KeyCard(site, *self.card)


def card_entry(card: KeyCard) -> list[str]:
    """A key card as JSON, without the site's name."""
    return [_text(card.public), _text(card.signature), _text(card.certificate)]


def card_of(site: str, entry: Any) -> KeyCard:
    """The inverse of `card_entry`.

    Raises:
        FedshiftError: it is no key card.
    """
    try:
        public, signature, certificate = (base64.b64decode(part, validate=True) for part in entry)
    except (TypeError, ValueError):
        raise FedshiftError(f"site '{site}' gave no key for secure aggregation") from None
    return KeyCard(site, public, signature, certificate)


def sum_entry(
    weighing: Weighing,
    cards: Mapping[str, KeyCard],
    envelopes: Mapping[str, Mapping[str, Any]],
    colluders: int = 0,
) -> dict[str, Any]:
    """What a request to mask says of the sum, the same to all sites."""
    return {
        "threshold": threshold(len(cards), colluders),
        "weighing": [weighing.by, weighing.exponent, weighing.terms],
        "cards": {site: card_entry(card) for site, card in sorted(cards.items())},
        "envelopes": {site: dict(envelope) for site, envelope in sorted(envelopes.items())},
    }


def order_in(header: Mapping[str, Any], body_sha256: str) -> tuple[Order, Weighing]:
    """The order in the header of a request to mask, and how contributions are weighted.

    Raises:
        Refused: it is no such header.
    """
    try:
        whole = header["sum"]
        by, exponent, terms = whole["weighing"]
        cards = tuple(card_of(site, entry) for site, entry in sorted(whole["cards"].items()))
        needed = whole["threshold"]
        fits = by in ("samples", "uniform") and all(type(number) is int for number in (exponent, terms, needed))
        if not fits or not 0 <= exponent <= _LARGEST_EXPONENT or not len(cards) <= terms <= _MOST_SITES:
            raise ValueError
        if not threshold(len(cards)) <= needed <= len(cards):
            raise ValueError
        rows = [header["part"][name] for name in ("role", "split")]
        content = [body_sha256, header["setting"], whole["weighing"], whole["envelopes"], rows]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        exchange = header["envelope"]["exchange"]
        return Order(header["run"], exchange, header["call"], digest, cards, needed), Weighing(by, exponent, terms)
    except (KeyError, TypeError, ValueError, AttributeError, FedshiftError):
        raise Refused("a request to mask does not say what the sum is of") from None


def order_entry(order: Order) -> dict[str, Any]:
    """An order in the header of a request to unmask. A site knows from its record whether it masked for this one."""
    keys = {card.site: _text(card.public) for card in order.cards}
    return {
        "exchange": order.exchange,
        "call": order.call,
        "content": order.content,
        "keys": keys,
        "threshold": order.needed,
    }


def order_of(run: str, entry: Any) -> Order:
    """The inverse of `order_entry`.

    Raises:
        Refused: it is none.
    """
    try:
        cards = tuple(card_of(site, [key, "", ""]) for site, key in sorted(entry["keys"].items()))
        exchange, needed = int(entry["exchange"]), int(entry["threshold"])
        return Order(run, exchange, str(entry["call"]), str(entry["content"]), cards, needed)
    except (KeyError, TypeError, ValueError, AttributeError, FedshiftError):
        raise Refused("a request to unmask does not say what the sum is of") from None


# What sites send ------------------------------------------------------------------------------------------------------


def upload_content(upload: Upload, order: Order) -> Masked:
    """An upload as content of a message."""
    return Masked(
        {
            "sum": upload.numbers,
            "sealed": _bytes([upload.sealed[site] for site in order.roster]),
            "commitments": _bytes([upload.commitments[site] for site in order.roster]),
        }
    )


def upload_of(content: Mapping[str, Content], order: Order, length: int) -> tuple[Upload, Masked]:
    """The upload in a reply, of so many integers, and the content itself.

    Raises:
        FedshiftError: it is none of this roster.
    """
    sites = len(order.roster)
    sizes = {"sealed": (sites, _WIRE_BYTES + SHARE_BYTES * sites), "commitments": (sites, 32)}
    found = content.get("sum")
    if set(content) != {"sum"} or not isinstance(found, Masked) or set(found) != {"sum", *sizes}:
        raise FedshiftError("it is no masked contribution")
    numbers = found["sum"]
    if numbers.dtype != torch.int64 or numbers.shape != (length,):
        raise FedshiftError("its masked numbers are not those that it describes")
    sealed, commitments = (dict(zip(order.roster, _rows(found[name], *sizes[name]), strict=True)) for name in sizes)
    return Upload(numbers, sealed, commitments), found


def confirmed_content(codes: Mapping[str, bytes]) -> dict[str, Content]:
    """Codes of one site that confirm who answered, by the name of who can check them."""
    return {"codes": Masked({site: _bytes([code])[0] for site, code in codes.items()})}


def confirmed_of(content: Mapping[str, Content], site: str, answered: Sequence[str]) -> dict[str, bytes]:
    """The inverse of `confirmed_content`, for the answer of ``site``.

    Raises:
        FedshiftError: it is none for these sites.
    """
    found = _by_site(content.get("codes"))
    if set(found) != set(answered) - {site} or any(len(code) != _CODE_BYTES for code in found.values()):
        raise FedshiftError("it does not confirm who answered")
    return found


def sealed_content(sealed: Mapping[str, bytes], confirmed: Mapping[str, bytes]) -> dict[str, Content]:
    """What others sealed for a site, and the codes by which they confirm to it who answered, by the name of who did."""
    parts = {"sealed": sealed, "confirmed": confirmed}
    return {name: Masked({site: _bytes([part])[0] for site, part in held.items()}) for name, held in parts.items()}


def sealed_of(content: Mapping[str, Content]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The inverse of `sealed_content`; what is none is left out, and not opened or counted later."""
    return _by_site(content.get("sealed")), _by_site(content.get("confirmed"))


def _by_site(found: Content | None) -> dict[str, bytes]:
    parts = found.items() if isinstance(found, Masked) else ()
    return {site: bytes(part.tolist()) for site, part in parts if part.dtype == torch.uint8 and part.dim() == 1}


def revealed_content(revealed: Revealed, order: Order, answered: Sequence[str]) -> dict[str, Content]:
    """Shares as content of a message: of those that answered, and of their pairs with the lost."""
    pairs = [revealed.pairs[pair] for pair in _pairs(order, answered)]
    return {"shares": Masked({"own": _bytes([revealed.own[site] for site in answered]), "pairs": _bytes(pairs)})}


def revealed_of(content: Mapping[str, Content], order: Order, answered: Sequence[str]) -> Revealed:
    """The inverse of `revealed_content`.

    Raises:
        FedshiftError: it is none for these sites.
    """
    found, pairs = content.get("shares"), _pairs(order, answered)
    if not isinstance(found, Masked) or set(found) != {"own", "pairs"}:
        raise FedshiftError("it holds no shares")
    own = _rows(found["own"], len(answered), SHARE_BYTES)
    of_pairs = _rows(found["pairs"], len(pairs), SHARE_BYTES if pairs else 0)
    return Revealed(dict(zip(answered, own, strict=True)), dict(zip(pairs, of_pairs, strict=True)))


def _pairs(order: Order, answered: Sequence[str]) -> list[tuple[str, str]]:
    return [(site, other) for site in answered for other in order.roster if other not in answered]


def _bytes(rows: Sequence[bytes]) -> Tensor:
    """uint8 (rows, bytes of each)."""
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8).reshape(len(rows), -1 if rows else 0)


def _rows(tensor: Tensor, number: int, size: int) -> list[bytes]:
    if tensor.dtype != torch.uint8 or tensor.shape != (number, size):
        raise FedshiftError("its shares are not those of this roster")
    return [bytes(row) for row in tensor.tolist()]
