"""Plug-ins that soften labels and those that work inside the network: a step of each by another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pooling import assert_same, descend, trainable
from test_local_plugins import beginning, fitted, site_of
from torch import Tensor

from fedshift.data.transforms import Augmentation, augment
from fedshift.federation.site import Batch
from fedshift.methods.composition.mixstyle import beta
from fedshift.methods.composition.regularisers import residual_branches
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedprox import FedProx
from fedshift.models import registry as models


def test_label_smoothing_is_torch_s() -> None:
    runner, weights = site_of(FedAvg(local=[{"name": "label_smoothing", "smoothing": 0.3}]))
    model, batch = beginning(runner.site, weights)
    descend(F.cross_entropy(model(batch.inputs), batch.targets, label_smoothing=0.3), trainable(model))
    assert_same(fitted(runner, weights), model)


def shuffled(batch: Batch, draws: torch.Generator, alpha: float) -> tuple[Tensor, float]:
    """The order of the partners and λ, after the draw that says whether to mix."""
    torch.rand((), generator=draws)
    order = torch.randperm(len(batch.inputs), generator=draws)
    return order, float(beta(alpha, 1, draws))


def test_mixup_by_hand() -> None:
    """On cross-entropy, two labels with their shares are one soft label."""
    runner, weights = site_of(FedAvg(local=[{"name": "mixup", "alpha": 0.7}]))
    model, batch = beginning(runner.site, weights)
    order, share = shuffled(batch, runner.site.generator_for("mixup"), 0.7)
    assert 0.05 < share < 0.95
    soft = share * F.one_hot(batch.targets, 3) + (1 - share) * F.one_hot(batch.targets[order], 3)
    mixed = share * batch.inputs + (1 - share) * batch.inputs[order]
    descend(F.cross_entropy(model(mixed), soft), trainable(model))
    assert_same(fitted(runner, weights), model)


def test_cutmix_by_hand() -> None:
    runner, weights = site_of(FedAvg(local=[{"name": "cutmix", "probability": 1.0}]))
    model, batch = beginning(runner.site, weights)
    draws = runner.site.generator_for("cutmix")
    order, share = shuffled(batch, draws, 1.0)
    row, column = torch.rand(2, generator=draws).tolist()
    side = (1 - share) ** 0.5
    top, left, size = (round((row - side / 2) * 12), round((column - side / 2) * 12), round(side * 12))
    mask = torch.zeros(12, 12, dtype=torch.bool)
    mask[max(0, top) : top + size, max(0, left) : left + size] = True
    own = 1 - mask.float().mean().item()
    assert 0.05 < own < 0.95
    logits = model(torch.where(mask, batch.inputs[order], batch.inputs))
    loss = own * F.cross_entropy(logits, batch.targets) + (1 - own) * F.cross_entropy(logits, batch.targets[order])
    descend(loss, trainable(model))
    assert_same(fitted(runner, weights), model)


def test_augment_is_the_experiment_s_augmentation() -> None:
    """The same pixels with the same draws, moved before they are normalised."""
    moved = {"shear": 0.3, "shift": 0.1, "cut_out": 0.3}
    runner, weights = site_of(FedAvg(local=[{"name": "augment", "by": moved}]))
    model, batch = beginning(runner.site, weights)
    draws = runner.site.generator_for("augment")
    images = augment(batch.inputs * 0.25 + 0.5, Augmentation.model_validate(moved), draws)
    descend(F.cross_entropy(model((images - 0.5) / 0.25), batch.targets), trainable(model))
    assert_same(fitted(runner, weights), model)
    assert runner.method.calls.plug_ins(runner.site)[0].changes_inputs


def test_augment_moves_masks_with_their_images() -> None:
    option = {"name": "augment", "by": {"flip": 1.0}}
    runner, _ = site_of(FedAvg(local=[option]))
    (plug_in,) = runner.method.calls.plug_ins(runner.site)
    masks = (torch.arange(2 * 144).view(1, 2, 12, 12) % 5 == 0).float()
    batch = Batch(torch.rand(1, 1, 12, 12), masks, torch.zeros(1).long(), torch.zeros(1).long())
    seen: list[Batch] = []
    plug_in.loss(lambda drawn: seen.append(drawn) or torch.zeros(()), batch)  # type: ignore[func-returns-value]
    torch.testing.assert_close(seen[0].inputs, batch.inputs.flip(-1))
    assert torch.equal(seen[0].targets, masks.flip(-1))


def test_no_mixing_without_luck() -> None:
    plain, mixed = (
        fitted(*site_of(FedAvg(local=local)))
        for local in ([], [{"name": "mixup", "probability": 0.0}, {"name": "cutmix", "probability": 0.0}])
    )
    assert plain == mixed


def test_sharpness_looks_at_the_whole_loss() -> None:
    """FedProx's penalty is 0 at θ and pulls back at θ + ε."""
    plain, pulled = (
        fitted(*site_of(method(local=["sharpness"])))
        for method in (FedAvg, lambda **options: FedProx(proximal_weight=10.0, **options))
    )
    assert plain != pulled


def test_dropout_by_hand() -> None:
    runner, weights = site_of(FedAvg(local=[{"name": "dropout", "rate": 0.25}]))
    model, batch = beginning(runner.site, weights)
    kept = torch.rand(8, model.embedding_size, generator=runner.site.generator_for("dropout")) >= 0.25
    assert 0 < kept.sum() < kept.numel()
    scores = model.classifier(model.features(batch.inputs) * kept / 0.75)
    descend(F.cross_entropy(scores, batch.targets), trainable(model))
    assert_same(fitted(runner, weights), model)


@pytest.mark.parametrize(("name", "number"), [("resnet18", 8), ("mobilenet_v2", 10)])
def test_each_residual_block_has_a_branch(name: str, number: int) -> None:
    """As many as the papers' tables have; with all branches at 0 a block is its short cut."""
    with torch.device("meta"):
        network = models.build(models.parse({"name": name}), (3, 32, 32), 2, 0)
    assert len(residual_branches(network)) == number


def test_stochastic_depth_leaves_the_short_cut() -> None:
    """Behind hooks of the plug-in, a sample's branch is 0, or grown by 1/(1 − rate)."""
    network = models.build(models.parse({"name": "mobilenet_v2"}), (3, 32, 32), 2, 0).train()
    (plug_in,) = FedAvg(local=[{"name": "stochastic_depth", "rate": 0.5}]).local
    plug_in.check(network, (3, 32, 32))
    runner, _ = site_of(FedAvg())
    runner.site.begin(runner.site.envelope)
    branch = residual_branches(network)[-1]
    before = torch.rand(40, 160, 1, 1, generator=torch.Generator().manual_seed(0))
    branch.requires_grad_(False)
    with torch.no_grad():
        plain = branch.train()(before)
        with plug_in.at(runner.site).attach(network):
            found = branch(before)
            network.eval()
            assert torch.equal(branch(before), branch(before))
        assert not branch._forward_hooks
    gone = (found == 0).flatten(1).all(1)
    assert 8 < gone.sum() < 32
    torch.testing.assert_close(found[~gone], 2 * plain[~gone], atol=1e-5, rtol=1e-4)


class _Block(torch.nn.Module):
    """A residual block as MobileNet's are known by, whose branch gives what it gets."""

    use_res_connect = True

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Identity()


def test_stochastic_depth_drops_more_the_deeper_a_block_lies() -> None:
    """Block l of L is dropped with probability l/L of the last one's (Huang et al., ECCV 2016, section 3)."""
    network: Any = torch.nn.Sequential(*(_Block() for _ in range(4))).train()
    (plug_in,) = FedAvg(local=[{"name": "stochastic_depth", "rate": 0.6}]).local
    runner, _ = site_of(FedAvg())
    runner.site.begin(runner.site.envelope)
    with plug_in.at(runner.site).attach(network):
        for number, block in enumerate(network, 1):
            found = block.conv(torch.ones(400, 1))
            assert sorted(found.unique().tolist()) == pytest.approx([0.0, 1 / (1 - 0.15 * number)])
            assert float((found == 0).float().mean()) == pytest.approx(0.15 * number, abs=0.1)
