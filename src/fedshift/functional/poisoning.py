"""Wrong labels for a malicious source (KD3A's robustness experiment MA-m, Feng et al., ICML 2021; section 7.5)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from fedshift.errors import UserError


def wrong_labels(
    labels: npt.NDArray[np.int64],
    fraction: float,
    classes: int,
    seed: int,
    rule: Literal["uniform", "shift"] = "uniform",
) -> npt.NDArray[np.int64]:
    """A copy of ``labels`` in which ``round(n · fraction)`` are wrong; the same arguments always give the same labels.

    Of one seed, the wrong labels of a smaller fraction are among those of a larger one. The released code takes the
    first of every mini-batch instead, so that other samples are wrong in every epoch; here they stay the same.

    labels: (n,), 0 to ``classes`` − 1. rule: ``"uniform"`` draws each wrong label from the other classes;
        ``"shift"`` takes the next class, after the last the first.
    Raises UserError for a fraction outside [0, 1], fewer than 2 classes, and labels out of range.
    """
    if not 0 <= fraction <= 1:
        raise UserError(f"the fraction of wrong labels must be between 0 and 1, found {fraction}")
    if classes < 2:
        raise UserError(f"a wrong label needs at least 2 classes, found {classes}")
    count = len(labels)
    if count and not (labels.min() >= 0 and labels.max() < classes):
        raise UserError(f"labels must be 0 to {classes - 1}, found {labels.min()} to {labels.max()}")
    generator = np.random.default_rng(seed)
    chosen = generator.permutation(count)[: round(count * fraction)]
    steps = generator.integers(1, classes, count)[chosen] if rule == "uniform" else 1
    poisoned = labels.copy()
    poisoned[chosen] = (labels[chosen] + steps) % classes
    return poisoned
