"""MDFNet's schedule, its readiness gate and collapse guard, and the proxy A-distance between two sites."""

from __future__ import annotations

import math

from fedshift.errors import UserError


def progressive_weight(r: float, rho: float = 10.0) -> float:
    """The unlabelled sites' share ``η = (1 − e^(−ρr)) / (2(1 + e^(−ρr)))``, from 0 towards ½ (MDFNet).

    Args:
        r: progress in [0, 1]. Or the number of the round, as the paper says; then η is near ½ after one round.
        rho: ρ, at least 0.

    Raises:
        UserError: r or ρ is negative.

    Example:
        >>> [round(progressive_weight(r), 4) for r in (0.0, 0.1, 1.0)]
        [0.0, 0.2311, 0.5]
    """
    if r < 0 or rho < 0:
        raise UserError(f"the progressive weight needs r and rho of at least 0, found {r} and {rho}")
    return math.tanh(rho * r / 2) / 2


def collaborative_shares(labelled: int, unlabelled: int, weight: float) -> tuple[float, float]:
    """Share ``(1 − η)/L`` of each labelled site and ``η/U`` of each unlabelled one; all sum to 1 (MDFNet).

    Args:
        labelled: L, at least 1.
        unlabelled: U, at least 1.
        weight: η, in [0, 1].

    Raises:
        UserError: one kind of site is missing, or η is outside [0, 1].

    Example:
        >>> collaborative_shares(2, 1, weight=0.5)
        (0.25, 0.5)
    """
    if labelled < 1 or unlabelled < 1:
        raise UserError(
            f"the federation has {labelled} labelled and {unlabelled} unlabelled sites: at least one of each is needed"
        )
    if not 0 <= weight <= 1:
        raise UserError(f"the unlabelled sites' share must lie in [0, 1], found {weight}")
    return (1 - weight) / labelled, weight / unlabelled


def is_ready(cross_entropy: float, classes: int, readiness: float) -> bool:
    """Whether a model can tell classes apart: ``CE < q · ln C``. The readiness gate of MDFNet's practical setting.

    Args:
        cross_entropy: of the labelled sites, in nats. Guessing has ln C.
        classes: C, at least 2.
        readiness: q.

    Raises:
        UserError: fewer than two classes.

    Example:
        >>> is_ready(0.5, classes=10, readiness=0.25), is_ready(0.6, classes=10, readiness=0.25)  # ¼ ln 10 = 0.576
        (True, False)
    """
    if classes < 2:
        raise UserError(f"a cross-entropy needs at least two classes to be compared with guessing, found {classes}")
    return cross_entropy < readiness * math.log(classes)


def progress_since(opened: int, done: int, rounds: int) -> float:
    """Progress ``r = (done − opened)/(rounds − 1 − opened)`` since the gate opened, at most 1.

    It is 0 in the first round in which unlabelled sites take part, and 1 in the last round planned.

    Args:
        opened: rounds before the gate opened.
        done: rounds before this one.
        rounds: rounds planned.

    Example:
        >>> progress_since(opened=2, done=2, rounds=7), progress_since(opened=2, done=6, rounds=7)
        (0.0, 1.0)
    """
    return min(1.0, (done - opened) / max(1, rounds - 1 - opened))


def names_few_classes(named: float, classes: int) -> bool:
    """Whether pseudo-labels name at most half of the classes: a sign that clusters have merged.

    Example:
        >>> names_few_classes(named=5, classes=10), names_few_classes(named=6, classes=10)
        (True, False)
    """
    return 2 * named <= classes


def proxy_distance(error: float) -> float:
    """Proxy A-distance ``d_A = 2(1 − 2ε)``, at least 0: 0 for equal domains, 2 for domains that differ always.

    Source: Ben-David et al. (Machine Learning 2010).

    Args:
        error: ε in [0, 1], the error of a classifier that tells the two domains apart. Both have the same weight.

    Raises:
        UserError: the error lies outside [0, 1].

    Example:
        >>> proxy_distance(0.5), proxy_distance(0.25), proxy_distance(0.0)
        (0.0, 1.0, 2.0)
    """
    if not 0 <= error <= 1:
        raise UserError(f"an error rate lies in [0, 1], found {error}")
    return max(0.0, 2 * (1 - 2 * error))
