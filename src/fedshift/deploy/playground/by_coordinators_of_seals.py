"""What a coordinator tries with models that it hands on or keeps for others, sealed by `routing: sealed`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedshift.deploy.playground.in_process import answer_to, caught_requests, folder_of, forged, rehearse
from fedshift.deploy.playground.played import FOUR, Played, of_four
from fedshift.deploy.playground.promise import Broken, Promise, expect
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, unseal
from fedshift.deploy.secure.identity import Identity
from fedshift.errors import UserError
from fedshift.experiment.predict import load_model
from fedshift.experiment.runs.run_folder import SEALED_MODEL
from fedshift.federation.messages import Content, Sealed, leaves
from fedshift.weights import Weights

SOURCE, THIEF, TARGET = FOUR[0], FOUR[1], FOUR[-1]
SEALED: dict[str, Any] = {
    "engine": {"routing": "sealed"},
    "protocol": {"kind": "adapt_to_one", "targets": [TARGET], "seeds": [0], "test_fraction": 0.4},
}


def _site_file(site: str) -> dict[str, Any]:
    """A site's file: a source may send sealed models only; the target's own model is not sealed."""
    return {"policy": {"send": ["weights" if site == TARGET else "sealed", "numbers", "accuracy", "metrics"]}}


def _read(played: Played) -> str:
    crossed: dict[str, Mapping[str, Content]] = {}

    def watch(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if header.get("call") == "fit" and isinstance(answer, Message):
            crossed[site] = unseal(answer)[1]
        return answer

    rehearse(of_four(played), "sealed", watch, "kd3a", SEALED, _site_file)
    expect(set(crossed) == {*FOUR} - {TARGET}, f"sources that answered: {sorted(crossed)}")
    clear = [site for site, content in crossed.items() if not isinstance(content["weights"], Sealed)]
    expect(not clear, f"models in clear: {clear}")
    return f"the target trains with the models of {len(crossed)} sources, and none crosses in clear"


def _asked(played: Played, name: str, word: str, **changes: Any) -> str:
    """A forged request to train is refused by a source, and the genuine one is answered."""
    programs, requests = caught_requests(of_four(played), name, "fit", "kd3a", SEALED, _site_file)
    header = json.loads(requests[SOURCE].header)
    answer = answer_to(programs[SOURCE], forged(requests[SOURCE], **_made(played, header, **changes)))
    said = str(answer.get("message"))
    expect("error" in answer and word in said, f"the site answers {said}")
    expect("error" not in answer_to(programs[SOURCE], requests[SOURCE]), "the site does not answer a genuine request")
    return said


def _made(played: Played, header: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Changes of a request; ``card``: another site's certificate with the target's key and signature."""
    if "card" not in changes:
        return changes
    key, signature, _ = header["seal"]["for"][TARGET]
    return {"seal": {"for": {TARGET: [key, signature, changes["card"]]}}}


def _in_clear(played: Played) -> str:
    return _asked(played, "in-clear", "refuses to send weights", seal=None, routing=None)


def _own_key(played: Played) -> str:
    import base64

    thief = Identity.of_kit(of_four(played).sites[THIEF], THIEF)
    return _asked(played, "sealing-key", "is not signed", card=base64.b64encode(thief.certificate).decode())


def _handed_on(played: Played, name: str, spoil: str) -> str:
    """The target is given other models than the sources sealed for it; it opens the genuine ones."""
    programs, requests = caught_requests(of_four(played), name, "distil", "kd3a", SEALED, _site_file)
    content = unseal(requests[TARGET])[1]
    models: dict[str, Any] = dict(content["models"])  # type: ignore[arg-type]
    if spoil == "changed":
        sealed = models[SOURCE]["0|sealed"].clone()
        sealed[len(sealed) // 2] ^= 1
        models[SOURCE] = Sealed({**models[SOURCE], "0|sealed": sealed})
    else:
        models[SOURCE], models[THIEF] = models[THIEF], models[SOURCE]
    answer = answer_to(programs[TARGET], forged(requests[TARGET], {**content, "models": models}))
    said = str(answer.get("message"))
    word = "is not signed" if spoil == "changed" else f"holds that of '{THIEF}'"
    expect(word in said, f"the target answers {said}")
    expect("error" not in answer_to(programs[TARGET], requests[TARGET]), "the target does not open the genuine models")
    return said


def _changed(played: Played) -> str:
    return _handed_on(played, "model-changed", "changed")


def _swapped(played: Played) -> str:
    return _handed_on(played, "models-swapped", "swapped")


def _all_sealed(site: str) -> dict[str, Any]:
    return {"policy": {"send": ["sealed", "numbers", "accuracy", "metrics"], "methods": ["shot"]}}


def _kept(played: Played) -> str:
    clear: list[str] = []

    def watch(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        content = unseal(answer)[1] if isinstance(answer, Message) else {}
        clear.extend(f"{site}: {path}" for path, value in leaves(content) if isinstance(value, Weights))
        return answer

    rehearse(of_four(played), "kept", watch, "shot", SEALED, _all_sealed)
    expect(not clear, f"models in clear: {clear}")
    runs = folder_of(of_four(played), "kept") / "deployment" / "runs"
    folder = next(runs.rglob(SEALED_MODEL)).parent
    try:
        load_model(folder)
    except UserError as error:
        return str(error)
    raise Broken(f"the coordinator opens {folder}")


def _for_another(played: Played) -> str:
    """The target is asked to seal its own models for another site, and seals them for itself alone."""
    programs, requests = caught_requests(
        of_four(played), "for-another", "receive_and_adapt", "shot", SEALED, _all_sealed
    )
    card = json.loads(requests[TARGET].header)["seal"]["for"][TARGET]
    answer = answer_to(programs[TARGET], forged(requests[TARGET], seal={"for": {THIEF: card}}))
    said = str(answer.get("message"))
    expect(f"is asked to seal for '{THIEF}'" in said, f"the target answers {said}")
    expect("error" not in answer_to(programs[TARGET], requests[TARGET]), "the target does not answer a genuine request")
    return said


COORDINATOR = "a curious coordinator"
PROMISES = (
    Promise(COORDINATOR, "reads the sealed models that it hands on", _read),
    Promise(COORDINATOR, "asks for a model in clear that a site sends sealed only", _in_clear),
    Promise(COORDINATOR, "has a model sealed for a key that the target did not sign", _own_key),
    Promise(COORDINATOR, "changes a sealed model on its way to the target", _changed),
    Promise(COORDINATOR, "reads the trained model that the target has it keep", _kept),
    Promise(COORDINATOR, "has the target seal its model for another site", _for_another),
    Promise(COORDINATOR, "gives the target one site's model in the name of another", _swapped),
)
