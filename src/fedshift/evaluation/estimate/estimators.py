"""Estimates of a model's accuracy on samples without labels, each from sums over labelled sites.

All are published, but for the correction of transport by its cost at the labelled sites. All take the sums over
labelled sites (`SiteSums`) and the probabilities of the site without labels (m, classes), and give a share of right
predictions. None of them is best everywhere: confidence is off under covariate shift, class frequencies mislead where
they moved. `fedshift.evaluation.estimate.combination` weighs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fedshift.evaluation.estimate.sums import (
    BANDS,
    BINS,
    Numbers,
    SiteSums,
    answers_of,
    at_temperature,
    bins,
    transport_cost,
)

_STEPS = 200
_RIDGE = 0.01
_SMOOTH = 0.5
"""Samples that each class is given of what all together are."""
_FEW = 3.0


def at_fitted_temperature(sums: SiteSums, shares: Numbers) -> Numbers:
    """The probabilities at the temperature that fits the labelled sites.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> new = np.array([[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> at_fitted_temperature(sums, new)[0].round(3).tolist()
        [0.711, 0.289]
    """
    return at_temperature(shares, sums.temperature)


def confidence(sums: SiteSums, shares: Numbers) -> float:
    """The mean confidence, at the temperature that fits the labelled sites.

    Source: Hendrycks, Gimpel, ICLR 2017, with the temperature of Guo et al., ICML 2017.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> new = np.array([[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> round(confidence(sums, new), 3)
        0.752
    """
    return float(at_fitted_temperature(sums, shares).max(axis=1).mean())


def difference_of_confidences(sums: SiteSums, shares: Numbers) -> float:
    """DoC: the accuracy at the labelled sites, less by what the mean confidence is less.

    Source: Guillory, Shankar, Ebrahimi, Darrell, Schmidt, Predicting with confidence on unseen distributions, ICCV
    2021.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> new = np.array([[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> round(difference_of_confidences(sums, new), 3)
        0.78
    """
    return _share(sums.accuracy + confidence(sums, shares) - sums.confidence)


def thresholded_confidence(sums: SiteSums, shares: Numbers) -> float:
    """ATC: the share above the confidence that as many samples of the labelled sites exceed as are right.

    Within the threshold's bin the share is linear.

    Source: Garg, Balakrishnan, Lipton, Neyshabur, Sedghi, Leveraging unlabeled data to predict out-of-distribution
    performance, ICLR 2022 (equations 1 and 2, maximum confidence).

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> new = np.array([[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> round(thresholded_confidence(sums, new), 3)
        0.3
    """
    wrong = sums.samples * (1 - sums.accuracy)
    counts, mine = sums.by_confidence.sum(axis=0), np.bincount(bins(shares.max(axis=1)), minlength=BINS)
    below = np.concatenate(([0.0], np.cumsum(counts)))
    cut = int(np.clip(np.searchsorted(below, wrong, side="right") - 1, 0, len(counts) - 1))
    part = (wrong - below[cut]) / counts[cut] if counts[cut] else 0.0
    return _share(1 - (mine[:cut].sum() + part * mine[cut : cut + 1].sum()) / len(shares))


def sureness(sums: SiteSums, shares: Numbers) -> float:
    """The mean confidence as it is: without labels no temperature is known to fit here.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> new = np.array([[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> round(sureness(sums, new), 3)
        0.74
    """
    return float(shares.max(axis=1).mean())


def transport(sums: SiteSums, shares: Numbers) -> float:
    """COT: 1 less the cost of moving the predictions to labels with the class frequencies of the labelled sites.

    Source: see `transport_cost`.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> new = np.array([[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> round(transport(sums, new), 3)
        0.7
    """
    return _share(1 - transport_cost(shares, sums.frequencies))


def difference_of_transport(sums: SiteSums, shares: Numbers) -> float:
    """The accuracy at the labelled sites, less by what transport costs more here than at each of them by itself.

    To transport what `difference_of_confidences` is to confidence.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> new = np.array([[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> round(difference_of_transport(sums, new), 3)
        0.82
    """
    return _share(sums.accuracy + sums.cost / sums.samples - transport_cost(shares, sums.frequencies))


def moved_frequencies(sums: SiteSums, shares: Numbers) -> Numbers:
    """The class frequencies at the site without labels by EM, if only these differ (label shift), (classes,).

    Source: Saerens, Latinne, Decaestecker, Adjusting the outputs of a classifier to new a priori probabilities, Neural
    Computation 2002 (equations 2.7 to 2.9), with the temperature of Alexandari et al., ICML 2020.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> even = sums_of([[0.9, 0.1], [0.1, 0.9]] * 50, [0, 1] * 50)
        >>> moved_frequencies(even, np.array([[0.9, 0.1]] * 90 + [[0.1, 0.9]] * 10)).round(1).tolist()
        [0.9, 0.1]
    """
    base, known = np.maximum(sums.frequencies, 1e-6), at_fitted_temperature(sums, shares)
    moved = base.copy()
    for _ in range(_STEPS):
        posterior = known * (moved / base)
        posterior /= posterior.sum(axis=1, keepdims=True)
        before, moved = moved, posterior.mean(axis=0)
        if np.abs(moved - before).max() < 1e-7:
            break
    return moved


def by_moved_frequencies(sums: SiteSums, shares: Numbers) -> float:
    """The mean probability of what is predicted, after EM has moved the class frequencies: see `moved_frequencies`.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> new = np.array([[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> round(by_moved_frequencies(sums, new), 3)
        0.753
    """
    moved = moved_frequencies(sums, shares)
    posterior = at_fitted_temperature(sums, shares) * (moved / np.maximum(sums.frequencies, 1e-6))
    posterior /= posterior.sum(axis=1, keepdims=True)
    return float(posterior[np.arange(len(shares)), shares.argmax(axis=1)].mean())


def by_confusion(sums: SiteSums, shares: Numbers) -> float:
    """BBSE: the labelled sites' recalls, weighted by class frequencies that explain what is predicted here.

    These are the solution of confusion · frequencies = predicted shares, by least squares with a small ridge towards
    the labelled sites' frequencies, cut at 0.

    Source: Lipton, Wang, Smola, Detecting and correcting for label shift with black box predictors, ICML 2018.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> new = np.array([[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> round(by_confusion(sums, new), 3)
        0.9
    """
    base = sums.frequencies
    joint = sums.confusion.T / sums.samples
    mine = np.bincount(shares.argmax(axis=1), minlength=len(base)) / len(shares)
    gram = joint.T @ joint + _RIDGE * np.eye(len(base)) * np.square(joint).sum()
    ratio = np.maximum(1 + np.linalg.solve(gram, joint.T @ (mine - joint.sum(axis=1))), 0.0)
    frequencies = base * ratio
    return _share(float(frequencies @ sums.recalls / frequencies.sum())) if frequencies.sum() > 0 else sums.accuracy


def histogram_binning(sums: SiteSums, shares: Numbers) -> float:
    """The share that is right at the labelled sites among predictions of the same class and band of confidence.

    Where few samples are known, `_FEW` more count that are as often right as all.

    Source: histogram binning of Zadrozny, Elkan, Obtaining calibrated probability estimates from decision trees and
    naive Bayesian classifiers, ICML 2001.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> round(histogram_binning(sums, np.array([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4)), 3)
        0.896
    """
    predicted, bands = answers_of(shares)
    right = np.stack([sums.answers[label, label] for label in range(len(sums.answers))])
    known = (right + _FEW * sums.accuracy) / (sums.answers.sum(axis=0) + _FEW)
    return float(known[predicted, bands].mean())


def margin(shares: Numbers) -> float:
    """The mean difference of the two largest probabilities.

    Source: Scheffer, Decomain, Wrobel, Active hidden Markov models for information extraction, IDA 2001.

    Example:
        >>> round(margin(np.array([[0.7, 0.2, 0.1], [0.4, 0.1, 0.5]])), 3)
        0.3
    """
    largest = np.sort(shares, axis=1)[:, -2:]
    return float((largest[:, 1] - largest[:, 0]).mean())


def matrix_norm(shares: Numbers) -> float:
    """MaNo: the norm of order 4 of the matrix of probabilities, 1 where all are sure.

    Source: Xie, Odonnat, Feofanov, Deng, Zhang, An, MaNo: exploiting matrix norm for unsupervised accuracy estimation
    under distribution shifts, NeurIPS 2024 (with the softmax), without its division by the number of classes.

    Example:
        >>> round(matrix_norm(np.array([[1.0, 0.0], [0.0, 1.0]])), 3), round(matrix_norm(np.full((3, 2), 0.5)), 3)
        (1.0, 0.595)
    """
    return float(np.mean(np.sum(shares**4, axis=1)) ** 0.25)


def agreement(all_shares: Numbers) -> float:
    """The share of samples on which two models of different seeds agree, mean over pairs: (models, m, classes).

    Source: Jiang, Nagarajan, Baek, Kolter, Assessing generalization of SGD via disagreement, ICLR 2022.

    Example:
        >>> agreement(np.array([[[0.9, 0.1], [0.4, 0.6]], [[0.8, 0.2], [0.7, 0.3]]]))
        0.5
    """
    predictions = all_shares.argmax(axis=2)
    pairs = [(first == second).mean() for i, first in enumerate(predictions) for second in predictions[:i]]
    return float(np.mean(pairs))


def _share(value: float) -> float:
    return float(min(1.0, max(0.0, value)))


def unexplained_share(sums: SiteSums, shares: Numbers) -> float:
    """The share of samples that no class frequencies explain: 0 if only these moved (label shift), up to 1.

    Predictions by class and band of confidence are taken for a mixture of those of each class at the labelled sites.
    The frequencies of the greatest likelihood are found by EM; what remains is a total variation distance.

    Source: the test of label shift in Lipton, Wang, Smola, ICML 2018, section 5, with bands of confidence.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> site = np.array([[0.95, 0.05]] * 60 + [[0.05, 0.95]] * 40)
        >>> sums = sums_of(site, [0] * 60 + [1] * 40)
        >>> unexplained_share(sums, site[30:]) < 0.02, unexplained_share(sums, np.full((50, 2), 0.5)) > 0.9
        (True, True)
    """
    classes = len(sums.frequencies)
    joint = sums.answers.reshape(classes, -1)
    pooled = joint.sum(axis=0) / sums.samples
    by_class = joint + _SMOOTH * classes * pooled + 1e-3 / joint.shape[1]
    by_class /= by_class.sum(axis=1, keepdims=True)
    predicted, bands = answers_of(shares)
    mine = np.bincount(predicted * BANDS + bands, minlength=joint.shape[1]) / len(shares)
    frequencies = np.full(classes, 1 / classes)
    for _ in range(_STEPS):
        part = frequencies[:, None] * by_class
        frequencies = (part / part.sum(axis=0) * mine).sum(axis=1)
    return float(np.abs(mine - frequencies @ by_class).sum() / 2)


def distance_of_confidence(sums: SiteSums, shares: Numbers) -> float:
    """How far the confidence is from that at the labelled sites: Wasserstein's distance of the bins, 0 to 1.

    Example:
        >>> from fedshift.evaluation.estimate.sums import sums_of
        >>> sums = sums_of([[0.9, 0.1]] * 6 + [[0.2, 0.8]] * 4, [0] * 5 + [1] * 5)
        >>> new = np.array([[0.7, 0.3]] * 6 + [[0.2, 0.8]] * 4)
        >>> round(distance_of_confidence(sums, new), 3)
        0.024
    """
    mine = np.bincount(bins(shares.max(axis=1)), minlength=BINS) / len(shares)
    return float(np.abs(np.cumsum(mine - sums.by_confidence.sum(axis=0) / sums.samples)).mean())


ESTIMATORS: Mapping[str, Callable[[SiteSums, Numbers], float]] = {
    "sureness": sureness,
    "confidence": confidence,
    "difference of confidences": difference_of_confidences,
    "thresholded confidence": thresholded_confidence,
    "transport": transport,
    "difference of transport": difference_of_transport,
    "moved frequencies": by_moved_frequencies,
    "confusion": by_confusion,
}
"""Those that read one model's scores."""
