"""``data.standardise: per_site``: what cannot be in the scale of its site, and what a target then shows."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.data.site_data import check_pooled_scales
from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method


def fits(about: About) -> Iterator[str]:
    """Check that no frozen backbone and no noise stand against it; say what is read of a target."""
    preprocessing, plan = about.data.preprocessing, about.plan
    images = (preprocessing.backbone or {}).get("images")
    if isinstance(images, dict) and images.get("standardise") is not None:
        raise UserError(
            "data.standardise: per_site scales what a network learns from, and model frozen reads images in the scale "
            "of its backbone: leave it out"
        )
    if preprocessing.standardise is None:
        return
    if about.experiment.training.privacy is not None:
        raise UserError(
            "training.privacy: with data.standardise: per_site a sample also moves the scale of all others of its "
            "site, which no noise covers: give fixed numbers (data.mean and data.std)"
        )
    split = plan.split(plan.targets[0], about.experiment.protocol.seeds[0])
    measured = dict.fromkeys((*split.targets, *split.common))
    if unseen := [name for name in measured if name not in split.train and name not in split.unlabelled]:
        yield (
            f"data.standardise: per_site scales '{unseen[0]}', where no one trains, by its own samples: every method "
            "reads these, without labels"
        )


def method_fits(about: About, method: Method) -> None:
    """Check that a method does not pool images in the scales of their sites."""
    if method.traits.pooled:
        check_pooled_scales(about.data.preprocessing)
