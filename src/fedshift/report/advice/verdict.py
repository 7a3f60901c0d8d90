"""What finished runs say: which method to take, what to expect at the next site, and what they leave open.

Two questions are tested, each with Holm's correction over all its comparisons, so that all that it calls more than
chance is right in 95 of 100 repeats of the experiment, however many methods it has: whether a method is better than
always naming the most frequent class, and which methods differ. The second is answered for a method that passes the
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedshift.evaluation.cautions import few_informative, majorities
from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.significance import holm
from fedshift.evaluation.summary import Row
from fedshift.experiment.protocols.base import ProtocolSection
from fedshift.experiment.protocols.index import protocol_of
from fedshift.report.advice.expected import Expected, next_site
from fedshift.report.choice import Choice, choices_in_words
from fedshift.report.collect import Collected
from fedshift.report.conditions import Conditions, Role, method_name
from fedshift.report.differences import LEVEL, Difference, differences
from fedshift.report.estimates import Estimates, sentences
from fedshift.report.like_for_like import Comparable, unlike_seeds
from fedshift.report.measures import Measure
from fedshift.report.run_means import mean_by_kind
from fedshift.report.table import Table
from fedshift.text import decimals, join_names

MAJORITY = "most frequent class"
"""Name of the row that always names a target's most frequent class."""
FEW_SITES = 5
FEW_SEEDS = 3
_NOT_RUN: Sequence[tuple[Role, str, str]] = (
    ("alone", "what sites reach alone", "No run of alone: nothing here shows whether it is worth federating at all."),
    ("pooled", "what pooling would reach", "No pooled method: nothing here shows what keeping samples at sites costs."),
)
"""Baselines that an experiment may lack, in a few words, and as a sentence."""
_SAME_KIND = " The next site is taken to be one more of the same kind."
READS_TARGET = " Some methods read its samples there, without labels, before they answer: {}."
"""What the question of a target that took no part leaves out, with the methods of which it is not the whole truth."""
HELD_OUT = (
    "How well does it work at the sites that trained? Each is measured on samples that it held out; no site is new."
)
"""The question of a deployment whose target is all of its sites."""


@dataclass(frozen=True)
class Against:
    """The chosen method compared with another row of the table, or with the most frequent class."""

    name: str  # the other
    role: Role  # what the other is
    gain: float  # how many percentage points the chosen method is better on average; negative where it is worse
    seeds: int  # number of seeds that both have at every common target
    p: float | None  # over seeds, at these targets only, after Holm's correction; None where there is no test
    better_at: int  # number of targets at which the chosen method is better
    sites: int  # number of targets that both have
    p_sites: float | None  # with targets as clusters, for sites that were not measured, likewise
    # what the other used and the chosen method did not, and the reverse; empty: they are alike
    unlike: tuple[str, ...] = ()
    unit: str = "%"  # of the measure; with "" the gain is in the label's unit

    @property
    def shown(self) -> bool:
        """Whether the difference at these targets is more than chance."""
        return self.p is not None and self.p < LEVEL

    @property
    def level(self) -> bool:
        """Whether the difference is 0 as it is printed."""
        return float(decimals(abs(self.gain), self.unit)) == 0

    @property
    def told(self) -> bool:
        """Whether it is more than chance by either view."""
        return self.shown or self.shown_elsewhere

    @property
    def shown_elsewhere(self) -> bool:
        """Whether it is more than the chance of having measured these targets and no others."""
        return self.p_sites is not None and self.p_sites < LEVEL


@dataclass(frozen=True)
class SiteGain:
    """What a site gains by taking part."""

    site: str  # the site
    gain: float  # how much better the chosen method is there than the model that the site trains alone; negative: worse
    p: float | None  # over seeds, of this site, after Holm's correction over the sites; None where there is no test

    @property
    def shown(self) -> bool:
        """Whether the difference is more than chance."""
        return self.p is not None and self.p < LEVEL


@dataclass(frozen=True)
class Unknown:
    """Something that the runs leave open: in a few words, and as a sentence."""

    short: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """What finished runs say."""

    question: str  # the question that the experiment asks; "" if it is of no known protocol
    measure: Measure  # what methods are compared by
    # the method with the best average among those that keep samples at their sites, unless another one is shown to be
    # better; None if no method was measured at every target. If all methods pool the samples, one of those
    method: str | None
    role: Role  # whether `method` is federated or pooled
    used: tuple[str, ...]  # what `method` used beyond the sources' samples as they are, in words
    setting: str  # the setting of `method`
    expected: Expected | None  # what it reaches at the next site, or at the sites that trained
    against: tuple[Against, ...]  # it compared with every other row, in the order of the table
    left: Mapping[str, float]  # mean bytes that left all sites in a run of it, by kind of content
    guarantee: str | None  # its differential privacy; None without any
    unknown: tuple[Unknown, ...]  # what is left open
    differences: tuple[Difference, ...]  # all comparisons that were tested
    # whether what it is measured by did not train with labels; else nothing is known of a new site
    measured_new: bool = True
    # what always naming the most frequent class is right for at the least, in percent, where sites do not say how many
    # samples each class has; None where it is compared, or makes no sense
    guess: float | None = None
    next_target: str = "site"  # what the next site is one of, in words
    # target without labels → method → its estimated accuracy there, of each seed
    without_labels: Estimates = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()  # whose model should answer there, where some methods adapted and others did not
    at_unlabelled: tuple[str, ...] = ()  # both in words
    # what each site gains over training alone, where each is measured by itself and sites trained alone, too
    pays: tuple[SiteGain, ...] = ()

    @property
    def looks(self) -> int:
        """The number of tests between methods, which their correction counts."""
        return sum(comparison.here is not None and not _with_guessing(comparison) for comparison in self.differences)

    @property
    def rivals(self) -> list[Against]:
        """The other methods of the same role that used the same, best first: these alone are ranked."""
        return sorted(
            (comparison for comparison in self.peers if not comparison.unlike), key=lambda comparison: comparison.gain
        )

    @property
    def peers(self) -> list[Against]:
        """The other methods of the same role, whatever they used, best first."""
        return sorted(
            (comparison for comparison in self.against if comparison.role == self.role),
            key=lambda comparison: comparison.gain,
        )

    @property
    def equals(self) -> list[Against]:
        """Rivals that are not shown to be worse."""
        return [comparison for comparison in self.rivals if not (comparison.told and comparison.gain > 0)]

    def best_of(self, role: Role) -> Against | None:
        """The best row of a role, such as the best pooled method."""
        return min(
            (comparison for comparison in self.against if comparison.role == role),
            key=lambda comparison: comparison.gain,
            default=None,
        )

    def plain(self) -> dict[str, Any]:
        """The verdict for a file."""
        return {
            "question": self.question,
            "measure": self.measure.name,
            "method": self.method,
            "role": self.role,
            "used": list(self.used),
            "setting": self.setting,
            "expected": None if self.expected is None else asdict(self.expected),
            "against": [
                asdict(comparison) | {"shown": comparison.shown, "shown_elsewhere": comparison.shown_elsewhere}
                for comparison in self.against
            ],
            "not_shown_to_be_worse": [comparison.name for comparison in self.equals],
            "comparisons": self.looks,
            **({"pays": [asdict(gain) | {"shown": gain.shown} for gain in self.pays]} if self.pays else {}),
            "left_the_sites": dict(self.left),
            "privacy": self.guarantee,
            "at_sites_that_trained": not self.measured_new,
            "guessing": self.guess,
            "unknown": [reason.why for reason in self.unknown],
            "without_labels": {
                site: {method: [estimate.plain() for estimate in estimates] for method, estimates in by_method.items()}
                for site, by_method in self.without_labels.items()
            },
            **({"choices": [choice.plain() for choice in self.choices]} if self.choices else {}),
        }


def verdict(
    collected: Collected,
    table: Table,
    used: Mapping[str, Conditions],
    estimates: Estimates,
    chosen_at: Sequence[Choice],
) -> Verdict:
    """What the finished runs of an experiment say.

    ``estimates``: the accuracies to expect at targets without labels; ``chosen_at``: whose model answers at targets
    without labels.
    """
    results = collected.results
    roles = {name: used[name].role for name in table.methods}
    tests_of_all = [*table.tests, *against_guessing(results, table)]
    means = table.ranked.means
    role: Role = "federated" if "federated" in roles.values() else "pooled"
    able = {name: row for name, row in means.items() if roles[name] == role}
    tests = {test.name: test for test in tests_of_all}
    chosen = _choice(able, tests, roles, table.measure)
    against = _against(chosen, tests, roles, table.measure, means) if chosen is not None else ()
    runs = [result for result in results if result.method == chosen]
    private = [run for run in runs if run.privacy]
    return Verdict(
        question=question_of(results, used),
        measure=table.measure,
        method=chosen,
        role=role,
        used=used[chosen].words if chosen is not None else (),
        setting=next((run.setting for run in runs), ""),
        expected=None if chosen is None else next_site(chosen, list(able), table, few_informative(results)),
        guess=_least_of_guessing(results, table.measure),
        against=tuple(
            replace(comparison, unlike=used[chosen].unlike(used[comparison.name]))
            if chosen and comparison.name in used
            else comparison
            for comparison in against
        ),
        left=mean_by_kind([run.bytes_up for run in runs]),
        guarantee=max(private, key=_epsilon).guarantee if runs and len(private) == len(runs) else None,
        unknown=tuple(_unknown(collected, table, set(roles.values()))),
        differences=tuple(tests_of_all),
        measured_new=not measured_where_trained(results),
        without_labels=estimates,
        choices=tuple(chosen_at),
        at_unlabelled=(*sentences(estimates), *choices_in_words(chosen_at)),
        pays=tuple(_pays(chosen, tests, roles, results, table.measure)),
        next_target="site" if (protocol := common_protocol(results)) is None else protocol.next_target,
    )


def question_of(results: Sequence[RunResult], used: Mapping[str, Conditions]) -> str:
    """The question that these runs ask; "" if they ask several, or none that is known."""
    protocol = common_protocol(results)
    if measured_where_trained(results) and not (protocol is not None and protocol.by_site):
        return HELD_OUT
    if protocol is None:
        return ""
    reading = [name for name, row in used.items() if "target" in row.uses]
    more = READS_TARGET.format(", ".join(reading)) if reading and protocol.unseen else ""
    return protocol.question + more


def common_protocol(results: Sequence[RunResult]) -> type[ProtocolSection] | None:
    """The protocol of these runs; None if they have several, or one that is not known."""
    protocols = {protocol_of(result.options.get("protocol")) for result in results}
    return protocols.pop() if len(protocols) == 1 else None


def measured_where_trained(results: Sequence[RunResult]) -> bool:
    """Whether every site that these runs are measured at trained with its labels, so that none is new to them."""
    # A run that is measured at thousands of sites is as many results, which share what is known of its data.
    data = {id(result.data.get("measured_samples")): result.data for result in results}.values()
    parts = [(of_run.get("measured_samples"), of_run.get("training_samples")) for of_run in data]
    return bool(parts) and all(
        isinstance(measured, Mapping) and isinstance(training, Mapping) and measured and set(measured) <= set(training)
        for measured, training in parts
    )


def _epsilon(result: RunResult) -> float:
    return max(spent.epsilon for spent in result.privacy.values())


def against_guessing(results: Sequence[RunResult], table: Table) -> list[Difference]:
    """Each method compared with the most frequent class, where records have it.

    This question has a correction of its own: with many methods to compare, that of every two of them would hide that
    all are better than no model.
    """
    usual = table.measure.value
    shares = majorities(results) if table.measure.metric == "accuracy" else {}
    if set(shares) != set(table.columns[:-1]):
        return []

    def value(result: RunResult, select: Selection) -> float | None:
        return shares[result.target] if result.method == MAJORITY else usual(result, select)

    places = {(result.target, result.seed): result for result in results}
    guesses = [result.model_copy(update={"method": MAJORITY}) for result in places.values()]
    return differences([*results, *guesses], [(method, MAJORITY) for method in table.methods], value=value)


Tests = Mapping[str, Difference]
"""Comparisons by name."""


def _with_guessing(comparison: Difference) -> bool:
    return comparison.name.endswith(f"− {MAJORITY}")


def _choice(able: Mapping[str, Row], tests: Tests, roles: Mapping[str, Role], measure: Measure) -> str | None:
    """The method with the best average of which no other is shown to be better."""
    beaten = {
        name
        for name in able
        for comparison in _against(name, tests, roles, measure, able)
        if comparison.name in able and comparison.told and comparison.gain < 0
    }
    best = min if measure.less_is_better else max
    return best((name for name in able if name not in beaten), key=lambda name: able[name].mean, default=None)


def _against(
    method: str, tests: Tests, roles: Mapping[str, Role], measure: Measure, means: Mapping[str, Row]
) -> Iterator[Against]:
    """``method`` compared with every other row; without a test where they share no seed."""
    for other in (*roles, MAJORITY):
        ours, theirs = tests.get(f"{method} − {other}"), tests.get(f"{other} − {method}")
        difference = ours or theirs
        better, unit = -1 if measure.less_is_better else 1, measure.unit
        if difference is None or difference.comparison.seeds is None:
            if other in means and other != method:
                gain = better * (means[method].mean - means[other].mean)
                yield Against(other, roles[other], gain, seeds=0, p=None, better_at=0, sites=0, p_sites=None, unit=unit)
            continue
        sign = better if ours else -better
        targets = difference.comparison.targets.values()
        yield Against(
            name=other,
            role=roles.get(other, "majority"),
            gain=sign * difference.comparison.seeds.mean,
            seeds=difference.comparison.seeds.n,
            p=difference.here,
            better_at=sum(sign * test.mean > 0 for test in targets),
            sites=len(targets),
            p_sites=difference.corrected,
            unit=unit,
        )


def _pays(
    method: str | None, tests: Tests, roles: Mapping[str, Role], results: Sequence[RunResult], measure: Measure
) -> Iterator[SiteGain]:
    """The chosen method compared with training alone at each site, where runs measure each by itself."""
    alone = next((name for name, role in roles.items() if role == "alone"), None)
    protocol = common_protocol(results)
    if method is None or alone is None or protocol is None or not protocol.by_site:
        return
    ours, theirs = tests.get(f"{method} − {alone}"), tests.get(f"{alone} − {method}")
    if (difference := ours or theirs) is None:
        return
    sign = (-1 if measure.less_is_better else 1) * (1 if ours else -1)
    by_site = difference.comparison.targets
    for (site, test), p in zip(by_site.items(), holm([test.p for test in by_site.values()]), strict=True):
        yield SiteGain(site, sign * test.mean, p)


def _unknown(collected: Collected, table: Table, there: Set[Role]) -> Iterator[Unknown]:
    """What the runs leave open. ``there``: the roles of the table's methods."""
    repeat, ranked = table.measure.repeat, table.ranked
    most = max((row.n for row in table.rows), default=0)
    if most == 1:
        yield Unknown(f"one {repeat}", f"One {repeat}: nothing here shows whether a difference is more than chance.")
    elif most < FEW_SEEDS:
        yield Unknown(f"{most} {repeat}s", f"{most} {repeat}s: only very large differences can be told from chance.")
    yield from _of_samples(collected.results, table.measure)
    if collected.unfinished:
        count = f"{collected.unfinished} of {collected.planned} runs missing"
        yield Unknown(count, f"{collected.progress}. What is missing could change every statement.")
    yield from _of_seeds(ranked, repeat)
    lacking = [name for name in table.methods if name not in ranked.means]
    if lacking:
        names = ", ".join(lacking)
        yield Unknown(f"no result at some targets: {names}", f"Not measured at every target, so not judged: {names}.")
    yield from _of_targets(collected.results, table)
    for name, labels in _labels(collected.results).items():
        if (tried := len(labels)) > 1:
            why = f"{tried} settings of {name} were compared at these targets: the best looks a little too good."
            yield Unknown(f"which setting of {name} is best elsewhere", why)
    if "federated" in there:
        for role, short, why in _NOT_RUN:
            if role not in there:
                yield Unknown(short, why)
    yield Unknown(
        "how settings were chosen",
        "The records do not say how settings were chosen. If it was by looking at these targets, all numbers are too "
        "good." + ("" if measured_where_trained(collected.results) else _SAME_KIND),
    )


def _of_seeds(ranked: Comparable, repeat: str) -> Iterator[Unknown]:
    """That methods have different seeds, as while some are trained."""
    if why := unlike_seeds(ranked, repeat):
        common = f"ranked by {repeat} {', '.join(map(str, ranked.common))}, which all of them have"
        none = f"no {repeat} has all of them, so the order of their averages says little"
        yield Unknown(f"{repeat}s that only some methods have", f"{why}: {common if ranked.common else none}.")


def _of_targets(results: Sequence[RunResult], table: Table) -> Iterator[Unknown]:
    """What the number of targets leaves open of the next one."""
    targets = table.columns[:-1]
    if table.measure.share_sites:
        yield Unknown("no interval", "These targets share sites, so they give no interval for one that was not tried.")
    elif measured_where_trained(results):
        yield Unknown(
            "how it does at a new site",
            "All sites trained, so nothing here shows what to expect at a new one: leave some out as targets.",
        )
    elif len(targets) < FEW_SITES:
        count = f"{len(targets)} target{'s' if len(targets) > 1 else ''}"
        yield Unknown(
            f"only {count}", f"Only {count}: sites like these say little about how different the next one is."
        )


def _of_samples(results: Sequence[RunResult], measure: Measure) -> Iterator[Unknown]:
    """What the measured samples are too few for, or what noise on their numbers hides."""
    noise = {
        site: points for result in results for site, points in dict(result.data.get("measurement_noise") or {}).items()
    }
    if noise:
        listing = ", ".join(
            f"{site} (standard deviation at least {points:.1f} points)" for site, points in noise.items()
        )
        yield Unknown(
            "what is noise of the measurements",
            f"For their budgets of privacy sites add noise to every accuracy that they tell: {listing}.",
        )
    if (least := _least_of_guessing(results, measure)) is not None:
        yield Unknown(
            f"whether any is better than always naming the {MAJORITY}",
            f"The records do not say how frequent each class is, so nothing here shows that a model is better than "
            f"always naming the {MAJORITY}, which is right for at least {least:.1f} %.",
        )
    few = few_informative(results)
    if few:
        of = "had the event" if results[0].metric == "concordance" else f"are outside the {MAJORITY}"
        of = "are measured" if results[0].metric == "rmse" else of
        listing = join_names([f"{target} ({number})" for target, number in few.items()])
        yield Unknown(
            f"much at {join_names(list(few), most=10)}",
            f"Fewer than ten samples {of}, so the number says little: {listing}.",
        )


def _least_of_guessing(results: Sequence[RunResult], measure: Measure) -> float | None:
    """What always naming the most frequent class is right for at the least where no private run says its share."""
    if measure.metric != "accuracy" or not any(result.privacy for result in results) or majorities(results):
        return None
    classes = max((len(result.classes) for result in results), default=0)
    return 100.0 / classes if classes > 1 else None


def _labels(results: Sequence[RunResult]) -> dict[str, set[str]]:
    """Method's name → the rows that have it."""
    rows_of_name: dict[str, set[str]] = {}
    for result in results:
        rows_of_name.setdefault(method_name(result), set()).add(result.method)
    return rows_of_name
