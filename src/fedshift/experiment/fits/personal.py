"""Methods with parts of a model that stay at their sites: who can be measured with them."""

from __future__ import annotations

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method


def fits(about: About, method: Method) -> None:
    """Check that no new site is measured where a method has nothing for it, and that personal parts can be seen."""
    if method.traits.no_new_site and not about.experiment.protocol.by_site:
        raise UserError(
            f"methods: {method.display} has no model for a new site, since {method.traits.keeps} stays at each: leave "
            "it out, or write protocol.kind: participants, which measures each site with its own model"
        )
