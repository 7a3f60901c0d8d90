"""Secure sums, under ``engine.aggregation``."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.federation.secure.integer_sums import SMALLEST_ROSTER
from fedshift.methods.base import Method, reads_of
from fedshift.methods.index import with_sums


def fits(about: About, method: Method) -> Iterator[str]:
    """Check that sums hide what a method's sites send."""
    if about.engine.sums_only:
        sources = about.fewest_sources if about.drawn is None else about.drawn
        unseen = about.experiment.protocol.unseen
        unlabelled = 0 if unseen else min(len(others) for _, others in about.roles)
        yield from check_sums(method, sources, unlabelled)


def check_sums(method: Method, sources: int, unlabelled: int = 0) -> tuple[str, ...]:
    """Check that secure aggregation can hide what a method's sites send.

    Args:
        sources: the fewest labelled sites of a round.

    Returns:
        Warnings.

    Raises:
        UserError: it cannot be hidden.
    """
    if reads_of(method) != "sums":
        why = "with robust aggregation " if method.robust is not None else ""
        if not why and type(method).traits.server_reads == "sums":
            why = "with these options "
        raise UserError(
            f"engine.aggregation: secure lets the server read sums only, but {why}it reads {reads_of(method)} of "
            f"{method.display}'s sites: choose {', '.join(with_sums())}" + (" without robust" if method.robust else "")
        )
    if sources < SMALLEST_ROSTER:
        raise UserError(
            f"engine.aggregation: secure needs {SMALLEST_ROSTER} labelled sites, here a round has {sources}: of "
            "two sites each would know the other's model from the sum"
        )
    if method.traits.needs_target and unlabelled < SMALLEST_ROSTER:
        raise UserError(
            f"engine.aggregation: secure needs {SMALLEST_ROSTER} sites without labels for {method.display}, which sums "
            f"their models by themselves; here a run has {unlabelled}"
        )
    most = method.traits.sums_per_model + 1
    if sources > most:
        return ()
    return (
        f"{method.display} with aggregation: secure among {sources} labelled sites: its sites learn "
        f"{most - 1} sums of the same models a round, from which each of them can compute the models of the others; "
        f"{most + 1} sites or more prevent it",
    )
