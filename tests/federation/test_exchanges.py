"""An exchange in which sites are missing: who may go on, what it costs them, and what held-out samples look like."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from test_asking import Fake, Probe, asked, numbered
from tiny import images, setting

from fedshift.errors import FedshiftError, KindRefused, TrainingDiverged
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.messages import PerSite, Update
from fedshift.federation.site_runner import SitePlan, SiteRunner
from fedshift.weights import Weights

BUDGET = {"a": 10, "b": 40, "c": 7, "d": 5}
WORK = {"a": 2, "b": 6, "c": 1, "d": 1}


class Lossy(Fake):
    """An engine in which some sites do not answer, for a reason each."""

    def __init__(self, missing: Mapping[str, TrainingDiverged | KindRefused], round_: int = 0, **options: Any) -> None:
        super().__init__(numbered, **{"budget": BUDGET, **options})
        self.gone, self.round = missing, round_

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Any, None, None]:
        for request in requests:
            if request.site in self.gone:
                yield Missing(request.site, self.gone[request.site])
            else:
                yield Answer(request.site, numbered(request), WORK[request.site])


def fault(site: str) -> TrainingDiverged:
    return TrainingDiverged(f"{site} fell over")


def refusal(site: str) -> KindRefused:
    return KindRefused(f"{site} refuses")


@pytest.mark.parametrize(
    ("gone", "quorum", "goes_on"),
    [
        ("", None, True),
        ("a", None, False),
        ("a", 4, False),  # 3 of 4 answer
        ("a", 3, True),
        ("ab", 3, False),
        ("ab", 2, True),
        ("abc", 2, False),
        ("abc", 1, True),
        ("abcd", 1, False),
    ],
)
def test_how_many_must_answer(gone: str, quorum: int | None, goes_on: bool) -> None:
    where = Lossy({site: fault(site) for site in gone}, quorum=quorum)
    if not goes_on:
        with pytest.raises(TrainingDiverged):
            asked(where).drain()
        return
    replies = asked(where)
    replies.drain()
    assert replies.sites == tuple(site for site in "abcd" if site not in gone)
    assert set(where.missing) == set(gone)
    assert not where.refused


def test_a_quorum_above_those_asked_is_all_of_them() -> None:
    """Two of the sites are asked, the quorum is three: both must answer."""
    where = Lossy({}, quorum=3)
    call, weights = where.method.fit, Weights({"w": torch.zeros(3)})  # type: ignore[attr-defined]
    assert len(list(where.ask(call, to=("a", "b"), weights=weights))) == 2
    where.gone = {"a": fault("a")}
    with pytest.raises(TrainingDiverged):
        where.ask(call, to=("a", "b"), weights=weights).drain()


def test_a_refusal_is_another_thing_than_a_fault() -> None:
    for on_refusal in ("stop", "leave_out"):  # which says who may take part; no answer ends a run that a quorum carries
        where = Lossy({"a": refusal("a"), "b": fault("b")}, quorum=2, on_refusal=on_refusal)
        for _ in range(2):
            asked(where).drain()
        assert set(where.missing) == {"b"}
        assert where.refused == {"a": ["a refuses"]}  # once, however often
    with pytest.raises(KindRefused):  # and without a quorum nobody may be left out
        asked(Lossy({"a": refusal("a")}, on_refusal="leave_out")).drain()


def test_an_absent_site_loses_the_mean_share_of_the_others() -> None:
    """a did 2 of 10, c 1 of 7, d 1 of 5: their mean share of b's 40 is 40 · (0.2 + 1/7 + 0.2)/3 = 7.24, rounded up."""
    told: list[tuple[str, int]] = []
    where = Lossy({"b": fault("b")}, quorum=1, on_answer=lambda site, number: told.append((site, number)))
    asked(where).drain()
    assert where.progress.used == {"a": 2, "b": 8, "c": 1, "d": 1}
    assert sorted(told) == [("a", 2), ("b", 8), ("c", 1), ("d", 1)]
    assert not where.is_exhausted()
    for _ in range(4):
        asked(where).drain()
    assert where.progress.used == {"a": 10, "b": 40, "c": 5, "d": 5}  # no more than it had
    assert not where.is_exhausted()  # c has 2 left
    asked(where).drain()
    asked(where).drain()
    assert where.progress.used["b"] == 40
    assert where.is_exhausted()


def test_only_drawn_sources_are_asked_and_the_others_are_charged() -> None:
    """In the exchanges of a round the same ones, in their order; before the first round all."""
    where = Lossy({}, per_round=2)
    asked(where).drain()
    assert where.progress.used == WORK
    drawn = set()
    for where.round in (1, 1, 2, 3, 4):
        used = dict(where.progress.used)
        where.ledger.settle()
        replies = asked(where)
        replies.drain()
        assert replies.sites == where.drawn == tuple(site for site in BUDGET if site in where.drawn)
        assert {entry.site for entry in where.ledger.entries} == set(where.drawn)
        share = sum(WORK[site] / BUDGET[site] for site in where.drawn) / 2
        for site, budget in BUDGET.items():
            spent = where.progress.used[site] - used[site]
            due = WORK[site] if site in where.drawn else round(share * budget)
            assert spent == min(due, budget - used[site]) or site in where.drawn
        drawn.add(where.drawn)
    assert len(drawn) > 1
    assert where.missing == {}
    assert drawn == {Lossy({}, per_round=2, round_=number).drawn for number in (1, 2, 3, 4)}
    assert drawn != {Lossy({}, per_round=2, seed=1, round_=number).drawn for number in (1, 2, 3, 4)}


def in_turn(where: Lossy, order: str = "badc") -> list[tuple[str, float]]:
    """Each site with the number that it was sent, which grows by 1 at each that answers."""
    seen: list[tuple[str, float]] = []
    deliver = where.deliver

    def looked_at(call: str, requests: Iterator[Request]) -> Generator[Any, None, None]:
        for request in requests:
            seen.append((request.site, float(request.content["number"])))  # type: ignore[arg-type]
            yield from deliver(call, iter([request]))

    where.deliver = looked_at  # type: ignore[method-assign]
    numbers = iter(range(1, 9))

    def then(site: str, reply: Update) -> dict[str, Any]:
        assert site == seen[-1][0]
        return {"bank": Weights({}), "number": float(next(numbers))}

    where.ask_in_turn(where.method.look, to=tuple(order), then=then, bank=Weights({}), number=0.0)  # type: ignore[attr-defined]
    where.deliver = deliver  # type: ignore[method-assign]
    return seen


def test_sites_in_turn_are_sent_what_the_reply_before_led_to() -> None:
    where = Lossy({})
    assert in_turn(where) == [("b", 0.0), ("a", 1.0), ("d", 2.0), ("c", 3.0)]
    assert where.progress.used == WORK
    assert where.progress.exchange == 4


@pytest.mark.parametrize(("gone", "quorum"), [("a", 3), ("ab", 2), ("abc", 1)])
def test_of_sites_in_turn_as_many_may_be_missing_as_of_those_asked_together(gone: str, quorum: int) -> None:
    lost = {site: fault(site) for site in gone}
    for more in (1, None):
        with pytest.raises(TrainingDiverged):
            in_turn(Lossy(lost, quorum=None if more is None else quorum + more))
    where = Lossy(lost, quorum=quorum)
    passed = {"a": [0.0, 1.0, 1.0, 2.0], "ab": [0.0, 0.0, 0.0, 1.0], "abc": [0.0, 0.0, 0.0, 1.0]}[gone]
    assert [number for _, number in in_turn(where)] == passed
    assert set(where.missing) == set(gone)
    others = [WORK[site] / BUDGET[site] for site in BUDGET if site not in gone]
    due = {site: math.ceil(round(BUDGET[site] * sum(others) / len(others), 9)) for site in gone}
    assert {site: where.progress.used[site] for site in gone} == due  # as one who is missing from an exchange
    in_turn(where)
    assert {site: where.progress.used[site] for site in gone} == {site: 2 * number for site, number in due.items()}
    asked(where).drain()  # and a later exchange counts anew


def test_who_is_not_drawn_has_no_turn_and_is_charged() -> None:
    where = Lossy({}, per_round=2, round_=1)
    seen = in_turn(where)
    assert {site for site, _ in seen} == set(where.drawn)
    assert where.progress.exchange == 2
    share = sum(WORK[site] / BUDGET[site] for site in where.drawn) / 2
    absent = set(BUDGET) - set(where.drawn)
    assert {site: where.progress.used[site] for site in absent} == {
        site: round(share * BUDGET[site]) for site in absent
    }
    assert where.progress.undrawn == sum(where.progress.used[site] for site in absent)


def test_what_is_charged_to_those_not_drawn_is_not_counted_as_trained() -> None:
    where = Lossy({}, per_round=1, round_=1)
    asked(where).drain()
    (site,) = where.drawn
    assert sum(where.progress.used.values()) - where.progress.undrawn == WORK[site]


def test_a_budget_spreads_over_the_rounds() -> None:
    where = Lossy({})
    assert {site: where.share(site) for site in BUDGET} == {"a": 4, "b": 14, "c": 3, "d": 2}  # of 3 rounds, up


def test_content_that_differs_reaches_its_own_site() -> None:
    got: dict[str, float] = {}

    def answer(request: Request) -> Update:
        got[request.site] = float(request.content["number"])  # type: ignore[arg-type]
        return numbered(request)

    where = Fake(answer)
    own = PerSite({site: float(number) for number, site in enumerate("abcd")})
    where.ask(where.method.look, to=("b", "d", "a"), bank=Weights({}), number=own).drain()  # type: ignore[attr-defined]
    assert got == {"b": 1.0, "d": 3.0, "a": 0.0}
    down = {(entry.site, entry.direction) for entry in where.ledger.entries if entry.field == "number"}
    assert down == {("a", "down"), ("b", "down"), ("d", "down")}


def test_exchanges_are_numbered_and_one_that_was_left_is_brought_to_its_end() -> None:
    where = Lossy({})
    first = asked(where)
    next(first.items())
    second = asked(where)
    assert where.progress.exchange == 2
    assert where.progress.used == WORK  # all of the first, nothing of the second yet
    second.drain()
    assert where.progress.used == {site: 2 * number for site, number in WORK.items()}
    with pytest.raises(FedshiftError):
        list(second.items())


def test_held_out_samples_come_as_they_are_stored() -> None:
    """Training is augmented, what a model is measured on at its site is not."""
    domain = images("a", 12)
    rows = np.arange(12)
    whole = setting(Probe(), [domain], augmentation="ccst")
    plan = SitePlan("a", "source", [(domain, rows[:8], 0)], held_out=[(domain, rows[8:], 0)])
    site = SiteRunner(plan, whole).site
    plain = (torch.from_numpy(np.asarray(domain.inputs)).float() / 255 - 0.5) / 0.25
    (held_out,) = site.held_out_batches()
    torch.testing.assert_close(held_out.inputs, plain[8:])
    assert held_out.targets.tolist() == domain.labels[8:].tolist()
    assert site.held_out is not None
    assert site.held_out.augmentation.is_identity
    assert not site.data.augmentation.is_identity
