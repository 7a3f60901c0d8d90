"""What no equation takes is refused by a sentence: other shapes, nothing at all, numbers outside of their range."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.errors import UserError
from fedshift.experiment.distance import proxy_distance
from fedshift.functional.adversarial import domain_identifier_loss
from fedshift.functional.attention import cross_layer_attention
from fedshift.functional.averaging import MeanAccumulator, weighted_average
from fedshift.functional.clustering import compactness, dispersion
from fedshift.functional.colour import lab_to_rgb, rgb_to_lab
from fedshift.functional.geometry import affine_matrices
from fedshift.functional.information import information_maximisation, pseudo_labels
from fedshift.functional.leakage import (
    best_match,
    cosine_distance,
    gradients_in_update,
    invert_linear,
    pseudo_gradient,
    squared_distance,
    ssim,
)
from fedshift.functional.losses import smoothed_cross_entropy
from fedshift.functional.masking import soft_interaction, straight_through_mask
from fedshift.functional.mmd import multi_kernel_mmd, weighted_multi_kernel_mmd
from fedshift.functional.poisoning import wrong_labels
from fedshift.functional.projection import projection_convolution, projection_layer
from fedshift.functional.spectra import half_width, interpolate_amplitudes, low_frequencies
from fedshift.functional.styles import adain, channel_styles
from fedshift.methods import robust
from fedshift.methods.composition.mixstyle import mixed_styles
from fedshift.methods.composition.plug_in import MOST
from fedshift.methods.composition.puzzles import shuffled_tiles, tile_permutations
from fedshift.methods.composition.styles import StyleAccumulator, style_assignment
from fedshift.methods.federated.csac import divergence_weights
from fedshift.methods.federated.fada import gain_weights, generator_loss, mutual_information, relative_gains
from fedshift.methods.federated.fedadg import discriminator_loss, random_projection
from fedshift.methods.federated.feddg_ga import adjusted_shares
from fedshift.methods.federated.fedomg import matching_weights
from fedshift.methods.federated.fedsr import gaussian_divergence, mean_prediction, norm_regulariser
from fedshift.methods.federated.mdfnet import collaborative_shares, is_ready, progressive_weight
from fedshift.methods.federated.recipe_unlabelled import kept_answers, spread_labels
from fedshift.methods.federated.scaffold import next_control
from fedshift.methods.pooled.m3sda import classifier_discrepancy, moment_distance
from fedshift.methods.pooled.masf import class_confusion
from fedshift.methods.pooled.mdan import combine_domains

NAN, INF = math.nan, math.inf
LABELS, DRAWS = torch.zeros(4, dtype=torch.int64), torch.Generator()


def z(*shape: int) -> Tensor:
    return torch.zeros(shape)


def w(*values: float) -> dict[str, Tensor]:
    """A model of one tensor."""
    return {"w": torch.tensor(values, dtype=torch.float32)}


def added(**parts: Any) -> None:
    MeanAccumulator(parts.get("rule", "mean")).add(w(0), parts["share"], "site 'x'")


def added_of_another_name() -> None:
    mean = MeanAccumulator()
    mean.add(w(0), 1)
    mean.add({"v": z(1)}, 1, "site 'x'")


def cut_to_another_window() -> None:
    interpolate_amplitudes(z(1, 1, 8, 8), low_frequencies(z(1, 1, 8, 8), 1), torch.tensor(1.0), 2)


def many(layers: tuple[int, ...], others: tuple[int, ...], *more: Any) -> None:
    weighted_multi_kernel_mmd(z(*layers), z(*others), torch.ones(2, 2), *more)


REFUSED: list[tuple[Callable[..., Any], list[tuple[Any, ...]], str]] = [
    # Equation, arguments that it refuses, what its sentence names
    (tile_permutations, [(-1,), (MOST + 1,)], str(MOST)),
    (shuffled_tiles, [(z(2, 5), z(2, 9)), (z(2, 1, 2, 6), z(2, 9)), (z(2, 1, 6, 6), z(1, 9))], "tiles"),
    (wrong_labels, [(np.array([0, 1]), share, 3, 0) for share in (-0.1, 1.1, NAN)], "fraction"),
    (wrong_labels, [(np.zeros(3, dtype=np.int64), 0.5, 1, 0)], "classes"),
    (wrong_labels, [(np.array([0, 3]), 0.5, 3, 0), (np.array([-1, 0]), 0.5, 3, 0)], "0 to 2"),
    (kept_answers, [(z(0, 3), z(0, 3)), (z(4, 3), z(5, 3)), (z(4, 3), z(4, 2)), (z(4), z(4))], "kept answers"),
    (discriminator_loss, [(torch.tensor([0.8]), z(0))], "sample"),
    (random_projection, [(0, 3, DRAWS)], "0 and 3"),
    (soft_interaction, [(z(2), z(1))], ""),
    (straight_through_mask, [(z(3), z(2, 4))], ""),
    (spread_labels, [(z(0, 2), z(0, 4)), (z(2, 2), z(3, 4))], "labels spread"),
    (collaborative_shares, [(0, 1, 0.2)], "0 .*1 "),
    (collaborative_shares, [(1, 0, 0.2)], "1 .*0 "),
    (collaborative_shares, [(1, 1, 1.5)], r"1\.5"),
    (progressive_weight, [(-1,)], "-1"),
    (proxy_distance, [(1.1,)], r"1\.1"),
    (is_ready, [(0.1, 1, 0.25)], "classes"),
    (affine_matrices, [(z(1), torch.ones(1, 2), torch.ones(1, 2), z(1, 2))], "line"),
    (norm_regulariser, [(z(3),)], r"\(3,\)"),
    (gaussian_divergence, [(z(2, 3), z(2, 3), z(2, 3), z(3))], r"\(2, 3\).*\(3,\)"),
    (mean_prediction, [(z(0, 2, 3),)], r"\(0, 2, 3\)"),
    (matching_weights, [(torch.ones(2), 0.5), (torch.ones(2, 3), 0.5), (torch.full((2, 2), NAN), 0.5)], "Gram"),
    (class_confusion, [(z(3), LABELS[:3], 2, 1.0)], "logits"),
    (cross_layer_attention, [([z(2, 3, 2, 2)], [z(2, 2, 2, 2)]), ([z(2, 12)], [z(2, 12)])], "shape"),
    (cross_layer_attention, [([z(2, 3, 2, 2)], [z(2, 3, 2, 2)], False, False)], "channel"),
    *((mixed_styles, [(z(*s), LABELS[:n], z(2))], "styles mix") for s, n in (((2, 3), 2), ((2, 3, 1, 1), 2))),
    (mixed_styles, [(z(2, 3, 2, 2), LABELS[:3], z(2))], "styles mix"),
    (smoothed_cross_entropy, [(z(1, 3), LABELS[:1], share) for share in (-0.1, 1.1, NAN)], "smoothing"),
    (smoothed_cross_entropy, [(z(1, 1), LABELS[:1], 0.1, "others")], "classes"),
    (projection_layer, [((3, 4, 5, 6, 7), 4, (1, 1))], r"\(3, 4, 5, 6, 7\)"),
    (projection_convolution, [(3, (0, 4), 4, (1, 1))], r"\(0, 4\)"),
    (next_control, [(w(0), w(0), w(0), w(0), 0.0)], "step"),
    (moment_distance, [([z(*s) for s in sizes], "mean_variance") for sizes in ((), ((3, 2),))], "domains"),
    (moment_distance, [([z(3, 2), z(*s)], "mean_variance") for s in ((3, 4), (1, 2))], "domains"),
    (moment_distance, [([z(3), z(3)], "mean_variance")], "domains"),
    (moment_distance, [([z(3, 2), z(0, 2)], "raw")], "samples"),
    (classifier_discrepancy, [(z(2, 3), z(3, 3)), (z(2, 3), z(2, 1)), (z(0, 3), z(0, 3))], ""),
    (channel_styles, [(z(3, 2),)], r"\(3, 2\)"),
    (adain, [(z(2, 3, 4, 4), z(2, 1), z(2, 1))], "2 .*3 "),
    (StyleAccumulator().result, [()], "image"),
    *((style_assignment, [(2, 3, level, DRAWS)], f"level {level}") for level in (0, 4)),
    *((change, [(z(2, 1, 3, 3),)], r"\(2, 1, 3, 3\)") for change in (rgb_to_lab, lab_to_rgb)),
    (half_width, [(share, 8, 8) for share in (-0.1, 0.5, NAN)], ""),
    (cut_to_another_window, [()], "sizes"),
    (low_frequencies, [(z(1, 1, 8, 8), 4)], "4"),
    (compactness, [(z(3), LABELS[:3]), (z(3, 2), LABELS[:2])], ""),
    (dispersion, [(z(0, 3), 2, 0), (z(4), 2, 0), (z(4, 3), 0, 0)], ""),
    (gain_weights, [([],), ([NAN],), ([INF],)], ""),
    (relative_gains, [(1.0, [0.5, wrong]) for wrong in (-1.0, NAN, INF)], ""),
    (adjusted_shares, [([0.5, 0.5], [1.0], 0.1), ([0.5, 0.5], [NAN, 1.0], 0.1)], "finite"),
    *((partial(added, share=share), [()], r"site 'x'.*weight") for share in (-1.0, NAN, INF)),
    (partial(added, rule="moments", share={"w": 1.0}), [()], "moments"),
    (MeanAccumulator().result, [()], ""),
    (weighted_average, [([w(0)], [0])], "'w'"),
    (weighted_average, [([w(0), w(0)], [1])], "2 .*1 "),
    (added_of_another_name, [()], r"site 'x'.*'w'"),
    (pseudo_labels, [(z(2, 3), z(3, 2)), (z(0, 3), z(0, 2)), (z(2), z(2, 2)), (z(2, 3), z(2))], ""),
    (information_maximisation, [(z(0, 3),), (z(3),)], ""),
    (mutual_information, [(z(0), z(1)), (z(1), z(0))], "score"),
    (robust.coordinate_median, [([],)], "site"),
    (robust.coordinate_median, [([w(1), w(2, 3)],)], "'w'"),
    (robust.trimmed_mean, [([w(1)] * 4, 2)], "trim: 2 .* 4 sites"),
    (robust.krum, [(z(4, 4), 1, 1)], "faulty: 1"),
    *((robust.krum, [(z(5, 5), 1, keep)], f"keep: {keep}") for keep in (0, 5)),
    (invert_linear, [(z(3, 2), z(3))], "gradient"),
    (invert_linear, [(z(3, 2), z(2))], r"\(3, 2\).*\(2,\)"),
    (pseudo_gradient, [([z(1)], [z(1)], rate) for rate in (0.0, -1.0, NAN)], "learning rate"),
    *((gradients_in_update, [(n, rho)], f"{n} .*{rho}") for n, rho in ((0, 0.5), (1, 1.0), (1, -0.1))),
    (squared_distance, [(other, [z(3)]) for other in ([z(2)], [z(3), z(1)], [])], ""),
    (cosine_distance, [(other, [z(3)]) for other in ([z(2)], [z(3), z(1)], [])], ""),
    (squared_distance, [([], [])], ""),
    (ssim, [(z(1, 1, 4, 4), z(1, 1, 4, 5))], r"\(1, 1, 4, 4\).*\(1, 1, 4, 5\)"),
    (ssim, [(z(2, 3), z(2, 3))], r"\(2, 3\)"),
    (best_match, [(z(3, 2),)], "3 .*2 "),
    (many, [((2, 0, 3), (2, 0, 3)), ((2, 4, 3), (2, 4, 2)), ((2, 4, 3), (2, 5, 3)), ((4, 3), (4, 3))], ""),
    (many, [((2, 4, 3), (2, 4, 3), ()), ((2, 4, 3), (2, 4, 3), (1.0, 0.0))], ""),
    (many, [((2, 4, 3), (3, 4, 3))], "weights"),
    (multi_kernel_mmd, [(z(4, 3), z(5, 3))], ""),
    (divergence_weights, [([],), ([-1.0, 1.0],), ([NAN],), ([INF, 1.0],)], ""),
    (divergence_weights, [([1.0, 2.0], "divergence", power) for power in (0.0, -1.0, NAN, INF)], "power"),
    (combine_domains, [(z(2), z(3)), (z(0), z(0)), (torch.tensor(1.0), torch.tensor(1.0))], ""),
    (combine_domains, [(z(2), z(2), 0.01, gamma) for gamma in (0.0, -1.0, NAN)], "gamma"),
    *((loss, [(z(0), z(1)), (z(1), z(0))], "sample") for loss in (domain_identifier_loss, generator_loss)),
]


def name_of(value: object) -> str | None:
    equation = value.func if isinstance(value, partial) else value
    return getattr(equation, "__name__", None) if callable(equation) else None


@pytest.mark.parametrize(("equation", "rows", "named"), REFUSED, ids=name_of)
def test_it_is_refused(equation: Callable[..., Any], rows: list[tuple[Any, ...]], named: str) -> None:
    for row in rows:
        with pytest.raises(UserError, match=named or None):
            equation(*row)
