"""A hundred thousand broken replies over all methods: ``python tests/fuzz/run.py`` writes report.json.

``python tests/fuzz/run.py METHOD …`` adds methods that are new.

Every reply is read and checked as a coordinator does it. Those that are taken for honest ones, and a few of the others,
are met by a whole run. It must go on without the hostile site, blame no other, and send honest sites nothing that looks
otherwise than in a run without it (`replay.use`). Time is that of reading and checking one reply; memory is the most
that the process ever held, less what it held when every method had been tried.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "federation"), str(Path(__file__).parent)]

import torch  # noqa: E402
from broken_replies import broken  # noqa: E402
from replay import METHODS, Attack, recorded  # noqa: E402

FILE = Path(__file__).with_name("report.json")
REPLIES, EACH, SEED, STEP = 100_000, 6_250, 18, 500
WARM_UP = 300
"""Replies of each method before memory is measured: what is imported or cached then is not what replies take."""


def read_report() -> dict[str, Any]:
    """The committed report."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def megabytes() -> float:
    """The most memory that this process has ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tried(names: Sequence[str]) -> dict[str, Any]:
    """Try these methods; what the report says of them."""
    attacks = {name: Attack(recorded(name), broken, random.Random(f"{SEED} {name}")) for name in names}
    wrong: list[str] = []

    def attempt(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}"[:300])
            print(wrong[-1], flush=True)

    for name, attack in attacks.items():
        for _ in range(WARM_UP):
            attempt(name, attack.one)
    before, done = megabytes(), WARM_UP
    while done < EACH:
        part = min(STEP, EACH - done)
        for name, attack in attacks.items():
            for _ in range(part):
                attempt(name, attack.one)
            attempt(name, attack.end)
        done += part
        longest = max(attack.longest for attack in attacks.values())
        print(f"{done} of {EACH} for each method, {megabytes() - before:.1f} MB, {longest:.3f} s", flush=True)
    return {
        "seed": SEED,
        "replies": done * len(names),
        "taken_for_honest_and_used": sum(attack.taken for attack in attacks.values()),
        "methods": {name: {"replies": done, "taken": attack.taken} for name, attack in attacks.items()},
        "errors_that_are_not_declared": len(wrong),
        "examples": wrong[:20],
        "megabytes_grown": round(megabytes() - before, 1),
        "megabytes_before": round(before, 1),
        "longest_seconds": round(longest, 3),
        "torch": torch.__version__,
    }


def main(names: Sequence[str]) -> None:
    """Write the report of all methods, or add these to it: counts add up, and the worst of each measure stays."""
    torch.set_num_threads(1)
    report = tried(names or METHODS)
    if names:
        before = read_report()
        assert not set(names) & set(before["methods"]), "a method that is in the report is tried again with all others"
        for key in ("replies", "taken_for_honest_and_used", "errors_that_are_not_declared", "examples"):
            report[key] = before[key] + report[key]
        for key in ("megabytes_grown", "megabytes_before", "longest_seconds"):
            report[key] = max(before[key], report[key])
        report["methods"] = before["methods"] | report["methods"]
    FILE.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
