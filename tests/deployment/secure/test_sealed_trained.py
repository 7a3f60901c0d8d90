"""Trained models that have sealed parts: the coordinator carries, keeps and saves them, and their readers open them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import ADAPT, SITES, deploy, model, options_of, result, same, simulate, site_file, write_data
from safetensors.torch import load_file

pytest.importorskip("cryptography")
pytest.importorskip("cryptography.hazmat.primitives.hpke")
from cryptography.hazmat.primitives import serialization
from federations import Between, Request, box_of, certificate_of, key_of, write_kits

from fedshift.cli.site import open_model
from fedshift.deployment.secure.identity import signing
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.check import check
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.predict import load_model
from fedshift.federation.messages import Sealed, leaves
from fedshift.federation.remote.policy import AuditLog
from fedshift.federation.remote.transport import Lost
from fedshift.federation.remote.wire import Message, body_of, seal, unseal
from fedshift.federation.secure.closed import Box, Package, Passage
from fedshift.federation.secure.keys import KeyCard
from fedshift.federation.secure.orders import card_entry
from fedshift.federation.secure.sealing import SealingKey, key_text
from fedshift.playground.in_process import answer_to, forged
from fedshift.weights import Weights

SEALED_ONLY = ["sealed", "numbers", "accuracy", "metrics"]
SHOT: dict[str, Any] = {"name": "shot", "bottleneck": 4}
COPA: dict[str, Any] = {"name": "copa", "local_epochs": 1}
UNSEEN_SITE = {"targets": ["east"], "seeds": [0], "test_fraction": 0.3}
RUN = "seed-0"


def between(folder: Path, **policy: Any) -> Between:
    """Sites with kits."""
    write_kits(folder, list(SITES))
    files = write_data(folder / "data", SITES)
    return Between({name: site_file(folder, name, files[name], **policy) for name in SITES})


def options(method: Mapping[str, Any], rounds: int = 2) -> dict[str, Any]:
    protocol = ADAPT if method["name"] == "shot" or method.get("adaptation") else UNSEEN_SITE
    whole = options_of(dict(method), protocol=protocol)
    return {**whole, "training": {**whole["training"], "rounds": rounds}}


def run(folder: Path, transport: Between, method: Mapping[str, Any], rounds: int = 2, **engine: Any) -> Path:
    engine = {"routing": "sealed", **engine}
    return deploy(folder, options(method, rounds), unseen={}, transport=transport, engine=engine)[0]


def opened(folder: Path, there: Path, method: str, site: str) -> dict[str, torch.Tensor]:
    """The run's model as a site opens it."""
    open_model(there / method / "east" / RUN, folder / site / "SITE.yaml", folder / f"{site}.safetensors")
    return load_file(folder / f"{site}.safetensors")


@pytest.mark.parametrize(
    ("method", "readers"),
    [(SHOT, ["east"]), (COPA, [*SITES]), ({**COPA, "adaptation": True}, [*SITES])],
    ids=["shot", "copa", "copa with a target"],
)
def test_same_bits_as_the_local_engine_and_its_readers_open_it(
    method: dict[str, Any], readers: list[str], tmp_path: Path
) -> None:
    """With `shot` no model leaves any site that is not sealed, the target neither."""
    name = method["name"]
    transport = between(tmp_path, **({"send": SEALED_ONLY} if name == "shot" else {}))
    crossed: list[Any] = []

    def watch(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        assert isinstance(answer, Message)
        crossed.extend(path for path, one in leaves(unseal(answer)[1]) if isinstance(one, Weights))
        return answer

    transport.change = watch
    there = run(tmp_path, transport, method)
    here = simulate(tmp_path, options(method), unseen={}, routing="sealed")
    folder = there / name / "east" / RUN
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
            assert same(whole, opened(tmp_path, there, name, site))
            load_model(tmp_path / f"{site}.safetensors")
            lines, _ = AuditLog.check(transport.programs[site].config.audit_log)
            assert any(line.get("opened") for line in lines)
        else:
            with pytest.raises(UserError, match=f"site '{site}' has no key that this model was sealed for"):
                opened(tmp_path, there, name, site)
        kept = [*transport.programs[site].config.memory.glob("*/sealing"), *(tmp_path / site).glob("memory/.models/*")]
        assert len(kept) == (site in readers), "the key goes with the run, or with its model"


class Killed(Exception):
    """The coordinator died here."""


@pytest.mark.parametrize(
    ("method", "moments"),
    [
        (SHOT, [("south", "train_source", 0), ("east", "measure", 0), ("east", "adapt", 2), ("east", "measure", 2)]),
        (COPA, [("south", "fit", 1), ("east", "measure", 1), ("north", "fit", 2), ("north", "measure", 2)]),
    ],
    ids=["shot", "copa"],
)
def test_killed_anywhere_a_run_ends_in_the_same_bits(
    method: dict[str, Any], moments: list[tuple[str, str, int]], tmp_path: Path
) -> None:
    """Coordinator and sites begin anew each time; the third time sites have lost the answers that they kept."""
    left = list(moments)

    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        moment = (site, header.get("step", header["do"]), header.get("envelope", header).get("round"))
        if moment in left:
            left.remove(moment)
            for file in tmp_path.rglob("answer-*") if len(left) == 1 else ():
                file.unlink()
            raise Killed
        return answer

    while True:
        transport = between(tmp_path)
        transport.change = change
        try:
            there = run(tmp_path, transport, method)
            break
        except Killed:
            pass
    assert not left
    here = simulate(tmp_path, options(method), unseen={}, routing="sealed")
    name = method["name"]
    assert same(model(here, name, "east"), opened(tmp_path, there, name, "east"))
    assert result(here, name, "east")["selected"] == result(there, name, "east")["selected"]


@pytest.mark.parametrize(
    ("method", "lost", "wire"),
    [(COPA, ("fit", 2), "int8"), (SHOT, ("train_source", 0), "float32")],
    ids=["copa", "shot"],
)
def test_a_run_goes_on_without_a_site(method: dict[str, Any], lost: tuple[str, int], wire: str, tmp_path: Path) -> None:
    """What the site sealed in an exchange whose answer was lost is not taken for a newer model."""
    transport, name = between(tmp_path), method["name"]

    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        moment = (header.get("step"), header.get("envelope", header).get("round"))
        return Lost("the line is dead") if site == "south" and moment == lost else answer

    transport.change = change
    there = run(tmp_path, transport, method, quorum=1, patience=0.1, wire=wire)
    rounds = [json.loads(line) for line in (there / name / "east" / RUN / "rounds.jsonl").read_text().splitlines()]
    assert [list(line["extra"]["missing"]) for line in rounds if "missing" in line["extra"]] == [["south"]]
    assert all("east" in line["target_accuracy"] for line in rounds)
    whole = opened(tmp_path, there, name, "east")
    if name == "shot":
        assert whole["counted"].tolist() == [1.0, 0.0]
    else:
        assert same(whole, opened(tmp_path, there, name, "south"))


# Attacks --------------------------------------------------------------------------------------------------------------


class Stopped:
    """A run of which the last measurements were asked for, and the requests that sites got until then."""

    def __init__(self, folder: Path, method: dict[str, Any], rounds: int = 2) -> None:
        self.rounds = rounds
        self.requests: dict[tuple[str, str, int], Message] = {}
        self.transport = between(folder, **({"send": SEALED_ONLY} if method is SHOT else {}))
        self.name = f"tiny-{method['name']}-east-seed-0"

        def meddle(site: str, header: dict[str, Any], content: dict[str, Any]) -> None:
            if header["do"] in ("step", "measure"):
                call, number = header.get("step", header["do"]), header.get("envelope", header)["round"]
                self.requests[site, call, number] = seal(header, body_of(content))

        self.transport.meddle = meddle
        self.transport.change = self._stop
        with pytest.raises(Killed):
            run(folder, self.transport, method, rounds)

    def _stop(self, site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if header["do"] == "measure" and header["round"] == self.rounds and site == "east":
            raise Killed
        return answer

    def content(self, *request: Any) -> dict[str, Any]:
        return dict(unseal(self.requests[request])[1])

    def header(self, *request: Any) -> dict[str, Any]:
        return unseal(self.requests[request])[0]

    def says(
        self, site: str, call: str, number: int, content: dict[str, Any] | None = None, to: str = "", **header: Any
    ) -> str:
        """What a site, or another one, says to a forged request; an earlier one may have had it forget its memory."""
        request = forged(self.requests[site, call, number], content, memory={}, **header)
        answer = answer_to(self.transport.programs[to or site], request)
        assert "error" in answer
        return str(answer["message"])

    def public(self, site: str) -> bytes:
        return SealingKey.of(self.transport.programs[site].config.memory / self.name / "sealing" / "key").public


@pytest.fixture(scope="module")
def shot(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    return Stopped(tmp_path_factory.mktemp("shot"), SHOT)


@pytest.fixture(scope="module")
def copa(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    return Stopped(tmp_path_factory.mktemp("copa"), COPA, 3)


def card(run: Stopped, public: bytes, run_name: str = "") -> list[str]:
    """A key in the name of the target, with the signature of the genuine one, or of another run."""
    signed = key_of("east").sign(key_text(run_name or run.name, "east", public), *signing())
    der = certificate_of("east", key_of("east")).public_bytes(serialization.Encoding.DER)
    return card_entry(KeyCard("east", public, signed, der))


def parts_of(content: Mapping[str, Any]) -> Package:
    return Package.read(content["weights"])


def together(*parts: tuple[Box, str, str]) -> dict[str, Any]:
    """A model to measure, of other sealed parts: box, model in it, prefix of its tensors."""
    boxes = list(dict.fromkeys(box for box, _, _ in parts))
    package = Package(boxes, [(boxes.index(box), name, prefix) for box, name, prefix in parts])
    return {"weights": package.content, "weights in clear": Weights({"counted": torch.ones(2)})}


def members(shot: Stopped, first: tuple[str, int], second: tuple[str, int]) -> dict[str, Any]:
    """SHOT's model with two members, each of a round."""
    packages = {of_round: parts_of(shot.content("east", "measure", of_round)) for _, of_round in (first, second)}
    found = []
    for number, (name, of_round) in enumerate((first, second)):
        boxes = packages[of_round].boxes
        box = next(box for box in boxes if name in (*box.models, box.passage.sender))
        found.append((box, name if name in box.models else "", f"members.{number}."))
    return together(*found)


def passage(run: Stopped, sender: str, call: str, field: str, exchange: int, readers: Any = ("east",)) -> Passage:
    return Passage(run.name, exchange, call, field, sender, tuple(sorted(readers)))


def given(shot: Stopped, value: Any, plain: bytes | None = None, said: Any = None) -> dict[str, Any]:
    """What SHOT's target is given if a source seals something else than its model."""
    content = shot.content("east", "receive_and_adapt", 1)
    way, keys = passage(shot, "north", "train_source", "weights", 1), {"east": shot.public("east")}
    sealed = box_of(way, value, keys, said=said, plain=plain)
    return {"models": {**content["models"], "north": sealed}}


FEW = Weights({"classifier.bias": torch.zeros(3)})
THIEF = SealingKey(bytes(range(32))).public
Attack = Callable[[Stopped], str]
ON_SHOT: dict[str, tuple[Attack, str]] = {
    "another key for the target's own": (
        lambda run: run.says("east", "adapt", 2, seal={"for": {"east": card(run, THIEF, "another")}}),
        "a key that is said to be its own and is not",
    ),
    "a key of its own to the source": (
        lambda run: run.says("north", "train_source", 0, seal={"for": {"east": card(run, THIEF, "another")}}),
        "the key of 'east' is not signed",
    ),
    "the target's model for another site": (
        lambda run: run.says("east", "adapt", 2, seal={"for": {"north": card(run, THIEF)}}),
        "is the target of this run and asked to seal its model for 'north'",
    ),
    "the target's model in clear": (
        lambda run: run.says("east", "adapt", 2, seal=None, routing=None),
        "refuses to send weights",
    ),
    "a trained model of another round": (
        lambda run: run.says("east", "measure", 2, run.content("east", "measure", 1)),
        "the trained model that it is given is of exchange 2, and it had one of exchange 3 before",
    ),
    "the sources' models once more": (
        lambda run: run.says("east", "measure", 2, run.content("east", "measure", 0)),
        "the trained model that it is given is of exchange 1, and it had one of exchange 3 before",
    ),
    "one site's model in the place of another's": (
        lambda run: run.says("east", "measure", 2, members(run, ("south", 2), ("north", 2))),
        "not in the order of their sites",
    ),
    "parts of two rounds": (
        lambda run: run.says("east", "measure", 2, members(run, ("north", 2), ("south", 0))),
        "not of one exchange",
    ),
    "what nobody sealed for a source": (
        lambda run: run.says("east", "measure", 2, to="north", part=run.header("north", "train_source", 0)["part"]),
        "not sealed for this site's key",
    ),
    "senders swapped": (
        lambda run: run.says("east", "receive_and_adapt", 1, swapped(run)),
        "as the model of 'south' .* is one of 'north' of exchange 1",
    ),
    "a model of wrong shape from its source": (
        lambda run: run.says("east", "receive_and_adapt", 1, given(run, FEW)),
        "the model that 'north' sealed for it: 'weights' holds a part of the network's tensors",
    ),
    "a model that looks otherwise than it is said to": (
        lambda run: run.says(
            "east", "receive_and_adapt", 1, given(run, FEW, said={"": Weights({"w": torch.zeros(3)})})
        ),
        "it does not look as it is said to",
    ),
    "garbage from a source": (
        lambda run: run.says("east", "receive_and_adapt", 1, given(run, FEW, plain=bytes(1000))),
        "the model that 'north' sealed for it: a message is damaged",
    ),
    "numbers that are none, from a source": (
        lambda run: run.says("east", "receive_and_adapt", 1, given(run, unfinished(run))),
        "the model that 'north' sealed for it: .* holds NaN",
    ),
    "a model of its own in clear": (
        lambda run: run.says("east", "receive_and_adapt", 1, {"models": {"north": FEW, "south": FEW}}),
        "the model of 'north' that it is given: it holds no sealed model",
    ),
    "no package at all": (
        lambda run: run.says("east", "measure", 2, {"weights": Sealed({"sealed": torch.zeros(3)})}),
        "a request to measure: it holds no sealed model",
    ),
}


def swapped(shot: Stopped) -> dict[str, Any]:
    """The sources' models, each in the name of the other."""
    models = shot.content("east", "receive_and_adapt", 1)["models"]
    return {"models": dict(zip(reversed(models), models.values(), strict=True))}


def unfinished(shot: Stopped) -> Weights:
    """A model of the right shape that diverged."""
    zeros = parts_of(shot.content("east", "measure", 0)).boxes[0].stand_ins()[""]
    return Weights(
        {name: torch.full_like(one, torch.nan if one.is_floating_point() else 0) for name, one in zeros.items()}
    )


@pytest.mark.parametrize("attack", ON_SHOT)
def test_shot_under_attack(attack: str, shot: Stopped) -> None:
    tried, said = ON_SHOT[attack]
    found = tried(shot)
    assert re.search(said, found), found


def others(copa: Stopped, number: int, **changes: Any) -> dict[str, Any]:
    content = copa.content("north", "fit", number)
    return {**content, "others": {**content["others"], **changes}}


def classifier(copa: Stopped, sender: str, value: Weights) -> Sealed:
    """A classifier that its site sealed for all, and that is none."""
    return box_of(
        passage(copa, sender, "fit", "classifier", 1, SITES), value, {site: copa.public(site) for site in SITES}
    )


HEAD = {"weight": torch.zeros(3, 6), "bias": torch.zeros(3)}
ON_COPA: dict[str, tuple[Attack, str]] = {
    "a classifier of its own in clear": (
        lambda run: run.says("north", "fit", 2, others(run, 2, south=Weights(HEAD))),
        "the model of 'south' that it is given: it holds no sealed model",
    ),
    "the site's own classifier as another's": (
        lambda run: run.says(
            "north", "fit", 2, others(run, 2, south=run.content("south", "fit", 2)["others"]["north"])
        ),
        "as the model of 'south' .* is one of 'north'",
    ),
    "a model of wrong shape from another site": (
        lambda run: run.says("north", "fit", 2, others(run, 2, south=classifier(run, "south", FEW))),
        "the model that 'south' sealed for it: 'classifier' holds the tensors",
    ),
    "huge weights from another site": (
        lambda run: run.says(
            "north",
            "fit",
            2,
            others(run, 2, south=classifier(run, "south", Weights({**HEAD, "bias": torch.ones(3) * 1e4}))),
        ),
        "the model that 'south' sealed for it: 'classifier/bias' holds 10000",
    ),
    "a classifier of another round": (
        lambda run: run.says("north", "fit", 3, others(run, 2)),
        "the model of 'south' that it is given is of exchange 1, and it had one of exchange 2 before",
    ),
}


@pytest.mark.parametrize("attack", ON_COPA)
def test_copa_under_attack(attack: str, copa: Stopped) -> None:
    tried, said = ON_COPA[attack]
    found = tried(copa)
    assert re.search(said, found), found


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


# Refused before training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({**SHOT, "average_rounds": 2}, "which average_rounds reads"),
        ({**COPA, "average": "swa"}, "which average reads"),
    ],
)
def test_what_would_read_the_trained_model_is_refused(method: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        simulate(tmp_path, options(method), unseen={}, routing="sealed")


def test_check_says_what_leaves_and_what_the_server_reads(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)
    both = {**options(SHOT), "methods": [SHOT, {**COPA, "adaptation": True}]}
    experiment = parse({**both, "data": {"name": "arrays", "sites": files}, "engine": {"routing": "sealed"}})
    found = check(experiment)
    assert [(one.shares, one.reads) for one in found.methods] == [
        (("numbers", "sealed"), "no model"),
        (("weights", "numbers", "sealed"), "feature extractors"),
    ]
    assert any("only the target can measure" in warning for warning in found.warnings)


def test_the_coordinator_cannot_measure_it_on_samples_of_its_own(tmp_path: Path) -> None:
    write_kits(tmp_path, list(SITES))
    with pytest.raises(UserError, match="on its own 'west'"):
        deploy(tmp_path, options_of(COPA), engine={"routing": "sealed"})
