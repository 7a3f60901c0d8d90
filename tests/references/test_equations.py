"""Single steps of federated methods: the numbers of the authors' own functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from authors_numbers import LARGEST, Reference, compares
from torch import Tensor, nn

from fedshift.data.tasks.objective import CLASSES
from fedshift.functional.attention import cross_layer_attention
from fedshift.functional.averaging import weighted_average
from fedshift.functional.control_variates import moved_gradient, normalising_factor
from fedshift.functional.differential_privacy import NoisySteps, clipped_sum, epsilon
from fedshift.functional.distillation import softened_divergence
from fedshift.functional.information import information_maximisation, pseudo_labels
from fedshift.functional.losses import proximal_penalty, task_loss
from fedshift.functional.meta_learning import inner_step
from fedshift.functional.mmd import multi_kernel_mmd, weighted_multi_kernel_mmd
from fedshift.functional.projection import projection_convolution
from fedshift.functional.schedules import linear
from fedshift.functional.spectra import half_width, interpolate_amplitudes, low_frequencies
from fedshift.functional.styles import adain, channel_styles
from fedshift.methods import robust
from fedshift.methods.composition.regularisers import worst_nearby
from fedshift.methods.composition.styles import StyleAccumulator
from fedshift.methods.federated.csac import divergence_aggregate
from fedshift.methods.federated.elcfs import boundary_loss, contour, rounded_shares, surroundings
from fedshift.methods.federated.fedadg import (
    alignment_loss,
    discriminator_loss,
    reference_loss,
    scaled_one_hot,
    total_loss,
)
from fedshift.methods.federated.fedbn import FedBN
from fedshift.methods.federated.feddyn import clipped_but_decay, dynamic_penalty
from fedshift.methods.federated.fedgma import masked_by_agreement
from fedshift.methods.federated.fediir import FedIIR
from fedshift.methods.federated.fedlc import calibrated_scores
from fedshift.methods.federated.fednova import normalised_average
from fedshift.methods.federated.fedntd import other_scores
from fedshift.methods.federated.fedomg import matching_shares
from fedshift.methods.federated.fedsr import gaussian_divergence, norm_regulariser
from fedshift.methods.federated.gperxan import GPerXAN
from fedshift.methods.federated.kd3a import (
    FocusTally,
    distillation_loss,
    knowledge_vote,
    mixup,
    released_domain_weights,
    released_labels,
    smoothed_weights,
)
from fedshift.methods.federated.moon import model_contrastive_loss
from fedshift.methods.robust import Krum, Trust
from fedshift.methods.server import OPTIMIZERS
from fedshift.models.normalisation import AssembledNorm2d
from fedshift.weights import Weights


def part_of(reference: Reference, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, without it."""
    return {name.removeprefix(prefix): value for name, value in reference.tensors.items() if name.startswith(prefix)}


def asking(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that ask for gradients."""
    return {name: value.clone().requires_grad_(True) for name, value in values.items()}


# CSAC ---------------------------------------------------------------------------------------------------------------


@compares("federated", "csac_1", "csac_2")
def test_csac_s_discrepancy_of_two_batches(reference: Reference) -> None:
    sides = asking(reference.tensors)
    value = multi_kernel_mmd(sides["s"], sides["t"], constant=True)
    reference.agree("value", value)
    reference.agree("value_without_constant", multi_kernel_mmd(sides["s"], sides["t"]))
    for side, gradient in zip("st", torch.autograd.grad(value, [sides["s"], sides["t"]]), strict=True):
        reference.agree(f"gradient_{side}", gradient)


@compares("federated", "csac_3", "csac_4")
def test_csac_s_attention_between_layers(reference: Reference) -> None:
    fused, local = (torch.stack([reference.tensors[f"{side}{i}"] for i in range(3)]) for side in ("fused", "local"))
    queries, keys = fused, local
    if "query0.weight" in reference.tensors:
        queries, keys = (
            torch.stack(
                [
                    F.conv2d(maps[i], reference.tensors[f"{name}{i}.weight"], reference.tensors[f"{name}{i}.bias"])
                    for i in range(3)
                ]
            )
            for maps, name in ((fused, "query"), (local, "key"))
        )
    for name, kinds in (("alpha", (True, True)), ("position", (True, False)), ("channel", (False, True))):
        reference.agree(name, cross_layer_attention(fused, local, *kinds, queries=queries, keys=keys))


@compares("federated", "csac_6", "csac_7", "csac_11")
def test_csac_s_fusion_by_distances(reference: Reference) -> None:
    models = [part_of(reference, f"site{k}.") for k in range(3)]
    fused, shares = divergence_aggregate(models, distance=reference.parameters["fusion"])
    reference.agree("weights", shares)
    if "fused" in reference.outputs:
        reference.agree("fused", dict(fused))


@compares("federated", "csac_8", "csac_9", "csac_10")
def test_csac_s_fusion_at_its_bounds(reference: Reference) -> None:
    """By equation 2 a site at the mean gets no share, and equal sites equal ones; a counter is no weight."""
    (values,) = reference.inputs.values()
    kind = torch.int64 if reference.id == "csac_10" else torch.float64
    fused, _ = divergence_aggregate([{"w": torch.tensor(value, dtype=kind)} for value in values])
    reference.agree("fused", fused["w"] if kind == torch.int64 else dict(fused))
    assert fused["w"].flatten().tolist() == {"csac_8": [1.0], "csac_9": [0.25], "csac_10": [40]}[reference.id]


@compares("federated", "csac_12")
def test_csac_s_alignment_over_all_pairs_of_layers(reference: Reference) -> None:
    trained = asking({f"trained{i}": reference.tensors[f"trained{i}"] for i in range(2)})
    fused = torch.stack(list(trained.values()))
    local = torch.stack([reference.tensors[f"frozen{i}"] for i in range(2)])
    shares = cross_layer_attention(fused, local)
    loss = weighted_multi_kernel_mmd(fused.flatten(2), local.flatten(2), shares, constant=True)
    reference.agree("alpha", shares)
    reference.agree("loss", loss)
    for name, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True):
        reference.agree(f"gradient_{name}", gradient)


@compares("federated", "csac_13")
def test_csac_s_projections(reference: Reference) -> None:
    rules = []
    for before, after in reference.inputs["size from, size to"]:
        layer = projection_convolution(2, (before, before), 3, (after, after))
        assert isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)
        rules.append(
            {
                "kernel": layer.kernel_size[0],
                "stride": layer.stride[0],
                "padding": cast(int, layer.padding[0]),
                "transposed": isinstance(layer, nn.ConvTranspose2d),
            }
        )
    reference.agree("rules", rules)
    layer = projection_convolution(2, (6, 6), 3, (4, 4)).double()
    layer.load_state_dict({name: reference.tensors[name] for name in ("weight", "bias")})
    reference.agree("values_6_to_4", layer(reference.tensors["x"]))


# KD3A ---------------------------------------------------------------------------------------------------------------


@compares("federated", "kd3a_1", "kd3a_3")
def test_kd3a_s_vote(reference: Reference) -> None:
    teachers = torch.tensor(reference.inputs["p[teacher][sample][class]"], dtype=torch.float64)
    gate = reference.parameters["gate"]
    labels, weights = released_labels(knowledge_vote(teachers, gate, ballots="top1"))
    reference.agree("labels", labels.argmax(1))
    reference.agree("weights", weights)
    votes = []
    for sample in range(teachers.shape[1]):
        rows = teachers[:, sample : sample + 1]
        tally = FocusTally(len(rows), gate if bool((rows > gate).any()) else 0.0, ballots="top1")
        tally.add(rows)
        votes.append(float(tally.focus().sum()))  # Shapley values sum to the quality of all teachers together
    reference.agree("vote_of_winner", votes)


@compares("federated", "kd3a_2", "kd3a_4")
def test_kd3a_s_consensus_focus_and_shares(reference: Reference) -> None:
    teachers = torch.tensor(reference.inputs["p[teacher][sample][class]"], dtype=torch.float64)
    gate = reference.parameters["gate"]
    tally = FocusTally(len(teachers), gate, rule="shapley", ballots="top1")
    tally.add(teachers)
    _, weights = released_labels(knowledge_vote(teachers, gate, ballots="top1"))
    sources, target = released_domain_weights(tally.focus(), float(weights.mean()))
    reference.agree("focus", tally.focus())
    reference.agree("target_share", target)
    reference.agree("source_shares", sources)
    reference.agree("shares_rounded_as_in_the_code_target_first", [target, *sources])
    smoothed = smoothed_weights([0.25] * 4, [target, *sources], reference.parameters["momentum"])
    reference.agree("after_moving_average_from_quarters", smoothed)


@compares("federated", "kd3a_5")
def test_kd3a_s_mean_with_batchnorm(reference: Reference) -> None:
    models, shares = [part_of(reference, f"site{k}.") for k in range(3)], reference.parameters["coefficients"]
    reference.agree("average", dict(weighted_average(models, shares)))
    merged = weighted_average(models, shares, bn_merge="moments")
    reference.agree("average_moments_variance_by_the_papers_appendix", merged["1.running_var"])


@compares("federated", "kd3a_6")
def test_kd3a_s_distillation(reference: Reference) -> None:
    """The loss is a divergence where the code has a cross-entropy: less by the entropy of the labels."""
    logits = asking(reference.tensors)["logits"]
    hard = F.one_hot(torch.tensor(reference.inputs["consensus labels"]), 4).double()
    weights = torch.tensor(reference.inputs["weights"], dtype=torch.float64)
    permutation = torch.tensor(reference.parameters["permutation"])
    _, mixed = mixup(logits.detach(), hard, reference.parameters["lam"], permutation)
    loss = distillation_loss(logits, mixed, weights)
    reference.agree("loss", loss)
    reference.agree("gradient", torch.autograd.grad(loss, logits)[0])
    entropy = (weights * torch.special.entr(mixed).sum(1)).mean()
    assert (loss + entropy).item() == pytest.approx(reference.outputs["loss"], abs=reference.tolerance)


@compares("federated", "kd3a_7")
def test_kd3a_s_gate(reference: Reference) -> None:
    options = reference.parameters
    epochs = [epoch / options["total_epochs"] for epoch in reference.inputs["epochs"]]
    reference.agree("gates", [linear(progress, options["begin"], options["end"]) for progress in epochs])


# SHOT, FedSR --------------------------------------------------------------------------------------------------------


@compares("federated", "shot_1")
def test_shot_s_pseudo_labels(reference: Reference) -> None:
    features = reference.tensors["features"]
    probabilities = (features @ reference.tensors["classifier"]).softmax(1)
    reference.agree("argmax_of_predictions", probabilities.argmax(1))
    reference.agree("labels", pseudo_labels(features, probabilities))


@compares("federated", "shot_2")
def test_shot_s_pseudo_labels_of_a_class_that_loses_its_samples(reference: Reference) -> None:
    features = torch.tensor(reference.inputs["features"], dtype=torch.float64)
    probabilities = torch.tensor(reference.inputs["logits"], dtype=torch.float64).softmax(1)
    labels = pseudo_labels(features, probabilities)
    reference.agree("argmax_of_predictions", probabilities.argmax(1))
    reference.agree("labels", labels)
    reference.agree("labels_of_the_digit_code", labels)


@compares("federated", "shot_3")
def test_shot_s_information_maximisation(reference: Reference) -> None:
    logits = asking(reference.tensors)["logits"]
    loss = information_maximisation(logits, reference.parameters["epsilon"])
    reference.agree("loss", loss)
    reference.agree("gradient", torch.autograd.grad(loss, logits)[0])


@compares("federated", "fedsr_1")
def test_fedsr_s_regularisers(reference: Reference) -> None:
    values = asking(reference.tensors)
    labels, factor = torch.tensor(reference.inputs["labels"]), torch.tensor(0.7, dtype=torch.float64).requires_grad_()
    references = values["r_mu"][labels], F.softplus(values["r_sigma before softplus"])[labels]
    divergence = gaussian_divergence(values["mu"], values["sigma"], *references, factor=factor, epsilon=0.0).mean()
    reference.agree("kl", divergence)
    reference.agree("norm", norm_regulariser(values["z"], "norm"))
    gradients = torch.autograd.grad(divergence, [values["r_mu"], factor])
    reference.agree("gradient_r_mu", gradients[0])
    reference.agree("gradient_C", gradients[1])


# ELCFS --------------------------------------------------------------------------------------------------------------


@compares("federated", "elcfs_1", "elcfs_2", "elcfs_3")
def test_elcfs_s_amplitudes(reference: Reference) -> None:
    options = reference.parameters
    image, donor = (reference.tensors[name].movedim(2, 0) for name in ("image", "donor"))
    half = half_width(options["L"], options["height"], options["width"])
    reference.agree("half_width", half)
    mixed = interpolate_amplitudes(image, low_frequencies(donor, half), torch.tensor(options["rate"]), half)
    reference.agree("mixed", mixed.movedim(0, 2))


@compares("federated", "elcfs_4")
def test_elcfs_s_meta_step(reference: Reference) -> None:
    options, labels = reference.parameters, torch.tensor(reference.inputs["labels"])
    start = {"W": reference.tensors["W"].clone().requires_grad_(True)}
    inner = F.cross_entropy(reference.tensors["x"] @ start["W"].T, labels)
    gradients = torch.autograd.grad(inner, list(start.values()), retain_graph=True)
    ahead = inner_step(start, gradients, options["meta_step_size"], options["clip_value"])
    outer = F.cross_entropy(reference.tensors["x_transformed"] @ ahead["W"].T, labels)
    reference.agree("inner_loss", inner)
    reference.agree("inner_gradient", gradients[0])
    reference.agree("fast_weights", ahead["W"])
    reference.agree("outer_loss", outer)
    reference.agree("total_gradient", torch.autograd.grad(inner + outer, [start["W"]])[0])


@compares("federated", "elcfs_5")
def test_elcfs_s_shares(reference: Reference) -> None:
    samples = {f"site{k}": number for k, number in enumerate(reference.parameters["slices"])}
    reference.agree("shares", list(rounded_shares(samples).values()))


@compares("federated", "elcfs_6")
def test_elcfs_s_boundaries(reference: Reference) -> None:
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    masks = torch.stack(
        [
            torch.stack([(rows - 7) ** 2 + (columns - 6 - k) ** 2 <= radius for radius in (16, 4)]).double()
            for k in range(2)
        ]
    )
    regions = [form(masks[:, one : one + 1]) for one in range(2) for form in (contour, surroundings)]
    reference.agree("pixels", [region.sum((1, 2, 3)).tolist() for region in regions])
    maps = torch.cat([reference.tensors[f"features of the {name}"] for name in ("images", "copies")])
    both, temperature = torch.cat([masks, masks]), reference.parameters["temperature"]
    reference.agree("disc", boundary_loss(maps, both[:, :1], temperature))
    reference.agree("cup", boundary_loss(maps, both[:, 1:], temperature))
    reference.agree("mean_of_both", boundary_loss(maps, both, temperature))
    reference.agree("sum_as_in_the_code", boundary_loss(maps, both, temperature, added=True))


# MOON, FedNova, FedDyn, FedProx -------------------------------------------------------------------------------------


@compares("federated", "moon_1", "moon_2")
def test_moon_s_loss(reference: Reference) -> None:
    x, options = reference.tensors["x"], reference.parameters
    own, common, previous = (asking(part_of(reference, f"{name}.")) for name in ("own", "common", "previous"))
    features, near, far = (F.linear(x, model["f.weight"], model["f.bias"]) for model in (own, common, previous))
    contrast = options["mu"] * model_contrastive_loss(features, near, far, options["temperature"])
    logits = F.linear(features, own["c.weight"], own["c.bias"])
    task = F.cross_entropy(logits, torch.tensor(reference.inputs["labels"]))
    reference.agree("task", task)
    reference.agree("contrast", contrast / options["mu"])
    reference.agree("total", task + contrast)
    reference.agree("gradient_f_weight", torch.autograd.grad(task + contrast, own["f.weight"])[0])


def local_steps(reference: Reference, site: int, steps: int) -> Tensor:
    """Where these steps of SGD lead a site, whose gradients are given, from the common model."""
    options, start = reference.parameters, reference.tensors["x before the round"]
    value, index = nn.Parameter(start.clone()), torch.arange(4, dtype=torch.float64)
    stepper = torch.optim.SGD([value], options["lr"], options["momentum"])
    for step in range(steps):
        stepper.zero_grad()
        linear_part = (value * torch.cos(0.5 * index + 0.3 * step + 0.9 * site)).sum()
        (linear_part + proximal_penalty([("x", value)], {"x": start}, options["mu"])).backward()
        stepper.step()
    return value.detach()


@compares("federated", "fednova_1", "fednova_2", "fednova_3", "fednova_4")
def test_fednova_s_normalised_steps(reference: Reference) -> None:
    options, start = reference.parameters, {"x": reference.tensors["x before the round"]}
    decay, shares = options["lr"] * options["mu"], options["ratio"]
    factors = [normalising_factor(steps, options["momentum"], decay) for steps in (3, 5, 9)]
    reference.agree("a_norms", factors)
    reference.agree("how_far_the_codes_steps_carry", factors)
    models = [local_steps(reference, site, steps) for site, steps in enumerate(options["steps"])]
    reference.agree("y", torch.stack(models))
    # With a proximal term the code takes the numbers of steps: `effective_steps: steps`.
    counted = options["steps"] if options["mu"] else factors
    effective = sum(share * number for share, number in zip(shares, counted, strict=False))
    reference.agree("tau_eff", effective)
    after = normalised_average(start, [{"x": model} for model in models], shares, factors[:2], effective)
    reference.agree("x_after", after["x"])


@compares("federated", "fednova_5")
def test_fednova_s_nesterov_momentum(reference: Reference) -> None:
    factors = [normalising_factor(steps, 0.9, nesterov=True) for steps in (3, 5, 9)]
    reference.agree("a_norms", factors)
    reference.agree("how_far_the_codes_steps_carry_in_units_of_the_rate", factors)


def agreed_loss(reference: Reference, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Compare a loss of scores and labels, and its gradient by the scores."""
    scores = reference.tensors["scores"].clone().requires_grad_()
    loss = loss_of(scores, torch.tensor(reference.inputs["labels"]))
    reference.agree("loss", loss)
    reference.agree("gradient", torch.autograd.grad(loss, scores)[0])


@compares("federated", "fedntd_1", "fedntd_2")
def test_fedntd_s_loss(reference: Reference) -> None:
    tau, beta, common = reference.parameters["tau"], reference.parameters["beta"], reference.tensors["common"]

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        apart = softened_divergence(other_scores(common, labels), other_scores(scores, labels), tau)
        return task_loss(scores, labels) + beta * tau**2 * apart

    agreed_loss(reference, loss)


@compares("federated", "fedlc_1", "fedlc_2")
def test_fedlc_s_loss_where_the_site_lacks_a_class(reference: Reference) -> None:
    counts, tau = torch.tensor(reference.inputs["counts"]), reference.parameters["tau"]
    agreed_loss(reference, lambda scores, labels: task_loss(calibrated_scores(scores, counts, tau), labels))


@compares("federated", "feddyn_1", "feddyn_2", "feddyn_3")
def test_feddyn_s_rounds_with_clipped_gradients_and_alphas_by_samples(reference: Reference) -> None:
    """A site's steps down CE − ⟨h_i, θ⟩ + α_i/2·‖θ − θ_t‖², clipped at 10 but for the decay; two rounds of three sites.

    The third entry has gradients far above 10.
    """
    options = reference.parameters
    samples = torch.tensor(options["samples"], dtype=torch.float64)
    alphas = (options["alpha"] * samples.mean() / samples).tolist()
    reference.agree("alphas", alphas)
    common = {name: reference.tensors[name].clone() for name in ("weight", "bias")}
    own = [{name: torch.zeros_like(value) for name, value in common.items()} for _ in alphas]
    rounds = []
    for _ in range(options["rounds"]):
        models = []
        for k, alpha in enumerate(alphas):
            model = asking(common)
            labels = torch.tensor(reference.inputs[f"labels{k}"])
            for _ in range(options["epochs"]):
                scores = F.linear(reference.tensors[f"x{k}"], model["weight"], model["bias"])
                whole = F.cross_entropy(scores, labels) + dynamic_penalty(model, own[k], common, alpha)
                clipped_but_decay(whole, model, alpha, options["max_norm"]).backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    for value in model.values():
                        value -= options["lr"] * value.grad  # type: ignore[operator]
                        value.grad = None
            models.append({name: value.detach() for name, value in model.items()})
            own[k] = moved_gradient(own[k], common, models[k], alpha)
        drifts = [{name: -own[k][name] / alpha for name in common} for k, alpha in enumerate(alphas)]
        common = {
            name: torch.stack([models[k][name] + drifts[k][name] for k in range(len(alphas))]).mean(0)
            for name in common
        }
        rounds.append(common)
    reference.agree("models", rounds)


@compares("federated", "fedprox_1")
def test_fedprox_s_steps(reference: Reference) -> None:
    start, options = {name: reference.tensors[name] for name in ("weight", "bias")}, reference.parameters
    model = asking(start)
    stepper = torch.optim.SGD(model.values(), options["lr"])
    for _ in range(2):
        stepper.zero_grad()
        scores = F.linear(reference.tensors["x"], model["weight"], model["bias"])
        loss = F.cross_entropy(scores, torch.tensor(reference.inputs["labels"]))
        (loss + proximal_penalty(model.items(), start, options["mu"])).backward()  # type: ignore[no-untyped-call]
        stepper.step()
    for name, value in model.items():
        reference.agree(name, value)


# FedIIR, gPerXAN, FedBN ---------------------------------------------------------------------------------------------


@compares("federated", "fediir_2")
def test_fediir_s_defaults_are_the_authors_for_pacs(reference: Reference) -> None:
    theirs = reference.outputs["PACS"]
    assert (FedIIR().penalty_weight, FedIIR().ema) == (theirs["penalty"], theirs["ema"])


@compares("federated", "gperxan_1")
def test_gperxan_s_normalisation(reference: Reference) -> None:
    norm = AssembledNorm2d(nn.BatchNorm2d(2)).double()
    outputs = norm(reference.tensors["x"])
    reference.agree("train", outputs)
    outputs.backward(reference.tensors["upstream gradient"])
    gradients = {name: value.grad for name, value in norm.named_parameters()}
    scores = [gradients["score_batchnorm"], gradients["score_instancenorm"]]
    reference.agree("score_gradients", torch.stack(cast(list[Tensor], scores)))
    reference.agree("batchnorm_weight_gradient", gradients["batchnorm.weight"])
    reference.agree("instancenorm_weight_gradient", gradients["instancenorm.weight"])
    reference.agree("running_mean", norm.batchnorm.running_mean)
    reference.agree("running_var", norm.batchnorm.running_var)
    reference.agree("evaluation", norm.eval()(reference.tensors["x"]))
    reference.agree("shares", shares_of(norm))
    reference.agree("parameters", sorted(gradients))


def shares_of(norm: AssembledNorm2d) -> Tensor:
    """What each part's shift of 1 makes of the mean, which both normalise to 0."""
    mean = norm.batchnorm.running_mean
    assert mean is not None
    shares = []
    for shifts in ((1.0, 0.0), (0.0, 1.0)):
        for part, shift in zip((norm.batchnorm, norm.instancenorm), shifts, strict=True):
            part.bias.data.fill_(shift)
        shares.append(norm.eval()(mean.view(1, 2, 1, 1).expand(1, 2, 2, 2)).mean())
    return torch.stack(shares)


@compares("federated", "gperxan_2")
def test_what_is_personal_in_gperxan(reference: Reference) -> None:
    model = Weights(nn.Sequential(nn.Conv2d(1, 2, 3), AssembledNorm2d(nn.BatchNorm2d(2))).state_dict())
    assert sorted(model) == sorted(reference.inputs["state dict of Conv2d, then one normalisation"])
    personal = GPerXAN().personal(model)
    in_order = [name for name in reference.inputs["state dict of Conv2d, then one normalisation"] if name in personal]
    received = [name for name in reference.outputs["uploaded"] if name not in personal]
    reference.agree("personal", in_order)
    reference.agree("received_from_server", received)
    # `unseen: mean`, the default, sends a copy of what is personal, too.
    reference.agree("uploaded", reference.outputs["uploaded"] if GPerXAN().unseen == "mean" else received)


@compares("federated", "gperxan_3")
def test_gperxan_s_guide(reference: Reference) -> None:
    model = nn.Module()
    model.features, model.classifier = nn.Linear(4, 3).double(), nn.Linear(3, 3).double()
    names = {"backbone": "features", "fc": "classifier"}
    theirs = {f"{part}.{kind}": f"{ours}.{kind}" for part, ours in names.items() for kind in ("weight", "bias")}
    model.load_state_dict({ours: reference.tensors[name] for name, ours in theirs.items()})
    weights = Weights(model.state_dict())

    def common(sent: Weights) -> nn.Module:
        made = nn.Module()
        made.classifier = nn.Linear(3, 3).double()
        made.classifier.load_state_dict(
            {name.removeprefix("classifier."): value for name, value in sent.select("classifier").items()}
        )
        return made

    site: Any = SimpleNamespace(model=common, objective=CLASSES)
    batch: Any = SimpleNamespace(inputs=reference.tensors["x"], targets=torch.tensor(reference.inputs["labels"]))
    method = GPerXAN(guide_weight=reference.parameters["guide"])
    method.loss_at(site, cast(Any, model), weights)(batch).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), reference.parameters["lr"]).step()
    after = model.state_dict()
    reference.agree("after", {name: after[ours] for name, ours in theirs.items()})


@compares("federated", "fedavg_1")
def test_a_mean_by_rounded_shares(reference: Reference) -> None:
    models = [part_of(reference, f"site{k}.") for k in range(3)]
    reference.agree("fused", weighted_average(models, reference.parameters["shares"])["w"])


@compares("federated", "fedavg_2", "fedbn_1")
def test_what_is_averaged_with_batchnorm(reference: Reference) -> None:
    models = [
        {**part_of(reference, f"site{k}."), "bn1.num_batches_tracked": torch.tensor(10 * (k + 1))} for k in range(2)
    ]
    mean = weighted_average(models, reference.parameters["client_weights"])
    personal = FedBN().personal(Weights(models[0])) if reference.id == "fedbn_1" else set()
    reference.agree(
        "averaged", sorted(name for name in mean if mean[name].is_floating_point() and name not in personal)
    )
    reference.agree("down_bias", mean["down.0.bias"])
    reference.agree("counter", mean["bn1.num_batches_tracked"])
    if personal:
        assert {name.partition(".")[0] for name in personal} == {"bn1", "down"}


# FedOMG, FedSAM -----------------------------------------------------------------------------------------------------


def stacked_updates(reference: Reference) -> Tensor:
    """The sites' updates, one a row: those of a weight row by row, then those of a bias."""
    names = [f"update{k}" for k in range(4)]
    if "update0" in reference.tensors:
        rows = [reference.tensors[name] for name in names if name in reference.tensors]
        if "update2 (replaces the above)" in reference.inputs:
            rows[2] = -rows[0] + 0.1 * rows[2]
        return torch.stack(rows)
    tensors = reference.tensors
    found = [name for name in names if f"{name} of weight" in tensors]
    return torch.stack([torch.cat([tensors[f"{n} of weight"].flatten(), tensors[f"{n} of bias"]]) for n in found])


@compares("federated", "fedomg_1", "fedomg_2", "fedomg_3")
def test_fedomg_s_direction(reference: Reference) -> None:
    updates, kappa = stacked_updates(reference), reference.parameters["c"]
    direction = matching_shares(updates @ updates.T, kappa) @ updates / (1 + kappa**2)
    reference.agree("direction", direction)
    reference.agree("length_over_mean", direction.norm() / updates.mean(0).norm())


@compares("federated", "fedomg_4")
def test_fedomg_s_step_as_released(reference: Reference) -> None:
    updates, kappa, rate = stacked_updates(reference), reference.parameters["c"], reference.parameters["global_lr"]
    step = rate / (1 + kappa**2) / len(updates) * (matching_shares(updates @ updates.T, kappa) @ updates)
    reference.agree("step", step)
    reference.agree("length_over_mean", step.norm() / updates.mean(0).norm())


@compares("federated", "fedsam_1", "fedasam_1")
def test_where_the_loss_is_worst_nearby(reference: Reference) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double().train()
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(reference.tensors[name])
    loss = F.cross_entropy(network(reference.tensors["x"]), torch.tensor(reference.inputs["labels"]))
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    options: dict[str, Any] = {"adaptive": reference.method == "FedASAM", "eta": reference.parameters["eta"]}
    there = worst_nearby(parameters, list(gradients.values()), reference.parameters["rho"], biases=False, **options)
    moved = {name: (there[name] - parameters[name]).detach() for name in parameters}
    reference.agree("gradient", gradients)
    reference.agree("perturbation", moved)
    if "norm_of_perturbation" in reference.outputs:
        reference.agree("norm_of_perturbation", torch.cat([move.flatten() for move in moved.values()]).norm())
    # A tensor that is scaled moves by other multiples of its gradient from number to number.
    moves = {name: gradient.abs() > 1e-12 for name, gradient in gradients.items()}
    ratios = {name: (moved[name] / gradients[name])[moves[name]] for name in moved}
    scaled = [name for name, ratio in ratios.items() if len(ratio) > 1 and ratio.std() > 1e-6]
    reference.agree("scaled_tensors", scaled)


# The server's steps -------------------------------------------------------------------------------------------------

SERVERS = tuple(f"server_{name}_{number}" for name in ("adam", "yogi", "adagrad") for number in (1, 2))


def server_rounds(reference: Reference, optimizer: Any, moments: Mapping[str, Weights]) -> tuple[list[Tensor], Any]:
    """The common model after each of two rounds of three sites, and what the server's optimiser then remembers."""
    index = torch.arange(5, dtype=torch.float64)
    weight = Weights({"x": torch.cos(0.5 * index)})
    shares = torch.tensor(reference.parameters["samples"], dtype=torch.float64) / sum(reference.parameters["samples"])
    models = []
    for number in (1, 2):
        sent = torch.stack([torch.sin(0.9 * index + 1.3 * k + 2.1 * number) for k in range(3)])
        weight, moments = optimizer.step(weight, Weights({"x": shares @ sent - weight["x"]}), moments)
        models.append(weight["x"])
    return models, moments


@compares("federated", *SERVERS)
def test_the_server_s_adaptive_steps(reference: Reference) -> None:
    """Flower begins v at 0 where the paper has τ²: that start is put in. Its correction of FedAdam's moments is a
    factor of the rate that depends on the round alone: with it put in, FedAdam agrees."""
    rule, options = reference.id.split("_")[1], reference.parameters
    betas = {} if rule == "adagrad" else {"beta": options["beta_1"], "beta2": options["beta_2"]}
    optimizer = OPTIMIZERS[rule](**{"optimizer": rule, "rate": options["eta"], "tau": options["tau"], **betas})
    zero = Weights({"x": torch.zeros(5, dtype=torch.float64)})
    models, moments = server_rounds(reference, optimizer, {"first": zero, "second": zero})
    reference.agree("models", torch.stack(models))
    if "defaults" in reference.outputs:
        reference.agree("defaults", defaults_of(rule))
    if rule != "adam":
        reference.agree("m", moments["first"]["x"])
        reference.agree("v", moments["second"]["x"])
        return
    with pytest.MonkeyPatch.context() as patch:
        kind, rounds = type(optimizer), iter((1, 2))

        def corrected(self: Any, before: Weights, change: Weights, kept: Mapping[str, Weights]) -> Any:
            r = next(rounds) + 1
            factor = math.sqrt(1 - options["beta_2"] ** r) / (1 - options["beta_1"] ** r)
            return step(self.model_copy(update={"rate": self.rate * factor}), before, change, kept)

        step = kind.step
        patch.setattr(kind, "step", corrected)
        models, moments = server_rounds(reference, optimizer, {"first": zero, "second": zero})
    torch.testing.assert_close(
        torch.stack(models), torch.tensor(reference.outputs["models"], dtype=torch.float64), atol=LARGEST, rtol=0
    )
    reference.agree("m", moments["first"]["x"])
    reference.agree("v", moments["second"]["x"])


def defaults_of(rule: str) -> dict[str, float]:
    made: Any = OPTIMIZERS[rule](optimizer=rule)
    return {"eta": made.rate, "tau": made.tau, "beta_1": made.beta, "beta_2": made.beta2}


@compares("federated", "server_momentum_1")
def test_the_server_s_momentum(reference: Reference) -> None:
    optimizer = OPTIMIZERS["momentum"](beta=reference.parameters["momentum"], rate=reference.parameters["rate"])
    reference.agree("models", torch.stack(server_rounds(reference, optimizer, {})[0]))


# Robust aggregation -------------------------------------------------------------------------------------------------


@compares("federated", "robust_1", "robust_2", "robust_3", "robust_4", "robust_5")
def test_robust_rules(reference: Reference) -> None:
    count, faulty = reference.parameters["n"], reference.parameters["f"]
    if reference.tensors:
        models = [{"w": reference.tensors[f"model{k}"]} for k in range(count)]
    else:
        numbers = reference.inputs["one number per model"]
        models = [{"w": torch.tensor([number], dtype=torch.float64)} for number in numbers]
    distances = robust.squared_distances(models)
    (best,) = robust.krum(distances, faulty)
    reference.agree("krum", models[best]["w"])
    if "median" not in reference.outputs:
        return
    several = robust.krum(distances, faulty, keep=count - faulty)
    reference.agree("multi_krum", weighted_average([models[k] for k in several], [1.0] * len(several))["w"])
    reference.agree("median", robust.coordinate_median(models)["w"])
    reference.agree("trimmed_mean", robust.trimmed_mean(models, faulty)["w"])
    if "krum_index" in reference.outputs:
        reference.agree("krum_index", best)
        scores = [score / (count - faulty - 1) for score in robust.krum_scores(distances, faulty)]
        reference.agree("krum_scores_of_byzfl_mean_of_n_minus_f_minus_1", scores)
    sites = [f"site{k}" for k in range(count)]
    verdict = Krum(faulty=faulty).judge(sites, [Weights(model) for model in models], Weights(models[0]))
    assert verdict.report["left_out"] == [site for site in sites if site != f"site{best}"]


@compares("federated", "fltrust_1")
def test_trust_in_sites(reference: Reference) -> None:
    trusted = reference.tensors["trusted update"]
    updates = [*(reference.tensors[f"update{k}"] for k in range(3)), -trusted]
    centre = Weights({"w": torch.zeros(6, dtype=torch.float64)})
    names = ["root", *(f"site{k}" for k in range(4))]
    models = [Weights({"w": value}) for value in (trusted, *updates)]
    mean, report = Trust(trusted="root").combine(names, models, centre)
    reference.agree("trust", [report["trust"][name] for name in names[1:]])
    lengths = [robust.update_norm(model, centre) for model in models]
    reference.agree("length_factors", [lengths[0] / own for own in lengths[1:]])
    reference.agree("mean_with_the_trusted", mean["w"])
    reference.agree("mean_without_the_trusted", mean["w"])


# Styles, FedADG, differential privacy -------------------------------------------------------------------------------


@compares("federated", "ccst_1")
def test_styles_of_images(reference: Reference) -> None:
    first, second = reference.tensors["maps1"], reference.tensors["maps2"]
    means, deviations = channel_styles(first, reference.parameters["eps"], unbiased=True)
    reference.agree("mean", means)
    reference.agree("deviation", deviations)
    overall = StyleAccumulator()
    overall.add(first)
    overall.add(second)
    mean, deviation = overall.result()
    reference.agree("overall_mean", mean)
    reference.agree("overall_deviation", deviation)
    styles = (value.double().expand(len(first), -1) for value in (mean, deviation))
    reference.agree("stylised", adain(first, *styles, unbiased=True))


@compares("federated", "adain_1")
def test_adaptive_instance_normalisation(reference: Reference) -> None:
    style = channel_styles(reference.tensors["style"], reference.parameters["eps"], unbiased=True)
    reference.agree("result", adain(reference.tensors["content"], *style, reference.parameters["eps"], unbiased=True))


@compares("federated", "fedadg_1", "fedadg_2")
def test_fedadg_s_losses(reference: Reference) -> None:
    pacs, options, labels = reference.id == "fedadg_1", reference.parameters, torch.tensor(reference.inputs["labels"])
    condition = (
        scaled_one_hot(labels, 3, options["condition"]).double() @ reference.tensors["D: weight on the condition y"]
    )
    generated = reference.tensors["generated h'"].clone().requires_grad_(True)
    answers = [
        (features @ reference.tensors["D: weight on h"] + condition).sigmoid()
        for features in (generated, reference.tensors["features h"])
    ]
    reference.agree("discriminator", discriminator_loss(*answers, "least_squares" if pacs else "formula"))
    task = F.cross_entropy(reference.tensors["logits"], labels)
    # λ is the share of the alignment, α in the code that of the task.
    reference.agree("extractor_and_classifier", total_loss(task, alignment_loss(answers[1]), 1 - options["alpha"]))
    loss = reference_loss(answers[0], "towards_features" if pacs else "formula")
    reference.agree("generator", loss)
    reference.agree("generator_gets_a_gradient", bool(torch.autograd.grad(loss, generated)[0].abs().sum() > 0))


@compares("federated", *(f"differential_privacy_{number}" for number in range(1, 7)))
def test_epsilon_is_a_bound_and_near(reference: Reference) -> None:
    options = reference.parameters
    steps = NoisySteps(options["sigma"], options["sample_rate"], options["steps"])
    ours, exact = epsilon([steps], options["delta"]), reference.outputs["dp_accounting_pld"]
    assert exact <= ours <= exact + 0.02
    assert ours <= reference.outputs["opacus_rdp"] + 1e-6


@compares("federated", "differential_privacy_7")
def test_the_sum_of_clipped_gradients(reference: Reference) -> None:
    factors = torch.tensor([0.1, 1.0, 2.0, 1e-9], dtype=torch.float64)
    weight = reference.tensors["gradient of weight by sample"] * factors[:, None, None]
    bias = reference.tensors["gradient of bias by sample"] * factors[:, None]
    for name, value in zip(("weight", "bias"), clipped_sum([weight, bias], 1.0), strict=True):
        reference.agree(name, value)


@compares("federated", "fedgma_1")
def test_fedgma_s_mask(reference: Reference) -> None:
    updates, samples = reference.tensors["u"], torch.tensor(reference.parameters["samples"]).double()
    shares = samples / samples.sum()
    change, signs = (torch.einsum("s,sij->ij", shares, values) for values in (updates, updates.sign()))
    for threshold in ("0.55", "1.0", "0"):
        found = masked_by_agreement(change, signs, float(threshold))
        reference.agree(f"change, threshold {threshold}", found)
