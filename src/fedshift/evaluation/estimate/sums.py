"""What a site with labels says of a model that never saw it, as sums over its samples.

A `SiteSums` is all that estimators read of such a site, and so what would leave it: its number of samples, `BINS`
counts of confidence among right and among wrong predictions, for each of `TEMPERATURES` a summed loss and a summed
confidence, for each class the counts of what was predicted instead in `BANDS` of confidence, one cost of transport, and
of two classes the counts of each in bins of score (`fedshift.evaluation.estimate.two_classes`).
These sums of sites add up, so a secure sum can hide each site's. Of the site without labels nothing leaves: it reads
the others' sums, and estimates by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.evaluation.estimate.two_classes import by_score

Numbers = NDArray[np.float64]

TEMPERATURES: Numbers = np.geomspace(0.25, 20.0, 40)
"""By which logits are divided; a temperature of more than 1 makes a model less sure."""
BINS = 200
"""Of confidence, by the logarithm of what it lacks of 1."""
EDGES: Numbers = np.array([0.5, 0.75, 0.9, 0.97])
"""Confidences between which are the `BANDS`, coarser than the bins."""
BANDS = len(EDGES) + 1
_LEAST = 1e-12
"""Probabilities are not taken for less than this."""
_ROWS, _MOST = 400, 2000
"""Samples whose transport is computed exactly at once, and most samples of a site that are transported."""


@dataclass(frozen=True)
class SiteSums:
    """Sums over the samples of a site, of a model that never saw it.

    Attributes:
        samples: how many there are.
        by_confidence: predictions in each bin of confidence (2, BINS): first the wrong ones, then the right ones.
        losses: at each temperature the sum of −log p(label) (temperatures,).
        confidences: at each temperature the sum of the largest probability (temperatures,).
        answers: samples of each class by predicted class and band of confidence (classes, classes, BANDS).
        cost: the cost of moving the site's predictions to its own class frequencies, times its samples: see
            `transport_cost`.
        by_score: of two classes the samples of each in bins of score (2, SCORES); None of more classes.
    """

    samples: int
    by_confidence: Numbers
    losses: Numbers
    confidences: Numbers
    answers: Numbers
    cost: float
    by_score: Numbers | None = None

    def __add__(self, other: SiteSums) -> SiteSums:
        return SiteSums(
            self.samples + other.samples,
            self.by_confidence + other.by_confidence,
            self.losses + other.losses,
            self.confidences + other.confidences,
            self.answers + other.answers,
            self.cost + other.cost,
            None if self.by_score is None or other.by_score is None else self.by_score + other.by_score,
        )

    @property
    def confusion(self) -> Numbers:
        """Samples of each class (rows) by predicted class (columns), (classes, classes)."""
        return np.asarray(self.answers.sum(axis=2))

    @property
    def recalls(self) -> Numbers:
        """The share of each class that is predicted (classes,); 0 of a class without samples."""
        return np.asarray(np.diag(self.confusion) / np.maximum(self.confusion.sum(axis=1), 1))

    @property
    def accuracy(self) -> float:
        """The share of right predictions."""
        return float(np.trace(self.confusion)) / self.samples

    @property
    def frequencies(self) -> Numbers:
        """The share of each class (classes,)."""
        return np.asarray(self.confusion.sum(axis=1)) / self.samples

    @property
    def temperature(self) -> float:
        """That of the least loss, by a parabola through the grid's least and its neighbours over log temperature."""
        index = int(np.clip(np.argmin(self.losses), 1, len(TEMPERATURES) - 2))
        below, middle, above = self.losses[index - 1 : index + 2]
        bend = below - 2 * middle + above
        part = float(np.clip((below - above) / (2 * bend), -1, 1)) if bend > 0 else 0.0
        return float(TEMPERATURES[index] * (TEMPERATURES[1] / TEMPERATURES[0]) ** part)

    @property
    def confidence(self) -> float:
        """The mean confidence at that temperature, linear between those of the grid."""
        means = self.confidences / self.samples
        return float(np.interp(np.log(self.temperature), np.log(TEMPERATURES), means))


def sums_of(scores: ArrayLike, labels: ArrayLike, threshold: float = 0.5) -> SiteSums:
    """The sums over the samples of a site.

    Args:
        scores: probabilities (n, classes).
        labels: class numbers (n,).
        threshold: of two classes, the score from which the second one is called.

    Example:
        >>> found = sums_of([[0.9, 0.1], [0.4, 0.6]], [0, 0])
        >>> found.samples, found.accuracy, found.confusion.tolist()
        (2, 0.5, [[1.0, 1.0], [0.0, 0.0]])
    """
    shares, truth = probabilities(scores), np.asarray(labels, dtype=np.int64)
    classes = shares.shape[1]
    predicted, bands = answers_of(shares)
    counts = np.zeros((2, BINS))
    np.add.at(counts, ((predicted == truth).astype(int), bins(shares.max(axis=1))), 1)
    answers = np.zeros((classes, classes, BANDS))
    np.add.at(answers, (truth, predicted, bands), 1)
    cost = transport_cost(shares, np.bincount(truth, minlength=classes) / len(truth)) * len(truth)
    losses, confidences = [], []
    for temperature in TEMPERATURES:
        warm = at_temperature(shares, float(temperature))
        losses.append(-np.log(np.maximum(warm[np.arange(len(truth)), truth], _LEAST)).sum())
        confidences.append(warm.max(axis=1).sum())
    scored = by_score(shares[:, 1], truth, threshold) if classes == 2 else None
    return SiteSums(len(truth), counts, np.array(losses), np.array(confidences), answers, cost, scored)


def probabilities(scores: ArrayLike) -> Numbers:
    """Scores (n, classes) as probabilities of at least 1e-12 whose sum is 1.

    Example:
        >>> probabilities([[2, 1]]).round(3).tolist()
        [[0.667, 0.333]]
    """
    shares = np.maximum(np.asarray(scores, dtype=np.float64), _LEAST)
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def at_temperature(shares: Numbers, temperature: float) -> Numbers:
    """Probabilities (n, classes) whose logits are divided by a temperature.

    Source: Guo, Pleiss, Sun, Weinberger, On calibration of modern neural networks, ICML 2017.

    Example:
        >>> at_temperature(np.array([[0.8, 0.2]]), 2.0).round(3).tolist()
        [[0.667, 0.333]]
    """
    logits = np.log(shares) / temperature
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def bins(confidence: Numbers) -> NDArray[np.int64]:
    """The bin of each confidence (n,): equal steps of −log(1 − confidence), so that sure predictions differ, too.

    Example:
        >>> bins(np.array([0.5, 0.99, 1.0])).tolist()
        [5, 33, 199]
    """
    lacking = -np.log(np.maximum(1 - confidence, _LEAST)) / -np.log(_LEAST)
    return np.asarray(np.minimum((lacking * BINS).astype(np.int64), BINS - 1))


def answers_of(shares: Numbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The predicted class and the band of confidence of each sample, both (n,).

    Example:
        >>> [part.tolist() for part in answers_of(np.array([[0.95, 0.05], [0.4, 0.6]]))]
        [[0, 1], [3, 1]]
    """
    return shares.argmax(axis=1), np.searchsorted(EDGES, shares.max(axis=1))


def transport_cost(shares: Numbers, frequencies: Numbers) -> float:
    """The mean cost of moving predictions (n, classes) to labels of the given class frequencies (classes,).

    To move a prediction p to class y costs 1 − p(y), which is half the L1 distance. Of many samples 2,000 are moved, in
    parts of 400.

    Source: Lu, Wang, Zhai, Kolouri, Campbell, Sycara, Characterizing out-of-distribution error via optimal transport,
    NeurIPS 2023.

    Example:
        >>> transport_cost(np.array([[0.9, 0.1], [0.8, 0.2]]), np.array([0.5, 0.5])).__round__(3)
        0.45
    """
    from scipy.optimize import linear_sum_assignment  # takes a while to import

    order = np.random.default_rng(0).permutation(len(shares))[:_MOST]
    total = 0.0
    for rows in np.array_split(order, -(-len(order) // _ROWS)):
        places = np.repeat(np.arange(shares.shape[1]), _whole(frequencies * len(rows)))
        cost = 1 - shares[rows][:, places]
        total += float(cost[linear_sum_assignment(cost)].sum())
    return total / len(order)


def _whole(amounts: Numbers) -> NDArray[np.int64]:
    """Whole numbers of the same sum, each less than 1 away (largest remainders)."""
    whole = np.floor(amounts + 1e-9).astype(np.int64)
    missing = round(float(amounts.sum())) - int(whole.sum())
    whole[np.argsort(whole - amounts, kind="stable")[:missing]] += 1
    return whole
