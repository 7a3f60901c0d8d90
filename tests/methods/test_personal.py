"""What each site has of its own: it predicts there, it never leaves, and nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from every_method import method_of
from tiny import MLP, NORMED, domains, evaluated, federation, plans, play, run, setting, start_of, step_on, vectors
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.data.domain import Domain
from fedshift.deploy.coordinator import check_deployed
from fedshift.errors import UserError
from fedshift.experiment.costs import dry_run
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Reply, Statistics, leaves, reply_content
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.federation.site_runner import SiteRunner
from fedshift.methods import registry
from fedshift.methods.base import PERSONAL, Method
from fedshift.methods.federated.fedproto import Prototypes
from fedshift.methods.rounds import finish_run, start_run
from fedshift.weights import Weights

KEEPING = [name for name in registry.names() if PERSONAL in registry.method_class(name)().traits.memory_names]
Model = dict[str, Tensor]
TUNED = {"fine_tune": {"steps": 3, "lr": 0.2}}


def ended(method: Method, **options: Any) -> LocalFederation:
    """A federation after two rounds and what comes after the last."""
    state, where = run(method, domains(MLP), MLP, **options)
    assert isinstance(where, LocalFederation)
    finish_run(method, where, state.weights)
    return where


@pytest.mark.parametrize("name", [*KEEPING, "tuned"])
def test_what_a_site_keeps_is_in_no_reply(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[tuple[str, Reply]] = []
    checked = SiteRunner._check_reply

    def noted(self: SiteRunner, call: str, reply: object) -> Any:
        assert isinstance(reply, Reply)
        replies.append((call, reply))
        return checked(self, call, reply)

    monkeypatch.setattr(SiteRunner, "_check_reply", noted)
    method = method_of("fedavg", **TUNED) if name == "tuned" else method_of(name)
    where = ended(method)
    kept = [runner.site.memory.weights(PERSONAL) for runner in where._runners.values()]
    assert len(kept) == 3
    for _, reply in replies:
        for _, content in leaves(reply_content(reply)):
            for sent in content.values() if isinstance(content, Weights) else ():
                assert not any(torch.equal(sent, mine) for own in kept for mine in own.values() if mine.dim())
    if registry.method_class(method.name).traits.sends == "a model without its classifier":
        fits = [reply for call, reply in replies if call == "fit"]
        assert not any(tensor.startswith("classifier") for fit in fits for tensor in fit.weights)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", KEEPING)
def test_what_a_site_keeps_is_declared(name: str) -> None:
    assert registry.method_class(name).traits.keeps


@pytest.mark.parametrize("tuning", [{"steps": 3, "lr": 0.2}, {"epochs": 3, "lr": 0.2}])
def test_fine_tuning_is_plain_training_of_the_last_model_and_changes_no_common_model(tuning: dict[str, Any]) -> None:
    found = [domains(MLP)[1]]  # five samples, one batch
    plain, _ = run(method_of("fedavg"), found, MLP, momentum=0.0)
    tuned = method_of("fedavg", fine_tune=tuning)
    state, where = run(tuned, found, MLP, momentum=0.0)
    assert state.weights == plain.weights
    finish_run(tuned, where, state.weights)
    assert isinstance(where, LocalFederation)
    site = where._runners["small"].site
    model = site.model(state.weights)
    batch = next(site.all_batches())
    for _ in range(3):
        model.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for value in model.parameters():
                assert value.grad is not None
                value -= 0.2 * value.grad
    for key, value in where.own_weights("small", state.weights).items():
        torch.testing.assert_close(value, model.state_dict()[key], atol=1e-6, rtol=1e-5)


def test_the_bytes_of_fine_tuning_are_foretold() -> None:
    method = method_of("fedavg", **TUNED)
    state, where = run(method, domains(MLP), MLP)
    before = {way: sum(kinds.values()) for way, kinds in where.ledger.total.items()}
    finish_run(method, where, state.weights)
    whole = setting(method, domains(MLP), MLP)
    dry = dry_run(method, plans(method, domains(MLP)), whole, whole.build_network(), rounds=2).finish
    size = state.weights.nbytes
    assert (dry.up, dry.down) == (3 * 8, 3 * size), "a number up, the model down, at three sites"
    assert sum(where.ledger.total["up"].values()) - before["up"] == dry.up
    assert sum(where.ledger.total["down"].values()) - before["down"] == dry.down


def test_sites_that_were_not_drawn_last_tune_too() -> None:
    method = method_of("fedavg", **TUNED)
    where = federation(method, domains(MLP), MLP)
    where.per_round = 1
    state = step_on(method, where, start_run(method, where, start_of(method, domains(MLP), MLP)))
    finish_run(method, where, state.weights)
    assert isinstance(where, LocalFederation)
    assert all(PERSONAL in runner.site.memory for runner in where._runners.values())
    assert len(where.drawn) == 1


def test_a_tuned_row_has_its_name_and_goes_with_no_private_training() -> None:
    method = method_of("fedprox", fine_tune={"epochs": 2})
    assert method.display == "fedprox+tuned"
    assert not method.traits.trains_privately
    assert method_of("fedbabu").display == "fedbabu"
    with pytest.raises(ValueError, match="either epochs or steps"):
        method_of("fedavg", fine_tune={"lr": 0.1})
    with pytest.raises(ValueError, match="leave it out"):
        registry.parse({"name": "recipe_unlabelled", "fine_tune": {"epochs": 1}})


def test_deployed_sites_measure_models_of_their_own_under_participants_alone() -> None:
    check_deployed([method_of("fedavg"), method_of("fedbn")], by_site=False)
    check_deployed([method_of("ditto")], by_site=True)
    for method in (method_of("ditto"), method_of("fedavg", **TUNED)):
        with pytest.raises(UserError, match=r"write protocol\.kind: participants"):
            check_deployed([method], by_site=False)


@pytest.mark.slow
def test_sites_whose_labels_contradict_each_other_predict_their_own() -> None:
    """The same samples, with classes that are numbered otherwise at each site: a common model is right in a third."""
    same = vectors("same", 30)
    found = [Domain(name, same.inputs, (same.labels + turn) % 3) for turn, name in enumerate(("a", "b", "c"))]

    def right(method: Method) -> float:
        state, where = run(method, found, MLP, rounds=4, budget=400, lr=0.1)
        finish_run(method, where, state.weights)
        hits = []
        for one in found:
            model = evaluated(method, where.own_weights(one.name, state.weights), found, MLP)
            with torch.no_grad():
                hits.append((model(torch.from_numpy(one.inputs)).argmax(1).numpy() == one.labels).mean())
        return float(np.mean(hits))

    assert right(method_of("fedavg", local_epochs=5)) == pytest.approx(1 / 3)
    own = {name: right(method_of(name, local_epochs=5)) for name in KEEPING}
    assert {name for name, part in own.items() if part > 0.7} == set(KEEPING) - {"per_fedavg"}, own
    assert own["per_fedavg"] > 0.5, "one step at a site"


def test_a_prototype_of_few_samples_stays() -> None:
    method = method_of("fedproto", smallest_class=2)
    found = [vectors("large", 9), vectors("small", 4)]  # 3, 3, 3 and 2, 1, 1 samples of the classes
    sent: dict[str, Any] = {}
    where = federation(method, found, MLP)
    assert isinstance(where, LocalFederation)
    state = start_run(method, where, start_of(method, found, MLP))
    for site, reply in where.ask(method.fit, to=where.sources, **state.parts).items():
        sent[site] = reply
    assert sent["large"].counts["number"].tolist() == [3, 3, 3]
    assert sent["small"].counts["number"].tolist() == [2, 0, 0]
    assert not sent["small"].prototypes["mean"][1:].any()
    assert where.ledger.total["up"].keys() == {"statistics", "numbers"}


def test_a_round_leaves_the_classifier_of_the_common_start() -> None:
    method = method_of("fedper")
    start = start_of(method, domains(MLP), MLP)
    for state, _ in play(method, domains(MLP), MLP):
        assert all(torch.equal(state.weights[name], start[name]) for name in method.personal(start))


def test_a_network_needs_a_body() -> None:
    method = method_of("fedper")
    network = setting(method, domains(MLP), {"name": "linear"}).build_network()
    with pytest.raises(UserError, match="choose a network with layers there"):
        method.check(network)


def site_of(method: Method, sizes: dict[str, int], network: dict[str, object] = MLP, **options: Any) -> Site:
    """The first of the sites, with plain gradient descent."""
    where = federation(method, domains(network, sizes), network, momentum=0.0, weight_decay=0.0, **options)
    assert isinstance(where, LocalFederation)
    site = where._runners[next(iter(sizes))].site
    site.begin(type(site.envelope)(1, 1, 0.0, 99))
    return site


def loss_at(site: Site, at: Model, batch: Batch) -> Tensor:
    """f(w): the cross-entropy of a mini-batch."""
    return nn.functional.cross_entropy(functional_call(site.network, at, (batch.inputs,)), batch.targets)


def slopes_at(site: Site, at: Model, batch: Batch) -> Model:
    """∇f(w)."""
    at = {name: value.detach().clone().requires_grad_() for name, value in at.items()}
    return dict(zip(at, torch.autograd.grad(loss_at(site, at, batch), list(at.values())), strict=True))


def moved(model: Model, along: Model, by: float) -> Model:
    """w + s·d."""
    return {name: value + by * along[name] for name, value in model.items()}


def test_three_rounds_of_apfl_by_hand() -> None:
    """w ← w − η∇f(w), v ← v − η∇_v f(v̄), α ← α − η ∂f(v̄)/∂α, v̄ = αv + (1 − α)w; v and α go on from round to round."""
    rate, method = 0.5, method_of("apfl")
    site = site_of(method, {"small": 5}, lr=rate)  # one batch
    batch, start = next(site.all_batches()), start_of(method, domains(MLP), MLP)
    w = {name: start[name].clone() for name, _ in site.network.named_parameters()}
    v, share = {name: value.clone() for name, value in w.items()}, torch.tensor(0.5)
    for number in (1, 2, 3):
        site.begin(type(site.envelope)(number, number, 0.0, 9))
        update = method.fit(site, Weights(w))  # type: ignore[attr-defined]
        assert update.loss == pytest.approx(loss_at(site, w, batch).item(), rel=1e-5), "that of what is sent"
        for value in (share, *v.values()):
            value.requires_grad_()
        slope, *own = torch.autograd.grad(loss_at(site, mixture(v, w, share), batch), [share, *v.values()])
        v = {name: value.detach() for name, value in moved(v, dict(zip(v, own, strict=True)), -rate).items()}
        w, share = moved(w, slopes_at(site, w, batch), -rate), (share - rate * slope).detach()
    torch.testing.assert_close(dict(update.weights), w)
    torch.testing.assert_close(dict(site.memory.weights(PERSONAL)), v)
    assert site.memory["share"] == pytest.approx(share.item())
    assert abs(share.item() - 0.5) > 1e-4
    torch.testing.assert_close(dict(method.own_weights(Weights(w), site.memory)), mixture(v, w, share))


def mixture(own: Model, common: Model, share: Tensor) -> Model:
    """v̄ = αv + (1 − α)w."""
    return {name: share * own[name] + (1 - share) * common[name] for name in own}


@pytest.mark.parametrize(("ahead", "share"), [(0.1, 1.0), (-0.1, 0.0)])
def test_a_share_of_apfl_stays_within_zero_and_one(ahead: float, share: float) -> None:
    """With v below w along the gradient more of v is better, and with v above it less."""
    method = method_of("apfl", share=share)
    site, start = site_of(method, {"small": 5}), start_of(method, domains(MLP), MLP)
    w = {name: start[name] for name, _ in site.network.named_parameters()}
    site.memory[PERSONAL] = Weights(moved(w, slopes_at(site, w, next(site.all_batches())), -ahead))
    method.fit(site, start)  # type: ignore[attr-defined]
    assert site.memory["share"] == share


def test_the_own_model_of_apfl_counts_statistics_as_the_common_one() -> None:
    """Both begin alike, and so does the mixture: after a step their BatchNorm has seen the same numbers."""
    method = method_of("apfl", steps_per_round=1)
    site = SiteRunner(plans(method, domains(NORMED))[0], setting(method, domains(NORMED), NORMED)).site
    site.begin(Envelope(exchange=1, round=1, progress=0.0, mini_batches_left=10))
    start = site.weights_of(site.model())
    common, own = method.fit(site, start).weights, site.memory.weights(PERSONAL)  # type: ignore[attr-defined]
    counted = [name for name in common if "running" in name]
    assert counted
    for name in counted:
        torch.testing.assert_close(own[name], common[name])
        assert not torch.equal(common[name], start[name])


@pytest.mark.parametrize("name", ["apfl", "fedrod", "ditto"])
def test_after_tuning_a_site_predicts_with_what_it_tuned(name: str) -> None:
    """What predicts takes a step of plain gradient descent, of however many parts it is."""
    method = method_of(name, fine_tune={"steps": 1, "lr": 0.2})
    site, start = site_of(method, {"small": 5}), start_of(method, domains(MLP), MLP)
    common = method.fit(site, start).weights  # type: ignore[attr-defined]
    before, batch = dict(method.own_weights(common, site.memory)), next(site.all_batches())
    method.tune(site, common)  # type: ignore[attr-defined]
    after = dict(method.own_weights(common, site.memory))
    torch.testing.assert_close(after, moved(before, slopes_at(site, before, batch), -0.2), atol=1e-6, rtol=1e-5)


def test_a_round_of_pfedme_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """θ ← θ − a(∇f(θ) + λ(θ − w)), K times on each mini-batch; then w ← w − ηλ(w − θ), near which θ stays."""
    rate, held, inner, often = 0.05, 4.0, 0.2, 3
    method = method_of("pfedme", proximal_weight=held, inner_steps=often, inner_rate=inner)
    site, start = site_of(method, {"large": 41}, lr=rate), start_of(method, domains(MLP), MLP)
    batches = list(site.batches())[:3]
    monkeypatch.setattr(site, "batches", lambda *_: iter(batches))
    update = method.fit(site, start)  # type: ignore[attr-defined]
    w = {name: start[name] for name, _ in site.network.named_parameters()}
    theta, gradients = w, 0
    for batch in batches:
        for _ in range(often):
            theta = moved(moved(theta, moved(theta, w, -1), -inner * held), slopes_at(site, theta, batch), -inner)
            gradients += 1
        w = moved(w, moved(w, theta, -1), -rate * held)
    torch.testing.assert_close(dict(update.weights), w)
    torch.testing.assert_close(dict(site.memory.weights(PERSONAL)), theta)
    assert method.traits.relative_cost == gradients / len(batches), "FedAvg has a gradient for each mini-batch"


@pytest.mark.parametrize(
    ("order", "groups"), [("first", [(0, 1), (2, 3), (4, 4)]), ("hessian_free", [(0, 1, 2), (3, 4, 4)])]
)
def test_an_epoch_of_per_fedavg_by_hand(
    order: str, groups: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """w ← w − βg with g = ∇f(w − α∇f(w; D); D'), less α(∇f(w + δg; D'') − ∇f(w − δg; D''))/2δ without a Hessian."""
    alpha, beta, delta = 0.8, 0.3, 0.1
    method = method_of("per_fedavg", order=order, difference=delta, fine_tune={"steps": 1, "lr": alpha})
    site, start = site_of(method, {"large": 41}, lr=beta), start_of(method, domains(MLP), MLP)
    batches = list(site.batches())[:5]
    monkeypatch.setattr(site, "batches", lambda *_: iter(batches))
    update = method.fit(site, start)  # type: ignore[attr-defined]
    w = {name: start[name] for name, _ in site.network.named_parameters()}
    for first, second, *third in [[batches[number] for number in group] for group in groups]:
        g = slopes_at(site, moved(w, slopes_at(site, w, first), -alpha), second)
        step = g
        for batch in third:
            above, below = (slopes_at(site, moved(w, g, sign * delta), batch) for sign in (1, -1))
            step = moved(g, moved(above, below, -1), -alpha / (2 * delta))
        w = moved(w, step, -beta)
    torch.testing.assert_close(dict(update.weights), w, atol=1e-5, rtol=1e-4)


def test_fedrod_reports_the_balanced_loss_of_what_it_sends() -> None:
    """−log(n_y e^ψ_y / Σ_c n_c e^ψ_c) with two, two and one samples of the classes."""
    method = method_of("fedrod")
    site, start = site_of(method, {"small": 5}), start_of(method, domains(MLP), MLP)
    batch = next(site.all_batches())
    weighed = torch.tensor([2.0, 2.0, 1.0]) * functional_call(site.network, dict(start), (batch.inputs,)).exp()
    chances = weighed[torch.arange(5), batch.targets] / weighed.sum(1)
    assert method.fit(site, start).loss == pytest.approx(-chances.log().mean().item(), rel=1e-5)  # type: ignore[attr-defined]


def test_fedala_learns_its_shares_on_a_part_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 32 samples are two mini-batches: W ← clip(W − η ∂f(Θ_i + (Θ − Θ_i)W)/∂W, 0, 1) on each."""
    method = method_of("fedala", sampled=0.5, shares_rate=2.0)
    site, start = site_of(method, {"large": 32}), start_of(method, domains(MLP), MLP)
    common, names = dict(start), ("classifier.weight", "classifier.bias")
    last = moved(common, slopes_at(site, common, next(site.all_batches())), -3.0)
    shares = {name: torch.full_like(common[name], 0.5) for name in names}
    site.memory["last"], site.memory["shares"] = Weights(last), Weights(shares)
    batches = list(site.batches())
    monkeypatch.setattr(site, "looks", lambda _: iter(batches))
    method.mix(site, start)  # type: ignore[attr-defined]
    gaps = {name: common[name] - last[name] for name in names}
    for batch in batches[:2]:
        slopes = slopes_at(site, {**common, **{name: last[name] + gaps[name] * shares[name] for name in names}}, batch)
        shares = {name: (shares[name] - 2.0 * slopes[name] * gaps[name]).clamp(0, 1) for name in names}
    torch.testing.assert_close(dict(site.memory.weights("shares")), shares)


def test_the_server_of_fedproto_by_hand() -> None:
    """C̄^j = Σ_i n_ij C_i^j / Σ_i n_ij of two sites, then of the second alone, which has no samples of class 1."""
    method = method_of("fedproto")
    first = sent([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], [2, 3, 0])
    second = sent([[5.0, 4.0], [0.0, 0.0], [0.0, 0.0]], [6, 0, 0])
    third = sent([[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]], [6, 0, 0])
    zero = Weights({"classifier.weight": torch.zeros(3, 2), "classifier.bias": torch.zeros(3)})
    state = method.start(cast(Federation, None), zero)
    for replies, nearest in (({"a": first, "b": second}, [4.0, 3.0]), ({"b": third}, [2.0, 2.0])):
        answers = SimpleNamespace(sources=["a", "b"], ask=lambda *_, replies=replies, **__: replies)
        state = method.round(cast(Federation, answers), state)
        mean = cast(Statistics, state.parts["prototypes"])["mean"]
        torch.testing.assert_close(mean[:2], torch.tensor([nearest, [0.0, 2.0]]))
    features = torch.tensor(
        [[0.0, 0.0], [2.0, 1.0], [-1.0, 2.0]]
    )  # the first lies at 0, where class 2 has no prototype
    scores = features @ state.weights["classifier.weight"].T + state.weights["classifier.bias"]
    assert scores.argmax(1).tolist() == [1, 0, 1]


def sent(means: list[list[float]], numbers: list[int]) -> Prototypes:
    """What a site of FedProto sends."""
    number = torch.tensor(numbers, dtype=torch.float32)
    return Prototypes(Statistics({"mean": torch.tensor(means)}), Statistics({"number": number}), 0.5)


def test_a_site_of_fedproto_predicts_the_nearest_prototype_of_its_trained_body() -> None:
    """Prototypes are means of features in evaluation mode; a prediction is argmin_j ‖f(x) − C̄^j‖."""
    method, found = method_of("fedproto"), domains(NORMED, {"large": 41})
    where = federation(method, found, NORMED, lr=0.5)
    assert isinstance(where, LocalFederation)
    state = start_run(method, where, start_of(method, found, NORMED))
    state = step_on(method, where, state)
    body = evaluated(method, where.own_weights("large", state.weights), found, NORMED)
    inputs, labels = torch.from_numpy(found[0].inputs), torch.from_numpy(found[0].labels)
    with torch.no_grad():
        features, scores = body.features(inputs), body(inputs)
    means = torch.stack([features[labels == number].mean(0) for number in range(3)])
    torch.testing.assert_close(cast(Statistics, state.parts["prototypes"])["mean"], means, atol=1e-5, rtol=1e-4)
    gaps = torch.cdist(features, means)
    assert torch.equal(scores.argmax(1), gaps.argmin(1))
    torch.testing.assert_close(scores, features.square().sum(1, keepdim=True) - gaps.square(), atol=1e-3, rtol=1e-3)
