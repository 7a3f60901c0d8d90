"""Training in 16 bits, and with torch's compiler."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.federation.local.cards import resolve_device
from fedshift.methods.base import Method
from fedshift.methods.composition.options import training_of
from fedshift.models.products import can_compile, has_bf16_units


def fits(about: About) -> Iterator[str]:
    """Say where it gains nothing. UserError if there is no compiler."""
    training, device = about.experiment.training, resolve_device(about.experiment.device)
    if training.precision == "bf16" and not has_bf16_units(device):
        yield "training.precision: this device has no units for bf16, so it is no faster than float32"
    if training.precision == "fp16" and not device.startswith("cuda"):
        yield "training.precision: fp16 is for graphics cards; bf16 is faster here and needs no scaled losses"
    if training.compile and not can_compile(device):
        what = "Triton, which comes with torch for CUDA" if device.startswith("cuda") else "a C++ compiler (g++)"
        raise UserError(f"training.compile: it needs {what}, which is not here: leave it out")


def method_fits(about: About, method: Method) -> None:
    """Check that all gradients of a method are those of `Site.minimise`, where others would be wrong or slow."""
    training = training_of(method, about.experiment.training)
    options = {"compile": training.compile, "precision: fp16": training.precision == "fp16"}
    asked = [name for name, on in options.items() if on]
    reason = ""
    if method.traits.own_gradients:
        reason = "takes gradients of its own; choose another method"
    elif method.at_sites(about.data.input_shape).local:
        reason = "has plug-ins of local training"
    if asked and reason:
        raise UserError(f"training.{asked[0]}: {method.display} {reason}, or leave it out")
