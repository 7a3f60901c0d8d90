"""DMG, DGER, Epi-FCR, MASF, MetaReg and Feature-Critic: a step by hand, and what each term may and may not move."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from pooled_step import LEFT, assert_same, descend, domain_batches, mixed_batch, pool, step, trainable
from pooling import LR, moved
from tiny import CNN, MLP, NORMED
from torch import Tensor

from fedshift.federation.site import Batch, Envelope
from fedshift.methods import registry
from fedshift.methods.pooled import dger, epi_fcr, metareg
from fedshift.methods.pooled.dmg import DMG, MaskedClassifier
from fedshift.methods.pooled.feature_critic import FeatureCritic, critic_network
from fedshift.methods.pooled.masf import MASF, metric_network
from fedshift.models.network import Network

BOTH = pytest.mark.parametrize("network", [CNN, MLP], ids=["images", "vectors"])
Gradients = tuple[Tensor, ...]


@pytest.mark.parametrize(
    "options",
    [
        {"name": "epi_fcr", "warm_up": 1.0},
        {"name": "feature_critic", "warm_up": 1.0},
        {"name": "dger", "agreement_weight": 0.0, "reversal": 0.0, "entropy_reversal": 0.0},
        {"name": "metareg", "meta_share": 0.0},  # φ is 0 where stage 1 was left out
    ],
    ids=lambda options: str(options["name"]),
)
def test_the_published_network_takes_deepall_s_step_where_its_terms_are_off(options: dict[str, Any]) -> None:
    """On a batch of every domain: a mean over domains of equal size, or over all samples, is the same loss."""
    site, weights, model = pool(registry.parse(options))
    if options["name"] == "metareg":  # stage 2 begins with a fresh classifier
        parts = registry.parse(options).parts(site, lambda: metareg.Parts(model, 3))  # type: ignore[attr-defined]
        model.classifier.load_state_dict(parts.fresh.state_dict())
    batches = domain_batches(site)
    assert len({len(batch.inputs) for batch in batches}) == 1
    descend(
        torch.stack([F.cross_entropy(model(batch.inputs), batch.targets) for batch in batches]).mean(), trainable(model)
    )
    assert_same(step(registry.parse(options), site, weights, mini_batches=3).weights, model)


# DMG ------------------------------------------------------------------------------------------------------------------


@BOTH
def test_a_step_of_dmg_by_hand(network: dict[str, object]) -> None:
    method = DMG(overlap_weight=0.7)
    site, weights, model = pool(method, network)
    masked = cast(MaskedClassifier, model.classifier)
    batch = mixed_batch(site)
    torch.manual_seed(3)
    features = model.features(batch.inputs)
    draws = torch.rand(features.shape)
    rows = []
    for feature, draw, domain in zip(features, draws, batch.domains.tolist(), strict=True):
        chance = masked.masks[domain].sigmoid()
        rows.append(feature * ((draw < chance).float() + chance - chance.detach()))
    loss = F.cross_entropy(masked.classifier(torch.stack(rows)), batch.targets)
    chances = masked.masks.sigmoid()
    pairs = []
    for one, other in itertools.combinations(chances, 2):
        both = (one * other).sum()
        pairs.append((both + 1e-6) / (one.sum() + other.sum() - both + 1e-6))
    loss = loss + 0.7 * sum(pairs) / 3
    descend(loss, trainable(model))
    torch.manual_seed(3)
    update = step(method, site, weights)
    assert update.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same(update.weights, model)


def test_masks_begin_uniformly_between_0_and_1_and_each_with_its_own() -> None:
    """As the authors' code, which draws the logits so."""
    _, _, model = pool(DMG(), {**MLP, "hidden": [400]})
    masks = cast(MaskedClassifier, model.classifier).masks.detach()
    assert masks.shape == (3, 400)
    assert masks.min() >= 0
    assert masks.max() < 1
    for mask in masks:
        assert mask.mean().item() == pytest.approx(0.5, abs=0.07)
        assert mask.var().item() == pytest.approx(1 / 12, rel=0.2)
    assert not torch.equal(masks[0], masks[1])


def test_an_unknown_site_gets_the_mean_of_all_masks_predictions() -> None:
    _, _, model = pool(DMG())
    masked = cast(MaskedClassifier, model.classifier)
    features = torch.randn(4, model.embedding_size)
    said = [masked.classifier(features * mask.sigmoid()).softmax(1) for mask in masked.masks]
    torch.testing.assert_close(masked(features).softmax(1), sum(said) / 3)


# DGER -----------------------------------------------------------------------------------------------------------------


def test_the_heads_learn_at_a_rate_of_their_own() -> None:
    """Ten times the rate, ten times the step: of T_i, which step on F's features alone."""
    moves = {}
    for rate in (1e-9, 0.1, 1.0):
        method = dger.DGER(heads_rate=rate, warm_up=0.0, hidden=())
        site, weights, _ = pool(method)
        step(method, site, weights, mini_batches=3)
        moves[rate] = site.memory.weights("parts")["own.0.0.weight"]
    moves = {rate: after - moves[1e-9] for rate, after in moves.items()}
    torch.testing.assert_close(moves[1.0], 10 * moves[0.1], atol=1e-6, rtol=1e-3)


def test_the_other_terms_are_weak_at_first() -> None:
    losses = {}
    for share in (0.0, 1.0):
        method = dger.DGER(warm_up=share, hidden=(), heads_rate=1e-6)  # so that L_er is of the same heads
        site, weights, model = pool(method)
        losses[share] = step(method, site, weights, mini_batches=3).loss
        batches = domain_batches(site)
    inputs, labels = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
    plain = F.cross_entropy(model(inputs), labels).item()
    assert losses[1.0] - plain == pytest.approx(0.01 * (losses[0.0] - plain), rel=1e-3)


def test_heads_begin_small_and_drop_out_before_their_last_layer() -> None:
    """Uniform within 0.1 · √(6 / (inputs + outputs))."""
    head = dger.head_of(30, (50, 40), 3)
    kinds = [type(layer).__name__ for layer in head]
    assert kinds == ["Linear", "ReLU", "Linear", "ReLU", "Dropout", "Linear"]
    for layer in head:
        if isinstance(layer, torch.nn.Linear):
            bound = 0.1 * (6 / (layer.in_features + layer.out_features)) ** 0.5
            assert 0.7 * bound < layer.weight.abs().max() <= bound
            assert not layer.bias.any()


@pytest.mark.parametrize(("name", "memory"), [("dger", "heads"), ("feature_critic", "critic")])
def test_momentum_of_what_trains_beside_the_model_is_kept(name: str, memory: str) -> None:
    after = []
    for forgotten in (False, True):
        method = registry.parse({"name": name, "warm_up": 0.0})
        site, weights, _ = pool(method, momentum=0.9, reset_optimizer_each_round=False)
        first = step(method, site, weights, mini_batches=3)
        site.begin(Envelope(2, 2, 0.5, LEFT))
        if forgotten:
            del site.memory[memory]
        step(method, site, first.weights, mini_batches=3)
        after.append(site.memory.weights("parts"))
    assert moved(*after)


# Epi-FCR --------------------------------------------------------------------------------------------------------------


def normed(features: torch.nn.Module) -> torch.nn.BatchNorm1d:
    """The first BatchNorm."""
    return next(module for module in features.modules() if isinstance(module, torch.nn.BatchNorm1d))


@pytest.mark.parametrize("frozen", [False, True])
def test_domain_networks_begin_with_the_features_of_the_experiment(frozen: bool) -> None:
    """And with classifiers of their own. Trained weights and statistics are not thrown away, frozen ones included."""
    _, _, model = pool(epi_fcr.EpiFCR(), NORMED)
    model.features.requires_grad_(not frozen)
    normed(model.features).running_mean.fill_(5.0)  # type: ignore[union-attr]
    parts = epi_fcr.Parts(model, 3)
    for j in range(3):
        assert_same(parts.of(j).features.state_dict(), model.features)
        assert not torch.equal(parts.of(j).classifier.weight, model.classifier.weight)  # type: ignore[arg-type]
        assert all(parameter.requires_grad is not frozen for parameter in parts.of(j).features.parameters())
    with torch.no_grad():
        next(parts.of(0).parameters()).fill_(0.0)
    assert next(model.parameters()).abs().max() > 0, "copies"


def test_partners_answer_with_their_running_statistics() -> None:
    """And these move with their own training alone, once in a step."""
    method = epi_fcr.EpiFCR(warm_up=0.0, classifier_weight=1.0)
    site, _, model = pool(method, NORMED)
    parts = epi_fcr.Parts(model, 3).train()
    for j in range(3):
        normed(parts.of(j).features).running_mean.fill_(3.0)  # type: ignore[union-attr]
    batches = domain_batches(site)
    features = [model.features(batch.inputs) for batch in batches]
    labels = [batch.targets for batch in batches]
    before = {name: tensor.clone() for name, tensor in parts.state_dict().items()}
    found = method.published_loss(model, parts, batches, (0, 2))
    assert not moved(before, parts.state_dict())
    assert parts.training
    partner = parts.of(2).eval()
    terms = [F.cross_entropy(model.classifier(f), y) + 0.1 * F.cross_entropy(parts.random(f), y)
             for f, y in zip(features, labels, strict=True)]  # fmt: skip
    terms += [2.0 * F.cross_entropy(partner.classifier(features[0]), labels[0])]
    terms += [F.cross_entropy(model.classifier(partner.features(batches[0].inputs)), labels[0])]
    assert found.item() == pytest.approx(sum(term.item() for term in terms) / 3, rel=1e-5)


def test_a_pair_is_of_two_domains_and_every_pair_is_drawn() -> None:
    draws = torch.Generator().manual_seed(0)
    assert {epi_fcr.drawn_pair(3, draws) for _ in range(200)} == set(itertools.permutations(range(3), 2))
    assert epi_fcr.drawn_pair(1, draws) == (0, 0)


def test_the_random_head_never_trains_and_the_domain_networks_do() -> None:
    method = epi_fcr.EpiFCR(warm_up=0.0)
    site, weights, model = pool(method)
    before = method.parts(site, lambda: epi_fcr.Parts(model, 3)).state_dict()
    step(method, site, weights, mini_batches=3)
    changed = moved(before, site.memory.weights("parts"))
    assert not {name for name in changed if name.startswith("random")}
    assert {name.split(".")[1] for name in changed} == {"0", "1", "2"}


# MASF -----------------------------------------------------------------------------------------------------------------


@BOTH
def test_a_step_of_masf_by_hand(network: dict[str, object]) -> None:
    """A second network takes the inner step; its gradient of the meta losses is added to the task's.

    Whole batches and no bound on the meta gradient: the authors' own numbers are in tests/references.
    """
    method = MASF(
        inner_rate=2.0, inner_clip=0.05, global_weight=20.0, local_weight=0.1, margin=2.0, hidden=6, embedding=4
    )
    site, weights, model = pool(method, network)
    metric = method.parts(site, lambda: metric_network(model.embedding_size, 6, 4))
    batches = domain_batches(site)
    test = int(torch.randint(3, (), generator=site.generator_for("episodes")))
    train = (
        sum(
            F.cross_entropy(model(batch.inputs), batch.targets)
            for number, batch in enumerate(batches)
            if number != test
        )
        / 2
    )  # type: ignore[operator]
    by_task = torch.autograd.grad(train, trainable(model))
    ahead = site.model(weights)
    with torch.no_grad():
        for parameter, gradient in zip(ahead.parameters(), by_task, strict=True):
            parameter -= 2.0 * gradient * min(1.0, 0.05 / float(gradient.norm()))
    features = [ahead.features(batch.inputs) for batch in batches]
    confusions = []
    for feature, batch in zip(features, batches, strict=True):
        logits = ahead.classifier(feature)
        confusions.append({int(c): (logits[batch.targets == c].mean(0) / 2).softmax(0) for c in batch.targets.unique()})
    divergences = []
    for number, one in enumerate(confusions):
        if number != test:
            other = confusions[test]
            found = [
                ((one[c] - other[c]) * (one[c].log() - other[c].log())).sum() / 2 for c in one.keys() & other.keys()
            ]
            divergences.append(sum(found, torch.zeros(())) / model.classes)
    points, every = metric(torch.cat(features)), torch.cat([batch.targets for batch in batches])
    triplets = []
    for a, p in itertools.permutations(range(len(points)), 2):
        if every[a] == every[p]:
            own = (points[a] - points[p]).square().sum()
            others = [(points[a] - points[n]).square().sum() for n in range(len(points)) if every[n] != every[a]]
            farther = [distance for distance in others if distance > own]
            triplets.append((own - (min(farther) if farther else max(others)) + 2.0).clamp_min(0))
    meta = 20.0 * sum(divergences) / 2 + 0.1 * torch.stack(triplets).mean()
    by_meta = torch.autograd.grad(meta, [*trainable(ahead), *trainable(metric)], allow_unused=True)
    with torch.no_grad():
        for parameter, one, other in zip(trainable(model), by_task, by_meta, strict=False):
            parameter -= LR * (one + other)
        for parameter, gradient in zip(trainable(metric), by_meta[len(by_task) :], strict=True):
            parameter -= LR * (0 if gradient is None else gradient)
    update = step(method, site, weights, mini_batches=3)
    assert update.loss == pytest.approx((train + meta).item(), rel=1e-4)  # type: ignore[union-attr]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(update.weights[name], tensor, atol=2e-5, rtol=1e-3)


def test_masf_s_inner_step_has_the_experiment_s_rate_by_default() -> None:
    """And it is taken: without one the meta losses are other numbers."""
    after = []
    for rate in (None, 0.5, 1e-6):
        method = MASF(inner_rate=rate, global_weight=50.0, hidden=6, embedding=4)
        site, weights, _ = pool(method, MLP, lr=0.5)
        after.append(step(method, site, weights, mini_batches=3))
    assert not moved(after[0].weights, after[1].weights)
    assert abs(after[0].loss - after[2].loss) > 1e-3  # type: ignore[operator]


def test_masf_s_meta_test_domain_is_in_no_task_loss() -> None:
    method = MASF(global_weight=0.0, local_weight=0.0)
    site, weights, model = pool(method, MLP)
    batches = domain_batches(site)
    test = int(torch.randint(3, (), generator=site.generator_for("episodes")))
    train = [batch for number, batch in enumerate(batches) if number != test]
    descend(
        F.cross_entropy(model(torch.cat([b.inputs for b in train])), torch.cat([b.targets for b in train])),
        trainable(model),
    )
    assert_same(step(method, site, weights, mini_batches=3).weights, model)


def test_masf_s_virtual_steps_leave_running_statistics_alone() -> None:
    """The meta-train batches move them once each, as they pass at θ."""
    method = MASF(inner_rate=1.0, global_weight=5.0, hidden=6, embedding=4)
    site, weights, model = pool(method, NORMED)
    batches = domain_batches(site)
    test = int(torch.randint(3, (), generator=site.generator_for("episodes")))
    for number, batch in enumerate(batches):
        if number != test:
            model(batch.inputs)
    found = step(method, site, weights, mini_batches=3).weights
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(found[name], buffer)


def test_masf_clips_the_meta_gradient_of_the_network_alone() -> None:
    """With a bound of next to nothing the network takes the task's step, and the metric network its own."""
    after = []
    for meta_clip in (1e-9, None):
        method = MASF(meta_clip=meta_clip, local_weight=1.0, hidden=6, embedding=4)
        site, weights, _ = pool(method, MLP)
        after.append((step(method, site, weights, mini_batches=3).weights, site.memory.weights("parts")))
    plain = MASF(global_weight=0.0, local_weight=0.0, hidden=6, embedding=4)
    site, weights, _ = pool(plain, MLP)
    expected = step(plain, site, weights, mini_batches=3).weights
    for name, tensor in expected.items():
        torch.testing.assert_close(after[0][0][name], tensor, atol=1e-6, rtol=0)
    assert moved(after[0][0], after[1][0])
    assert not moved(after[0][1], after[1][1])


def test_masf_s_metric_network_is_leaky_behind_both_layers() -> None:
    """As the authors': 0.2 · 0.2 of what is negative on its way."""
    network = metric_network(1, 1, 1)
    network.load_state_dict(
        {name: torch.full_like(p, float("weight" in name)) for name, p in network.named_parameters()}
    )
    torch.testing.assert_close(network(torch.tensor([[-1.0], [1.0]])), torch.tensor([[-0.04], [1.0]]))
    default = MASF()
    assert [tuple(p.shape) for p in metric_network(8, default.hidden, default.embedding).parameters()] == [
        (1024, 8), (1024,), (256, 1024), (256,)
    ]  # fmt: skip


# MetaReg --------------------------------------------------------------------------------------------------------------


def test_phi_learns_through_the_inner_steps() -> None:
    """The derivative of the episode's loss by φ, against differences in float64."""
    draws = torch.Generator().manual_seed(0)
    task = torch.nn.Linear(4, 3).double()
    *near, far = (
        (torch.randn(6, 4, dtype=torch.float64, generator=draws), torch.randint(3, (6,), generator=draws))
        for _ in range(3)
    )
    phi = torch.rand(3, 4, dtype=torch.float64, generator=draws).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda p: metareg.episode_loss(F.cross_entropy, task, [p], near, far, 0.2), phi)
    assert all(parameter.grad is None for parameter in task.parameters())


def gradient_of_phi_by_the_paper(
    theta: Tensor, phi: Tensor, inner: Sequence[tuple[Tensor, Tensor]], outer: tuple[Tensor, Tensor], rate: float
) -> Tensor:
    """∇_φ L^b(θ̂) of Algorithm 1, without automatic differentiation, for a linear classifier.

    β_1 = θ_a, β_{i+1} = β_i − α_2 [∇L^a_i(β_i) + φ ⊗ sign(β_i)], each i with a mini-batch of its own, θ̂ = β_{l+1}. With
    v_{l+1} = ∇L^b(θ̂), v_i = (I − α_2 H_i) v_{i+1} and H_i the Hessian of L^a_i: the gradient is −α_2 Σ_i sign(β_i) ⊗
    v_{i+1}, since R_φ is linear between the signs' changes.

    Args:
        theta: θ_a, (C, d + 1), the bias in the last column.
        phi: φ, in the same shape.
        inner: Features (n, d) and labels of every inner step.
        outer: Those of domain b.
        rate: α_2.
    """

    def parts(beta: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Features with a 1, softmax, and gradient of the mean cross-entropy."""
        x = torch.cat([batch[0], torch.ones(len(batch[0]), 1, dtype=batch[0].dtype)], 1)
        p = (x @ beta.T).softmax(1)
        return x, p, (p - torch.eye(len(beta), dtype=p.dtype)[batch[1]]).T @ x / len(x)

    betas = [theta]
    for batch in inner:
        gradient = parts(betas[-1], batch)[2]
        betas.append(betas[-1] - rate * (gradient + phi * betas[-1].sign()))
    v = parts(betas[-1], outer)[2]
    found = torch.zeros_like(phi)
    for beta, batch in zip(reversed(betas[:-1]), reversed(inner), strict=True):
        found -= rate * beta.sign() * v
        x, p, _ = parts(beta, batch)
        moved = x @ v.T  # (n, C): how the logits move along v
        v = v - rate * (p * (moved - (p * moved).sum(1, keepdim=True))).T @ x / len(x)
    return found


def metareg_s_pool(
    network: dict[str, object], method: metareg.MetaReg, **options: Any
) -> tuple[Any, Any, Network, metareg.Parts]:
    """A pool whose φ is some way from 0, so that no bound is met."""
    site, weights, model = pool(method, network, batch_size=4, weight_decay=0.0, **options)
    parts = method.parts(site, lambda: metareg.Parts(model, 3))
    with torch.no_grad():
        for penalty in parts.penalties:
            penalty.copy_(0.3 + 0.2 * torch.rand(penalty.shape, generator=torch.Generator().manual_seed(3)))
    site.memory["parts"] = site.weights_of(parts)
    return site, weights, model, parts


@pytest.mark.parametrize("network", [CNN, MLP, NORMED], ids=["images", "vectors", "normed"])
def test_a_step_of_metareg_by_the_paper(network: dict[str, object]) -> None:
    """Every domain's supervised step in turn, then φ's through three inner steps with a mini-batch each."""
    method = metareg.MetaReg(inner_steps=3, inner_rate=0.5, regulariser_rate=10.0)
    site, weights, model, parts = metareg_s_pool(network, method)
    pairs = list(itertools.permutations(range(3), 2))
    a, b = pairs[int(torch.randint(6, (), generator=site.generator_for("pairs")))]
    losses = []
    for task, batch in zip(parts.tasks, domain_batches(site), strict=True):
        losses.append(F.cross_entropy(task(model.features(batch.inputs)), batch.targets))
        descend(losses[-1], [*trainable(model.features), *trainable(task)])
    statistics = {name: buffer.clone() for name, buffer in model.features.named_buffers()}
    near, far = site.domain_stream(a, "episode"), site.domain_stream(b, "episode")
    *inner, outer = (
        (model.features(batch.inputs).detach().double(), batch.targets)
        for batch in (next(near), next(near), next(near), next(far))
    )
    theta = torch.cat([parts.tasks[a].weight, parts.tasks[a].bias[:, None]], 1).detach().double()  # type: ignore
    phi = parts.penalties[0].detach().double()
    whole = torch.cat([phi, torch.zeros(len(phi), 1, dtype=phi.dtype)], 1)
    expected = phi - 10.0 * LR * gradient_of_phi_by_the_paper(theta, whole, inner, outer, 0.5)[:, :-1]
    update = step(method, site, weights, mini_batches=3)
    after = site.memory.weights("parts")
    assert (expected - phi).abs().max() > 2e-3
    torch.testing.assert_close(after["penalties.0"].double(), expected, atol=1e-6, rtol=1e-6)
    for number, task in enumerate(parts.tasks):
        torch.testing.assert_close(after[f"tasks.{number}.weight"], task.weight)
    for name, parameter in model.features.named_parameters():
        torch.testing.assert_close(update.weights[f"features.{name}"], parameter)
    for name, buffer in statistics.items():
        torch.testing.assert_close(update.weights[f"features.{name}"], buffer)
    assert update.loss == pytest.approx(sum(loss.item() for loss in losses) / 3, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_phi_learns_at_its_own_rate_with_any_optimiser(optimizer: str) -> None:
    """A first step of Adam is the rate times a sign, whatever the gradient's length."""
    went = []
    for rate in (0.1, 1.0):
        method = metareg.MetaReg(regulariser_rate=rate)
        site, weights, _, parts = metareg_s_pool(MLP, method, optimizer=optimizer)
        step(method, site, weights, mini_batches=3)
        went.append((site.memory.weights("parts")["penalties.0"] - parts.penalties[0].detach()).abs().max().item())
    assert went[1] == pytest.approx(10 * went[0], rel=1e-2)


def test_phi_keeps_its_momentum() -> None:
    after = []
    for forgotten in (False, True):
        method = metareg.MetaReg(regulariser_rate=10.0)
        site, weights, _, _ = metareg_s_pool(MLP, method, momentum=0.9, reset_optimizer_each_round=False)
        first = step(method, site, weights, mini_batches=3)
        site.begin(Envelope(2, 2, 0.2, LEFT))
        if forgotten:
            del site.memory["regulariser"]
        step(method, site, first.weights, mini_batches=3)
        after.append(site.memory.weights("parts")["penalties.0"])
    assert not torch.equal(*after)


def test_the_first_stage_learns_phi_and_the_second_uses_it() -> None:
    """With momentum, which the second stage begins anew: its parameters are others."""
    method = metareg.MetaReg(meta_share=0.5, regulariser_rate=50.0)
    site, weights, model = pool(method, momentum=0.9, reset_optimizer_each_round=False)
    update = step(method, site, weights, mini_batches=3, steps=6)
    parts = method.parts(site, lambda: metareg.Parts(model, 3))
    assert (parts.penalties[0] >= 0).all()
    assert (parts.penalties[0] > 0).any()
    heads = torch.stack([task.weight for task in parts.tasks])  # type: ignore[misc]
    torch.testing.assert_close(update.weights["classifier.weight"], heads.mean(0))
    learnt = parts.penalties[0].detach().clone()
    site.begin(Envelope(2, 2, 0.5, LEFT))
    batches = domain_batches(site)
    model.load_state_dict(dict(update.weights))
    model.classifier.load_state_dict(parts.fresh.state_dict())
    inputs, labels = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
    loss = F.cross_entropy(model(inputs), labels) + (learnt * model.classifier.weight.abs()).sum()  # type: ignore
    begun = [parameter.detach().clone() for parameter in trainable(model)]
    descend(loss, trainable(model))
    later = step(method, site, update.weights, mini_batches=3)
    assert later.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same(later.weights, model)
    torch.testing.assert_close(site.memory.weights("parts")["penalties.0"], learnt)
    site.begin(Envelope(3, 3, 0.7, LEFT))
    # The next round goes on with this classifier and its momentum: stage 2 begins once.
    batches = domain_batches(site)
    inputs, labels = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
    loss = F.cross_entropy(model(inputs), labels) + (learnt * model.classifier.weight.abs()).sum()  # type: ignore
    slopes = torch.autograd.grad(loss, trainable(model))
    with torch.no_grad():
        for parameter, before, slope in zip(trainable(model), begun, slopes, strict=True):
            parameter += 0.9 * (parameter - before) - LR * slope
    again = step(method, site, later.weights, mini_batches=3)
    assert again.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same(again.weights, model)


def normed_classifier(width: int = 6, classes: int = 3) -> torch.nn.Sequential:
    """What a network of one's own may have: BatchNorm behind the features."""
    layers = torch.nn.Sequential(torch.nn.BatchNorm1d(width), torch.nn.Linear(width, classes))
    return layers.train()


def test_an_episode_of_metareg_moves_no_statistics_of_a_classifier() -> None:
    """T_a's inner steps and its test at b are thoughts. The batch itself normalises."""
    task, draws = normed_classifier(), torch.Generator().manual_seed(0)
    *near, far = ((5 + torch.randn(8, 6, generator=draws), torch.randint(3, (8,), generator=draws)) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    penalties = [torch.full_like(value, 0.1) for value in metareg.penalised_parameters(dict(task.named_parameters()))]
    found = metareg.episode_loss(F.cross_entropy, task, penalties, near, far, rate=0.0)
    assert not moved(before, task.state_dict())
    centred = (far[0] - far[0].mean(0)) / (far[0].var(0, correction=0) + 1e-5).sqrt()
    linear = cast(torch.nn.Linear, task[1])
    assert found.item() == pytest.approx(F.cross_entropy(linear(centred), far[1]).item(), rel=1e-5)


# Feature-Critic -------------------------------------------------------------------------------------------------------


def test_what_validates_moves_no_statistics_of_feature_critic_s_classifier() -> None:
    """They follow what trains, once a step."""
    site, _, model = pool(FeatureCritic(), MLP)
    model.classifier = normed_classifier(model.embedding_size, model.classes)
    critic = critic_network(model.embedding_size, 4)
    *train, test = domain_batches(site)
    inputs, labels = torch.cat([b.inputs for b in train]), torch.cat([b.targets for b in train])
    features = model.features(inputs)
    loss = F.cross_entropy(model.classifier(features), labels)
    FeatureCritic().step_with_critic(model, critic, features, loss, test, LR)
    statistics = normed(model.classifier)
    torch.testing.assert_close(statistics.running_mean, 0.1 * features.mean(0))
    assert statistics.num_batches_tracked == 1


@BOTH
def test_a_step_of_feature_critic_by_hand(network: dict[str, object]) -> None:
    """The critic's derivative by differences: its utility is computed again with each of two weights changed."""
    method = FeatureCritic(critic_weight=0.5, critic_rate=3.0, hidden=4)
    site, weights, model = pool(method, network)
    critic = method.parts(site, lambda: critic_network(model.embedding_size, 4)).double()
    model = model.double()
    batches = domain_batches(site)
    test = int(torch.randint(3, (), generator=site.generator_for("episodes")))
    inputs = torch.cat([b.inputs for number, b in enumerate(batches) if number != test]).double()
    labels = torch.cat([b.targets for number, b in enumerate(batches) if number != test])

    def validation(gradients: Gradients) -> Tensor:
        other = site.model(weights).double()
        with torch.no_grad():
            for parameter, gradient in zip(other.features.parameters(), gradients, strict=True):
                parameter -= LR * gradient
            return F.cross_entropy(other(batches[test].inputs.double()), batches[test].targets)

    @torch.enable_grad()
    def utility() -> Tensor:
        plain = torch.autograd.grad(F.cross_entropy(model(inputs), labels), trainable(model.features))
        judged = 0.5 * F.softplus(torch.nn.Sequential(*critic)(model.features(inputs))).mean()
        critical = torch.autograd.grad(judged, trainable(model.features))
        both = tuple(one + other for one, other in zip(plain, critical, strict=True))
        return (validation(plain) - validation(both)).tanh()

    before = utility()
    expected = {}
    for index in ((0, 0), (3, 1)):
        weight = critic[0].weight
        with torch.no_grad():
            weight[index] += 1e-4
            above = utility()
            weight[index] -= 2e-4
            below = utility()
            weight[index] += 1e-4
        expected[index] = float((weight[index] + 3.0 * LR * (above - below) / 2e-4).detach())
    loss = F.cross_entropy(model(inputs), labels)
    loss = loss + 0.5 * F.softplus(torch.nn.Sequential(*critic)(model.features(inputs))).mean()
    descend(loss, trainable(model))
    update = step(method, site, weights, mini_batches=3)
    assert update.loss == pytest.approx((loss - before).item(), rel=1e-4)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(update.weights[name].double(), tensor.double(), atol=2e-6, rtol=1e-4)
    found = site.memory.weights("parts")["0.weight"]
    for index, value in expected.items():
        assert float(found[index]) == pytest.approx(value, abs=2e-6)


def seen_by(monkeypatch: pytest.MonkeyPatch, method: FeatureCritic, steps: int) -> list[tuple[set[int], set[int]]]:
    """The domains that train and those that validate, of each step; recognised by their samples."""
    site, weights, _ = pool(method, MLP)
    seen: list[tuple[set[int], set[int]]] = []
    of_all: dict[bytes, int] = {}
    drawn = site.domain_batches

    def noted(number: int, *, split: bool) -> Iterator[tuple[tuple[Batch, ...], Batch | None]]:
        for batches, target in drawn(number, split=split):
            of_all.update({row.numpy().tobytes(): k for k, batch in enumerate(batches) for row in batch.inputs})
            yield batches, target

    def domains_of(inputs: Tensor) -> set[int]:
        return {of_all[row.numpy().tobytes()] for row in inputs}

    def spy(
        model: Network, critic: torch.nn.Module, features: Tensor, loss: Tensor, test: Batch, rate: float
    ) -> Tensor:
        seen.append((domains_of(inputs[-1]), domains_of(test.inputs)))
        return loss

    inputs: list[Tensor] = []
    model = site.model(weights)
    model.features.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    monkeypatch.setattr(site, "model", lambda weights: model)
    monkeypatch.setattr(site, "domain_batches", noted)
    monkeypatch.setattr(FeatureCritic, "step_with_critic", staticmethod(spy))
    step(method, site, weights, mini_batches=3, steps=steps)
    return seen


@pytest.mark.parametrize(("setting", "training"), [("paper", 2), ("released", 1)])
def test_feature_critic_validates_on_a_domain_that_does_not_train(
    monkeypatch: pytest.MonkeyPatch, setting: str, training: int
) -> None:
    """All others train (paper), or one of them (code)."""
    method = FeatureCritic(setting=setting)  # type: ignore[call-arg]
    seen = seen_by(monkeypatch, method, 12)
    assert len(seen) == 12
    for train, validated in seen:
        assert len(train) == training
        assert len(validated) == 1
        assert not train & validated
    assert len({(min(train), min(validated)) for train, validated in seen}) >= 3, "drawn anew"


def test_feature_critic_s_virtual_steps_leave_running_statistics_alone() -> None:
    """The batch that trains moves them once, that which validates never."""
    method = FeatureCritic(critic_weight=1.0)
    site, weights, model = pool(method, NORMED)
    batches = domain_batches(site)
    train, _ = method.episode(batches, site.generator_for("episodes"))
    model(torch.cat([batch.inputs for batch in train]))
    found = step(method, site, weights, mini_batches=3).weights
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(found[name], buffer)
