"""What a curious coordinator tries over the wire, with sealed models, and at sites with a budget of privacy.

What a site answers to a request that was made by hand is tried in tests.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fedshift.deploy.flare.jobs import job_folder
from fedshift.deploy.flare.kits import load_kit
from fedshift.deploy.playground.in_process import answer_to, caught_requests, folder_of, forged, rehearse
from fedshift.deploy.playground.played import FOUR, NASTY, Played, of_four
from fedshift.deploy.playground.promise import Broken, Promise, expect
from fedshift.deploy.privacy.ledger import LEDGER, SECRET
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, unseal
from fedshift.deploy.site_server import SiteProgram
from fedshift.federation.messages import Content, Sealed

FIRST, TARGET = FOUR[0], FOUR[-1]


def _method_not_allowed(played: Played) -> str:
    _, state = played.deploy("not-allowed", {"name": "csac"})
    expect(state["state"] == "failed" and "policy.methods" in state["message"], f"the deployment: {state}")
    return str(state["message"])


def _job_with_code(played: Played) -> str:
    """With the coordinator's own administrator of FLARE."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    job = job_folder("code", 1, played.folder / "job")
    (job / "app" / "custom").mkdir()
    (job / "app" / "custom" / "mine.py").write_text("print('mine')\n", encoding="utf-8")
    contact = load_kit(played.coordinator).project.contact
    with redirect_stdout(io.StringIO()):  # FLARE says that it connects
        session = new_secure_session(contact, str(played.coordinator / "admin"), timeout=30.0)
    try:
        number = session.submit_job(str(job))
        deadline = time.monotonic() + 60
        while not (status := str(session.get_job_meta(number)["status"])).startswith("FINISHED"):
            expect(time.monotonic() < deadline, f"the job is {status}")
            time.sleep(0.2)
    finally:
        session.close()
    landed = [path for kit in played.sites.values() for path in kit.rglob("mine.py")]
    expect(status == "FINISHED:FAILED_TO_RUN" and not landed, f"the job is {status}, its code at {landed}")
    return "FLARE does not deploy the job, and no site has its code"


# Sealed models --------------------------------------------------------------------------------------------------------

SEALED: dict[str, Any] = {
    "engine": {"routing": "sealed"},
    "protocol": {"kind": "adapt_to_one", "targets": [TARGET], "seeds": [0], "test_fraction": 0.4},
}


def _sealed_only(site: str) -> dict[str, Any]:
    """A site's file: a source may send sealed models only; the target's own model is not sealed."""
    return {"policy": {"send": ["weights" if site == TARGET else "sealed", "numbers", "accuracy", "metrics"]}}


def _read(played: Played) -> str:
    crossed: dict[str, Mapping[str, Content]] = {}

    def watch(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if header.get("call") == "fit" and isinstance(answer, Message):
            crossed[site] = unseal(answer)[1]
        return answer

    rehearse(of_four(played), "sealed", watch, "kd3a", SEALED, _sealed_only)
    expect(set(crossed) == {*FOUR} - {TARGET}, f"sources that answered: {sorted(crossed)}")
    clear = [site for site, content in crossed.items() if not isinstance(content["weights"], Sealed)]
    expect(not clear, f"models in clear: {clear}")
    return f"the target trains with the models of {len(crossed)} sources, and none crosses in clear"


# Budgets of privacy, with the Opacus of this installation -------------------------------------------------------------

PRIVATE = {"rounds": 2, "batch_size": 16, "lr": 0.1, "privacy": {"noise_multiplier": 2.0}}
BUDGET = {"epsilon": 8.0, "delta": 1e-5, "measurement_noise": 8.0}
_OPACUS = "opacus", "privacy"
_MOST = 200


def _with_budget(site: str) -> dict[str, Any]:
    """SITE.yaml of sites with a budget, on which no other rule stops a coordinator that asks again and again."""
    policy = {"requests_per_round": 10_000, "rounds_per_day": None, "measurements_per_day": None}
    return {"classes": list(NASTY), "privacy": BUDGET, "policy": policy}


def _paid(program: SiteProgram) -> int:
    """How many answers the site has paid for."""
    file = program.config.memory / LEDGER
    whole = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return sum(bool(line["steps"]) for line in whole)  # the first line is the secret's


def _trains_until_spent(played: Played) -> str:
    """Requests to train until the site refuses, and what it says."""
    experiment = {"training": PRIVATE}
    programs, requests = caught_requests(of_four(played), "spent", experiment=experiment, differs=_with_budget)
    program, request = programs[FIRST], requests[FIRST]
    envelope, before = json.loads(request.header)["envelope"], _paid(program)
    for number in range(1, _MOST):
        answer = answer_to(program, forged(request, envelope={**envelope, "exchange": number, "round": number}))
        if "error" in answer:
            text = str(answer["message"])
            spent, paid = program.rules.ledger.epsilon(), _paid(program) - before
            expect("privacy.epsilon" in text, f"the site answers {text}")
            expect(spent <= BUDGET["epsilon"] and paid == number - 1, f"ε = {spent} is spent in {paid} lines")
            expect("error" in answer_to(SiteProgram(program.config), forged(request, run="another")), "a new run goes")
            return f"{number - 1} answers cost ε = {spent:.2f}; then {text}"
    raise Broken(f"the site answers {_MOST} requests")


def _under_masks(played: Played) -> str:
    """Both guarantees in one run: what is in the sum has the noise of every site, and every site counts it."""
    four = of_four(played)
    experiment = {"training": PRIVATE, "engine": {"aggregation": "secure"}}
    rehearse(four, "both", experiment=experiment, differs=_with_budget)
    folders: list[Path] = [folder_of(four, "both") / site / "memory" for site in four.sites]
    calls = [json.loads(line)["call"] for line in (folders[0] / LEDGER).read_text(encoding="utf-8").splitlines()]
    expect(calls.count("fit") == PRIVATE["rounds"], f"the site counted {calls}")
    expect(len({(folder / SECRET).read_bytes() for folder in folders}) == len(folders), "two sites share a secret")
    return f"{len(folders)} sites count what they answer under masks, too: {calls.count('fit')} times training"


COORDINATOR = "a curious coordinator"
PROMISES = (
    Promise(COORDINATOR, "deploys a method that the site does not allow", _method_not_allowed),
    Promise(COORDINATOR, "submits a job that brings code", _job_with_code),
    Promise(COORDINATOR, "reads the sealed models that it hands on", _read),
    Promise("an honest coordinator", "trains with noise under masks, which must work", _under_masks, _OPACUS),
    Promise(COORDINATOR, "asks a site to train until its budget is spent", _trains_until_spent, _OPACUS),
)
