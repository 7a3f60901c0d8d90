"""Whether an adapted model answers at a site without labels, or the common one: decided by the sites that have labels.

Each of these was the target once, and what adapting gained there is known. At the site without labels it is not, and
the difference of both models' estimates says less than the other sites' gains do (benchmarks/choice.md). So an adapted
model answers where it gained at the other sites on average, by more than chance may do, and did harm at hardly any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

ERRORS = 0.5
"""Standard errors by which the mean gain must exceed 0."""
SPREAD = 3.0
"""Points by which gains of sites differ at least, however alike they look."""
HARM = 3.0
"""Points lost at a labelled site that are harm: where more than one of ten are harmed the common model answers."""
_HARMED = 0.1
FEWEST = 3


def margin(gains: Sequence[float]) -> float | None:
    """The mean gain less half a standard error, in points; None from fewer than three sites.

    Args:
        gains: of adapting at each labelled site, in points.

    Example:
        >>> round(margin([15.0, 9.0, 21.0]), 2), margin([5.0, 5.0])
        (13.06, None)
    """
    if len(gains) < FEWEST:
        return None
    return fmean(gains) - ERRORS * math.hypot(stdev(gains), SPREAD) / math.sqrt(len(gains))


def harms(gains: Sequence[float]) -> bool:
    """Whether more than one of ten labelled sites lost 3 points or more.

    Example:
        >>> harms([9.0, 8.0, -4.0]), harms([9.0] * 19 + [-4.0])
        (True, False)
    """
    return sum(gain <= -HARM for gain in gains) > _HARMED * len(gains)


def choose(gains: Mapping[str, Sequence[float]]) -> str | None:
    """The method whose adapted model answers, that of the largest margin; None: the common model does.

    Args:
        gains: method → its gains over the common model at the labelled sites, in points.

    Example:
        >>> choose({"shot": [5.8, 3.0, 6.4], "recipe": [17.8, 15.6, 9.4]}), choose({"shot": [1.0, 29.5, -11.0]})
        ('recipe', None)
    """
    margins = {name: result for name, gain in gains.items() if (result := margin(gain)) is not None}
    able = [name for name, result in margins.items() if result > 0 and not harms(gains[name])]
    return max(able, key=margins.__getitem__, default=None)
