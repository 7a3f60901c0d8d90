"""What a cluster's processes leave when one of them is lost: a second start is for runs that are not finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from small import experiment, sites

from fedshift.errors import FedshiftError
from fedshift.evaluation.stored import RESULT
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs import ray_runs
from fedshift.experiment.runs.context import Reporter


class LostError(Exception):
    """In place of Ray's own."""


class Cluster:
    """One process at a time, which writes the result, or not, and is lost."""

    exceptions = SimpleNamespace(RayError=LostError)

    def __init__(self, result: Path, *, finishes: bool) -> None:
        self.result, self.finishes, self.started = result, finishes, 0

    def remote(self, function: Any) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.start))

    def start(self, *_: Any) -> int:
        self.started += 1
        if self.finishes:
            self.result.touch()
        return self.started

    def wait(self, tasks: list[int], **_: Any) -> tuple[list[int], list[int]]:
        return tasks[:1], tasks[1:]

    def get(self, task: int) -> None:
        raise LostError

    def cancel(self, task: int) -> None: ...


@pytest.mark.parametrize("finishes", [True, False])
def test_a_lost_process_is_started_again_for_what_is_left(
    finishes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path / RESULT, finishes=finishes)

    @contextmanager
    def join(address: str) -> Iterator[Cluster]:
        yield cluster

    monkeypatch.setattr(ray_runs, "join_cluster", join)
    room = Mock()
    monkeypatch.setattr(ray_runs, "check_room", room)
    whole = parse(experiment(sites(tmp_path / "data"), engine={"name": "ray", "parallel_runs": 1, "threads": 1}))
    folder = Mock(path=tmp_path, **{"result.return_value": None, "is_held.return_value": False})
    mine = cast(ray_runs.Runs, [(SimpleNamespace(run=None), folder)])

    def spread() -> None:
        ray_runs.spread(cast(Any, None), whole, tmp_path, mine, (1, 1), Reporter(), lambda: None)

    if finishes:
        spread()
    else:
        with pytest.raises(FedshiftError, match="lost twice"):
            spread()
    assert cluster.started == (1 if finishes else 2)
    assert room.call_count == cluster.started, "a cluster that shrank needs no room for what is done"
