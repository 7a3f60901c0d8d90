"""The report of an experiment: one HTML page that fetches nothing and needs no knowledge of fedshift."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from fedshift.evaluation.cautions import cautions
from fedshift.evaluation.records import RoundRecord, RunResult, Selection
from fedshift.evaluation.selection import RULES
from fedshift.evaluation.stored import ROUNDS
from fedshift.files import write_bytes
from fedshift.report import differences, plots
from fedshift.report.averages import mean_by_kind, mean_over_targets, mean_per_class, moving, weights_over_rounds
from fedshift.report.collect import Collected, FinishedRun, read_rounds
from fedshift.report.html import details, escape, grid, paragraph, section
from fedshift.report.sections.metrics import metrics_section
from fedshift.report.style import STYLE
from fedshift.report.table import MISSING, Table, table_of
from fedshift.report.table import headline as usual_measure

PAGE = "report.html"
_MOST_CLASSES = 20
_MOST_PANELS = 4

_QUESTIONS = {
    "leave_one_out": "Does it work at a new site? Each target in turn took no part in training and was only tested.",
    "adapt_to_one": "Does it work at a site without labels? Each target in turn took part without its labels.",
    "source_target": "Does everybody win? Labelled and unlabelled sites train together and are both tested.",
}


def write_page(folder: Path, collected: Collected) -> Path:
    """Write `report.html` in ``folder``, atomically.

    Returns:
        Its path.

    Raises:
        UserError: the page cannot be written there, or a `rounds.jsonl` is corrupt.
    """
    path = folder / PAGE
    write_bytes(path, page(collected).encode())
    return path


def page(collected: Collected) -> str:
    """The page as text. It depends only on the files of ``collected``."""
    results = collected.results
    headline = table_of(collected, "last")
    records = {run.folder: read_rounds(run.folder / ROUNDS) for run in collected.runs}
    sections = [
        _header(collected),
        section("result", "Result", _main_result(headline), _how_to_read(headline)),
        *metrics_section(results, headline.methods),
        section("curves", f"{_usual(results)} over training", _curves(collected.runs, records, headline)),
        section("others", "Other selection rules", *(_other(collected, rule) for rule in ("source", "oracle"))),
        section("differences", "Differences between methods", _differences(results, headline)),
        *_weights(collected.runs, records, headline.methods),
        section("cost", "Cost", _cost(results, headline.methods)),
        section("classes", f"Per {_unit(results)}, at each method's worst target", _per_class(results, headline)),
        section("warnings", "Warnings", _warnings(results)),
        section("settings", "Settings and versions", _settings(results, headline.methods)),
    ]
    title = escape(f"{collected.name}: fedshift report")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _header(collected: Collected) -> str:
    results, order = collected.results, collected.order
    kinds = {_kind(result) for result in results}
    question = _QUESTIONS.get(kinds.pop(), "") if len(kinds) == 1 else ""
    data = sorted({str(result.data["name"]) for result in results if "name" in result.data})
    facts = [
        ("data", ", ".join(data)),
        ("methods", ", ".join(order.methods)),
        ("targets", ", ".join(order.targets)),
        ("seeds", ", ".join(map(str, order.seeds))),
        ("structures" if _unit(results) == "structure" else "classes", str(len(results[0].classes))),
        (
            "runs",
            f"{len(results)} finished" + (f", {collected.unfinished} unfinished" if collected.unfinished else ""),
        ),
    ]
    listing = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts if v)
    return (
        f"<header>\n<h1>{escape(collected.name)}</h1>\n"
        + (paragraph(question, "lead") if question else "")
        + f"\n<dl>{listing}</dl>\n</header>"
    )


def _kind(result: RunResult) -> str:
    protocol = result.options.get("protocol")
    return str(protocol.get("kind", "")) if isinstance(protocol, Mapping) else ""


def table_html(table: Table) -> str:
    """The table as HTML, with its notes and the further tables below it."""

    def entry(method: str, column: str) -> str:
        cell = table.cells[method][column]
        if cell is None:
            return f'<td class="missing">{MISSING}</td>'
        error = f' <span class="error">± {cell.error}</span>' if cell.error else ""
        seeds = ", ".join(f"{value:.2f}" for value in cell.row.seeds)
        mean = f"<b>{cell.mean}</b>" if cell.best else cell.mean
        return f'<td title="seeds: {seeds}">{mean}{error}</td>'

    title = f"<h3>{escape(table.measure.title)}</h3>" if table.measure.title else ""
    accuracies = title + grid(
        ["method", *map(escape, table.columns)],
        ([escape(method), *(entry(method, column) for column in table.columns)] for method in table.methods),
        "accuracies",
    )
    return "".join([accuracies, *(paragraph(note, "note") for note in table.notes), *map(table_html, table.more)])


def _main_result(headline: Table) -> str:
    figure = plots.svg(
        plots.accuracy_per_target(headline), f"{headline.measure.name} of every method at every target, last round"
    )
    return (
        table_html(headline) + f"<figure>{figure}<figcaption>Mean and standard error over seeds.</figcaption></figure>"
    )


def _how_to_read(headline: Table) -> str:
    points = [
        headline.measure.meaning,
        "± is the standard error over seeds. Two methods whose intervals overlap have not been shown to differ; "
        "with three seeds even a gap of two standard errors is weak evidence.",
        "The best figure of a column is bold. That alone does not make it better.",
        "All methods of an experiment do the same number of local mini-batches, unless the costs below say otherwise.",
        "The oracle looks at the labels of the target, which nobody has at a new site. "
        "It says what perfect selection could gain and is not a result.",
    ]
    items = "".join(f"<li>{escape(point)}</li>" for point in points)
    return f"<details open><summary>How to read this</summary><ul>{items}</ul></details>"


def _other(collected: Collected, rule: Selection) -> str:
    if all(result.score(rule) is None for result in collected.results):
        return paragraph(f"Not available: {RULES[rule].description}; no source kept a held-out part.", "note")
    return f"<h3>{escape(rule)}</h3>" + table_html(table_of(collected, rule))


def _usual(results: Sequence[RunResult]) -> str:
    """The name of what is measured after every round."""
    return usual_measure(results).name


def _curves(runs: Sequence[FinishedRun], records: Mapping[Path, list[RoundRecord]], headline: Table) -> str:
    curves: dict[str, dict[str, plots.Curve]] = {"round": {}, "local mini-batches per site": {}}
    for method in headline.methods:
        shown = [(run.result, records[run.folder]) for run in runs if run.result.method == method]
        points = mean_over_targets([(result, rounds) for result, rounds in shown if rounds])
        if points:
            numbers, batches, mean, spread = zip(*points, strict=True)
            band = None if None in spread else spread
            curves["round"][method] = (numbers, mean, band)
            curves["local mini-batches per site"][method] = (batches, mean, band)
    if not curves["round"]:
        return paragraph("There is no rounds.jsonl with the results, so there is nothing to draw.", "note")
    quantity = _usual([run.result for run in runs])
    figure = plots.svg(
        plots.accuracy_over_rounds(curves, quantity), f"{quantity} over rounds and over local mini-batches"
    )
    caption = (
        "Mean over targets; the band is one standard deviation over seeds. "
        "The right panel compares at equal work, which includes what a method does before its first round."
    )
    return f"<figure>{figure}<figcaption>{escape(caption)}</figcaption></figure>"


def _weights(
    runs: Sequence[FinishedRun], records: Mapping[Path, list[RoundRecord]], methods: Sequence[str]
) -> Iterator[str]:
    """A section about methods that change the sites' weights from round to round, if there are any."""
    figures = []
    for method in methods:
        by_target: dict[str, list[list[RoundRecord]]] = defaultdict(list)
        for run in runs:
            if run.result.method == method:
                by_target[run.result.target].append(records[run.folder])
        curves = {target: weights_over_rounds(rounds) for target, rounds in by_target.items()}
        if any(moving(lines.values()) for lines in curves.values()):
            shown = dict(list(curves.items())[:_MOST_PANELS])
            more = (
                f"<figcaption>{len(shown)} of {len(curves)} targets.</figcaption>" if len(shown) < len(curves) else ""
            )
            figure = plots.svg(plots.site_weights(shown), f"Weights of the sites over rounds, {method}")
            figures.append(f"<h3>{escape(method)}</h3><figure>{figure}{more}</figure>")
    if figures:
        caption = "How much each site counts in the aggregate, by target: mean and standard deviation over seeds."
        yield section("weights", "Weights of the sites over training", paragraph(caption, "note"), *figures)


def _differences(results: Sequence[RunResult], headline: Table) -> str:
    methods, targets = headline.methods, headline.columns[:-1]
    pairs = [(first, second) for index, first in enumerate(methods) for second in methods[:index]]
    if not pairs:
        return paragraph("One method: nothing to compare.", "note")
    value = headline.measure.value
    found = [differences.line(one, targets) for one in differences.differences(results, pairs, value=value)]
    head = differences.head(targets, headline.measure)
    body = ([escape(cell) for cell in cells] for cells in found)
    return grid([escape(name) for name in head], body) + paragraph(
        f"Last round. {differences.note(headline.measure)}", "note"
    )


def _cost(results: Sequence[RunResult], methods: Sequence[str]) -> str:
    lines = []
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    for method in methods:
        runs = [result for result in results if result.method == method]
        sizes[method] = {
            "up": mean_by_kind([run.bytes_up for run in runs]),
            "down": mean_by_kind([run.bytes_down for run in runs]),
        }
        lines.append(
            [
                escape(method),
                f"{fmean(run.rounds for run in runs):g}",
                f"{fmean(run.mini_batches for run in runs):,.0f}",
                f"{fmean(run.seconds for run in runs):,.1f}",
                f"{1e3 * sum(run.seconds for run in runs) / max(1, sum(run.mini_batches for run in runs)):,.1f}",
                f"{sum(sizes[method]['up'].values()) / 1e6:,.2f}",
                f"{sum(sizes[method]['down'].values()) / 1e6:,.2f}",
            ]
        )
    head = ["method", "rounds", "mini-batches per site", "seconds", "ms per mini-batch", "MB up", "MB down"]
    note = "Means over the runs of a method. Up leaves the sites, down reaches them; all sites together; 1 MB = 10⁶ B."
    costs = grid(head, lines) + paragraph(note, "note")
    if not any(sum(kinds.values()) for ways in sizes.values() for kinds in ways.values()):
        return costs
    figure = plots.svg(plots.bytes_by_kind(sizes), "Megabytes per run by kind of content")
    caption = "What crossed the sites' borders, by kind of content."
    return costs + f"<figure>{figure}<figcaption>{caption}</figcaption></figure>"


def _unit(results: Sequence[RunResult]) -> str:
    """What the page calls a class: "class", or for segmentation "structure"."""
    return "structure" if results[0].metric == "dice" else "class"


def _per_class(results: Sequence[RunResult], headline: Table) -> str:
    lines = []
    for method in headline.methods:
        cells = [cell for cell in list(headline.cells[method].values())[:-1] if cell is not None]
        if not cells:
            continue
        worst = (max if headline.measure.less_is_better else min)(cells, key=lambda cell: cell.row.mean).row.target
        runs = [result for result in results if result.method == method and result.target == worst]
        lines.append((method, worst, mean_per_class(runs)))
    classes = results[0].classes
    if any(result.classes != classes for result in results) or not any(accuracies for *_, accuracies in lines):
        return paragraph("No accuracies per class were recorded for one common list of classes.", "note")
    shown = list(range(len(classes)))
    note = "Last round: percent of a class's samples recognised, mean over seeds; – where the target lacks the class."
    if _unit(results) == "structure":
        note = "Last round: Dice coefficient of each structure in percent, mean over seeds."
    if len(classes) > _MOST_CLASSES:
        hardest = sorted(
            shown, key=lambda index: min((a[index] for *_, a in lines if a.get(index) is not None), default=101)
        )
        shown = sorted(hardest[:_MOST_CLASSES])
        note += f" The {_MOST_CLASSES} hardest of {len(classes)} classes."
    body = (
        [escape(method), escape(worst), *(_tinted(accuracies.get(index)) for index in shown)]
        for method, worst, accuracies in lines
    )
    head = ["method", "target", *(escape(classes[index]) for index in shown)]
    return grid(head, body, "classes") + paragraph(note, "note")


def _tinted(accuracy: float | None) -> str:
    if accuracy is None:
        return f'<td class="missing">{MISSING}</td>'
    return f'<td style="--miss:{0.7 * (100 - accuracy):.0f}%">{accuracy:.0f}</td>'


def _warnings(results: Sequence[RunResult]) -> str:
    where: dict[str, list[str]] = defaultdict(list)
    found = "".join(f"<li>{escape(text)}</li>" for text in cautions(results))
    for result in results:
        for warning in dict.fromkeys(result.warnings):
            where[warning].append(f"{result.method} / {result.target} / seed {result.seed}")
    if not where and not found:
        return paragraph("None.")
    items = [found]
    for warning, places in where.items():
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        items.append(f'<li>{escape(warning)} <span class="note">({escape("; ".join(places[:3]) + more)})</span></li>')
    return f"<ul>{''.join(items)}</ul>"


def _settings(results: Sequence[RunResult], methods: Sequence[str]) -> str:
    seen: dict[str, dict[str, None]] = defaultdict(dict)
    for result in results:
        facts = {**result.versions, "device": result.device, "threads": str(result.threads)}
        for name, value in facts.items():
            seen[name].setdefault(value)
    versions = grid(
        ["", "in these runs"], ([escape(name), escape(", ".join(values))] for name, values in seen.items()), "facts"
    )
    mixed = [name for name, values in seen.items() if len(values) > 1]
    if mixed:
        versions += paragraph(f"The runs were not run alike ({', '.join(mixed)}): compare with care.", "note")
    first = {method: next(result for result in results if result.method == method) for method in methods}
    blocks = [details("Data", results[0].data)]
    blocks += [details(f"Settings of {method}", result.options) for method, result in first.items()]
    return versions + "\n".join(filter(None, blocks))
