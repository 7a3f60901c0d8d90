"""MDFNet's learning rate at every site, what stays there from round to round, its masks and its reconstruction."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny import MLP, domains, federation, start_of, step_on

from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Site
from fedshift.methods.federated.mdfnet import MDFNet, _Halves
from fedshift.methods.masks import Mask
from fedshift.weights import Weights


@pytest.mark.parametrize(
    ("decay", "keeps"), [(True, True), (True, False), (False, True), (False, False), ("unlabelled", True)]
)
def test_the_rate_of_each_round(decay: Any, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds of r = 0, ½, 1 and half a cosine over the work done, for all parameters alike; momentum that a site
    keeps does not bring back the rate at which it was kept.
    """
    used: list[tuple[int, float, set[float], str]] = []
    plain = Site.minimise

    def watched(self: Site, *arguments: Any, optimizers: Any = None, **options: Any) -> float:
        (optimizer,) = optimizers
        rates = {group["lr"] for group in optimizer.param_groups}
        used.append((self.envelope.round, self.envelope.progress, rates, self.role))
        return plain(self, *arguments, optimizers=optimizers, **options)

    monkeypatch.setattr(Site, "minimise", watched)
    method, found = MDFNet(decay=decay, keep_momentum=keeps), domains(MLP, {"north": 16, "south": 9})
    schedule: dict[str, Any] = {"lr": 0.2, "lr_schedule": "cosine", "lr_end": 0.02, "momentum": 0.9}
    where = federation(method, found, MLP, rounds=3, budget=6, **schedule)
    state = method.start(where, start_of(method, found, MLP))
    for _ in range(3):
        state = step_on(method, where, state)
    assert len(used) == 9
    assert isinstance(where, LocalFederation)
    assert all(("optimizer" in runner.site.memory) == keeps for runner in where._runners.values())
    assert len({progress for _, progress, _, _ in used}) > 2
    for number, progress, rates, role in used:
        r = (number - 1) / 2
        cosine = 0.02 + 0.18 * (1 + math.cos(math.pi * progress)) / 2
        expected = 0.2 / (1 + 10 * r) ** 0.75 if decay is True or (decay and role == "target") else cosine
        assert sorted(rates) == pytest.approx([expected], rel=1e-6)


def test_what_is_private_goes_on_from_round_to_round() -> None:
    """At a rate of nearly nothing a site keeps the decoder and the mask that it had."""
    method, found = MDFNet(), domains(MLP, {"north": 16, "south": 9})
    where = federation(method, found, MLP, rounds=3, lr=1e-9)
    state = step_on(method, where, method.start(where, start_of(method, found, MLP)))
    assert isinstance(where, LocalFederation)
    site = where._runners["south"].site
    marked = Weights({name: tensor + 0.25 for name, tensor in site.memory.weights("private").items()})
    site.memory["private"] = marked
    step_on(method, where, state)
    for name, tensor in site.memory.weights("private").items():
        torch.testing.assert_close(tensor, marked[name], atol=1e-6, rtol=0)


def test_a_hard_mask_is_open_from_even_odds_on() -> None:
    mask = Mask(5, hard=True).eval()
    mask.logits.data = torch.tensor([-2.0, -1e-6, 0.0, 0.3, 2.0])
    assert mask(torch.ones(2, 5)).tolist() == [[0, 0, 1, 1, 1]] * 2
    soft = Mask(5, hard=False).eval()
    soft.logits.data = mask.logits.data
    assert soft(torch.ones(1, 5))[0].tolist() == pytest.approx([0.119203, 0.5, 0.5, 0.574443, 0.880797], abs=1e-5)


@pytest.mark.parametrize("reading", ["mean", "sum"])
def test_the_reconstruction_is_a_mean_over_samples(reading: Any) -> None:
    """Five inputs a sample: the sum over entries is five times their mean, whatever the batch's size."""
    method = MDFNet(reconstruction=reading, interaction_weight=0.0)
    found = domains(MLP, {"north": 16, "south": 9})
    where = federation(method, found, MLP)
    assert isinstance(where, LocalFederation)
    halves = _Halves(method, where._runners["north"].site, start_of(method, found, MLP))
    halves.model.eval()
    halves.private.eval()
    for number in (1, 6):
        inputs = torch.randn(number, 5)
        embedding = halves.model.features[0](inputs)  # type: ignore[index]
        pair = [embedding * values.logits.sigmoid() for values in (halves.private.mask, halves.model.features[1])]  # type: ignore[index]
        rebuilt = halves.private.decoder(torch.cat(pair, 1))
        gaps = [(one - other).square().sum().item() for one, other in zip(rebuilt, inputs, strict=True)]
        _, common = halves(inputs)
        assert common.item() == pytest.approx(sum(gaps) / number / (5 if reading == "mean" else 1), rel=1e-5)
