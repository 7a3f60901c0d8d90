"""The part ``allocator`` of `bench.py`: a mini-batch of FedAvg with and without memory that is kept.

``python benchmarks/bench_allocator.py CASE kept|plain STEPS`` is one measurement, in a process of its own.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

CASES: Mapping[str, tuple[tuple[int, ...], dict[str, Any], int, int]] = {
    # name: shape of a sample, model, batch size, mini-batches
    "mlp of 1280 features": ((1280,), {"name": "mlp", "hidden": [64, 32]}, 32, 800),
    "mnist_cnn, 28 px": ((1, 28, 28), {"name": "mnist_cnn"}, 64, 100),
    "resnet18, 32 px": ((3, 32, 32), {"name": "resnet18", "bottleneck": 256}, 32, 20),
    "mobilenet_v2, 64 px": ((3, 64, 64), {"name": "mobilenet_v2"}, 32, 6),
}
_OWN = ("MALLOC_", "GLIBC_TUNABLES")

Row = dict[str, Any]


def allocator(quick: bool) -> list[Row]:
    """Processor milliseconds and new pages of a mini-batch, and the largest memory, each way in turn."""
    rows = []
    for case, (*_, steps) in CASES.items():
        runs_of_way: dict[str, list[Row]] = {"plain": [], "kept": []}
        for _ in range(1 if quick else 5):
            for way, done in runs_of_way.items():
                done.append(_run_case(case, way, max(1, steps // 4) if quick else steps))
        pairs = list(zip(runs_of_way["kept"], runs_of_way["plain"], strict=True))
        row: Row = {"case": case, "ratio_of_processor_seconds": statistics.median(_ratio(*pair) for pair in pairs)}
        for key in ("milliseconds", "new_pages", "peak_bytes"):
            row[key] = {way: statistics.median(run[key] for run in done) for way, done in runs_of_way.items()}
        rows.append(row)
    return rows


def _ratio(kept: Row, plain: Row) -> float:
    return float(kept["milliseconds"] / plain["milliseconds"])


def _run_case(case: str, way: str, steps: int) -> Row:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    command = [sys.executable, __file__, case, way, str(steps)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{case} could not be measured:\n{done.stderr}")
    row: Row = json.loads(done.stdout)
    return row


def _measure(case: str, way: str, steps: int) -> Row:
    import torch

    from bench_common import ENDLESS, Synthetic, Work
    from fedshift.federation.local.allocator import keep_freed_memory
    from fedshift.federation.site import Envelope
    from fedshift.federation.site_runner import SiteRunner

    shape, model, batch, _ = CASES[case]
    torch.set_num_threads(1)
    if way == "kept" and not keep_freed_memory():
        sys.exit("this system's C library keeps no memory")
    data, training = Synthetic(shape=shape, samples=8 * batch, sites=2), {"batch_size": batch}
    work = Work({"name": "fedavg", "local_epochs": 1}, data, model, training)
    runner, weights = SiteRunner(work.plans[0], work.setting), work.start()

    def epochs(number: int) -> int:
        trained = 0
        for _ in range(number):
            content = {"weights": weights}
            trained += runner.run("fit", Envelope(1, 1, 0.3, ENDLESS), content)[1]
        return trained

    epochs(1)
    pages, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
    trained = epochs(-(-steps // 8))
    used, after = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "milliseconds": 1000 * used / trained,
        "new_pages": (after.ru_minflt - pages) / trained,
        "peak_bytes": after.ru_maxrss << 10,
    }


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
