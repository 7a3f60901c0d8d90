"""KD3A: what stays at a site, what travels, and what happens when a source's model is no number."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from kd3a_setting import GATES, SITES, around, kd3a, rounds_of, warm_start
from kd3a_written import EQUATIONS
from lost import site_of
from tiny import step_on

from fedshift.errors import TrainingDiverged
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.functional.averaging import is_buffer
from fedshift.methods.base import State
from fedshift.methods.federated.kd3a import KD3A
from fedshift.weights import Weights


def test_heads_stay_at_their_sites() -> None:
    (first, last), where = rounds_of(kd3a(private_classifier=True))
    heads = {name: site_of(where, name).memory.weights("private") for name in (*SITES, "target")}
    for head in heads.values():
        assert set(head) == {"classifier.weight", "classifier.bias"}
    for one, other in itertools.combinations(heads, 2):
        assert heads[one] != heads[other]
    assert last.weights.select("classifier") == heads["target"]
    assert last.weights != first.weights
    assert "private" not in site_of(rounds_of(kd3a())[1], "north").memory


@pytest.mark.parametrize("case", ["heads at home", "statistics at home", "momentum of shares", "code"])
def test_a_run_goes_on_from_its_files(case: str, tmp_path: Path) -> None:
    """Saved after every round and loaded into fresh sites: the same bits as in one go."""
    method = kd3a(**EQUATIONS[case])
    options: dict[str, Any] = {"reset_optimizer_each_round": False, "momentum": 0.9}
    whole, _ = rounds_of(method, 3, **options)
    folder = RunFolder(tmp_path, {"name": case})
    state, header = State(warm_start()), None
    for _ in range(3):
        where = around(method, rounds=3, **options)
        if header is not None:
            where.progress.exchange, where.progress.used = header.exchange, header.used
            where.load_memory(folder.memory, header.memory)
        state = step_on(method, where, state)
        now = {"exchange": where.progress.exchange, "used": where.progress.used}
        folder.save_checkpoint(state, where.save_memory(folder.memory), now)
        found = folder.load_checkpoint()
        assert found is not None
        state, header = found
    assert state.weights == whole[-1].weights
    assert state.numbers == whole[-1].numbers


class Sick(KD3A):
    """KD3A whose site ``south`` sends another model in the second round: ``times`` its own."""

    times: float

    def fit(self, site: Site, weights: Weights) -> Update:
        update = super().fit(site, weights)
        if site.name != "south" or site.envelope.round != 2:
            return update
        sick = {
            name: tensor * self.times if tensor.is_floating_point() and not is_buffer(name) else tensor
            for name, tensor in update.weights.items()
        }
        return Update(Weights(sick), update.samples, update.loss)


def sick_rounds(rounds: int, quorum: int | None, **options: Any) -> tuple[list[State], Federation]:
    method = Sick(**GATES, **options)
    where = around(method, rounds=rounds)
    where.quorum = quorum
    states = [method.start(where, warm_start())]
    for _ in range(rounds):
        states.append(step_on(method, where, states[-1]))
    return states[1:], where


@pytest.mark.parametrize("times", [math.nan, 1e30])
@pytest.mark.parametrize(
    "options",
    [{}, {"share_momentum": 0.7}, {"batch_norm": "loss", "batch_norm_weight": 0.01}, {"teacher_statistics": "batch"}],
)
def test_a_source_that_misses_a_round_and_comes_back(times: float, options: dict[str, Any]) -> None:
    """Its model is no number, or predicts none: the others go on, it is named, and the next round counts it again."""
    states, where = sick_rounds(3, 2, times=times, **options)
    first, second, third = (state.report["aggregation_weights"] for state in states)
    assert set(first) == set(third) == {*SITES, "target"}
    assert set(second) == {*SITES, "target"} - {"south"}
    for shares in (first, second, third):
        assert sum(shares.values()) == pytest.approx(1, abs=1e-12)
        assert all(share >= 0 for share in shares.values())
    # What the absent site would have counted goes to all in proportion, not to the target alone.
    assert second["target"] < 2 * first["target"]
    assert "'south'" in where.missing["south"]
    assert "round 2" in where.missing["south"]
    assert all(tensor.isfinite().all() for state in states for tensor in state.weights.values())


@pytest.mark.parametrize("times", [math.nan, 1e30])
def test_too_few_are_left(times: float) -> None:
    for quorum in (None, len(SITES)):
        with pytest.raises(TrainingDiverged, match=r"'south'.* in round 2"):
            sick_rounds(2, quorum, times=times)
