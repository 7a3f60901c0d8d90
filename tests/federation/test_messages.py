"""Messages: bit for bit there and back, nothing but typed content, damage is noticed; the ledger counts by formula."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import save
from tiny import NORMED, domains, setting
from torch import Tensor

from fedshift.errors import FedshiftError, UserError
from fedshift.federation.byte_ledger import Ledger
from fedshift.federation.message_files import read_message, write_message
from fedshift.federation.messages import (
    KINDS,
    Features,
    RawData,
    Reply,
    Spectra,
    Statistics,
    Update,
    decode,
    encode,
    pieces,
    reply_content,
    unshare,
)
from fedshift.federation.plain_values import Frozen
from fedshift.files import write_bytes
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import NamedTensors, Weights

NAMES = st.text(max_size=8)
AWKWARD = st.one_of(
    NAMES, st.sampled_from(["a/b", "a|b", "a", "b", "|", "/", "%2F", "a%7Cb", "__metadata__", "模型.β", ""])
)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(SHAPES)
    count = math.prod(shape)
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8]))
    if dtype.is_floating_point:
        width = 32 if dtype == torch.float32 else 64
        values = draw(st.lists(st.floats(width=width), min_size=count, max_size=count))
    else:
        low, high = (0, 255) if dtype == torch.uint8 else (-(2**63), 2**63 - 1)
        values = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
    return torch.tensor(values, dtype=dtype).reshape(shape)


NAMED = st.builds(
    lambda kind, found: kind(found),
    st.sampled_from(list(KINDS.values())),
    st.dictionaries(AWKWARD, tensors(), max_size=3),
)
NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=5))
CONTENT = st.one_of(NAMED, NUMBERS, st.dictionaries(AWKWARD, st.one_of(NAMED, NUMBERS), max_size=3))
MESSAGES = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), CONTENT, max_size=4)


def same(first: object, second: object) -> bool:
    """Equal to the bit: NaN equals itself, 1 is not True, 0.0 is not -0.0."""
    if isinstance(first, NamedTensors):
        return type(first) is type(second) and list(first) == list(second) and first.equal(second)  # type: ignore[arg-type]
    if isinstance(first, dict):
        return (
            isinstance(second, dict) and list(first) == list(second) and all(same(first[k], second[k]) for k in first)
        )
    return type(first) is type(second) and repr(first) == repr(second)


@given(MESSAGES, st.dictionaries(st.text(max_size=5), st.integers(), max_size=2))
@settings(deadline=None, max_examples=150)
def test_there_and_back(content: dict[str, object], header: dict[str, object]) -> None:
    found, heading = decode(encode(content, header))  # type: ignore[arg-type]
    assert same(found, content)
    assert heading == header
    assert same(decode(encode(found))[0], content)  # what was decoded can travel on


def test_separators_in_names_do_not_mix_tensors_up() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    content = {
        "bank": {"b": Statistics({"c|k": one}), "b|c": Statistics({"k": two}), "b/c": Statistics({"k": one + 1})}
    }
    assert same(decode(encode(content))[0], content)  # type: ignore[arg-type]


def test_shared_and_strided_memory() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    content = {
        "w": Weights({"all": base, "again": base, "turned": base.T, "row": base[1], "wide": torch.ones(1).expand(5)})
    }
    assert same(decode(encode(content))[0], content)  # type: ignore[arg-type]
    apart = unshare({"a": base, "b": base[1:]})
    assert apart["a"] is base
    assert apart["b"].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not decode(encode({"w": Weights({"p": parameter})}))[0]["w"]["p"].requires_grad  # type: ignore[index]


WHOLE = encode(
    {"weights": Weights({"w": torch.arange(6.0)}), "bank": {"a": Statistics({"m": torch.ones(2)})}, "n": 3},
    {"round": 1},
)


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
@settings(deadline=None, max_examples=300)
def test_a_damaged_byte_is_an_error_of_one_kind_or_only_changes_numbers(place: int, change: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[place] ^= change
    with contextlib.suppress(FedshiftError):
        decode(bytes(damaged))


@given(st.one_of(st.binary(max_size=40), st.integers(0, len(WHOLE) - 1).map(lambda end: WHOLE[:end])))
@settings(deadline=None, max_examples=100)
def test_foreign_or_truncated_bytes(data: bytes) -> None:
    with pytest.raises(FedshiftError, match="damaged or was not written by fedshift"):
        decode(data)


@pytest.mark.threat("no_message")
@pytest.mark.parametrize(
    "entry",
    [{"kind": "pickle", "keys": []}, {"kind": "weights", "keys": ["absent"]}, {"by_site": 3}, {}, [], {"float": "x"}],
)
def test_a_layout_that_makes_no_sense(entry: object) -> None:
    from safetensors.torch import save

    data = save({"a": torch.ones(1)}, {"content": json.dumps({"w": entry}), "header": "{}"})
    with pytest.raises(FedshiftError, match="damaged"):
        decode(data)


def test_what_may_not_travel() -> None:
    refused: list[object] = [
        torch.ones(2),
        None,
        [1.0],
        b"bytes",
        {"a": torch.ones(1)},
        object(),
        torch.nn.Linear(1, 1),
    ]
    for value in refused:
        with pytest.raises(FedshiftError, match="may not travel"):
            list(pieces({"thing": value}))
        with pytest.raises(FedshiftError, match="may not travel"):
            Ledger().record(1, "fit", "a", "up", {"thing": value})


def test_pieces_count_bytes_by_kind() -> None:
    content = {
        "weights": Weights({"w": torch.ones(5), "n": torch.tensor(3)}),
        "bank": {"a": Spectra({"s": torch.ones(2, 3).double()}), "b": 4},
        "crops": Features({"f": torch.ones(2, 2)}),
        "raw": RawData({"x": torch.ones(7, dtype=torch.uint8)}),
        "loss": 0.5, "samples": 3, "done": True, "name": "β",
    }  # fmt: skip
    assert list(pieces(content)) == [
        ("weights", "weights", 28), ("bank", "spectra", 48), ("bank", "numbers", 8), ("crops", "features", 16),
        ("raw", "raw_data", 7), ("loss", "numbers", 8), ("samples", "numbers", 8),
        ("done", "numbers", 8), ("name", "numbers", 2),
    ]  # fmt: skip


def test_ledger_of_a_model_with_batch_norm() -> None:
    """S(θ) = 4·(|θ| + |b|) + 8·n_i for 5-8-6-3 with BatchNorm, counted by hand."""
    network = setting(FedAvg(), domains(NORMED), NORMED).build_network()
    parameters = (5 * 8 + 8) + 2 * 8 + (8 * 6 + 6) + 2 * 6 + (6 * 3 + 3)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    size = 4 * (parameters + 2 * 8 + 2 * 6) + 8 * 2
    ledger = Ledger()
    update = Update(Weights(network.state_dict()), 10, 0.25)
    ledger.record(1, "fit", "a", "down", {"weights": update.weights})
    ledger.record(1, "fit", "a", "up", reply_content(update))
    ledger.record(1, "fit", "b", "up", reply_content(update))
    assert ledger.total == {"down": {"weights": size}, "up": {"weights": 2 * size, "numbers": 32}}
    sent = {"weights": size, "numbers": 16}
    assert ledger.by_site == {"a": {"up": sent, "down": {"weights": size}}, "b": {"up": sent, "down": {}}}
    page, totals = ledger.settle()
    assert totals == ledger.total
    assert [(entry.site, entry.direction, entry.field, entry.bytes) for entry in page[:3]] == [
        ("a", "down", "weights", size), ("a", "up", "weights", size), ("a", "up", "samples", 8),
    ]  # fmt: skip
    ledger.record(2, "fit", "a", "down", {"weights": update.weights})
    assert ledger.settle()[1] == {"up": {}, "down": {"weights": size}}
    assert ledger.total["down"]["weights"] == 2 * size
    assert ledger.by_site["a"]["down"] == {"weights": 2 * size}
    saved, later = json.loads(json.dumps(ledger.to_checkpoint())), Ledger()
    later.restore(saved["bytes"], saved["bytes_by_site"])
    assert (later.total, later.by_site) == (ledger.total, ledger.by_site), "a run goes on from its checkpoint"
    later.restore(saved["bytes"])
    later.record(3, "fit", "a", "down", {"weights": update.weights})
    assert later.total["down"]["weights"] == 3 * size
    assert later.by_site is None, "a checkpoint of before does not say what sites sent until then"


def test_several_pieces_of_one_field_and_kind_are_one_entry() -> None:
    ledger = Ledger()
    bank = {site: Statistics({"m": torch.ones(3)}) for site in "abc"}
    ledger.record(1, "share", "a", "down", {"bank": bank})
    assert [(entry.kind, entry.bytes) for entry in ledger.entries] == [("statistics", 36)]


def test_replies_name_their_content() -> None:
    @dataclass(frozen=True)
    class Styles(Reply):
        styles: Statistics
        count: int

    reply = Styles(Statistics({"m": torch.ones(1)}), 4)
    assert reply_content(reply) == {"styles": reply.styles, "count": 4}


def test_files_are_whole_or_not_there(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "deep" / "message.safetensors"
    write_message(file, {"n": 1}, {"round": 2})
    assert read_message(file) == ({"n": 1}, {"round": 2})
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # nothing is left of the side file
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match="damaged"):
        read_message(file)
    with pytest.raises(UserError, match="cannot read"):
        read_message(tmp_path / "absent")
    write_bytes(tmp_path / "file", b"x")
    with pytest.raises(UserError, match="cannot write"):
        write_bytes(tmp_path / "file" / "below", b"x")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_comes_back_as_that_number(value: float) -> None:
    """JSON has none of them; as a text it would be another kind of content."""
    content, _ = decode(encode({"loss": value, "by": {"a": value}}))
    by_site = content["by"]
    assert isinstance(by_site, dict)
    for found in (content["loss"], by_site["a"]):
        assert isinstance(found, float)
        assert found == value or (math.isnan(found) and math.isnan(value))


class Anything(Frozen):
    value: Any


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "around", [lambda x: x, lambda x: [1.0, [x]], lambda x: (1.0, (x,)), lambda x: {"a": {"b": x}}]
)
def test_no_value_of_any_type_is_infinite(number: float, around: Callable[[float], Any]) -> None:
    assert Anything(value=around(1.5)).value == around(1.5)
    with pytest.raises(ValidationError, match="value has a number that is not finite"):
        Anything(value=around(number))


def test_a_mapping_by_site_holds_none() -> None:
    def message(layout: dict[str, Any]) -> bytes:
        return save({"w": torch.zeros(1)}, {"message": json.dumps({"content": layout, "header": {}})})

    plain = {"by_site": {"a": {"float": 1.5}}}
    assert decode(message({"loss": plain}))[0] == {"loss": {"a": 1.5}}
    with pytest.raises(FedshiftError, match="damaged") as caught:
        decode(message({"loss": {"by_site": {"a": plain}}}))
    assert "inside another one" in str(caught.value.__cause__)
