"""MDFNet: a round against a plain one, what stays at a site, both readings of everything, collapse and lost classes."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lost import site_of
from tiny import CNN, MLP, bytes_of, domains, evaluated, federation, run, start_of, step_on
from torch import Tensor
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.federation.site import Batch, Envelope
from fedshift.methods.federated.mdfnet import MDFNet, _Halves
from fedshift.methods.masks import Mask
from fedshift.weights import Weights

SIZES = {"north": 16, "south": 9}


def sites(method: MDFNet, **options: Any) -> tuple[Any, Weights]:
    found = domains(MLP, SIZES)
    return federation(method, found, MLP, **options), start_of(method, found, MLP)


def test_several_unlabelled_sites_share_alike() -> None:
    found = domains(MLP, {"north": 16, "south": 9, "east": 12, "west": 8})
    roles: Any = {"south": "target", "east": "target", "west": "target"}
    method = MDFNet()
    where = federation(method, found, MLP, roles=roles, rounds=2)
    assert len(where.targets) == 3
    state = method.start(where, start_of(method, found, MLP))
    for _ in range(2):
        state = step_on(method, where, state)
    shares = state.report["aggregation_weights"]
    assert shares == pytest.approx({"north": 0.500045, "south": 0.166652, "east": 0.166652, "west": 0.166652}, abs=1e-6)
    sent = {way: sum(kinds.values()) for way, kinds in where.ledger.total.items()}
    foretold = bytes_of(method, where, MLP, found=found, roles=roles)
    assert sent == {"up": foretold.up, "down": foretold.down}
    # With a threshold they may wait, and what they send is foretold as if they did not.
    waiting = bytes_of(MDFNet(readiness=1e-9), where, MLP, found=found, roles=roles)
    assert sent == {"up": waiting.up, "down": waiting.down}


# Masks ------------------------------------------------------------------------------------------------------------


def test_masks_are_drawn_in_training_and_certain_in_evaluation() -> None:
    torch.manual_seed(0)
    mask = Mask(6, hard=False)
    assert ((mask.logits >= 0) & (mask.logits < 1)).all()
    ones = torch.ones(5, 6)
    assert set(mask.train()(ones).detach().unique().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(mask.eval()(ones), mask.logits.sigmoid().expand(5, 6))
    hard = Mask(3, hard=True).eval()
    hard.logits.data = torch.tensor([-0.1, 0.0, 2.0])
    assert hard(ones[:, :3]).tolist() == [[0.0, 1.0, 1.0]] * 5


def test_a_mask_that_is_not_drawn_is_its_probabilities_in_training_too() -> None:
    """σ(ln 3) = 3/4 and σ(0) = 1/2; its gradient is that of σ: p(1 − p)."""
    mask = Mask(2, hard=False, drawn=False).train()
    mask.logits.data = torch.tensor([math.log(3), 0.0])
    masked = mask(torch.ones(4, 2))
    torch.testing.assert_close(masked.detach(), torch.tensor([0.75, 0.5]).expand(4, 2))
    masked.sum().backward()
    torch.testing.assert_close(mask.logits.grad, torch.tensor([4 * 3 / 16, 4 * 1 / 4]))


@pytest.mark.parametrize("where", ["embedding", "inputs"])
def test_draw_reaches_the_common_and_the_private_mask(where: Any) -> None:
    for draw in (True, False):
        _, halves, _ = common(MDFNet(mask=where, draw=draw))
        for mask in (halves._invariant, halves.private.mask):
            ones = torch.ones(6, len(mask.logits))
            assert (len(mask.train()(ones).unique(dim=0)) > 1) == draw


def test_masked_inputs_encode_twice_and_need_a_linear_layer() -> None:
    method = MDFNet(mask="inputs")
    start = start_of(method, domains(MLP, SIZES), MLP)
    assert start["features.mask.logits"].shape == (5,)
    state, _ = run(method, domains(MLP, SIZES), MLP)
    assert state.weights != start
    assert evaluated(method, state.weights, domains(MLP, SIZES), MLP)(torch.zeros(2, 5)).shape == (2, 3)
    with pytest.raises(UserError, match=r"mdfnet\.mask: inputs"):
        start_of(method, domains(CNN), CNN)


def common(method: MDFNet) -> tuple[Tensor, _Halves, Batch]:
    site = site_of(sites(method)[0], "north")
    site.begin(Envelope(1, 1, 0.0, 60))
    halves = _Halves(method, site, start_of(method, domains(MLP, SIZES), MLP))
    batch = next(site.batches())
    torch.manual_seed(1)
    return halves(batch.inputs)[1], halves, batch


@pytest.mark.parametrize("reading", ["probabilities", "features", "literal"])
def test_readings_of_the_interaction(reading: Any) -> None:
    only = {"interaction": reading, "reconstruction_weight": 0}
    found, halves, batch = common(MDFNet(**only))
    torch.manual_seed(1)
    g = halves._encoder(batch.inputs)
    invariant, specific = halves._invariant(g), halves.private.mask(g)
    if reading == "probabilities":
        specific, invariant = halves.private.mask.logits.sigmoid(), halves._invariant.logits.sigmoid()
        assert 0 < found < 1
    if reading == "features":
        specific, invariant = specific.sigmoid(), invariant.sigmoid()
    whole = (specific * invariant).sum(-1) / (specific + invariant - specific * invariant).sum(-1)
    torch.testing.assert_close(found, whole.mean(), atol=1e-5, rtol=1e-5)
    twice, *_ = common(MDFNet(**only, interaction_weight=2))
    torch.testing.assert_close(twice, 2 * found)


def test_a_class_that_k_means_loses_and_a_site_with_one_sample() -> None:
    """The unlabelled site predicts one class alone: the others take no part in the round, and nothing breaks."""
    method = MDFNet()
    found = domains(MLP, SIZES)
    where = federation(method, found, MLP)
    start = dict(start_of(method, found, MLP))
    start["classifier.bias"] = torch.tensor([50.0, 0.0, 0.0])
    site = site_of(where, "target")
    site.begin(Envelope(1, 1, 0.0, 60))
    labels = method._pseudo_labels(site, copy.deepcopy(_Halves(method, site, Weights(start)).model))
    assert labels.unique().tolist() == [0]
    state, _ = run(method, domains(MLP, {"one": 1, "two": 2}), MLP)
    state.weights.check_finite("a single sample")


def test_pseudo_labels_are_those_of_clusters_and_not_the_predictions() -> None:
    """Two directions of features; one sample of the first is predicted to be of the second class."""
    points = torch.tensor([[3.0, 0.1], [2.0, 0.0], [4.0, -0.2], [2.5, 0.2], [0.1, 3.0], [0.0, 2.0], [-0.2, 5.0]])
    predicted = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    model: Any = SimpleNamespace(
        features=lambda inputs: inputs,
        classifier=lambda _: functional.one_hot(predicted, 2).float(),
        eval=int,
        train=int,
    )
    site: Any = SimpleNamespace(classes=2, all_batches=lambda: [SimpleNamespace(inputs=points)])
    assert MDFNet()._pseudo_labels(site, model).tolist() == [0, 0, 0, 0, 1, 1, 1]
