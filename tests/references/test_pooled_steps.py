"""Whole steps of pooled methods on linear networks: the weights that the authors' own code comes to."""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
import torch
import torch.nn.functional as F
from authors_numbers import Reference, compares
from linear_pool import batch, linear, network, pool
from torch import Tensor, nn

from fedshift.federation.site import Site
from fedshift.functional.meta_learning import inner_step
from fedshift.functional.mixing import gradient_perturbed
from fedshift.methods.composition import triplets
from fedshift.methods.composition.puzzles import Puzzles
from fedshift.methods.composition.triplets import KeyQueue, momentum_triplet_loss
from fedshift.methods.pooled import dger, epi_fcr
from fedshift.methods.pooled.crossgrad import CrossGrad
from fedshift.methods.pooled.dger import DGER, inverse_frequencies
from fedshift.methods.pooled.eisnet import EISNet, Parts
from fedshift.methods.pooled.epi_fcr import EpiFCR
from fedshift.methods.pooled.feature_critic import Critic, FeatureCritic
from fedshift.methods.pooled.jigen import JiGen, jigsaw_loss
from fedshift.methods.pooled.masf import MASF, clipped_by_norm

pytestmark = pytest.mark.usefixtures("double")


@compares("pooled", "crossgrad_1")
def test_a_step_of_crossgrad(reference: Reference) -> None:
    given, options = reference.tensors, reference.parameters
    label_network, domain_network = (
        network(nn.Identity(), linear(given[name]), 5, classes) for name, classes in (("A", 3), ("G", 2))
    )
    labels, domains = reference.inputs["labels"], reference.inputs["domains"]
    probe = given["x"].clone().requires_grad_(True)
    label_loss = F.cross_entropy(label_network(probe), torch.tensor(labels))
    domain_loss = F.cross_entropy(domain_network(probe), torch.tensor(domains))
    (by_label,), (by_domain,) = (torch.autograd.grad(loss, probe) for loss in (label_loss, domain_loss))
    reference.agree("gradient of the domain loss by x, not clipped", by_domain)
    reference.agree("entries of it beyond 0.1", int((by_domain.abs() > options["clip"]).sum()))
    moved = {
        name: gradient_perturbed(given["x"], gradient, options["eps_f = eps_d"], options["clip"])
        for name, gradient in (("x_d", by_domain), ("x_l", by_label))
    }
    for name, inputs in moved.items():
        reference.agree(name, inputs)
    share = options["alpha_f = alpha_d"]
    for name, loss, model, inputs, numbers in (
        ("label loss", label_loss, label_network, moved["x_d"], labels),
        ("domain loss", domain_loss, domain_network, moved["x_l"], domains),
    ):
        reference.agree(name, (1 - share) * loss + share * F.cross_entropy(model(inputs), torch.tensor(numbers)))
    method = CrossGrad()
    parts = network(nn.Identity(), nn.Linear(5, 3), 5, 3)  # a third domain, of which the batch has no sample
    with torch.no_grad():
        parts.classifier.weight.copy_(torch.cat([given["G"], torch.zeros(1, 5)]))  # type: ignore[operator, arg-type]
        parts.classifier.bias.copy_(torch.tensor([0.0, 0.0, -1e4]))  # type: ignore[operator]
    site, weights = pool(method, label_network, [batch(given["x"], labels, domains)], options["rate"], parts=parts)
    update = method.fit(site, weights, steps=1)
    reference.agree("A after the step", update.weights["classifier.weight"])
    reference.agree("G after the step", site.memory.weights("parts")["classifier.weight"][:2])


@compares("pooled", "feature-critic_1")
def test_a_step_of_feature_critic(reference: Reference) -> None:
    given, options = reference.tensors, reference.parameters
    model = network(linear(given["A"]), linear(given["G"]), 3, 3)
    critic = Critic(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    critic.load_state_dict(
        {name: given[key] for name, key in zip(critic.state_dict(), ("w1", "b1", "w2", "b2"), strict=True)}
    )
    train, test = batch(given["xa"], reference.inputs["labels_a"]), batch(given["xb"], reference.inputs["labels_b"], 1)
    features = model.features(train.inputs)
    loss = F.cross_entropy(model.classifier(features), train.targets)
    reference.agree("h on the meta-train features", critic(features))
    reference.agree("CE on xa", loss)
    rate = options["alpha = rate of theta and phi"]
    (gradient,) = torch.autograd.grad(loss, model.features.weight, retain_graph=True)
    ahead = network(linear(given["A"] - rate * gradient), linear(given["G"]), 3, 3)
    reference.agree("L_val at theta_old", F.cross_entropy(ahead(test.inputs), test.targets))
    method = FeatureCritic(critic_weight=options["beta"])
    total = method.step_with_critic(model, critic, features, loss, test, rate)
    by_model, by_classifier, *by_critic = torch.autograd.grad(total, [*model.parameters(), *critic.parameters()])
    reference.agree("A after the step", given["A"] - rate * by_model)
    reference.agree("G after the step", given["G"] - rate * by_classifier)
    names = ("gradient of -tanh(L_old - L_new) by w1, phi not yet stepped", "by b1", "by w2", "by b2")
    for name, found in zip(names, by_critic, strict=True):
        reference.agree(name, found)


@compares("pooled", "masf_2")
def test_a_step_of_masf(reference: Reference) -> None:
    """With an identity for the metric network. What is compared before and after the clip is the released gradient."""
    given, options = reference.tensors, reference.parameters
    model = network(linear(given["A"]), linear(given["G"]), 3, 3)
    *train, test = (batch(given["x"][k], reference.inputs["labels"][k], k) for k in range(3))
    losses = [F.cross_entropy(model(one.inputs), one.targets) for one in (*train, test)]
    reference.agree("CE of the domains", torch.stack(losses))
    rate, clip = options["inner rate"], options["gradients_clip_value"]
    off = {"inner_clip": clip, "global_weight": 0.0, "local_weight": 0.0}
    task = MASF(**off).loss(model, nn.Identity(), train, test, rate)
    reference.agree("outer task loss (mean over meta-train only)", task)
    by_task = torch.autograd.grad(task, list(model.parameters()))
    reference.agree("norms of its gradient before the inner clip", [float(one.norm()) for one in by_task])
    ahead = inner_step(dict(model.named_parameters()), clipped_by_norm(by_task, clip), rate)
    for name, gradient, there in zip("AG", by_task, ahead.values(), strict=True):
        reference.agree(f"its gradient by {name}", gradient)
        reference.agree(f"{name}'", there)
    one = {"inner_clip": clip, "temperature": options["temperature"], "margin": options["margin"]}

    def meta(**weights: Any) -> float:
        method = MASF(**one, **weights)
        return (method.loss(model, nn.Identity(), train, test, rate) - task).item()

    reference.agree("global", meta(global_weight=1.0, local_weight=0.0))
    third = {"setting": "released", "global_weight": 0.0, "local_weight": 1.0}
    reference.agree("triplet loss on the first third of each batch", meta(**third))
    reference.agree("triplet loss on whole batches (not what the code does)", meta(global_weight=0.0, local_weight=1.0))
    weights = {"global_weight": options["beta_1"], "local_weight": options["beta_2"]}
    for said, chosen in (
        ("before the clip", {"setting": "released", "meta_clip": None}),
        ("after the clip", {"setting": "released", "meta_clip": clip}),
        ("with whole batches, unclipped (not what the code does)", {}),
    ):
        whole = MASF(**one, **weights, **chosen).loss(model, nn.Identity(), train, test, rate)  # type: ignore[arg-type]
        by_all = torch.autograd.grad(whole, list(model.parameters()))
        by_meta = [both - own for both, own in zip(by_all, by_task, strict=True)]
        for name, gradient in zip("AG", by_meta, strict=True):
            reference.agree(f"meta gradient by {name}' {said}", gradient)
        if said == "before the clip":
            reference.agree("norms before the clip", [float(gradient.norm()) for gradient in by_meta])


def dger_s_parts(reference: Reference) -> dger.Parts:
    """Its heads with the entry's weights, which are single linear layers."""
    given = reference.tensors
    parts = dger.Parts(4, 3, 3, ())
    state = {"discriminator.0.weight": given["U"], "discriminator.0.bias": given["e"]}
    for kind, weight, bias in (("own", "W", "b"), ("reversed", "V", "c")):
        state |= {f"{kind}.{i}.0.weight": given[weight][i] for i in range(3)}
        state |= {f"{kind}.{i}.0.bias": given[bias][i] for i in range(3)}
    parts.load_state_dict(state)
    return parts


class Noted(nn.Module):
    """A head whose logits' gradient is kept."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        self.logits: Tensor = self.head(features)
        self.logits.retain_grad()
        return self.logits


@compares("pooled", "dger_1")
def test_dger_s_losses(reference: Reference) -> None:
    f = reference.tensors["f"].clone().requires_grad_(True)
    every = torch.tensor(reference.inputs["labels"])
    features, labels = list(f.split(6)), list(every.split(6))
    options, parts = reference.parameters, dger_s_parts(reference)
    method = DGER(
        reversal=options["lambda_d"],
        agreement_weight=options["lambda_c (alpha_1)"],
        entropy_reversal=options["lambda_cp (alpha_2)"],
    )
    reference.agree("class weights, own domain", torch.stack([inverse_frequencies(own, 3) for own in labels]))
    others = [torch.cat([labels[j] for j in range(3) if j != i]) for i in range(3)]
    reference.agree("class weights, other domains", torch.stack([inverse_frequencies(one, 3) for one in others]))
    sizes = torch.arange(3).repeat_interleave(torch.tensor(options["samples of the domains"]))
    by_domain = inverse_frequencies(sizes, 3)
    reference.agree("weights of the domains in L_D", 3 * by_domain)

    theirs = dger.others_loss(parts, features, labels)
    reference.agree("L_er, T_i (fixed) on the other domains", theirs)
    (gradient,) = torch.autograd.grad(method.agreement_weight * theirs, f)
    reference.agree("gradient of it at F's features", gradient)
    hidden = method.domain_loss(parts, features, by_domain)
    reference.agree("L_D", hidden)
    reference.agree("gradient of L_D at F's features", torch.autograd.grad(hidden, f)[0])

    for kind in (parts.own, parts.reversed):
        for i in range(3):
            kind[i] = Noted(kind[i])
    own = dger.own_loss(parts, features, labels)
    reference.agree("L_er, T_i on its own domain (F fixed)", own)
    own.backward()  # type: ignore[no-untyped-call]
    assert f.grad is None
    at_logits = torch.stack([cast(Noted, head).logits.grad for head in parts.own])  # type: ignore[arg-type, misc]
    reference.agree("gradient of it at T_i's logits, i = 0, 1, 2", at_logits)
    balanced = method.balanced_entropy(parts, features, labels)
    reference.agree("L_ge", balanced)
    balanced.backward()  # type: ignore[no-untyped-call]
    reference.agree("gradient of L_ge at F's features", f.grad)
    at_logits = torch.stack([cast(Noted, head).logits.grad for head in parts.reversed])  # type: ignore[arg-type, misc]
    reference.agree("gradient of L_ge at T'_i's logits, i = 0, 1, 2", at_logits)


@compares("pooled", "dger_2")
def test_a_step_of_dger(reference: Reference) -> None:
    given, parts = reference.tensors, dger_s_parts(reference)
    model = network(linear(given["A"]), linear(given["G"]), 4, 3)
    batches = [batch(given["x"][6 * k : 6 * k + 6], reference.inputs["labels"][6 * k : 6 * k + 6], k) for k in range(3)]
    method = DGER(hidden=(), warm_up=0.0)
    site, weights = pool(method, model, batches, 0.1, parts=parts)
    update, after = method.fit(site, weights, steps=3), site.memory.weights("parts")
    reference.agree("F", update.weights["features.weight"])
    reference.agree("T", update.weights["classifier.weight"])
    reference.agree("D weight", after["discriminator.0.weight"])
    for name, kind in (("T_i weights", "own"), ("T'_i weights", "reversed")):
        reference.agree(name, torch.stack([after[f"{kind}.{i}.0.weight"] for i in range(3)]))
    later = dger_s_parts(reference)
    later.load_state_dict(dict(after))
    features, labels = [model.features(one.inputs) for one in batches], [one.targets for one in batches]
    for name, known in (
        ("gradient of the term 'others' by A with T_i after its step", later),
        ("the same with T_i before its step (not what the code does)", parts),
    ):
        term = method.agreement_weight * dger.others_loss(known, features, labels)
        reference.agree(name, torch.autograd.grad(term, model.features.weight, retain_graph=True)[0])


@compares("pooled", "epi-fcr_1")
def test_a_step_of_epi_fcr(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    given, options = reference.tensors, reference.parameters
    monkeypatch.setattr(epi_fcr, "drawn_pair", lambda domains, draws: (0, 2))
    model = network(linear(given["A"]), linear(given["G"]), 3, 3)
    parts = epi_fcr.Parts(model, 3)
    start = {f"domains.{j}.features.weight": given["Aj"][j] for j in range(3)}
    start |= {f"domains.{j}.classifier.weight": given["Gj"][j] for j in range(3)}
    parts.load_state_dict({**start, "random.weight": given["H"]})
    batches = [batch(given["x"][k], reference.inputs["labels"][k], k) for k in range(3)]

    def loss(summed: bool = True, **weights: float) -> float:
        """What the published network minimises with these weights alone."""
        off = dict.fromkeys(("feature_weight", "classifier_weight", "random_weight"), 0.0)
        method = EpiFCR(summed=summed, **{**off, **weights})  # type: ignore[arg-type]
        return method.published_loss(model, parts, tuple(batches), (0, 2)).item()

    together = loss()
    reference.agree("sum of CE over domains (L_agg)", together)
    released = EpiFCR(setting="released", warm_up=0.0)  # type: ignore[call-arg]
    for name, number, output in (
        ("feature_weight", 1, "lambda_1 CE (published features, their classifier)"),
        ("classifier_weight", 2, "lambda_2 CE (their features, published classifier)"),
        ("random_weight", 3, "lambda_3 times the sum of CE of the random head"),
    ):
        weight = getattr(released, name)
        term = loss(**{name: weight}) - together
        reference.agree(output, term)
        beside = 3 * (loss(summed=False, **{name: weight}) - loss(summed=False)) / (term / weight)
        reference.agree(f"lambda_{number} beside one domain's CE", beside)  # the mean of all weighs no term anew
    site, weights = pool(released, model, batches, options["rate"], parts=parts)
    update, after = released.fit(site, weights, steps=3), site.memory.weights("parts")
    reference.agree("step of A", update.weights["features.weight"] - given["A"])
    reference.agree("step of G", update.weights["classifier.weight"] - given["G"])
    for name, part in (("Aj", "features"), ("Gj", "classifier")):
        moved = torch.stack([after[f"domains.{j}.{part}.weight"] - given[name][j] for j in range(3)])
        reference.agree(f"step of {name}", moved)
    mean = EpiFCR(warm_up=0.0)
    site, weights = pool(mean, model, batches, 3 * options["rate"], parts=parts)
    torch.testing.assert_close(
        mean.fit(site, weights, steps=3).weights["features.weight"], update.weights["features.weight"]
    )
    early = EpiFCR(setting="released", warm_up=1.0)  # type: ignore[call-arg]
    site, weights = pool(early, model, batches, options["rate"], parts=parts)
    warm = early.fit(site, weights, steps=3).weights["features.weight"]
    reference.agree("step of A in the warm-up", warm - given["A"])


@compares("pooled", "jigen_2")
def test_jigen_s_loss(reference: Reference) -> None:
    labels, orders = (torch.tensor(reference.inputs[name]) for name in ("labels", "orders"))
    said, named = (reference.tensors[name] for name in ("class_logits", "jigsaw_logits"))
    weight = reference.parameters["jig_weight"]
    reference.agree("jigsaw loss", F.cross_entropy(named, orders))
    whole = "class loss, all images (the code's default and the README's command)"
    cases: tuple[tuple[Literal["ordered", "all"], str, str], ...] = (
        ("all", whole, "total, all images"),
        ("ordered", "class loss, ordered images (--classify_only_sane)", "total, ordered images"),
    )
    for class_on, name, total in cases:
        reference.agree(total, jigsaw_loss(said, labels, named, orders, weight=weight, class_on=class_on))
        reference.agree(name, jigsaw_loss(said, labels, named, orders, weight=0.0, class_on=class_on))
    assert JiGen().jigsaw_weight == weight


class Colours:
    """Stands for a site whose inputs are pixels of three colours."""

    def pixels(self, inputs: Tensor) -> Tensor:
        return inputs

    inputs_of = pixels

    def generator_for(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(0)


@pytest.mark.slow
@compares("pooled", "jigen_1")
def test_which_tiles_of_jigen_lose_their_colour(reference: Reference) -> None:
    """Of 300,000 images of nine pixels, by counting."""
    images = torch.rand(300_000, 3, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    grey = reference.parameters["tile_random_grayscale"]
    for name, ordered in (("shuffled", 0.0), ("in order", 1.0)):
        found, orders = Puzzles(cast(Site, Colours()), 30, ordered, grey).of(images)
        kept = (orders > 0) if name == "shuffled" else (orders == 0)
        tiles = (found[kept].std(dim=1) < 1e-6).sum((1, 2)).double()
        reference.agree(f"P(some tile grey | {name})", (tiles > 0).double().mean())
        reference.agree(f"expected grey tiles per image, {name}", tiles.mean())
    orders = Puzzles(cast(Site, Colours()), 30, reference.parameters["bias_whole_image"], grey).orders(3_000_000)
    shares = torch.bincount(orders, minlength=31) / len(orders)
    reference.agree("P(in order)", shares[0])
    each = "P(permutation p), each p of 1 ... 30"
    farthest = shares[1:][(shares[1:] - reference.outputs[each]).abs().argmax()]
    reference.agree(each, farthest)
    assert farthest.item() == pytest.approx(0.1 / 31, rel=0.05)


def eisnet_s_pairs(reference: Reference) -> tuple[Tensor, ...]:
    """Queries, keys and labels of the batch, the queue and its labels."""
    q, k, old = (F.normalize(reference.tensors[name]) for name in ("q0", "k0", "o0"))
    labels = torch.tensor(reference.inputs["labels"])
    before = torch.tensor(reference.inputs["old_labels"])
    return q.requires_grad_(True), k, labels, torch.cat([old, k]), torch.cat([before, labels])


@compares("pooled", "eisnet_1", "eisnet_2")
def test_eisnet_s_triplets(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, labels, queue, queue_labels = eisnet_s_pairs(reference)
    margin = reference.parameters["margin"]
    value = momentum_triplet_loss(q, k, labels, queue, queue_labels, margin)
    reference.agree("value", value)
    reference.agree("gradient", torch.autograd.grad(value, q)[0])
    seen: list[Tensor] = []

    def noted(found: Tensor, number: int | None, generator: torch.Generator) -> Tensor:
        """The draw replaced by the first ``first`` entries; ``repeated``: the first one as often as is drawn."""
        seen.append(found)
        sizes = found.sum(1).clamp_max(number or 10**9)
        if repeated:
            times = torch.zeros(found.shape)
            times[torch.arange(len(found)), found.int().argmax(1)] = sizes.to(times)
            return times
        return (found & (found.cumsum(1) <= sizes[:, None])).double()

    monkeypatch.setattr(triplets, "drawn_with_repetition", noted)
    draws = torch.Generator()
    repeated = False
    value = momentum_triplet_loss(q, k, labels, queue, queue_labels, margin, 2, draws)
    reference.agree("value k=2, first two", value)
    reference.agree("gradient k=2, first two", torch.autograd.grad(value, q)[0])
    reference.agree("triplets k=2", int(seen[-1].sum(1).clamp_max(2).sum()))
    reference.agree("triplets k=256", int(seen[-1].sum()))
    pairs = (labels[:, None] == labels[None]).triu(1).nonzero()
    used = seen[-1].any(1)
    reference.agree("positive_pairs (query, key of the current batch)", pairs[used])
    reference.agree("semi-hard negatives of each of these pairs", seen[-1].sum(1)[used])
    reference.agree("rows of the queue that are semi-hard for the first pair", seen[-1][0].nonzero().flatten())
    repeated = True
    number = 256 if "value k=256, first one repeated" in reference.outputs else 5
    value = momentum_triplet_loss(q, k, labels, queue, queue_labels, margin, number, draws)
    reference.agree(f"value k={number}, first one repeated", value)


@compares("pooled", "eisnet_3")
def test_eisnet_s_loss(reference: Reference) -> None:
    labels, orders = (torch.tensor(reference.inputs[name]) for name in ("labels", "orders"))
    said, named = (reference.tensors[name] for name in ("class_logits", "jigsaw_logits"))
    method = EISNet()
    assert method.jigsaw_weight == reference.parameters["jig_weight"]
    reference.agree("jigsaw loss", F.cross_entropy(named, orders))
    own = jigsaw_loss(said, labels, named, orders, weight=0.0, class_on=method.class_on)
    whole = jigsaw_loss(said, labels, named, orders, weight=method.jigsaw_weight, class_on=method.class_on)
    reference.agree("class loss", own)
    shares = [epoch / reference.parameters["epochs"] for epoch in (0, 25, 50, 75, 99)]
    reference.agree("beta at epochs 0, 25, 50, 75, 99", [method.beta(share) for share in shares])
    for epoch, share in ((0, 0.0), (99, 0.99)):
        reference.agree(f"total at epoch {epoch}", whole + method.beta(share) * 0.8)


@compares("pooled", "eisnet_4")
def test_eisnet_s_keys(reference: Reference) -> None:
    model = network(nn.BatchNorm1d(2), nn.Linear(2, 3), 2, 3)
    queue = KeyQueue(model, 128, 8, reference.parameters["m"])
    encoder = cast(nn.Sequential, queue.encoder.network)[0]
    with torch.no_grad():
        encoder.weight.fill_(2.0)
        model.features.weight.fill_(3.0)  # type: ignore[operator, union-attr]
        model.features.running_mean.fill_(5.0)  # type: ignore[operator, union-attr]
    queue.train().follow(model)
    reference.agree("theta_key after a step", encoder.weight[0])
    queue.enqueue(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64))
    reference.agree("mode of the key encoder", "training" if encoder.training else "evaluation")
    name = "running mean of a key encoder's BatchNorm after a step (own 0, query encoder 5)"
    reference.agree(name, encoder.running_mean[0])
    wide = KeyQueue(network(nn.Identity(), nn.Linear(512, 3), 512, 3), 128, 8, 0.999)
    numbers = sum(parameter.numel() for parameter in wide.embed.parameters())
    reference.agree("numbers in the embedding head, d = 512", numbers)
    images = torch.rand(4, 1, 9, 9)
    flat = network(nn.Flatten(), nn.Linear(81, 3), 81, 3)
    method = EISNet(ordered=0.0, embedding=4)
    site, weights = pool(method, flat, [batch(images, [0, 1, 2, 0])], 0.1)
    site.pixels = site.inputs_of = lambda inputs: inputs  # type: ignore[method-assign, assignment]
    parts = method.parts(site, lambda: Parts(flat, method))
    keys = F.normalize(parts.embed(images.flatten(1)))
    method.fit(site, weights, steps=1)
    in_order = torch.allclose(site.memory.weights("parts")["keys"], keys)
    shown = "the image in order (its tiles' view goes to the query encoder)"
    reference.agree("keys are of", shown if in_order else "the shuffled image")
