"""A left-out site's part in masked sums, from which sites without labels estimate their accuracy.

It masks what it says of its kept scores, and helps to unmask the sum, as with models. So the coordinator, and the site
without labels, know what `fedshift.evaluation.estimate.pooled` reads of all left-out sites together, and of none alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

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
from fedshift.deploy.site_file import Holding
from fedshift.deploy.site_inputs import SiteInputs
from fedshift.errors import FedshiftError, Refused
from fedshift.evaluation.estimate.combination import read
from fedshift.evaluation.estimate.doubtful_rows import share_of_copies
from fedshift.evaluation.estimate.plain_sums import GivenSums, check_classes, plain_sums
from fedshift.evaluation.estimate.pooled import first_part, second_part, third_part
from fedshift.evaluation.estimate.sums import Numbers
from fedshift.federation.messages import Content
from fedshift.functional.fixed_point import to_fixed

_OF_SCORES = 3
"""So many sums are of scores, the others of inputs."""


class SiteEstimateSums:
    """The part of a site's program that masks what it says for estimates elsewhere.

    Args:
        sums: its part in secure sums.
        estimates: its part in estimates, which keeps scores.
        inputs: its part in what estimates read of inputs.
        holding: gives the site's data.
    """

    def __init__(
        self, sums: SiteSums, estimates: SiteEstimates, inputs: SiteInputs, holding: Callable[[], Holding]
    ) -> None:
        self._sums, self._estimates, self._inputs, self._holding = sums, estimates, inputs, holding

    def mask(self, asked: Asked[MaskRequest]) -> Message:
        """Answer with a masked part of one of the sums.

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
        if request.step > _OF_SCORES:
            numbers = self._inputs.part(self._holding(), request.preprocessing, request.inputs)
        else:
            numbers = _part(self._sums.name, request, kept, noise=self._estimates.noisy)
        try:
            part = to_fixed(torch.from_numpy(numbers), len(order.cards))
        except FedshiftError:
            raise FedshiftError(f"site '{self._sums.name}' has values that are too large for masked sums") from None
        return torch.cat([torch.ones(1, dtype=torch.int64), part])


def _part(name: str, request: MaskRequest, kept: KeptScores, *, noise: bool) -> Numbers:
    """A site's part of the sum that is asked for; ``noise``: whether its scores are those that noise allows.

    Raises:
        FedshiftError: what it is told lacks a sum before it.
        Refused: this site's numbers are not in the first sum.
    """
    mine = kept.sums
    if request.step == 1:
        return first_part(mine, 0.0 if noise else share_of_copies(kept.scores))
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
