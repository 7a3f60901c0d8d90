"""What each method of a table is to its reader: private or not, to choose from or to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedshift.evaluation.records import RunResult
from fedshift.methods.index import ENTRIES
from fedshift.report.pairs import ALONE

Role = Literal["federated", "alone", "pooled", "oracle", "majority"]
ROLES: Mapping[Role, str] = {
    "federated": "samples stay at their sites",
    "alone": "each site alone",
    "pooled": "pooled, not private",
    "oracle": "upper bound, uses the target's labels",
    "majority": "no model at all",
}
"""The roles in words."""


def role_of(result: RunResult) -> Role:
    """What a method is to its reader, by the name in its options and by what left the sites."""
    name = method_name(result)
    if name == "oracle":
        return "oracle"
    if name == ALONE:
        return "alone"
    shares = ENTRIES[name].shares if name in ENTRIES else ()
    return "pooled" if "raw_data" in {*shares, *result.bytes_up} else "federated"


def method_name(result: RunResult) -> str:
    """The method's name, which several rows may share."""
    options = result.options.get("method")
    return str(options.get("name", result.method)) if isinstance(options, Mapping) else result.method
