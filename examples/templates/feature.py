"""A feature that composes: its check, here of mini-batches that are larger than a site.

To add it to fedshift, move the function to a file in ``fedshift/experiment/fits/`` and put it into a list of
``fedshift/experiment/compatibility.py``. The check raises UserError where something does not go with the rest of the
experiment, and yields warnings where it does.
"""

from collections.abc import Iterator

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About


def fits(about: About) -> Iterator[str]:
    """Check that the sites have samples for the mini-batches of ``training.batch_size``."""
    size = about.experiment.training.batch_size
    small = [name for name, domain in about.data.domains.items() if len(domain) < size]
    if len(small) == len(about.data.domains):
        raise UserError(f"training.batch_size: {size} is more than any site has samples: lower it")
    for name in small:
        yield f"training.batch_size: {size} is more than the {len(about.data.domains[name])} samples of '{name}'"
