"""Kinds of content that sites refuse to send."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.errors import UserError, nearest
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method


def data_fit(about: About) -> None:
    """Check that sites that refuse are there, and that none refuses what the data set needs."""
    engine, source = about.engine, about.experiment.data
    for site in engine.refuse_at:
        if site not in about.data.domains:
            raise UserError(f"engine.refuse_at: no site is called '{site}'; {nearest(site, about.data.domains)}")
    for kind in source.shares:
        if kind in engine.refuse or any(kind in kinds for kinds in engine.refuse_at.values()):
            raise UserError(
                f"engine.refuse: sites refuse {kind}, which data set {source.name} needs for a common "
                "encoding: take the kind out or choose another data set"
            )


def method_fits(about: About, method: Method) -> Iterator[str]:
    """Check that sites send what a method needs; those that may be left out are named."""
    engine = about.engine
    refused = sorted(set(method.calls.shares) & set(engine.refuse))
    if refused:
        raise UserError(
            f"engine.refuse: sites refuse {refused[0]}, which {method.display} shares: choose another method or "
            "take the kind out of engine.refuse"
        )
    asked = {
        site for sources, others in about.roles for site in (*sources, *(others if method.traits.needs_target else ()))
    }
    for site in (site for site in engine.refuse_at if site in asked):
        for kind in sorted(set(method.calls.shares) & set(engine.refuse_at[site])):
            refusal = f"site '{site}' refuses to send {kind}, which {method.display} shares"
            if engine.on_refusal == "stop" or method.traits.pooled:
                way = "" if method.traits.pooled else " or write engine.on_refusal: leave_out"
                raise UserError(f"engine.refuse_at: {refusal}: choose another method, take the kind out{way}")
            yield f"{refusal}: the site is left out of such exchanges"
