"""Numbers that the methods' authors' own functions gave, and how ours are compared with them.

An entry of `federated.json` or `pooled.json` has inputs by formula, options, and what the authors' function gave on
them, with repository, file, function and commit. A tensor ``amp, coef, offset, phase, shape`` is
``offset + amp · sin(Σ_a coef_a · index_a + phase)`` with indices from 0; one with a ``formula`` is written out, with
the indices i, j, k, l in the order of its axes. Numbers are rounded to ten digits.

A test with `compares` names the entries that it compares. Every output of an entry has to agree, or its difference
stands in the entry's own ``differences``, and then it has to differ.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
FILES = ("federated", "pooled")
COMPARED: dict[tuple[str, str], Callable[..., None]] = {}
"""File and id of an entry → the test that compares it."""
NOT_YET: dict[tuple[str, str], str] = {}
"""File and id of an entry that no test compares so far → the reason."""
LARGEST = 1e-6
"""How far numbers in float64 may be apart. An entry with a larger tolerance says why: ``tolerance_reason``."""


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
        tolerance: how far ours may be from them.
        tolerance_reason: why it is more than `LARGEST`.
        notes: what else is known.
        differences: output → why ours is another number, or why there is none to compare.
        computed_again: whether the authors' function was run a second time, by another program on the same formulas.
        gaps: output → how far ours was from it, of those that were compared.
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
    tolerance_reason: str = ""
    differences: Mapping[str, str] = field(default_factory=dict)
    computed_again: bool = False
    gaps: dict[str, float] = field(default_factory=dict)

    def agree(self, name: str, ours: Any) -> None:
        """Fail unless ``ours`` is the output of this name, or another number where a difference is stated."""
        gap = distance(self.outputs[name], ours)
        self.gaps[name] = gap
        if name in self.differences:
            assert gap > self.tolerance, (
                f"{self.id}: {name} agrees with {self.source}, so no difference is to be stated"
            )
        else:
            assert gap <= self.tolerance, f"{self.id}: {name} is {gap:.2g} from {self.source}"

    @property
    def missing(self) -> set[str]:
        """The outputs that were not compared and for whose lack no reason stands in the entry."""
        return self.outputs.keys() - self.gaps.keys() - self.differences.keys()


def distance(theirs: Any, ours: Any) -> float:
    """The largest gap between two numbers, or tables, lists and tensors of numbers; infinite where these have other
    names, sizes or texts."""
    if isinstance(theirs, Mapping):
        same = isinstance(ours, Mapping) and theirs.keys() == ours.keys()
        return max((distance(value, ours[name]) for name, value in theirs.items()), default=0.0) if same else math.inf
    if isinstance(theirs, str):
        return 0.0 if theirs == ours else math.inf
    if isinstance(theirs, list) and not (isinstance(ours, Tensor) or all(isinstance(x, int | float) for x in theirs)):
        same = len(theirs) == len(ours)
        return max(map(distance, theirs, ours), default=0.0) if same else math.inf
    expected = torch.as_tensor(theirs, dtype=torch.float64)
    found = torch.as_tensor(ours, dtype=torch.float64).detach()
    if expected.shape != found.shape:
        return math.inf
    gap = (found - expected).abs().max().item() if expected.numel() else 0.0
    return math.inf if math.isnan(gap) else gap


def tensor(form: Mapping[str, Any]) -> Tensor:
    """The tensor of a formula, float64."""
    grids = np.indices(form["shape"])
    if "formula" in form:
        names = {"sin": np.sin, "cos": np.cos, **dict(zip("ijkl", grids, strict=False))}
        values = eval(form["formula"], {"__builtins__": {}}, names)
        return torch.from_numpy(np.asarray(values, dtype=np.float64))
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


def compares(file: str, *entries: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of these entries, each given as ``reference``: fails too if an output was neither compared nor excused."""

    def of(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def whole(reference: Reference, **fixtures: Any) -> None:
            reference.gaps.clear()
            test(reference=reference, **fixtures)
            assert not reference.missing, f"{reference.id}: {', '.join(sorted(reference.missing))} not compared"

        found = references(file)
        for entry in entries:
            if (file, entry) in COMPARED:
                raise ValueError(f"{file}, {entry}: compared twice")
            COMPARED[file, entry] = test
        parameters = [pytest.param(found[entry], id=entry) for entry in entries]
        return pytest.mark.parametrize("reference", parameters)(whole)

    return of
