"""Sources that are drawn for each round, under ``protocol.sites_per_round``."""

from __future__ import annotations

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method
from fedshift.methods.robust import Trust


def fits(about: About) -> None:
    """Check that a round can do without the sources that are not drawn for it."""
    drawn, sources, quorum = about.drawn, about.fewest_sources, about.engine.quorum
    if drawn is None:
        return
    if drawn > sources:
        raise UserError(f"protocol.sites_per_round: {drawn} of {sources} sources cannot be drawn; lower it")
    if quorum is not None and quorum > drawn:
        raise UserError(
            f"engine.quorum: {quorum} sites must answer, but {drawn} are drawn for a round "
            "(protocol.sites_per_round): lower it"
        )
    for method in about.experiment.methods:
        if why := _needs_all(method):
            raise UserError(
                f"protocol.sites_per_round: {method.display} {why}: choose another method, or leave sites_per_round out"
            )
    if about.engine.sums_only and about.experiment.training.privacy is None:
        raise UserError(
            "protocol.sites_per_round: sums of drawn sites differ by a few, and these differences show single "
            "models, which aggregation: secure hides: leave it out, or write training.privacy"
        )


def _needs_all(method: Method) -> str:
    """Why a method cannot do without some of the sources; "" if it can."""
    if method.traits.pooled or method.traits.target == "labelled":
        return "trains in one place, where no site can be drawn"
    if method.traits.needs_target:
        return "weighs the models of all sources for its target in every round"
    if isinstance(method.robust, Trust):
        return f"compares all models with that of '{method.robust.trusted}', which may not be drawn"
    return ""
