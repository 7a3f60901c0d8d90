"""The method of `campaign.py`: FedAvg whose sites take their time, and can be told to misbehave.

Processes of the played federation import it by name. ``FEDSHIFT_CAMPAIGN`` names a folder; a file ``<site>.json`` there
says what a site does from its next call on: ``{"clock": seconds}`` moves its clock, ``{"lie": how}`` spoils the replies
that it sends, after all its own checks, as other software than ours could.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.site_server import SiteProgram
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.methods.base import State
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import Weights

COORDINATOR = "coordinator"
_handle = SiteProgram.handle
_time = time.time


class Played(FedAvg):
    """FedAvg that waits ``seconds`` in every call."""

    traits = FedAvg.traits.derive(name="campaign_site:Played")

    seconds: float = 0.0

    def round(self, federation: Federation, state: State) -> State:
        _obey(COORDINATOR)
        return super().round(federation, state)

    def fit(self, site: Site, weights: Weights) -> Update:
        _obey(site.name)
        time.sleep(self.seconds)
        return super().fit(site, weights)


def _obey(who: str) -> None:
    """Do what the file of this role asks for."""
    folder = os.environ.get("FEDSHIFT_CAMPAIGN")
    file = Path(folder) / f"{who}.json" if folder else None
    asked: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    shift = float(asked.get("clock", 0.0))
    time.time = (lambda: _time() + shift) if shift else _time
    lie = asked.get("lie")

    def handle(program: SiteProgram, message: Message, coordinator: str) -> Message:
        answer = _handle(program, message, coordinator)
        asked_for_a_call = json.loads(message.header).get("do") == "call"
        return LIES[lie](answer) if lie and asked_for_a_call else answer

    SiteProgram.handle = handle if lie else _handle  # type: ignore[method-assign, assignment]


# Lies -----------------------------------------------------------------------------------------------------------------


def _with_change(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Callable[[Message], Message]:
    """A message whose header or content is changed, with a digest that fits."""

    def lie(answer: Message) -> Message:
        header, content, _ = unseal(answer)
        content = dict(content)
        change(header, content)
        return seal(header, body_of(content))

    return lie


def _weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], Message]:
    def spoil(_: Mapping[str, Any], content: dict[str, Any]) -> None:
        content["weights"] = Weights({name: change(tensor) for name, tensor in content["weights"].items()})

    return _with_change(spoil)


def _field(name: str, value: Any) -> Callable[[Message], Message]:
    return _with_change(lambda _, content: content.update({name: value}))


def _with_flipped_bit(answer: Message) -> Message:
    body = bytearray(answer.body)
    body[len(body) // 2] ^= 0x40
    return replace(answer, body=bytes(body))


LIES: Mapping[str, Callable[[Message], Message]] = {
    "weights that are no numbers": _weights(lambda tensor: tensor * float("nan")),
    "weights of 3e38": _weights(lambda tensor: torch.full_like(tensor, 3e38)),
    "weights of another type": _weights(lambda tensor: tensor.to(torch.float8_e4m3fn)),
    "weights of another shape": _weights(lambda tensor: tensor.reshape(-1)[:-1]),
    "no weights": _with_change(lambda _, content: content.pop("weights")),
    "a million samples": _field("samples", 10**6),
    "a loss that is no number": _field("loss", float("nan")),
    "text for a number": _field("samples", "many"),
    "an answer to another request": _with_change(lambda header, _: header.update({"answers": "0" * 64})),
    "more work than there is": _with_change(lambda header, _: header.update({"mini_batches": 10**9})),
    "text that is not UTF-8": _with_change(lambda header, _: header.update({"memory": {"\ud800": "x"}})),
    "a changed byte": _with_flipped_bit,
    "half of a message": lambda answer: replace(answer, body=answer.body[: len(answer.body) // 2]),
    "a forged refusal": _with_change(
        lambda header, content: (header.update({"error": "Refused", "message": "\x1b[31mno"}), content.clear())  # type: ignore[func-returns-value, arg-type]
    ),
}
"""What a site sends in place of its reply to a call."""
