"""Models that pass from site to site sealed: the bits of the local engine, and nobody between opens or replaces one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from federations import Between, Meddle, Request, box_of, card_entry, certificate_of, key_of, write_kits
from loopback import Loopback, deploy, killed_at, options_of, simulate, through_deaths
from outcomes import alike, audit, model, result, same
from safetensors.torch import load_file
from sealed import COPA, SEALED_ONLY, SEED, SHOT, SOURCES, between, options, run
from sealed import KD3A as KD3A_OPTIONS
from site_yaml import SITES, write_data

from fedshift.deploy.cli.site import open_model
from fedshift.deploy.crypto.masked_sums import KeyCard
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.secure.identity import signing
from fedshift.deploy.secure.site_seals import SealingKey, key_text
from fedshift.encryption import write_private
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.check import check
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.predict import load_model
from fedshift.federation.messages import Sealed, leaves
from fedshift.federation.secure.closed import ClosedTensor, Passage
from fedshift.functional.averaging import weighted_average
from fedshift.methods.federated.kd3a import KD3A
from fedshift.weights import Weights
from tried import slow_after

FADA = {"name": "fada", "steps_per_round": 2}
RUN = "tiny-kd3a-east-seed-0"
TARGET_KEY = bytes(range(32))


@pytest.mark.slow
@pytest.mark.threat("handed_on_model")
@pytest.mark.parametrize(("method", "made"), [(KD3A_OPTIONS, "fit"), (FADA, "finish")])
def test_same_bits_and_no_source_model_in_clear(method: dict[str, Any], made: str, tmp_path: Path) -> None:
    """The sources' own policies allow no model to leave that is not sealed."""
    send = ["numbers", "accuracy", "metrics", *(["features"] if method is FADA else [])]
    transport = between(tmp_path, {"send": ["sealed", *send]}, send=["weights", *send])
    crossed: dict[str, bytes] = {}

    def watch(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if header.get("call") == made and isinstance(answer, Message):
            _, content, _ = unseal(answer)
            assert isinstance(content["weights"], Sealed)
            crossed[site] = answer.body
        return answer

    transport.change = watch
    there = run(tmp_path, transport, method)
    here = simulate(tmp_path, options(method), unseen={}, routing="sealed")
    name = method["name"]
    assert alike(here, there, name, "east")
    ours, theirs = result(here, name, "east"), result(there, name, "east")
    assert (ours["selected"], set(crossed)) == (theirs["selected"], set(SOURCES))
    rounds = transport.asked.count(("north", made))
    model_bytes = sum(tensor.nbytes for tensor in model(here, name, "east").values())
    sealed, up = theirs["bytes_up"]["sealed"], theirs["bytes_up"]["weights"]
    assert up == rounds * model_bytes, "the target's model alone is in clear"
    assert 1 < sealed / (rounds * model_bytes * len(SOURCES)) < 1 + 4000 / model_bytes
    assert 0 <= theirs["bytes_down"]["sealed"] - sealed < 20 * rounds * len(SOURCES), "and where they belong"
    lines = audit(transport.programs["north"])
    fits = [line for line in lines if line["call"] == made]
    assert all(line["sealed_for"] == ["east"] and line["sent"]["weights"]["kind"] == "sealed" for line in fits)
    lines = audit(transport.programs["east"])
    assert [line["opened"] for line in lines if "opened" in line] == [list(SOURCES)] * rounds
    assert not list(transport.programs["east"].config.memory.glob("*/sealing/*")), "the key goes with the run"


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_killed_anywhere_a_run_ends_in_the_same_bits(wire: str, tmp_path: Path) -> None:
    """Coordinator and sites begin anew each time; the second time a source has lost the answer that it kept."""
    moments = [("south", "fit", 1), ("east", "distil", 1), ("north", "fit", 2), ("east", "distil", 2)]
    change = killed_at(*moments, lose={2: tmp_path / "north"})

    def anew() -> tuple[Path, Loopback]:
        transport = between(tmp_path)
        transport.change = change
        return run(tmp_path, transport, wire=wire), transport

    (there, transport), deaths = through_deaths(anew)
    assert deaths == 4
    straight = run(tmp_path / "straight", between(tmp_path / "straight"), wire=wire)
    assert alike(there, straight, "kd3a", "east")
    if wire == "float32":
        here = simulate(tmp_path, options(), unseen={})
        assert alike(here, there, "kd3a", "east")
    lines = audit(transport.programs["south"])
    assert any(line.get("again") for line in lines), "what was kept is given again"


def to_target(change: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]], number: int = 1) -> Meddle:
    """Change the models that the target is given in a round."""

    def meddle(site: str, header: dict[str, Any], content: dict[str, Any]) -> Request | None:
        if header.get("call") != "distil" or header["envelope"]["round"] != number:
            return None
        return header, {**content, "models": change(header, dict(content["models"]))}

    return meddle


def flip_byte(header: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    sealed = models["north"]["0|sealed"].clone()
    sealed[len(sealed) // 2] ^= 1
    return {**models, "north": Sealed({**models["north"], "0|sealed": sealed})}


def swap_models(header: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    return {"north": models["south"], "south": models["north"]}


def made_by(signer: str, run_name: str = RUN, **other: Any) -> Callable[..., dict[str, Any]]:
    """A model in the name of north, signed with the key of ``signer``, sealed with the target's own key."""

    def change(header: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
        passage = Passage(run_name, header["envelope"]["exchange"] - 1, "fit", "weights", "north", ("east",))
        keys = other.get("keys", {"east": SealingKey(TARGET_KEY).public})
        return {**models, "north": box_of(passage, OTHER, keys, signer, other.get("contents"))}

    return change


OTHER = Weights({"features.w": torch.zeros(2)})
NOT_SIGNED = "the sealed model of 'north' is not signed with a certificate"


@pytest.mark.threat("handed_on_model")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_byte, NOT_SIGNED),
        (swap_models, "the model of 'north' from exchange 1, call fit, run .* that of 'south' from exchange 1"),
        (made_by("north", "another-run"), "run 'another-run'"),
        (made_by("coordinator"), NOT_SIGNED),
        (made_by("north"), "the model that 'north' sealed for it: 'weights' holds other tensors than"),
        (
            made_by("north", keys={"east": SealingKey(bytes(range(1, 33))).public}),
            "model of 'north' was not sealed for this site's key",
        ),
        (made_by("north", contents={"": Weights({"w": torch.zeros(2)})}), "not those that its box declares"),
        (lambda header, models: {**models, "north": Sealed({"sealed": OTHER["features.w"]})}, "holds no sealed model"),
        (lambda header, models: {**models, "north": OTHER}, "holds no sealed model"),
    ],
)
def test_the_target_opens_what_its_sender_sealed_for_it_and_nothing_else(
    change: Callable[..., dict[str, Any]], message: str, tmp_path: Path
) -> None:
    transport = between(tmp_path)
    give_key(transport, "east", RUN)
    transport.meddle = to_target(change)
    with pytest.raises(FedshiftError, match=message):
        run(tmp_path, transport)
    lines = audit(transport.programs["east"])
    assert re.search(message, lines[-1]["refused"])


def give_key(transport: Between, site: str, run_name: str) -> None:
    """Let the attacker know the key of a site."""
    key = transport.programs[site].config.memory / run_name / "sealing" / "key"
    key.parent.mkdir(parents=True)
    write_private(key, TARGET_KEY)


@pytest.mark.threat("handed_on_model")
def test_a_model_of_another_round_is_not_opened(tmp_path: Path) -> None:
    transport, before = between(tmp_path), {}

    def meddle(site: str, header: dict[str, Any], content: dict[str, Any]) -> Request | None:
        if header.get("call") != "distil":
            return None
        before.setdefault("models", content["models"])
        return (header, {**content, **before}) if header["envelope"]["round"] == 2 else None

    transport.meddle = meddle
    with pytest.raises(FedshiftError, match=r"from exchange 3, call fit, run .* that of 'north' from exchange 1"):
        run(tmp_path, transport)


def own_card(run_name: str, signer: str) -> list[str]:
    """A key that the coordinator knows, in the name of the target."""
    public = SealingKey(bytes(range(32))).public
    signature = key_of(signer).sign(key_text(run_name, "east", public), *signing())
    der = certificate_of("east", key_of(signer)).public_bytes(serialization.Encoding.DER)
    return card_entry(KeyCard("east", public, signature, der))


def forged_card(name: str, header: dict[str, Any]) -> dict[str, Any] | None:
    """The header of a request to seal, with something wrong in it."""
    card = header["seal"]["for"]["east"]
    wrong: dict[str, dict[str, Any]] = {
        "another key": {"seal": {"for": {"east": [own_card(RUN, "east")[0], *card[1:]]}}},
        "another run": {"seal": {"for": {"east": own_card("another-run", "east")}}},
        "another certificate": {"seal": {"for": {"east": own_card(RUN, "thief")}}},
        "another site": {"seal": {"for": {"south": card}}},
        "a second reader": {"seal": {"for": {"east": card, "south": card}}},
        "itself": {"seal": {"for": {"north": card}}},
        "nobody": {"seal": {"card": card}},
        "in clear": {name: value for name, value in header.items() if name not in ("seal", "routing")},
    }
    changed = wrong[name]
    return changed if name == "in clear" else {**header, **changed}


@pytest.mark.threat("handed_on_model")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another key", "the key of 'east' is not signed"),
        ("another run", "the key of 'east' is not signed"),
        ("another certificate", "certificate of 'east' is not the one that rule policy.peers lists"),
        ("another site", "the key of 'south' is not signed"),
        ("itself", "asked to seal a model for itself"),
        ("a second reader", "does not say for whom"),
        ("nobody", r"seal\.for: this field is missing"),
        ("in clear", "'north' refuses to send weights"),
    ],
)
def test_a_source_seals_for_a_key_that_the_target_signed_alone(name: str, message: str, tmp_path: Path) -> None:
    """Also where the authority signs a certificate in the target's name."""
    right = certificate_of("east", key_of("east")).fingerprint(signing()[1]).hex()
    send = ["sealed", "numbers", "accuracy", "metrics"]
    transport = between(tmp_path, {"send": send, "peers": {"east": right}})

    def meddle(site: str, header: dict[str, Any], content: dict[str, Any]) -> Request | None:
        changed = forged_card(name, header) if site == "north" and "seal" in header else None
        return None if changed is None else (changed, content)

    transport.meddle = meddle
    with pytest.raises(FedshiftError, match=message):
        run(tmp_path, transport)
    lines = audit(transport.programs["north"])
    assert re.search(message, lines[-1].get("refused") or lines[-1]["failed"])


@pytest.mark.threat("handed_on_model")
def test_only_what_a_method_hands_on_is_sealed_or_opened(tmp_path: Path) -> None:
    """Neither can the coordinator have the target's model sealed, nor give a sealed one to another call."""
    transport = between(tmp_path)
    held: dict[str, Any] = {}

    def meddle(site: str, header: dict[str, Any], content: dict[str, Any]) -> Request | None:
        held.update({"seal": header["seal"]} if "seal" in header else {})
        return ({**header, **held}, content) if header.get("call") == "distil" else None

    transport.meddle = meddle
    with pytest.raises(FedshiftError, match="what call distil sends is not only handed on"):
        run(tmp_path, transport)
    transport = between(tmp_path)
    sealed = Sealed({"sealed": torch.zeros(3, dtype=torch.uint8)})
    transport.meddle = lambda site, header, content: (
        (header, {"weights": sealed}) if header.get("call") == "fit" else None
    )
    with pytest.raises(FedshiftError, match="call fit is not given sealed models in 'weights'"):
        run(tmp_path, transport)


def test_server_code_cannot_read_what_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = ClosedTensor((None, "", "w"), torch.float32, (2,))
    for look in (
        list,
        torch.Tensor.sum,
        lambda tensor: tensor[0],
        lambda tensor: tensor + 1,
        lambda tensor: tensor.equal(tensor),
    ):
        with pytest.raises(FedshiftError, match="only hand it on"):
            look(closed)
    assert closed.shape == (2,)
    assert type(closed.detach()) is ClosedTensor

    def curious(self: KD3A, federation: Any, state: Any) -> Any:
        models = [update.weights for update in federation.ask(self.fit, to=federation.sources, weights=state.weights)]
        return state.advance(weighted_average(models, [0.5, 0.5]))

    monkeypatch.setattr(KD3A, "round", curious)
    with pytest.raises(FedshiftError, match="may only hand it on"):
        run(tmp_path, between(tmp_path))


def odd_box(exchange: int = 1, readers: tuple[str, ...] = ("east",), size: int = 2) -> Sealed:
    """A box that is sealed for another exchange or reader than was asked for, or says that it holds another model."""
    keys = {reader: SealingKey(TARGET_KEY).public for reader in readers}
    passage = Passage(RUN, exchange, "fit", "weights", "north", readers)
    sealed = box_of(passage, OTHER, keys, contents={"": Weights({"features.w": torch.zeros(size)})})
    return Sealed({name.removeprefix("0|"): part for name, part in sealed.items() if name != "places"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    slow_after(
        3,
        [
            ({}, "holds no sealed model"),
            ({"weights": OTHER}, "holds no sealed model"),
            ({"weights": Sealed({"sealed": torch.zeros(3)})}, "holds no sealed model"),
            ({"weights": odd_box(exchange=2)}, "not that of exchange 1 for east"),
            ({"weights": odd_box(readers=("east", "south"))}, "not that of exchange 1 for east"),
            ({"weights": odd_box()}, "'weights' holds other tensors than the site was sent"),
            ({"weights": odd_box(size=2**20)}, "does not say what it is"),
        ],
    ),
)
def test_an_answer_that_is_not_sealed_as_asked_is_refused(spoil: dict[str, Any], message: str, tmp_path: Path) -> None:
    transport = between(tmp_path)

    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if site != "north" or header.get("call") != "fit" or not isinstance(answer, Message):
            return answer
        told, content, _ = unseal(answer)
        return seal(told, body_of({**{name: content[name] for name in ("samples", "loss")}, **spoil}))

    transport.change = change
    there = run(tmp_path, transport, quorum=1)
    record = json.loads((there / "kd3a/east/seed-0/rounds.jsonl").read_text().splitlines()[0])
    assert message in record["extra"]["missing"]["north"]


def open_at_site(folder: Path, there: Path, method: str, site: str) -> dict[str, torch.Tensor]:
    """The run's model as a site opens it."""
    open_model(there / method / "east" / SEED, folder / site / "SITE.yaml", folder / f"{site}.safetensors")
    return load_file(folder / f"{site}.safetensors")


@pytest.mark.threat("kept_sealed")
@pytest.mark.parametrize(
    ("method", "readers"),
    slow_after(1, [(SHOT, ["east"]), (COPA, [*SITES]), ({**COPA, "adaptation": True}, [*SITES])]),
    ids=["shot", "copa", "copa with a target"],
)
def test_same_bits_and_its_readers_open_it(method: dict[str, Any], readers: list[str], tmp_path: Path) -> None:
    """With `shot` no model leaves any site that is not sealed, the target neither."""
    name = method["name"]
    transport = between(tmp_path, **({"send": SEALED_ONLY} if name == "shot" else {}))
    crossed: list[Any] = []

    def watch(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        crossed.extend(path for path, value in leaves(unseal(answer)[1]) if isinstance(value, Weights))
        return answer

    transport.change = watch
    there = run(tmp_path, transport, method)
    here = simulate(tmp_path, options(method), unseen={}, routing="sealed")
    folder = there / name / "east" / SEED
    assert {*crossed} == ({"features"} if name == "copa" else set())
    ours, theirs = result(here, name, "east"), result(there, name, "east")
    assert ours["selected"] == theirs["selected"]
    assert set(theirs["selected"]["last"]["sites"]) == set(readers), "the sites that measured"
    assert not (folder / "model.safetensors").exists()
    with pytest.raises(UserError, match="fedshift site open"):
        load_model(folder)
    with pytest.raises(UserError, match="fedshift site open"):
        load_model(folder / "model.sealed")
    whole = model(here, name, "east")
    for site in SITES:
        if site in readers:
            assert same(whole, open_at_site(tmp_path, there, name, site))
            load_model(tmp_path / f"{site}.safetensors")
            lines = audit(transport.programs[site])
            assert any(line.get("opened") for line in lines)
        else:
            with pytest.raises(UserError, match=f"site '{site}' has no key that this model was sealed for"):
                open_at_site(tmp_path, there, name, site)
        kept = [*transport.programs[site].config.memory.glob("*/sealing"), *(tmp_path / site).glob("memory/.models/*")]
        assert len(kept) == (site in readers), "the key goes with the run, or with its model"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "moments"),
    [
        (SHOT, [("south", "train_source", 0), ("east", "measure", 0), ("east", "adapt", 2), ("east", "measure", 2)]),
        (COPA, [("south", "fit", 1), ("east", "measure", 1), ("north", "fit", 2), ("north", "measure", 2)]),
    ],
    ids=["shot", "copa"],
)
def test_a_trained_model_ends_in_the_same_bits_after_kills(
    method: dict[str, Any], moments: list[tuple[str, str, int]], tmp_path: Path
) -> None:
    """Coordinator and sites begin anew each time; the third time sites have lost the answers that they kept."""
    change = killed_at(*moments, lose={3: tmp_path})

    def anew() -> Path:
        transport = between(tmp_path)
        transport.change = change
        return run(tmp_path, transport, method)

    there, deaths = through_deaths(anew)
    assert deaths == len(moments)
    here = simulate(tmp_path, options(method), unseen={}, routing="sealed")
    name = method["name"]
    assert same(model(here, name, "east"), open_at_site(tmp_path, there, name, "east"))
    assert result(here, name, "east")["selected"] == result(there, name, "east")["selected"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lost", "wire"),
    [(COPA, ("fit", 2), "int8"), (SHOT, ("train_source", 0), "float32")],
    ids=["copa", "shot"],
)
def test_a_run_goes_on_without_a_site(method: dict[str, Any], lost: tuple[str, int], wire: str, tmp_path: Path) -> None:
    """What the site sealed in an exchange whose answer was lost is not taken for a newer model."""
    transport, name = between(tmp_path), method["name"]

    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        moment = (header.get("call"), header.get("envelope", header).get("round"))
        return Lost("the line is dead") if site == "south" and moment == lost else answer

    transport.change = change
    there = run(tmp_path, transport, method, quorum=1, patience=0.1, wire=wire)
    rounds = [json.loads(line) for line in (there / name / "east" / SEED / "rounds.jsonl").read_text().splitlines()]
    assert [list(line["extra"]["missing"]) for line in rounds if "missing" in line["extra"]] == [["south"]]
    assert all("east" in line["target_accuracy"] for line in rounds)
    whole = open_at_site(tmp_path, there, name, "east")
    if name == "shot":
        assert whole["counted"].tolist() == [1.0, 0.0]
    else:
        assert same(whole, open_at_site(tmp_path, there, name, "south"))


def test_what_the_target_refuses_to_open_ends_the_run_with_its_words(tmp_path: Path) -> None:
    """Also with a quorum, which the target is not a part of."""
    transport = between(tmp_path)

    def meddle(site: str, header: dict[str, Any], content: dict[str, Any]) -> Request | None:
        if header["do"] != "measure":
            return None
        spoilt = {"0|sealed": torch.zeros(9, dtype=torch.uint8)}
        return header, {**content, "weights": Sealed({**content["weights"], **spoilt})}

    transport.meddle = meddle
    with pytest.raises(FedshiftError, match="the sealed model of 'north' is not signed"):
        run(tmp_path, transport, SHOT, quorum=1)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "fedavg"}, "fedavg has none: choose copa, fada, shot, kd3a"),
        ({"name": "kd3a", "robust": {"rule": "norm_clipping"}}, "robust aggregation looks at"),
        ({**SHOT, "average_rounds": 2}, "which average_rounds reads"),
        ({**COPA, "average": "swa"}, "which average reads"),
    ],
)
def test_what_it_cannot_hide_is_refused_before_training(method: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        simulate(tmp_path, options(method), unseen={}, routing="sealed")


def test_check_says_what_leaves_and_what_the_server_reads(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)
    both = {**options(SHOT), "methods": [SHOT, {**COPA, "adaptation": True}]}
    experiment = parse({**both, "data": {"name": "arrays", "sites": files}, "engine": {"routing": "sealed"}})
    result = check(experiment)
    assert [(method.shares, method.reads) for method in result.methods] == [
        (("numbers", "sealed"), "no model"),
        (("weights", "numbers", "sealed"), "feature extractors"),
    ]
    assert any("only the target can measure" in warning for warning in result.warnings)


def test_the_coordinator_cannot_measure_it_on_samples_of_its_own(tmp_path: Path) -> None:
    write_kits(tmp_path, list(SITES))
    with pytest.raises(UserError, match="on its own 'west'"):
        deploy(tmp_path, options_of(COPA), engine={"routing": "sealed"})
