"""Information in predictions and features: SHOT's objective and pseudo-labels, FADA's mutual information."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.functional.losses import entropy


def information_maximisation(logits: Tensor, epsilon: float = 1e-5) -> Tensor:
    """``E[H(p)] − H(E[p])``, a scalar in nats, to be minimised (SHOT, Liang et al., ICML 2020).

    Each prediction becomes sure, all together stay diverse: 0 when all predictions are alike, and (up to ε) −log C when
    they are one-hot and every class is predicted equally often.
    logits: (n, C). E: mean over the batch. epsilon: added inside the logarithm.
    Raises UserError for an empty batch.
    """
    if logits.dim() != 2 or not logits.numel():
        raise UserError(f"information maximisation needs logits (n, C) of a batch, found {tuple(logits.shape)}")
    probabilities = logits.softmax(1)
    return entropy(probabilities, epsilon).mean() - entropy(probabilities.mean(0), epsilon)


@torch.no_grad()
def pseudo_labels(features: Tensor, probabilities: Tensor) -> Tensor:
    """Class of the nearest class centroid for every target sample, (n,) int64 (SHOT, steps 1-4).

    features: (n, d), of all target samples in evaluation mode. probabilities: (n, C), each row a softmax.

    1. A constant 1 is appended to the features, then each row divided by its L2 norm. 2. Centroids are the means
    weighted by the probabilities. 3. Each sample takes the class whose centroid has the largest cosine, among classes
    that are some sample's most probable one. 4. Centroids become the means of the samples so labelled, and the samples
    are labelled again. A class that lost all its samples in step 3 has no centroid in step 4 and takes no part (in the
    released code its undefined distance would win every sample).

    Raises UserError when there is no sample or the numbers of rows differ.
    """
    if features.dim() != 2 or probabilities.dim() != 2 or len(features) != len(probabilities) or not len(features):
        raise UserError(
            f"pseudo-labels need features (n, d) and probabilities (n, C) of the same samples, found "
            f"{tuple(features.shape)} and {tuple(probabilities.shape)}"
        )
    points = functional.normalize(functional.pad(features, (0, 1), value=1.0))
    labels = _nearest(points, probabilities, probabilities.argmax(1))
    return _nearest(points, functional.one_hot(labels, probabilities.shape[1]), labels)


def _nearest(points: Tensor, affinity: Tensor, occupied: Tensor) -> Tensor:
    """The most similar centroid of each point; centroids are means weighted by ``affinity`` (n, C).

    occupied: (n,), the classes that may be chosen.
    """
    # Only directions matter, so sums serve as means.
    centroids = functional.normalize(affinity.to(points).T @ points)
    empty = torch.ones(len(centroids), dtype=torch.bool, device=points.device)
    empty[occupied] = False
    return (points @ centroids.T).masked_fill(empty, -math.inf).argmax(1)


def mutual_information(scores_joint: Tensor, scores_shuffled: Tensor) -> Tensor:
    """``mean T(p, q) − log mean exp T(p, q')``, a scalar in nats: over large batches a lower bound of the mutual
    information of p and q (MINE, Belghazi et al., ICML 2018; FADA).

    The critic T maximises it; FADA's disentangler minimises it.
    scores_joint: T of pairs that belong together, one per pair, any shape. scores_shuffled: T of pairs in which q' was
        drawn from another sample; the number may differ. Adding a constant to all scores changes nothing.
    Raises UserError when one of them is empty.
    """
    if not scores_joint.numel() or not scores_shuffled.numel():
        raise UserError("mutual information needs at least one score of joint and one of shuffled pairs")
    return scores_joint.mean() - scores_shuffled.flatten().logsumexp(0) + math.log(scores_shuffled.numel())
