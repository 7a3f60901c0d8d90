"""Requests to a site as a coordinator, or an attacker, can make them, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedshift.deploy.remote.requests import PROTOCOL, request_key
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.site_server import SiteProgram
from fedshift.federation.messages import Content
from fedshift.weights import Weights


def forge(request: Message, content: Mapping[str, Content] | None = None, **changes: Any) -> Message:
    """A request with other fields or other content, as a coordinator can make it: key and digest fit.

    A changed ``key`` stays. A change to None leaves the field out.
    """
    header, genuine, _ = unseal(request)
    body = body_of(genuine if content is None else content)
    header = {name: value for name, value in {**header, **changes}.items() if changes.get(name, 0) is not None}
    key = {} if "key" in changes else {"key": request_key(header, body.sha256)}
    return seal({**header, **key}, body)


def answer_to(program: SiteProgram, request: Message) -> dict[str, Any]:
    return unseal(program.handle(request, "an attacker"))[0]


SETTING: dict[str, Any] = {
    "method": {"name": "fedavg", "options": {}},
    "training": {},
    "network": {"name": "linear"},
    "preprocessing": {"kind": "features"},
    "input_shape": [5],
    "classes": 3,
    "sources": 3,
    "seed": 0,
    "refuse": [],
    "on_refusal": "stop",
}


CARD: dict[str, Any] = {
    "versions": {"torch": "2"}, "shape": [2], "type": "float32", "preprocessing": {"kind": "features"},
    "classes": ["a", "b"], "samples": 4, "rows": {"0": [3, 1]}, "given": None, "grouped": False, "fingerprint": "f",
    "send": ["weights"], "device": "cpu", "threads": 1,
}  # fmt: skip
"""What a site says of itself."""


def part_of(program: SiteProgram) -> dict[str, Any]:
    split = {"test_fraction": 0.3, "split": "auto", "seed": 0}
    return {"role": "source", "number": 0, "whole": False, "fingerprint": program.holding.fingerprint, "split": split}


def call_header(program: SiteProgram, **changes: Any) -> dict[str, Any]:
    return {
        "do": "call",
        "run": "r",
        "call": "fit",
        "envelope": {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 5},
        "memory": {},
        "kept": {},
        "checkpoint": 0,
        "wire": "float32",
        "setting": SETTING,
        "part": part_of(program),
        **changes,
    }


def full_answer(
    program: SiteProgram, weights: Weights, sender: str = "someone", **changes: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a site answers to a request for a call with something in it changed: the header, and the content."""
    header = {"protocol": PROTOCOL, **call_header(program, **changes)}
    body = body_of({"weights": weights})
    answer, content, _ = unseal(program.handle(seal({"key": request_key(header, body.sha256), **header}, body), sender))
    return answer, content


def request(program: SiteProgram, **changes: Any) -> dict[str, Any]:
    start = Weights({"classifier.weight": torch.zeros(3, 5), "classifier.bias": torch.zeros(3)})
    return full_answer(program, start, **changes)[0]
