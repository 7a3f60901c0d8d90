"""MDFNet's learning rate at every site: its own decay, or where that is off the experiment's schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tiny import MLP, domains, federation, start_of, step_on

from fedshift.federation.site import Site
from fedshift.methods.federated.mdfnet import MDFNet


@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_the_rate_of_each_round(decay: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds of r = 0, ½, 1 and half a cosine over the work done, for all parameters alike."""
    used: list[tuple[int, float, set[float]]] = []
    plain = Site.minimise

    def watched(self: Site, *arguments: Any, optimizers: Any = None, **options: Any) -> float:
        (optimizer,) = optimizers
        rates = {group["lr"] for group in optimizer.param_groups}
        used.append((self.envelope.round, self.envelope.progress, rates))
        return plain(self, *arguments, optimizers=optimizers, **options)

    monkeypatch.setattr(Site, "minimise", watched)
    method, found = MDFNet(decay=decay), domains(MLP, {"north": 16, "south": 9})
    schedule: dict[str, Any] = {"lr": 0.2, "lr_schedule": "cosine", "lr_end": 0.02}
    where = federation(method, found, MLP, rounds=3, budget=6, reset_optimizer_each_round=not keeps, **schedule)
    state = method.start(where, start_of(method, found, MLP))
    for _ in range(3):
        state = step_on(method, where, state)
    assert len(used) == 9
    assert len({progress for _, progress, _ in used}) > 2
    for number, progress, rates in used:
        r = (number - 1) / 2
        cosine = 0.02 + 0.18 * (1 + math.cos(math.pi * progress)) / 2
        expected = 0.2 / (1 + 10 * r) ** 0.75 if decay else cosine
        assert sorted(rates) == pytest.approx([expected], rel=1e-6)
