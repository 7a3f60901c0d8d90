"""How far an estimate goes toward the mean accuracy of the left-out sites.

Where a model is about as good at every site, their mean foretells the next one better than any estimator does, which
adds noise of its own; where sites differ, the mean says little. Which it is, the left-out sites show: each one's
accuracy is estimated from the others, and so is what it would have been foretold by their mean. The part of the way
from the one to the other that would have been best there is taken here, too (stacking, Wolpert 1992; Breiman 1996):

    part = (WEIGHT · PART + Σₛ mean(−error · gap)) / (WEIGHT + Σₛ mean(gap²)), at least 0 and at most 1,

over each site's cases, on the logit scale; error: the estimate less the truth; gap: the others' mean less the estimate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedshift.evaluation.estimate.sums import Numbers

WEIGHT, PART = 0.1, 0.2
"""Before any site is seen the part is PART, which counts for as much as a squared gap of WEIGHT. Chosen on seven data
sets and 34 tables together, the same for all (benchmarks/estimate.md)."""


@dataclass(frozen=True)
class Gaps:
    """Of a left-out site's cases, on the logit scale.

    Attributes:
        errors: the estimate less the truth (n,).
        gaps: the mean of the other sites less the estimate (n,).
    """

    errors: Numbers
    gaps: Numbers

    def off(self, part: float) -> Numbers:
        """How far the estimates are off (n,) after they went this part of the way.

        Example:
            >>> Gaps(np.array([0.5, -1.0]), np.array([-0.5, 2.0])).off(0.5).tolist()
            [0.25, 0.0]
        """
        return self.errors + part * self.gaps


def best_part(sites: Iterable[Gaps]) -> float:
    """The part of the way that would have been best at left-out sites.

    Example:
        >>> alike = Gaps(errors=np.array([1.0, -1.0]), gaps=np.array([-1.0, 1.0]))  # the others' mean is the truth
        >>> round(best_part([alike] * 4), 2), round(best_part([Gaps(np.zeros(2), alike.gaps)] * 4), 3)
        (0.98, 0.005)
        >>> round(best_part([]), 2)
        0.2
    """
    product, square = WEIGHT * PART, WEIGHT
    for site in sites:
        product -= float(np.mean(site.errors * site.gaps))
        square += float(np.mean(np.square(site.gaps)))
    return min(1.0, max(0.0, product / square))
