"""Robust aggregation beside every method that averages: what a bad site can do, whose weights count, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import every_method
import pytest
import torch
from pydantic import ValidationError
from tiny import NORMED, assert_close, domains, federation, normed_for, run, start_of, step_on

from fedshift.errors import FedshiftError, UserError
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.federation import Federation
from fedshift.federation.messages import PerSite, Reply
from fedshift.functional.averaging import is_buffer, weighted_average
from fedshift.methods import registry
from fedshift.methods.base import Method, State
from fedshift.methods.composition.options import robust_rules
from fedshift.methods.robust import Averaged, Krum, Median
from fedshift.methods.rounds import start_run
from fedshift.methods.screening import Screening, screening_of
from fedshift.weights import Weights

SITES = {"a": 9, "b": 16, "c": 9, "d": 12, "e": 9}
OPTIONS = {
    "norm_clipping": {},
    "median": {},
    "trimmed_mean": {"trim": 1},
    "krum": {"faulty": 1, "keep": 3},
    "trust": {"trusted": "a"},
}
Change = Callable[[Reply], Reply]


def method_of(name: str, rule: str | None = None, **options: Any) -> Method:
    robust = None if rule is None else {"rule": rule, **OPTIONS[rule]}
    return every_method.method_of(name, **({"robust": robust} | options))


def huge(reply: Reply) -> Reply:
    """Every float in every model of a reply is 10⁶, every counter 10⁹."""
    models = {name: value for name, value in vars(reply).items() if isinstance(value, Weights)}
    return replace(reply, **{name: Weights({k: _huge(t) for k, t in model.items()}) for name, model in models.items()})


def _huge(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, 1e6 if tensor.is_floating_point() else 10**9)


def attack(where: Federation, bad: Mapping[str, Change]) -> None:
    """From now on these sites change their replies.

    Replies are not checked, which would refuse models of such numbers: what is tested are the rules alone.
    """
    deliver = where.deliver
    where.checks.check = lambda *_: None  # type: ignore[method-assign]

    def changed(call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        for answer in deliver(call, requests):
            if isinstance(answer, Answer) and answer.site in bad and call in where.method.traits.averages:  # type: ignore[attr-defined]
                answer = replace(answer, reply=bad[answer.site](answer.reply))
            yield answer

    where.deliver = changed  # type: ignore[method-assign]


def attacked(method: Method, bad: Mapping[str, Change], **options: Any) -> tuple[State, Federation]:
    """A run of one round in which some sites change their replies."""
    network = normed_for(method)
    roles: Any = dict.fromkeys("vwxyz", "target") if method.name == "mdfnet" else None
    found = domains(network, SITES | (dict.fromkeys("vwxyz", 9) if roles else {}))
    where = federation(method, found, network, rounds=1, roles=roles, **options)
    start = start_of(method, found, network)
    where.screening = screening_of(method, start)
    attack(where, bad)
    state = start_run(method, where, start)
    where.settle()
    return step_on(method, where, state), where


def largest(state: State) -> float:
    """The largest number in the averaged part of a model. COPA's classifiers are not averaged."""
    return max(
        float(tensor.abs().max())
        for name, tensor in state.weights.items()
        if tensor.is_floating_point() and tensor.numel() and not name.startswith("classifier.heads")
    )


@functools.cache
def honest(name: str) -> float:
    """The largest number of a run without a rule and without a bad site."""
    return largest(attacked(method_of(name), {})[0])


WITH_RULES = [(name, rule) for name in registry.names() for rule in robust_rules(registry.method_class(name)())]


@pytest.mark.parametrize(
    ("name", "rule"),
    [pytest.param(*case, marks=() if case[0] in every_method.QUICK else pytest.mark.slow) for case in WITH_RULES],
)
def test_one_bad_site_of_five_does_not_pull_the_model_away(name: str, rule: str) -> None:
    """Its numbers are 10⁶, BatchNorm statistics and counters included; without a rule the model's are near that."""
    method = method_of(name, rule)
    state, where = attacked(method, {"b": huge})
    assert largest(state) < 3 * honest(name) + 10
    for key, tensor in state.weights.items():
        if not key.startswith("classifier.heads"):
            assert tensor.is_floating_point() or tensor.max() < 10**6 or rule == "krum", key
            assert not key.endswith("running_var") or (tensor >= 0).all(), key
    assert isinstance(where.screening, Screening)
    assert where.screening.report


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), [case for case in WITH_RULES if case[0] in ("fedavg", "csac", "kd3a")])
def test_the_order_of_sites_does_not_matter(name: str, rule: str) -> None:
    found = domains(sizes=SITES)
    first, _ = run(method_of(name, rule), found, rounds=1)
    second, _ = run(method_of(name, rule), [found[index] for index in (2, 0, 1, 4, 3)], rounds=1)
    assert_close(first.weights, second.weights)


# Whose weights count --------------------------------------------------------------------------------------------------


def replies(method: Method, network: Mapping[str, object] = NORMED) -> tuple[dict[str, Any], Weights]:
    """What sites send in the first round, and what they were sent."""
    found = domains(network, SITES)
    start = start_of(method, found, network)
    where = federation(method, found, network)
    return dict(where.ask(method.fit, to=where.sources, weights=start).items()), start  # type: ignore[attr-defined]


def one_round(rule: str, **options: Any) -> State:
    return run(method_of("fedavg", rule, **options), domains(NORMED, SITES), NORMED, rounds=1)[0]


def test_krum_leaves_sites_out_and_the_others_count_by_their_samples() -> None:
    state = one_round("krum")
    sent, _ = replies(method_of("fedavg"))
    kept = list(state.report["losses"])
    assert len(kept) == 3
    expected = weighted_average([sent[site].weights for site in kept], [SITES[site] for site in kept])
    assert state.weights == expected
    assert state.report["aggregation_weights"] == pytest.approx(
        {site: SITES[site] / sum(SITES[other] for other in kept) for site in kept}
    )


def test_one_model_in_the_place_of_all_is_the_result_whatever_samples_a_site_claims() -> None:
    sent, _ = replies(method_of("fedavg"))
    stacks = {name: torch.stack([sent[site].weights[name] for site in SITES]) for name in sent["a"].weights}
    state = one_round("median")
    for name, tensor in state.weights.items():
        assert tensor.equal(stacks[name].median(dim=0).values), name
    greedy, _ = attacked(method_of("fedavg", "median"), {"b": lambda reply: replace(reply, samples=10**9)})
    assert greedy.weights == attacked(method_of("fedavg", "median"), {})[0].weights


def odd_statistics(reply: Any) -> Any:
    """BatchNorm statistics that are far off; parameters are as they were."""
    changed = {
        name: tensor + 1000 if is_buffer(name) and tensor.is_floating_point() else tensor
        for name, tensor in reply.weights.items()
    }
    return replace(reply, weights=Weights(changed))


def odd_parameters(reply: Any) -> Any:
    """Parameters that are a little off."""
    changed = {name: tensor if is_buffer(name) else tensor + 0.5 for name, tensor in reply.weights.items()}
    return replace(reply, weights=Weights(changed))


def test_krum_looks_at_parameters_and_statistics_apart() -> None:
    """Statistics that differ a lot between good sites do not hide parameters that are a little off."""

    def spread(site: str) -> Change:
        def changed(reply: Any) -> Any:
            statistics = {
                name: tensor + 20 * "abcde".index(site) if name.endswith("running_mean") else tensor
                for name, tensor in reply.weights.items()
            }
            made = replace(reply, weights=Weights(statistics))
            return odd_parameters(made) if site == "c" else made

        return changed

    method = method_of("fedavg", "krum", robust={"rule": "krum", "faulty": 1, "keep": 4})
    for bad, left_out in (({"e": odd_statistics}, "e"), ({site: spread(site) for site in SITES}, "c")):
        _, where = attacked(method, bad)
        assert where.screening.report["fit"]["left_out"] == [left_out]  # type: ignore[union-attr]


def test_equal_scores_are_decided_by_name() -> None:
    """Of three sites two are each other's nearest."""
    models = {name: Weights({"w": torch.tensor([value])}) for name, value in {"x": 0.0, "m": 1.0, "b": 5.0}.items()}
    for order in (("x", "m", "b"), ("b", "m", "x"), ("m", "x", "b")):
        verdict = Krum(faulty=0).judge(order, [models[site] for site in order], models["x"])
        assert set(verdict.report["left_out"]) == {"x", "b"}


def test_trust_bounds_statistics_by_those_of_the_trusted() -> None:
    state, _ = attacked(method_of("fedavg", "trust"), {"b": odd_statistics})
    plain, _ = attacked(method_of("fedavg", "trust"), {})
    for name, tensor in state.weights.items():
        if is_buffer(name) and tensor.is_floating_point():
            assert (tensor - plain.weights[name]).abs().max() < 5, name


def test_clipping_bounds_parameters_and_statistics_apart() -> None:
    """A site whose parameters are as the others' and whose statistics are not is shortened in these alone."""
    method = method_of("fedavg", "norm_clipping", robust={"rule": "norm_clipping", "bound": 1e9})
    state, where = attacked(method, {"b": odd_statistics})
    plain, _ = attacked(method, {})
    assert where.screening.report["fit"]["clipped"] == {}  # type: ignore[union-attr]
    for name, tensor in state.weights.items():
        if not is_buffer(name):
            assert tensor.equal(plain.weights[name])
        elif tensor.is_floating_point():
            assert (tensor - plain.weights[name]).abs().max() < 3


def test_clipping_to_a_number() -> None:
    method = method_of("fedavg", robust={"rule": "norm_clipping", "bound": 1e-3}, weighting="uniform")
    state, _ = run(method, domains(NORMED, SITES), NORMED, rounds=1)
    sent, start = replies(method)
    parameters = [name for name in start if not is_buffer(name)]
    assert all(state.weights[name].sub(start[name]).norm() <= 1.01e-3 for name in parameters)
    norms = {
        s: sum(float((u.weights[n] - start[n]).square().sum()) for n in parameters) ** 0.5 for s, u in sent.items()
    }
    for name in parameters:
        steps = [1e-3 / norms[site] * (update.weights[name] - start[name]) for site, update in sent.items()]
        torch.testing.assert_close(state.weights[name], start[name] + torch.stack(steps).mean(0), atol=1e-7, rtol=0)


def test_trust_is_that_of_the_equation() -> None:
    state = one_round("trust")
    sent, start = replies(method_of("fedavg"))
    parameters = [name for name in start if not is_buffer(name)]
    flat = {
        site: torch.cat([(update.weights[name] - start[name]).double().reshape(-1) for name in parameters])
        for site, update in sent.items()
    }
    trust = {site: float(torch.cosine_similarity(own, flat["a"], dim=0).clamp(min=0)) for site, own in flat.items()}
    whole = sum(trust[site] * flat["a"].norm() / own.norm() * own for site, own in flat.items()) / sum(trust.values())
    found = torch.cat([(state.weights[name] - start[name]).double().reshape(-1) for name in parameters])
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-4)


def test_nobody_is_trusted_but_the_trusted() -> None:
    def backwards(reply: Any) -> Any:
        return replace(
            reply, weights=Weights({name: 2 * begun[name] - tensor for name, tensor in reply.weights.items()})
        )

    method = method_of("fedavg", robust={"rule": "trust", "trusted": "c"})
    sent, begun = replies(method)
    state, where = attacked(method, dict.fromkeys("abde", backwards))
    assert where.screening.report["fit"]["trust"] == {"a": 0, "b": 0, "c": 1, "d": 0, "e": 0}  # type: ignore[union-attr]
    assert_close(state.weights, sent["c"].weights)


def test_a_model_that_was_not_sent_is_the_common_start() -> None:
    """CSAC's acquisition sends nothing."""
    method = method_of("csac", robust={"rule": "norm_clipping", "bound": 1e-6})
    found = domains(sizes=SITES)
    start = start_of(method, found)
    where = federation(method, found)
    where.screening = screening_of(method, start)
    assert_close(start_run(method, where, start).weights, start)


def test_what_was_sent_in_an_earlier_call_of_the_round_is_remembered() -> None:
    """FADA sends the model in `begin`, and `finish` brings it back: the target's own step is all that is left."""
    method = method_of("fada", robust={"rule": "norm_clipping", "bound": 1e-6})
    network = normed_for(method)
    found = domains(network, SITES)
    where = federation(method, found, network, rounds=2)
    seen: list[Weights] = []
    where.screening = screening = screening_of(method, start_of(method, found, network))
    assert screening is not None
    state = start_run(method, where, start_of(method, found, network))
    for _ in range(2):
        seen.append(state.weights)
        state = step_on(method, where, state)
    assert screening.sent["weights"] is seen[1]
    assert seen[0] != seen[1]


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.names())
def test_what_does_not_fit_is_refused_before_anything_runs(name: str) -> None:
    for rule in OPTIONS:
        if (name, rule) in WITH_RULES:
            method_of(name, rule)
        else:
            with pytest.raises(ValidationError, match=f"robust: {name} .*; (choose|leave it out)"):
                method_of(name, rule)


def test_a_preparation_changes_nothing_of_the_rules_that_a_method_takes() -> None:
    assert method_of("fedavg", prepare="styles", robust="median").robust == Median()
    with pytest.raises(ValidationError, match="kd3a needs the model of every site"):
        registry.parse({"name": "kd3a", "prepare": "styles", "robust": "median"})


def test_a_rule_s_name_is_enough_where_it_needs_no_more() -> None:
    assert method_of("fedavg", robust="median").robust == Median()
    for wrong in ("medain", {"rule": "krum", "trim": 1}, {"rule": "trust"}, {"trim": 1}):
        with pytest.raises(ValidationError):
            method_of("fedavg", robust=wrong)


@pytest.mark.parametrize(("rule", "sites"), [("krum", 4), ("trimmed_mean", 2)])
def test_too_few_replies_end_the_run_in_one_line(rule: str, sites: int) -> None:
    found = domains(sizes=dict(list(SITES.items())[:sites]))
    with pytest.raises(UserError, match=r"faulty: 1|trim: 1"):
        run(method_of("fedavg", rule), found, rounds=1)


def test_a_rule_needs_one_model_from_which_all_began() -> None:
    method = method_of("fedavg", "median")
    where = federation(method, domains(sizes=SITES))
    start = start_of(method, domains(sizes=SITES))
    where.screening = Screening(Median(), {"fit": Averaged()}, {"weights": start})
    with pytest.raises(FedshiftError, match="another model"):
        list(where.ask(method.fit, to=where.sources, weights=PerSite(dict.fromkeys(SITES, start))))  # type: ignore[attr-defined]
    where.screening = Screening(Median(), {"fit": Averaged(("head",))}, {"weights": start})
    with pytest.raises(FedshiftError, match="'head'"):
        list(where.ask(method.fit, to=where.sources, weights=start))  # type: ignore[attr-defined]
