"""Times to an event, some of which are only known to be longer than what was observed."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MeanOver = Literal["events", "samples"]


def partial_likelihood(risks: Tensor, times: Tensor, events: Tensor, mean_over: MeanOver = "events") -> Tensor:
    """The negative logarithm of Cox's partial likelihood, mean over the events or samples; 0 without an event.

    Of events at the same time t, Efron's approximation is used: with the d events D at t and the samples R that were
    observed until t or longer,

        Σ_{i∈D} r_i − Σ_{l=0}^{d−1} log( Σ_{j∈R} exp r_j − l/d · Σ_{i∈D} exp r_i )

    Source: Cox, J. R. Stat. Soc. B 1972; Efron, JASA 1977.

    ``risks``: logarithms of relative hazards, (n,). ``times``: until the event, or until the sample was seen last,
    (n,). ``events``: 1 where the event happened at that time, 0 where it was not seen, (n,). ``mean_over``: what the
    sum is divided by the number of.

    Example:
        >>> partial_likelihood(torch.zeros(2), torch.tensor([1.0, 2.0]), torch.ones(2))  # (log 2 + log 1) / 2
        tensor(0.3466)
    """
    happened = events > 0
    count = happened.sum()
    if count == 0:
        return risks.sum() * 0.0  # a loss of every sample, so that there is a gradient, and it is 0
    at = times[happened]
    same = at[:, None] == at[None, :]
    # The events of one time in any order: the first leaves out none of the others, the last all but itself.
    before = torch.ones_like(same).tril(-1) & same
    share = before.sum(1).to(risks.dtype) / same.sum(1)
    # Each sum has positive terms alone, 1 of a sample in R and 1 − l/d of one in D. So its logarithm is taken with the
    # largest term of its own; that of the batch may have left long before.
    weights = (times[None, :] >= at[:, None]).to(risks.dtype)
    weights = weights - share[:, None] * ((times[None, :] == at[:, None]) & happened[None, :])
    terms = risks[happened] - (risks[None, :] + weights.log()).logsumexp(1)
    return -terms.sum() / (count if mean_over == "events" else len(risks))
