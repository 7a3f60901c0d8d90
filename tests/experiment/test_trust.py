"""What must not happen with other people's files and with patients' data."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small import command, wait_for

import fedshift
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.predict import load_model
from fedshift.federation.messages import pieces
from fedshift.import_paths import import_file


@pytest.mark.threat("large_model")
@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (lambda name: {"name": name}, "--method"),
        (lambda name: {"name": "styles", "method": name}, "does not come with fedshift"),
        (lambda name: {"name": "styles", "method": {"name": name}}, "does not come with fedshift"),
        (lambda name: {"name": "styles", "method": {"name": "styles", "method": name}}, "does not come with fedshift"),
    ],
    ids=["itself", "its name", "a mapping", "two wrappers"],
)
def test_a_model_file_never_decides_which_code_runs(
    wrapped: Callable[[str], dict[str, object]], message: str, tmp_path: Path
) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    metadata = {
        "method": wrapped(f"{evil}:Anything"),
        "sources": ["a"],
        "model": {"name": "linear"},
        "input_shape": [3],
        "classes": ["a", "b"],
        "preprocessing": {"kind": "features"},
    }
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors", {"fedshift": json.dumps(metadata)})
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_refused_statistics_stop_a_common_encoding(tmp_path: Path) -> None:
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.random.default_rng(0).normal(size=(12, 3)), y=np.arange(12) % 2)
    experiment = {
        "data": {
            "name": "arrays",
            "sites": {name: str(tmp_path / f"{name}.npz") for name in "ab"},
            "standardise": True,
        },
        "model": "linear",
        "methods": ["fedavg"],
        "engine": {"refuse": ["statistics"]},
    }
    with pytest.raises(UserError, match="sites refuse statistics"):
        fedshift.check(experiment)
    with pytest.raises(UserError, match="sites refuse statistics"):
        fedshift.run(experiment, tmp_path / "runs")


def test_long_texts_edited_files_and_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FedshiftError, match="only short names travel"):
        list(pieces({"note": "x" * 65}))
    file = tmp_path / "mine.py"
    file.write_text("VALUE = 1\n", encoding="utf-8")
    first = import_file(str(file))
    assert import_file(str(file)) is first
    file.write_text("VALUE = 2\n", encoding="utf-8")
    second = import_file(str(file))
    assert (first.VALUE, second.VALUE) == (1, 2)
    assert first.__sha256__ != second.__sha256__
    monkeypatch.setenv("FEDSHIFT_CHILD", "1")
    with pytest.raises(UserError, match="__main__"):
        fedshift.run({})


@pytest.mark.slow
def test_samples_do_not_stay_behind(tmp_path: Path) -> None:
    """The copies that workers map into memory go when the run is stopped; runs/test_resume.py kills it."""
    for name in "abc":
        np.savez(tmp_path / f"{name}.npz", x=np.ones((40, 3), np.float32), y=np.arange(40) % 2)
    sites = ", ".join(f"{name}: {name}.npz" for name in "abc")
    (tmp_path / "e.yaml").write_text(
        f"data: {{name: arrays, sites: {{{sites}}}}}\nmodel: linear\nmethods: [fedavg]\n"
        "training: {rounds: 100000, batch_size: 4}\nengine: {workers: 2, threads: 1}\n",
        encoding="utf-8",
    )
    # A socket's path must be short, and pytest's folders are long.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        words = ("run", tmp_path / "e.yaml", "--runs", tmp_path / "runs")
        running = command(*words, said=tmp_path / "said", TMPDIR=temporary)
        wait_for(lambda: list(tmp_path.glob("runs/**/rounds.jsonl")), 120)
        assert list(Path(temporary).glob("fedshift-pool-*/*/inputs.npy"))
        running.terminate()
        running.join(60)
        assert not list(Path(temporary).glob("fedshift-pool-*")), (tmp_path / "said").read_text()
