"""Every loss, and what losses are made of, at inputs far from 1: finite, with finite gradients, and as float64 has it.

`CASES` names each differentiable function of `fedshift.functional` with inputs of a scale, `OTHERS` those that are none
(images, counts, random draws, what the server computes without a gradient). A new function belongs to one of the two.
"""

from __future__ import annotations

import functools
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
    clustering,
    contrastive,
    control_variates,
    distillation,
    feature_alignment,
    information,
    invariance,
    losses,
    masking,
    meta_learning,
    mmd,
    styles,
    survival,
)
from fedshift.methods import heads
from fedshift.methods.composition import mixstyle, regularisers, triplets
from fedshift.methods.federated import (
    elcfs,
    fada,
    fedadg,
    fedccrl,
    fedclip,
    feddyn,
    fediir,
    fedlc,
    fedntd,
    fedrod,
    fedsr,
    kd3a,
    mcgdm,
    moon,
    stablefdg,
)
from fedshift.methods.pooled import cdan, cmss, dael, feature_critic, m3sda, masf, mdan, metareg, srdc
from tried import case

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


def entry(function: Callable[..., Any], call: Callable[..., Any] | None, *shapes: tuple[int, ...]) -> Case:
    """``call`` takes the function before the numbers; None where numbers are all that the function takes."""
    return Case(function, shapes, functools.partial(call, function) if call else function)


NC, ND, V = (N, C), (N, D), (N,)
CASES = [
    # Losses of tasks
    entry(losses.task_loss, lambda f, x: f(x, LABELS), NC),
    entry(losses.task_loss, lambda f, x: f(x, like(MASKS, x)), (2, 2, 9, 9)),
    entry(losses.smoothed_cross_entropy, lambda f, x: f(x, LABELS, 0.1), NC),
    entry(losses.smoothed_cross_entropy, lambda f, x: f(x, LABELS, 0.1, "others"), NC),
    entry(fedrod.balanced_scores, lambda f, x: f(x, torch.tensor([1, 16, 81]), 1.0), NC),
    entry(fedlc.calibrated_scores, lambda f, x: f(x, torch.tensor([1, 16, 81]), 1.0), NC),
    entry(survival.partial_likelihood, lambda f, x: f(x, like(TIMES, x), like(EVENTS, x)), V),
    entry(losses.dice_loss, lambda f, x: f(x.sigmoid(), like(MASKS, x)), (2, 2, 9, 9)),
    # Regularisers
    entry(stablefdg.common_positions, lambda f, q, k: f(q, k, ORDER), (4, 2, 3, 3), (4, 2, 3, 3)),
    entry(contrastive.supervised_contrast, lambda f, x: f(x, LABELS, 0.5), ND),
    entry(contrastive.supervised_contrast, lambda f, x: f(x, LABELS, 0.5, with_itself=False), ND),
    entry(mcgdm.direction_gap, lambda f, x, y: f([x], [y]), ND, ND),
    entry(fedccrl.spread_of_predictions, lambda f, x, y: f([x, y]), NC, NC),
    entry(losses.entropy, lambda f, x: f(shares(x)), NC),
    entry(losses.entropy_of_logits, None, NC),
    entry(losses.proximal_penalty, lambda f, x, y: f([("w", x)], {"w": y}, 0.1), ND, ND),
    entry(fedsr.norm_regulariser, None, ND),
    entry(fedsr.norm_regulariser, lambda f, x: f(x, "norm"), ND),
    entry(fedsr.gaussian_divergence, lambda f, m, s, n, t: f(m, 0.1 + s.abs(), n, 0.1 + t.abs()), *(ND,) * 4),
    entry(fedsr.mean_prediction, None, (2, N, C)),
    entry(information.information_maximisation, None, NC),
    entry(fada.mutual_information, None, V, ND),
    entry(control_variates.linear_term, lambda f, x, y: f({"w": x}, {"w": y}), ND, ND),
    entry(feddyn.dynamic_penalty, lambda f, x, y, z: f({"w": x}, {"w": y}, {"w": z}, 0.01), *(ND,) * 3),
    entry(metareg.weighted_l1, lambda f, x, y: f([x], [y]), ND, ND),
    entry(feature_critic.utility, None, (), ()),
    entry(meta_learning.inner_step, lambda f, x, y: f({"w": x}, [y], 0.1, second_order=True)["w"], ND, ND),
    entry(masf.clipped_by_norm, lambda f, x: f([x], 2.0)[0], ND),
    entry(regularisers.worst_nearby, lambda f, x, y: f({"w": x}, [y], 0.05, adaptive=True)["w"], ND, ND),
    # Distances between domains, models and samples
    entry(m3sda.moment_distance, lambda f, *x: f(x), ND, ND, ND),
    entry(m3sda.moment_distance, lambda f, *x: f(x, "mean_variance"), ND, ND, ND),
    entry(m3sda.classifier_discrepancy, lambda f, x, y: f(x, y), NC, NC),
    entry(mmd.multi_kernel_mmd, None, ND, ND),
    entry(mmd.weighted_multi_kernel_mmd, lambda f, x, y: f(x, y, x.new_tensor([[0.3, 0.7]])), (1, N, D), (2, N, D)),
    entry(
        kd3a.batchnorm_objective,
        lambda f, x, m, v: f(x, m, v.square(), x.new_tensor([0.3, 0.7])),
        ND,
        (2, D),
        (2, D),
    ),
    entry(moon.model_contrastive_loss, lambda f, x, y, z: f(x, y, z, 0.5), *(ND,) * 3),
    entry(fedclip.paired_loss, None, (N, N)),
    entry(fediir.gradient_gap, lambda f, x, y: f([x], [y]), ND, ND),
    entry(masf.semi_hard_triplet_loss, lambda f, x: f(x, LABELS, 1.0), ND),
    entry(triplets.momentum_triplet_loss, lambda f, x, y: f(x, y, LABELS, y, LABELS.flip(0), 1.0), ND, ND),
    entry(clustering.squared_distances, None, ND, ND),
    entry(masf.class_confusion, lambda f, x: f(x, LABELS, C, 2.0)[0], NC),
    entry(
        masf.confusion_divergence,
        lambda f, x, y: f(masf.class_confusion(x, LABELS, C, 2.0), masf.class_confusion(y, LABELS, C, 2.0)),
        NC,
        NC,
    ),
    entry(elcfs.contrastive_loss, lambda f, x: f(x, LABELS), ND),
    entry(elcfs.boundary_loss, lambda f, x: f(x, like(MASKS, x)), (2, 3, 9, 9)),
    entry(elcfs.region_means, lambda f, x: f(x, like(MASKS, x))[0], (2, 3, 9, 9)),
    # Domains that should be alike
    entry(feature_alignment.coral_distance, None, ND, ND),
    entry(feature_alignment.coral_distance, lambda f, x, y: f(x, y, "mean_and_covariance"), ND, ND),
    entry(feature_alignment.gaussian_discrepancy, lambda f, x, y: f([x, y], [0.1, 1.0]), ND, ND),
    entry(invariance.irm_penalty, lambda f, x, y: f([x, y], [LABELS, LABELS]), NC, NC),
    # Answers of several networks
    entry(fedntd.other_scores, lambda f, x: f(x, LABELS), NC),
    entry(distillation.softened_divergence, lambda f, x, y: f(x, y, 2.0), NC, NC),
    entry(kd3a.distillation_loss, lambda f, x, y: f(x, shares(y).detach(), y.new_ones(N)), NC, NC),
    entry(heads.expert_cross_entropy, lambda f, x: f(shares(x), LABELS), NC),
    entry(dael.consensus_regularisation, lambda f, x, y: f(shares(x), shares(y), 1), (3, N, C), NC),
    entry(heads.unlabelled_ensemble_loss, lambda f, x: f(shares(x), LABELS, x.new_ones(N)), (3, N, C)),
    entry(clustering.class_means, lambda f, x: f(x, LABELS, C)[0], ND),
    entry(srdc.auxiliary_distribution, lambda f, x: f(shares(x)), NC),
    entry(srdc.student_assignment, None, ND, (C, D)),
    entry(srdc.soft_cross_entropy, lambda f, x, y: f(shares(x), y.log_softmax(1)), NC, NC),
    # Adversaries
    entry(adversarial.reverse_gradient, None, ND),
    entry(adversarial.domain_identifier_loss, None, V, V),
    entry(fada.generator_loss, None, V, V),
    entry(cmss.weighted_adversarial_loss, lambda f, x, y: f(x, y, x.new_ones(N)), V, V),
    entry(
        cdan.conditional_adversarial_loss,
        lambda f, x, y: f(x, y, x.new_full(V, 1 / N), x.new_full(V, 1 / N)),
        V,
        V,
    ),
    entry(mdan.combine_domains, None, V, V),
    entry(mdan.combine_domains, lambda f, x, y: f(x, y, rule="maxmin"), V, V),
    entry(cmss.curriculum_weights, None, V),
    entry(cdan.certainty_weights, lambda f, x: f(x.abs()), V),
    entry(cdan.condition, lambda f, x, y: f(x, shares(y)), ND, NC),
    entry(fedadg.discriminator_loss, None, V, V),
    entry(fedadg.discriminator_loss, lambda f, x, y: f(x, y, "formula"), V, V),
    entry(fedadg.alignment_loss, None, V),
    entry(fedadg.reference_loss, None, V),
    entry(fedadg.reference_loss, lambda f, x: f(x, "towards_features"), V),
    entry(fedadg.total_loss, None, (), ()),
    # Masks and styles
    entry(masking.straight_through_mask, lambda f, x: f(x, x.new_full(ND, 0.4)), (D,)),
    entry(masking.soft_interaction, lambda f, x, y: f(x.sigmoid(), y.sigmoid()), ND, ND),
    entry(masking.soft_interaction, lambda f, x, y: f(x.relu(), y.relu()), ND, ND),
    entry(mixstyle.mixed_styles, lambda f, x: f(x, ORDER, like(HALF, x)), (4, 2, 3, 3)),
    entry(styles.channel_styles, lambda f, x: torch.stack(f(x)), (4, 2, 3, 3)),
    entry(styles.adain, lambda f, x, m, s: f(x, m, s.abs()), (4, 2, 3, 3), (4, 2), (4, 2)),
]
BY_WAY_OF_ONE = {
    *(losses.entropy, losses.entropy_of_logits, information.information_maximisation, fada.mutual_information),
    *(m3sda.classifier_discrepancy, masf.confusion_divergence, distillation.softened_divergence),
    fedccrl.spread_of_predictions,
    *(kd3a.distillation_loss, dael.consensus_regularisation, srdc.soft_cross_entropy),
    *(
        srdc.auxiliary_distribution,
        fedsr.gaussian_divergence,
        fedsr.mean_prediction,
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
    here = {trial.function for trial in CASES}
    for room in pkgutil.walk_packages(fedshift.functional.__path__, "fedshift.functional."):
        module = importlib.import_module(room.name)
        for name, function in vars(module).items():
            own = inspect.isfunction(function) and function.__module__ == room.name and not name.startswith("_")
            if own and "Tensor" in str(inspect.signature(function).return_annotation) and function not in here:
                assert name in OTHERS.get(room.name.rpartition(".")[2], ()), f"{room.name}.{name} is in neither list"


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
    wide, wide_slopes = outcome(call, tuple(value.double() for value in inputs))
    for here, there in zip((value, *slopes), (wide, *wide_slopes), strict=True):
        largest = float(there.abs().max())
        assert torch.allclose(here.double(), there, rtol=tolerance, atol=max(tolerance * largest, least)), (here, there)


def name_of(trial: Case) -> str:
    return f"{trial.function.__module__.rpartition('.')[2]}.{trial.function.__name__}"


def drawn(shapes: tuple[tuple[int, ...], ...], scale: float, seed: int, rounded: bool) -> Inputs:
    """Numbers of a scale; ``rounded``: as a network in bf16 gives them, which is float32 with eight digits of two."""
    draws = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=draws) * scale for shape in shapes)
    return tuple(value.bfloat16().float() if rounded else value for value in values)


@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize(
    "scale",
    [
        case("losses", "inputs of 1e-6", 1e-6),
        case("losses", "inputs of 1e-3", 1e-3),
        case("losses", "inputs of 1", 1.0),
        case("losses", "inputs of 1e3", 1e3),
        case("losses", "inputs of 1e6", 1e6),
    ],
)
@pytest.mark.parametrize("trial", CASES, ids=name_of)
def test_inputs_of_every_scale(trial: Case, scale: float, rounded: bool) -> None:
    for seed in range(2):
        least = 2e-5 if trial.function in BY_WAY_OF_ONE else SMALLEST
        # Its logarithms end where float32 does, see below.
        compared = trial.function is not masf.confusion_divergence or scale <= 1
        check(trial.call, drawn(trial.shapes, scale, seed, rounded), 2e-3 if compared else None, least)


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
        case("losses", "zero vectors", "zeros"),
        case("losses", "identical features", "equal"),
        case("losses", "identical large features", "equal and large"),
        case("losses", "all features identical but one", "one row apart"),
        case("losses", "one number of 1e4 among zeros", "one entry of 1e4"),
    ],
)
@pytest.mark.parametrize("trial", CASES, ids=name_of)
def test_degenerate_inputs(trial: Case, kind: str) -> None:
    check(trial.call, tuple(DEGENERATE[kind](shape) for shape in trial.shapes), None)


HELD = {
    *(regularisers.worst_nearby, mmd.multi_kernel_mmd, mmd.weighted_multi_kernel_mmd, mixstyle.mixed_styles),
    *(kd3a.distillation_loss, dael.consensus_regularisation, cdan.certainty_weights),
    *(adversarial.reverse_gradient, masking.straight_through_mask),
}
"""Whose gradients are no derivatives on purpose: a step, a bandwidth or a teacher is constant, or a sign is turned."""


@pytest.mark.parametrize("trial", [trial for trial in CASES if trial.function not in HELD], ids=name_of)
def test_gradients_are_those_of_differences(trial: Case) -> None:
    inputs = tuple(value.double().requires_grad_() for value in drawn(trial.shapes, 1.0, 1, rounded=False))
    assert torch.autograd.gradcheck(trial.call, inputs)


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
@pytest.mark.parametrize(("objective", "shape", "labels"), OBJECTIVES, ids=lambda value: getattr(value, "task", ""))
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
        case("losses", "one sample", lambda x: losses.task_loss(x[:1], LABELS[:1])),
        case("losses", "triplets of one class", lambda x: masf.semi_hard_triplet_loss(x, torch.zeros(N), 1.0)),
        case(
            "losses",
            "triplets without a positive",
            lambda x: masf.semi_hard_triplet_loss(x, torch.arange(N), 1.0),
        ),
        case(
            "losses",
            "triplets over a queue without a positive",
            lambda x: triplets.momentum_triplet_loss(x, x.detach(), torch.arange(N), x.detach(), LABELS, 1.0),
        ),
        case("losses", "contrast without a negative", lambda x: elcfs.contrastive_loss(x, torch.zeros(N))),
        case("losses", "contrast without a positive", lambda x: elcfs.contrastive_loss(x, torch.arange(N))),
        case(
            "losses",
            "confusions of sites without a common class",
            lambda x: masf.confusion_divergence(
                masf.class_confusion(x, LABELS * 0, D, 2.0),
                masf.class_confusion(-x, LABELS, D, 2.0),
            ),
        ),
        case("losses", "MMD of a batch and itself", lambda x: mmd.multi_kernel_mmd(x, x)),
        case("losses", "MMD of single samples", lambda x: mmd.multi_kernel_mmd(x[:1], x[1:2])),
        case("losses", "moments of equal domains", lambda x: m3sda.moment_distance([x, x, x])),
        case("losses", "features at their cluster's centre", lambda x: srdc.student_assignment(x, x[:3].detach())),
        case("losses", "Cox: no event", lambda x: survival.partial_likelihood(x[:, 0], TIMES, EVENTS * 0)),
        case("losses", "Cox: all at once", lambda x: survival.partial_likelihood(x[:, 0], TIMES * 0, EVENTS * 0 + 1)),
        case(
            "losses",
            "no confident sample",
            lambda x: heads.unlabelled_ensemble_loss(shares(x)[None], LABELS, x.new_zeros(N)),
        ),
        case(
            "losses",
            "no teacher in support",
            lambda x: kd3a.distillation_loss(x, shares(x * 1e4).detach(), x.new_zeros(N)),
        ),
        case("losses", "two empty masks", lambda x: masking.soft_interaction(x * 0, x * 0)),
        case(
            "losses",
            "Dice of empty masks",
            lambda x: losses.dice_loss(x.sigmoid()[None, None] * 0, x.new_zeros(1, 1, N, D), 1e-5),
        ),
    ],
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_few_samples_and_classes(call: Callable[..., Any], scale: float) -> None:
    check(call, drawn((ND,), scale, 1, rounded=False), None)


@given(scale=st.floats(-6, 6), seed=st.integers(0, 1000), number=st.integers(0, len(CASES) - 1), rounded=st.booleans())
def test_any_case_at_any_scale(scale: float, seed: int, number: int, rounded: bool) -> None:
    trial = CASES[number]
    check(trial.call, drawn(trial.shapes, 10**scale, seed, rounded), None)


@pytest.mark.case("losses", "confusions that float32 rounds to 0")
def test_sure_confusions_differ_by_their_probabilities() -> None:
    """(1 − 0)(ln 1 − ln p) of the two entries, halved, is ln 1/p with p = e^−80; beyond float32 it stays finite."""
    for gap, expected in ((80.0, 80.0), (1000.0, -math.log(torch.finfo(torch.float32).tiny))):
        first = torch.tensor([[1.0, math.exp(-gap)]]), torch.tensor([True])
        second = torch.tensor([[math.exp(-gap), 1.0]]), torch.tensor([True])
        assert masf.confusion_divergence(first, second).item() == pytest.approx(expected, rel=1e-3)
