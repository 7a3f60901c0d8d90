"""Writes the tables of benchmarks/*.md and README.md from the committed results: ``python benchmarks/summarise.py``.

A marker ``<!-- table NAME [SELECT] [of ROW, ROW] -->`` … ``<!-- end -->`` is filled with the table of
``benchmarks/results/NAME``, with the published averages where ``published.json`` has them.
``python benchmarks/summarise.py NAME`` prints all of any folder of results: every row and site, settings, differences,
published rows, bytes and seconds, and what a source with wrong labels counts. SELECT is a selection rule, ``sites`` for
a column of every site, ``cost``, ``weights`` or ``protocols``, for averages under three ways to choose the round.
``<!-- attacks METHOD SITES -->`` … ``<!-- end -->`` is filled with what bad sites do under each rule.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import robust_aggregation
from fedshift.errors import nearest
from fedshift.evaluation.records import RunResult, Selection
from fedshift.evaluation.significance import compare
from fedshift.evaluation.stored import ROUNDS, read_rounds
from fedshift.evaluation.summary import AVERAGE, Value, rows
from fedshift.report import differences
from fedshift.report.collect import Collected, collect
from fedshift.report.measures import MISSING
from fedshift.report.report import report_of
from fedshift.report.run_means import mean_weights
from fedshift.report.table import headline
from fedshift.report.table_formats import markdown
from fedshift.text import escape_markdown
from result_tables import Column, details, page_table

HERE = Path(__file__).parent
PUBLISHED = {
    "rotated_mnist_paper": "rotated_mnist",
    "rotated_mnist_family": "rotated_mnist",
    "rotated_mnist_pooled": "rotated_mnist",
    "rotated_mnist_ghifary": "rotated_mnist",
    "pacs_features": "pacs",
    "amazon_reviews": "amazon_reviews",
    "amazon_reviews_log": "amazon_reviews",
    "five_digits": "digit5",
    "office_caltech_surf": "office_caltech",
    "peers_heart": "flamby_heart",
    "peers_tcga": "flamby_tcga",
}
BASELINES = {
    "pooled_surf": "deepall",
    "pooled_pacs": "deepall",
    "rotated_mnist_pooled": "deepall",
    "rotated_mnist_ablation": "csac",
    "pacs_ablation": "base",
    "amazon_ablation": "base",
    "pacs_win_win": "source_only",
    "office_caltech_win_win": "source_only",
}
"""The method that the others of a table are compared with; FedAvg where nothing is said."""
PAIRS = (
    ("kd3a", "source_only"),
    ("kd3a-mixup", "kd3a"),
    ("kd3a-shapley-mixup", "kd3a"),
    ("kd3a-released", "kd3a"),
    ("kd3a-hard-confident-no-mixup", "kd3a"),
    ("kd3a-batch-teachers", "dsbn"),
    ("kd3a-released", "shot"),
    ("focus", "samples"),
    ("r1", "r100"),
    ("adaptive", "fixed"),
    *((method, "deepall") for method in ("recipe", "jigen", "fact", "mixstyle")),
    ("recipe", "fedavg-turned"),
    ("recipe", "deepall-turned"),
    ("no-templates", "deepall"),
    *(
        (method, other)
        for method in ("mdfnet", "mdfnet-practical", "mdfnet-slow-labels")
        for other in ("shot", "srdc", "cdan-released")
    ),
)
"""Further comparisons, made wherever a table has both."""
_BY_PROTOCOL = ("rotated_mnist_paper", "rotated_mnist_ghifary")
"""Results that are also printed under three ways to choose the round, as their papers differ in it."""
MARKER = re.compile(r"<!-- table (\w+)(?: (?!of )(\w+))?(?: of ([^>]+?))? -->.*?<!-- end -->", re.DOTALL)

ATTACKS = re.compile(r"(<!-- attacks (\w+) (\d+) -->).*?<!-- end -->", re.DOTALL)


def facts(collected: Collected) -> str:
    """Runs, seconds, versions, threads of a set of results."""
    results = collected.results
    seconds = sum(result.seconds for result in results)
    versions = sorted({f"{name} {result.versions[name]}" for result in results for name in ("torch", "numpy")})
    threads = "/".join(map(str, sorted({result.threads for result in results})))
    text = f"{len(results)} runs, {seconds / 3600:.1f} hours of run time in all, {threads} thread(s) a run, "
    text += ", ".join(versions) + "."
    if collected.unfinished:
        text += f" **{collected.unfinished} of {collected.planned} runs are still to come.**"
    return text


def lines_of(name: str, collected: Collected, select: Selection) -> list[differences.Difference]:
    """How the methods of a table differ from its baseline, and as `PAIRS` says: all that are corrected together."""
    baseline = BASELINES.get(name, "fedavg")
    others = [method for method in collected.order.methods if method not in (baseline, "oracle")]
    pairs = dict.fromkeys([*((method, baseline) for method in others), *PAIRS])
    return differences.differences(collected.results, pairs, select)


def comparison_table(name: str, collected: Collected, select: Selection) -> str:
    """The table of `lines_of`; "" for one seed."""
    lines = tested_lines(name, collected, select)
    return differences.markdown(lines, collected.order.targets, headline(collected.results)) if lines else ""


def tested_lines(name: str, collected: Collected, select: Selection) -> list[differences.Difference]:
    """`lines_of`; none for one seed."""
    lines = lines_of(name, collected, select)
    return lines if any(line.comparison.seeds and line.comparison.seeds.n > 1 for line in lines) else []


def gains(name: str, collected: Collected, select: Selection) -> list[Column]:
    """What each method adds to the table's baseline, and its p: a column, or none for one seed."""
    baseline = BASELINES.get(name, "fedavg")
    by_name = {line.name: line for line in tested_lines(name, collected, select)}
    cells = {
        method: f"{differences.with_sign(line.comparison.test.mean)} ({differences.p_value(p)})".replace("<", "\\<")
        for method in collected.order.methods
        if (line := by_name.get(f"{method} − {baseline}")) is not None and line.comparison.test is not None
        if (p := line.corrected if line.comparison.clustered else line.here) is not None
    }
    return [(f"− {escape_markdown(baseline)} (p)", lambda method: cells.get(method, MISSING))] if cells else []


def published_entry(name: str) -> dict[str, Any]:
    """Source and rows of what was published beside some results."""
    entry: dict[str, Any] = json.loads((HERE / "published.json").read_text(encoding="utf-8"))[PUBLISHED[name]]
    return entry


def published_source(name: str) -> str:
    """Where the published averages are from."""
    return f"Published: {published_entry(name)['source'].partition(' (mean')[0]}."


def published_column(name: str, collected: Collected) -> list[Column]:
    """The published average of each method, beside the first row of that method; a column, or none."""
    if name not in PUBLISHED:
        return []
    averages: dict[str, list[float]] = {}
    for paper, cells in sorted(published_entry(name)["rows"].items(), key=lambda row: "(" in row[0]):
        plain = re.sub(r"[^a-z0-9]", "", paper.partition("(")[0].lower())
        if AVERAGE in cells and ("(" in paper or plain not in averages):
            averages.setdefault(plain, []).append(cells[AVERAGE][0])
    names = {run.method: str(run.options["method"]["name"]) for run in collected.results}
    first: dict[str, str] = {}
    for label in collected.order.methods:
        if label in names and (label == names[label] or names[label] not in collected.order.methods):
            first.setdefault(names[label].replace("_", ""), label)
    cells = {first[plain]: f"{of[0]:.2f}" for plain, of in averages.items() if plain in first}
    return [("published", lambda method: cells.get(method, MISSING))] if cells else []


def published_table(name: str) -> str:
    """The published rows as a Markdown table in the same order of columns."""
    entry = published_entry(name)
    names = list(next(iter(entry["rows"].values())))
    head = f"| published: {entry['source']} | " + " | ".join(names) + " |"
    lines = [head, "|---" * (len(names) + 1) + "|"]
    for method, cells in entry["rows"].items():
        shown = [cells[site] for site in names]
        values = [f"{mean:.2f}" + (f" ± {error:.2f}" if error is not None else "") for mean, error in shown]
        lines.append(f"| {method} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def costs(collected: Collected) -> str:
    """What a method costs: bytes by kind and direction over all sites, a round and in all, and seconds."""
    lines = ["| method | rounds | mini-batches | up, MB a round | down, MB a round | MB in all | seconds a round |"]
    lines.append("|---|" + "---:|" * 6)
    for label in collected.order.methods:
        results = [result for result in collected.results if result.method == label]
        if not results:
            continue
        rounds = sum(result.rounds for result in results)

        def per_round(by_kind: Sequence[Mapping[str, int]], rounds: int = rounds) -> str:
            totals = {kind: sum(of_run[kind] for of_run in by_kind) / rounds for kind in by_kind[0]}
            large = {kind: total for kind, total in totals.items() if total >= 1000}
            return " + ".join(f"{total / 1e6:.3f} {kind}" for kind, total in large.items()) or "0"

        up, down = [result.bytes_up for result in results], [result.bytes_down for result in results]
        cells = (
            _span([result.rounds for result in results]),
            _span([result.mini_batches for result in results]),
            per_round(up),
            per_round(down),
            f"{sum(sum(of_run.values()) for of_run in [*up, *down]) / len(results) / 1e6:,.1f}",
            f"{median(result.seconds / result.rounds for result in results):.1f}",
        )
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bad_weights(collected: Collected) -> str:
    """What a source with wrong labels weighs in the aggregate in the course of training."""
    (site,) = collected.results[0].options["protocol"]["wrong_labels"]
    last = max(result.rounds for result in collected.results)
    rounds = list(dict.fromkeys(max(1, round(share * last)) for share in (0, 0.1, 0.2, 0.3, 0.5, 0.75, 1)))
    lines = [f"| weight of {site} | " + " | ".join(f"round {number}" for number in rounds) + " |"]
    lines.append("|---|" + "---:|" * len(rounds))
    for label in collected.order.methods:
        finished = [run for run in collected.runs if run.result.method == label]
        runs = [read_rounds(run.folder / ROUNDS) for run in finished]
        cells = [f"{mean_weights(runs, site, number) or 0.0:.3f}" for number in rounds]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_protocol(collected: Collected) -> str:
    """Averages over targets, and what each method adds to FedAvg, under three rules for the round that is reported.

    Work is equal where a method that trains before its first round has fewer rounds. Published tables count rounds, and
    the released code of CSAC reports the round that is best at the target: that one is an oracle.
    """
    rounds = {id(run.result): read_rounds(run.folder / ROUNDS) for run in collected.runs}

    def up_to_plan(result: RunResult) -> list[float]:
        planned = result.options["training"]["rounds"]
        return [of.target_mean for of in rounds[id(result)] if of.round <= planned and of.target_mean is not None]

    protocols: dict[str, Value] = {
        "last round, equal work": lambda result, _: result.accuracy(),
        "last round, equal rounds": lambda result, _: up_to_plan(result)[-1],
        "best target round, equal rounds (oracle)": lambda result, _: max(up_to_plan(result)),
    }
    targets = {result.target for result in collected.results}
    lines = ["| method | " + " | ".join(protocols) + " |", "|---|" + "---:|" * len(protocols)]
    for method in collected.order.methods:
        of_method = [result for result in collected.results if result.method == method]
        if {result.target for result in of_method} < targets:
            continue  # an average over fewer targets is no average of this table
        cells = []
        for value in protocols.values():
            average = next(row for row in rows(of_method, value=value) if row.target == AVERAGE)
            error = "" if average.standard_error is None else f" ± {average.standard_error:.2f}"
            base = [result for result in collected.results if result.method == "fedavg"]
            test = compare(of_method, base, value=value)
            gain = test.test if method != "fedavg" and test is not None else None
            more = f" ({gain.mean:+.2f}, p {_p(gain.p)})" if gain and gain.p is not None else ""
            cells.append(f"{average.mean:.2f}{error}{more}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _p(p: float) -> str:
    text = differences.p_value(p)
    return text if text.startswith("<") else f"= {text}"


def _span(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def section(match: re.Match[str], tests: bool, warned: set[str]) -> str:
    """One marker's content, as result pages have it, with the tests of its differences, or as README.md does."""
    name, select = match.group(1), match.group(2) or "last"
    folder = HERE / "results" / name
    if not folder.exists():
        return match.group(0)
    collected = collect(folder)
    head = match.group(0).split("-->")[0] + "-->"
    others = dict(zip(OTHERS, (costs, bad_weights, by_protocol), strict=True))
    if select in others:
        return "\n".join([head, others[select](collected), "<!-- end -->"])
    sites = select == "sites"
    rule = "last" if sites else cast(Selection, select)
    if not tests:
        return "\n".join(
            [
                head,
                f"Measured:\n\n{markdown(report_of(collected, rule).table).strip()}",
                "",
                facts(collected),
                "<!-- end -->",
            ]
        )
    only = tuple(filter(None, re.split(r", *", match.group(3) or "")))
    if unknown := [row for row in only if row not in collected.order.methods]:
        raise ValueError(f"{name} has no row {unknown[0]}; {nearest(unknown[0], collected.order.methods)}")
    columns = [*published_column(name, collected), *gains(name, collected, rule)]
    table = page_table(name, collected, rule, warned, columns, sites=sites, only=only)
    source = published_source(name) if name in PUBLISHED and PUBLISHED[name] not in warned else ""
    warned.update([PUBLISHED[name]] if source else [])
    return "\n".join([head, table, "", *([source, ""] if source else []), "<!-- end -->"])


def more(name: str, select: Selection = "last") -> str:
    """All of a table: every site, intervals, further accuracies, settings, every difference, bytes and seconds."""
    collected = collect(HERE / "results" / name)
    parts = [*details(collected, select), comparison_table(name, collected, select)]
    parts += [published_table(name)] if name in PUBLISHED else []
    parts += [costs(collected)]
    parts += [bad_weights(collected)] if collected.results[0].options["protocol"].get("wrong_labels") else []
    parts += [by_protocol(collected)] if name in _BY_PROTOCOL else []
    return "\n\n".join(filter(None, parts))


OTHERS = ("cost", "weights", "protocols")
NAMES = sorted(folder.name for folder in (HERE / "results").iterdir() if folder.is_dir())
PAGES = [*sorted(HERE.glob("*.md")), HERE.parent / "README.md"]


def has_runs(name: str) -> bool:
    """Whether results are runs, and not of another form such as an audit's."""
    return (HERE / "results" / name / "runs.parquet").is_file()


def printed_results(text: str) -> set[str]:
    """The results that a page only names between backticks, for they are printed by a command."""
    return set(re.findall(r"`(\w+)`", text)) & set(NAMES)


def fill_page(page: Path) -> str:
    """The text of a page with every marker filled from the results."""
    tests = page.resolve().parent == HERE.resolve()
    text = MARKER.sub(partial(section, tests=tests, warned=set()), page.read_text(encoding="utf-8"))
    return ATTACKS.sub(attacks, text)


def attacks(match: re.Match[str]) -> str:
    """One marker's content: accuracy and the backdoor's success under each rule."""
    head, method, sites = match.groups()
    return "\n".join([head, robust_aggregation.table(method, int(sites)), "<!-- end -->"])


def main() -> None:
    """Fill the markers of all pages; or print all of the results that are named."""
    for name in sys.argv[1:]:
        if name not in NAMES:
            sys.exit(f"error: there are no results {name}; {nearest(name, NAMES)}")
        print(more(name))
    if not sys.argv[1:]:
        for page in PAGES:
            page.write_text(fill_page(page), encoding="utf-8")


if __name__ == "__main__":
    main()
