"""Methods that learn from a target's labels need a target that has some."""

from __future__ import annotations

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method


def fits(about: About, method: Method) -> None:
    """Check that no target lacks the labels that a method trains on."""
    lacking = [name for name in about.data.unlabelled if any(name in targets for _, targets in about.roles)]
    if lacking and method.traits.target == "labelled":
        raise UserError(
            f"methods: {method.display} trains on the target's labels, and '{lacking[0]}' lacks them "
            "(data.site_labels): leave the method out, or name other targets"
        )
