"""What each site sent and received: every site of a small run, the range over the sites of a large one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedshift.evaluation.packs import RUNS, PackedRun, decode, encode
from fedshift.evaluation.records import RunResult
from fedshift.evaluation.site_bytes import FILE, MOST_SITES, read_site_bytes, site_bytes, write_site_bytes


def counted(sites: int) -> dict[str, dict[str, dict[str, int]]]:
    """Site n sends n bytes of weights and every tenth 5 of numbers; each receives 7."""
    return {
        f"site-{number}": {
            "up": {"weights": number} | ({"numbers": 5} if number % 10 == 0 else {}),
            "down": {"weights": 7},
        }
        for number in range(sites)
    }


def result(sites: int | None) -> dict[str, object]:
    whole = RunResult.model_validate(
        {
            "method": "fedavg",
            "target": "a",
            "seed": 0,
            "selected": {"last": {"round": 1, "accuracy": 50.0}},
            "classes": ["0", "1"],
            "rounds": 1,
            "seconds": 1.0,
            "mini_batches": 1,
            "bytes_by_site": None if sites is None else site_bytes(counted(sites)),
            "threads": 1,
            "device": "cpu",
        }
    )
    found: dict[str, object] = json.loads(whole.model_dump_json())
    return found


def test_small_runs_name_sites_and_large_ones_have_a_range() -> None:
    found = site_bytes(counted(MOST_SITES))
    assert found.sites == counted(MOST_SITES)
    assert (found.number, found.spread) == (MOST_SITES, {})
    assert site_bytes(None) is None, "not known is not the same as nothing"
    nothing = site_bytes({})
    assert nothing.number == 0
    found = site_bytes(counted(1000))
    assert (found.number, found.sites) == (1000, {})
    weights, numbers, received = found.spread["up"]["weights"], found.spread["up"]["numbers"], found.spread["down"]
    assert (weights.least, weights.median, weights.most) == (0, 499, 999)
    assert (numbers.least, numbers.median, numbers.most) == (0, 0, 5), "a site that sent none counts as 0"
    assert {kind: (one.least, one.most) for kind, one in received.items()} == {"weights": (7, 7)}
    assert len(json.dumps(result(1000))) - len(json.dumps(result(None))) < 500


@pytest.mark.parametrize("sites", [None, 3, 1000])
def test_packing_loses_nothing_of_it(sites: int | None) -> None:
    whole, of_before = result(sites), {name: it for name, it in result(None).items() if name != "bytes_by_site"}
    runs = [PackedRun(whole, {}), PackedRun({**of_before, "seed": 1}, {})]
    read, _ = decode(encode(runs, {})[RUNS])
    back = [read[run.name].result for run in runs]
    assert back == [run.result for run in runs], "a run of before has no such field, and gets none"
    assert all(RunResult.model_validate(one) for one in back)


def test_a_run_that_is_not_finished_has_it_in_a_file(tmp_path: Path) -> None:
    assert read_site_bytes(tmp_path) is None
    write_site_bytes(tmp_path, None)
    assert not (tmp_path / FILE).exists()
    write_site_bytes(tmp_path, counted(3))
    assert read_site_bytes(tmp_path) == site_bytes(counted(3))
    (tmp_path / FILE).write_text("{")
    assert read_site_bytes(tmp_path) is None
