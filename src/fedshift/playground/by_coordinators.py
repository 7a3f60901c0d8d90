"""What a curious coordinator tries at a site: some through the network, the rest straight at a site's program."""

from __future__ import annotations

import io
import json
import time
from contextlib import redirect_stdout
from typing import Any

from fedshift.deployment.flare.jobs import job_folder
from fedshift.deployment.flare.kits import load_kit
from fedshift.errors import UserError
from fedshift.federation.remote.policy import AuditLog
from fedshift.federation.remote.wire import Message
from fedshift.playground.in_process import answer_to, forged, genuine_request, rehearse
from fedshift.playground.played import Played
from fedshift.playground.promise import Broken, Promise, expect


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
    steps = [bool(line.get("again")) for line in lines if line["do"] == "step"]
    expect((first.body, first.header) == (again.body, again.header), "the site answers a replay with something new")
    expect(steps == [False, True], f"the site trained again: {steps}")
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
    Promise("a curious coordinator", "gives a request the key of another", _key_of_another),
    Promise("somebody on the way", "replays a request", _replay),
    Promise("somebody on the way", "changes a request", _changed_on_the_way),
)
