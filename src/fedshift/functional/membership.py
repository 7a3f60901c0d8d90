"""Whether a model betrays that a sample trained it: likelihood ratios from shadow models.

Carlini, Chien, Nasr, Song, Terzis, Tramèr: Membership Inference Attacks From First Principles. IEEE S&P 2022. A shadow
model is trained like the model that is attacked, with some of the samples and without the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

PER_SAMPLE = 64
"""From this many shadow models on each sample has variances of its own. The paper, too, has common ones for few."""
_LEAST_VARIANCE = 1e-6


def scaled_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """φ = log(p / (1 − p)), p the probability of the right class: about normal over models, unlike p.

    It is computed as z_y − log Σ_{c≠y} exp z_c, which is finite also where p is rounded to 1.

    ``logits``: z, (n, C), or logarithms of probabilities; C at least 2. ``labels``: y, (n,). Returns φ, (n,), in
    float64.

    Example:
        >>> scaled_confidence(torch.tensor([[2.0, 0.5], [100.0, 0.0]]), torch.tensor([0, 1]))
        tensor([   1.5000, -100.0000], dtype=torch.float64)
    """
    scores, columns = logits.double(), labels[:, None]
    return scores.gather(1, columns)[:, 0] - scores.scatter(1, columns, -torch.inf).logsumexp(1)


def likelihood_ratios(confidence: Tensor, shadows: Tensor, members: Tensor) -> Tensor:
    """log of N(φ; μ_in, σ²_in) / N(φ; μ_out, σ²_out) for each model and sample: the online attack (Algorithm 1).

    Shadow models with the sample give μ_in and σ²_in, those without it μ_out and σ²_out. Fewer shadow models than
    `PER_SAMPLE` have one σ²_in and one σ²_out for all samples.

    ``confidence``: φ under the models that are attacked, (models, samples). ``shadows``: φ under the shadow models,
    (shadows, samples). ``members``: which samples trained which shadow model, (shadows, samples), bool. Returns
    (models, samples): above 0 for what is likelier a member. 0 where no shadow model has the sample, or all have.

    Example:
        >>> shadows = torch.tensor([[2.0], [4.0], [0.0], [-2.0]], dtype=torch.float64)
        >>> members = torch.tensor([[True], [True], [False], [False]])
        >>> likelihood_ratios(torch.tensor([[3.0]]).double(), shadows, members)  # N(3; 3, 2) beside N(3; -1, 2)
        tensor([[4.]], dtype=torch.float64)
    """
    log_densities = []
    for side in (members, ~members):
        mean, variance = _normal(shadows, side)
        log_densities.append(-((confidence - mean).square() / variance + variance.log()) / 2)
    return (log_densities[0] - log_densities[1]).nan_to_num(0.0)


def _normal(confidence: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each column's chosen rows; the mean of none is not a number."""
    number, chosen = chosen.sum(0), chosen.double()
    mean = (confidence * chosen).sum(0) / number
    squares, free = ((confidence - mean).square() * chosen).nan_to_num(0.0).sum(0), (number - 1).clamp(min=0)
    if len(confidence) < PER_SAMPLE:
        squares, free = squares.sum(), free.sum()
    return mean, (squares / free.clamp(min=1)).clamp(min=_LEAST_VARIANCE)


def found_at(scores: Tensor, members: Tensor, rate: float) -> tuple[int, int]:
    """Members found, and others taken for members, if at most the share ``rate`` of the others may be.

    The threshold for each model is the lowest score at which the other models have no more false positives than that.
    So what is counted was not used to choose it.

    ``scores``: (models, samples), higher for likelier members; at least two models. ``members``: (models, samples),
    bool. ``rate``: the rate of false positives that is aimed at. Returns the true and the false positives, over all
    models.

    Example:
        >>> scores = torch.tensor([[1.0, 2.0, 3.0, 9.0], [1.0, 2.0, 3.0, 9.0]])
        >>> found_at(scores, torch.tensor([[False, False, True, True]]).repeat(2, 1), 0.5)
        (4, 2)
    """
    everyone, true, false = torch.arange(len(scores)), 0, 0
    for number, (own_scores, inside) in enumerate(zip(scores, members, strict=True)):
        others = everyone != number
        outside = scores[others][~members[others]].sort(descending=True).values
        if not len(outside):
            continue  # nothing to set the threshold by
        above = own_scores > outside[min(int(rate * len(outside)), len(outside) - 1)]
        true, false = true + int((above & inside).sum()), false + int((above & ~inside).sum())
    return true, false
