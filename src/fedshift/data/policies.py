"""Published policies of augmentation, as torchvision has them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

AugmentationPolicy = Literal["rand_augment", "trivial_augment", "augmix"]


def with_policy(images: Tensor, policy: AugmentationPolicy, generator: torch.Generator) -> Tensor:
    """Images changed by a policy, one after the other, on the processor and with 8 bits per value.

    ``rand_augment``: 2 operations of magnitude 9 of 30 (Cubuk et al., NeurIPS 2020). ``trivial_augment``: one operation
    of any magnitude, the wide set (Müller & Hutter, ICCV 2021). ``augmix``: mixed chains of operations (Hendrycks et
    al., ICLR 2020), without that paper's consistency loss.

    Args:
        images: (n, c, h, w) with values in [0, 1], grey or colour.
        policy: its name.
        generator: draws the seed of all images; torch's own generator is restored.
    """
    change, seed = _policy(policy), int(torch.randint(2**62, (), generator=generator))
    pixels = (images.detach() * 255).round().to("cpu", torch.uint8)
    with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's own generator
        torch.default_generator.manual_seed(seed)
        changed = torch.stack([change(image) for image in pixels])
    return (changed.to(images.device).float() / 255).contiguous(memory_format=torch.channels_last)


def _policy(name: AugmentationPolicy) -> nn.Module:
    from torchvision import transforms

    policy: nn.Module = {
        "rand_augment": transforms.RandAugment,
        "trivial_augment": transforms.TrivialAugmentWide,
        "augmix": transforms.AugMix,
    }[name]()
    return policy
