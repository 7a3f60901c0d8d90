"""The fewest sites that must answer."""

from __future__ import annotations

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About


def fits(about: About) -> None:
    """Check that as many sites take part in a run."""
    quorum, unseen = about.engine.quorum, about.experiment.protocol.unseen
    most = max(len(sources) + (0 if unseen else len(others)) for sources, others in about.roles)
    if quorum is not None and quorum > most:
        raise UserError(
            f"engine.quorum: {quorum} sites must answer, but at most {most} train in a run: lower it, or leave it out "
            "to wait for all"
        )
