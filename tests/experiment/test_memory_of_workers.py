"""Where memory runs out, in a worker or while data are read, a person reads one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from calling import Cli
from small import experiment, sites, write

from fedshift.data.builders.arrays import Arrays
from fedshift.errors import OUT_OF_MEMORY
from fedshift.federation.local.commands import Failed
from fedshift.federation.local.worker import _failure

GREEDY = """
import os
import numpy as np
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.scores = nn.Linear(shape[0], classes)

    def forward(self, x):
        if self.training and len(x) == 8 and os.environ.get("FEDSHIFT_CHILD"):
            np.ones(10**15)
        return self.scores(x)
"""


@pytest.mark.slow
@pytest.mark.case("out of memory", "a mini-batch in a worker")
def test_a_worker_says_so_in_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(GREEDY)
    options = experiment(
        sites(tmp_path),
        model={"name": "net.py:Net"},
        engine={"name": "local", "threads": 1, "workers": 2},
        protocol={"targets": ["a", "b"], "seeds": [0]},
    )
    result = cli("run", write(tmp_path / "e.yaml", options), "--trust", "--runs", tmp_path / "runs")
    assert result.code == 2
    last = result.err.splitlines()[-1]
    assert last.startswith("error: out of memory")
    assert "Traceback" not in result.err


@pytest.mark.case("out of memory", "while a site's file is read, at check")
def test_reading_data_says_so_in_one_line_and_bugs_keep_their_traceback(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(self: Arrays) -> None:
        np.ones(10**15)

    monkeypatch.setattr(Arrays, "build", greedy)
    assert "out of memory" in cli("check", write(tmp_path / "e.yaml", experiment(sites(tmp_path)))).error()
    assert _failure(MemoryError()) == Failed(error="UserError", message=OUT_OF_MEMORY)
    assert "ZeroDivisionError" in _failure(ZeroDivisionError()).message
