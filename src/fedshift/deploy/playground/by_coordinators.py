"""What a curious coordinator tries at a site: some through the network, the rest straight at a site's program."""

from __future__ import annotations

import io
import json
import time
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
import yaml

from fedshift.deploy.audit.crafted import craft, read_off, samples_read
from fedshift.deploy.flare.jobs import job_folder
from fedshift.deploy.flare.kits import load_kit
from fedshift.deploy.playground.in_process import answer_to, caught_requests, forged, genuine_request, rehearse
from fedshift.deploy.playground.played import POLICY, Played
from fedshift.deploy.playground.promise import Broken, Promise, expect
from fedshift.deploy.remote.policy import AuditLog
from fedshift.deploy.remote.wire import Message, unseal
from fedshift.deploy.site_server import open_site
from fedshift.errors import UserError
from fedshift.models import registry as models
from fedshift.weights import Weights


def _method_not_allowed(played: Played) -> str:
    _, state = played.deploy("not-allowed", {"name": "csac"})
    expect(state["state"] == "failed" and "policy.methods" in state["message"], f"the deployment: {state}")
    return str(state["message"])


def _kind_kept(played: Played) -> str:
    try:
        rehearse(played, "kept", lambda site, header, answer: answer, method="ccst")
    except UserError as error:
        expect("policy.send" in str(error), f"the run ends with: {error}")
        return str(error)
    raise Broken("the run goes through")


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


def _refused(played: Played, name: str, word: str, **changes: Any) -> str:
    """A forged request is answered with an error that holds ``word``; the genuine one is answered."""
    program, request = genuine_request(played, name)
    answer = answer_to(program, forged(request, **changes))
    said = str(answer.get("message"))
    expect("error" in answer and word in said, f"the site answers {said}")
    expect("error" not in answer_to(program, request), "the site does not answer the genuine request either")
    return said


def _setting(played: Played, name: str, **changes: Any) -> dict[str, Any]:
    _, request = genuine_request(played, f"{name}-setting")
    return {**json.loads(request.header)["setting"], **changes}


def _code(played: Played) -> str:
    setting = _setting(played, "code", method={"name": "os:system", "options": {}})
    return _refused(played, "code", "has no method", setting=setting)


def _raw_data(played: Played) -> str:
    setting = _setting(played, "pooled", method={"name": "deepall", "options": {}})
    return _refused(played, "pooled", "needs the samples", setting=setting)


def _file(played: Played) -> str:
    secret = str(played.site_file(next(iter(played.sites))))
    network = {"name": "resnet18", "pretrained": secret}
    setting = _setting(played, "file", network=network, input_shape=[3, 8, 8])
    return _refused(played, "file", "must be the plain name", setting=setting)


def _outside(played: Played) -> str:
    return _refused(played, "outside", "plain name", run="../../north")


def _replay(played: Played) -> str:
    program, request = genuine_request(played, "replay")
    first = program.handle(request, "the coordinator")
    again = program.handle(request, "an attacker")
    lines, _ = AuditLog.check(program.config.audit_log)
    known = [bool(line.get("again")) for line in lines if line["do"] == "call"]
    expect((first.body, first.header) == (again.body, again.header), "the site answers a replay with something new")
    expect(known == [False, True], f"the site trained again: {known}")
    return "the site repeats its answer, does not train, and logs it"


def _changed_on_the_way(played: Played) -> str:
    program, request = genuine_request(played, "changed")
    spoiled = request.header.replace('"round": 1', '"round": 2', 1)
    expect(spoiled != request.header, "there was nothing to change")
    said = str(answer_to(program, Message(spoiled, request.body, request.digest)).get("message"))
    expect("digest" in said, f"the site answers {said}")
    return said


def _key_of_another(played: Played) -> str:
    return _refused(played, "key", "key", key="a" * 64)


def _few_samples(played: Played) -> str:
    """A budget of one mini-batch, smaller than the smallest group."""
    program, request = genuine_request(played, "few")
    header = json.loads(request.header)
    training = {**header["setting"]["training"], "batch_size": 4}
    envelope = {**header["envelope"], "mini_batches_left": 1}
    setting = {**header["setting"], "training": training}
    answer = answer_to(program, forged(request, envelope=envelope, setting=setting))
    said = str(answer.get("message"))
    expect("smallest_group" in said, f"the site answers {said or 'with a model of four samples'}")
    return said


def _too_often(played: Played) -> str:
    """More requests of one round than the site answers."""
    program, request = genuine_request(played, "often")
    envelope = json.loads(request.header)["envelope"]
    limit = program.policy.requests_per_round
    for number in range(limit):
        answer = answer_to(program, forged(request, envelope={**envelope, "exchange": 1 + number}))
        expect("error" not in answer, f"the site does not answer request {number + 1} of {limit}")
    said = str(answer_to(program, forged(request, envelope={**envelope, "exchange": 1 + limit})).get("message"))
    expect("requests_per_round" in said, f"the site answers more than {limit} requests of one round")
    return said


def _kept_answer(played: Played) -> str:
    """The site keeps an answer, then allows less; the same request comes again."""
    program, request = genuine_request(played, "kept-answer")
    expect("error" not in answer_to(program, request), "the site does not answer")
    place = program.config.path
    options = yaml.safe_load(place.read_text(encoding="utf-8"))
    options["policy"]["smallest_group"] = 10_000
    place.write_text(yaml.safe_dump(options), encoding="utf-8")
    said = str(answer_to(open_site(place), request).get("message"))
    expect("smallest_group" in said, f"the site answers {said}")
    return said


def _crafted(played: Played) -> str:
    """A wide network whose first layer parts the samples, and one step on all of them."""
    wide = {"name": "mlp", "hidden": [1000]}
    limits = {"policy": {"models": "all"}}
    off = {"policy": {"models": "all", "exposure": 1}}
    read, refused = {}, ""
    for name, rule in (("crafted-off", off), ("crafted", limits)):
        program, request = genuine_request(played, name, lambda site, rule=rule: rule)  # type: ignore[misc]
        header = json.loads(request.header)
        built = models.build(models.parse(wide), header["setting"]["input_shape"], header["setting"]["classes"], 0)
        train, _ = program.rules.rows(program.holding.domain, header["part"]["split"])
        rows = torch.from_numpy(np.asarray(program.holding.domain.inputs)[train])
        # The attacker knows mean and deviation.
        like = rows.mean(0) + rows.std(0) * torch.randn(4000, rows.shape[1], generator=torch.Generator().manual_seed(1))
        crafted = craft(built, like, len(rows), "bins", torch.Generator().manual_seed(2))
        training = {**header["setting"]["training"], "batch_size": 100_000, "lr": 1.0, "momentum": 0.0}
        setting = {**header["setting"], "network": wide, "training": training}
        asked = forged(request, {"weights": crafted}, setting=setting)
        answer, content, _ = unseal(program.handle(asked, "an attacker"))
        after = content.get("weights")
        read[name] = samples_read(read_off(built, crafted, after, "bins"), rows) if isinstance(after, Weights) else 0
        refused = str(answer.get("message"))
    expect(read["crafted-off"] > 0, "the attack reads nothing where nothing stops it")
    expect(read["crafted"] == 0 and "policy.exposure" in refused, f"the site answers {refused}")
    return f"{refused} (without this rule: {read['crafted-off']} samples)"


def _another_network(played: Played) -> str:
    program, request = genuine_request(played, "another-network")
    expect("error" not in answer_to(program, request), "the site does not answer")
    setting = {**json.loads(request.header)["setting"], "network": {"name": "mlp", "hidden": [50]}}
    said = str(answer_to(program, forged(request, setting=setting)).get("message"))
    expect("policy.models" in said, f"the site answers {said}")
    return said


def _another_split(played: Played) -> str:
    _, request = genuine_request(played, "another-split")
    part = json.loads(request.header)["part"]
    other = {**part, "split": {**part["split"], "seed": 7}}
    return _refused(played, "split", "policy.splits", part=other)


def _measurements(played: Played) -> str:
    four = {"policy": {"measurements_per_day": 4, "requests_per_round": 100}}
    programs, requests = caught_requests(played, "measurements", "measure", differs=lambda site: four)
    first = next(iter(played.sites))
    for number in range(4):
        answer = answer_to(programs[first], forged(requests[first], round=10 + number))
        expect("error" not in answer, f"the site does not measure: {answer}")
    said = str(answer_to(programs[first], forged(requests[first], round=20)).get("message"))
    expect("policy.measurements_per_day" in said, f"the site answers {said}")
    return said


def _cell_in_an_error(played: Played) -> str:
    """A table goes bad while the site runs; its owner's log has the cell, the answer has not."""
    file = played.folder / "in process" / "cells.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["age,ill", *(f"{40 + row},{'abc'[row % 3]}" for row in range(30))]) + "\n")
    data = {"name": "table", "sites": {"all": str(file)}, "label": "ill", "numeric": ["age"]}
    policy = {"send": [*POLICY["send"], "statistics"]}
    program, request = genuine_request(
        played, "cells", lambda site: {"data": data, "domain": "all", "classes": ["a", "b", "c"], "policy": policy}
    )
    file.write_text(file.read_text(encoding="utf-8").replace("41,", "Jane Doe,"), encoding="utf-8")
    answer = answer_to(program, request)
    lines, _ = AuditLog.check(program.config.audit_log)
    expect("error" in answer and "Jane Doe" not in json.dumps(answer), f"the site answers {answer}")
    expect("Jane Doe" in str(lines[-1].get("failed")), "the site's own log does not say what is wrong")
    return str(answer["message"])


PROMISES = (
    Promise("a curious coordinator", "deploys a method that the site does not allow", _method_not_allowed),
    Promise("a curious coordinator", "deploys a method that sends a kind which the site keeps", _kind_kept),
    Promise("a curious coordinator", "submits a job that brings code", _job_with_code),
    Promise("a curious coordinator", "names code in place of a method", _code),
    Promise("a curious coordinator", "asks for the samples", _raw_data),
    Promise("a curious coordinator", "names a file of the site as weights", _file),
    Promise("a curious coordinator", "names a run outside the site's memory", _outside),
    Promise("a curious coordinator", "asks for a model of four samples", _few_samples),
    Promise("a curious coordinator", "asks again and again in one round", _too_often),
    Promise("a curious coordinator", "has one model after the other measured", _measurements),
    Promise("a curious coordinator", "crafts a network whose update shows samples", _crafted),
    Promise("a curious coordinator", "asks for another network than the site agreed to", _another_network),
    Promise("a curious coordinator", "asks for another split than the site agreed to", _another_split),
    Promise("a curious coordinator", "asks for an answer that the site has kept and would not give now", _kept_answer),
    Promise("a curious coordinator", "reads a cell out of an error", _cell_in_an_error),
    Promise("a curious coordinator", "gives a request the key of another", _key_of_another),
    Promise("somebody on the way", "replays a request", _replay),
    Promise("somebody on the way", "changes a request", _changed_on_the_way),
)
