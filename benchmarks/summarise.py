"""Writes the tables of benchmarks/*.md and README.md from the committed results: ``python benchmarks/summarise.py``.

A marker ``<!-- table NAME [SELECT] -->`` … ``<!-- end -->`` is filled with the table of ``benchmarks/results/NAME``,
its facts (runs, seconds, versions, threads) and the published rows where ``published.json`` has them. SELECT is a
selection rule, ``cost`` for bytes and seconds a round, or ``weights`` for what a source with wrong labels counts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from fedshift.evaluation.stored import ROUNDS
from fedshift.evaluation.summary import paired_difference
from fedshift.report.collect import Collected, collect, read_rounds
from fedshift.report.table import markdown, table_of
from fedshift.report.weights import mean_weights

HERE = Path(__file__).parent
PUBLISHED = {
    "rotated_mnist_paper": "rotated_mnist",
    "rotated_mnist_family": "rotated_mnist",
    "pacs_features": "pacs",
    "amazon_reviews": "amazon_reviews",
    "amazon_reviews_log": "amazon_reviews",
    "five_digits": "digit5",
    "office_caltech_surf": "office_caltech",
}
TITLES = {
    "csac": "CSAC",
    "elcfs": "ELCFS",
    "fedsr": "FedSR",
    "copa": "COPA",
    "kd3a": "KD3A",
    "kd3a-batch-teachers": "KD3A (teachers on batches)",
    "kd3a-hard-confident-no-mixup": "KD3A (hard labels, confident share, no mixup)",
    "fedavg": "FedAvg",
    "source_only": "Source-only",
    "mdan": "MDAN",
    "shot": "SHOT",
    "cdan": "CDAN",
    "focus": "focus",
    "samples": "samples",
    "r1": "r = 1",
    "r100": "r = 100",
    "srdc": "SRDC",
    "mdfnet": "MDFNet",
    "mdfnet-slow-labels": "MDFNet (slow, labels)",
}
PAIRS = (
    ("csac", "fedavg"),
    ("elcfs", "fedavg"),
    ("fedsr", "fedavg"),
    ("copa", "fedavg"),
    ("kd3a", "fedavg"),
    ("kd3a", "source_only"),
    ("kd3a-hard-confident-no-mixup", "fedavg"),
    ("kd3a-batch-teachers", "fedavg"),
    ("mdan", "fedavg"),
    ("kd3a-hard-confident-no-mixup", "kd3a"),
    ("focus", "samples"),
    ("r1", "r100"),
    ("mdfnet", "source_only"),
    ("mdfnet", "shot"),
    ("mdfnet-slow-labels", "source_only"),
    ("mdfnet-slow-labels", "srdc"),
    ("mdfnet-slow-labels", "shot"),
    ("mdfnet-slow-labels", "cdan"),
)
"""Methods whose difference over all (target, seed) pairs is tested where a table has both."""
MARKER = re.compile(r"<!-- table (\w+)(?: (\w+))? -->.*?<!-- end -->", re.DOTALL)


def facts(found: Collected) -> str:
    """Runs, seconds, versions, threads of a set of results, and how each pair of methods compares."""
    results = found.results
    seconds = sum(result.seconds for result in results)
    versions = sorted({f"{name} {result.versions[name]}" for result in results for name in ("torch", "numpy")})
    threads = "/".join(map(str, sorted({result.threads for result in results})))
    text = f"{len(results)} runs, {seconds / 3600:.1f} hours of run time in all, {threads} thread(s) a run, "
    text += ", ".join(versions) + "."
    if found.unfinished:
        text += f" **{found.unfinished} of {found.planned} runs are still to come.**"
    by_method = {label: [r for r in results if r.method == label] for label in found.order.methods}
    for better, baseline in PAIRS:
        pair = paired_difference(by_method.get(better, []), by_method.get(baseline, []))
        if pair is not None and pair.p is not None:
            text += (
                f" {TITLES[better]} − {TITLES[baseline]} over {pair.n} (target, seed) pairs: {pair.mean:+.2f} points, "
            )
            text += f"paired t-test p = {pair.p:.2g}."
    return text


def published(name: str, columns: tuple[str, ...]) -> str:
    """The published rows as a Markdown table in the same order of columns."""
    entry = json.loads((HERE / "published.json").read_text(encoding="utf-8"))[PUBLISHED[name]]
    names = list(next(iter(entry["rows"].values())))
    head = "| method | " + " | ".join(names) + " |"
    lines = [f"Published: {entry['source']}", "", head, "|---" * (len(names) + 1) + "|"]
    for method, cells in entry["rows"].items():
        values = [f"{mean:.2f}" + (f" ± {error:.2f}" if error is not None else "") for mean, error in cells.values()]
        lines.append(f"| {method} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def costs(found: Collected) -> str:
    """What a method costs: bytes by kind and direction over all sites, a round and in all, and seconds."""
    lines = ["| method | rounds | mini-batches | up, MB a round | down, MB a round | MB in all | seconds a round |"]
    lines.append("|---|" + "---:|" * 6)
    for label in found.order.methods:
        results = [result for result in found.results if result.method == label]
        if not results:
            continue
        rounds = sum(result.rounds for result in results)

        def per_round(by_kind: list[Mapping[str, int]], rounds: int = rounds) -> str:
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
    remark = "Kinds of less than a kilobyte a round do not show. Bytes: mean over runs; seconds: median."
    return "\n".join([*lines, "", remark])


def bad_weights(found: Collected) -> str:
    """What a source with wrong labels weighs in the aggregate in the course of training."""
    (site,) = found.results[0].options["protocol"]["wrong_labels"]
    last = max(result.rounds for result in found.results)
    rounds = list(dict.fromkeys(max(1, round(share * last)) for share in (0, 0.1, 0.2, 0.3, 0.5, 0.75, 1)))
    lines = [f"| weight of {site} | " + " | ".join(f"round {number}" for number in rounds) + " |"]
    lines.append("|---|" + "---:|" * len(rounds))
    for label in found.order.methods:
        parts = [part for part in found.parts if part.result.method == label]
        runs = [read_rounds(part.folder / ROUNDS) for part in parts]
        cells = [f"{mean_weights(runs, site, number) or 0.0:.3f}" for number in rounds]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Mean over the runs of a method."])


def _span(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def section(match: re.Match[str]) -> str:
    """One marker's content."""
    name, select = match.group(1), match.group(2) or "last"
    folder = HERE / "results" / name
    if not folder.exists():
        return match.group(0)
    found = collect(folder)
    head = match.group(0).split("-->")[0] + "-->"
    if select in ("cost", "weights"):
        return "\n".join([head, costs(found) if select == "cost" else bad_weights(found), "<!-- end -->"])
    table = table_of(found, select)  # type: ignore[arg-type]
    parts = [head, "Measured:", "", markdown(table).strip(), ""]
    if name in PUBLISHED and select == "last":
        parts += [published(name, table.columns), ""]
    parts += [facts(found), "<!-- end -->"]
    return "\n".join(parts)


def main() -> None:
    """Fill the markers of the pages named on the command line (default: all)."""
    every = [*sorted(HERE.glob("*.md")), HERE.parent / "README.md"]
    for page in [Path(argument) for argument in sys.argv[1:]] or every:
        text = page.read_text(encoding="utf-8")
        page.write_text(MARKER.sub(section, text), encoding="utf-8")


if __name__ == "__main__":
    main()
