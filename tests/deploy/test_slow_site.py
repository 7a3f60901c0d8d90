"""A site that is much slower than the others, and replies that come faster than they are read."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loopback import Loopback, deploy, options_of
from outcomes import events
from site_yaml import UNSEEN, site_file, write_data

from fedshift.deploy.remote import incoming
from fedshift.deploy.remote.incoming import Grace, Held, Spool
from fedshift.deploy.remote.remote_federation import RemoteFederation
from fedshift.deploy.remote.transport import Lost, Sign
from fedshift.deploy.remote.wire import Message
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.weights import Weights

FOUR = {"north": 41, "south": 17, "east": 26, "far": 22}


class Threads(Loopback):
    """Each site answers in a thread of its own. The slow one is at work on one request until ``go`` is set.

    As over FLARE, a site fetches its next request when it has done the one before, and an answer that nobody waits for
    any more is dropped.
    """

    def __init__(self, places: Mapping[str, Path], slow: str = "far", from_round: int = 1, back: int = 10**6) -> None:
        super().__init__(places)
        self.slow, self.from_round, self.back = slow, from_round, back
        self.go = threading.Event()
        self.idle = {site: threading.Lock() for site in self.programs}
        self.clock = [0.0]
        self.turn = threading.Lock()
        self.late: list[str] = []

    def _let_come_back(self, number: int) -> None:
        if number >= self.back:
            self.go.set()
            with self.idle[self.slow]:
                pass  # it has done the request before

    def exchange(
        self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
    ) -> Generator[tuple[str, Message | Lost | Sign], None, None]:
        arrived: queue.Queue[tuple[str, Message | Sign]] = queue.Queue()
        over = threading.Event()
        whole = list(messages)
        number = max(json.loads(message.header).get("envelope", {}).get("round", 0) for _, message in whole)
        self._let_come_back(number)

        def work(site: str, message: Message) -> None:
            with self.idle[site]:
                if over.is_set():
                    return
                arrived.put((site, Sign.FETCHED))
                if site == self.slow and number >= self.from_round:
                    self.go.wait(20)
                with self.turn:  # a site watches all layers of its process
                    answer = self.programs[site].handle(message, "coordinator")
                if over.is_set():
                    self.late.append(site)
                arrived.put((site, answer))

        threads = [threading.Thread(target=work, args=arguments, daemon=True) for arguments in whole]
        for thread in threads:
            thread.start()
        waiting = {site for site, _ in whole}
        try:
            while waiting:
                if arrived.empty():
                    if number >= self.from_round and not self.go.is_set():
                        self.clock[0] += 1.0  # time passes while the slow one is at work
                    yield "", Sign.QUIET
                try:
                    site, what = arrived.get(timeout=0.02)
                except queue.Empty:
                    continue
                waiting -= set() if isinstance(what, Sign) else {site}
                yield site, what
        finally:
            over.set()


@pytest.fixture
def play_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[set[str]], Threads]]:
    return partial(play, tmp_path, monkeypatch)


def play(
    folder: Path, patch: pytest.MonkeyPatch, rounds: int, engine: dict[str, Any], **how: Any
) -> tuple[list[set[str]], Threads]:
    """Who was missing in each round, and the transport."""
    files = write_data(folder / "data", {**FOUR, **UNSEEN})
    transport = Threads({name: site_file(folder, name, files[name]) for name in FOUR}, **how)
    patch.setattr(incoming, "time", SimpleNamespace(monotonic=lambda: transport.clock[0]))
    options = options_of({"name": "fedavg"})
    options["training"] = {**options["training"], "rounds": rounds}
    runs, _ = deploy(folder, options, sites=FOUR, transport=transport, engine=engine)
    lines = (runs / "fedavg/west/seed-0/rounds.jsonl").read_text().splitlines()
    return [set(json.loads(line)["extra"].get("missing", {})) for line in lines], transport


def test_a_slow_site_is_waited_for_once_and_may_come_back(play_slow: Callable[..., Any], tmp_path: Path) -> None:
    engine = {"quorum": 3, "grace": 50, "deadline": 3600}
    missing, transport = play_slow(6, engine, from_round=2, back=5)
    assert missing == [set(), {"far"}, {"far"}, {"far"}, set(), set()]
    assert transport.late == ["far"], "its late answer came, and did no harm"
    lost = [event for event in events(tmp_path) if event.get("is") == "lost" and event["what"] == "fit"]
    assert [event["round"] for event in lost] == [2, 3, 4]


def test_the_grace_is_for_sites_that_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(incoming, "time", SimpleNamespace(monotonic=lambda: now))
    exchange = Grace(5.0, quorum=2, asked=5, lost={"busy", "back"})
    exchange.note_fetch("back")
    exchange.note_answer(usable=True)
    exchange.note_answer(usable=False)
    assert not exchange.over({"busy"}), "one usable answer is no quorum"
    exchange.note_answer(usable=True)
    exchange.note_fetch("busy")
    assert exchange.over({"busy"}), "it is at work on an older request"
    assert not exchange.over({"back"}), "it took its request as soon as it was there"
    assert not exchange.over({"busy", "slow"}), "it was not lost before"
    now = 105.0
    assert exchange.over({"busy", "slow"})


def test_nobody_is_left_out_who_answers_within_the_grace(play_slow: Callable[..., Any]) -> None:
    missing, _ = play_slow(1, {"quorum": 1, "grace": 50}, from_round=10**6)
    assert missing == [set()]


def test_a_grace_needs_a_quorum() -> None:
    whole = options_of({"name": "fedavg"}) | {"data": {"name": "sites"}, "engine": {"name": "flare", "grace": 1}}
    with pytest.raises(UserError, match=r"engine\.grace"):
        parse(whole)


def test_answers_that_wait_are_held_in_files_beyond_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies come in reverse: all but the first asked wait for it. Their bits are those of replies in order."""
    monkeypatch.setattr(incoming, "HELD_IN_MEMORY", 3000)
    spools: list[Spool] = []
    begin = Spool.__init__

    def note_spool(spool: Spool) -> None:
        begin(spool)
        spools.append(spool)

    monkeypatch.setattr(Spool, "__init__", note_spool)
    weights = []
    for order, backwards in (("forwards", False), ("backwards", True)):
        files = write_data(tmp_path / order / "data", {**FOUR, **UNSEEN})
        transport = Loopback({name: site_file(tmp_path / order, name, files[name]) for name in FOUR})
        transport.backwards = backwards
        spools.clear()
        options = options_of({"name": "fedavg"})
        options["training"] = {**options["training"], "rounds": 1}
        runs, _ = deploy(tmp_path / order, options, sites=FOUR, transport=transport)
        weights.append((runs / "fedavg/west/seed-0/model.safetensors").read_bytes())
        assert [spool._files for spool in spools] == [2 if backwards else 0]
        assert all(spool._bytes <= 3000 for spool in spools)
    assert weights[0] == weights[1]


def test_a_spool_forgets_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "HELD_IN_MEMORY", 100)
    with Spool() as spool:
        held = [spool.hold(Message("{}", bytes([number]) * 60, "")) for number in range(5)]
        files = [path for waiting in held if waiting is not None for path in waiting.paths]
        assert None not in held
        assert len(files) == 4
        assert [spool.take(waiting).body[0] for waiting in held if waiting] == [0, 1, 2, 3, 4]
        assert not any(file.exists() for file in files)
        again = spool.hold(Message("{}", b"x" * 60, ""))
        assert again == Held(Message("{}", b"x" * 60, "")), "there is room again"
    assert spool.hold(Message("{}", b"", "")) is None, "a late answer after the exchange is dropped"


def test_who_does_not_measure_is_lost_as_who_does_not_train() -> None:
    where = SimpleNamespace(
        round=1,
        grace=None,
        quorum=2,
        _lost={"c"},
        _with_model=lambda *_: ({}, {}),
        _arrivals=lambda *_: iter([("b", Lost("gone"))]),
        _record=lambda *_: None,
    )
    assert RemoteFederation.measure(cast(Any, where), Weights({}), ["a", "b"], ["a", "b"]) == {}
    assert where._lost == {"a", "b", "c"}
