"""Numbers of the federation in which some sites have labels and some have not: MDFNet's schedule, its gate and guard,
and what a pair of sites has in common.
"""

from __future__ import annotations

import math

from fedshift.errors import UserError


def progressive_weight(r: float, rho: float = 10.0) -> float:
    """``η = (1 − e^(−ρr)) / (2(1 + e^(−ρr)))``, the unlabelled sites' share, from 0 towards ½ (MDFNet, section 8.3).

    r: progress in [0, 1], or the number of the round (the paper's word, for which it is over after one round). Raises
    UserError when r or ρ is negative.
    """
    if r < 0 or rho < 0:
        raise UserError(f"the progressive weight needs r and rho of at least 0, found {r} and {rho}")
    return math.tanh(rho * r / 2) / 2


def collaborative_shares(labelled: int, unlabelled: int, weight: float) -> tuple[float, float]:
    """``(1 − η)/L`` of each labelled and ``η/U`` of each unlabelled site (MDFNet, section 8.3, step 4); all sum to 1.

    weight: η. Raises UserError without a labelled site, without an unlabelled one, or when η is outside [0, 1].
    """
    if labelled < 1 or unlabelled < 1:
        raise UserError(
            f"the federation has {labelled} labelled and {unlabelled} unlabelled sites: at least one of each is needed"
        )
    if not 0 <= weight <= 1:
        raise UserError(f"the unlabelled sites' share must lie in [0, 1], found {weight}")
    return (1 - weight) / labelled, weight / unlabelled


def is_ready(cross_entropy: float, classes: int, readiness: float) -> bool:
    """Whether a model tells classes apart: ``CE < q · ln C``, the readiness gate of MDFNet's practical setting.

    cross_entropy: of the labelled sites, in nats; guessing has ln C. classes: C. readiness: q. Raises UserError for
    fewer than two classes.
    """
    if classes < 2:
        raise UserError(f"a cross-entropy needs at least two classes to be compared with guessing, found {classes}")
    return cross_entropy < readiness * math.log(classes)


def progress_since(opened: int, done: int, rounds: int) -> float:
    """``r = (done − opened)/(rounds − 1 − opened)``, at most 1: 0 in the first round in which unlabelled sites take
    part, 1 in the last round planned. opened, done: rounds before that one, and before this one.
    """
    return min(1.0, (done - opened) / max(1, rounds - 1 - opened))


def names_few_classes(named: int, classes: int) -> bool:
    """Whether pseudo-labels name at most half of the classes, the sign that clusters fell into one another."""
    return 2 * named <= classes


def proxy_distance(error: float) -> float:
    """``d_A = 2(1 − 2ε)``, at least 0, from the error of a classifier that tells two domains apart (Ben-David et al.,
    Machine Learning 2010): 0 for domains that cannot be told apart, 2 for domains that always can.

    error: ε in [0, 1], both domains counting alike. Raises UserError for another value.
    """
    if not 0 <= error <= 1:
        raise UserError(f"an error rate lies in [0, 1], found {error}")
    return max(0.0, 2 * (1 - 2 * error))
