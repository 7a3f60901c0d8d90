"""The coordinator's part in sums of inputs, with which left-out sites and those without labels compare theirs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add

from fedshift.deploy.deployed_plan import DeployedPlan, run_at_sites
from fedshift.deploy.event_log import EventLog
from fedshift.deploy.remote.requests import InputsAnswer, InputsRequest
from fedshift.deploy.remote.transport import Lost, Transport, ask_plain
from fedshift.evaluation.estimate.plain_sums import GivenInputs, plain_inputs
from fedshift.experiment.plan import PlannedRun


def summed_inputs(
    plan: DeployedPlan,
    planned: PlannedRun,
    sites: Iterable[str],
    transport: Transport,
    deadline: float,
    log: EventLog,
) -> GivenInputs | None:
    """Sums of the inputs of some sites, in the encoding of a run.

    Returns:
        None where some site keeps them, has samples of which there are none, or does not answer; and with
        ``engine.aggregation: secure``, since no site sends its own alone then.
    """
    cards, name = plan.agreed.cards, run_at_sites(plan.experiment.name, planned.run)
    asked = [site for site in sites if site in cards]
    if not asked or plan.experiment.engine.sums_only or not all(cards[site].gives_moments for site in asked):
        return None
    request = InputsRequest(run=name, preprocessing=planned.data.preprocessing)
    answers = ask_plain(transport, dict.fromkeys(asked, request), deadline, InputsAnswer)
    moments = []
    for site in asked:
        answer = answers.get(site, Lost("did not answer"))
        if isinstance(answer, Lost):
            log.warn(f"estimates of {name} read no sums of inputs, since site '{site}' gives none: {answer.reason}")
            return None
        moments.append(answer.answer.inputs.moments)
    if len({len(item.total) for item in moments}) > 1:
        log.warn(f"estimates of {name} read no sums of inputs: those of the sites are of different samples")
        return None
    log.event({"what": "estimate", "is": "inputs", "run": name, "sites": len(asked)})
    return GivenInputs.model_validate(plain_inputs(reduce(add, moments)))
