"""The task of the data: the network's, the methods', and samples that are drawn by class."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.errors import UserError
from fedshift.evaluation.mask_metrics import can_measure_distances
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method
from fedshift.methods.composition.options import training_of
from fedshift.methods.index import ENTRIES
from fedshift.models import registry as models


def network_fits(about: About) -> Iterator[str]:
    """Check that the network is one for the task."""
    models.check_task(about.experiment.model, about.data.task, about.data.name)
    if about.data.task == "segmentation" and not can_measure_distances():
        yield "HD95 is not measured without MONAI: pip install 'fedshift[volumes]'"


def class_weights_fit(about: About) -> None:
    """Check that samples have classes, where they are drawn by class."""
    data, common = about.data, about.experiment.training
    sections = [common, *(training_of(method, common) for method in about.experiment.methods)]
    for training in sections:
        training.for_classes(data.classes)
    if data.task != "classification" and any(training.class_weights is not None for training in sections):
        raise UserError(f"training.class_weights: an image of data set {data.name} has no single class; leave it out")


def method_fits(about: About, method: Method) -> None:
    """Check that a method is one for the task."""
    task = about.data.task
    if task not in method.traits.tasks:
        fitting = [name for name, entry in ENTRIES.items() if task in entry.tasks]
        reason = method.traits.needs_classes
        because = f", because {reason}" if reason else ""
        raise UserError(
            f"methods: {method.display} is a method for {' and '.join(method.traits.tasks)}{because}, but data set "
            f"{about.data.name} is for {task}: choose {', '.join(fitting)}"
        )
