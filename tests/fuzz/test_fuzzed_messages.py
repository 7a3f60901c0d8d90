"""Anything in place of a message's plain values: each model takes it whole, or refuses it in one line."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from asked import CARD
from asked import SETTING as TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from fedshift.deploy.crypto.masked_sums import KeyAnswer
from fedshift.deploy.remote.requests import KINDS as REQUESTS
from fedshift.deploy.remote.requests import (
    CallAnswer,
    CallRequest,
    EndRequest,
    EstimateRequest,
    Hello,
    InputsAnswer,
    InputsRequest,
    KeyRequest,
    MaskRequest,
    MeasureAnswer,
    MeasureRequest,
    PredictRequest,
    ReadingAnswer,
    ReadingRequest,
    UnmaskRequest,
)  # fmt: skip
from fedshift.deploy.remote.transport import SiteError
from fedshift.deploy.site_cards import HelloAnswer
from fedshift.errors import FedshiftError
from fedshift.evaluation.estimate.estimators import ESTIMATORS
from fedshift.federation.local.commands import CallCommand
from fedshift.federation.plain_values import parse_json
from fedshift.federation.setting_json import SettingRecipe

SETTING: dict[str, Any] = {**TINY, "draws": {"north": {"noise_multiplier": 1.5, "stream": ""}}}
SPLIT = {"test_fraction": 0.3, "split": "auto"}
PART = {"role": "source", "number": 0, "whole": False, "fingerprint": "f", "split": {**SPLIT, "seed": 0}}
WORK = {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 5}
KEY = ["AAAA", "AAAA", ""]
SUM = {"threshold": 2, "weighing": ["samples", 8, 3], "cards": {"north": KEY}, "envelopes": {"north": WORK}}
RUN = {"run": "r", "setting": SETTING, "part": PART, "kept": {"optimizer": "o"}, "checkpoint": 0, "wire": "float32"}
ORDER = {"exchange": 1, "call": "fit", "content": "00", "keys": {"north": "AAAA"}, "threshold": 2}
METHODS = [SETTING["method"]]
HELLO = {"version": "1", "methods": METHODS, "split": SPLIT, "seeds": [0], "on_refusal": "stop", "network": None}
LAYOUT = [["loss"], [["weights", "weights", "w", "torch.float32", [2, 3]]]]
INPUTS = {"samples": 2, "total": [1.0, -3.0], "squares": [1.0, 5.0]}
SHARES = dict.fromkeys(("unexplained", "far", "predicted", "frequencies", "peak"), 0.5)
READING = {"parts": dict.fromkeys(ESTIMATORS, 0.5), **SHARES}
LOOK = {
    "reading": READING,
    "nearby": [0.5] * 8,
    "sure": [0.5, 0.5],
    "binned": 0.5,
    "spread": -0.1,
    "accuracy": 0.5,
    "samples": 4,
    "moved": False,
}
MEASURES = {"accuracy": 50.0, "samples": 4, "classes": [[1, 2], None]}
WHOLE: dict[type[BaseModel], dict[str, Any]] = {
    HelloAnswer: {"card": CARD, "time": 1e9},
    KeyAnswer: {"card": KEY},
    CallAnswer: {"answers": "k", "mini_batches": 3, "memory": {"optimizer": "o"}, "layout": LAYOUT},
    MeasureAnswer: {"measures": MEASURES},
    SiteError: {"error": "Refused", "message": "site 'north' refuses"},
    SettingRecipe: SETTING,
    Hello: {"do": "hello", "run": "e", **HELLO},
    KeyRequest: {"do": "key", "run": "r"},
    CallRequest: {"do": "call", "call": "fit", "envelope": WORK, "sum": SUM, "seal": {"for": {"south": KEY}}, **RUN},
    MeasureRequest: {
        "do": "measure",
        "round": 2,
        "whole": {"part": "target", "threshold": 0.5, "inputs": INPUTS},
        **RUN,
    },
    InputsRequest: {"do": "inputs", "run": "r", "preprocessing": {"kind": "features"}},
    InputsAnswer: {"inputs": INPUTS},
    ReadingAnswer: {"reading": READING, "looked": {"looks": [LOOK], "moved": -1.5}},
    PredictRequest: {"do": "predict", "round": 2, "metadata": {"classes": ["a"]}, **RUN},
    UnmaskRequest: {"do": "unmask", "run": "r", "round": 1, "order": ORDER, "answered": ["north"]},
    MaskRequest: {
        "do": "mask",
        "run": "s",
        "step": 1,
        "scores": {"north": "r"},
        "cards": {"north": KEY},
        "threshold": 2,
    },
    EndRequest: {"do": "end", "run": "r", "estimates_follow": True},
    EstimateRequest: {
        "do": "estimate",
        "run": "r",
        "known": {},
        "preprocessing": {"kind": "features"},
        "inputs": INPUTS,
    },
    CallCommand: {"do": "call", "site": "north", "call": "fit", "envelope": WORK},
}
"""A message of each kind that is as it should be."""
CLOSED: dict[type[BaseModel], tuple[str, ...]] = {
    HelloAnswer: ("card",),
    CallRequest: ("envelope",),
    MeasureRequest: ("whole",),
}
"""Where a field that nobody knows is refused: it could change what the others mean. Elsewhere it is ignored."""

NAMES = st.text(string.printable, max_size=5)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(string.printable, max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
KINDS = sorted(WHOLE, key=lambda kind: kind.__name__)


def outcome(kind: type[BaseModel], text: str | bytes) -> BaseModel | None:
    """The message, or None where it is refused, in one line."""
    said = ""
    try:
        found = parse_json(kind, text, "a message")
    except FedshiftError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        assert len(said) < 600
        return None
    assert parse_json(kind, found.model_dump_json(by_alias=True, exclude_unset=True), "it again") == found
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_read_and_written(kind: type[BaseModel]) -> None:
    found = outcome(kind, json.dumps(WHOLE[kind]))
    assert found is not None
    assert json.loads(found.model_dump_json(by_alias=True, exclude_unset=True)) == WHOLE[kind]
    with pytest.raises(Exception, match="frozen"):
        setattr(found, next(iter(type(found).model_fields)), None)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KINDS), st.binary(max_size=60) | st.text(max_size=60))
def test_any_bytes(kind: type[BaseModel], text: str | bytes) -> None:
    outcome(kind, text)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), plain, st.data())
def test_anything_in_place_of_a_field(kind: type[BaseModel], value: Any, data: st.DataObject) -> None:
    whole = json.loads(json.dumps(WHOLE[kind]))
    inside = whole
    while True:
        name = data.draw(st.sampled_from(sorted(inside)))
        if not isinstance(inside[name], dict) or not inside[name] or data.draw(st.booleans()):
            break
        inside = inside[name]
    inside[name] = value
    outcome(kind, json.dumps(whole))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_in_a_section_that_another_class_parses(number: str) -> None:
    text = json.dumps({**SETTING, "training": {"lr": "?", "deep": [{"er": ["?"]}]}})
    for whole in (text.replace('"?"', number, 1), text[::-1].replace('"?"', number[::-1], 1)[::-1]):
        assert outcome(SettingRecipe, whole.replace('"?"', "1")) is None
    assert outcome(SettingRecipe, text.replace('"?"', "1")) is not None


@pytest.mark.parametrize(
    "inputs",
    [
        {**INPUTS, "samples": 0},
        {**INPUTS, "squares": [1.0, 4.0]},  # of two samples whose sum is -3, at least 4.5
        {**INPUTS, "squares": [1.0]},
        {**INPUTS, "squares": [-1.0, 5.0]},
        {**INPUTS, "total": [1e120, 0.0]},
        {"samples": 1, "total": [], "squares": []},
        {"samples": 1, "total": [0.0] * 12_289, "squares": [0.0] * 12_289},
    ],
)
def test_sums_of_inputs_that_no_samples_have_are_refused(inputs: dict[str, Any]) -> None:
    assert outcome(InputsAnswer, json.dumps({"inputs": inputs})) is None


@pytest.mark.parametrize(
    "changes", [{"accuracy": 1.5}, {"spread": 1e9}, {"nearby": [0.5] * 7}, {"samples": 0}, {"reading": SHARES}]
)
def test_looks_that_no_samples_give_are_refused(changes: dict[str, Any]) -> None:
    looked = {"looks": [{**LOOK, **changes}], "moved": 0.0}
    assert outcome(ReadingAnswer, json.dumps({"reading": READING, "looked": looked})) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_nobody_knows(kind: type[BaseModel]) -> None:
    found = parse_json(kind, json.dumps({**WHOLE[kind], "of a later version": 1}), "a message")
    assert found == parse_json(kind, json.dumps(WHOLE[kind]), "a message")
    for name in CLOSED.get(kind, ()):
        with pytest.raises(FedshiftError, match=f"{name}.*there is no such field"):
            parse_json(kind, json.dumps({**WHOLE[kind], name: {**WHOLE[kind][name], "more": 1}}), "a message")


def test_every_request_is_tried() -> None:
    assert set(REQUESTS.values()) <= {*WHOLE, ReadingRequest}  # whose sums `test_fourth_site.py` changes


@pytest.mark.parametrize("name", ["sum", "seal"])
def test_a_sum_of_nothing_is_no_request_for_a_model(name: str) -> None:
    """Else a site that is asked to mask would send its model alone."""
    assert outcome(CallRequest, json.dumps({**WHOLE[CallRequest], name: None})) is None


@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "r.json", "r.secret", "x" * 202, "\x00"])
def test_no_run_is_named_out_of_its_folder(name: str) -> None:
    for kind in {*REQUESTS.values()} - {Hello, ReadingRequest}:
        assert outcome(kind, json.dumps({**WHOLE[kind], "run": name})) is None
