"""What each site of a run sent and received, by kind of content: a field of its result, and a file while it lasts.

Up to `MOST_SITES` sites, a result names each of them. Above that, it has the least, the median and the most bytes of a
site for every kind, so that a result of a thousand sites is no larger than one of a hundred. All of it is for the whole
run: nothing is kept by round.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median_low
from typing import Annotated, Literal

from pydantic import Field

from fedshift.digests import Damaged
from fedshift.json_objects import read_object, write_object
from fedshift.section import Section

MOST_SITES = 100
"""Sites that a result names one by one."""
FILE = "bytes.json"
"""In the folder of a run that is not finished: what its sites sent and received so far."""
Count = Annotated[int, Field(ge=0)]
Direction = Literal["up", "down"]
BySite = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Site → direction → kind → bytes."""


class Spread(Section):
    """How many bytes of a kind crossed the borders of single sites, over all sites of a run."""

    least: Count
    median: Count = Field(description="of an even number of sites, the lower of the two in the middle")
    most: Count


class SiteBytes(Section):
    """What the sites of a run sent (``up``) and received (``down``), in bytes by kind."""

    number: Count = Field(description="sites that sent or received anything")
    sites: dict[str, dict[Direction, dict[str, Count]]] = Field(
        default_factory=dict, description="each site; empty if there are too many"
    )
    spread: dict[Direction, dict[str, Spread]] = Field(
        default_factory=dict, description="if there are too many: the range over sites"
    )


def site_bytes(by_site: BySite | None) -> SiteBytes | None:
    """What a result says of the bytes that a ledger counted by site; None if it did not count them from the start.

    Example:
        >>> found = site_bytes({"D0": {"up": {"weights": 8}, "down": {"weights": 16}}})
        >>> found.sites["D0"]["up"], found.spread
        ({'weights': 8}, {})
        >>> many = {f"D{site}": {"up": {"weights": site}, "down": {}} for site in range(200)}
        >>> site_bytes(many).spread["up"]["weights"]
        Spread(least=0, median=99, most=199)
    """
    if by_site is None:
        return None
    if len(by_site) <= MOST_SITES:
        return SiteBytes.model_validate({"number": len(by_site), "sites": by_site})
    spread: dict[str, dict[str, Spread]] = {}
    for way in ("up", "down"):
        kinds = sorted({kind for both in by_site.values() for kind in both[way]})
        sizes = {kind: [both[way].get(kind, 0) for both in by_site.values()] for kind in kinds}
        spread[way] = {
            kind: Spread(least=min(size), median=median_low(size), most=max(size)) for kind, size in sizes.items()
        }
    return SiteBytes.model_validate({"number": len(by_site), "spread": spread})


def write_site_bytes(folder: Path, by_site: BySite | None) -> None:
    """Write what the sites of a run sent and received so far to its folder, for those who watch it.

    Raises:
        UserError: the disk is full or read-only.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_site_bytes(folder, {"D0": {"up": {"weights": 8}, "down": {}}})
        >>> [file.name for file in folder.iterdir()]
        ['bytes.json']
    """
    result = site_bytes(by_site)
    if result is not None:
        write_object(folder / FILE, result.model_dump(mode="json"), flush=False)


def read_site_bytes(folder: Path) -> SiteBytes | None:
    """What `write_site_bytes` wrote to a run's folder; None if it is missing or damaged: it is shown and no more.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_site_bytes(folder, {"D0": {"up": {"weights": 8}, "down": {}}})
        >>> read_site_bytes(folder).sites["D0"]["up"], read_site_bytes(folder / "elsewhere")
        ({'weights': 8}, None)
    """
    try:
        result = read_object(folder / FILE)
    except Damaged:
        return None
    return SiteBytes.model_validate(result) if result else None
