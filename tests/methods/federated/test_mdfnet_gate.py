"""MDFNet: shares where a site is lost, the gate, momentum, equal work, and warnings of collapse."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lost import site_of
from tiny import MLP, domains, federation, start_of, step_on
from torch.nn import functional

import fedshift
from fedshift.data.domain import Domain
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.federation import Federation
from fedshift.federation.site import Envelope, Site
from fedshift.methods.base import Samples, State
from fedshift.methods.federated.mdfnet import LabelledUpdate, MDFNet, UnlabelledUpdate, _Halves

SIZES = {"north": 16, "south": 9}
PRACTICAL = {"setting": "practical"}


def practical(**options: Any) -> MDFNet:
    return MDFNet.model_validate({**PRACTICAL, **options})


def answers_of(where: Federation) -> dict[str, Any]:
    """Every reply by site, the last one of each, as it comes by."""
    seen: dict[str, Any] = {}
    original = where.deliver

    def watched(step: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        for answer in original(step, requests):
            if isinstance(answer, Answer):
                seen[answer.site] = answer.reply
            yield answer

    where.deliver = watched  # type: ignore[method-assign]
    return seen


def broken(found: list[Domain], name: str) -> list[Domain]:
    """``found`` with one site whose numbers are so large that its loss is no number."""
    huge = np.full((1, 5), 1e30, np.float32)
    return [replace(one, inputs=huge.repeat(len(one), 0)) if one.name == name else one for one in found]


def test_shares_are_of_those_that_answered() -> None:
    """L = 2 of which one is lost, U = 1, r = 0.5: η = 0.493307, so the model is 0.506693 of north, 0.493307 of target;
    by the number of all sites it would have been 0.339 and 0.661.
    """
    method = MDFNet()
    found = broken(domains(MLP, SIZES), "south")
    where = federation(method, found, MLP, rounds=5)
    where.quorum = 1
    seen = answers_of(where)
    state = replace(method.start(where, start_of(method, found, MLP)), round=2)
    after = step_on(method, where, state)
    shares = after.report["aggregation_weights"]
    assert shares == pytest.approx({"north": 0.506693, "target": 0.493307}, abs=1e-6)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-12)
    assert set(where.missing) == {"south"}
    for key, tensor in after.weights.items():
        by_hand = 0.506693 * seen["north"].weights[key].double() + 0.493307 * seen["target"].weights[key].double()
        torch.testing.assert_close(tensor.double(), by_hand, atol=1e-5, rtol=1e-5)


def gate(monkeypatch: pytest.MonkeyPatch, entropies: list[float]) -> None:
    """Labelled sites report these cross-entropies, one a round, and train as they would."""
    original, left = MDFNet.fit, list(entropies)

    def fit(self: MDFNet, site: Site, weights: Any, r: float, extra: int) -> LabelledUpdate:
        return replace(original(self, site, weights, r, extra), cross_entropy=left.pop(0))

    monkeypatch.setattr(MDFNet, "fit", fit)


def rounds_of(where: Federation, method: MDFNet, found: list[Domain], number: int) -> list[State]:
    state = method.start(where, start_of(method, found, MLP))
    states = []
    for _ in range(number):
        state = step_on(method, where, state)
        states.append(state)
    return states


def test_unlabelled_sites_wait_and_r_begins_when_the_gate_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """ln 3 / 4 = 0.2747. It falls below in round 2, so the unlabelled site comes in in round 3 of 7, with r = 0; later
    the gate does not shut again.
    """
    gate(monkeypatch, [0.9, 0.27, 0.9, 0.9, 0.9, 0.9, 0.9])
    method, found = practical(readiness=0.25, rho=10), domains(MLP, {"north": 16})
    where = federation(method, found, MLP, rounds=7, budget={"north": 14, "target": 14})
    seen = answers_of(where)
    states = rounds_of(where, method, found, 2)
    assert "target" not in seen
    assert [state.report["aggregation_weights"] for state in states] == [{"north": 1.0}] * 2
    assert states[0].weights != states[1].weights
    for state in states:
        assert state.report["named_classes"] == {}
    state, shares = states[-1], []
    assert state.numbers["opened"] == 2
    for _ in range(5):
        state = step_on(method, where, state)
        shares.append(state.report["aggregation_weights"]["target"])
    # η at r = 0, 1/4, 1/2, 3/4, 1.
    assert shares == pytest.approx([0, 0.424142, 0.493307, 0.499447, 0.499955], abs=1e-6)


def test_what_those_who_wait_would_have_trained_goes_to_the_labelled_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch is 2 mini-batches at each of three sites; two rounds of waiting move 2 · 2 from the target."""
    gate(monkeypatch, [0.9, 0.9, 0.1, 0.1] + [0.9] * 6)
    method, found = practical(readiness=0.25, lend=0), domains(MLP, {"north": 16, "south": 12})
    where = federation(method, found, MLP, rounds=5, budget=10)
    used = where.progress.used
    states = rounds_of(where, method, found, 2)
    assert used == {"north": 6, "south": 6, "target": 0}
    assert where.budget == {"north": 12, "south": 12, "target": 6}
    state = states[-1]
    for _ in range(3):
        assert not where.is_exhausted()
        state = step_on(method, where, state)
    assert where.is_exhausted()
    assert used == {"north": 12, "south": 12, "target": 6}
    assert sum(used.values()) == 30


def test_labelled_sites_train_a_part_of_what_the_others_would() -> None:
    """Half of 3 mini-batches is 1 in whole numbers: target trains 2 of its 3 a round, north 3 in place of 2."""
    method, found = MDFNet(lend=0.5), domains(MLP, {"north": 16})
    roles: Any = {"wide": "target"}
    found += [replace(domains(MLP, {"wide": 24})[0])]
    where = federation(method, found, MLP, rounds=4, roles=roles, budget={"north": 8, "wide": 12})
    states = rounds_of(where, method, found, 4)
    assert where.progress.used == where.budget == {"north": 12, "wide": 8}
    assert states[-1].report["aggregation_weights"]["wide"] == pytest.approx(0.499955, abs=1e-6)


def test_a_gate_that_never_opens_is_said_once_and_the_paper_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gate(monkeypatch, [0.9] * 6)
    method, found = practical(), domains(MLP, {"north": 16})
    where = federation(method, found, MLP, rounds=3, budget=6)
    states = rounds_of(where, method, found, 3)
    assert [len(state.report["warnings"]) for state in states] == [0, 0, 1]
    assert "readiness" in states[-1].report["warnings"][0]
    assert where.is_exhausted()
    paper = MDFNet()
    assert (paper.readiness, paper.keep_momentum) == (None, True)
    where = federation(paper, found, MLP, rounds=3, budget=6)
    assert not any(state.report["warnings"] for state in rounds_of(where, paper, found, 3)[:1])


def test_the_reported_cross_entropy_has_neither_reconstruction_nor_interaction() -> None:
    method, found = MDFNet(), domains(MLP, SIZES)
    where = federation(method, found, MLP, lr=1e-12, batch_size=16)
    start = start_of(method, found, MLP)
    site = site_of(where, "north")
    site.begin(Envelope(1, 1, 0.0, 60))
    reply = method.fit(site, start, 0.0, 0)
    site.begin(Envelope(1, 1, 0.0, 60))
    halves = _Halves(method, site, start)
    batch = next(site.batches())
    logits, common = halves(batch.inputs)
    own = functional.cross_entropy(logits, batch.targets)
    assert reply.cross_entropy == pytest.approx(own.item(), rel=1e-5)
    assert reply.loss == pytest.approx((own + common).item(), rel=1e-5)
    site.begin(Envelope(1, 1, 1.0, 0))  # nothing left to train: it says what guessing has
    assert method.fit(site, start, 0.0, 0).cross_entropy == pytest.approx(math.log(3))


def test_the_number_of_classes_that_pseudo_labels_name() -> None:
    method, found = MDFNet(), domains(MLP, SIZES)
    where = federation(method, found, MLP)
    start = dict(start_of(method, found, MLP))
    site = site_of(where, "target")

    def named(bias: list[float], **options: Any) -> int:
        site.begin(Envelope(1, 1, 0.0, 60))
        weights = fedshift.weights.Weights({**start, "classifier.bias": torch.tensor(bias)})
        reply: UnlabelledUpdate = MDFNet(**options).fit_unlabelled(site, weights, 0.0, 0)
        return reply.named

    assert named([50.0, 0.0, 0.0]) == 1
    assert named([0.0, 0.0, 0.0]) > 1
    assert named([0.0, 0.0, 0.0], self_supervision=False) == 0


def test_pseudo_labels_of_few_classes_are_warned_of_after_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 classes: one of them is at most half. The streak must not be broken, and is told once."""
    named, original = [1, 2, 1, 1, 1], MDFNet.fit_unlabelled

    def fit_unlabelled(self: MDFNet, site: Site, weights: Any, r: float, extra: int) -> UnlabelledUpdate:
        return replace(original(self, site, weights, r, extra), named=named.pop(0))

    monkeypatch.setattr(MDFNet, "fit_unlabelled", fit_unlabelled)
    method, found = MDFNet(), domains(MLP, SIZES)
    where = federation(method, found, MLP, rounds=5)
    states = rounds_of(where, method, found, 5)
    assert [len(state.report["warnings"]) for state in states] == [0, 0, 0, 1, 0]
    assert "target" in states[3].report["warnings"][0]


def test_few_mini_batches_in_an_epoch_are_warned_of_before_training() -> None:
    assert "dslr" in MDFNet().check_samples(Samples((5,), {"amazon": 30, "dslr": 5}))[0]
    assert "amazon" not in MDFNet().check_samples(Samples((5,), {"amazon": 30, "dslr": 5}))[0]
    assert MDFNet().check_samples(Samples((5,), {"amazon": 30})) == ()
    assert practical().check_samples(Samples((5,), {"dslr": 5})) == ()


# Through an experiment --------------------------------------------------------------------------------------------


def options(folder: Path, **method: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    where = {}
    for number, name in enumerate(("a", "b")):
        labels = np.arange(48) % 3
        x = rng.normal(size=(48, 5)).astype(np.float32) * 0.3 + number * 0.2
        x[np.arange(48), labels] += 3
        np.savez(folder / f"{name}.npz", x=x, y=labels)
        where[name] = str(folder / f"{name}.npz")
    return {
        "name": "small",
        "data": {"name": "arrays", "sites": where},
        "protocol": {"kind": "source_target", "pairs": [["a", "b"]], "splits": 1},
        "model": {"name": "mlp", "hidden": [8, 6]},
        "training": {"rounds": 6, "batch_size": 8, "lr": 0.1, "momentum": 0.9},
        "methods": [{"name": "mdfnet", "label": "x", **method}],
        "engine": {"name": "local", "threads": 1},
        "device": "cpu",
    }


class Stop(BaseException):
    """Ends a run in the middle."""


@pytest.mark.slow
@pytest.mark.parametrize("rounds_done", [1, 3])
def test_gate_and_moved_work_survive_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds_done: int
) -> None:
    chosen = options(tmp_path, setting="practical", readiness=0.6)
    whole = fedshift.run(chosen, tmp_path / "whole").runs[0]
    part = Path("small") / "x" / "a-b" / "seed-0"
    lines = [json.loads(line) for line in (tmp_path / "whole" / part / "rounds.jsonl").read_text().splitlines()]
    opened = next(number for number, line in enumerate(lines) if line["extra"]["named_classes"])
    assert 1 <= opened < 5, "the gate opens in the midst of the run"
    original, done = MDFNet.round, 0

    def stopped(self: MDFNet, where: Federation, state: State) -> State:
        nonlocal done
        if done == rounds_done:
            raise Stop
        done += 1
        return original(self, where, state)

    monkeypatch.setattr(MDFNet, "round", stopped)
    with pytest.raises(Stop):
        fedshift.run(chosen, tmp_path / "cut")
    monkeypatch.setattr(MDFNet, "round", original)
    resumed = fedshift.run(chosen, tmp_path / "cut").runs[0]
    assert resumed.rounds == whole.rounds == 6
    assert resumed.mini_batches == whole.mini_batches == 6 * (3 + 6)
    model = "model.safetensors"
    assert (tmp_path / "cut" / part / model).read_bytes() == (tmp_path / "whole" / part / model).read_bytes()


def test_a_warning_of_a_method_reaches_the_result_once(tmp_path: Path) -> None:
    chosen = options(tmp_path, setting="practical", readiness=1e-9)
    found = fedshift.run(chosen, tmp_path / "runs").runs[0]
    assert len([warning for warning in found.warnings if "readiness" in warning]) == 1
