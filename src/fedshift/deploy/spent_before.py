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
from fedshift.digests import Damaged
from fedshift.files import hold_lock
from fedshift.functional.differential_privacy import NoisySteps, adaptive_epsilon
from fedshift.json_objects import read_object, write_object

SPENT = "spent.json"
"""Beside the deployments of a coordinator."""
_REMEDY = "restore it, or move it away: what sites told before of what they spent is then not known"


class _SpentBefore(BaseModel):
    """The content of the file: by site, the most steps of each kind that it ever told."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sites: dict[str, Spent] = {}


def noted_spending(file: Path, budgets: Mapping[str, GivenPrivacy | None]) -> tuple[list[str], list[str]]:
    """Note what sites have spent, and compare it with what they told before.

    Returns:
        Warnings: the file is damaged, or a site had a budget and has none now. And a fault for each site that told of
        more before: an older ledger was put in place of its newest one, and what it spent would be spent again.
    """
    with hold_lock(file.with_suffix(".lock")):
        try:
            before = _SpentBefore.model_validate(read_object(file, _REMEDY))
        except Damaged as error:
            return [str(error)], []
        warnings, faults, after = list[str](), list[str](), dict(before.sites)
        for site, budget in budgets.items():
            known = _steps(before.sites.get(site, ()))
            if budget is None:
                if known:
                    warnings.append(
                        f"site '{site}' told of a budget of privacy before and has none now: ask its people whether "
                        "they know"
                    )
                continue
            noisy_steps = _steps(budget.spent)
            lacks = any(noisy_steps.get(kind, 0) < steps for kind, steps in known.items())
            if lacks and (fault := _fault(site, budget, known, noisy_steps)) is not None:
                faults.append(fault)
            elif noisy_steps:  # what is lost may be counted as something else, which costs no less
                after[site] = tuple((*kind, steps) for kind, steps in noisy_steps.items())
        if after != before.sites:
            write_object(file, _SpentBefore(sites=after).model_dump(mode="json"), private=True)
        return warnings, faults


def _steps(spent: Spent) -> dict[tuple[float, float], int]:
    return {(float(noise), float(rate)): int(steps) for noise, rate, steps in spent}


def _fault(site: str, budget: GivenPrivacy, known: Mapping[Any, int], told: Mapping[Any, int]) -> str | None:
    epsilon, delta = budget.epsilon, budget.delta
    before, now = (
        adaptive_epsilon([NoisySteps(noise, rate, steps) for (noise, rate), steps in spent.items()], epsilon, delta)
        for spent in (known, told)
    )
    if now >= before * (1 - 1e-9):
        return None
    return (
        f"site '{site}' told before that it had spent ε = {before:.3g} of its budget of privacy, and now says "
        f"{now:.3g}: its records were lost or put back from a backup; ask its people to put the newest ones back, or "
        "to use fedshift site restore, which counts what is lost"
    )
