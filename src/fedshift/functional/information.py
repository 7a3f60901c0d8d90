"""Information in predictions and features: SHOT's objective and pseudo-labels, FADA's mutual information."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.functional.losses import entropy


def information_maximisation(logits: Tensor, epsilon: float = 1e-5) -> Tensor:
    """SHOT's objective ``E[H(p)] − H(E[p])``, a scalar in nats, to be minimised (Liang et al., ICML 2020).

    It makes each prediction sure and all predictions together diverse. It is 0 when all predictions are alike, and −log
    C (up to ε) when they are one-hot and every class is predicted equally often.

    ``logits``: (n, C). E is the mean over the batch. ``epsilon``: added inside the logarithm. Raises UserError: an
    empty batch, or another shape.

    Example:
        >>> information_maximisation(torch.tensor([[9.0, -9.0], [-9.0, 9.0]])).round(decimals=3)  # −ln 2
        tensor(-0.6930)
    """
    if logits.dim() != 2 or not logits.numel():
        raise UserError(f"information maximisation needs logits (n, C) of a batch, found {tuple(logits.shape)}")
    probabilities = logits.softmax(1)
    return entropy(probabilities, epsilon).mean() - entropy(probabilities.mean(0), epsilon)


@torch.no_grad()
def pseudo_labels(features: Tensor, probabilities: Tensor) -> Tensor:
    """Class of the nearest class centroid for every target sample (SHOT, Liang et al., ICML 2020).

    1. Append a constant 1 to the features, then divide each row by its L2 norm.

    2. Centroids are the means weighted by the probabilities.

    3. Each sample takes the class whose centroid has the largest cosine, among classes that are some sample's most
    probable one.

    4. Centroids become the means of the samples so labelled, and the samples are labelled again.

    A class that loses all its samples in step 3 takes no part in step 4, as in the released code for objects
    (object/image_target.py, `obtain_label`). In that for digits (digit/uda_digit.py) its undefined distance wins every
    sample.

    ``features``: (n, d), of all target samples in evaluation mode. ``probabilities``: (n, C), each row a softmax.
    Returns (n,) int64. Raises UserError: there is no sample, or the numbers of rows differ.

    Example:
        >>> features = torch.tensor([[5.0, 0.0], [4.0, 0.0], [0.0, 5.0]])
        >>> pseudo_labels(features, torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.1, 0.9]]))
        tensor([0, 0, 1])
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

    ``points``: (n, d), unit vectors. ``affinity``: (n, C). ``occupied``: the classes that may be chosen, (n,).
    """
    # Only directions matter, so sums serve as means.
    centroids = functional.normalize(affinity.to(points).T @ points)
    empty = torch.ones(len(centroids), dtype=torch.bool, device=points.device)
    empty[occupied] = False
    return (points @ centroids.T).masked_fill(empty, -math.inf).argmax(1)
