"""Sealed routing, under ``engine.routing``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.experiment.protocols.base import Split
from fedshift.methods.base import Method
from fedshift.methods.index import with_sealed


def fits(about: About, method: Method) -> Iterator[str]:
    """Check that a method's server leaves models unread, and that nothing else reads them."""
    if about.engine.routing == "sealed":
        yield from check_routed(method, about.experiment.training.adapters is not None)


def check_routed(method: Method, adapters: bool = False) -> tuple[str, ...]:
    """Check that a method's server leaves models unread, and that nothing else reads them.

    Returns warnings. UserError if something would read them.
    """
    if not method.traits.routed:
        raise UserError(
            f"engine.routing: sealed hides models that the server does not read itself, and {method.display} has none: "
            f"choose {', '.join(with_sealed())}, or leave it out"
        )
    if method.robust is not None:
        raise UserError(
            f"engine.routing: sealed hides the models that robust aggregation looks at: leave out one of them "
            f"({method.display})"
        )
    if not any(way.in_model for way in method.traits.routed.values()):
        return ()
    reading = {
        "average": method.average is not None,
        "average_rounds": method.average_rounds > 1,
        "training.adapters": adapters,
    }
    for option in (option for option, asked in reading.items() if asked):
        raise UserError(
            f"engine.routing: sealed hides parts of the trained model of {method.display}, which {option} reads: leave "
            "out one of them"
        )
    if not _target_alone_reads(method):
        return ()
    return (
        f"{method.display} with routing: sealed: only the target can measure the trained model, so there is no "
        "accuracy at the sources, and none to select a round by",
    )


def _target_alone_reads(method: Method) -> bool:
    """Whether only the target reads the trained model."""
    return any(way.in_model and way.readers != "all" for way in method.traits.routed.values())


def measured_parts(method: Method, routing: str, split: Split) -> Split:
    """The rows that a run is measured on: not those of sources that may not read the trained model."""
    if routing != "sealed" or not _target_alone_reads(method):
        return split
    return replace(split, held_out={site: rows[:0] for site, rows in split.held_out.items()})
