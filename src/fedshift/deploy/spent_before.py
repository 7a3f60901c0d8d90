"""What sites said that they had spent of their budgets of privacy, for the life of a coordinator's kit.

A site's ledger only grows. Where it told more before, its records were lost or put back from a backup, all of them at
once, which the site cannot notice itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedshift.deploy.site_cards import GivenPrivacy, Spent
from fedshift.digests import Damaged, read_object, write_object
from fedshift.files import locked
from fedshift.functional.differential_privacy import NoisySteps, adaptive_epsilon

SPENT = "spent.json"
"""Beside the deployments of a coordinator."""
_REMEDY = "restore it, or move it away: what sites told before of what they spent is then not known"


class _SpentBefore(BaseModel):
    """The content of the file: by site, the most steps of each kind that it ever told."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sites: dict[str, Spent] = {}


def noted_spending(file: Path, budgets: Mapping[str, GivenPrivacy | None]) -> list[str]:
    """Note what sites have spent, and compare it with what they told before.

    Args:
        file: where it is noted.
        budgets: of the sites, as their cards say.

    Returns:
        A warning for each site that told more before, or had a budget and has none now.
    """
    with locked(file.with_suffix(".lock")):
        try:
            before = _SpentBefore.model_validate(read_object(file, _REMEDY))
        except Damaged as error:
            return [str(error)]
        warnings, after = [], dict(before.sites)
        for site, budget in budgets.items():
            told = _steps(() if budget is None else budget.spent)
            known = _steps(before.sites.get(site, ()))
            if any(told.get(kind, 0) < steps for kind, steps in known.items()):
                warnings.append(_warning(site, budget, known, told))
            most = {kind: max(known.get(kind, 0), told.get(kind, 0)) for kind in (*known, *told)}
            if most:
                after[site] = tuple((*kind, steps) for kind, steps in most.items())
        if after != before.sites:
            write_object(file, _SpentBefore(sites=after).model_dump(mode="json"), private=True)
        return warnings


def _steps(spent: Spent) -> dict[tuple[float, float], int]:
    return {(float(noise), float(rate)): int(steps) for noise, rate, steps in spent}


def _warning(site: str, budget: GivenPrivacy | None, known: Mapping[Any, int], told: Mapping[Any, int]) -> str:
    if budget is None:
        return f"site '{site}' told of a budget of privacy before and has none now: ask its people whether they know"
    epsilon, delta = budget.epsilon, budget.delta
    before, now = (
        adaptive_epsilon([NoisySteps(noise, rate, steps) for (noise, rate), steps in spent.items()], epsilon, delta)
        for spent in (known, told)
    )
    return (
        f"site '{site}' told before that it had spent ε = {before:.3g} of its budget of privacy, and now says "
        f"{now:.3g}: its records were lost or put back from a backup; ask its people to put the newest ones back"
    )
