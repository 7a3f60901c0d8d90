"""Anything in place of a message's plain values: each model takes it whole, or refuses it in one line."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from fedshift.deploy.crypto.orders import KeyAnswer
from fedshift.deploy.site_cards import HelloAnswer
from fedshift.errors import FedshiftError
from fedshift.federation.plain_values import parsed

CARD: dict[str, Any] = {
    "versions": {"torch": "2"},
    "shape": [2],
    "type": "float32",
    "preprocessing": {"kind": "features"},
    "classes": ["a", "b"],
    "samples": 4,
    "rows": {"0": [3, 1]},
    "given": None,
    "grouped": False,
    "fingerprint": "f",
    "send": ["weights"],
    "device": "cpu",
    "threads": 1,
}
WHOLE: dict[type[BaseModel], dict[str, Any]] = {
    HelloAnswer: {"card": CARD, "time": 1e9},
    KeyAnswer: {"card": ["AAAA", "AAAA", ""]},
}
"""A message of each kind that is as it should be."""
CLOSED: dict[type[BaseModel], tuple[str, ...]] = {HelloAnswer: ("card",)}
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
        found = parsed(kind, text, "a message")
    except FedshiftError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        assert len(said) < 600
        return None
    assert parsed(kind, found.model_dump_json(), "it again") == found
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_read_and_written(kind: type[BaseModel]) -> None:
    found = outcome(kind, json.dumps(WHOLE[kind]))
    assert found is not None
    assert json.loads(found.model_dump_json(exclude_unset=True)) == WHOLE[kind]
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_nobody_knows(kind: type[BaseModel]) -> None:
    found = parsed(kind, json.dumps({**WHOLE[kind], "of a later version": 1}), "a message")
    assert found == parsed(kind, json.dumps(WHOLE[kind]), "a message")
    for name in CLOSED.get(kind, ()):
        with pytest.raises(FedshiftError, match=f"{name}.*there is no such field"):
            parsed(kind, json.dumps({**WHOLE[kind], name: {**WHOLE[kind][name], "more": 1}}), "a message")
