"""A made-up experiment on disk, as a run leaves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.evaluation.selection import selected_rounds
from fedshift.json_objects import write_object

Write = Callable[..., Path]


@pytest.fixture
def write_part(tmp_path: Path, writer: Callable[[Path], Write]) -> Write:
    """Write one part whose target accuracy in the rounds is ``accuracies``; give back its folder."""
    return writer(tmp_path)


@pytest.fixture(scope="session")
def writer() -> Callable[[Path], Write]:
    """`write_part` for any folder."""
    return writer_into


def writer_into(root: Path) -> Write:
    def write(
        method: str,
        target: str,
        seed: int,
        *accuracies: float,
        experiment: str = "exp",
        held_out: bool = True,
        weights: Sequence[dict[str, float]] = (),
        **changes: object,
    ) -> Path:
        folder = root / "runs" / experiment / method / target / f"seed-{seed}"
        folder.mkdir(parents=True)
        rounds = [
            RoundRecord(
                round=number,
                target_accuracy={target: accuracy},
                source_accuracy={"s": 90.0 - number} if held_out else {},
                per_class=[accuracy, None],
                seconds=1.0,
                mini_batches=10 * number,
                bytes={"up": {"weights": 1_000_000}, "down": {"weights": 1_000_000}},
                aggregation_weights=weights[number - 1] if weights else {},
            )
            for number, accuracy in enumerate(accuracies, 1)
        ]
        (folder / "rounds.jsonl").write_text("".join(record.model_dump_json() + "\n" for record in rounds))
        result = RunResult(
            method=method,
            target=target,
            seed=seed,
            selected=selected_rounds(rounds),
            classes=["cat", "<dog>"],
            rounds=len(rounds),
            seconds=2.0,
            mini_batches=20,
            bytes_up={"weights": 2_000_000},
            bytes_down={"weights": 2_000_000},
            versions={"torch": "2.4"},
            threads=1,
            device="cpu",
            options={"protocol": {"kind": "leave_one_out"}},
            data={"name": "made up"},
        ).model_copy(update=changes)
        (folder / "result.json").write_text(result.model_dump_json())
        return folder

    return write


@pytest.fixture
def experiment(tmp_path: Path, write_part: Write) -> Path:
    """Two methods, two targets, two seeds; `csac` lacks target M5 with seed 1, which has begun."""
    values = {"fedavg": {"M15": (80, 82), "M5": (70, 74)}, "csac": {"M15": (84, 86), "M5": (75, 0)}}
    for method, by_target in values.items():
        for target, by_seed in by_target.items():
            for seed, accuracy in enumerate(by_seed):
                write_part(method, target, seed, accuracy + 1.5, accuracy)
    folder = tmp_path / "runs" / "exp"
    (folder / "csac" / "M5" / "seed-1" / "result.json").unlink()
    plan = {"methods": ["fedavg", "csac", "never-begun"], "targets": ["M15", "M5"], "seeds": [0, 1]}
    write_object(folder / "order.json", plan)
    return folder
