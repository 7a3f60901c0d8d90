"""Messages as they cross a network: whole or refused, and what narrow numbers cost."""

from __future__ import annotations

import hashlib
import json
import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.deploy.remote.transport import Done, open_answer
from fedshift.deploy.remote.wire import (
    BLOCK,
    LARGEST_CARD,
    LARGEST_HEADER,
    Body,
    Message,
    Wire,
    _digest,
    body_of,
    error_answer,
    narrow,
    seal,
    unseal,
    widen,
)  # fmt: skip
from fedshift.errors import FedshiftError
from fedshift.federation import messages
from fedshift.federation.messages import Content, Statistics, Update, encode
from fedshift.federation.replies import checked_reply
from fedshift.weights import Weights
from tried import case

MUTATIONS = 10_000


def weights(scale: float = 1.0, seed: int = 0) -> Weights:
    draws = torch.Generator().manual_seed(seed)
    return Weights(
        {
            "conv.weight": scale * torch.randn(8, 3, 3, 3, generator=draws),
            "conv.bias": scale * torch.randn(8, generator=draws),
            "norm.running_var": torch.rand(8, generator=draws, dtype=torch.float64),
            "norm.num_batches_tracked": torch.tensor(7),
            "empty": torch.empty(0, 4),
        }
    )


def valid(wire: Wire) -> Message:
    content: dict[str, Content] = {
        "weights": weights(),
        "statistics": Statistics({"mean": torch.arange(5.0)}),
        "models": {"north": weights(seed=1), "so/uth": weights(seed=2)},
        "samples": 31,
        "loss": float("inf"),
        "name": "north",
        "flag": True,
    }
    header = {"do": "call", "run": "a", "envelope": {"exchange": 3, "progress": 0.25}, "memory": {}}
    return seal(header, body_of(content, wire))


@pytest.mark.parametrize("wire", ["float32", "bf16", "int8"])
def test_there_and_back(wire: Wire) -> None:
    header, content, crossed = unseal(valid(wire))
    assert header["envelope"] == {"exchange": 3, "progress": 0.25}
    assert (content["samples"], content["flag"], content["loss"]) == (31, True, float("inf"))
    got: Any = content["weights"]
    got.check_like(weights(), "there and back")
    assert torch.equal(got["norm.num_batches_tracked"], torch.tensor(7))
    assert wire != "float32" or (got, crossed) == (weights(), content)
    exact: Any = content["statistics"]
    assert torch.equal(exact["mean"], torch.arange(5.0))


@pytest.mark.parametrize(("wire", "share"), [("bf16", 0.5), ("int8", 0.25 + 1 / BLOCK)])
def test_bytes_are_what_the_format_says(wire: Wire, share: float) -> None:
    weights = Weights({"w": torch.randn(64 * BLOCK)})
    crossed, _ = narrow({"weights": weights}, wire)
    packed = crossed["weights"]
    assert packed.nbytes == share * weights.nbytes


@given(st.integers(0, 2**31), st.sampled_from([1e-6, 1.0, 1e4]), st.integers(1, 700))
@settings(max_examples=40, deadline=None)
def test_rounding_is_bounded(seed: int, scale: float, size: int) -> None:
    values = scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    for wire, bound in (("bf16", values.abs() / 256), ("int8", values.abs().max() / 254 * torch.ones(size))):
        assert bool(((there_and_back(values, wire) - values).abs() <= bound * (1 + 1e-5)).all())


def there_and_back(tensor: torch.Tensor, wire: Any, residuals: Any = None) -> torch.Tensor:
    back: Any = widen(*narrow({"w": Weights({"t": tensor})}, wire, residuals))["w"]
    return back["t"]


def test_every_block_of_8_bit_integers_has_its_own_scale() -> None:
    """Small numbers beside large ones: each block is off by half a step of its own largest number, not of all."""
    sizes = torch.tensor([1e-3, 100.0, 1.0]).repeat_interleave(BLOCK)
    values = sizes * torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(5))
    back = there_and_back(values, "int8")
    for block_back, block in zip(back.view(3, BLOCK), values.view(3, BLOCK), strict=True):
        assert (block_back - block).abs().max() <= block.abs().max() / 254 * (1 + 1e-5)
    for wire in ("bf16", "int8"):
        assert torch.equal(there_and_back(torch.zeros(300), wire), torch.zeros(300))


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_error_feedback_lets_the_mean_of_messages_converge(wire: Wire) -> None:
    """The same numbers sent again and again: with feedback what rounding took comes later, without it never does."""
    value = torch.linspace(-1, 1, 999) + 0.3337

    def mean_error(residuals: dict[str, torch.Tensor] | None) -> float:
        total = sum(there_and_back(value, wire, residuals) for _ in range(64))
        return float((total / 64 - value).abs().max())

    assert mean_error({}) < mean_error(None) / 16


def spoil(message: Message, draws: random.Random, *, sealed: bool) -> Message:
    """A message with something changed; ``sealed``: with a digest that fits, as a malicious peer would write it."""
    header, body = message.header, bytearray(message.body)
    kind = draws.randrange(6)
    if kind == 0:
        for _ in range(draws.randrange(1, 9)):
            body[draws.randrange(len(body))] = draws.randrange(256)
    elif kind == 1:
        del body[draws.randrange(len(body)) :]
    elif kind == 2:
        position = draws.randrange(len(body))
        body[position:position] = draws.randbytes(draws.randrange(1, 40))
    elif kind == 3:  # in the part that describes the rest
        length = int.from_bytes(body[:8], "little")
        for _ in range(draws.randrange(1, 4)):
            body[8 + draws.randrange(min(length, len(body) - 8))] = draws.choice(b'0123456789"{}[]:,-eEnull\\')
    elif kind == 4:
        letters = list(header)
        letters[draws.randrange(len(letters))] = draws.choice('0123456789"{}[]:,-eE\\ü\ud800')
        header = "".join(letters)
    else:
        position = draws.randrange(len(header))
        header = (
            header[:position] + draws.choice(["", "[" * 3000, "1e999", "NaN", "null", "{}"]) + header[position + 1 :]
        )
    if not sealed:
        return Message(header, bytes(body), message.digest)
    inner = hashlib.sha256(bytes(body)).hexdigest()
    return Message(header, bytes(body), hashlib.sha256(f"{inner}\n{header}".encode(errors="replace")).hexdigest())


@pytest.mark.slow
@pytest.mark.threat("no_message", "between_the_two")
def test_ten_thousand_mutations_are_refused_or_harmless() -> None:
    """No crash, and nothing but messages: with its digest left as it was every mutation is refused; with a digest that
    fits, what comes through is plain values and tensors, which the next check holds against the call's reply.
    """
    draws = random.Random(0)
    messages = [valid(wire) for wire in ("float32", "bf16", "int8")]
    whole = seal({"answers": "k"}, body_of({"weights": weights(), "samples": 3, "loss": 0.5}))
    refused = passed = 0
    for number in range(MUTATIONS):
        original = draws.choice([*messages, whole])
        sealed = number % 2 == 1
        message = spoil(original, draws, sealed=sealed)
        if message == original:
            continue
        try:
            header, content, _ = unseal(message)
            assert sealed, "a changed message passed with the old digest"
            assert isinstance(header, dict)
            checked_reply(Update, content)
            passed += 1
        except FedshiftError:
            refused += 1
    assert refused + passed > MUTATIONS * 0.99
    assert refused > MUTATIONS * 0.8


@pytest.mark.parametrize(
    "message",
    [
        Message("", b"", ""),
        Message(None, b"", ""),
        Message("{}", "text", ""),
        Message("{}", b"", 3),
        *(
            seal({}, body_of({"weights": Weights({"a": torch.zeros(3).to(dtype)})}))
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint32)
        ),
        seal({}, body_of({"models": {"a": {"b": Weights({"a": torch.ones(2)})}}})),
    ],
)
def test_other_types_are_no_messages(message: Message) -> None:
    """Of texts, of numbers and of what lies in a mapping."""
    with pytest.raises(FedshiftError):
        unseal(message)


@pytest.mark.threat("no_message")
def test_a_manifest_that_does_not_fit_is_refused() -> None:
    content, manifest = narrow({"w": weights()}, "int8")
    for change in (
        lambda entry: entry[0].__setitem__(2, [10**9]),
        lambda entry: entry[0].__setitem__(1, "torch.int64"),
        lambda entry: entry.pop(),
        lambda entry: entry.append(["more", "torch.float32", [5]]),
        lambda entry: entry[0].__setitem__(2, [-8, -27]),
    ):
        other: Any = json.loads(json.dumps(manifest))
        change(other["w"])
        with pytest.raises(FedshiftError, match="manifest"):
            widen(content, other)


def sealed_as(header: str, body: bytes) -> Message:
    """A message whose digest fits, as a malicious peer would write it."""
    inner = hashlib.sha256(body).hexdigest()
    return Message(header, body, hashlib.sha256(f"{inner}\n{header}".encode()).hexdigest())


def body_with_layout(layout: bytes) -> bytes:
    """A body that describes its tensors so, and has none."""
    return len(layout).to_bytes(8, "little") + layout


@pytest.mark.parametrize(
    "message",
    [
        case(
            "large headers",
            "a header of 60 MB, one list",
            sealed_as("[" + "1," * 30_000_000 + "1]", b""),
            id="list of 60 MB",
        ),
        case(
            "large headers",
            "an answer's header just above 1 MiB",
            sealed_as('{"answers": "k", "a": "' + "x" * (1 << 20) + '"}', body_of({}).data),
            id="text above 1 MiB",
        ),
        case(
            "large headers",
            "a body that describes no tensor in 40 MB",
            sealed_as(
                '{"answers": "k"}', body_with_layout(b'{"__metadata__":{"message":"' + b"0," * 20_000_000 + b'"}}')
            ),
            id="layout of 40 MB",
        ),
        case(
            "large headers",
            "200,000 empty tensors",
            sealed_as(
                '{"answers": "k"}',
                body_with_layout(
                    b'{"__metadata__":{"message":"{}"},'
                    + b",".join(
                        b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number for number in range(200_000)
                    )
                    + b"}"
                ),
            ),
            id="200,000 empty tensors",
        ),
    ],
)
def test_what_takes_long_to_read_is_not_read(message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of a site, as the coordinator opens it."""
    begun = time.process_time()
    with pytest.raises(FedshiftError):
        open_answer(Done, message, "k")
    assert time.process_time() - begun < 0.3


@pytest.mark.case("large headers", "an answer of just 1 MiB, a card of 60,000 columns: read")
def test_headers_that_honest_sites_need_are_read() -> None:
    header = {"answers": "k", "a": ""}
    header["a"] = "x" * (LARGEST_HEADER - len(json.dumps(header)))
    assert open_answer(Done, seal(header, body_of({})), "k").answer == Done()
    card = {"answers": "k", "card": {"numeric": [f"ENSG{n:011}" for n in range(60_000)], "total": [1 / 3] * 60_000}}
    assert open_answer(Done, seal(card, body_of({})), "k", largest_header=LARGEST_CARD).answer == Done()
    with pytest.raises(FedshiftError, match="characters"):
        open_answer(Done, seal(card, body_of({})), "k")


@pytest.mark.case("large headers", "a request whose body describes no tensor in 40 MB, at a site")
@pytest.mark.case("large headers", "the error that answers a request whose header is too large")
def test_a_site_reads_no_request_of_any_length() -> None:
    layout = b'{"__metadata__":{"message":"{}"},"a":[' + b"0," * 20_000_000 + b"0]}"
    described, large = sealed_as("{}", body_with_layout(layout)), '{"key": "k", "a": [' + "1," * 20_000_000 + "1]}"
    request = sealed_as(large, b"")
    begun = time.process_time()
    with pytest.raises(FedshiftError):
        unseal(described)
    header, _, _ = unseal(error_answer(request, FedshiftError("too large")))
    assert header["answers"] is None
    assert time.process_time() - begun < 0.4


WEIGHTS = Weights({"a": torch.arange(600.0), "b": torch.ones(3, 2)})


def never(*_: Any, **__: Any) -> Any:
    pytest.fail("it was expanded before its size was checked")


def packed_message(change: Any, kind: Wire = "int8") -> Message:
    """A message of rounded weights, whose arrays and manifest ``change`` has spoilt."""
    crossing, manifest = narrow({"weights": WEIGHTS}, kind)
    arrays = dict(crossing["weights"].items())
    manifest = change(arrays, manifest["weights"]) or manifest["weights"]
    data = encode({"weights": Weights(arrays)}, {"packed": {"weights": manifest}})
    return seal({}, Body(data, hashlib.sha256(data).hexdigest(), {}))


def test_weights_that_fit_are_read() -> None:
    for kind in ("int8", "bf16"):
        _, content, _ = unseal(packed_message(lambda arrays, parts: None, kind))
        torch.testing.assert_close(dict(content["weights"]), dict(WEIGHTS), rtol=0.02, atol=2.5)


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
    crossing, manifest = narrow({"weights": WEIGHTS}, "int8")
    assert widen(crossing, manifest, 2)["weights"]
    with pytest.raises(FedshiftError):
        widen(crossing, manifest, 1)


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
        message = Message(text, body.data, _digest(text, body.sha256))
    with pytest.raises(FedshiftError):
        unseal(message)


def test_text_of_every_language_is_read() -> None:
    header, content, _ = unseal(seal({"a": "東京 🏥"}, body_of({"name": "東京 🏥"})))
    assert (header["a"], content["name"]) == ("東京 🏥", "東京 🏥")
