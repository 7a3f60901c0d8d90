"""The verdict in words: two sentences for a terminal, and paragraphs for people who do not know fedshift."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedshift.report.advice.verdict import MAJORITY, Against, Verdict
from fedshift.report.measures import Measure
from fedshift.text import decimals, in_unit, join_names

DIFFERENCES = "By how much"
"""The heading of the differences between the chosen method and the others."""
KINDS: Mapping[str, str] = {
    "weights": "models",
    "numbers": "single numbers such as losses and counts",
    "statistics": "summaries over many samples",
    "styles": "styles of images",
    "spectra": "amplitude spectra of single images",
    "features": "features of single samples",
    "raw_data": "the samples themselves",
    "masked": "sums that cannot be read alone",
    "sealed": "models that the coordinator cannot open",
    "accuracy": "accuracies",
    "metrics": "metrics",
}
_SHORT: Mapping[str, str] = {
    "weights": "models",
    "raw_data": "samples",
    "masked": "masked sums",
    "sealed": "sealed models",
}
_MOST_NAMED = 3
_MOST_SITES = 5
"""Sites at either end whose gain is named."""
_SAYS_NOTHING = 50.0
"""Percentage points from which an interval for the next site says no more than that there were too few targets."""


def short_kind(kind: str) -> str:
    """A kind of content in a word or two, for the head of a column."""
    return _SHORT.get(kind, kind)


def two_sentences(verdict: Verdict) -> str:
    """The verdict in two sentences, and for whom it pays where that was asked."""
    pays = f"It pays for {_where_it_pays(verdict)}. " if verdict.pays else ""
    return f"{first_sentence(verdict)} {pays}{_second_sentence(verdict)}"


def _where_it_pays(verdict: Verdict) -> str:
    """At how many sites the chosen method is better than training alone."""
    better = [gain for gain in verdict.pays if gain.gain > 0]
    shown = sum(gain.shown for gain in better)
    return f"{len(better)} of {len(verdict.pays)} sites, at {shown} of them more than chance"


def first_sentence(verdict: Verdict) -> str:
    """Which method to take, and what to expect of it."""
    method, expected = verdict.method, verdict.expected
    if method is None or expected is None:
        return "No method has results at every target, so none can be recommended."
    number = _with_name(verdict.measure, expected.average)
    alone = verdict.best_of("alone")
    ahead = any(against.gain < 0 and against.role not in (verdict.role, "majority") for against in verdict.against)
    best = "best federated method" if ahead else "best method"
    guessing = _no_better_than_guessing(verdict)
    if guessing:
        return f"Take none of these methods yet: {method}, the {best} ({number}), {guessing}."
    if alone is not None and alone.told and alone.gain < 0:
        how = "Do not federate yet: models" if alone.shown_elsewhere else "At these targets, models"
        by = _points(-alone.gain, alone.unit)
        return f"{how} that the sites train alone are better than {method} ({number}) by {by}."
    expect = _to_expect(verdict, expected.mean if verdict.measured_new else expected.average)
    if verdict.role == "pooled":
        pooled = "All methods pool the samples, which is not private"
        return f"{pooled}; {method} has the best average: {expect}."
    if not verdict.peers:
        return f"{method} is the only method to choose from: {expect}."
    kind = _kind(verdict)
    if not verdict.rivals:
        return f"{method} has the best average of methods that are not alike, the only one {kind}: {expect}."
    among = f" of those {kind}" if len(verdict.rivals) < len(verdict.peers) else ""
    if all(against.shown_elsewhere and against.gain > 0 for against in verdict.rivals):
        return f"Take {method}{', the best' if among else ''}{among}: {expect}."
    if not verdict.equals:
        return f"{method} is the {best} at these targets{among}: {expect}."
    average = "best average of the federated methods" if ahead else "best average"
    return f"{method} has the {average}, but is not shown to be the best of {among[4:] or 'them'}: {expect}."


def _no_better_than_guessing(verdict: Verdict) -> str:
    """How the chosen method stands to always naming the most frequent class, unless it is shown to be better."""
    majority, average = verdict.best_of("majority"), verdict.expected.average if verdict.expected else 0.0
    named = "always naming a site's most frequent class, which is right for"
    if majority is None:
        none = verdict.guess is None or average > verdict.guess
        return "" if none else f"is no better than {named} at least {verdict.guess:.1f} %"
    if majority.gain > 0 and (majority.p is None or majority.told):
        return ""
    how = "is not shown to be better than" if majority.gain > 0 else "is no better than"
    how = "is worse than" if majority.gain < 0 and majority.told else how
    return f"{how} {named} {average - majority.gain:.2f} %"


def _kind(verdict: Verdict) -> str:
    """What the chosen method and its rivals used: only they are ranked."""
    return f"with {' and '.join(verdict.used)}" if verdict.used else "that used the sources' samples as they are"


def _to_expect(verdict: Verdict, mean: float) -> str:
    """What to expect at a site that took no part, or what was measured at those that did."""
    name = _quantity(verdict.measure.name)
    article = "an" if name[0] in "aeiouA" or name == "RMSE" else "a"
    number = f"{article} {name} of {_value(verdict.measure, mean)}"
    return f"{'expect' if verdict.measured_new else 'it has'} {number}{_interval(verdict)}"


def _interval(verdict: Verdict) -> str:
    """Where the number is expected, after it: at the next site, or where it was measured: at the sites that trained."""
    expected = verdict.expected
    assert expected is not None
    if not verdict.measured_new:
        return " at the sites that trained, on samples that they held out"
    where = verdict.next_target
    without = f", without {join_names(expected.few, most=10)}, of few samples" if expected.few else ""
    if expected.low is None or expected.high is None:
        none = ", with no interval" + ("" if expected.sites > 1 else " from a single target")
        return f" at the next {where}{none}{without}"
    low, high = f"{expected.low:.0f}", f"{expected.high:.0f}"
    if not verdict.measure.unit:
        low, high = in_unit(expected.low), in_unit(expected.high)
    elif verdict.measure.unit == "%" and expected.high - expected.low > _SAYS_NOTHING:
        few = f"{expected.sites} targets are too few to say"
        return f" at the next {where}, where {few}: it can be {low} to {high}{without}"
    return f" at the next {where} ({low} to {high} for 95 of 100 such sites){without}"


def _second_sentence(verdict: Verdict) -> str:
    """The comparison that matters most, and what is unknown."""
    parts = []
    near = verdict.rivals or verdict.peers
    nearest = near[0] if near else verdict.best_of("alone")
    if nearest is not None:
        parts.append(comparison(nearest, verdict.looks))
    pooled = verdict.best_of("pooled") if verdict.role != "pooled" else None
    if pooled is not None:
        parts.append(comparison(pooled, verdict.looks if not parts else 0))
    unknown = f"not known: {'; '.join(reason.short for reason in verdict.unknown[:_MOST_NAMED])}."
    return f"{verdict.method} is {'; '.join(parts)}; {unknown}" if parts else unknown.capitalize()


def comparison(against: Against, looks: int = 0) -> str:
    """How the chosen method compares with another, such as "1.20 points better than fedavg, which may be chance"."""
    notes = ["pooled, not private"] if against.role == "pooled" else []
    notes += [f"not alike: {', '.join(against.unlike)}"] if against.unlike else []
    name = f"always naming the {MAJORITY}" if against.role == "majority" else against.name
    name += f" ({'; '.join(notes)})" if notes else ""
    how = f"{'better' if against.gain > 0 else 'worse'} than {name}"
    what = f"level with {name}" if against.level else f"{_points(abs(against.gain), against.unit)} {how}"
    if against.p is None:
        return f"{what}, which nothing here can tell from chance"
    here, sites = _p(against.p), "" if against.p_sites is None else f", {_p(against.p_sites)} with targets as clusters"
    tested = f"{here} over seeds{sites}" if sites else here
    tested += f" after correction for {looks} comparisons" if looks > 1 else ""
    if against.shown_elsewhere:
        return f"{what}, more than chance and likely at other sites ({tested})"
    if not against.shown:
        return f"{what}, which may be chance ({tested})"
    at = f"{against.better_at} of {against.sites} targets" if against.sites > 1 else "one target"
    return f"{what}, more than chance at these targets ({tested}; better at {at}) but open at other sites"


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _quantity(name: str) -> str:
    """A measure's name within a sentence. Names of people and abbreviations keep their capitals."""
    first = name.split()[0]
    return name if first.isupper() or first in ("Dice", "Brier") else name.lower()


def _with_name(measure: Measure, number: float) -> str:
    return f"{_quantity(measure.name)} {_value(measure, number)}"


def _value(measure: Measure, number: float) -> str:
    return f"{decimals(number, measure.unit)} {measure.unit}".rstrip()


def _points(points: float, unit: str) -> str:
    return f"{decimals(points, unit)} points" if unit else f"{in_unit(points)} (in the label's unit)"


def left_sites(verdict: Verdict) -> str:
    """What left the sites in a run of the chosen method."""
    kinds = {kind: count for kind, count in verdict.left.items() if count}
    privacy = (
        f"Each run has differential privacy: {verdict.guarantee}."
        if verdict.guarantee
        else "There was no differential privacy, which would limit what can be reconstructed from models."
    )
    if not kinds:
        return f"The records do not say what left the sites. {privacy}"
    listing = ", ".join(
        f"{KINDS.get(kind, kind)} ({size(count)})" for kind, count in sorted(kinds.items(), key=lambda item: -item[1])
    )
    samples = "" if "raw_data" in kinds else " No sample left its site."
    return f"In a run of {verdict.method}, all sites together sent: {listing}.{samples} {privacy}"


def size(count: float) -> str:
    """A number of bytes with its unit.

    Example:
        >>> size(960), size(4502880)
        ('960 bytes', '4.50 MB')
    """
    return f"{count / 1e6:,.2f} MB" if count >= 1e4 else f"{count:,.0f} bytes"


class VerdictValues(dict[str, Any]):
    """A verdict's values by name, as in its JSON. Printed, or as the last line of a notebook's cell: its sentences."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.plain())
        self._parts = ([verdict.question] if verdict.question else [], list(paragraphs(verdict)))

    def __str__(self) -> str:
        question, parts = self._parts
        return "\n\n".join([*question, *("\n".join([heading, *lines]) for heading, lines in parts)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # what IPython asks for
        printer.text(str(self))


def paragraphs(verdict: Verdict) -> Iterator[tuple[str, list[str]]]:
    """The whole verdict: headings, and sentences below each."""
    yield "Which method", [first_sentence(verdict), *_equals(verdict)]
    compared = [*verdict.rivals, *(against for against in verdict.peers if against.unlike)]
    compared += [against for against in verdict.against if against.role != verdict.role]
    if compared:
        lines = [f"{verdict.method} is {comparison(against)}." for against in compared]
        yield DIFFERENCES, [*lines, *_correction(verdict)]
    if verdict.pays:
        yield "Does it pay for each site", list(_pays(verdict))
    if verdict.method is not None and verdict.expected is not None:
        new, few = verdict.measured_new, verdict.expected.few
        number = _with_name(verdict.measure, verdict.expected.mean if new else verdict.expected.average)
        text = f"{verdict.method}: {number}{_interval(verdict)}."
        heading = "What to expect at the next site" if new else "What was measured where sites trained"
        yield heading, [text, f"The first number is the average over the {'other ' if few and new else ''}targets."]
        yield "What left the sites", [left_sites(verdict)]
    if verdict.without_labels:
        yield "What to expect where there are no labels", list(verdict.at_unlabelled)
    yield "What is not known", [reason.why for reason in verdict.unknown]


def _pays(verdict: Verdict) -> Iterator[str]:
    """How many sites gain by taking part, and which do not."""
    better, worse = ([gain for gain in verdict.pays if (gain.gain > 0) == up and gain.gain] for up in (True, False))
    shown, lost = ([gain for gain in sites if gain.shown] for sites in (better, worse))
    whole = len(verdict.pays)
    yield (
        f"{verdict.method} is better than training alone at {len(better)} of {whole} sites, more than chance at "
        f"{len(shown)}; it is worse at {len(worse)}, more than chance at {len(lost)}."
    )
    sorted_gains = sorted(verdict.pays, key=lambda gain: gain.gain)
    ends = sorted_gains if whole <= 2 * _MOST_SITES else [*sorted_gains[:_MOST_SITES], *sorted_gains[-_MOST_SITES:]]
    unit = "Points" if verdict.measure.unit else "In the label's unit"
    named = ", ".join(
        f"{gain.site} {_with_sign(gain.gain, verdict.measure.unit)}{'*' if gain.shown else ''}" for gain in ends
    )
    yield (
        f"{unit} over training alone, least first{'' if len(ends) == whole else ', the least and the most'}: {named} "
        f"(* p < 0.05 over {verdict.measure.repeat}s, Holm's correction over the sites)."
    )


def _with_sign(gain: float, unit: str) -> str:
    return ("−" if gain < 0 else "+") + decimals(abs(gain), unit)


def _correction(verdict: Verdict) -> Iterator[str]:
    """For how many comparisons p is corrected: also for those between other methods, which are not join_names."""
    if verdict.looks:
        other = (
            " Those with the most frequent class are corrected by themselves." if verdict.best_of("majority") else ""
        )
        yield f"p is corrected for all {verdict.looks} comparisons between methods of this experiment.{other}"


def _equals(verdict: Verdict) -> Iterator[str]:
    if verdict.method is not None and verdict.equals and verdict.rivals:
        yield f"Not shown to be worse than {verdict.method}: {', '.join(equal.name for equal in verdict.equals)}."
