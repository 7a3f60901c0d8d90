"""The verdict is never stronger than the numbers: simulated experiments of known truth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift.evaluation.records import RunResult, SelectedRound, SiteMetrics, SitePrivacy
from fedshift.evaluation.stored import Order
from fedshift.report.advice.verdict import MAJORITY
from fedshift.report.advice.words import first_sentence, paragraphs, two_sentences
from fedshift.report.collect import Collected, FinishedRun, collect
from fedshift.report.report import report_of, verdict_of

SITES = ("a", "b", "c", "d", "e", "f")


LAST = SelectedRound(round=1, accuracy=50.0)
RUN = RunResult(
    method="fedavg",
    target="a",
    seed=0,
    selected={"last": LAST},
    classes=["cat", "dog"],
    rounds=1,
    seconds=1.0,
    mini_batches=1,
    threads=1,
    device="cpu",
    bytes_up={"weights": 1000},
)


def one_run(method: str, target: str, seed: int, accuracy: float, **more: Any) -> RunResult:
    last = LAST.model_copy(update={"accuracy": min(max(accuracy, 0.0), 100.0)})
    options = {"protocol": {"kind": "leave_one_out"}, "method": {"name": method.partition("-")[0]}}
    given = {"method": method, "target": target, "seed": seed, "selected": {"last": last}, "options": options}
    return RUN.model_copy(update={**given, **more})


@pytest.mark.case("words of a verdict", "all sites trained and were measured: nothing is said of the next site")
def test_sites_that_trained_are_no_next_site() -> None:
    rows = {"training_samples": {"a": 70, "b": 70}, "measured_samples": {"a": 30, "b": 30}}
    trained = [one_run("fedavg", "sites", seed, 75.0 + seed, data=rows) for seed in range(3)]
    found = verdict_of(gathered(trained))
    words = " ".join([two_sentences(found), found.question, *(text for _, part in paragraphs(found) for text in part)])
    assert "at the sites that trained" in first_sentence(found)
    assert "next site" not in words
    assert "how it does at a new site" in two_sentences(found)
    assert found.plain()["at_sites_that_trained"]
    new = [one_run("fedavg", "c", seed, 75.0, data={**rows, "measured_samples": {"c": 100}}) for seed in range(3)]
    assert "at the next site" in first_sentence(verdict_of(gathered(new)))


def gathered(results: Sequence[RunResult], missing: int = 0) -> Collected:
    names = [list(dict.fromkeys(getattr(one, what) for one in results)) for what in ("method", "target", "seed")]
    order = Order(methods=names[0], targets=names[1], seeds=names[2])
    runs = tuple(FinishedRun(Path("nowhere"), result) for result in results)
    return Collected("exp", runs, order, missing, len(runs) + missing)


def simulated(
    draw: np.random.Generator,
    truth: Mapping[str, float],
    targets: int = 4,
    seeds: int = 3,
    site_sd: float = 0.0,
    own_sd: float = 2.0,
    seed_sd: float = 1.0,
    **more: Any,
) -> Collected:
    """Runs of methods with known averages.

    Args:
        draw: makes the draws.
        truth: method → its average over all sites there could be.
        targets, seeds: how many were tried.
        site_sd: how much sites differ for all methods alike.
        own_sd: how much a method's lead differs between sites.
        seed_sd: how much training differs between seeds.
        more: further fields of every result.
    """
    common = draw.normal(0, site_sd, targets)
    results = []
    for method, mean in truth.items():
        levels = mean + common + draw.normal(0, own_sd, targets)
        noise = draw.normal(0, seed_sd, (targets, seeds))
        results += [
            one_run(method, SITES[site], seed, levels[site] + noise[site, seed], **more)
            for site in range(targets)
            for seed in range(seeds)
        ]
    return gathered(results)


def most_by_chance(draws: int, share: float) -> int:
    """So many of ``draws`` exceed an event of probability ``share`` with a probability below 1 in 1,000."""
    return int(share * draws + 3.2 * (share * (1 - share) * draws) ** 0.5)


@pytest.mark.slow
def test_without_a_difference_hardly_any_is_called_more_than_chance() -> None:
    """One verdict in twenty may claim something, counted over all comparisons and methods."""
    draw, draws = np.random.default_rng(0), 120
    wrong = taken = 0
    for _ in range(draws):
        found = verdict_of(simulated(draw, dict.fromkeys(["fedavg", "fedprox", "moon", "csac"], 70.0), own_sd=0))
        wrong += any(one.shown for one in found.against)
        taken += first_sentence(found).startswith("Take")
    assert wrong <= most_by_chance(draws, 0.05)
    assert taken <= wrong


def test_a_lead_at_some_sites_is_no_lead_at_all_sites() -> None:
    """Methods lead here and there; over all sites there could be, none leads. So nothing may be said of other sites."""
    draw, draws = np.random.default_rng(1), 60
    here = elsewhere = 0
    for _ in range(draws):
        found = verdict_of(simulated(draw, dict.fromkeys(["fedavg", "moon", "csac"], 70.0), own_sd=4, seed_sd=0.3))
        here += any(one.shown for one in found.against)
        elsewhere += any(one.shown_elsewhere for one in found.against) or first_sentence(found).startswith("Take")
    assert here > draws / 2, "the simulation has leads to find"
    assert elsewhere <= most_by_chance(draws, 0.05)


def test_the_interval_holds_one_more_site_of_the_method_that_was_chosen() -> None:
    draw, draws, missed = np.random.default_rng(2), 100, 0
    for _ in range(draws):
        expected = verdict_of(
            simulated(draw, dict.fromkeys(["fedavg", "moon", "csac"], 60.0), targets=5, seeds=2, site_sd=2)
        ).expected
        new = 60 + draw.normal(0, 2) + draw.normal(0, 2) + draw.normal(0, 1)  # site, the method there, seed
        missed += not expected.low <= new <= expected.high
    assert missed <= most_by_chance(draws, 0.05)


@pytest.mark.parametrize(("seed", "gain"), [(0, 0.2), (1, 0.2), (0, 15.0), (1, 15.0)])
def test_small_and_large_differences(seed: int, gain: float) -> None:
    """Five seeds show 15 points, and not a fifth of the noise."""
    collected = simulated(np.random.default_rng(seed), {"fedavg": 60.0, "csac": 60.0 + gain}, seeds=5, own_sd=1.0)
    found = verdict_of(collected)
    (against,) = found.against
    assert against.shown_elsewhere == (gain == 15.0)
    assert first_sentence(found).startswith("Take csac") == (gain == 15.0)
    if gain == 15.0:
        assert found.method == "csac"
        assert against.better_at == 4
        assert against.gain == pytest.approx(15, abs=3)


def test_the_numbers_are_those_of_the_table_and_the_correction_counts_all_looks() -> None:
    truth = {"fedavg": 60.0, "moon": 61.0, "csac": 65.0, "deepall": 70.0}
    collected = simulated(np.random.default_rng(3), truth, own_sd=0.5)
    found, table = verdict_of(collected), report_of(collected).table
    averages = {row.method: row.mean for row in table.rows if row.target == "average"}
    assert found.expected.mean == averages["csac"]
    assert {one.name: one.gain for one in found.against} == pytest.approx(
        {name: averages["csac"] - averages[name] for name in ("fedavg", "moon", "deepall")}
    )
    assert found.looks == 6
    assert {one.role for one in found.against if one.name == "deepall"} == {"pooled"}
    tests = [(difference.comparison.clustered, difference.corrected) for difference in found.differences]
    tests, here = (
        [(test.p, p) for test, p in tests if test],
        [(difference.comparison.seeds, difference.here) for difference in found.differences],
    )
    for pairs in (tests, [(test.p, p) for test, p in here if test]):
        smallest = min(p for p, _ in pairs)  # type: ignore[type-var]
        assert min(p for _, p in pairs) == pytest.approx(6 * smallest)  # type: ignore[type-var, operator]


def test_the_words_say_what_was_corrected_together_and_one_seed_shows_nothing() -> None:
    found = verdict_of(simulated(np.random.default_rng(3), {"fedavg": 60.0, "moon": 61.0, "csac": 65.0}, own_sd=0.5))
    lines = dict(paragraphs(found))["By how much"]
    between = [difference for difference in found.differences if "most frequent class" not in difference.name]
    assert f"all {len(between)} comparisons between methods" in lines[-1]
    assert ("by themselves" in lines[-1]) == (len(found.differences) > len(between))
    found = verdict_of(simulated(np.random.default_rng(4), {"fedavg": 30.0, "csac": 90.0}, seeds=1))
    assert not any(one.shown for one in found.against)
    assert "one seed" in two_sentences(found)
    assert not first_sentence(found).startswith("Take")


def test_a_missing_run_is_told_and_its_method_is_not_judged() -> None:
    whole = simulated(np.random.default_rng(5), {"fedavg": 60.0, "csac": 90.0}, seeds=3).results
    one_less = [one for one in whole if (one.method, one.target, one.seed) != ("csac", "b", 2)]
    found = verdict_of(gathered(one_less, missing=1))
    (against,) = found.against
    assert against.seeds == 2, "only seeds that have every target are compared"
    assert "1 of 24 runs missing" in two_sentences(found)
    no_site = [one for one in whole if (one.method, one.target) != ("csac", "b")]
    found = verdict_of(gathered(no_site, missing=3))
    assert found.method == "fedavg"
    assert any("csac" in one.why for one in found.unknown)
    nothing = [one for one in whole if (one.method == "csac") != (one.target == "b")]
    assert verdict_of(gathered(nothing)).method is None
    assert "none can be recommended" in two_sentences(verdict_of(gathered(nothing)))


@pytest.mark.case("words of a verdict", "methods with other seeds, as while a second process trains")
@pytest.mark.parametrize("seeds", [(2,), (1, 2), (2, 3)])
def test_methods_are_ranked_by_the_seeds_that_all_have(seeds: tuple[int, ...]) -> None:
    """From the third seed on all accuracies are 30 points higher, and `csac` is 5 points worse at each seed."""
    level = {seed: 50.0 + 30.0 * (seed >= 2) for seed in range(4)}
    ours = [one_run("fedavg", target, seed, level[seed]) for target in "ab" for seed in range(3)]
    theirs = [one_run("csac", target, seed, level[seed] - 5.0) for target in "ab" for seed in seeds]
    found = verdict_of(gathered([*ours, *theirs]))
    assert found.method == "fedavg"
    (why,) = (one.why for one in found.unknown if "different seeds" in one.why)
    assert f"(fedavg 0, 1, 2; csac {', '.join(map(str, seeds))})" in why
    assert f"ranked by seed {', '.join(str(seed) for seed in seeds if seed < 3)}, which all of them have" in why
    assert "seeds that only some methods have" in two_sentences(found)


def test_no_common_seed_is_told_in_the_verdict_and_below_the_table() -> None:
    runs = [one_run(method, target, seed, 60.0) for target in "ab" for method, seed in (("fedavg", 0), ("csac", 1))]
    found = verdict_of(gathered(runs))
    assert any("no seed has all of them" in one.why for one in found.unknown)
    notes = report_of(gathered(runs)).table.sentences
    assert any("Methods have different seeds (fedavg 0; csac 1)" in note for note in notes)
    whole = [one_run(method, target, 0, 60.0) for target in "ab" for method in ("fedavg", "csac")]
    assert not any("different seeds" in note for note in report_of(gathered(whole)).table.sentences)
    assert not any("different seeds" in one.why for one in verdict_of(gathered(whole)).unknown)


def guessed(share: float) -> list[SiteMetrics]:
    return [
        SiteMetrics(site="t", part="target", samples=100, support=[int(share), 100 - int(share)], values={}),
    ]


@pytest.mark.parametrize(("share", "worth_it"), [(93.0, False), (70.0, False), (55.0, True)])
def test_a_method_below_the_most_frequent_class_is_not_recommended(share: float, worth_it: bool) -> None:
    truth, sites = {"fedavg": 60.0, "csac": 70.0}, guessed(share)
    found = verdict_of(simulated(np.random.default_rng(6), truth, own_sd=0.5, sites=sites))
    against = {one.name: one for one in found.against}[MAJORITY]
    assert against.gain == pytest.approx(70 - share, abs=1.5)
    assert first_sentence(found).startswith("Take none") != worth_it
    assert found.looks == 1
    assert len(found.differences) == 3, "each method is compared with the most frequent class too"
    once = verdict_of(
        simulated(np.random.default_rng(6), {"csac": 70.0}, own_sd=0.0, seed_sd=0.1, sites=sites, seeds=1)
    )
    below = {one.name: one for one in once.against}[MAJORITY].gain <= 0
    assert first_sentence(once).startswith("Take none") == below, "one seed is no evidence against a method"


def test_many_methods_do_not_hide_that_all_are_better_than_no_model() -> None:
    """Three seeds, fourteen methods: over all pairs of rows the correction would be 105."""
    names = ["fedavg", "fedprox", "moon", "csac", "fedsr", "copa", "feddyn", "scaffold", "fedbn", "silobn", "fedsam"]
    names += ["fediir", "fedl2r", "fedcmi"]
    truth = {name: 50.0 + number for number, name in enumerate(names)}
    found = verdict_of(
        simulated(np.random.default_rng(7), truth, own_sd=0.5, seed_sd=1.0, seeds=3, sites=guessed(55.0))
    )
    assert {one.name: one for one in found.against}[MAJORITY].shown
    assert not first_sentence(found).startswith("Take none")


@pytest.mark.slow
def test_where_no_model_is_better_than_guessing_hardly_any_is_called_so() -> None:
    draw, draws = np.random.default_rng(8), 60
    wrong = 0
    for _ in range(draws):
        truth = dict.fromkeys(["fedavg", "fedprox", "moon", "csac"], 70.0)
        found = verdict_of(simulated(draw, truth, own_sd=0, sites=guessed(70.0)))
        wrong += any(one.shown for one in found.against) and not first_sentence(found).startswith("Take none")
    assert wrong <= most_by_chance(draws, 0.05)


def test_who_trains_better_alone_need_not_federate() -> None:
    found = verdict_of(simulated(np.random.default_rng(7), {"fedavg": 60.0, "alone": 80.0}, own_sd=0.5))
    assert found.method == "fedavg", "what sites train alone is no method to choose"
    assert first_sentence(found).startswith("Do not federate")
    found = verdict_of(simulated(np.random.default_rng(7), {"fedavg": 80.0, "alone": 60.0}, own_sd=0.5))
    assert "federate" not in first_sentence(found)


@pytest.mark.parametrize("there", [(), ("alone",), ("alone", "deepall")])
def test_a_baseline_that_was_not_run_is_told(there: tuple[str, ...]) -> None:
    found = verdict_of(simulated(np.random.default_rng(7), dict.fromkeys(["fedavg", *there], 60.0)))
    told = " ".join(one.short for one in found.unknown)
    assert ("alone" not in told, "pooling" not in told) == ("alone" in there, "deepall" in there)


def test_pooled_methods_and_the_upper_bound_are_never_the_choice() -> None:
    truth = {"fedavg": 60.0, "deepall": 80.0, "oracle": 99.0}
    results = simulated(np.random.default_rng(8), truth).results
    assert verdict_of(gathered(results)).method == "fedavg"
    own = [
        result.model_copy(update={"bytes_up": {"raw_data": 1}}) if result.method == "fedavg" else result
        for result in results
    ]
    assert verdict_of(gathered(own)).method == "deepall", "all pool the samples, whatever they are called"
    assert "not private" in first_sentence(verdict_of(gathered(own)))


@pytest.mark.parametrize("rival", ["deepall", "alone"])
def test_the_best_federated_method_is_not_called_the_best_of_all(rival: str) -> None:
    """A reader sees the higher average of the other row in the table below."""
    truth = {"fedavg": 60.0, "csac": 60.1, rival: 62.0}
    draws = [simulated(np.random.default_rng(seed), truth, own_sd=0, seed_sd=0.8) for seed in range(20)]
    sentences = []
    for found in map(verdict_of, draws):
        ahead = any(one.name == rival and one.gain < 0 for one in found.against)
        sentence = first_sentence(found)
        if not sentence.startswith(("Take", "Do not", "At these")):
            assert ("federated method" in sentence) == ahead, sentence
            sentences.append(ahead)
    assert any(sentences), "the simulation has what it looks for"


def test_no_interval_from_a_single_target_or_from_pairs() -> None:
    one = verdict_of(simulated(np.random.default_rng(9), {"fedavg": 60.0}, targets=1))
    assert (one.expected.low, one.expected.high) == (None, None)
    both = SelectedRound(round=1, accuracy=60.0, source_accuracy=70.0)
    pairs = [
        one_run(method, target, seed, 0.0, labelled=["a"], unlabelled=["b"]).model_copy(
            update={"selected": {"last": both.model_copy(update={"accuracy": 60.0 + lead * place + seed})}}
        )
        for method, lead in (("fedavg", 0.0), ("csac", 9.0))
        for place, target in enumerate(("a-b", "b-a", "a-c"), 1)
        for seed in (0, 1, 2)
    ]
    found = verdict_of(gathered(pairs))
    assert found.expected.low is None
    assert all(one.p_sites is None for one in found.against), "pairs share sites, so they are no independent draws"


def survival_at(target: str, concordance: float, events: int, low: float, high: float) -> RunResult:
    values, limits = {"concordance": concordance}, {"concordance": (low, high)}
    site = SiteMetrics(
        site=target,
        part="target",
        samples=150,
        support=[],
        values=values,
        intervals=limits,
        baseline=50.0,
        events=events,
    )
    return one_run("fedavg", target, 0, concordance, sites=[site], metric="concordance", classes=[])


@pytest.mark.case("words of a verdict", "a site with three deaths is no part of what the next site is promised")
def test_a_target_of_few_events_is_flagged_and_left_out() -> None:
    sites = {"a": 58.0, "b": 60.8, "c": 64.8, "d": 61.0, "e": 57.9}
    runs = [survival_at(name, value, 40, value - 9, value + 9) for name, value in sites.items()]
    collected = gathered([*runs, survival_at("f", 91.7, 3, 80.0, 99.0)])
    found = verdict_of(collected)
    assert found.expected.few == ("f",)
    assert found.expected.mean == pytest.approx(np.mean(list(sites.values())))
    assert found.expected.average == pytest.approx(np.mean([*sites.values(), 91.7]))
    told = " ".join(line for _, lines in paragraphs(found) for line in lines)
    assert "without f, of few samples" in first_sentence(found)
    assert "f (3)" in told
    assert any("with the event: f (3)" in note for note in report_of(collected).table.sentences)


@pytest.mark.case("words of a verdict", "targets of few samples that agree by chance promise no narrow interval")
def test_sampling_errors_are_in_the_interval() -> None:
    """Five sites within seven points, of which each is known to within nine: one more may lie further off."""
    values = (57.9, 58.0, 60.8, 61.0, 64.8)
    widths = {}
    for half in (0.5, 9.0, 18.0):
        runs = [
            survival_at(name, value, 40, value - half, value + half)
            for name, value in zip("abcde", values, strict=True)
        ]
        expected = verdict_of(gathered(runs)).expected
        assert 0 < expected.low < expected.mean < expected.high < 100
        widths[half] = expected.high - expected.low
    assert widths[0.5] < widths[9.0] < widths[18.0]
    # t(4) = 2.776, five targets: 2.776 sqrt(1.2) (9 / 1.96) points on each side, a little less on the scale of logits.
    assert widths[9.0] == pytest.approx(2 * 2.776 * 1.2**0.5 * 9 / 1.96, rel=0.1)
    wide = verdict_of(gathered([survival_at(n, v, 40, v - 18, v + 18) for n, v in zip("abcde", values, strict=True)]))
    assert "too few to say" in first_sentence(wide)


def test_if_all_targets_are_small_none_is_left_out() -> None:
    small = [SiteMetrics(site="t", part="target", samples=12, support=[5, 7], values={})]
    found = verdict_of(simulated(np.random.default_rng(0), {"fedavg": 80.0}, sites=small))
    assert found.expected.few == ()
    assert found.expected.sites == 4
    assert any("a (5)" in one.why for one in found.unknown)


PRIVATE = {
    "a": SitePrivacy(
        epsilon=8.0, delta=1e-5, unit="sample", clip_norm=1.0, noise_multiplier=1.0, sample_rate=0.1, steps=10
    )
}


@pytest.mark.case("words of a verdict", "private sites say no shares of classes: 48 % of two classes is worth nothing")
@pytest.mark.case("words of a verdict", "accuracies with noise are said to have it")
@pytest.mark.parametrize(("accuracy", "worth"), [(48.0, False), (63.0, True)])
def test_private_runs_stand_beside_the_most_frequent_class(accuracy: float, worth: bool) -> None:
    noisy = {"measurement_noise": {"a": 12.5}}
    found = verdict_of(
        gathered([one_run("fedavg", "a", seed, accuracy, privacy=PRIVATE, data=noisy) for seed in range(3)])
    )
    assert first_sentence(found).startswith("Take none") != worth
    told = " ".join(one.why for one in found.unknown)
    assert "at least 50.0 %" in told
    assert "12.5 points" in told
    assert MAJORITY in two_sentences(found)
    known = [one_run("fedavg", "a", 0, accuracy, privacy=PRIVATE, sites=guessed(55.0))]
    assert verdict_of(gathered(known)).guess is None, "where shares are on record the method is compared with them"


def test_less_is_better() -> None:
    draw = np.random.default_rng(10)
    collected = simulated(draw, {"fedavg": 40.0, "csac": 20.0}, own_sd=0.5)
    results = [
        result.model_copy(
            update={"sites": [guessed(50)[0].model_copy(update={"values": {"brier": result.accuracy()}})]}
        )
        for result in collected.results
    ]
    order = collected.order.model_copy(update={"headline": "brier"})
    found = verdict_of(Collected("exp", gathered(results).runs, order, 0, len(results)))
    assert found.method == "csac"
    (against,) = found.against
    assert against.gain == pytest.approx(20, abs=2)
    assert "20" in two_sentences(found)
    assert found.expected.high < 30, "the choice without a target takes the same method"


def test_it_is_plain_json_words_and_two_sentences(experiment: Path) -> None:
    found = verdict_of(collect(experiment))
    told = json.loads(json.dumps(found.plain()))
    assert told["method"] == found.method
    assert told["left_the_sites"] == {"weights": 2_000_000}
    text = " ".join(line for _, lines in paragraphs(found) for line in lines)
    assert "No sample left its site" in text
    assert "5 of 12 runs" in text
    assert f"{told['expected']['mean']:.2f} %" in text
    for found in (
        verdict_of(collect(experiment)),
        verdict_of(simulated(np.random.default_rng(0), {"fedavg": 60.0})),
        verdict_of(simulated(np.random.default_rng(0), {"fedavg": 60.0, "deepall": 70.0})),
    ):
        assert two_sentences(found).count(". ") == 1
        assert two_sentences(found).endswith(".")
