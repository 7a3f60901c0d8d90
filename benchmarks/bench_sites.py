"""The part of `bench.py` that times sites trained side by side against the same sites one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bench_common import Rounds, Row, Synthetic, Work, median, median_ratio, time_in_turn

_WIDE: dict[str, Any] = {"name": "mlp", "hidden": [256]}
_SMALL: dict[str, Any] = {"name": "mlp"}


def _cut(width: int, sites: int) -> Synthetic:
    return Synthetic(shape=(width,), samples=320, sites=sites, classes=7)


CASES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    # name: data, model
    "PACS features, mlp 64, 32": ({"name": "pacs_features"}, _SMALL),
    "PACS features, mlp 256": ({"name": "pacs_features"}, _WIDE),
    "SURF, mlp 64, 32": ({"name": "office_caltech_surf"}, _SMALL),
    "SURF, mlp 256": ({"name": "office_caltech_surf"}, _WIDE),
    "heart disease, mlp 64, 32": ({"name": "heart_disease"}, _SMALL),
    "1280 numbers, 5 sites, mlp 64, 32": (_cut(1280, 5), _SMALL),
    "1280 numbers, 20 sites, mlp 64, 32": (_cut(1280, 20), _SMALL),
    "1280 numbers, 50 sites, mlp 64, 32": (_cut(1280, 50), _SMALL),
    "1280 numbers, 20 sites, mlp 256": (_cut(1280, 20), _WIDE),
    "13 numbers, 5 sites, mlp 64, 32": (_cut(13, 5), _SMALL),
    "13 numbers, 20 sites, mlp 64, 32": (_cut(13, 20), _SMALL),
    "13 numbers, 50 sites, mlp 64, 32": (_cut(13, 50), _SMALL),
}


def sites(quick: bool) -> list[Row]:
    """Rounds of FedAvg of one epoch, momentum 0.5, mini-batches of 64, with one thread; all that a round has counts."""
    torch.set_num_threads(1)
    rows = []
    for name, (data, model) in CASES.items():
        work = Work({"name": "fedavg"}, data, model, {"batch_size": 64, "lr": 0.01})
        blocks = {"one by one": Rounds(work), "side by side": Rounds(work, side_by_side=True)}
        for block in blocks.values():
            block(1)
        alone, together = (block.state.weights for block in blocks.values())
        difference = max(float((together[key] - value).abs().max()) for key, value in alone.items())
        per_round = blocks["one by one"].mini_batches
        seconds = time_in_turn(blocks, 0.2 if quick else 0.5, 7 if quick else 15)
        first, other = seconds.values()
        rows.append(
            {
                "case": name,
                "sites": len(work.plans),
                "mini_batches_of_a_round": per_round,
                "processor_milliseconds_per_mini_batch": {
                    key: 1000 * median(values, clock=1) / per_round for key, values in seconds.items()
                },
                "ratio": median_ratio(first, other),
                "ratio_of_processor_seconds": median_ratio(first, other, clock=1),
                "difference_of_weights_after_a_round": difference,
            }
        )
    return rows
