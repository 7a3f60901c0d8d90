"""What became of a deployment in a test: runs, logs and errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedshift.deploy.remote.policy import AuditLog
from fedshift.deploy.site_server import SiteProgram
from fedshift.errors import FedshiftError, UserError


@contextlib.contextmanager
def one_line(match: str, kind: type[FedshiftError] = UserError) -> Iterator[None]:
    """Expects an error of this kind that says so in one line."""
    with pytest.raises(kind, match=match) as error:
        yield
    assert "\n" not in str(error.value)


def audit(site: SiteProgram | Path) -> list[dict[str, Any]]:
    return AuditLog.check(site / "memory" / "audit.jsonl" if isinstance(site, Path) else site.config.audit_log)[0]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "deployment" / "progress.jsonl").read_text().splitlines()]


def model(folder: Path, method: str = "fedavg", target: str = "west") -> dict[str, torch.Tensor]:
    return load_file(folder / method / target / "seed-0" / "model.safetensors")


def result(folder: Path, method: str = "fedavg", target: str = "west") -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((folder / method / target / "seed-0" / "result.json").read_text())
    return stored


def rounds_of(folder: Path, method: str = "fedavg", target: str = "west") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / method / target / "seed-0/rounds.jsonl").read_text().splitlines()]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def alike(first: Path, second: Path, method: str = "fedavg", target: str = "west", measured: bool = False) -> bool:
    """Whether two folders of runs hold a model of the same bits; ``measured``: and what is selected is equal."""
    ours, theirs = (result(folder, method, target)["selected"] if measured else None for folder in (first, second))
    return same(model(first, method, target), model(second, method, target)) and ours == theirs
