"""MDFNet: a round against a plain one, what stays at a site, both readings of everything, collapse and lost classes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import CNN, MLP, bytes_of, domains, evaluated, federation, run, start_of, step_on
from torch import Tensor, nn
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.functional.clustering import spherical_kmeans
from fedshift.methods.federated.mdfnet import MDFNet, _Halves
from fedshift.methods.masks import Mask
from fedshift.models import registry as models
from fedshift.models.payload import payload
from fedshift.weights import Weights

SIZES = {"north": 16, "south": 9}


def site_of(where: Any, name: str) -> Site:
    assert isinstance(where, LocalFederation)
    site: Site = where._runners[name].site
    return site


def sites(method: MDFNet, **options: Any) -> tuple[Any, Weights]:
    found = domains(MLP, SIZES)
    return federation(method, found, MLP, **options), start_of(method, found, MLP)


# A round ----------------------------------------------------------------------------------------------------------


def undecided(method: MDFNet, where: Any, start: Weights) -> Weights:
    """``start`` with a bias by which the target's samples are of different classes to it, not all of one."""
    site = site_of(where, "target")
    encoder, mask = _Halves(method, site, start).model.features
    with torch.no_grad():
        middle = torch.cat([encoder(batch.inputs) * mask.logits.sigmoid() for batch in site.all_batches()]).mean(0)
    return Weights({**start, "classifier.bias": -(start["classifier.weight"] @ middle)})


def plain_round(method: MDFNet, where: Any, start: Weights, r: float, eta: float) -> dict[str, Tensor]:
    """The same round written out: hard masks from the exchange's draws, losses from formulas, SGD by hand."""
    models_of: dict[str, dict[str, Tensor]] = {}
    for number, name in enumerate(("north", "south", "target")):
        site = site_of(where, name)
        # Both kinds of site have an exchange of their own.
        site.begin(Envelope(1 if number < 2 else 2, 1, 0.0, 60))
        halves = _Halves(method, site, start)
        model, private = halves.model, halves.private
        parameters = {**dict(model.named_parameters()), **{f"own.{n}": p for n, p in private.named_parameters()}}
        encoder, mask = model.features
        labels = None
        if name == "target":
            with torch.no_grad():
                inputs = torch.cat([batch.inputs for batch in site.all_batches()])
                g = encoder(inputs) * mask.logits.sigmoid()
                labels = spherical_kmeans(g, model.classifier(g).argmax(1), 3).labels
                assert len(labels.unique()) > 1, "labels of other samples would not show"
        for batch in site.batches():
            f = batch.inputs
            g = encoder(f)
            hard = []
            for logits in (mask.logits, private.mask.logits):
                p = logits.sigmoid()
                hard.append((torch.rand(g.shape) < p).float() + p - p.detach())
            invariant, specific = g * hard[0], g * hard[1]
            rebuilt = private.decoder[2](private.decoder[0](torch.cat([specific, invariant], 1)).clamp(min=0))
            ps, pi = private.mask.logits.sigmoid(), mask.logits.sigmoid()
            common = (rebuilt - f).square().mean() + ((ps * pi).sum() + 1e-6) / ((ps + pi - ps * pi).sum() + 1e-6)
            scores = model.classifier(invariant)
            if labels is None:
                loss = common + functional.cross_entropy(scores, batch.targets)
            else:
                p = scores.softmax(1)
                keep = (p.detach().max(1).values >= method.threshold).float()
                own = functional.cross_entropy(scores, labels[batch.rows], reduction="none")
                loss = common + (keep * own).mean() - (p * (p + 1e-5).log()).sum(1).mean()
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            rate = 0.05 / (1 + 10 * r) ** 0.75
            with torch.no_grad():
                for parameter, gradient in zip(parameters.values(), gradients, strict=True):
                    parameter -= rate * gradient
        models_of[name] = {key: value.detach().clone() for key, value in model.state_dict().items()}
    shares = {"north": (1 - eta) / 2, "south": (1 - eta) / 2, "target": eta}
    return {key: sum(shares[name] * models_of[name][key] for name in shares) for key in start}  # type: ignore[misc]


@pytest.mark.parametrize(("done", "reading", "r"), [(0, "progress", 0.0), (2, "progress", 0.5), (1, "round", 1.0)])
def test_a_round_against_a_plain_one(done: int, reading: Any, r: float) -> None:
    method = MDFNet(r=reading, threshold=0.35)
    where, start = sites(method, rounds=5, momentum=0.0)
    start = undecided(method, sites(method)[0], start)
    state = replace(method.start(where, start), round=done)
    found = step_on(method, where, state)
    eta = {0.0: 0.0, 0.5: 0.493307, 1.0: 0.4999546}[r]
    expected = plain_round(method, sites(method, momentum=0.0)[0], start, r, eta)
    for key, tensor in found.weights.items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=1e-4)
    shares = found.report["aggregation_weights"]
    assert shares == pytest.approx({"north": (1 - eta) / 2, "south": (1 - eta) / 2, "target": eta}, abs=1e-6)


def test_unlabelled_sites_do_not_count_in_the_first_round_and_half_at_the_end() -> None:
    method = MDFNet()
    where, start = sites(method, rounds=3)
    state = method.start(where, start)
    weights = []
    for _ in range(3):
        state = step_on(method, where, state)
        weights.append(state.report["aggregation_weights"]["target"])
    assert weights == pytest.approx([0, 0.493307, 0.499955], abs=1e-6)
    _, later = run(method, domains(MLP, SIZES), MLP, rounds=1)  # a single round: r stays 0
    assert later.rounds == 1


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


# What travels and what stays --------------------------------------------------------------------------------------


def test_decoder_and_specific_mask_stay_and_the_payload_is_that_of_the_model() -> None:
    method = MDFNet()
    state, where = run(method, domains(MLP, SIZES), MLP)
    assert {name.split(".")[1] for name in state.weights if name.startswith("features")} == {"encoder", "mask"}
    for name in ("north", "south", "target"):
        kept = site_of(where, name).memory.weights("private")
        assert {key.split(".")[0] for key in kept} == {"mask", "decoder"}
        assert not set(kept) & set(state.weights)
    first, second = (site_of(where, name).memory.weights("private") for name in ("north", "south"))
    assert first != second
    # 4·(2048·512 + 512 + 512·128 + 128 + 128C + C + d): encoder, classifier and the invariant mask, d = 128.
    for classes, size in ((12, 4_465_712), (65, 4_493_060)):
        network = models.build(models.parse({"name": "mlp", "hidden": [512, 128]}), (2048,), classes, 0)
        assert payload(method.adapt_network(network, 1)).bytes == size
    private = _Halves(method, site_of(sites(method)[0], "north"), start_of(method, domains(MLP, SIZES), MLP)).private
    assert sum(p.numel() for p in private.decoder.parameters()) == 12 * 512 + 512 + 512 * 5 + 5
    decoder = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 2048))
    assert sum(p.numel() for p in decoder.parameters()) == 1_182_208


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


# Readings ---------------------------------------------------------------------------------------------------------


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


def test_the_sum_of_the_reconstruction_is_the_mean_times_the_width() -> None:
    mean, *_ = common(MDFNet(interaction_weight=0))
    total, *_ = common(MDFNet(interaction_weight=0, reconstruction="sum"))
    torch.testing.assert_close(total, 5 * mean)


# Bad luck ---------------------------------------------------------------------------------------------------------


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


def test_no_unlabelled_site_is_a_mistake() -> None:
    method = MDFNet()
    found = domains(MLP, SIZES)
    where = federation(method, found, MLP, roles={"nobody": "target"})
    assert not where.targets
    with pytest.raises(UserError, match="2 labelled and 0 unlabelled"):
        step_on(method, where, method.start(where, start_of(method, found, MLP)))


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
