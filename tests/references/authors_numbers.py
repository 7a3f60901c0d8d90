"""Numbers that the methods' authors' own functions gave, and how ours are compared with them.

An entry of `federated.json` or `pooled.json` has inputs by formula, options, and what the authors' function gave on
them, with repository, file, function and commit. A tensor ``amp, coef, offset, phase, shape`` is
``offset + amp · sin(Σ_a coef_a · index_a + phase)`` with indices from 0. Numbers are rounded to ten digits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Reference:
    """What an authors' function gave on inputs by formula.

    Attributes:
        id: of the entry.
        method: whose.
        what: which step.
        source: repository, file, function, commit; or package and version.
        tensors: the inputs, in float64, by name.
        inputs: labels and other inputs.
        parameters: options.
        outputs: the numbers.
        tolerance: how far ours may be from them; rougher than 1e-6 only where the authors' code computes in float32 or
            is rounded, as the notes say.
        notes: what else is known.
    """

    id: str
    method: str
    what: str
    source: str
    tensors: Mapping[str, Tensor]
    inputs: Mapping[str, Any]
    parameters: Mapping[str, Any]
    outputs: Mapping[str, Any]
    tolerance: float
    notes: str

    def agree(self, name: str, ours: Any) -> None:
        """Fail unless ``ours`` is the output of this name."""
        theirs = torch.as_tensor(self.outputs[name], dtype=torch.float64)
        found = torch.as_tensor(ours, dtype=torch.float64) if not isinstance(ours, Tensor) else ours.double()
        gap = (found - theirs).abs().max().item() if theirs.numel() else 0.0
        assert found.shape == theirs.shape, f"{self.id}: {name} has shape {tuple(found.shape)}"
        assert gap <= self.tolerance, f"{self.id}: {name} is {gap:.2g} from {self.source}"


def tensor(form: Mapping[str, Any]) -> Tensor:
    """The tensor of a formula, float64."""
    grids = np.indices(form["shape"])
    angle = sum((coef * grid for coef, grid in zip(form["coef"], grids, strict=True)), np.zeros(form["shape"]))
    return torch.from_numpy(form["offset"] + form["amp"] * np.sin(angle + form["phase"]))


@functools.cache
def references(file: str) -> Mapping[str, Reference]:
    """The entries of a file, ``federated`` or ``pooled``, by id."""
    entries = json.loads((HERE / f"{file}.json").read_text(encoding="utf-8"))
    return {
        entry["id"]: Reference(**{**entry, "tensors": {name: tensor(form) for name, form in entry["tensors"].items()}})
        for entry in entries
    }
