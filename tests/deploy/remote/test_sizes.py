"""Nothing takes memory or time before its size is compared with what is declared."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from fedshift.deploy.remote import wire
from fedshift.deploy.remote.wire import Body, Message, body_of, seal, unseal, widen
from fedshift.errors import FedshiftError
from fedshift.federation import messages
from fedshift.federation.messages import encode
from fedshift.weights import Weights

WEIGHTS = Weights({"a": torch.arange(600.0), "b": torch.ones(3, 2)})


def never(*_: Any, **__: Any) -> Any:
    pytest.fail("it was expanded before its size was checked")


def packed_message(change: Any, kind: wire.Wire = "int8") -> Message:
    """A message of rounded weights, whose arrays and manifest ``change`` has spoilt."""
    crossing, manifest = wire.narrow({"weights": WEIGHTS}, kind)
    arrays = dict(crossing["weights"].items())  # type: ignore[union-attr]
    manifest = change(arrays, manifest["weights"]) or manifest["weights"]
    data = encode({"weights": Weights(arrays)}, {"packed": {"weights": manifest}})
    return seal({}, Body(data, hashlib.sha256(data).hexdigest(), {}))


def test_weights_that_fit_are_read() -> None:
    for kind in ("int8", "bf16"):
        _, content, _ = unseal(packed_message(lambda arrays, parts: None, kind))
        torch.testing.assert_close(dict(content["weights"]), dict(WEIGHTS), rtol=0.02, atol=2.5)  # type: ignore


@pytest.mark.threat("expanding_message")
@pytest.mark.parametrize(
    "change",
    [
        lambda arrays, parts: arrays.update(int8=arrays["int8"][:1], scales=torch.ones(500_000)),
        lambda arrays, parts: arrays.update(scales=torch.ones(1)),
        lambda arrays, parts: arrays.update(scales=arrays["scales"].double()),
        lambda arrays, parts: arrays.update(int8=arrays["int8"].float()),
        lambda arrays, parts: arrays.update(int8=arrays["int8"][:, None]),
        lambda arrays, parts: [["a", "torch.float32", [10**9]]],
        lambda arrays, parts: [["a", "torch.float32", [-606]], *parts],
        lambda arrays, parts: [*parts, *[["empty", "torch.float32", [0]]] * 90_000],
        lambda arrays, parts: [["a", "torch.float32", [1] * 9]] * 606,
        lambda arrays, parts: [*parts, *[["more", "torch.float32", [1]]] * 200_000],
    ],
    ids=["scales", "one-scale", "double", "float", "2d", "large", "negative", "empty", "sizes", "parts"],
)
def test_rounded_weights_are_compared_before_they_are_widened(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    message = packed_message(change)
    monkeypatch.setattr(torch.nn.functional, "pad", never)
    monkeypatch.setattr(torch, "split", never)
    with pytest.raises(FedshiftError, match="packed weights"):
        unseal(message)


@pytest.mark.threat("expanding_message")
def test_a_message_of_too_many_tensors_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    many = Weights({str(number): torch.zeros(0) for number in range(1500)})
    message = seal({}, body_of({"weights": many}))
    assert unseal(message)[1]["weights"] == many
    monkeypatch.setattr(messages, "load_tensors", never)
    with pytest.raises(FedshiftError, match="damaged"):
        unseal(message, most_tensors=1000)
    monkeypatch.undo()
    crossing, manifest = wire.narrow({"weights": WEIGHTS}, "int8")
    assert widen(crossing, manifest, 2)["weights"]
    with pytest.raises(FedshiftError):
        widen(crossing, manifest, 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint32])
def test_numbers_of_other_types_do_not_travel(dtype: torch.dtype) -> None:
    with pytest.raises(FedshiftError, match="damaged"):
        unseal(seal({}, body_of({"weights": Weights({"a": torch.zeros(3).to(dtype)})})))


def test_a_mapping_inside_a_mapping_does_not_travel() -> None:
    with pytest.raises(FedshiftError, match="damaged"):
        unseal(seal({}, body_of({"models": {"a": {"b": WEIGHTS}}})))  # type: ignore[dict-item]


@pytest.mark.parametrize("where", ["value", "key", "header", "raw header"])
def test_text_that_is_not_unicode_is_refused(where: str) -> None:
    content: dict[str, Any] = {"loss": "\ud800"} if where == "value" else {"loss": {"\ud800": 1.0}}
    message = seal({"a": ["\ud800"]}, body_of({})) if "header" in where else seal({}, Body(b"", "", {}))
    if where in ("value", "key"):
        data = encode(content)
        message = seal({}, Body(data, hashlib.sha256(data).hexdigest(), {}))
    if where == "raw header":
        text = '{"a": "\ud800"}'
        body = body_of({})
        message = Message(text, body.data, wire._digest(text, body.sha256))
    with pytest.raises(FedshiftError):
        unseal(message)


def test_text_of_every_language_is_read() -> None:
    header, content, _ = unseal(seal({"a": "東京 🏥"}, body_of({"name": "東京 🏥"})))
    assert (header["a"], content["name"]) == ("東京 🏥", "東京 🏥")
