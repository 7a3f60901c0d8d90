"""Training in bf16."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.experiment.environment import resolve_device
from fedshift.experiment.fits.about import About
from fedshift.models.products import has_bf16_units


def fits(about: About) -> Iterator[str]:
    """Say where it gains nothing."""
    experiment = about.experiment
    if experiment.training.precision == "bf16" and not has_bf16_units(resolve_device(experiment.device)):
        yield "training.precision: this device has no units for bf16, so it is no faster than float32"
