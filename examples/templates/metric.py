"""A metric: Cohen's kappa, the agreement of predicted and true classes beyond chance.

To add it to fedshift, move the function and the entry to ``fedshift/evaluation/metric_entries.py``. Records, intervals,
tables, the page and ``--metric`` follow from the entry. J. Cohen, Educational and Psychological Measurement 1960.
"""

from fedshift.evaluation.metric_entries import MetricEntry
from fedshift.evaluation.weighted_samples import Classified, Numbers


def kappa(samples: Classified) -> Numbers:
    """(p_o − p_e) / (1 − p_e), with p_e = Σ_c p(true c) p(predicted c): for weights (b, n) the values (b,)."""
    observed = samples.right / samples.total
    chance = (samples.support * samples.predicted).sum(axis=1) / samples.total**2
    return (observed - chance) / (1 - chance)


KAPPA = MetricEntry(
    name="kappa",
    title="Cohen's kappa",
    meaning="It is the agreement of predicted and true classes beyond chance, in percent: 0 for guessing.",
    tasks={"accuracy": kappa},
    column="kappa",
    low=-100.0,
    needs=frozenset({"several classes present"}),
    by_class=True,
)
