"""How often a pooled method steps its model in a run."""

from __future__ import annotations

from collections.abc import Mapping

from fedshift.methods.base import Method
from fedshift.methods.pooled.deepall import DeepAll


def steps_of_run(method: Method, mini_batches: Mapping[str, int]) -> float | None:
    """Steps of the optimiser for the model that is published, in a whole run.

    ``mini_batches``: site → what it may train on in the run; 0 where it takes no part. Returns how many there are, but
    for a remainder of a step at the run's end; None for a method that is not pooled.

    Example:
        >>> steps_of_run(DeepAll(), {"a": 30, "b": 20, "c": 10}), steps_of_run(DeepAll(domain_batches="full"), {"a": 9})
        (60.0, 9.0)
    """
    if not isinstance(method, DeepAll):
        return None
    return method.steps(sum(mini_batches.values()), sum(number > 0 for number in mini_batches.values()))
