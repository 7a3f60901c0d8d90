"""The parts of `bench.py` that time the mini-batches of one site: CSAC and ELCFS against FedAvg."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bench_common import ENDLESS, Row, Seconds, Synthetic, Work, median, median_ratio
from fedshift.federation.messages import Reply
from fedshift.federation.site import Batch, Envelope
from fedshift.federation.site_runner import SiteRunner
from fedshift.functional.projection import projection_layer
from fedshift.methods.federated.elcfs import SharedSpectra
from fedshift.models.payload import forward_cost

SETTINGS = ("acquisition", 30), ("calibration", 40 * 5)
"""CSAC on Rotated MNIST: epochs of local acquisition, and of calibration in 40 rounds of 5."""

# CSAC ----------------------------------------------------------------------------------------------------

_RESNET: dict[str, Any] = {"name": "resnet18", "bottleneck": 256}
CSAC_CASES: Mapping[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any], int, int]] = {
    # name: shape of a sample, model, training, samples of the site, mini-batches at a stretch
    "mnist_cnn, 28 px": ((1, 28, 28), {"name": "mnist_cnn"}, {"batch_size": 64}, 1000, 48),
    "mnist_cnn, 28 px, strided": ((1, 28, 28), {"name": "mnist_cnn"}, {"batch_size": 64}, 1000, 48),
    "mnist_cnn, 28 px, pooled": ((1, 28, 28), {"name": "mnist_cnn"}, {"batch_size": 64}, 1000, 48),
    "mnist_cnn, 28 px, pooled, 8 channels": ((1, 28, 28), {"name": "mnist_cnn"}, {"batch_size": 64}, 1000, 48),
    "mlp 64, 32 on 1280 features": ((1280,), {"name": "mlp"}, {"batch_size": 32}, 1600, 200),
    "resnet18, 64 px": ((3, 64, 64), _RESNET, {"batch_size": 32}, 96, 3),
    "resnet18, 64 px, augmented": ((3, 64, 64), _RESNET, {"batch_size": 32, "augmentation": "csac"}, 96, 3),
}


CSAC_OPTIONS: Mapping[str, dict[str, Any]] = {
    "mnist_cnn, 28 px, strided": {"projection": "strided"},
    "mnist_cnn, 28 px, pooled": {"projection": "pooled"},
    "mnist_cnn, 28 px, pooled, 8 channels": {"projection": "pooled", "projection_channels": 8},
}
"""Options of CSAC in a case, where they are not the defaults."""


class LocalSteps:
    """One site and one call of a method; every call trains on and notes the time of every mini-batch."""

    def __init__(self, work: Work, call: str) -> None:
        self.call, self.device = call, work.setting.device
        self.runner = SiteRunner(work.plans[0], work.setting)
        self.content: dict[str, Any] = {} if call == "acquire" else {"weights": work.start()}
        self.exchange = 0
        self.seconds: list[Seconds] = []
        self._draw = self.runner.site.batches
        self.runner.site.batches = self._note_steps  # type: ignore[method-assign]

    def _clock(self) -> Seconds:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def _note_steps(self, epochs: int = 1, steps: int | None = None) -> Iterator[Batch]:
        began = self._clock()
        for batch in self._draw(epochs, steps):
            yield batch
            now = self._clock()  # the training step on this batch is over
            self.seconds.append((now[0] - began[0], now[1] - began[1]))
            began = now

    def run(self, call: str, content: Mapping[str, Any] | None = None) -> Reply:
        """Run a call, with the content that belongs to the timed one unless other content is given."""
        self.exchange += 1
        if content is None:
            content = self.content if call == self.call else {}
        return self.runner.run(call, Envelope(self.exchange, self.exchange, 0.0, ENDLESS), content)[0]

    def __call__(self) -> None:
        self.run(self.call)


def csac(quick: bool, device: str) -> list[Row]:
    """Seconds of a local mini-batch of FedAvg and of both phases of CSAC, in turn, at one site with one thread."""
    torch.set_num_threads(1)
    measured = []
    for name, (shape, model, training, samples, steps) in CSAC_CASES.items():
        data = Synthetic(shape=shape, samples=samples, sites=1)
        fedavg = Work({"name": "fedavg", "steps_per_round": steps}, data, model, training, device)
        options = CSAC_OPTIONS.get(name, {})
        method = {"name": "csac", "acquisition_steps": steps, "calibration_steps": steps, **options}
        sites = {"fedavg": LocalSteps(fedavg, "fit")}
        for part, call in (("acquisition", "acquire"), ("calibration", "calibrate")):
            sites[part] = LocalSteps(Work(method, data, model, training, device), call)
        sites["calibration"].run("acquire")  # leaves the frozen local model
        for site in sites.values():
            site()  # warms up; also computes the frozen features where they are kept
            site.seconds.clear()
        heavy = model["name"] == "resnet18"
        repeats: list[dict[str, Seconds]] = []
        for _ in range((2 if heavy else 8) if quick else (6 if heavy else 24)):
            for site in sites.values():
                site.seconds.clear()
                site()
            # Within a stretch the median passes over what else the machine did.
            repeats.append({part: (median(site.seconds), median(site.seconds, 1)) for part, site in sites.items()})

        def columns(part: str, rows: Sequence[Mapping[str, Seconds]] = repeats) -> list[Seconds]:
            return [row[part] for row in rows]

        per_batch = {part: median(columns(part)) for part in sites}
        ratios = {part: median_ratio(columns(part), columns("fedavg")) for part in sites}
        epochs = sum(number for _, number in SETTINGS)
        measured.append(
            {
                "case": name,
                "frozen_features": "kept" if training.get("augmentation") is None else "computed for every batch",
                "milliseconds_per_mini_batch": {part: 1000 * value for part, value in per_batch.items()},
                "calibration_ratio": ratios["calibration"],
                "calibration_ratio_of_processor_seconds": median_ratio(
                    columns("calibration"), columns("fedavg"), clock=1
                ),
                "calibration_ratio_of_multiply_accumulates": arithmetic(
                    fedavg, training.get("augmentation") is None, options
                ),
                "whole_run_ratio": sum(number * ratios[part] for part, number in SETTINGS) / epochs,
                "device": device,
            }
        )
    return measured


# ELCFS ----------------------------------------------------------------------------------------------------

_UNET: dict[str, Any] = {"name": "unet"}
ELCFS_CASES: Mapping[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any], int, int, int]] = {
    # name: shape of a sample, model, training, samples of the site, passes per image, mini-batches
    "mnist_cnn, 28 px": ((1, 28, 28), {"name": "mnist_cnn"}, {"batch_size": 64}, 1000, 2, 15),
    "resnet18, 64 px": ((3, 64, 64), _RESNET, {"batch_size": 32}, 96, 2, 3),
    "unet, 64 px, with the boundary term": ((3, 64, 64), _UNET, {"batch_size": 5}, 20, 3, 4),
}


def elcfs(quick: bool, device: str) -> list[Row]:
    """Seconds of a local mini-batch of FedAvg and of ELCFS at first order, per image that goes forward and backward.

    ELCFS goes through each mini-batch itself and its copy; with the boundary term through the mini-batch once more.
    """
    torch.set_num_threads(1)
    rows = []
    for name, (shape, model, training, samples, passes, steps) in ELCFS_CASES.items():
        masked = model["name"] == "unet"
        data = Synthetic(shape=shape, samples=samples, sites=2, classes=2 if masked else 10, masks=masked)
        sites = {
            "fedavg": LocalSteps(Work({"name": "fedavg"}, data, model, training, device), "fit"),
            "elcfs": LocalSteps(
                Work({"name": "elcfs", "setting": "light", "window": 0.05}, data, model, training, device), "fit"
            ),
        }
        shared = sites["elcfs"].run("share_spectra")
        assert isinstance(shared, SharedSpectra)
        sites["elcfs"].run("receive", {"bank": {"site1": shared.spectra}})
        for site in sites.values():
            site()
        repeats: list[dict[str, Seconds]] = []
        for _ in range((3 if quick else 9) * (2 if model["name"] == "mnist_cnn" else 1)):
            for site in sites.values():
                site.seconds.clear()
                site()
            assert all(len(site.seconds) >= steps for site in sites.values())
            repeats.append({part: (median(site.seconds), median(site.seconds, 1)) for part, site in sites.items()})
        columns = {part: [row[part] for row in repeats] for part in sites}
        rows.append(
            {
                "case": name,
                "passes_per_image": passes,
                "milliseconds_per_mini_batch": {part: 1000 * median(values) for part, values in columns.items()},
                "ratio_per_image_gone_through": median_ratio(columns["elcfs"], columns["fedavg"]) / passes,
                "ratio_of_processor_seconds": median_ratio(columns["elcfs"], columns["fedavg"], clock=1) / passes,
                "device": device,
            }
        )
    return rows


def arithmetic(work: Work, kept: bool, options: Mapping[str, Any]) -> float:
    """Multiply-accumulates of CSAC's calibration over those of FedAvg: convolutions and linear layers, MMD left out.

    A trained module costs three forward passes (forward, gradients by input and by weights). A projection of frozen
    features needs no gradient by its input: two. Frozen features that are not kept cost one more pass of the network.
    """
    network = work.setting.build_network().eval()
    with torch.no_grad():
        _, features = network.with_stages(torch.zeros(2, *work.data.input_shape), network.alignment_stages)
    shapes = [tuple(feature.shape[1:]) for feature in features.values()]
    size = shapes[-1][1:] if len(shapes[-1]) == 3 else (1, 1)
    channels, reduction = options.get("projection_channels", 32), options.get("projection", "released")
    layers = [projection_layer(shape, channels, (size[0], size[1]), reduction=reduction) for shape in shapes]
    projections = sum(forward_cost(_alone(layer), shape) for layer, shape in zip(layers, shapes, strict=True))
    plain = forward_cost(network, work.data.input_shape)
    ratio = (3 * plain + (3 + 2) * projections + (0 if kept else plain)) / (3 * plain)
    assert math.isfinite(ratio)
    return ratio


def _alone(module: nn.Module) -> nn.Module:
    return nn.Sequential(module)
