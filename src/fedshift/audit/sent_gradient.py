"""The gradient of a mini-batch that a site sends: plain, or clipped and noisy where it trains privately."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.federation.private_training import gradients_of, per_sample_gradients
from fedshift.federation.site import Site
from fedshift.functional.differential_privacy import clipped_sum, gaussian


def gradient_of(site: Site, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """The gradient that a site sends of a mini-batch."""
    model = site.model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    privacy, draws = site.training.privacy, site.draws
    if privacy is None or draws is None:
        found = torch.autograd.grad(F.cross_entropy(model(inputs), labels), trained, materialize_grads=True)
        return [part.detach() for part in found]
    with per_sample_gradients(model):
        F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        sums = clipped_sum(gradients_of(trained, len(inputs)), privacy.clip_norm)
    noise, scale = draws.generator(1, "audit"), draws.noise_multiplier * privacy.clip_norm
    noisy = [total.double() + scale * gaussian(total.shape, noise).to(total.device) for total in sums]
    return [(total / len(inputs)).float() for total in noisy]
