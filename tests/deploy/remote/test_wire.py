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
    Message,
    Wire,
    body_of,
    error_answer,
    narrow,
    seal,
    unseal,
    widen,
)
from fedshift.errors import FedshiftError
from fedshift.federation.messages import Content, Statistics, Update
from fedshift.federation.replies import checked_reply
from fedshift.weights import Weights

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
    message = valid(wire)
    header, content, crossed = unseal(message)
    assert header["envelope"] == {"exchange": 3, "progress": 0.25}
    assert content["samples"] == 31
    assert content["flag"] is True
    assert content["loss"] == float("inf")
    got = content["weights"]
    assert isinstance(got, Weights)
    got.check_like(weights(), "there and back")
    assert torch.equal(got["norm.num_batches_tracked"], torch.tensor(7))
    if wire == "float32":
        assert got == weights()
        assert crossed == content
    exact = content["statistics"]
    assert isinstance(exact, Statistics)
    assert torch.equal(exact["mean"], torch.arange(5.0))


@pytest.mark.parametrize(("wire", "share"), [("bf16", 0.5), ("int8", 0.25 + 1 / BLOCK)])
def test_bytes_are_what_the_format_says(wire: Wire, share: float) -> None:
    weights = Weights({"w": torch.randn(64 * BLOCK)})
    crossed, _ = narrow({"weights": weights}, wire)
    packed = crossed["weights"]
    assert isinstance(packed, Weights)
    assert packed.nbytes == share * weights.nbytes


@given(st.integers(0, 2**31), st.sampled_from([1e-6, 1.0, 1e4]), st.integers(1, 700))
@settings(max_examples=40, deadline=None)
def test_rounding_is_bounded(seed: int, scale: float, size: int) -> None:
    values = scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    for wire, bound in (("bf16", values.abs() / 256), ("int8", values.abs().max() / 254 * torch.ones(size))):
        content, manifest = narrow({"w": Weights({"t": values})}, wire)  # type: ignore[arg-type]
        back = widen(content, manifest)["w"]
        assert isinstance(back, Weights)
        assert bool(((back["t"] - values).abs() <= bound * (1 + 1e-5)).all())


def test_every_block_of_8_bit_integers_has_its_own_scale() -> None:
    """Small numbers beside large ones: each block is off by half a step of its own largest number, not of all."""
    sizes = torch.tensor([1e-3, 100.0, 1.0]).repeat_interleave(BLOCK)
    values = sizes * torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(5))
    content, manifest = narrow({"w": Weights({"t": values})}, "int8")
    back = widen(content, manifest)["w"]
    assert isinstance(back, Weights)
    for block_back, block in zip(back["t"].view(3, BLOCK), values.view(3, BLOCK), strict=True):
        assert (block_back - block).abs().max() <= block.abs().max() / 254 * (1 + 1e-5)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_error_feedback_lets_the_mean_of_messages_converge(wire: Wire) -> None:
    """The same numbers sent again and again: with feedback what rounding took comes later, without it never does."""
    value = Weights({"t": torch.linspace(-1, 1, 999) + 0.3337})

    def mean_error(feedback: bool) -> float:
        residuals: dict[str, torch.Tensor] | None = {} if feedback else None
        total = torch.zeros(999)
        for _ in range(64):
            content, manifest = narrow({"w": value}, wire, residuals)
            back = widen(content, manifest)["w"]
            assert isinstance(back, Weights)
            total += back["t"]
        return float((total / 64 - value["t"]).abs().max())

    assert mean_error(True) < mean_error(False) / 16


def test_zeros_and_infinities_survive() -> None:
    for wire in ("bf16", "int8"):
        content, manifest = narrow({"w": Weights({"t": torch.zeros(300)})}, wire)  # type: ignore[arg-type]
        back = widen(content, manifest)["w"]
        assert isinstance(back, Weights)
        assert torch.equal(back["t"], torch.zeros(300))


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
        Message(None, b"", ""),  # type: ignore[arg-type]
        Message("{}", "text", ""),  # type: ignore[arg-type]
        Message("{}", b"", 3),  # type: ignore[arg-type]
    ],
)
def test_other_types_are_no_messages(message: Message) -> None:
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


# What costs time to read ----------------------------------------------------------------------------------------------


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
        pytest.param(
            sealed_as("[" + "1," * 30_000_000 + "1]", b""),
            marks=pytest.mark.case("large headers", "a header of 60 MB, one list"),
            id="list of 60 MB",
        ),
        pytest.param(
            sealed_as('{"answers": "k", "a": "' + "x" * (1 << 20) + '"}', body_of({}).data),
            marks=pytest.mark.case("large headers", "an answer's header just above 1 MiB"),
            id="text above 1 MiB",
        ),
        pytest.param(
            sealed_as(
                '{"answers": "k"}', body_with_layout(b'{"__metadata__":{"message":"' + b"0," * 20_000_000 + b'"}}')
            ),
            marks=pytest.mark.case("large headers", "a body that describes no tensor in 40 MB"),
            id="layout of 40 MB",
        ),
        pytest.param(
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
            marks=pytest.mark.case("large headers", "200,000 empty tensors"),
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
def test_a_site_reads_no_description_of_any_length() -> None:
    message = sealed_as("{}", body_with_layout(b'{"__metadata__":{"message":"{}"},"a":[' + b"0," * 20_000_000 + b"0]}"))
    begun = time.process_time()
    with pytest.raises(FedshiftError):
        unseal(message)
    assert time.process_time() - begun < 0.2


@pytest.mark.case("large headers", "the error that answers a request whose header is too large")
def test_the_answer_to_a_large_request_does_not_read_it() -> None:
    request = sealed_as('{"key": "k", "a": [' + "1," * 20_000_000 + "1]}", b"")
    begun = time.process_time()
    header, _, _ = unseal(error_answer(request, FedshiftError("too large")))
    assert header["answers"] is None
    assert time.process_time() - begun < 0.3
