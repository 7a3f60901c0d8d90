"""Single terms of pooled methods: the numbers of the authors' own functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from authors_numbers import Reference, compares
from linear_pool import batch, linear, network, pool
from torch import Tensor, nn

from fedshift.functional.adversarial import domain_identifier_loss, reverse_gradient
from fedshift.functional.distillation import softened_divergence
from fedshift.functional.losses import entropy
from fedshift.functional.masking import straight_through_mask
from fedshift.functional.schedules import ramp
from fedshift.functional.spectra import amplitude, interpolate_amplitudes
from fedshift.methods.composition.mean_teacher import MeanTeacher
from fedshift.methods.composition.mixstyle import Mixer, mixed_styles, partners_in_the_other_half
from fedshift.methods.composition.puzzles import shuffled_tiles
from fedshift.methods.heads import Experts, confident_pseudo_labels
from fedshift.methods.pooled import dsbn, srdc
from fedshift.methods.pooled.cdan import certainty_weights, condition, conditional_adversarial_loss
from fedshift.methods.pooled.dael import DAEL
from fedshift.methods.pooled.dmg import DMG, MaskedClassifier, overlap
from fedshift.methods.pooled.fact import FACT, sigmoid_ramp
from fedshift.methods.pooled.m3sda import classifier_discrepancy, moment_distance
from fedshift.methods.pooled.masf import class_confusion, confusion_divergence, semi_hard_triplet_loss
from fedshift.methods.pooled.mdan import combine_domains
from fedshift.methods.pooled.mixstyle import MixStyle
from fedshift.methods.pooled.srdc import SRDC, auxiliary_distribution, soft_cross_entropy, student_assignment
from fedshift.models.registry import build, parse

pytestmark = pytest.mark.usefixtures("double")


def asking(values: Tensor) -> Tensor:
    """A copy that asks for gradients."""
    return values.clone().requires_grad_(True)


# Adaptation ---------------------------------------------------------------------------------------------------------


@compares("pooled", "cdan_1", "cdane_1")
def test_cdan_s_adversarial_loss(reference: Reference) -> None:
    f, z, u = (asking(reference.tensors[name]) for name in "fzu")
    bias = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    strength = reference.parameters["strength of the reversal (coeff)"]
    p = z.softmax(1)
    judged = (condition(reverse_gradient(f, strength), p.detach()) @ u.T) + bias
    sides = slice(0, 4), slice(4, 8)
    weights = [torch.full((4,), 0.25, dtype=torch.float64) for _ in sides]
    if reference.method == "CDAN+E":
        entropies = reverse_gradient(entropy(p), strength)
        weights = [certainty_weights(entropies[side]) for side in sides]
    value = conditional_adversarial_loss(judged[sides[0]], judged[sides[1]], *weights)
    reference.agree("value", value)
    found = torch.autograd.grad(value, [f, z, u, bias], materialize_grads=True)
    for name, gradient in zip(("f", "z", "u"), found, strict=False):
        reference.agree(f"gradient by {name}", gradient)
    reference.agree("gradient by D's bias", found[3].reshape(1))


@compares("pooled", "mdan_1")
def test_mdan_s_rules(reference: Reference) -> None:
    s, t = reference.tensors["s"], reference.tensors["t"]
    domain_losses = torch.stack([domain_identifier_loss(s[k], t[k]) for k in range(3)])
    reference.agree("d_k", domain_losses)
    for mu in (0.01, 1.0):
        for rule in ("dynamic", "maxmin"):
            losses = asking(torch.tensor(reference.inputs["losses"], dtype=torch.float64))
            hidden = asking(domain_losses)
            value = combine_domains(losses, hidden, mu, reference.parameters["gamma"], rule)  # type: ignore[arg-type]
            reference.agree(f"{rule}, mu {mu}", value)
            reference.agree(
                f"gradient by (l, d), {rule}, mu {mu}", torch.stack(torch.autograd.grad(value, [losses, hidden]))
            )


@compares("pooled", "m3sda_1")
def test_m3sda_s_distances(reference: Reference) -> None:
    x, u = asking(reference.tensors["x"]), asking(reference.tensors["u"])
    value = moment_distance([*x, u], "mean_variance")
    reference.agree("mean_variance", value)
    by_sources, by_target = torch.autograd.grad(value, [x, u])
    reference.agree("gradient by x", by_sources)
    reference.agree("gradient by u", by_target)
    raw = moment_distance([*x, u], "raw")
    reference.agree("definition 1 of the paper, by loops", raw)
    reference.agree("its gradient by x", torch.autograd.grad(raw, x)[0])
    p, q = (reference.tensors[name].softmax(1) for name in ("p0", "q0"))
    reference.agree("discrepancy of p and q", classifier_discrepancy(p, q))


@compares("pooled", "dael_1")
def test_dael_s_terms(reference: Reference) -> None:
    given, labels = reference.tensors, reference.inputs["labels"]
    model = network(linear(given["A"]), Experts(map(linear, given["G"])), 4, 3)
    sources = tuple(batch(given["xw"][k], labels[k], k) for k in range(3))
    target = batch(given["uw"], None, 3)
    threshold = reference.parameters["conf_thre"]
    own = DAEL(threshold=threshold, consensus_weight=0).source_loss(model, sources, list(given["xs"]))
    both = DAEL(threshold=threshold).source_loss(model, sources, list(given["xs"]))
    unlabelled = DAEL(threshold=threshold).target_loss(model, target, given["us"])
    reference.agree("L_x", own)
    reference.agree("L_cr", both - own)
    reference.agree("L_u", unlabelled)
    experts = model.classifier
    assert isinstance(experts, Experts)
    said = experts.probabilities(model.features(given["uw"]))
    reference.agree("pseudo-labels", confident_pseudo_labels(said)[0])
    reference.agree("confidences", said.amax(0).amax(1))
    total = both + reference.parameters["weight_u"] * unlabelled
    by_features, *by_heads = torch.autograd.grad(total, list(model.parameters()))
    reference.agree("gradient of L_x + L_cr + 0.5 L_u by A", by_features)
    reference.agree("gradient by G", torch.stack(by_heads))


@compares("pooled", "dsbn_1")
def test_dsbn_s_centroids(reference: Reference) -> None:
    cases = {
        "all classes": reference.inputs["labels"],
        "class 2 missing at the target": [reference.inputs["labels"][0], [0, 1, 1, 0, 1, 1]],
        "first step": reference.inputs["labels"],
    }
    for name, labels in cases.items():
        normed = network(nn.Sequential(nn.BatchNorm1d(3)), nn.Linear(3, 3), 3, 3)
        parts = dsbn.Parts(normed, 1, 4, from_zero=True)
        if name != "first step":
            parts.centroids.copy_(reference.tensors["old"])
        f = asking(reference.tensors["f"])
        momentum = 1 - reference.parameters["decay_const"]
        moved = [parts.move(k, f[k], torch.tensor(labels[k]), momentum) for k in range(2)]
        loss = dsbn.centroid_distance(parts, moved)
        reference.agree(f"{name}: loss", loss)
        reference.agree(f"{name}: centroids", torch.stack(moved))
        reference.agree(f"{name}: gradient by f", torch.autograd.grad(loss, f)[0])
    reference.agree("ramp at 0, 0.1, 0.25, 0.5, 1", [ramp(share) for share in (0, 0.1, 0.25, 0.5, 1)])


@compares("pooled", "srdc_1")
def test_srdc_s_start_of_k_means(reference: Reference) -> None:
    """A pool whose sources and target have the entry's features: the network is its classifier W."""
    given, options = reference.tensors, reference.parameters
    model = network(nn.Identity(), linear(given["W"]), 4, 5)
    labels = torch.arange(15) % 5
    method = SRDC()
    assert method.cluster_passes == options["cluster_iter"]
    site, _ = pool(method, model, [], 0.1)
    target = SimpleNamespace(all_batches=lambda size: iter([(given["ft"], None, None)]))
    site.unlabelled = target  # type: ignore[assignment]
    site.all_batches = lambda mixed=False: iter([batch(given["fs"], labels.tolist())])  # type: ignore[method-assign]
    predicted = (given["ft"] @ given["W"].T).argmax(1)
    reference.agree("predicted classes of the target", predicted)
    starts = []
    with pytest.MonkeyPatch.context() as patch:
        original = srdc.kmeans_from
        patch.setattr(srdc, "kmeans_from", lambda *one: (starts.append(one[1]), original(*one))[1])
        for first, name in ((True, "epoch 0"), (False, "later epochs")):
            found = method.cluster_target(site, model, first)
            reference.agree(f"clusters in {name}", found.clusters)
            reference.agree(f"centres after k-means in {name}", found.centres)
    reference.agree("start in epoch 0 (means of the sources' classes)", starts[0])
    reference.agree("start in later epochs (means of the target's predicted classes now)", starts[1])


@compares("pooled", "srdc_3")
def test_srdc_s_weights_of_sources(reference: Reference) -> None:
    labels = torch.tensor(reference.inputs["labels"])
    reference.agree("weights", srdc.affinity(reference.tensors["fs"], reference.tensors["c"][labels]))


@compares("pooled", "srdc_2")
def test_srdc_s_terms(reference: Reference) -> None:
    labels = torch.tensor(reference.inputs["labels"])
    clusters, weights = F.one_hot(labels, 4).double(), reference.tensors["weights"]
    centres = reference.tensors["centres"]

    def compare(name: str, value: Tensor, by: Tensor, called: str | None = None) -> None:
        reference.agree(name, value)
        reference.agree(f"gradient of {called or name}", torch.autograd.grad(value, by)[0])

    for name, beta in (("L_t, epoch 0", 0.0), ("L_t, later, beta 1", 1.0), ("L_t, later, beta 0.5", 0.5)):
        z = asking(reference.tensors["z"])
        said = z.log_softmax(1)
        compare(name, soft_cross_entropy((1 - beta) * clusters + beta * auxiliary_distribution(said.exp()), said), z)
    z = asking(reference.tensors["z"])
    said = z.log_softmax(1)
    fixed = soft_cross_entropy(auxiliary_distribution(said.exp()).detach(), said)
    reference.agree(
        "gradient of L_t, later, beta 1, if q were a constant (the paper; not what the code does)",
        torch.autograd.grad(fixed, z)[0],
    )
    f = asking(reference.tensors["f"])
    near = student_assignment(f, centres)
    compare("L_t^emb, later, beta 1 (gradient by f)", soft_cross_entropy(auxiliary_distribution(near.exp()), near), f)
    z, f = asking(reference.tensors["z"]), asking(reference.tensors["f"])
    compare("L_s (gradient by z)", (weights * F.cross_entropy(z, labels, reduction="none")).mean(), z)
    near = student_assignment(f, centres)
    compare("L_s^emb (gradient by f)", (weights * F.nll_loss(near, labels, reduction="none")).mean(), f)
    reference.agree("lambda at share 0, 0.1, 0.5, 1", [ramp(share) for share in (0, 0.1, 0.5, 1)])


# Generalization -----------------------------------------------------------------------------------------------------


@compares("pooled", "fact_1")
def test_fact_s_mix_of_amplitudes(reference: Reference) -> None:
    a, b = (reference.tensors[name].permute(2, 0, 1) / 255 for name in "ab")
    for name, own, other, rate in (
        ("a with b's amplitude, 0.35", a, b, 0.35),
        ("b with a's amplitude, 0.35", b, a, 0.35),
        ("a with b's amplitude, 0.9", a, b, 0.9),
    ):
        mixed = interpolate_amplitudes(own, amplitude(other), torch.tensor(rate, dtype=torch.float64), None).clamp(0, 1)
        reference.agree(name, 255 * mixed.permute(1, 2, 0))


@compares("pooled", "fact_2")
def test_fact_s_losses_and_a_step_of_student_and_teacher(reference: Reference) -> None:
    given, options = reference.tensors, reference.parameters
    x, mixed, labels = given["x"], given["xm"], torch.tensor(reference.inputs["labels"])
    student = network(linear(given["A"]), linear(given["G"]), 3, 3)
    teacher = MeanTeacher(student, options["momentum"], warm_up=True)
    teacher.network.load_state_dict({"features.weight": given["At"], "classifier.weight": given["Gt"]})
    teacher.steps.fill_(7)
    temperature = options["T"]
    reference.agree("KL(teacher(x) || student(xm))", softened_divergence(teacher(x), student(mixed), temperature))
    reference.agree("KL(teacher(xm) || student(x))", softened_divergence(teacher(mixed), student(x), temperature))
    reference.agree("CE(x)", F.cross_entropy(student(x), labels))
    reference.agree("CE(xm)", F.cross_entropy(student(mixed), labels))
    weights = [options["lam_const"] * sigmoid_ramp(epoch / options["warmup_epoch"]) for epoch in range(7)]
    reference.agree("consistency weight", weights[2])
    reference.agree("consistency weight at epochs 0 ... 6", weights)
    method = FACT(setting="released")  # type: ignore[call-arg]
    total = method.loss(student, teacher, batch(x, reference.inputs["labels"]), mixed, epoch=2.0)
    reference.agree("total", total)
    for parameter, gradient in zip(
        student.parameters(), torch.autograd.grad(total, list(student.parameters())), strict=True
    ):
        parameter.data -= options["rate"] * gradient
    teacher.follow(student)
    reference.agree("A after the step", student.features.weight)
    reference.agree("At after the step", teacher.network.features.weight)  # type: ignore[union-attr]
    momenta = []
    for step in (1, 2, 8, 1999, 5000):
        scalar = MeanTeacher(linear(torch.ones(1, 1)), options["momentum"], warm_up=True)
        scalar.steps.fill_(step - 1)
        scalar.follow(linear(torch.zeros(1, 1)))
        momenta.append(scalar.network.weight)
    reference.agree("teacher's momentum at steps 1, 2, 8, 1999, 5000", torch.cat(momenta).flatten())


@compares("pooled", "dmg_1")
def test_dmg_s_masks(reference: Reference) -> None:
    given = reference.tensors
    masked = MaskedClassifier(linear(given["G"]), given["logits"].clone())
    domains, labels = torch.tensor(reference.inputs["domains"]), torch.tensor(reference.inputs["labels"])
    masks = torch.stack([straight_through_mask(mask, given["u"]) for mask in masked.masks])
    own = masks[domains, torch.arange(6)]
    reference.agree("mask", own)
    reference.agree("masked features", own * given["f"])
    loss = F.cross_entropy(masked.under_own_mask(given["f"], domains, given["u"]), labels)
    shared = overlap(masked.masks.sigmoid(), reference.parameters["smoothing"])
    total = loss + reference.parameters["OVERLAP_LAMBDA"] * shared
    reference.agree("CE under the own mask", loss)
    reference.agree("overlap penalty", shared)
    reference.agree("total", total)
    reference.agree("gradient by logits", torch.autograd.grad(total, masked.masks)[0])
    reference.agree("sparsity penalty (sum of sigmoids)", masked.masks.sigmoid().sum())
    released = MaskedClassifier(
        linear(given["G"]), given["logits"], logits=DMG(setting="released").together == "logits"
    )  # type: ignore[call-arg]
    reference.agree("scores at an unknown domain", released(given["f"]))
    reference.agree("probabilities at an unknown domain", released(given["f"]).softmax(1))


@compares("pooled", "masf_1")
def test_masf_s_alignment_of_classes_and_triplets(reference: Reference) -> None:
    z1, z2, e = (asking(reference.tensors[name]) for name in ("z1", "z2", "e"))
    confusions = [
        class_confusion(z, torch.tensor(reference.inputs[f"labels{k}"]), 4, reference.parameters["temperature"])
        for k, z in ((1, z1), (2, z2))
    ]
    reference.agree("classes that count", (confusions[0][1] & confusions[1][1]).double())
    value = confusion_divergence(*confusions)
    reference.agree("kd", value)
    for name, gradient in zip(("z1", "z2"), torch.autograd.grad(value, [z1, z2]), strict=True):
        reference.agree(f"gradient by {name}", gradient)
    labels = torch.tensor(reference.inputs["labels_e"])
    apart = semi_hard_triplet_loss(e, labels, 10.0)
    reference.agree("triplet loss of e, margin 10", apart)
    reference.agree("gradient by e, margin 10", torch.autograd.grad(apart, e)[0])
    reference.agree("triplet loss of e, margin 0.5", semi_hard_triplet_loss(e, labels, 0.5))


@compares("pooled", "jigen_3")
def test_jigen_s_tiles(reference: Reference) -> None:
    images = reference.tensors["x"][None]
    reference.agree("image", shuffled_tiles(images, torch.tensor([reference.inputs["order"]]))[0, 0])


@compares("pooled", "mixstyle_1")
def test_mixstyle_with_given_partners(reference: Reference) -> None:
    x, w = asking(reference.tensors["x"]), reference.tensors["w"]
    names = {
        "random": "partners without labels (perm)",
        "crossdomain, identity": "partners with labels, both draws of positions in a half = identity",
        "crossdomain, (1, 2, 0)": "partners with labels, both draws = (1, 2, 0)",
    }
    for name, option in names.items():
        order = torch.tensor(reference.parameters[option])
        mixed = mixed_styles(x, order, reference.tensors["lambda"], reference.parameters["eps"])
        reference.agree(name, mixed)
        if f"gradient {name}" in reference.outputs:
            reference.agree(f"gradient {name}", torch.autograd.grad((w * mixed).sum(), x)[0])


@compares("pooled", "mixstyle_2")
def test_where_mixstyle_stands_and_whom_it_mixes(reference: Reference) -> None:
    model = build(parse({"name": "resnet18"}), (3, 32, 32), 7, seed=0)
    Mixer(reference.parameters["p"], reference.parameters["alpha"], torch.Generator(), across=True).attach(model, None)
    places = [name for name, place in model.stages.items() if model.get_submodule(place)._forward_hooks]
    reference.agree("places", [name.replace("block", "behind layer") for name in places])
    reference.agree("number of places", len(places))
    partners = partners_in_the_other_half(16, torch.Generator().manual_seed(0))
    reference.agree("different partners among 16 rows", len(partners.unique()))
    site, _ = pool(MixStyle(partners="cross_domain"), network(nn.Identity(), linear(torch.ones(3, 5)), 5, 3), [], 0.1)
    reference.agree("domains in a batch", len(next(site.paired_batches(1)).domains.unique()))
