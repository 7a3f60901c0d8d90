"""The server's side of a secure sum: it adds what the sites masked, and takes the masks off the sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedshift.deploy.crypto.at_site import Revealed, Upload
from fedshift.deploy.crypto.keys import Order, commitment
from fedshift.errors import FedshiftError
from fedshift.functional.pairwise_masks import unmask
from fedshift.functional.secret_sharing import join_shares

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
        """Add a site's upload.

        Raises:
            FedshiftError: it is of another length or roster, or the site's second. Then it is not in the sum.
        """
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
        """The sum, (n,), from what the sites revealed.

        Raises:
            FedshiftError: too few sites answered, or too many of them with wrong shares.
        """
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
