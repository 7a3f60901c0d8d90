"""``make bench``: ratios measured in one run, so that they hold on any machine. Absolute numbers are only a by-product.

    python benchmarks/bench.py [--quick] [--only engine,workers,sites,csac,elcfs,pooled,kd3a,mdfnet,allocator,vote,
                               memory] [--device cpu] [--output FILE]

engine   FedAvg of fedshift against a bare PyTorch loop over the same batches, one thread
workers  two workers, two threads, or two runs at once, against one worker of one thread
sites    sites of one small network side by side against one after the other, one thread
csac     seconds of a local mini-batch of CSAC against FedAvg
elcfs    the same of ELCFS, per image that goes forward and backward
pooled   seconds of a mini-batch of each pooled method against DeepAll, and against its own arithmetic
kd3a     seconds of an epoch of KD3A on Amazon Review against a bare loop
mdfnet   seconds of 100 rounds of MDFNet on the cached features of 5,000 images, two workers
allocator  a mini-batch of FedAvg with memory that was freed kept for the next one, and without
vote     memory and seconds of KD3A's vote and focus over 10 sources, 100,000 samples and 345 classes
memory   the server's memory while it aggregates 10, 100 and 1,000 models of 45 MB

Whatever is compared runs in turn (A B A B …), and ratios are medians over the turns. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedshift.federation.local.allocator import keep_freed_memory

PARTS = ("engine", "workers", "sites", "csac", "elcfs", "pooled", "kd3a", "mdfnet", "allocator", "vote", "memory")
AIMS = {
    "engine": "at least 0.95 of the bare loop",
    "workers": "two workers at least 1.7 times one",
    "sites": "at least 1.5 times one after the other",
    "csac": "at most 1.35 (published: 1.14)",
    "elcfs": "at most 1.2 (published whole runs: 2.9 times FedAvg)",
    "pooled": "at most 1.15 times its arithmetic",
    "kd3a": "an epoch of Amazon Review in at most 4 s (released code: 10 s on two cores)",
    "mdfnet": "100 rounds in under a minute on two cores",
    "allocator": "fewer seconds for about as much memory",
    "vote": "under 1 GiB; Shapley values of 10 sources in one pass over the predictions",
    "memory": "flat, under 1 GiB",
}
RESULTS = Path(__file__).parent / "results"
_MODEL_BYTES = 45_000_000

Row = dict[str, Any]


def main() -> None:
    options = _options()
    # Before torch is imported: its threads are counted then. Every part sets the number that it wants.
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console() if sys.stdout.isatty() else Console(width=120)
    began = time.perf_counter()
    load = os.getloadavg()[0]
    if load > 0.5:
        console.print(f"[yellow]This machine is busy (load {load:.1f}): ratios of wall-clock seconds are uncertain.[/]")
    parts: dict[str, list[Row]] = {}
    for part in options.only:
        with console.status(f"measuring: {part}"):
            parts[part] = _measure(part, options.quick, options.device)
        console.print(_table(part, parts[part]))
        for line in _remarks(part, parts[part]):
            console.print(line)
    report = {
        "command": " ".join(["python benchmarks/bench.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - began, 1),
        "machine": _machine(load),
        "versions": _versions(),
        "aims": {part: AIMS[part] for part in parts},
        "parts": parts,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(_round_numbers(report), indent=2) + "\n", encoding="utf-8")
    console.print(f"{report['seconds']} s; written to {os.path.relpath(options.output)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns, no 1,000 sites")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure, separated by commas")
    parser.add_argument("--device", default="cpu", help="device of the parts engine, csac, elcfs and pooled")
    parser.add_argument("--output", type=Path, help="result file; without it results/bench.json for a complete run")
    options = parser.parse_args()
    options.only = [part.strip() for part in options.only.split(",")]
    unknown = [part for part in options.only if part not in PARTS]
    if unknown:
        parser.error(f"--only: there is no part '{unknown[0]}'; known: {', '.join(PARTS)}")
    complete = not options.quick and set(options.only) == set(PARTS) and options.device == "cpu"
    options.output = options.output or RESULTS / ("bench.json" if complete else "bench_partial.json")
    return options


def _measure(part: str, quick: bool, device: str) -> list[Row]:
    if part == "memory":
        return _memory(quick)
    if part == "vote":
        return [_memory_row(name, 10) for name in ("vote", "vote_leave_one_out", "vote_shapley")]
    import bench_allocator
    import bench_pooled
    import bench_sites
    import bench_steps
    import bench_training

    if part == "allocator":
        return bench_allocator.allocator(quick)
    keep_freed_memory()  # as every run does
    if part == "pooled":
        return bench_pooled.measure_pooled(quick, device)
    if part == "workers":
        return bench_training.workers(quick)
    if part == "sites":
        return bench_sites.sites(quick)
    if part == "kd3a":
        return bench_training.kd3a(quick)
    if part == "mdfnet":
        return bench_training.mdfnet(quick)
    measured = {"engine": bench_training.engine, "csac": bench_steps.csac, "elcfs": bench_steps.elcfs}
    return measured[part](quick, device)


def _memory(quick: bool) -> list[Row]:
    """Every row in a fresh process, two at a time: one's memory is not the other's."""
    sizes = (10, 100) if quick else (10, 100, 1000)
    # The long ones first, so that the short ones fill the other place.
    tasks = [(part, sites) for sites in reversed(sizes) for part in ("csac_passes", "fedavg")]
    free = shutil.disk_usage(tempfile.gettempdir()).free
    for sites in (10,) if quick else (100, 10):
        if sites * _MODEL_BYTES * 1.2 < free:
            tasks.append(("csac_kept", sites))
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        rows = list(pool.map(lambda task: _memory_row(*task), tasks))
    return sorted(rows, key=lambda row: (row["part"] != "fedavg", row["part"], row["sites"]))


def _memory_row(part: str, sites: int) -> Row:
    script = Path(__file__).with_name("bench_memory.py")
    done = subprocess.run([sys.executable, str(script), part, str(sites)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"memory of {part} with {sites} of them could not be measured:\n{done.stderr}")
    row: Row = json.loads(done.stdout)
    return row


# Output ----------------------------------------------------------------------------------------------------

_CSAC_MEMORY = {
    "fedavg": "FedAvg, one pass",
    "csac_kept": "CSAC, replies kept (256 MiB, then files)",
    "csac_passes": "CSAC, three passes, models made anew",
}


@dataclass(frozen=True)
class _Layout:
    """How a part is printed: headings, the cells of a row, and what is said below."""

    headings: Sequence[str]
    cells: Callable[[Row], Sequence[str]]
    caption: str = ""


def _engine_cells(row: Row) -> Sequence[str]:
    return (
        row["data"],
        row["bare_loop"],
        f"{row['fedshift_images_per_second']:,.0f}",
        f"{row['bare_images_per_second']:,.0f}",
        f"{row['ratio']:.3f}",
        f"{row['ratio_of_processor_seconds']:.3f}",
        f"{row['difference_of_weights_after_a_round']:.0e}",
    )


def _workers_cells(row: Row) -> Sequence[str]:
    return (
        row["model"],
        f"{row['mini_batches_per_second_one_worker']:,.0f}",
        *(f"{row[key]:.2f}" for key in ("two_workers", "two_threads", "two_runs")),
        row["winner_of_one_run"],
    )


def _sites_cells(row: Row) -> Sequence[str]:
    return (
        row["case"],
        str(row["sites"]),
        *(f"{value:.3f}" for value in row["processor_milliseconds_per_mini_batch"].values()),
        f"{row['ratio']:.2f}",
        f"{row['ratio_of_processor_seconds']:.2f}",
        f"{row['difference_of_weights_after_a_round']:.0e}",
    )


def _kd3a_cells(row: Row) -> Sequence[str]:
    return (
        row["data"],
        str(row["mini_batches"]),
        f"{row['fedshift_seconds_per_epoch']:.2f}",
        f"{row['bare_seconds_per_epoch']:.2f}",
        f"{row['ratio']:.3f}",
        f"{row['ratio_of_processor_seconds']:.3f}",
        f"{row['difference_of_weights_after_a_round']:.0e}",
    )


def _csac_cells(row: Row) -> Sequence[str]:
    per_batch = row["milliseconds_per_mini_batch"]
    return (
        row["case"],
        *(f"{per_batch[key]:.2f}" for key in ("fedavg", "acquisition", "calibration")),
        f"{row['calibration_ratio']:.2f}",
        f"{row['calibration_ratio_of_processor_seconds']:.2f}",
        f"{row['calibration_ratio_of_multiply_accumulates']:.2f}",
        f"{row['whole_run_ratio']:.2f}",
    )


def _elcfs_cells(row: Row) -> Sequence[str]:
    per_batch = row["milliseconds_per_mini_batch"]
    return (
        row["case"],
        *(f"{per_batch[key]:.2f}" for key in ("fedavg", "elcfs")),
        str(row["passes_per_image"]),
        f"{row['ratio_per_image_gone_through']:.2f}",
        f"{row['ratio_of_processor_seconds']:.2f}",
    )


def _pooled_cells(row: Row) -> Sequence[str]:
    keys = ("ratio", "ratio_of_processor_seconds", "passes", "operations", "beside_its_arithmetic")
    milliseconds = f"{row['milliseconds_per_mini_batch']:.1f}"
    return f"{row['method']}, {row['case']}", milliseconds, *(f"{row[name]:.2f}" for name in keys)


def _allocator_cells(row: Row) -> Sequence[str]:
    ways = [row[key].values() for key in ("milliseconds", "new_pages", "peak_bytes")]
    milliseconds, pages = ("  ".join(f"{value:,.1f}" for value in values) for values in ways[:2])
    peaks = "  ".join(f"{value / 2**20:,.0f}" for value in ways[2])
    return row["case"], milliseconds, f"{row['ratio_of_processor_seconds']:.2f}", pages, peaks


def _mdfnet_cells(row: Row) -> Sequence[str]:
    counts = (f"{row[key]:,}" for key in ("images", "mini_batches"))
    return str(row["features"]), row["matrix_products"], *counts, f"{row['seconds_per_100_rounds']:.1f}"


def _vote_cells(row: Row) -> Sequence[str]:
    sizes = (f"{row[key] / 2**20:,.0f}" for key in ("growth_bytes", "peak_bytes", "predictions_bytes"))
    return row["part"], f"{row['seconds']:.1f}", *sizes


def _memory_cells(row: Row) -> Sequence[str]:
    return (
        _CSAC_MEMORY[row["part"]],
        f"{row['sites']:,}",
        f"{row['growth_bytes'] / 2**20:,.0f}",
        f"{row['peak_bytes'] / 2**20:,.0f}",
        f"{1000 * row['seconds'] / row['sites']:,.0f}",
    )


_LAYOUTS = {
    "engine": _Layout(
        ("data", "bare loop", "fedshift img/s", "bare img/s", "ratio", "of CPU time", "difference"), _engine_cells
    ),
    "workers": _Layout(
        ("model", "batches/s", "2 workers", "2 threads", "2 runs at once", "wins in one run"), _workers_cells
    ),
    "sites": _Layout(
        ("ms of the processor", "sites", "one by one", "side by side", "ratio", "of CPU time", "difference"),
        _sites_cells,
    ),
    "kd3a": _Layout(
        ("one epoch", "mini-batches", "fedshift s", "bare s", "ratio", "of CPU time", "difference"), _kd3a_cells
    ),
    "csac": _Layout(
        ("ms per mini-batch", "FedAvg", "acquire", "calibrate", "ratio", "of CPU time", "arithmetic", "whole run"),
        _csac_cells,
        "whole run: 30 + 40×5 epochs; arithmetic: multiply-accumulates of layers, without MMD",
    ),
    "elcfs": _Layout(
        ("ms per mini-batch", "FedAvg", "ELCFS", "passes", "ratio per pass", "of CPU time"),
        _elcfs_cells,
        "a mini-batch and its copy are two passes an image, with the boundary term three",
    ),
    "pooled": _Layout(
        ("mini-batch of", "ms", "ratio", "of CPU time", "passes", "operations", "beside its arithmetic"),
        _pooled_cells,
        "passes: by the equations, heads left out; operations: counted; in those of DeepAll",
    ),
    "allocator": _Layout(
        ("FedAvg's mini-batch", "CPU ms", "ratio", "new pages", "peak MiB"),
        _allocator_cells,
        "each cell: as the C library does it, then with freed memory kept",
    ),
    "mdfnet": _Layout(
        ("features of an image", "matrix products", "images", "mini-batches", "seconds of 100 rounds"), _mdfnet_cells
    ),
    "vote": _Layout(
        ("10 sources × 100,000 × 345", "seconds", "growth MiB", "with libraries", "predictions MiB"), _vote_cells
    ),
    "memory": _Layout(("aggregation", "sites", "growth MiB", "with libraries", "ms per site"), _memory_cells),
}


def _table(part: str, rows: list[Row]) -> Table:
    layout = _LAYOUTS[part]
    table = Table(title=f"{part}: {AIMS[part]}", title_justify="left", caption=layout.caption or None)
    first, *others = layout.headings
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right")
    for row in rows:
        table.add_row(*layout.cells(row))
    return table


def _remarks(part: str, rows: list[Row]) -> list[str]:
    if part == "workers":
        wins = [row["model"] for row in rows if row["two_runs"] > max(row["two_workers"], row["two_threads"])]
        where = f"fastest for {'; '.join(wins)}" if wins else "not faster than one divided run here"
        return [
            f"Two runs at once (engine.parallel_runs: 2): {where}.",
            "They never wait for each other, whatever the sizes of the sites; workers are for when one run is left.",
        ]
    if part == "memory" and not any(row["part"] == "csac_kept" and row["sites"] == 1000 for row in rows):
        return ["Kept replies are 45 MB of disk a site, 45 GB for 1,000: there the models are made anew instead."]
    return []


def _machine(load: float) -> Row:
    """The processor and what else it was doing."""
    name = platform.processor() or platform.machine()
    file = Path("/proc/cpuinfo")
    if file.exists():
        lines = (line.partition(":") for line in file.read_text().splitlines())
        name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), name)
    import torch

    machine: Row = {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": "1 unless a row says two",
        "load_at_start": round(load, 2),
        "system": platform.system(),
    }
    if torch.cuda.is_available():
        machine["accelerator"] = torch.cuda.get_device_name()
    return machine


def _versions() -> dict[str, str]:
    from fedshift.experiment.environment import versions

    return versions()


def _round_numbers(value: Any) -> Any:
    """Four significant digits: more would be noise."""
    if isinstance(value, dict):
        return {key: _round_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round_numbers(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
