"""`Federation.ask` and its replies, with an engine written down in the test: streaming, keeping, refusing, counting."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tiny import LINEAR, federation, training

from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.federation import exchange as federation_module
from fedshift.federation.exchange import Answer, Replies, Request
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Features, PerSite, Reply, Statistics, Update
from fedshift.federation.replies import About
from fedshift.federation.site import Site
from fedshift.methods.base import Method, State, trained_mean
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.models import registry as models
from fedshift.weights import Weights

SITES = ("a", "b", "c", "d")
ABOUT = About(
    models.build(models.parse(LINEAR), (5,), 3, 0), samples=100, input_shape=(5,), classes=3, training=training()
)


class Probe(Method):
    """A method of several small calls."""

    traits = Method.traits.derive(name="probe", memory_names=("diary",))

    def round(self, federation: Federation, state: State) -> State:
        return state

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return 0

    def fit(self, site: Site, weights: Weights) -> Update:
        return Update(weights, site.samples, 0.5)

    def look(self, site: Site, bank: Any = None, number: Any = None) -> Update:
        return Update(Weights({"seen": torch.tensor(float(number))}), min(len(bank), site.samples), float(number))

    def leak(self, site: Site) -> Update:
        return Leak(Weights({}), 0, 0.0, Features({"f": torch.ones(2)}))

    def wrong(self, site: Site) -> Any:
        return {"weights": 1}

    def tensor(self, site: Site) -> Any:
        return Wrong(torch.ones(2))


@dataclass(frozen=True)
class Leak(Update):
    crops: Features


@dataclass(frozen=True)
class Wrong(Reply):
    value: Any


class Fake(Federation):
    """An engine that runs a function in place of a call and notes what was asked."""

    def __init__(self, answer: Callable[[Request], Reply], method: Any = None, **options: Any) -> None:
        budget = dict.fromkeys(SITES, 10)
        known = dict.fromkeys(SITES, ABOUT)
        defaults = {"about": known, "sources": SITES, "targets": (), "budget": budget, "rounds": 3, "seed": 0}
        super().__init__(method or Probe(), **{**defaults, **options})
        self.answer = answer
        self.asked: list[str] = []

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any], None, None]:
        for request in requests:
            self.asked.append(request.site)
            yield Answer(request.site, self.answer(request), 2)


def numbered(request: Request) -> Update:
    value = float(SITES.index(request.site))
    return Update(Weights({"w": torch.full((3,), value)}), int(value) + 1, value / 4)


def asked(fake: Fake) -> Replies[Update]:
    return fake.ask(fake.method.fit, to=fake.sources, weights=Weights({"w": torch.zeros(3)}))  # type: ignore[attr-defined]


def values(replies: Replies[Update]) -> list[float]:
    return [float(update.weights["w"][0]) for update in replies]


def test_replies_stream_once() -> None:
    fake = Fake(numbered)
    replies = asked(fake)
    assert fake.asked == []  # a call runs when its reply is wanted
    passing = replies.items()
    assert next(passing)[0] == "a"
    assert fake.asked == ["a"]
    assert [site for site, _ in passing] == ["b", "c", "d"]
    with pytest.raises(FedshiftError, match=r"call \.keep\(\)"):
        list(replies)
    assert len(replies) == 4
    assert replies.numbers("samples") == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}


def test_numbers_take_in_what_was_not_gone_over() -> None:
    fake = Fake(numbered)
    replies = asked(fake)
    next(iter(replies))  # a pass that is broken off
    assert replies.numbers("loss") == {"a": 0.0, "b": 0.25, "c": 0.5, "d": 0.75}
    assert asked(fake).numbers("loss")["d"] == 0.75  # and without any pass


@pytest.mark.parametrize(("limit", "files"), [(1 << 20, 0), (2 * (12 + 16), 2), (0, 4)])
def test_kept_replies_spill_to_disk(monkeypatch: pytest.MonkeyPatch, limit: int, files: int) -> None:
    monkeypatch.setattr(federation_module, "KEPT_IN_MEMORY", limit)
    fake = Fake(numbered)
    replies = asked(fake).keep()
    for _ in range(3):
        found = list(replies.items())
        assert [site for site, _ in found] == list(SITES)
        for site, update in found:
            expected = numbered(Request(site, None, {}))  # type: ignore[arg-type]
            assert type(update) is Update
            assert (update.weights, update.samples, update.loss) == (expected.weights, expected.samples, expected.loss)
    assert fake.asked == list(SITES)
    kept: Any = replies._kept
    assert len(kept._files) == files
    if files:
        folder = kept._files[0][2].parent
        assert folder.is_dir()
        del replies, kept, fake
        gc.collect()
        assert not folder.exists()


def test_passes_over_kept_replies_may_be_broken_off_or_nested() -> None:
    replies = asked(Fake(numbered)).keep()
    next(iter(replies))
    assert values(replies) == [0, 1, 2, 3]
    nested = asked(Fake(numbered)).keep()
    assert [(values(nested), float(one.weights["w"][0])) for one in nested] == [
        ([0, 1, 2, 3], number) for number in range(4)
    ]
    begun = asked(Fake(numbered))
    next(iter(begun))
    with pytest.raises(FedshiftError, match="before the first pass"):
        begun.keep()


def test_replies_nobody_reads_are_still_trained_sent_and_counted() -> None:
    fake = Fake(numbered)
    first = asked(fake)
    assert fake.progress.used == dict.fromkeys(SITES, 0)
    second = asked(fake)  # the next exchange brings the one before it to its end
    assert fake.asked == list(SITES)
    assert fake.progress.used == dict.fromkeys(SITES, 2)
    fake.settle()
    assert fake.asked == [*SITES, *SITES]
    assert {entry.exchange for entry in fake.ledger.entries} == {1, 2}
    assert fake.ledger.total == {"down": {"weights": 96}, "up": {"weights": 96, "numbers": 128}}
    assert len(first) == len(second) == 4


def test_only() -> None:
    fake = Fake(numbered)
    weights = Weights({"w": torch.zeros(3)})
    assert fake.ask(fake.method.fit, to=["c"], weights=weights).only().samples == 3  # type: ignore[attr-defined]
    with pytest.raises(FedshiftError, match="4 sites were asked"):
        asked(fake).only()


def test_content_per_site() -> None:
    probe = Probe()
    where = federation(probe)
    bank = {"x": Statistics({"m": torch.ones(2)}), "y": 3}
    number = PerSite({site: float(index) for index, site in enumerate(where.sources)})
    replies = where.ask(probe.look, to=where.sources, bank=bank, number=number)
    assert [float(update.weights["seen"]) for update in replies] == [0.0, 1.0, 2.0]
    assert where.ledger.total["down"] == {"statistics": 3 * 8, "numbers": 3 * 16}
    lacking = where.ask(probe.look, to=where.sources, bank=bank, number=PerSite({where.sources[0]: 1.0}))
    with pytest.raises(FedshiftError, match=f"'number' .*'{where.sources[1]}'"):
        list(lacking)


def test_mistakes_of_a_method() -> None:
    probe = Probe()
    where = federation(probe)
    with pytest.raises(FedshiftError, match=r"'larg' .*'large'"):
        where.ask(probe.fit, to=["larg"], weights=Weights({}))
    calls: list[Any] = [Probe().fit, FedAvg().fit, Probe.fit, lambda site: None]
    for call in calls:
        with pytest.raises(FedshiftError, match="call of the method"):
            where.ask(call, to=where.sources)
    assert where.progress.exchange == 0
    with pytest.raises(FedshiftError, match=r"wrong .*not a Reply"):
        where.ask(probe.wrong, to=["large"]).only()
    with pytest.raises(FedshiftError, match=r"'value' .*may not travel"):
        where.ask(probe.tensor, to=["large"]).only()
    with pytest.raises(FedshiftError, match=r"'weights' .*may not travel"):
        where.ask(probe.fit, to=["large"], weights=torch.ones(1)).only()  # type: ignore[arg-type]
    assert where.ledger.total["up"] == {}


def test_a_refused_kind_never_leaves() -> None:
    probe = Probe()
    where = federation(probe, refuse=["features"])
    with pytest.raises(UserError, match=r"'large' refuses .*features .*'crops' .*leak"):
        where.ask(probe.leak, to=["large"]).only()
    assert where.ledger.total["up"] == {}
    assert where.progress.used["large"] == 0


def test_a_method_that_shares_a_refused_kind_does_not_begin() -> None:
    with pytest.raises(UserError, match=r"refuses .*weights"):
        federation(Probe(), refuse=["weights", "features"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reply_that_is_not_finite_names_its_site(value: float) -> None:
    def answer(request: Request) -> Update:
        return Update(Weights({"w": torch.tensor([1.0, 3.0, value if request.site == "c" else 2.0])}), 1, 0.1)

    fake = Fake(answer)
    fake.round = 7
    with pytest.raises(TrainingDiverged, match=r"reply of site 'c' in round 7.*'w' holds NaN or infinite"):
        list(asked(fake))


def test_what_the_engine_tells_a_site() -> None:
    seen: list[Any] = []

    def answer(request: Request) -> Update:
        seen.append(request.envelope)
        return numbered(request)

    told: list[tuple[str, int]] = []
    fake = Fake(
        answer, budget={"a": 4, "b": 8, "c": 2, "d": 0}, on_answer=lambda site, number: told.append((site, number))
    )
    assert [fake.share(site) for site in SITES] == [2, 3, 1, 0]
    for fake.round in (1, 2):
        asked(fake).drain()
    assert [(one.exchange, one.round, one.progress, one.mini_batches_left) for one in seen] == [
        (1, 1, 0.0, 4), (1, 1, 0.0, 8), (1, 1, 0.0, 2), (1, 1, 0.0, 0),
        (2, 2, 0.5, 2), (2, 2, 0.25, 6), (2, 2, 1.0, 0), (2, 2, 0.0, -2),
    ]  # fmt: skip
    assert told == [(site, 2) for site in SITES] * 2
    assert not fake.is_exhausted()
    asked(fake).drain()
    asked(fake).drain()
    assert fake.is_exhausted()


def test_the_mean_of_fifty_models_holds_few_of_them() -> None:
    """1 MB a model: the server may hold the sum, the reply at hand and the next one, whatever the number of sites."""
    names = tuple(f"site-{number}" for number in range(50))
    alive: list[weakref.ref[Update]] = []
    most = 0

    def answer(request: Request) -> Update:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        update = Update(Weights({"w": torch.full((250_000,), len(alive) / 10)}), 1 + len(alive) % 3, 0.1)
        alive.append(weakref.ref(update))
        return update

    fake = Fake(answer, sources=names, budget=dict.fromkeys(names, 10), about=dict.fromkeys(names, ABOUT))
    sent = Weights({"w": torch.ones(250_000)})
    weights, shares, losses = trained_mean(fake.ask(fake.method.fit, to=names, weights=sent))  # type: ignore[attr-defined]
    assert most <= 2
    assert len(shares) == len(losses) == 50
    counts = np.array([1 + number % 3 for number in range(50)])
    assert float(weights["w"][0]) == pytest.approx((np.arange(50) * counts).sum() / counts.sum() / 10, rel=1e-6)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-12)
