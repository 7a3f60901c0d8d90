"""Which process trains on which graphics card. No card is needed: cards are pretended, or torch and its driver are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import federation, run, start_of, step_on

from fedshift.errors import UserError, is_out_of_memory
from fedshift.federation.local import cards
from fedshift.federation.local.cards import PRETENDED, VISIBLE, Card, cards_of, dealt, environment, shares
from fedshift.federation.local.pool import WorkerPool
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.rounds import start_run


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> tuple[Card, ...]:
    """Eight cards with as much free memory."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setenv(PRETENDED, ",".join(["24"] * 8))
    return cards_of("all")


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments of the processes that are started."""
    given: list[dict[str, str]] = []
    begin = subprocess.Popen.__init__

    def noting(self: Any, *arguments: Any, **options: Any) -> None:
        given.append(dict(options.get("env") or os.environ))
        begin(self, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", noting)
    return given


def test_eight_processes_get_eight_cards(eight: tuple[Card, ...]) -> None:
    assert [card.entry for card in dealt(eight, 8)] == [str(number) for number in range(8)]
    assert [card.entry for card in dealt(eight, 3)] == ["0", "1", "2"]
    assert sorted(card.entry for card in dealt(eight, 16)) == sorted([str(number) for number in range(8)] * 2)


@pytest.mark.parametrize(
    ("free", "processes", "expected"),
    [
        ((8, 24, 16), 3, [1, 2, 1]),  # 24, 16, then 24 / 2 = 12 rather than 8
        ((8, 24, 16), 6, [1, 2, 1, 0, 2, 1]),  # of 8, 24 / 3 and 16 / 2, which are equal, the emptiest comes first
        ((80, 1), 4, [0, 0, 0, 0]),  # somebody else is on the second
        ((0, 0), 4, [0, 1, 0, 1]),
    ],
)
def test_free_memory_decides(free: tuple[int, ...], processes: int, expected: list[int]) -> None:
    here = [Card(str(number), f"cuda:{number}", "cuda", one, "") for number, one in enumerate(free)]
    assert [int(card.entry) for card in dealt(here, processes)] == expected


def test_parallel_runs_with_workers_divide_the_cards(eight: tuple[Card, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of three workers: a run sees three cards, and each of its workers one of these."""
    first, second = shares(eight, 2, 3)
    assert not {card.entry for card in first} & {card.entry for card in second}
    monkeypatch.setenv(VISIBLE, environment(second)[VISIBLE])  # as in the second run's process
    (own,) = shares(cards_of("all"), 1, 3)
    assert [card.entry for card in dealt(own, 3)] == [card.entry for card in second]
    assert shares((), 2, 3) == [(), ()]
    assert environment(()) == {}


def test_names_of_devices(eight: tuple[Card, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [card.entry for card in cards_of(("cuda:5", "cuda:2"))] == ["5", "2"]
    assert cards_of("cuda:1") == cards_of("auto") == ()
    with pytest.raises(UserError, match="cuda:8"):
        cards_of(("cuda:0", "cuda:8"))
    monkeypatch.delenv(PRETENDED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA card"):
        cards_of("all")


def test_torch_s_cards_by_their_identifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA puts the fastest card first, nvidia-smi goes by slots: the memory is that of the same identifier."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU-slow, 1000'\necho 'GPU-fast, 2000'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv(PRETENDED, raising=False)
    known = [SimpleNamespace(uuid=name, name=name, total_memory=1) for name in ("fast", "slow", "unknown")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(known))
    monkeypatch.setattr(torch.cuda, "get_device_properties", known.__getitem__)
    here = cards_of("all")
    assert [(card.entry, card.device, card.free) for card in here] == [
        ("GPU-fast", "cuda:0", 2000 << 20),
        ("GPU-slow", "cuda:1", 1000 << 20),
        ("GPU-unknown", "cuda:2", 1),
    ]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert [card.free for card in cards_of("all")] == [1, 1, 1]
    del known[1:]
    monkeypatch.setenv(VISIBLE, "MIG-1")
    assert [card.entry for card in cards_of("all")] == ["MIG-1"], "a part of a card has another identifier"


def test_signs_of_a_full_card() -> None:
    for text in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"):
        assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


@pytest.mark.slow
def test_eight_workers_see_eight_cards_and_give_the_same_bits(
    eight: tuple[Card, ...], environments: list[dict[str, str]]
) -> None:
    method = FedAvg()
    here, _ = run(method, rounds=1)
    pool = WorkerPool(8, 1, eight)
    try:
        where = federation(method, pool=pool, rounds=1)
        state = start_run(method, where, start_of(method))
        where.settle()
        assert step_on(method, where, state).weights == here.weights
    finally:
        pool.close()
    assert [one[VISIBLE] for one in environments] == [str(number) for number in range(8)]
    assert VISIBLE not in os.environ


def test_the_seam_is_what_it_says(eight: tuple[Card, ...]) -> None:
    assert {card.alone for card in eight} == {card.device for card in eight} == {"cpu"}
    assert {card.kind for card in eight} == {"pretended"}
    assert cards.kind_of(eight[0].device) == "cpu"
