"""Lines that a user writes for a comparison, and processor seconds of FedAvg: ``python benchmarks/peers_cost.py``.

Lines are counted in the committed experiment files. Seconds of others are in ``peers/seconds.csv``. Ours are measured
now, each work twice, after the imports, and written to ``peers/seconds_fedshift.csv``. Whoever has a peer installed
runs it beside ours, in turns: ``python benchmarks/peers_cost.py heart --beside "python fed_benchmark.py …"``.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import resource
import shlex
import subprocess  # nosec B404
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import fedshift
from fedshift.data.locate import load_npz, require
from peers import HERE, PEERS, write_angles, write_clients

PAGE = HERE / "peers.md"
_MARK, _END = "<!-- peers_cost -->\n", "<!-- end -->"
Writer = Callable[[Path], dict[str, str]]
FLAMBY = "Make peers/flamby_heart.npz of FLamby's rows: x, x_pooled, y, site, site_names and train"


def write_heart(folder: Path) -> dict[str, str]:
    """The four centres of FLamby's heart disease, and its pooled test set."""
    arrays = load_npz(require("FLamby's heart disease", ["peers/flamby_heart.npz"], FLAMBY))
    train, paths = arrays["train"].astype(bool), {}
    for number, name in enumerate(arrays["site_names"]):
        rows = arrays["site"] == number
        paths[str(name)] = str(folder / f"heart_{name}.npz")
        split = np.where(train[rows], "train", "test")
        np.savez(paths[str(name)], x=arrays["x"][rows], y=arrays["y"][rows], split=split)
    paths["pooled"] = str(folder / "heart_pooled.npz")
    np.savez(paths["pooled"], x=arrays["x_pooled"][~train], y=arrays["y"][~train])
    return paths


WORKS: dict[str, tuple[str, Writer]] = {
    "heart": ("peers_heart.yaml", write_heart),
    "clients": ("peers_clients.yaml", write_clients),
}
"""Of which seconds are measured: FedAvg with one seed."""
OTHERS_LINES = {
    "peers_heart.yaml": "FLamby: 48 lines of JSON, its config_heart_disease.json",
    "peers_tcga.yaml": "FLamby: 52 lines of JSON, its config_tcga_brca.json",
    "peers_domainbed.yaml": "DomainBed: a command, and edits of its code for this reduced setting, not counted",
    "peers_clients.yaml": "PFLlib: a command for each method and seed, and files in its format, not counted",
}
WRITERS: dict[str, Writer] = {"peers_domainbed.yaml": write_angles, "peers_clients.yaml": write_clients}


def lines_of(text: str, comment: str = "#") -> int:
    """Lines that are neither empty nor a comment."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith(comment))


def lines_table() -> list[str]:
    """Lines of each committed comparison, in Markdown."""
    rows = [
        "| comparison | methods | lines of YAML | Python that makes its files | the peer |",
        "|---|---:|---:|---:|---|",
    ]
    for file, others in OTHERS_LINES.items():
        text = (HERE / "experiments" / file).read_text(encoding="utf-8")
        methods = len(yaml.safe_load(text)["methods"])
        writer = WRITERS.get(file, write_heart)
        rows.append(f"| [{file}](experiments/{file}) | {methods} | {lines_of(text)} | {_body(writer)} | {others} |")
    return rows


def _body(function: Callable[..., Any]) -> int:
    """Lines of a function below its docstring."""
    source = inspect.getsource(function)
    return lines_of(source.partition('"""')[2].partition('"""')[2])


def our_seconds(work: str, folder: Path, **engine: Any) -> float:
    """Processor seconds of FedAvg with one seed, after the imports; data are read, and results written."""
    file, write = WORKS[work]
    experiment = yaml.safe_load((HERE / "experiments" / file).read_text(encoding="utf-8"))
    experiment["data"]["sites"] = write(folder)
    experiment["methods"] = [method for method in experiment["methods"] if method["name"] == "fedavg"][:1]
    experiment["protocol"]["seeds"] = experiment["protocol"]["seeds"][:1]
    experiment["engine"] = {"name": "local", "workers": 1, "threads": 1, **engine}
    experiment["device"] = "cpu"
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        begin = time.process_time()
        fedshift.run(experiment, runs)
        return time.process_time() - begin


def seconds_beside(command: str) -> float:
    """Processor seconds of a command of the user's own, its imports included."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(shlex.split(command), check=True)  # nosec B603
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


def measure(works: Sequence[str], folder: Path, beside: str | None) -> list[dict[str, str]]:
    """Rows of seconds: ours, ours side by side, and the user's command, twice and in turns."""
    rows = []
    for work in works:
        ways: dict[str, Callable[[], float]] = {
            "fedshift": lambda work=work: our_seconds(work, folder),  # type: ignore[misc]
            "fedshift, side_by_side": lambda work=work: our_seconds(work, folder, sites="side_by_side"),  # type: ignore[misc]
        }
        if beside is not None:
            ways[beside] = lambda: seconds_beside(beside)
        for measured in ways.values():
            measured()  # once before, since the first one also loads libraries
        turns = [{tool: measured() for tool, measured in ways.items()} for _ in range(2)]
        rows += [
            {"work": work, "tool": tool, "first": f"{turns[0][tool]:.2f}", "second": f"{turns[1][tool]:.2f}"}
            for tool in ways
        ]
    return rows


def seconds_table() -> list[str]:
    """Committed seconds, in Markdown: others', then ours."""
    rows = ["| FedAvg, one seed | tool | processor seconds, twice |", "|---|---|---:|"]
    for name in ("seconds.csv", "seconds_fedshift.csv"):
        with (PEERS / name).open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                what = f" ({row['measured']})" if row.get("measured") else ""
                rows.append(f"| {row['work']} | {row['tool']}{what} | {row['first']}, {row['second'] or '–'} |")
    return [*rows[:2], *sorted(rows[2:], key=lambda row: row.split("|")[1], reverse=True)]


def fill_page() -> str:
    """The page with the seconds between its marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_MARK)
    _, _, after = rest.partition(_END)
    return "\n".join([before + _MARK.rstrip(), "", *seconds_table(), ""]) + "\n" + _END + after


def main(works: Sequence[str], beside: str | None) -> None:
    """Measure; write and print, or only print where the user's own command is beside."""
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(works, Path(folder), beside)
    for row in rows:
        print(f"{row['work']}: {row['tool']}: {row['first']} and {row['second']} s")
    if beside is None and len(works) == len(WORKS):
        with (PEERS / "seconds_fedshift.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        PAGE.write_text(fill_page(), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"{' or '.join(WORKS)}; all by default")
    parser.add_argument("--beside", metavar="COMMAND", help="a command whose processor seconds are measured in turns")
    parser.add_argument("--lines", action="store_true", help="only print the lines of each committed comparison")
    chosen = parser.parse_args()
    if chosen.lines:
        print(*lines_table(), sep="\n")
        parser.exit()
    if unknown := set(chosen.works) - set(WORKS):
        parser.error(f"there is no {', '.join(unknown)}: choose among {', '.join(WORKS)}")
    main(chosen.works or list(WORKS), chosen.beside)
