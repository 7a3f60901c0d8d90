"""COPA over several mini-batches: the classifiers that a site is lent stay as they are while its own moves."""

from __future__ import annotations

import pytest
import torch
from test_copa import everything, head, mlp, short
from tiny import MLP, domains, federation, start_of, step_on


def test_lent_classifiers_stand_still_within_a_round() -> None:
    """Three steps on the full batch: with a foreign classifier that moves, the second step would be another."""
    method, found = short(local_epochs=3), domains(MLP, {"b": 8, "a": 8})
    where = federation(method, found, MLP, momentum=0.0, lr=0.4)
    start = method.start(where, start_of(method, found, MLP))
    state = step_on(method, where, start)
    trained = {}
    for number, name in enumerate("ab"):
        inputs, labels = everything(where, name)
        values = {key: tensor.clone() for key, tensor in start.weights.items()}
        moving = [key for key in values if key.startswith(("features", f"classifier.heads.{number}."))]
        losses = []
        for _ in range(3):
            values = {key: tensor.detach().requires_grad_(key in moving) for key, tensor in values.items()}
            found_features = mlp(values, inputs)
            loss = sum(-head(values, k, found_features).log_softmax(1)[torch.arange(8), labels].mean() for k in (0, 1))
            losses.append(loss.item())  # type: ignore[union-attr]
            slopes = torch.autograd.grad(loss, [values[key] for key in moving])  # type: ignore[arg-type]
            values |= {key: values[key] - 0.4 * slope for key, slope in zip(moving, slopes, strict=True)}
        assert state.report["losses"][name] == pytest.approx(sum(losses) / 3, abs=1e-5)
        trained[name] = {key: tensor.detach() for key, tensor in values.items()}
    for key, tensor in state.weights.items():
        parts = [trained[name][key] for name in "ab"]
        expected = sum(parts) / 2 if key.startswith("features") else parts[int(key.split(".")[2])]  # type: ignore[operator]
        torch.testing.assert_close(tensor, expected, atol=3e-6, rtol=1e-5)


def test_classifiers_begin_differently_and_by_the_seed() -> None:
    """Each source's own, drawn like the network's: no two alike, and others for another seed of the experiment."""
    found = domains(MLP, {"b": 8, "a": 8, "c": 8})
    begun = [start_of(short(), found, MLP, seed) for seed in (3, 3, 4)]
    heads = [[start[f"classifier.heads.{number}.weight"] for number in range(3)] for start in begun]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(heads[0][first], heads[0][second])
    for number in range(3):
        assert torch.equal(heads[0][number], heads[1][number])
        assert not torch.equal(heads[0][number], heads[2][number])
        # As PyTorch draws them: uniform within 1/√6.
        assert heads[0][number].abs().max() <= 6**-0.5
