"""KD3A's consensus focus: what each source adds to the knowledge vote (Feng et al., ICML 2021).

The quality of a coalition S of teachers is ``Q(S) = Σ_x n_p(S) · max_c p_c(S)``, with only S voting (equation 7); 0 if
S is empty. `source_weights` turns the focus into shares of the aggregate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from fedshift.errors import UserError
from fedshift.functional.knowledge_vote import UNSUPPORTED, Ballots, check_predictions

EXACT_UP_TO = 10
"""The most teachers for which Shapley values go through all coalitions (2¹⁰)."""

_ORDERS = 128

# Numbers per piece when many coalitions vote: 4 MiB in float64.
_CHUNK = 524_288


class FocusTally:
    """The focus of every teacher, added up over batches of samples, without keeping any sample.

    Q is a sum over samples. So the tally keeps one number for each coalition that the rule needs: 2^K for exact Shapley
    values, K + 1 for leave-one-out. All sums are in float64.

    Args:
        teachers: K.
        gate: g, at least 0 and below 1.
        rule: ``"leave_one_out"`` is ``CF_k = Q(all) − Q(all but k)`` (equation 8). ``"shapley"`` are the Shapley values
            of Q: each teacher's mean gain over all orders of joining (KD3A's released code), which sum to Q(all).
        ballots: as in `knowledge_vote`. With ``"rows"`` a focus can be negative; `source_weights.domain_weights` counts
            that as 0. With ``"top1"``, samples on which no teacher passes the gate count 0, as in the released code;
            then Q never falls when a teacher joins.
        permutations: number of sampled orders, every second one the reverse of the one before. None: Shapley values
            are exact for up to 10 teachers, and means over 128 orders for more.
        generator: generator of the orders, on the CPU; PyTorch's global one by default.

    Raises:
        UserError: fewer than 1 permutation.

    Example:
        >>> tally = FocusTally(2, 0.5, rule="leave_one_out")
        >>> for batch in torch.tensor([[[0.9, 0.1]], [[0.8, 0.2]]]).repeat(1, 6, 1).split(3, dim=1):
        ...     tally.add(batch)
        >>> tally.focus().round(decimals=4)  # six samples in two batches
        tensor([5.4000, 4.8000], dtype=torch.float64)
    """

    def __init__(
        self,
        teachers: int,
        gate: float,
        *,
        rule: Literal["shapley", "leave_one_out"] = "shapley",
        ballots: Ballots = "rows",
        permutations: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._gate, self._ballots = gate, ballots
        self._orders: tuple[Tensor, Tensor] | None = None
        self._rule = rule
        if rule == "leave_one_out":
            self._members = torch.cat([torch.ones(1, teachers), 1 - torch.eye(teachers)]).bool()
        elif permutations is None and teachers <= EXACT_UP_TO:
            self._members = (torch.arange(2**teachers)[:, None] >> torch.arange(teachers)) & 1 == 1
        else:
            count = _ORDERS if permutations is None else permutations
            if count < 1:
                raise UserError(f"Shapley values need at least one order of the teachers, found {count}")
            drawn = torch.stack([torch.randperm(teachers, generator=generator) for _ in range((count + 1) // 2)])
            orders = torch.stack([drawn, drawn.flip(1)], 1).flatten(0, 1)[:count]
            # Teacher k is among the first j if its place in the order is below j.
            members = orders.argsort(1)[:, None, :] < torch.arange(teachers + 1)[:, None]
            self._members, number = torch.unique(members.flatten(0, 1), dim=0, return_inverse=True)
            self._orders = orders, number
        self._qualities = torch.zeros(len(self._members), dtype=torch.float64)

    def add(self, predictions: Tensor) -> None:
        """Count more samples.

        Args:
            predictions: the teachers' probabilities, (K, n, C).

        Raises:
            UserError: other shapes, an impossible gate, or another number of teachers.
        """
        check_predictions(predictions, self._gate)
        teachers = self._members.shape[1]
        if len(predictions) != teachers:
            raise UserError(f"this tally is of {teachers} teachers, found predictions of {len(predictions)}")
        self._qualities += _qualities(predictions, self._gate, self._members, self._ballots)

    def focus(self) -> Tensor:
        """CF_k over all samples so far: (K,) float64 on the CPU."""
        if self._rule == "leave_one_out":
            return self._qualities[0] - self._qualities[1:]
        if self._orders is None:
            return _exact_shapley(self._members, self._qualities)
        orders, number = self._orders
        gains = self._qualities[number].view(len(orders), -1).diff(dim=1)
        focus = torch.zeros(orders.shape[1], dtype=torch.float64)
        return focus.index_add_(0, orders.flatten(), gains.flatten()) / len(orders)


def _exact_shapley(members: Tensor, qualities: Tensor) -> Tensor:
    """Shapley values from the qualities (2^K,) of all coalitions. Bit k of a coalition's number says whether k is in
    it.
    """
    teachers = members.shape[1]
    numbers = torch.arange(2**teachers)
    # Exactly the members of S precede k in |S|! (K − |S| − 1)! of the K! orders.
    chances = torch.tensor(
        [1 / (teachers * math.comb(teachers - 1, size)) for size in range(teachers)], dtype=torch.float64
    )
    focus = []
    for teacher in range(teachers):
        without = numbers[~members[:, teacher]]
        gains = qualities[without + 2**teacher] - qualities[without]
        focus.append(chances[members[without].sum(1)] @ gains)
    return torch.stack(focus)


def _qualities(predictions: Tensor, gate: float, members: Tensor, ballots: Ballots) -> Tensor:
    """Q of every coalition, one per row of ``members`` (M, K), bool: (M,) float64 on the CPU."""
    vote = _row_qualities if ballots == "rows" else _top_qualities
    teachers, _, classes = predictions.shape
    inside = members.to(predictions.device).double()
    total = torch.zeros(len(members), dtype=torch.float64, device=predictions.device)
    for piece in torch.split(predictions, max(1, _CHUNK // max(len(members), teachers * classes)), dim=1):
        total += vote(piece.double(), gate, inside)
    return total.cpu()


def _top_qualities(rows: Tensor, gate: float, inside: Tensor) -> Tensor:
    """Q over the samples of ``rows`` (K, n, C) when votes are top-1 probabilities: the winner's sum is n_p · max p."""
    confidence, choice = rows.max(2)
    votes = confidence * (confidence > gate)
    best = inside.new_zeros(len(inside), rows.shape[1])
    for candidate in choice:
        best = torch.maximum(best, inside @ (votes * (choice == candidate)))
    return best.sum(1)


def _row_qualities(rows: Tensor, gate: float, inside: Tensor) -> Tensor:
    """Q over the samples of ``rows`` (K, n, C) when votes are whole rows.

    For every coalition and sample this finds the class with the largest sum over voters, and that sum. The class is
    almost always some teacher's first choice, so only those classes are summed. Where another class could reach as much
    (at most the sum of each voter's best among the others), all classes are summed.
    """
    confidence, choice = rows.max(2)
    passing = (confidence > gate).double()
    passed = inside @ passing > 0
    sizes = inside.sum(1, keepdim=True)

    def tally(values: Tensor) -> Tensor:
        return torch.where(passed, inside @ (values * passing), inside @ values)

    # Sorted by class, so that the first of equal ones wins.
    candidates = choice.sort(0).values
    heights = torch.full_like(passed, -1.0, dtype=torch.float64)
    winners = torch.zeros_like(passed, dtype=torch.int64)
    for candidate in candidates:
        sums = tally(rows.gather(2, candidate.expand(len(rows), -1)[..., None])[..., 0])
        better = sums > heights
        heights, winners = torch.where(better, sums, heights), torch.where(better, candidate, winners)
    others = rows.scatter(2, candidates.T.expand(len(rows), -1, -1), 0.0).amax(2)
    for sample, coalition in _by_sample((heights <= tally(others)) & (sizes > 0)):
        voting = torch.where(passed[coalition, sample, None], inside[coalition] * passing[:, sample], inside[coalition])
        heights[coalition, sample], winners[coalition, sample] = (voting @ rows[:, sample]).max(1)

    quality = torch.zeros_like(heights)
    for teacher, vote in enumerate(confidence * passing):
        quality += torch.where(choice[teacher] == winners, inside[:, teacher, None] * vote, 0.0)
    quality = torch.where(passed, quality, UNSUPPORTED * heights / sizes.clamp(min=1))
    # If the elected class is no voter's first, the mean over all teachers counts, past the gate or not.
    for sample, coalition in _by_sample(passed & (quality == 0)):
        highest = (inside[coalition] @ rows[:, sample]).amax(1)
        quality[coalition, sample] = UNSUPPORTED * highest / sizes[coalition, 0]
    return quality.sum(1)


def _by_sample(mask: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The samples with anything set in ``mask`` (M, n), and for each the numbers of its coalitions."""
    for sample in mask.any(0).nonzero()[:, 0].tolist():
        yield sample, mask[:, sample].nonzero()[:, 0]
