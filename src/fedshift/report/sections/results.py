"""The table, other selection rules, differences between methods, what each site gains, and what the sites have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedshift.evaluation.selection import RULES
from fedshift.evaluation.summary import AVERAGE
from fedshift.methods.index import ENTRIES
from fedshift.report import differences, plots
from fedshift.report.advice.verdict import MAJORITY, Verdict
from fedshift.report.advice.words import DIFFERENCES, KINDS, first_sentence, paragraphs
from fedshift.report.conditions import ROLES, Conditions, Role
from fedshift.report.details import Details, SiteSamples
from fedshift.report.measures import MISSING
from fedshift.report.report import Report
from fedshift.report.sections.blocks import (
    Block,
    Cells,
    Entry,
    Grid,
    Listing,
    Section,
    Text,
    figure,
    grid,
    number,
    section,
)
from fedshift.report.table import Cell, Table

_MARKS: Mapping[Role, str] = {"federated": "samples stay", "pooled": "not private"}
"""Roles in fewer words, beside the name of a method."""
_MOST_AVERAGES = 8
_MOST_DIFFERENCES = 5


def verdict_section(report: Report, verdict: Verdict) -> Section:
    """The verdict: its first sentence, the picture and the averages, then the rest of it."""
    table, roles = report.table, report.roles
    first = first_sentence(verdict)
    measure = table.measure
    drawn = figure(
        "accuracy-per-target",
        plots.accuracy_per_target(table),
        f"{measure.name} of every method at every target, last round",
        f"Mean and standard error over {measure.repeat}s; thin lines: 95 % over the target's samples; dashes: pooled.",
        _numbers(table),
    )
    blocks: list[Block | None] = [Text(first, "verdict"), drawn, _averages(table, roles)]
    for heading, lines in paragraphs(verdict):
        blocks += _listings(heading, tuple(line for line in lines if line != first))
    return section("verdict", "Verdict", *blocks, folds=False)


def _listings(heading: str, lines: tuple[str, ...]) -> Iterator[Listing]:
    """Of many comparisons the first and the last line, which says how they were corrected; the others unfold."""
    if heading == DIFFERENCES and len(lines) > _MOST_DIFFERENCES + 2:
        yield Listing((*lines[:_MOST_DIFFERENCES], lines[-1]), heading)
        yield Listing(lines[_MOST_DIFFERENCES:-1], f"{len(lines) - _MOST_DIFFERENCES - 1} more differences", folds=True)
    elif lines:
        yield Listing(lines, heading)


def _averages(table: Table, roles: Mapping[str, Role]) -> Text | None:
    """The average of every method, the best first; None if no method has one."""
    measure = table.measure
    cells = [(name, cell) for name in table.methods if (cell := table.cells[name][AVERAGE]) and not cell.partial]
    cells.sort(key=lambda cell: cell[1].row.mean, reverse=not measure.less_is_better)
    if not cells:
        return None
    named = ", ".join(f"{name} {cell.mean}{_note_on_role(roles.get(name))}" for name, cell in cells[:_MOST_AVERAGES])
    more = f" and {len(cells) - _MOST_AVERAGES} more" if len(cells) > _MOST_AVERAGES else ""
    unit = f"{measure.name.lower()} in {measure.unit}" if measure.unit else measure.name
    return Text(f"Average over the targets ({unit}): {named}{more}.")


def _note_on_role(role: Role | None) -> str:
    """What to know of a method that is no choice for sites which keep their samples."""
    return "" if role in (None, "federated") else f" ({_MARKS.get(role, ROLES[role])})"


def result_section(table: Table, roles: Mapping[str, Role]) -> Section:
    """The table of the last round."""
    measure = table.measure
    points = (
        measure.meaning,
        "± is the standard error over seeds. Two methods whose intervals overlap have not been shown to differ; "
        "with three seeds even a gap of two standard errors is weak evidence.",
        "Bold is what is best in a column or not shown to be worse, where another one is. Where nothing is bold, no "
        "difference has been shown.",
        "All methods of an experiment do the same number of local mini-batches, unless the costs below say otherwise.",
        "The oracle looks at the labels of the target, which nobody has at a new site. "
        "It says what perfect selection could gain and is not a result.",
    )
    how = Listing(tuple(filter(None, points)), "How to read this", folds=True)
    return section("result", "Result", grids(table, roles)[0], how, folds=False)


def below_section(table: Table, roles: Mapping[str, Role]) -> Section | None:
    """The tables below the first: intervals over samples, the worst site, common test sets; None if there is none."""
    below = grids(table, roles)[1:]
    return section("below", "Intervals, worst site", *below) if below else None


def rows_section(used: Mapping[str, Conditions], details: Details) -> Section:
    """What each method is and what the sites have."""
    return section("rows", "Methods and sites", methods_grid(used, details.kinds), sites_grid(details.sites))


def grids(table: Table, roles: Mapping[str, Role] | None = None) -> list[Grid]:
    """A table and the tables below it. The average comes first, so that a small screen shows it."""
    columns = [name for name in (AVERAGE, *table.columns[:-1], table.columns[-1]) if name in table.columns]
    columns = list(dict.fromkeys(columns))
    named = table.measure.title or table.measure.what or table.measure.name
    named += "" if table.select == "last" else f", selection by {table.select}"
    body = [
        [_method(table, name, roles or {}), *(entry(table.cells[name][column]) for column in columns)]
        for name in table.methods
    ]
    first = grid(named, ["method", *columns], body, table.sentences, "accuracies" if AVERAGE in columns else "")
    return [first, *(below for more in table.more for below in grids(more, roles))]


def methods_grid(used: Mapping[str, Conditions], kinds: Mapping[str, Sequence[str]]) -> Grid:
    """What each method is, where it was published, what its row used, and what it lets leave a site."""
    rows: list[Cells] = []
    for name, sent in kinds.items():
        row = used[name]
        known = ENTRIES.get(row.name)
        title = f"{known.class_path.split(':')[1]} ({known.citation})" if known else "a method of your own"
        more = "; ".join(row.words) or "the sources' samples as they are"
        left = "; ".join(KINDS.get(kind, kind) for kind in sent) or MISSING
        numbers = number(row.exchanges, 0), number(row.sent / 1e6, 2)
        rows.append([name, title, ROLES[row.role], more, *numbers, left])
    head = ["method", "title", "samples", "used", "exchanges", "MB sent and got", "what left the sites"]
    note = "Only rows that used the same are alike; a difference between others is also one of what they used."
    return grid("Methods", head, rows, [note], css="facts words")


def _method(table: Table, name: str, roles: Mapping[str, Role]) -> Entry:
    role = roles.get(name)
    if role is None:
        return Entry(name)
    used = [badge for badge in table.badges.get(name, ()) if badge not in ("pooled", "oracle")]
    return Entry(name, mark=", ".join([_MARKS.get(role, ROLES[role]), *used]), title=ROLES[role])


def entry(cell: Cell | None) -> Entry:
    """A cell of a table of results."""
    if cell is None:
        return Entry(MISSING)
    seeds = ", ".join(map(cell.format_number, cell.row.seeds))
    error = f"± {cell.error}" if cell.error else ""
    return Entry(cell.mean, error, f"seeds: {seeds}", cell.best, cell.row.mean)


def _numbers(table: Table) -> Iterator[Sequence[object]]:
    yield "method", "target", "mean", "standard_error", "n"
    for row in table.rows:
        yield row.method, row.target, row.mean, row.standard_error, row.n


def sites_grid(samples: SiteSamples | None) -> Grid | None:
    """How many samples each site has, and of which classes."""
    if samples is None:
        return None
    rows: list[Cells] = []
    for site, parts in samples.ranges.items():
        share = samples.shares.get(site, [])
        balance = [number(part, 1) for part in share] or [Entry(MISSING)] * len(samples.classes)
        rows.append([site, *(_range(*ends) for ends in parts.values()), *(balance if samples.shares else [])])
    more = f" The {len(rows)} of {samples.number} sites with the fewest." if len(rows) < samples.number else ""
    notes = ["Samples in a run: where a site trains, where it is held out, where it is the target." + more]
    head = ["site", *(part.replace("_", " ") for part in next(iter(samples.ranges.values())))]
    if samples.shares:
        notes.append("Classes: their share of the samples that were measured at the site, in percent.")
        head += [f"{name}, %" for name in samples.classes]
    return grid("Samples at each site", head, rows, notes, "sites")


def _range(low: int, high: int) -> Entry:
    if not high:
        return Entry(MISSING)
    return Entry(f"{low:,}" if low == high else f"{low:,} to {high:,}", value=float(high))


def other_section(report: Report) -> Section:
    """The tables of the other selection rules."""
    blocks: list[Block] = []
    for rule, table in report.others.items():
        if table is None:
            text = f"Not available: {RULES[rule].description}; no source kept a held-out part."
            blocks.append(Text(text, "note"))
        else:
            blocks += grids(table, report.roles)
    return section("others", "Other selection rules", *blocks)


def differences_section(verdict: Verdict, table: Table) -> Section:
    """Every two methods, tested."""
    targets, measure = table.columns[:-1], table.measure
    title = "Differences between methods"
    if not verdict.differences:
        return section("differences", title, Text("One method: nothing to compare.", "note"))
    lines = [differences.line(difference, targets) for difference in verdict.differences]
    head = differences.head(targets, measure)
    notes = [f"Last round. {differences.note(measure)}"]
    if any(MAJORITY in difference.name for difference in verdict.differences):
        notes.append(
            f"{MAJORITY.capitalize()}: what always naming a target's most frequent class would reach. Whether methods "
            "beat it is a question of its own: p (Holm) is corrected for these lines, and apart for the other lines."
        )
    return section("differences", title, grid("Differences", head, lines, notes))


def gains_grid(gains: Mapping[str, Mapping[str, float]], methods: Sequence[str]) -> Grid | None:
    """What each site gains over the best model that it can train alone, where both sides are measured."""
    if not gains:
        return None
    sites = list(dict.fromkeys(site for of_sites in gains.values() for site in of_sites))
    rows: list[Cells] = [[name, *(number(gains.get(name, {}).get(site)) for site in sites)] for name in methods]
    note = "Percentage points over the best model that a site can train alone, mean over pairs and splits."
    return grid("Gain of each site", ["method", *sites], rows, [note])


_RESTS_ON = (
    "An estimate is no measurement: it compares the models' answers there with those at targets that have labels. "
    "Here, in tables and in the verdict it rests on the scores that runs noted. fedshift estimate also looks at "
    "samples again where it can, so it may say another number: that is then the one to take."
)


def without_labels_section(report: Report) -> Section | None:
    """What is estimated where nothing could be measured; None where all targets have labels."""
    if not report.unmeasured.means:
        return None
    return section("estimates", "Targets without labels", *_blocks(report), folds=False)


def _blocks(report: Report) -> Iterator[Block]:
    unmeasured = report.unmeasured
    yield from (Text(paragraph, "verdict") for paragraph in unmeasured.for_a_board)
    yield Text(" ".join([*unmeasured.sentences, *report.choices, _RESTS_ON]))
    rows = list[Cells]()
    for site, method, samples, middle, usual in unmeasured.means:
        ends = (Entry("–"),) * 3 if middle is None else tuple(number(part, 1) for part in middle)
        rows.append([site, method, f"{samples:,}", *ends, number(usual, 1)])
    drawn = {f"{method} at {site}": (*middle, usual) for site, method, _, middle, usual in unmeasured.means if middle}
    if drawn:
        yield figure(
            "estimates",
            plots.estimates(drawn),
            "Estimated accuracy at targets without labels, with intervals of 90 %",
            "Estimate and interval; the cross is the mean of the targets that have labels.",
            [["run", "estimate", "low", "high", "usual"], *([name, *numbers] for name, numbers in drawn.items())],
        )
    head = ["target", "method", "samples", "estimate, %", "low", "high", "mean of measured targets, %"]
    yield grid("Accuracy where it could not be measured", head, rows, ["Means over seeds; intervals of 90 %."])
    further: list[Cells] = [[*names, *(number(part, 1) for part in ends)] for *names, ends in unmeasured.further]
    if further:
        head = ["target", "method", "measure", "estimate, %", "low", "high"]
        yield grid("AUROC, sensitivity and specificity there", head, further, ["Of the first seed; intervals of 90 %."])
    if unmeasured.reasons:
        yield Listing(unmeasured.reasons, "What is unlike, and what else to know")
