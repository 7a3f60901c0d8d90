"""Wrong labels for a malicious source (KD3A's robustness experiment MA-m, Feng et al., ICML 2021)."""

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
    """A copy of ``labels`` in which ``round(n · fraction)`` are wrong. Equal arguments give equal labels.

    With one seed, the wrong labels of a smaller fraction are among those of a larger one. The same samples stay wrong
    in every epoch. In the released code they change, since it takes the first samples of each mini-batch.

    ``labels``: (n,), 0 to ``classes`` − 1. ``fraction``: share of wrong labels, in [0, 1]. ``classes``: number of
    classes, at least 2. ``seed``: seed of the choice. ``rule``: ``"uniform"`` draws each wrong label from the other
    classes. ``"shift"`` takes the next class, and the first after the last. Raises UserError: a fraction outside [0,
    1], fewer than 2 classes, or labels out of range.

    Example:
        >>> labels = np.zeros(10, dtype=np.int64)
        >>> sorted(wrong_labels(labels, 0.3, classes=2, seed=0).tolist())
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
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
