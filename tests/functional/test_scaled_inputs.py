"""Every loss, and what losses are made of, at inputs far from 1: finite, with finite gradients, and as float64 has it.

`CASES` names each differentiable function of `fedshift.functional` with inputs of a scale, `OTHERS` those that are none
(images, counts, random draws, what the server computes without a gradient). A new function belongs to one of the two.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedshift.functional
from fedshift.data.tasks.objective import CLASSES, MultiLabel, Objective, Regression, TimeToEvent
from fedshift.functional import (
    adversarial,
    attention,
    batchnorm,
    clustering,
    contrastive,
    control_variates,
    distillation,
    experts,
    feature_alignment,
    gradient_matching,
    information,
    invariance,
    knowledge_vote,
    losses,
    masking,
    meta_learning,
    metric_learning,
    mixing,
    mmd,
    moments,
    reference_distribution,
    representation,
    segmentation,
    sharpness,
    styles,
    survival,
)

N, D, C = 6, 4, 3
SMALLEST = 1e-30
"""Float32 has few digits, or none, below."""
LABELS = torch.tensor([0, 1, 2, 0, 1, 1])
TIMES, EVENTS = torch.tensor([3.0, 1.0, 2.0, 2.0, 5.0, 2.0]), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
MASKS = torch.zeros(2, 2, 9, 9)
MASKS[:, :, 3:6, 3:6] = 1
MASKS[1, 0] = 0
ORDER, HALF = torch.tensor([1, 0, 3, 2]), torch.full((4,), 0.5)

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A function, and what it reads: the shapes of numbers of the scale, which are differentiated."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]


def like(values: Tensor, other: Tensor) -> Tensor:
    return values.to(other.dtype)


def shares(logits: Tensor) -> Tensor:
    """Probabilities. Of large scores most are 0 and one is 1."""
    return logits.softmax(-1)


def case(function: Callable[..., Any], *shapes: tuple[int, ...], call: Callable[..., Any] | None = None) -> Case:
    return Case(function, shapes, call or function)


NC, ND, V = (N, C), (N, D), (N,)
CASES = [
    # Losses of tasks
    case(losses.task_loss, NC, call=lambda x: losses.task_loss(x, LABELS)),
    case(losses.task_loss, (2, 2, 9, 9), call=lambda x: losses.task_loss(x, like(MASKS, x))),
    case(losses.smoothed_cross_entropy, NC, call=lambda x: losses.smoothed_cross_entropy(x, LABELS, 0.1)),
    case(losses.smoothed_cross_entropy, NC, call=lambda x: losses.smoothed_cross_entropy(x, LABELS, 0.1, "others")),
    case(losses.balanced_scores, NC, call=lambda x: losses.balanced_scores(x, torch.tensor([1, 16, 81]), 1.0)),
    case(losses.calibrated_scores, NC, call=lambda x: losses.calibrated_scores(x, torch.tensor([1, 16, 81]), 1.0)),
    case(
        survival.partial_likelihood, V, call=lambda x: survival.partial_likelihood(x, like(TIMES, x), like(EVENTS, x))
    ),
    case(segmentation.dice_loss, (2, 2, 9, 9), call=lambda x: segmentation.dice_loss(x.sigmoid(), like(MASKS, x))),
    # Regularisers
    case(
        attention.common_positions,
        (4, 2, 3, 3),
        (4, 2, 3, 3),
        call=lambda q, k: attention.common_positions(q, k, ORDER),
    ),
    case(contrastive.supervised_contrast, ND, call=lambda x: contrastive.supervised_contrast(x, LABELS, 0.5)),
    case(
        contrastive.supervised_contrast,
        ND,
        call=lambda x: contrastive.supervised_contrast(x, LABELS, 0.5, with_itself=False),
    ),
    case(gradient_matching.direction_gap, ND, ND, call=lambda x, y: gradient_matching.direction_gap([x], [y])),
    case(distillation.spread_of_predictions, NC, NC, call=lambda x, y: distillation.spread_of_predictions([x, y])),
    case(losses.entropy, NC, call=lambda x: losses.entropy(shares(x))),
    case(losses.entropy_of_logits, NC),
    case(losses.proximal_penalty, ND, ND, call=lambda x, y: losses.proximal_penalty([("w", x)], {"w": y}, 0.1)),
    case(representation.norm_regulariser, ND),
    case(representation.norm_regulariser, ND, call=lambda x: representation.norm_regulariser(x, "norm")),
    case(
        representation.gaussian_divergence,
        *(ND,) * 4,
        call=lambda m, s, n, t: representation.gaussian_divergence(m, 0.1 + s.abs(), n, 0.1 + t.abs()),
    ),
    case(representation.mean_prediction, (2, N, C)),
    case(information.information_maximisation, NC),
    case(information.mutual_information, V, ND),
    case(control_variates.linear_term, ND, ND, call=lambda x, y: control_variates.linear_term({"w": x}, {"w": y})),
    case(
        control_variates.dynamic_penalty,
        *(ND,) * 3,
        call=lambda x, y, z: control_variates.dynamic_penalty({"w": x}, {"w": y}, {"w": z}, 0.01),
    ),
    case(meta_learning.weighted_l1, ND, ND, call=lambda x, y: meta_learning.weighted_l1([x], [y])),
    case(meta_learning.utility, (), ()),
    case(
        meta_learning.inner_step,
        ND,
        ND,
        call=lambda x, y: meta_learning.inner_step({"w": x}, [y], 0.1, second_order=True)["w"],
    ),
    case(meta_learning.clipped_by_norm, ND, call=lambda x: meta_learning.clipped_by_norm([x], 2.0)[0]),
    case(
        sharpness.worst_nearby,
        ND,
        ND,
        call=lambda x, y: sharpness.worst_nearby({"w": x}, [y], 0.05, adaptive=True)["w"],
    ),
    # Distances between domains, models and samples
    case(moments.moment_distance, ND, ND, ND, call=lambda *x: moments.moment_distance(x)),
    case(moments.moment_distance, ND, ND, ND, call=lambda *x: moments.moment_distance(x, "mean_variance")),
    case(moments.classifier_discrepancy, NC, NC, call=lambda x, y: moments.classifier_discrepancy(x, y)),
    case(mmd.multi_kernel_mmd, ND, ND),
    case(
        mmd.weighted_multi_kernel_mmd,
        (1, N, D),
        (2, N, D),
        call=lambda x, y: mmd.weighted_multi_kernel_mmd(x, y, x.new_tensor([[0.3, 0.7]])),
    ),
    case(
        batchnorm.batchnorm_objective,
        ND,
        (2, D),
        (2, D),
        call=lambda x, m, v: batchnorm.batchnorm_objective(x, m, v.square(), x.new_tensor([0.3, 0.7])),
    ),
    case(
        contrastive.model_contrastive_loss,
        *(ND,) * 3,
        call=lambda x, y, z: contrastive.model_contrastive_loss(x, y, z, 0.5),
    ),
    case(contrastive.paired_loss, (N, N)),
    case(contrastive.gradient_gap, ND, ND, call=lambda x, y: contrastive.gradient_gap([x], [y])),
    case(
        metric_learning.semi_hard_triplet_loss,
        ND,
        call=lambda x: metric_learning.semi_hard_triplet_loss(x, LABELS, 1.0),
    ),
    case(
        metric_learning.momentum_triplet_loss,
        ND,
        ND,
        call=lambda x, y: metric_learning.momentum_triplet_loss(x, y, LABELS, y, LABELS.flip(0), 1.0),
    ),
    case(metric_learning.squared_distances, ND, ND),
    case(metric_learning.class_confusion, NC, call=lambda x: metric_learning.class_confusion(x, LABELS, C, 2.0)[0]),
    case(
        metric_learning.confusion_divergence,
        NC,
        NC,
        call=lambda x, y: metric_learning.confusion_divergence(
            metric_learning.class_confusion(x, LABELS, C, 2.0), metric_learning.class_confusion(y, LABELS, C, 2.0)
        ),
    ),
    case(segmentation.contrastive_loss, ND, call=lambda x: segmentation.contrastive_loss(x, LABELS)),
    case(segmentation.boundary_loss, (2, 3, 9, 9), call=lambda x: segmentation.boundary_loss(x, like(MASKS, x))),
    case(segmentation.region_means, (2, 3, 9, 9), call=lambda x: segmentation.region_means(x, like(MASKS, x))[0]),
    # Domains that should be alike
    case(feature_alignment.coral_distance, ND, ND),
    case(
        feature_alignment.coral_distance,
        ND,
        ND,
        call=lambda x, y: feature_alignment.coral_distance(x, y, "mean_and_covariance"),
    ),
    case(
        feature_alignment.gaussian_discrepancy,
        ND,
        ND,
        call=lambda x, y: feature_alignment.gaussian_discrepancy([x, y], [0.1, 1.0]),
    ),
    case(invariance.irm_penalty, NC, NC, call=lambda x, y: invariance.irm_penalty([x, y], [LABELS, LABELS])),
    # Answers of several networks
    case(distillation.other_scores, NC, call=lambda x: distillation.other_scores(x, LABELS)),
    case(distillation.softened_divergence, NC, NC, call=lambda x, y: distillation.softened_divergence(x, y, 2.0)),
    case(
        knowledge_vote.distillation_loss,
        NC,
        NC,
        call=lambda x, y: knowledge_vote.distillation_loss(x, shares(y).detach(), y.new_ones(N)),
    ),
    case(experts.expert_cross_entropy, NC, call=lambda x: experts.expert_cross_entropy(shares(x), LABELS)),
    case(
        experts.consensus_regularisation,
        (3, N, C),
        NC,
        call=lambda x, y: experts.consensus_regularisation(shares(x), shares(y), 1),
    ),
    case(
        experts.unlabelled_ensemble_loss,
        (3, N, C),
        call=lambda x: experts.unlabelled_ensemble_loss(shares(x), LABELS, x.new_ones(N)),
    ),
    case(clustering.class_means, ND, call=lambda x: clustering.class_means(x, LABELS, C)[0]),
    case(clustering.auxiliary_distribution, NC, call=lambda x: clustering.auxiliary_distribution(shares(x))),
    case(clustering.student_assignment, ND, (C, D)),
    case(
        clustering.soft_cross_entropy,
        NC,
        NC,
        call=lambda x, y: clustering.soft_cross_entropy(shares(x), y.log_softmax(1)),
    ),
    # Adversaries
    case(adversarial.reverse_gradient, ND),
    case(adversarial.domain_identifier_loss, V, V),
    case(adversarial.generator_loss, V, V),
    case(
        adversarial.weighted_adversarial_loss,
        V,
        V,
        call=lambda x, y: adversarial.weighted_adversarial_loss(x, y, x.new_ones(N)),
    ),
    case(
        adversarial.conditional_adversarial_loss,
        V,
        V,
        call=lambda x, y: adversarial.conditional_adversarial_loss(x, y, x.new_full(V, 1 / N), x.new_full(V, 1 / N)),
    ),
    case(adversarial.combine_domains, V, V),
    case(adversarial.combine_domains, V, V, call=lambda x, y: adversarial.combine_domains(x, y, rule="maxmin")),
    case(adversarial.curriculum_weights, V),
    case(adversarial.certainty_weights, V, call=lambda x: adversarial.certainty_weights(x.abs())),
    case(adversarial.condition, ND, NC, call=lambda x, y: adversarial.condition(x, shares(y))),
    case(reference_distribution.discriminator_loss, V, V),
    case(
        reference_distribution.discriminator_loss,
        V,
        V,
        call=lambda x, y: reference_distribution.discriminator_loss(x, y, "formula"),
    ),
    case(reference_distribution.alignment_loss, V),
    case(reference_distribution.reference_loss, V),
    case(
        reference_distribution.reference_loss,
        V,
        call=lambda x: reference_distribution.reference_loss(x, "towards_features"),
    ),
    case(reference_distribution.total_loss, (), ()),
    # Masks and styles
    case(masking.straight_through_mask, (D,), call=lambda x: masking.straight_through_mask(x, x.new_full(ND, 0.4))),
    case(masking.soft_interaction, ND, ND, call=lambda x, y: masking.soft_interaction(x.sigmoid(), y.sigmoid())),
    case(masking.soft_interaction, ND, ND, call=lambda x, y: masking.soft_interaction(x.relu(), y.relu())),
    case(mixing.mixed_styles, (4, 2, 3, 3), call=lambda x: mixing.mixed_styles(x, ORDER, like(HALF, x))),
    case(styles.channel_styles, (4, 2, 3, 3), call=lambda x: torch.stack(styles.channel_styles(x))),
    case(styles.adain, (4, 2, 3, 3), (4, 2), (4, 2), call=lambda x, m, s: styles.adain(x, m, s.abs())),
]
BY_WAY_OF_ONE = {
    *(losses.entropy, losses.entropy_of_logits, information.information_maximisation, information.mutual_information),
    *(moments.classifier_discrepancy, metric_learning.confusion_divergence, distillation.softened_divergence),
    distillation.spread_of_predictions,
    *(knowledge_vote.distillation_loss, experts.consensus_regularisation, clustering.soft_cross_entropy),
    *(
        clustering.auxiliary_distribution,
        representation.gaussian_divergence,
        representation.mean_prediction,
        masking.soft_interaction,
        feature_alignment.gaussian_discrepancy,
    ),
}
"""They compute with probabilities, or take differences of numbers near 1, whose rounding of about 1e-7 stays."""
OTHERS = {
    "attention": {"cross_layer_attention"},
    "averaging": {"float64_chunks", "float64_pieces"},
    "batchnorm": {"mixed_statistics"},
    "clustering": {"first_neighbour_partitions", "kmeans_from", "nearest_mean_classifier", "spread_rows"},
    "colour": {
        "rgb_to_lab",
        "lab_to_rgb",
        "grey",
        *(f"adjust_{kind}" for kind in ("brightness", "contrast", "saturation", "hue")),
    },
    "control_variates": {"next_control", "normalised_average", "moved_gradient"},
    "differential_privacy": {"clipped_sum", "gaussian"},
    "experts": {"confident_pseudo_labels"},
    "exposure": {"largest_shares"},
    "feature_alignment": {"mean_over_pairs"},
    "fixed_point": {"to_fixed", "from_fixed"},
    "geometry": {"affine_matrices", "resample", "cut_out"},
    "gradient_matching": {"masked_by_agreement", "products_about", "matching_weights", "matching_shares"},
    "information": {"pseudo_labels"},
    "jigsaw": {"tile_permutations", "shuffled_tiles"},
    "knowledge_vote": {"released_labels", "mixup"},
    "label_spreading": {"spread_labels", "nearest_neighbours", "spread", "equally_frequent"},
    "leakage": {
        *("squared_distance", "cosine_distance", "total_variation", "pseudo_gradient", "invert_linear"),
        *("mean_squared_errors", "best_match", "ssim", "correlation"),
    },
    "losses": {"inverse_frequencies"},
    "masking": {"draws_like", "challenged_features"},
    "membership": {"scaled_confidence", "likelihood_ratios"},
    "meta_learning": {"hessian_product", "with_gradient", "answer_at"},
    "metric_learning": {"semi_hard", "drawn_with_repetition"},
    "mixing": {
        *(
            "mixed_inputs",
            "paste",
            "partners_in_the_other_half",
            "gradient_perturbed",
            "next_of_class",
            "levelling_rows",
            "rows_of_other_classes",
        )
    },
    "pairwise_masks": {"add_masks"},
    "reference_distribution": {"scaled_one_hot", "random_projection"},
    "robust_aggregation": {"squared_distances"},
    "secret_noise": {"uniform", "normal"},
    "segmentation": {"dilate", "erode", "contour", "surroundings"},
    "server_optimizers": {"momentum_step", "adaptive_step"},
    "spectra": {"amplitude", "low_frequencies", "interpolate_amplitudes"},
    "styles": {"style_assignment", "style_of_groups"},
    "templates": {"turned_templates"},
}


def test_every_function_is_here() -> None:
    here = {one.function for one in CASES}
    for found in pkgutil.walk_packages(fedshift.functional.__path__, "fedshift.functional."):
        module = importlib.import_module(found.name)
        for name, function in vars(module).items():
            own = inspect.isfunction(function) and function.__module__ == found.name and not name.startswith("_")
            if own and "Tensor" in str(inspect.signature(function).return_annotation) and function not in here:
                assert name in OTHERS.get(found.name.rpartition(".")[2], ()), f"{found.name}.{name} is in neither list"


def outcome(call: Callable[..., Any], inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Value and gradients of the sum of what a function gives, weighted so that shares of 1 do not cancel."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    value = call(*leaves)
    weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    slopes = torch.autograd.grad((value * weights).sum(), leaves, materialize_grads=True)
    return value.detach(), list(slopes)


def check(call: Callable[..., Any], inputs: Inputs, tolerance: float | None, least: float = SMALLEST) -> None:
    """Finite, and near the value in float64; ``tolerance``: of the largest number, and ``least`` of any."""
    value, slopes = outcome(call, inputs)
    assert value.isfinite().all()
    for slope in slopes:
        assert slope.isfinite().all()
    if tolerance is None:
        return
    wide, wide_slopes = outcome(call, tuple(one.double() for one in inputs))
    for here, there in zip((value, *slopes), (wide, *wide_slopes), strict=True):
        largest = float(there.abs().max())
        assert torch.allclose(here.double(), there, rtol=tolerance, atol=max(tolerance * largest, least)), (here, there)


def name_of(one: Case) -> str:
    return f"{one.function.__module__.rpartition('.')[2]}.{one.function.__name__}"


def drawn(shapes: tuple[tuple[int, ...], ...], scale: float, seed: int, rounded: bool) -> Inputs:
    """Numbers of a scale; ``rounded``: as a network in bf16 gives them, which is float32 with eight digits of two."""
    draws = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=draws) * scale for shape in shapes)
    return tuple(one.bfloat16().float() if rounded else one for one in values)


@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(1e-6, marks=pytest.mark.case("losses", "inputs of 1e-6")),
        pytest.param(1e-3, marks=pytest.mark.case("losses", "inputs of 1e-3")),
        pytest.param(1.0, marks=pytest.mark.case("losses", "inputs of 1")),
        pytest.param(1e3, marks=pytest.mark.case("losses", "inputs of 1e3")),
        pytest.param(1e6, marks=pytest.mark.case("losses", "inputs of 1e6")),
    ],
)
@pytest.mark.parametrize("one", CASES, ids=name_of)
def test_inputs_of_every_scale(one: Case, scale: float, rounded: bool) -> None:
    for seed in range(3):
        least = 2e-5 if one.function in BY_WAY_OF_ONE else SMALLEST
        # Its logarithms end where float32 does, see below.
        told = one.function is not metric_learning.confusion_divergence or scale <= 1
        check(one.call, drawn(one.shapes, scale, seed, rounded), 2e-3 if told else None, least)


DEGENERATE: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "zeros": torch.zeros,
    "equal": lambda shape: torch.full(shape, 0.7),
    "equal and large": lambda shape: torch.full(shape, 1e3),
    "one row apart": lambda shape: (
        torch.zeros(shape).index_fill(0, torch.tensor([0]), 3.0) if shape else torch.ones(())
    ),
    "one entry of 1e4": lambda shape: torch.zeros(shape).flatten().index_fill(0, torch.tensor([0]), 1e4).view(shape),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("zeros", marks=pytest.mark.case("losses", "zero vectors")),
        pytest.param("equal", marks=pytest.mark.case("losses", "identical features")),
        pytest.param("equal and large", marks=pytest.mark.case("losses", "identical large features")),
        pytest.param("one row apart", marks=pytest.mark.case("losses", "all features identical but one")),
        pytest.param("one entry of 1e4", marks=pytest.mark.case("losses", "one number of 1e4 among zeros")),
    ],
)
@pytest.mark.parametrize("one", CASES, ids=name_of)
def test_degenerate_inputs(one: Case, kind: str) -> None:
    check(one.call, tuple(DEGENERATE[kind](shape) for shape in one.shapes), None)


HELD = {
    *(sharpness.worst_nearby, mmd.multi_kernel_mmd, mmd.weighted_multi_kernel_mmd, mixing.mixed_styles),
    *(knowledge_vote.distillation_loss, experts.consensus_regularisation, adversarial.certainty_weights),
    *(adversarial.reverse_gradient, masking.straight_through_mask),
}
"""Whose gradients are no derivatives on purpose: a step, a bandwidth or a teacher is constant, or a sign is turned."""


@pytest.mark.parametrize("one", [one for one in CASES if one.function not in HELD], ids=name_of)
def test_gradients_are_those_of_differences(one: Case) -> None:
    inputs = tuple(value.double().requires_grad_() for value in drawn(one.shapes, 1.0, 1, rounded=False))
    assert torch.autograd.gradcheck(one.call, inputs)


# The objectives of runs ----------------------------------------------------------------------------------------------

OBJECTIVES: list[tuple[Objective, tuple[int, ...], Tensor]] = [
    (CLASSES, NC, LABELS),
    (Regression(loss="squared", mean=3.0, std=2.0), (N, 1), TIMES),
    (Regression(loss="absolute", mean=3.0, std=2.0), (N, 1), TIMES),
    (Regression(loss="huber", mean=3.0, std=2.0), (N, 1), TIMES),
    (TimeToEvent(), (N, 1), torch.stack([TIMES, EVENTS], 1)),
    (MultiLabel(), NC, (LABELS[:, None] > torch.arange(C)).float()),
]


@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize(("objective", "shape", "labels"), OBJECTIVES, ids=lambda one: getattr(one, "task", ""))
def test_objectives_at_every_scale(
    objective: Objective, shape: tuple[int, ...], labels: Tensor, scale: float, rounded: bool
) -> None:
    def true(outputs: Tensor) -> Tensor:
        return labels if labels.dtype == torch.int64 else like(labels, outputs)

    inputs = drawn((shape,), scale, 0, rounded)
    check(lambda x: objective.loss(x, true(x)), inputs, 2e-3)
    check(lambda x: objective.smoothed_loss(x, true(x), 0.1), inputs, 2e-3)
    assert objective.scores(inputs[0]).isfinite().all()
    together = objective.together(torch.stack([inputs[0], -inputs[0], 2 * inputs[0]]))
    assert together.isfinite().all()
    for chosen in (torch.zeros(N, dtype=torch.bool), torch.arange(N) == 0):
        check(lambda x, chosen=chosen: objective.loss_of_some(chosen, x, true(x)), inputs, 2e-3)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: losses.task_loss(x[:1], LABELS[:1]), marks=pytest.mark.case("losses", "one sample")),
        pytest.param(
            lambda x: metric_learning.semi_hard_triplet_loss(x, torch.zeros(N), 1.0),
            marks=pytest.mark.case("losses", "triplets of one class"),
        ),
        pytest.param(
            lambda x: metric_learning.semi_hard_triplet_loss(x, torch.arange(N), 1.0),
            marks=pytest.mark.case("losses", "triplets without a positive"),
        ),
        pytest.param(
            lambda x: metric_learning.momentum_triplet_loss(x, x.detach(), torch.arange(N), x.detach(), LABELS, 1.0),
            marks=pytest.mark.case("losses", "triplets over a queue without a positive"),
        ),
        pytest.param(
            lambda x: segmentation.contrastive_loss(x, torch.zeros(N)),
            marks=pytest.mark.case("losses", "contrast without a negative"),
        ),
        pytest.param(
            lambda x: segmentation.contrastive_loss(x, torch.arange(N)),
            marks=pytest.mark.case("losses", "contrast without a positive"),
        ),
        pytest.param(
            lambda x: metric_learning.confusion_divergence(
                metric_learning.class_confusion(x, LABELS * 0, D, 2.0),
                metric_learning.class_confusion(-x, LABELS, D, 2.0),
            ),
            marks=pytest.mark.case("losses", "confusions of sites without a common class"),
        ),
        pytest.param(
            lambda x: mmd.multi_kernel_mmd(x, x), marks=pytest.mark.case("losses", "MMD of a batch and itself")
        ),
        pytest.param(
            lambda x: mmd.multi_kernel_mmd(x[:1], x[1:2]), marks=pytest.mark.case("losses", "MMD of single samples")
        ),
        pytest.param(
            lambda x: moments.moment_distance([x, x, x]), marks=pytest.mark.case("losses", "moments of equal domains")
        ),
        pytest.param(
            lambda x: clustering.student_assignment(x, x[:3].detach()),
            marks=pytest.mark.case("losses", "features at their cluster's centre"),
        ),
        pytest.param(
            lambda x: survival.partial_likelihood(x[:, 0], TIMES, EVENTS * 0),
            marks=pytest.mark.case("losses", "Cox: no event"),
        ),
        pytest.param(
            lambda x: survival.partial_likelihood(x[:, 0], TIMES * 0, EVENTS * 0 + 1),
            marks=pytest.mark.case("losses", "Cox: all at once"),
        ),
        pytest.param(
            lambda x: experts.unlabelled_ensemble_loss(shares(x)[None], LABELS, x.new_zeros(N)),
            marks=pytest.mark.case("losses", "no confident sample"),
        ),
        pytest.param(
            lambda x: knowledge_vote.distillation_loss(x, shares(x * 1e4).detach(), x.new_zeros(N)),
            marks=pytest.mark.case("losses", "no teacher in support"),
        ),
        pytest.param(
            lambda x: masking.soft_interaction(x * 0, x * 0), marks=pytest.mark.case("losses", "two empty masks")
        ),
        pytest.param(
            lambda x: segmentation.dice_loss(x.sigmoid()[None, None] * 0, x.new_zeros(1, 1, N, D), 1e-5),
            marks=pytest.mark.case("losses", "Dice of empty masks"),
        ),
    ],
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_few_samples_and_classes(call: Callable[..., Any], scale: float) -> None:
    check(call, drawn((ND,), scale, 1, rounded=False), None)


@given(scale=st.floats(-6, 6), seed=st.integers(0, 1000), number=st.integers(0, len(CASES) - 1), rounded=st.booleans())
def test_any_case_at_any_scale(scale: float, seed: int, number: int, rounded: bool) -> None:
    one = CASES[number]
    check(one.call, drawn(one.shapes, 10**scale, seed, rounded), None)


@pytest.mark.case("losses", "confusions that float32 rounds to 0")
def test_sure_confusions_differ_by_their_probabilities() -> None:
    """(1 − 0)(ln 1 − ln p) of the two entries, halved, is ln 1/p with p = e^−80; beyond float32 it stays finite."""
    for gap, expected in ((80.0, 80.0), (1000.0, -math.log(torch.finfo(torch.float32).tiny))):
        first = torch.tensor([[1.0, math.exp(-gap)]]), torch.tensor([True])
        second = torch.tensor([[math.exp(-gap), 1.0]]), torch.tensor([True])
        assert metric_learning.confusion_divergence(first, second).item() == pytest.approx(expected, rel=1e-3)
