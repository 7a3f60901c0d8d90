"""What a coordinator tries at a site with a budget of differential privacy. Training needs Opacus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.deploy.playground.in_process import answer_to, caught_requests, folder_of, forged, rehearse
from fedshift.deploy.playground.played import FOUR, NASTY, Played, of_four
from fedshift.deploy.playground.promise import Broken, Promise, expect
from fedshift.deploy.privacy.ledger import LEDGER, SECRET
from fedshift.deploy.remote.wire import Message, unseal
from fedshift.deploy.site_server import SiteProgram
from fedshift.errors import Refused, UserError

SIGMA = 2.0
PRIVATE = {"rounds": 2, "batch_size": 16, "lr": 0.1, "privacy": {"noise_multiplier": SIGMA}}
BUDGET = {"epsilon": 8.0, "delta": 1e-5, "measurement_noise": 8.0}
FIRST = FOUR[0]
_OPACUS = "opacus", "privacy"
_MOST = 200


def _with_budget(site: str) -> dict[str, Any]:
    """SITE.yaml of sites with a budget, on which no other rule stops a coordinator that asks again and again."""
    policy = {"requests_per_round": 10_000, "rounds_per_day": None, "measurements_per_day": None}
    return {"classes": list(NASTY), "privacy": BUDGET, "policy": policy}


def _asked(played: Played, name: str, call: str = "fit") -> tuple[SiteProgram, Message]:
    """A site with a budget, and a request for something of it."""
    experiment = {"training": PRIVATE}
    programs, requests = caught_requests(of_four(played), name, call, experiment=experiment, differs=_with_budget)
    return programs[FIRST], requests[FIRST]


def _lines(program: SiteProgram) -> list[dict[str, Any]]:
    file = program.config.memory / LEDGER
    whole = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [line for line in whole if line["steps"]]  # the first line is the secret's


def _without_noise(played: Played) -> str:
    program, request = _asked(played, "without-noise")
    setting = json.loads(request.header)["setting"]
    plain = {name: value for name, value in setting["training"].items() if name != "privacy"}
    said = str(answer_to(program, forged(request, setting={**setting, "training": plain})).get("message"))
    expect("trains with noise only" in said, f"the site answers {said}")
    little = {site: {**draws, "noise_multiplier": 1e-9} for site, draws in setting["draws"].items()}
    answer = answer_to(program, forged(request, setting={**setting, "draws": little}))
    expect("how much noise" in str(answer.get("message")), f"the site answers {answer}")
    expect(not _lines(program), "what was refused is counted")
    return said


def _until_spent(played: Played, name: str, call: str) -> str:
    """Requests of one kind until the site refuses, and what it says."""
    program, request = _asked(played, name, call)
    header, before = json.loads(request.header), len(_lines(program))
    for number in range(1, _MOST):
        if call == "fit":
            changes: dict[str, Any] = {"envelope": {**header["envelope"], "exchange": number, "round": number}}
        else:
            changes = {"round": number}
        answer = answer_to(program, forged(request, **changes))
        if "error" in answer:
            said = str(answer["message"])
            spent, lines = program.rules.ledger.epsilon(), len(_lines(program)) - before
            expect("privacy.epsilon" in said, f"the site answers {said}")
            expect(spent <= BUDGET["epsilon"] and lines == number - 1, f"ε = {spent} is spent in {lines} lines")
            expect("error" in answer_to(SiteProgram(program.config), forged(request, run="another")), "a new run goes")
            return f"{number - 1} answers cost ε = {spent:.2f}; then {said}"
    raise Broken(f"the site answers {_MOST} requests")


def _trains_until_spent(played: Played) -> str:
    return _until_spent(played, "spent", "fit")


def _measures_until_spent(played: Played) -> str:
    return _until_spent(played, "measured", "measure")


def _repeated(played: Played) -> str:
    """The answer that the site kept is gone, as after a kill; the noise has to be the same."""
    program, request = _asked(played, "repeated")
    before = program.handle(request, "an attacker")
    for file in program.config.memory.rglob("answer-*"):
        file.unlink()
    again = SiteProgram(program.config).handle(request, "an attacker")
    expect("error" not in unseal(before)[0] and before.body == again.body, "a repeated request gets other noise")
    expect(len(_lines(program)) == 1, f"it is counted {len(_lines(program))} times")
    return "the same answer, counted once"


def _shorter_ledger(played: Played) -> str:
    """Three answers are paid; then an older ledger, or none, lies in the place of the site's."""
    program, request = _asked(played, "older-ledger")
    envelope = json.loads(request.header)["envelope"]

    def ask(number: int) -> dict[str, Any]:
        changed = forged(request, envelope={**envelope, "exchange": number, "round": number})
        try:
            return answer_to(SiteProgram(program.config), changed)
        except Refused as error:  # it does not even start
            return {"error": "Refused", "message": str(error)}

    expect(not any("error" in ask(number) for number in (1, 2, 3)), "the site does not answer")
    file, said = program.config.memory / LEDGER, []
    whole = file.read_bytes()
    for older in (b"".join(whole.splitlines(keepends=True)[:2]), b""):
        file.write_bytes(older) if older else file.unlink()
        answer = ask(4)
        expect("error" in answer, f"the site answers with {'an older' if older else 'no'} ledger")
        said.append(str(answer["message"]))
    file.write_bytes(whole)
    expect("error" not in ask(5), "the site does not answer with its own ledger, either")
    return said[0]


def _from_the_seed(played: Played) -> str:
    """All that the coordinator knows is alike at two copies of a site; their secrets are not."""
    bodies = []
    for name in ("secret", "another-secret"):
        program, request = _asked(played, name)
        setting, draws = json.loads(request.header)["setting"], {FIRST: {"noise_multiplier": SIGMA, "stream": ""}}
        answer = program.handle(forged(request, run="the-same", setting={**setting, "draws": draws}), "an attacker")
        expect("error" not in unseal(answer)[0], f"the site does not answer: {answer.header}")
        expect((program.config.memory / SECRET).stat().st_mode & 0o077 == 0, "others can read the site's secret")
        bodies.append(answer.body)
    expect(bodies[0] != bodies[1], "two sites with the same data and different secrets answer the same")
    return "two copies of a site answer the same request with other noise"


def _statistics(played: Played) -> str:
    """A table without ranges is refused; with them, sums have noise and are counted once."""
    four = of_four(played)
    folder = folder_of(four, "tables")
    folder.mkdir(parents=True)
    draws = np.random.default_rng(1)

    def differs(site: str, **privacy: Any) -> dict[str, Any]:
        file = folder / f"{site}.csv"
        if not file.exists():
            rows = [f"{age:.0f},{'ny'[row % 2]}" for row, age in enumerate(draws.normal(50, 9, 60))]
            file.write_text("\n".join(["age,ill", *rows]) + "\n", encoding="utf-8")
        data = {"name": "table", "sites": {site: str(file)}, "label": "ill", "numeric": ["age"]}
        policy = {"send": ["weights", "numbers", "accuracy", "metrics", "statistics"]}
        return {"data": data, "classes": ["n", "y"], "privacy": {**BUDGET, **privacy}, "policy": policy}

    try:
        rehearse(four, "without-ranges", experiment={"training": PRIVATE}, differs=differs)
    except UserError as error:
        said = str(error)
    else:
        raise Broken("the run goes through")
    expect("statistics for the encoding of its data without noise" in said, f"the run ends with: {said}")
    rehearse(
        four,
        "with-ranges",
        experiment={"training": PRIVATE},
        differs=lambda site: differs(site, statistics_noise=4.0, ranges={"age": [0, 120]}),
    )
    spent = folder_of(four, "with-ranges") / FIRST / "memory" / LEDGER
    calls = [json.loads(line)["call"] for line in spent.read_text(encoding="utf-8").splitlines()]
    expect(calls.count("statistics") == 1, f"the site counted {calls}")
    return said


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
    Promise("an honest coordinator", "trains with noise under masks, which must work", _under_masks, _OPACUS),
    Promise(COORDINATOR, "asks a site with a budget of privacy to train without noise", _without_noise, _OPACUS),
    Promise(COORDINATOR, "asks a site to train until its budget is spent", _trains_until_spent, _OPACUS),
    Promise(COORDINATOR, "has models measured until a site's budget is spent", _measures_until_spent, _OPACUS),
    Promise(COORDINATOR, "asks again for other noise on the same update", _repeated, _OPACUS),
    Promise(COORDINATOR, "computes a site's noise from what it knows", _from_the_seed, _OPACUS),
    Promise(COORDINATOR, "asks a site with a budget for the means of its table", _statistics, _OPACUS),
    Promise("whoever can write to a role's disk", "puts an older ledger back, or none", _shorter_ledger, _OPACUS),
)
