"""The section ``engine`` of an experiment file."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedshift.experiment.config.engine_section import LocalEngine


def test_threads_as_written_else_as_the_environment_says_else_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert LocalEngine(workers=2, parallel_runs=2).thread_count() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert LocalEngine(workers=2).thread_count() == 3
    assert LocalEngine(threads=1).thread_count() == 1
    for strange in ("", "0", "4,2", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", strange)
        assert LocalEngine().thread_count() == 8


@pytest.mark.parametrize("kinds", [("wieghts",), ("weights", "wieghts"), ("weights", "statistics", "wieghts")])
def test_every_kind_that_is_refused_is_known(kinds: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="unknown kind 'wieghts'; did you mean 'weights'"):
        LocalEngine(refuse=kinds)
