"""What each site has of its own: it predicts there, it never leaves, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from every_method import method_of
from tiny import MLP, domains, evaluated, federation, plans, play, run, setting, start_of, step_on, vectors
from torch import nn

from fedshift.data.domain import Domain
from fedshift.deploy.coordinator import check_deployed
from fedshift.errors import UserError
from fedshift.experiment.costs import dry_run
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Reply, leaves, reply_content
from fedshift.federation.site_runner import SiteRunner
from fedshift.methods import registry
from fedshift.methods.base import PERSONAL, Method
from fedshift.methods.rounds import finish_run, start_run
from fedshift.weights import Weights

KEEPING = [name for name in registry.names() if PERSONAL in registry.method_class(name)().traits.memory_names]
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
    checked = SiteRunner._checked

    def noted(self: SiteRunner, call: str, reply: object) -> Any:
        assert isinstance(reply, Reply)
        replies.append((call, reply))
        return checked(self, call, reply)

    monkeypatch.setattr(SiteRunner, "_checked", noted)
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


def test_fine_tuning_is_plain_training_of_the_last_model_and_changes_no_common_model() -> None:
    found = [domains(MLP)[1]]  # five samples, one batch
    plain, _ = run(method_of("fedavg"), found, MLP, momentum=0.0)
    tuned = method_of("fedavg", **TUNED)
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


def test_two_rounds_of_apfl_by_hand() -> None:
    """w ← w − η∇f(w), v ← v − η∇_v f(v̄), α ← α − η ∂f(v̄)/∂α, v̄ = αv + (1 − α)w; v and α go on from round to round."""
    rate, method = 0.5, method_of("apfl")
    where = federation(method, domains(MLP), MLP, momentum=0.0, weight_decay=0.0, lr=rate)
    assert isinstance(where, LocalFederation)
    site = where._runners["small"].site  # five samples, one batch
    batch, model = next(site.all_batches()), site.model()

    def loss(at: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(model, at, (batch.inputs,)), batch.targets)

    start = start_of(method, domains(MLP), MLP)
    w = {name: start[name].clone() for name, _ in model.named_parameters()}
    v, share = dict(w), torch.tensor(0.5)
    for number in (1, 2):
        site.begin(type(site.envelope)(number, number, 0.0, 9))
        update = method.fit(site, Weights(w))  # type: ignore[attr-defined]
        for value in (share, *w.values(), *v.values()):
            value.requires_grad_()
        mixed = {name: share * v[name] + (1 - share) * w[name].detach() for name in w}
        slope, *own = torch.autograd.grad(loss(mixed), [share, *v.values()])
        common = torch.autograd.grad(loss(w), list(w.values()))
        v = {name: (value - rate * grad).detach() for (name, value), grad in zip(v.items(), own, strict=True)}
        w = {name: (value - rate * grad).detach() for (name, value), grad in zip(w.items(), common, strict=True)}
        share = (share - rate * slope).detach()
        assert update.loss > 0
    torch.testing.assert_close(dict(update.weights), w)
    torch.testing.assert_close(dict(site.memory.weights(PERSONAL)), v)
    assert site.memory["share"] == pytest.approx(share.item())
    assert abs(share.item() - 0.5) > 1e-4
    predicts = {name: share * v[name] + (1 - share) * w[name] for name in w}
    torch.testing.assert_close(dict(where.own_weights("small", Weights(w))), predicts)
