"""What a coordinator, or a site, tries with trained models that have sealed parts, and what sites say to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from asked import answer_to, forge
from cryptography.hazmat.primitives import serialization
from federations import box_of, card_entry, certificate_of, key_of
from loopback import Killed
from sealed import COPA, SHOT, between, run
from site_yaml import SITES

from fedshift.deploy.crypto.masked_sums import KeyCard
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.secure.identity import signing
from fedshift.deploy.secure.site_seals import SealingKey, _is_of, key_text
from fedshift.federation.messages import Sealed
from fedshift.federation.secure.closed import Box, Package, Passage
from fedshift.weights import Weights


class Stopped:
    """A run of which the last measurements were asked for, and the requests that sites got until then."""

    def __init__(self, folder: Path, method: dict[str, Any], rounds: int = 2) -> None:
        self.rounds = rounds
        self.requests: dict[tuple[str, str, int], Message] = {}
        self.transport = between(folder)
        self.name = f"tiny-{method['name']}-east-seed-0"

        def meddle(site: str, header: dict[str, Any], content: dict[str, Any]) -> None:
            if header["do"] in ("call", "measure"):
                call, number = header.get("call", header["do"]), header.get("envelope", header)["round"]
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
        request = forge(self.requests[site, call, number], content, memory={}, **header)
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
    messages = []
    for number, (name, of_round) in enumerate((first, second)):
        boxes = packages[of_round].boxes
        box = next(box for box in boxes if name in (*box.models, box.passage.sender))
        messages.append((box, name if name in box.models else "", f"members.{number}."))
    return together(*messages)


def passage(run: Stopped, sender: str, call: str, field: str, exchange: int, readers: Any = ("east",)) -> Passage:
    return Passage(run.name, exchange, call, field, sender, tuple(sorted(readers)))


def answer_given(shot: Stopped, value: Any, plain: bytes | None = None, claims: Any = None) -> dict[str, Any]:
    """What SHOT's target is given if a source seals something else than its model."""
    content = shot.content("east", "receive_and_adapt", 1)
    way, keys = passage(shot, "north", "train_source", "weights", 1), {"east": shot.public("east")}
    sealed = box_of(way, value, keys, contents=claims, plain=plain)
    return {"models": {**content["models"], "north": sealed}}


def with_method(shot: Stopped, **options: Any) -> dict[str, Any]:
    setting = shot.header("east", "adapt", 2)["setting"]
    return {**setting, "method": {"name": "shot", "options": {**setting["method"]["options"], **options}}}


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
        "is asked to seal for 'north' what call adapt seals for the site itself alone",
    ),
    "the target's model for another site, as if it were a source": (
        lambda run: run.says(
            "east",
            "adapt",
            2,
            seal={"for": {"north": card(run, THIEF)}},
            part={**run.header("east", "adapt", 2)["part"], "role": "source"},
        ),
        "is asked to seal for 'north' what call adapt seals for the site itself alone",
    ),
    "the target's model in clear": (
        lambda run: run.says("east", "adapt", 2, seal=None, routing=None),
        "has sealed models here, and this request is not sealed",
    ),
    "the models that the target keeps by another method": (
        lambda run: run.says("east", "adapt", 2, setting=with_method(run, bottleneck=4, label_smoothing=0.2)),
        "or is of another method",
    ),
    "a trained model of another round": (
        lambda run: run.says("east", "measure", 2, run.content("east", "measure", 1)),
        "the trained model in this request is from exchange 2, .* had one from exchange 3 before",
    ),
    "the sources' models once more": (
        lambda run: run.says("east", "measure", 2, run.content("east", "measure", 0)),
        "the trained model in this request is from exchange 1, .* had one from exchange 3 before",
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
        lambda run: run.says("east", "receive_and_adapt", 1, swap_sites(run)),
        "the model of 'south' .* that of 'north' from exchange 1",
    ),
    "a model of wrong shape from its source": (
        lambda run: run.says("east", "receive_and_adapt", 1, answer_given(run, FEW)),
        "the model that 'north' sealed for it: 'weights' holds a part of the network's tensors",
    ),
    "a model that looks otherwise than it is said to": (
        lambda run: run.says(
            "east", "receive_and_adapt", 1, answer_given(run, FEW, claims={"": Weights({"w": torch.zeros(3)})})
        ),
        "its tensors are not those that its box declares",
    ),
    "garbage from a source": (
        lambda run: run.says("east", "receive_and_adapt", 1, answer_given(run, FEW, plain=bytes(1000))),
        "the model that 'north' sealed for it: a message is damaged",
    ),
    "numbers that are none, from a source": (
        lambda run: run.says("east", "receive_and_adapt", 1, answer_given(run, nan_model(run))),
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


def swap_sites(shot: Stopped) -> dict[str, Any]:
    models = shot.content("east", "receive_and_adapt", 1)["models"]
    return {"models": dict(zip(reversed(models), models.values(), strict=True))}


def nan_model(shot: Stopped) -> Weights:
    zeros = parts_of(shot.content("east", "measure", 0)).boxes[0].stand_ins()[""]
    return Weights(
        {
            name: torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0)
            for name, tensor in zeros.items()
        }
    )


@pytest.mark.threat("kept_sealed")
@pytest.mark.parametrize("attack", ON_SHOT)
def test_shot_under_attack(attack: str, shot: Stopped) -> None:
    tried, message = ON_SHOT[attack]
    answer = tried(shot)
    assert re.search(message, answer), answer


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
        "the model of 'south' .* that of 'north'",
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
        "the model of 'south' in this request is from exchange 1, .* had one from exchange 2 before",
    ),
}


@pytest.mark.threat("kept_sealed")
@pytest.mark.parametrize("attack", ON_COPA)
def test_copa_under_attack(attack: str, copa: Stopped) -> None:
    tried, message = ON_COPA[attack]
    answer = tried(copa)
    assert re.search(message, answer), answer


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("wire", ["float32", "bf16"])
def test_a_part_of_the_start_is_known_up_to_the_rounding_of_its_own_size(scale: float, wire: Any) -> None:
    start = Weights({"head.weight": scale * torch.tensor([1.0, -0.7, 0.3]), "body.weight": torch.ones(2)})
    part = Weights({"weight": start["head.weight"].bfloat16().float() if wire == "bf16" else start["head.weight"]})
    other = Weights({"weight": start["head.weight"] + 0.1 * scale})
    assert _is_of(start, part, wire)
    assert not _is_of(start, other, wire)
