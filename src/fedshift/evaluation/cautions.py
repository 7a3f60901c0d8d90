"""Warnings that follow from what was measured: what a table alone would hide."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

from fedshift.evaluation.metric_entries import Metric
from fedshift.evaluation.records import ERRORS, RunResult, SiteMetrics, format_metric
from fedshift.text import join_names

BASELINES: dict[Metric, str] = {
    "accuracy": "Always saying a target's most frequent class would be right for",
    "rmse": "Always saying the mean of the sources would be off by",
    "concordance": "Ordering by chance would be right for",
    "label_accuracy": "Always saying the more frequent answer to each label would be right for",
}
"""What a model without inputs would reach, in words, by the metric that runs are compared by."""
_WORSE: dict[Metric, str] = {
    "accuracy": "is less accurate than always saying the most frequent class",
    "rmse": "is further off than always saying the mean of the sources",
    "concordance": "orders worse than chance",
    "label_accuracy": "is less accurate than always saying the more frequent answer to each label",
}
_RATES_APART = 25.0
"""Percentage points between a class's shares at two sites from which they differ in rate."""
_ENOUGH = 30
"""Samples of a site from which its shares are compared with those of others."""
_FEW = 10
"""Samples with an event, or outside the most frequent class, below which a target's number says next to nothing. To
validate a prediction model takes 100 of them (Collins et al., Statistics in Medicine 2016)."""
_SAME_WORK = 0.02
"""The share by which runs may differ in mini-batches, which are rounded up for every site, and still count as equal."""


def cautions(results: Sequence[RunResult]) -> list[str]:
    """Warnings about methods below the majority class, targets of one class, and classes whose rate differs by site.

    Example:
        >>> site = SiteMetrics(site="a", part="target", samples=9, support=[9, 0], values={"accuracy": 100.0})
        >>> run = RunResult.model_construct(method="m", target="a", classes=["cat", "dog"], selected={}, sites=[site])
        >>> print(*cautions([run]))
        measured on one class only, so nothing shows whether the model tells classes apart: a (cat)
    """
    below = (text for *_, text in below_in_words(results))
    return [*below, *_one_class(results), *_few(results), *_rates(results)]


def warnings_of(results: Sequence[RunResult]) -> list[str]:
    """`cautions`, then what the runs themselves warned of, each once.

    Example:
        >>> site = SiteMetrics(site="a", part="target", samples=40, support=[20, 20], values={})
        >>> run = RunResult.model_construct(method="m", target="a", classes=["cat", "dog"], selected={}, sites=[site])
        >>> warnings_of([run.model_copy(update={"seed": seed, "warnings": ["few samples"]}) for seed in (0, 1)])
        ['few samples']
    """
    of_runs = (warning for result in results if result.sites for warning in result.warnings)
    return list(dict.fromkeys([*cautions(results), *of_runs]))


def baselines(results: Sequence[RunResult]) -> dict[str, float]:
    """Target → what a model without inputs would reach there: `majorities`, or for errors the baselines on record.

    Example:
        >>> site = SiteMetrics(site="a", part="target", samples=10, support=[], values={}, baseline=3.5)
        >>> baselines([RunResult.model_construct(target="a", sites=[site])])
        {'a': 3.5}
    """
    return majorities(results) or _mean_at_targets(results, lambda site: site.baseline)


def majorities(results: Sequence[RunResult]) -> dict[str, float]:
    """Target → share of its most frequent class in percent, mean over runs, where records say it.

    Example:
        >>> site = SiteMetrics(site="a", part="target", samples=10, support=[9, 1], values={})
        >>> majorities([RunResult.model_construct(target="a", sites=[site])])
        {'a': 90.0}
    """
    return _mean_at_targets(results, lambda site: site.majority)


def _mean_at_targets(
    results: Sequence[RunResult], number_of: Callable[[SiteMetrics], float | None]
) -> dict[str, float]:
    by_target: dict[str, list[float]] = {}
    for result in results:
        known = [number for site in result.targets if (number := number_of(site)) is not None]
        if known and len(known) == len(result.targets):
            by_target.setdefault(result.target, []).append(fmean(known))
    return {target: fmean(numbers) for target, numbers in by_target.items()}


def below_in_words(results: Sequence[RunResult]) -> Iterator[tuple[str, list[str], str]]:
    """Methods that are worse at some targets than a model without inputs: the method, the targets, and a warning.

    Example:
        >>> site = SiteMetrics(site="a", part="target", samples=10, support=[9, 1], values={})
        >>> from fedshift.evaluation.records import SelectedRound
        >>> chosen = {"last": SelectedRound(round=1, accuracy=80.0)}
        >>> run = RunResult.model_construct(method="m", target="a", sites=[site], selected=chosen)
        >>> next(below_in_words([run]))
        ('m', ['a'], 'm is less accurate than always saying the most frequent class at a (80.00 < 90.00)')
    """
    limits = baselines(results)
    metric: Metric = results[0].metric if results else "accuracy"
    at: dict[tuple[str, str], list[float]] = {}
    for run in results:
        if (value := run.accuracy()) is not None:
            at.setdefault((run.method, run.target), []).append(value)
    sign, worse = (">", operator.gt) if metric in ERRORS else ("<", operator.lt)
    for method in dict.fromkeys(result.method for result in results):
        means = {target: fmean(at[method, target]) for target in limits if (method, target) in at}
        below = [target for target, mean in means.items() if worse(mean, limits[target])]
        if below:
            named = [
                f"{target} ({format_metric(metric, means[target])} {sign} {format_metric(metric, limits[target])})"
                for target in below
            ]
            yield method, below, f"{method} {_WORSE[metric]} at {join_names(named)}"


def few_informative(results: Sequence[RunResult]) -> dict[str, int]:
    """Targets at which fewer than ten samples had the event, or are outside the most frequent class: target → samples.

    Example:
        >>> site = SiteMetrics(site="a", part="target", samples=51, support=[48, 3], values={})
        >>> few_informative([RunResult.model_construct(target="a", sites=[site])])
        {'a': 3}
    """
    counts: dict[str, int] = {}
    for result in results:
        if result.metric == "label_accuracy":
            continue  # each label has a rarer answer of its own
        known = [number for site in result.targets if (number := site.informative) is not None]
        if known and len(known) == len(result.targets) and sum(known) < _FEW:
            counts[result.target] = max(sum(known), counts.get(result.target, 0))
    return counts


def _few(results: Sequence[RunResult]) -> Iterator[str]:
    named = [f"{target} ({number})" for target, number in few_informative(results).items() if number]
    if named:
        what = "with the event" if any(site.events is not None for result in results for site in result.targets) else ""
        yield f"measured on few samples {what or 'outside the most frequent class'}: {join_names(named)}"


def _one_class(results: Sequence[RunResult]) -> Iterator[str]:
    named: dict[str, None] = {}
    for result in results:
        for site in result.targets:
            if site.support and site.baseline is None and max(count or 0 for count in site.support) == site.samples:
                named.setdefault(f"{site.site} ({result.classes[site.support.index(site.samples)]})")
    if named:
        listing = join_names(list(named))
        yield f"measured on one class only, so nothing shows whether the model tells classes apart: {listing}"


def _rates(results: Sequence[RunResult]) -> Iterator[str]:
    """The class whose share differs most between two sites, if it differs by much."""
    if not results or any(result.classes != results[0].classes for result in results):
        return
    sites: dict[str, SiteMetrics] = {}
    for result in results:
        for site in result.sites:
            known = sites.get(site.site)
            if site.support and None not in site.support and (known is None or site.samples > known.samples):
                sites[site.site] = site
    shares = {
        name: [100.0 * (count or 0) / site.samples for count in site.support]
        for name, site in sites.items()
        if site.samples >= _ENOUGH
    }
    if len(shares) < 2:
        return
    gaps = []
    for number, label in enumerate(results[0].classes):
        low, high = (choose(shares, key=lambda name: shares[name][number]) for choose in (min, max))
        gaps.append((shares[high][number] - shares[low][number], label, low, high, number))
    gap, label, low, high, number = max(gaps)
    if gap > _RATES_APART:
        yield (
            f"labels differ in rate between sites: {label} is {shares[low][number]:.1f} % of the samples at {low} and "
            f"{shares[high][number]:.1f} % at {high}"
        )


def settings_note(results: Iterable[RunResult], methods: Sequence[str]) -> Iterator[str]:
    """A note with the setting of each method that did not run with the paper's, if records say so.

    Example:
        >>> settings = {"csac": "released", "fedavg": "paper"}
        >>> runs = [RunResult.model_construct(method=name, setting=setting) for name, setting in settings.items()]
        >>> print(*settings_note(runs, list(settings)))
        Settings, the paper's where nothing is said: csac: released.
    """
    results = list(results)
    if named := settings_of(results, methods):
        rows = (f"{method}: {setting}" for method, setting in named.items())
        rest = ", the paper's where nothing is said" if all(result.setting for result in results) else " on record"
        yield f"Settings{rest}: {'; '.join(rows)}."


_CHANGED = "paper with "
"""How the setting begins of a method whose options differ from its defaults."""


def settings_of(results: Iterable[RunResult], methods: Sequence[str]) -> dict[str, str]:
    """Method → its setting, for those that did not run with the paper's. A class of the user's own has no paper.

    Example:
        >>> settings_of([RunResult.model_construct(method="csac", setting="released")], ["csac"])
        {'csac': 'released'}
        >>> own = RunResult.model_construct(
        ...     method="mine", setting="paper with tau 0.0", options={"method": {"name": "mine.py:Mine"}}
        ... )
        >>> settings_of([own], ["mine"])
        {'mine': 'tau 0.0'}
    """
    named = dict[str, dict[str, None]]()
    for result in results:
        if result.setting not in ("", "paper"):
            of_users = result.setting.startswith(_CHANGED) and ":" in result.options["method"]["name"]
            named.setdefault(result.method, {})[result.setting.removeprefix(_CHANGED if of_users else "")] = None
    return {method: _brief(" / ".join(named[method])) for method in methods if method in named}


def _brief(setting: str) -> str:
    """A setting without the parts of its options that are off: of ``{"shear": 0.5, "flip": 0.0}`` the first."""
    without = re.sub(r'"\w+": (?:null|false|0|0\.0)(?:, |(?=\}))', "", setting)
    return without.replace(", }", "}")


def work_note(results: Sequence[RunResult], methods: Sequence[str]) -> Iterator[str]:
    """A note with the runs that trained on another number of mini-batches than most of the same target.

    A run's budget is that of the most demanding method of its experiment, so this happens where runs were made with
    different lists of methods.

    Example:
        >>> work = {"fedavg": 80, "csac": 120, "recipe": 120}
        >>> made = RunResult.model_construct
        >>> runs = [made(method=name, target="a", seed=0, mini_batches=each) for name, each in work.items()]
        >>> print(*work_note(runs, list(work)))
        Not equal work, in mini-batches per source: fedavg at a 80 (most 120).
    """
    if unequal := unequal_work(results, methods):
        parts = [f"{method} at {target} {numbers}" for method, target, numbers in unequal]
        yield f"Not equal work, in mini-batches per source: {join_names(parts, sign='; ')}."


def unequal_work(results: Sequence[RunResult], methods: Sequence[str]) -> list[tuple[str, str, str]]:
    """(method, target, its numbers of mini-batches and that of most runs there) of runs that trained on another number.

    Example:
        >>> work = {"fedavg": 80, "csac": 120, "recipe": 120}
        >>> made = RunResult.model_construct
        >>> runs = [made(method=name, target="a", seed=0, mini_batches=each) for name, each in work.items()]
        >>> unequal_work(runs, list(work))
        [('fedavg', 'a', '80 (most 120)')]
    """
    unequal = []
    by_target: dict[str, list[RunResult]] = {}
    for result in results:
        by_target.setdefault(result.target, []).append(result)
    for target, runs in by_target.items():
        counts = Counter(result.mini_batches for result in runs)
        usual = max(counts, key=lambda number: (counts[number], number))
        slack = max(2, _SAME_WORK * usual)
        for method in methods:
            other = {run.mini_batches for run in runs if run.method == method and abs(run.mini_batches - usual) > slack}
            if other:
                unequal.append((method, target, f"{', '.join(map(str, sorted(other)))} (most {usual})"))
    return unequal


def privacy_note(results: Iterable[RunResult], methods: Sequence[str]) -> Iterator[str]:
    """A note with the differential privacy of each method's runs, if some have any; it names the run with the least.

    Example:
        >>> from fedshift.evaluation.records import SitePrivacy
        >>> spent = {"a": SitePrivacy.model_construct(epsilon=8.0, delta=1e-5)}
        >>> print(*privacy_note([RunResult.model_construct(method="m", privacy=spent)], ["m"]))
        Differential privacy of each site's training samples, in each run: ε ≤ 8.0 at δ = 1e-05.
    """
    least: dict[str, RunResult] = {}
    plain: set[str] = set()
    for result in results:
        most = max((spent.epsilon for spent in result.privacy.values()), default=None)
        if most is None:
            plain.add(result.method)
        elif result.method not in least or most > max(spent.epsilon for spent in least[result.method].privacy.values()):
            least[result.method] = result
    named = {method: str(result.guarantee) for method, result in least.items() if method not in plain}
    if not named:
        return
    guarantees = dict.fromkeys(named.values())
    whole = next(iter(guarantees)) if len(guarantees) == 1 and not plain else None
    rows = "; ".join(f"{method}: {named[method]}" for method in methods if method in named)
    yield f"Differential privacy of each site's training samples, in each run: {whole or rows}."
