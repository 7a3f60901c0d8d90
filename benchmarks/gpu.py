"""What only a graphics card can show: bits within a card, the engine beside a bare loop, memory, methods, PACS.

    benchmarks/gpu.sh                                            25 minutes on one card
    benchmarks/gpu.sh python --small --device cpu --output x.json     every part with tiny numbers, to see that it runs

Writes ``results/gpu_<card>.json`` after each part. A part that fails leaves its error there, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench_common import Rounds, Row, Seconds, Synthetic, Work, median, median_ratio, time_block, time_in_turn
from bench_training import BareFedAvg
from fedshift import run
from fedshift.data.locate import find
from fedshift.errors import UserError
from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.experiment.config.experiment import load
from fedshift.experiment.environment import threads_set, versions
from fedshift.experiment.plan import Run
from fedshift.experiment.runs.context import Callback
from fedshift.federation.local.cards import resolve_device

HERE = Path(__file__).parent
FEDAVG: dict[str, Any] = {"name": "fedavg", "local_epochs": 1}
PACS = "pacs_images_128.zip"


@dataclass(frozen=True)
class Size:
    """How much is measured; ``deadline``: when PACS must end, in seconds of `time.monotonic`."""

    device: str
    small: bool
    deadline: float

    @property
    def pixels(self) -> int:
        """Height and width of the images."""
        return 32 if self.small else 224

    @property
    def data(self) -> Synthetic:
        """Made-up images, which cost as much as others."""
        few = {"samples": 12, "sites": 2} if self.small else {"samples": 512, "sites": 4}
        return Synthetic(shape=(3, self.pixels, self.pixels), **few)

    @property
    def networks(self) -> dict[str, dict[str, Any]]:
        """By the names of the rows."""
        vit = {"name": "timm:vit_small_patch16_224"}
        tiny = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2}
        resnets = {name: {"name": name} for name in (("resnet18",) if self.small else ("resnet18", "resnet50"))}
        if importlib.util.find_spec("timm") is None:  # of the extra `networks`
            return resnets
        return {**resnets, "vit_small": {**vit, **(tiny if self.small else {})}}

    def work(self, model: Mapping[str, Any], method: Mapping[str, Any] = FEDAVG, **more: Any) -> Work:
        """One method as `fedshift run` sets it up; ``more``: fields of its training section, and ``protocol``."""
        protocol = more.pop("protocol", None)
        training = {"batch_size": 8 if self.small else 64, "lr": 0.01, "momentum": 0.9, **more}
        return Work(method, self.data, model, training, self.device, protocol)


def bits(size: Size) -> list[Row]:
    """Whether two runs on one card have the same bits after some rounds."""
    rows = []
    for name, model in size.networks.items():
        for precision in ("float32", "bf16"):
            first, second = Rounds(size.work(model, precision=precision)), Rounds(size.work(model, precision=precision))
            for runs in (first, second):
                runs(1 if size.small else 2)
            rows.append({"network": name, "precision": precision, "equal": first.state.weights == second.state.weights})
    return rows


def engine(size: Size) -> list[Row]:
    """FedAvg's rounds beside a loop of plain torch on the same mini-batches: images per second, ratio, memory."""
    rows = []
    for name, model in size.networks.items():
        for precision in ("float32", "bf16"):
            work = size.work(model, precision=precision)
            blocks: dict[str, Callable[[int], None]] = {
                "fedshift": Rounds(work),
                "bare": BareFedAvg(work, torch.channels_last),
            }
            memory = {block: _memory(block_of, size.device) for block, block_of in blocks.items()}
            seconds = time_in_turn(blocks, 0.1 if size.small else 5.0, 1 if size.small else 5, size.device)
            images = sum(len(rows) for plan in work.plans for _, rows, _ in plan.parts)
            rows.append(
                {
                    "network": name,
                    "precision": precision,
                    "pixels": size.pixels,
                    "fedshift_images_per_second": images / median(seconds["fedshift"]),
                    "bare_images_per_second": images / median(seconds["bare"]),
                    "ratio": median_ratio(seconds["bare"], seconds["fedshift"]),
                    "memory": memory,
                }
            )
            _free(blocks)
    return rows


def measure_compiled(size: Size) -> list[Row]:
    """A round with torch's compiler beside one without, in bf16, and the seconds until the first one is done."""
    if size.small:
        return []  # to compile takes minutes on a processor
    rows = []
    for name in sorted({"resnet18", "vit_small"} & set(size.networks)):
        blocks: dict[str, Callable[[int], None]] = {}
        for kind in ("plain", "compiled"):
            work = size.work(size.networks[name], precision="bf16", compile=kind == "compiled")
            blocks[kind] = Rounds(work)
        first = time_block(blocks["compiled"], 1, size.device)[0]
        blocks["plain"](1)
        seconds = time_in_turn(blocks, 5.0, 5, size.device)
        rows.append(
            {
                "network": name,
                "speed_up": median_ratio(seconds["plain"], seconds["compiled"]),
                "first_round_seconds": first,
            }
        )
        _free(blocks)
    return rows


def methods(size: Size) -> list[Row]:
    """Seconds of a mini-batch of CSAC and KD3A beside FedAvg's."""
    adapt = {"kind": "adapt_to_one", "seeds": [0], "test_fraction": 0.2}
    asked: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
        "fedavg": (FEDAVG, None),
        "csac": ({"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}, None),
        "kd3a": ({"name": "kd3a"}, adapt),
    }
    memory_of: dict[str, float] = {}
    memory: dict[str, int | None] = {}
    for name, (method, protocol) in asked.items():
        gc.collect()
        rounds = Rounds(size.work(size.networks["resnet18"], method, protocol=protocol))
        memory[name] = _memory(rounds, size.device)
        turns: list[Seconds] = []
        for _ in range(1 if size.small else 3):
            before = rounds.mini_batches
            seconds = time_block(rounds, 1, size.device)
            turns.append((seconds[0] / (rounds.mini_batches - before), 0.0))
        memory_of[name] = median(turns)
    return [
        {
            "method": name,
            "network": "resnet18",
            "seconds_of_a_mini_batch": seconds,
            "beside_fedavg": seconds / memory_of["fedavg"],
            "memory": memory[name],
        }
        for name, seconds in memory_of.items()
    ]


def pacs(size: Size) -> list[Row]:
    """PACS's images, fine-tuned, each domain in turn left out; no row without the images."""
    if find([PACS]) is None:
        return [{"left_out": f"{PACS} is not in FEDSHIFT_DATA"}]
    few = ["data.samples_per_domain=12", "training.rounds=1", "protocol.targets=[photo]"]
    whole = ["data.samples_per_domain=null", "model.trained_from=null", "training.rounds=10"]
    experiment = load(
        HERE / "experiments" / "pacs_images.yaml",
        [
            *(few if size.small else whole),
            "protocol.seeds=[0]",
            "methods=[{name: fedavg, local_epochs: 1}]"
            if size.small
            else "methods=[{name: deepall}, {name: fedavg, local_epochs: 1}, {name: csac, setting: practical}]",
            f"device={size.device}",
            f"training.precision={'float32' if size.small else 'bf16'}",
            "training.loader_workers=4",
        ],
    )

    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(TimeoutError):
            run(experiment, Path(folder), callbacks=[_Ends(size.deadline)])
        results = [RunResult.model_validate_json(file.read_bytes()) for file in Path(folder).rglob("result.json")]
    return [
        {"method": result.method, "target": result.target, "accuracy": result.accuracy(), "seconds": result.seconds}
        for result in sorted(results, key=lambda result: (result.method, result.target))
    ]


class _Ends(Callback):
    """Ends the runs when no time is left; those that are finished count."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def after_round(self, run: Run, record: RoundRecord, folder: Path) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError("no time is left")


PARTS: Mapping[str, Callable[[Size], list[Row]]] = {
    "bits": bits,
    "engine": engine,
    "methods": methods,
    "compiled": measure_compiled,
    "pacs": pacs,
}


def main() -> None:
    options = _options()
    try:
        device = resolve_device(options.device)
    except UserError as error:
        sys.exit(f"error: {error}")
    card = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    name = re.sub(r"\W+", "_", card.lower()).strip("_")
    output = options.output or (None if options.small else HERE / "results" / f"gpu_{name}.json")
    seconds = float(os.environ.get("FEDSHIFT_GPU_SECONDS", "1500"))
    size = Size(device, options.small, time.monotonic() + 0.9 * seconds)
    results: dict[str, Any] = {"card": card, "small": options.small, "versions": versions(), "parts": {}, "seconds": {}}
    for part in options.only:
        begun = time.monotonic()
        try:
            with threads_set(1):
                results["parts"][part] = PARTS[part](size)
        except Exception as error:
            results["parts"][part] = [{"error": f"{type(error).__name__}: {error}".partition("\n")[0]}]
        results["seconds"][part] = round(time.monotonic() - begun, 1)
        print(json.dumps({part: results["parts"][part]}, indent=2), flush=True)
        if output is not None:
            output.write_text(json.dumps(results, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny numbers, to see that it runs; writes no result")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def _memory(block: Callable[[int], None], device: str) -> int | None:
    """The most bytes of the card that a round takes; None on a processor. It also warms the block up."""
    if not device.startswith("cuda"):
        block(1)
        return None
    torch.cuda.reset_peak_memory_stats()
    block(1)
    return torch.cuda.max_memory_allocated()


def _free(blocks: dict[str, Callable[[int], None]]) -> None:
    """Give the card's memory back before the next row is measured."""
    blocks.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
