"""A left-out site's part in masked sums, from which sites without labels estimate their accuracy.

It masks what it says of its kept scores, and helps to unmask the sum, as with models. So the coordinator, and the site
without labels, know what `fedshift.evaluation.estimate.pooled` reads of all left-out sites together, and of none alone.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from fedshift.deploy.crypto.keys import Order
from fedshift.deploy.kept_scores import KeptScores
from fedshift.deploy.remote.orders import order_to_mask, upload_content
from fedshift.deploy.remote.policy import sent_kinds
from fedshift.deploy.remote.requests import Asked, MaskRequest
from fedshift.deploy.remote.transport import Done, answer_of
from fedshift.deploy.remote.wire import Message, body_of
from fedshift.deploy.secure.site_sums import SiteSums
from fedshift.deploy.site_estimates import SiteEstimates
from fedshift.errors import FedshiftError, Refused
from fedshift.evaluation.estimate.combination import read
from fedshift.evaluation.estimate.plain_sums import GivenSums, check_classes, plain_sums
from fedshift.evaluation.estimate.pooled import first_part, second_part, third_part
from fedshift.evaluation.estimate.sums import Numbers
from fedshift.federation.messages import Content
from fedshift.functional.fixed_point import to_fixed


class SiteEstimateSums:
    """The part of a site's program that masks what it says for estimates elsewhere."""

    def __init__(self, sums: SiteSums, estimates: SiteEstimates) -> None:
        self._sums, self._estimates = sums, estimates

    def mask(self, asked: Asked[MaskRequest]) -> Message:
        """Answer with a masked part of one of the three sums.

        Raises:
            Refused: it may not leave, or the sum is not one that this site takes part in.
            FedshiftError: there are no scores, or the sums that it is told are not of this site.
        """
        request, entry, noise = asked.request, asked.entry, self._estimates.noisy
        self._estimates.check_gives(masked=True)
        order = order_to_mask(request)
        site = self._sums.site_of(order, noise=noise)
        entry |= {"step": request.step, "roster": list(order.roster)}
        upload, whole = site.kept_upload(order), False
        if upload is None:
            numbers = self._numbers(request, order)
            if not noise:
                entry["rosters"], whole = self._sums.rosters.note(order.roster, order.run), self._sums.rosters.one_set
            upload = site.mask(order, numbers, whole=whole)
        sent: dict[str, Content] = {"sum": upload_content(upload, order)}
        entry["sent"] = sent_kinds(sent)
        return answer_of(asked.key, Done(), body_of(sent))

    def _numbers(self, request: MaskRequest, order: Order) -> Tensor:
        """A one, and this site's part, as integers (n,), not masked yet."""
        keys = hashlib.sha256(" ".join(card.public.hex() for card in order.cards).encode()).hexdigest()
        run = request.scores[self._sums.name]
        kept = self._estimates.kept_for(run, f"sum {order.run}", keys if request.step == 1 else None)
        part = to_fixed(torch.from_numpy(_part(self._sums.name, request, kept)), len(order.cards))
        return torch.cat([torch.ones(1, dtype=torch.int64), part])


def _part(name: str, request: MaskRequest, kept: KeptScores) -> Numbers:
    """A site's part of the sum that is asked for."""
    mine = kept.sums
    if request.step == 1:
        return first_part(mine)
    if request.whole is None or (request.step == 3 and request.unexplained is None):
        raise FedshiftError("a request to mask lacks the sums before it")
    check_classes(request.whole.sums, len(mine.confusion))
    whole = request.whole.whole
    try:
        others = GivenSums.model_validate(plain_sums(whole.others(mine))).sums
    except ValueError:
        raise Refused(f"site '{name}' is not in the sum that it is told") from None
    reading = read(others, kept.scores)
    if request.step == 2:
        return second_part(reading)
    return third_part(whole, request.unexplained or 0.0, mine, reading)
