"""Orders of secure sums, and what sites send for them, as they stand in messages between machines.

A request to mask has an entry ``sum`` in its header: how contributions are weighted, the key cards of the roster, and
the envelopes of all its sites. These, the run's setting, the site's role, the split of its data and the body are what
its masks are bound to, so a coordinator that tells sites different things gets masks that do not cancel.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedshift.deploy.crypto.masked_sums import KeyCard, Order, Revealed, SecureSum, Upload
from fedshift.deploy.remote.requests import CallRequest, MaskRequest, OrderAsked, SumAsked, UnmaskRequest, Work
from fedshift.errors import FedshiftError, Refused
from fedshift.federation.messages import Content, Masked
from fedshift.federation.secure.integer_sums import Weighing, threshold
from fedshift.federation.site import Envelope
from fedshift.functional.secret_sharing import SHARE_BYTES

_MOST_SITES = 1000
_LARGEST_EXPONENT = 60
_CODE_BYTES = 32
_WIRE_BYTES = 28
"""Nonce and tag of what is sealed."""
_TENSORS = 2
"""Tensors in an answer to a request to unmask."""


def sum_asked(
    weighing: Weighing, cards: Mapping[str, KeyCard], envelopes: Mapping[str, Envelope], colluders: int = 0
) -> SumAsked:
    """What a request to mask says of the sum, the same to all sites."""
    return SumAsked(
        threshold=threshold(len(cards), colluders),
        weighing=(weighing.by, weighing.exponent, weighing.terms),
        cards={site: card.entry for site, card in sorted(cards.items())},
        envelopes={site: Work(**vars(envelope)) for site, envelope in sorted(envelopes.items())},
    )


def order_in(request: CallRequest, body_sha256: str) -> tuple[Order, Weighing]:
    """The order in a request to mask, and how contributions are weighted; Refused if there is none that can be."""
    whole = request.sum
    if whole is None:
        raise Refused("a request to mask does not say what the sum is of")
    by, exponent, terms = whole.weighing
    cards = tuple(KeyCard(site, *entry) for site, entry in sorted(whole.cards.items()))
    weighed = 0 <= exponent <= _LARGEST_EXPONENT and len(cards) <= terms <= _MOST_SITES
    if not weighed or not threshold(len(cards)) <= whole.threshold <= len(cards):
        raise Refused("a request to mask does not say what the sum is of")
    envelopes = {site: envelope.model_dump(mode="json") for site, envelope in whole.envelopes.items()}
    rows = [request.part.role, request.part.split.model_dump(mode="json")]
    content = [body_sha256, request.setting.plain(), whole.weighing, envelopes, rows]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    order = Order(request.run, request.envelope.exchange, request.call, digest, cards, whole.threshold)
    return order, Weighing(by, exponent, terms)


def order_to_mask(request: MaskRequest) -> Order:
    """The order in a request for a part of a sum over left-out sites; Refused if there is none that can be."""
    cards = tuple(KeyCard(site, *entry) for site, entry in sorted(request.cards.items()))
    if not threshold(len(cards)) <= request.threshold <= len(cards) or set(request.scores) != set(request.cards):
        raise Refused("a request to mask does not say what the sum is of")
    return Order(request.run, request.step, request.do, request.content, cards, request.threshold)


def order_asked(order: Order) -> OrderAsked:
    """An order as a request to unmask holds it."""
    keys = {card.site: card.public for card in order.cards}
    return OrderAsked(
        exchange=order.exchange, call=order.call, content=order.content, keys=keys, threshold=order.needed
    )


def order_of(run: str, asked: OrderAsked) -> Order:
    """The inverse of `order_asked`."""
    cards = tuple(KeyCard(site, key, b"", b"") for site, key in sorted(asked.keys.items()))
    return Order(run, asked.exchange, asked.call, asked.content, cards, asked.threshold)


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
    """The upload in a reply, of so many integers, and the content itself; FedshiftError for another roster's."""
    sites = len(order.roster)
    sizes = {"sealed": (sites, _WIRE_BYTES + SHARE_BYTES * sites), "commitments": (sites, 32)}
    result = content.get("sum")
    if set(content) != {"sum"} or not isinstance(result, Masked) or set(result) != {"sum", *sizes}:
        raise FedshiftError("it is no masked contribution")
    numbers = result["sum"]
    if numbers.dtype != torch.int64 or numbers.shape != (length,):
        raise FedshiftError("its masked numbers are not those that it describes")
    sealed, commitments = (dict(zip(order.roster, _rows(result[name], *sizes[name]), strict=True)) for name in sizes)
    return Upload(numbers, sealed, commitments), result


def confirmed_content(codes: Mapping[str, bytes]) -> dict[str, Content]:
    """Codes of one site that confirm who answered, by the name of who can check them."""
    return {"codes": Masked({site: _bytes([code])[0] for site, code in codes.items()})}


def confirmed_of(content: Mapping[str, Content], site: str, answered: Sequence[str]) -> dict[str, bytes]:
    """The inverse of `confirmed_content`, for the answer of ``site``; FedshiftError if of other sites."""
    by_site = _by_site(content.get("codes"))
    if set(by_site) != set(answered) - {site} or any(len(code) != _CODE_BYTES for code in by_site.values()):
        raise FedshiftError("it does not confirm who answered")
    return by_site


def sealed_content(sealed: Mapping[str, bytes], confirmed: Mapping[str, bytes]) -> dict[str, Content]:
    """What others sealed for a site, and the codes by which they confirm to it who answered, by the name of who did."""
    parts = {"sealed": sealed, "confirmed": confirmed}
    return {name: Masked({site: _bytes([part])[0] for site, part in held.items()}) for name, held in parts.items()}


def sealed_of(content: Mapping[str, Content]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The inverse of `sealed_content`; what is none is left out, and not opened or counted later."""
    return _by_site(content.get("sealed")), _by_site(content.get("confirmed"))


def _by_site(masked: Content | None) -> dict[str, bytes]:
    parts = masked.items() if isinstance(masked, Masked) else ()
    return {site: bytes(part.tolist()) for site, part in parts if part.dtype == torch.uint8 and part.dim() == 1}


def revealed_content(revealed: Revealed, order: Order, answered: Sequence[str]) -> dict[str, Content]:
    """Shares as content of a message: of those that answered, and of their pairs with the lost."""
    pairs = [revealed.pairs[pair] for pair in _pairs(order, answered)]
    return {"shares": Masked({"own": _bytes([revealed.self_seeds[site] for site in answered]), "pairs": _bytes(pairs)})}


def revealed_of(content: Mapping[str, Content], order: Order, answered: Sequence[str]) -> Revealed:
    """The inverse of `revealed_content`; FedshiftError if of other sites."""
    result, pairs = content.get("shares"), _pairs(order, answered)
    if not isinstance(result, Masked) or set(result) != {"own", "pairs"}:
        raise FedshiftError("it holds no shares")
    rows = _rows(result["own"], len(answered), SHARE_BYTES)
    of_pairs = _rows(result["pairs"], len(pairs), SHARE_BYTES if pairs else 0)
    return Revealed(dict(zip(answered, rows, strict=True)), dict(zip(pairs, of_pairs, strict=True)))


AskAgain = Callable[
    [UnmaskRequest, Mapping[str, Mapping[str, Content]], int, Callable[[str, Any], Any]], dict[str, Any]
]
"""Asks sites of a sum, each with content of its own, for answers of so many tensors at most; what a function reads of
each, by site, without those whose answer is none."""


def second_exchange(masked: SecureSum, ask: AskAgain, **round_now: int) -> dict[str, Revealed]:
    """What the sites of a sum reveal, by site, after they confirmed to each other who answered. Nothing if too few
    confirm: the sites would refuse. Whoever gave no code is not waited for again."""
    order, answered = masked.order, masked.answered

    def request(do: Literal["confirm", "unmask"]) -> UnmaskRequest:
        return UnmaskRequest(do=do, run=order.run, order=order_asked(order), answered=tuple(answered), **round_now)

    nothing: dict[str, dict[str, Content]] = {site: {} for site in answered}
    codes = ask(request("confirm"), nothing, len(answered), lambda site, sent: confirmed_of(sent, site, answered))
    if len(codes) < order.needed:
        return {}
    content = {
        site: sealed_content(masked.sealed_for(site), {by: sent[site] for by, sent in codes.items() if by != site})
        for site in codes
    }
    return ask(request("unmask"), content, _TENSORS, lambda site, sent: revealed_of(sent, order, answered))


def _pairs(order: Order, answered: Sequence[str]) -> list[tuple[str, str]]:
    return [(site, other) for site in answered for other in order.roster if other not in answered]


def _bytes(rows: Sequence[bytes]) -> Tensor:
    """uint8 (rows, bytes of each)."""
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8).reshape(len(rows), -1 if rows else 0)


def _rows(tensor: Tensor, number: int, size: int) -> list[bytes]:
    if tensor.dtype != torch.uint8 or tensor.shape != (number, size):
        raise FedshiftError("its shares are not those of this roster")
    return [bytes(row) for row in tensor.tolist()]
