"""Sources drawn for each round (``protocol.sites_per_round``): who trains, what is recorded, what is refused."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from small import Stop, StopAfter, experiment, features, outcome, save

import fedshift
from fedshift.errors import UserError
from fedshift.experiment import check as check_module
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.features import build_data
from fedshift.experiment.fits.about import About
from fedshift.experiment.fits.private import what_epsilon_means
from fedshift.experiment.plan import Plan
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut
from fedshift.experiment.runs.experiment_loop import run_experiment

CSAC = {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}
UNSEEN = {"targets": ["a"], "seeds": [0], "test_fraction": 0.3}


def options(folder: Path, *methods: dict[str, Any], drawn: Any = 2, **changes: Any) -> dict[str, Any]:
    """Five sites, one unseen; 4 rounds, with ``drawn`` of the four sources in each."""
    where = save(folder, **{name: features(seed, 24) for seed, name in enumerate("abcde")})
    protocol = {**UNSEEN, **({} if drawn is None else {"sites_per_round": drawn}), **changes.pop("protocol", {})}
    training = {"rounds": 4, "batch_size": 8, "lr": 0.05, **changes.pop("training", {})}
    model = {"name": "mlp", "hidden": [4]}
    return experiment(where, methods=list(methods), protocol=protocol, training=training, model=model, **changes)


def plan(folder: Path, drawn: Any, **changes: Any) -> Plan:
    whole = parse(options(folder, {"name": "fedavg"}, drawn=drawn, **changes))
    return Plan(whole, whole.protocol.taking_part(build_data(whole)))


def lines(runs: Path, method: str) -> list[dict[str, Any]]:
    path = runs / "small" / method / "a" / "seed-0" / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_who_trains_is_recorded_counted_and_known_before(tmp_path: Path) -> None:
    """The same sites for every method; only they train and send; `check` knows the bytes and the mini-batches."""
    asked = options(tmp_path / "data", {"name": "fedavg"}, {"name": "scaffold"}, {"name": "feddyn"}, CSAC)
    fedshift.run(asked, tmp_path / "runs")
    known = {one.label: one for one in check_module.check(parse(copy.deepcopy(asked))).methods}
    drawn: dict[int, list[str]] = {}
    for method, need in known.items():
        found = lines(tmp_path / "runs", method)
        started = [line for line in found if line["round"] == 0]  # CSAC's acquisition, by every site
        assert all(set(line["losses"]) == set("bcde") for line in started)
        rounds = found[len(started) :]
        for line in rounds:
            assert set(line["losses"]) == set(line["extra"]["drawn"])
            assert drawn.setdefault(line["round"], line["extra"]["drawn"]) == line["extra"]["drawn"]
            assert len(line["extra"]["drawn"]) == 2
            assert "missing" not in line["extra"]
        # An epoch is 3 mini-batches, and a round trains half of the sites.
        before = 3 * len(started)
        trained = [round(before + 1.5 * number) for number in range(1, len(rounds) + 1)]
        assert [line["mini_batches"] for line in rounds] == trained
        assert need.mini_batches_per_site == found[-1]["mini_batches"]
        for direction, bytes_ in (("up", need.bytes_up), ("down", need.bytes_down)):
            assert sum(sum(line["bytes"][direction].values()) for line in found) == bytes_
    assert len({tuple(names) for names in drawn.values()}) > 1


def test_a_run_that_was_cut_short_draws_the_same_sites(tmp_path: Path) -> None:
    asked = options(tmp_path / "data", CSAC)
    fedshift.run(asked, tmp_path / "whole")
    with pytest.raises(Stop):
        run_experiment(parse(asked), tmp_path / "cut", reporter=StopAfter(3))
    fedshift.run(asked, tmp_path / "cut")
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "cut")
    whole, cut = (
        json.loads((tmp_path / runs / "small/csac/a/seed-0/result.json").read_text()) for runs in ("whole", "cut")
    )
    assert 0 < whole["processor_seconds"] < time.process_time()
    assert (whole["memory"] or 1 << 24) >= 1 << 24  # torch alone takes more; not every system says
    assert cut["processor_seconds"] is cut["memory"] is None, "another process had a part in it"


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
def test_worker_processes_give_the_same_bits(tmp_path: Path) -> None:
    for workers in (1, 2):
        engine = {"name": "local", "threads": 1, "workers": workers}
        fedshift.run(options(tmp_path / "data", {"name": "feddyn"}, engine=engine), tmp_path / str(workers))
    assert outcome(tmp_path / "1") == outcome(tmp_path / "2")


def test_drawing_is_part_of_a_run_s_identity_and_does_not_lower_epsilon(tmp_path: Path) -> None:
    # The noise of private runs is drawn from the identity, so that of earlier experiments must not change.
    def identity(drawn: Any) -> dict[str, Any]:
        found: dict[str, Any] = plan(tmp_path, drawn).runs[0].identity["protocol"]
        return found

    assert "sites_per_round" not in identity(None)
    assert identity(2) == {**identity(None), "sites_per_round": 2}
    # It is computed from the mini-batches of a site that takes part in every round.
    private = {"privacy": {"noise_multiplier": 1.0}}
    whole, drawn = (plan(tmp_path, number, training=private) for number in (None, 2))
    assert whole.runs[0].budget == drawn.runs[0].budget
    told = [any("sites_per_round" in warning for warning in what_epsilon_means(About(one))) for one in (whole, drawn)]
    assert told == [False, True]


@pytest.mark.parametrize(("asked", "sources", "drawn"), [(None, 9, None), (3, 9, 3), (0.1, 1000, 100), (0.1, 4, 1)])
def test_a_number_or_a_share(asked: Any, sources: int, drawn: int | None) -> None:
    assert LeaveOneOut(sites_per_round=asked).number_drawn(sources) == drawn


ADAPT = {"kind": "adapt_to_one"}


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ({"name": "fedavg"}, {"drawn": 5}, "sites_per_round: 5 of 4"),
        ({"name": "fedavg"}, {"drawn": 1.0}, "sites_per_round"),
        ({"name": "fedavg"}, {"drawn": 0}, "sites_per_round"),
        ({"name": "deepall"}, {}, "DeepAll|deepall"),
        ({"name": "kd3a"}, {"protocol": ADAPT}, "kd3a"),
        ({"name": "oracle"}, {"protocol": ADAPT}, "oracle trains in one place"),
        ({"name": "fedavg", "robust": {"rule": "trust", "trusted": "b"}}, {}, "'b'"),
        (
            {"name": "fedavg", "robust": {"rule": "krum", "faulty": 1}},
            {},
            "robust.faulty",
        ),  # enough sites, too few drawn
        ({"name": "fedavg"}, {"engine": {"name": "local", "quorum": 3}}, "engine.quorum: 3"),
        (
            {"name": "fedavg"},
            {"engine": {"name": "local", "aggregation": "secure"}},
            "sums of drawn sites differ by a few",
        ),
    ],
)
def test_what_cannot_do_without_the_others_is_refused(
    method: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        fedshift.check(options(tmp_path, method, **changes))
    assert "\n" not in str(caught.value)
