"""What ε a private run costs a site, and where its noise comes from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from fedshift.errors import UserError
from fedshift.evaluation.records import SitePrivacy
from fedshift.federation.randomness import Draws
from fedshift.federation.training import SAME_BITS, Training
from fedshift.functional.differential_privacy import NoisySteps, epsilon, noise_multiplier, sample_rate


def site_privacy(training: Training, site: str, samples: int, steps: int, *, grouped: bool) -> SitePrivacy:
    """What a private run costs a site.

    Args:
        training: the experiment's; private.
        grouped: whether the samples of a group, such as a patient, are protected together.

    Raises:
        UserError: the ε that is asked for cannot be reached.
    """
    try:
        return _cost(training, samples, steps, "group" if grouped else "sample")
    except UserError as error:
        raise UserError(f"training.privacy: site '{site}': {error}") from None


def _cost(training: Training, samples: int, steps: int, unit: Literal["sample", "group"]) -> SitePrivacy:
    privacy, rate = training.privacy, sample_rate(samples, training.batch_size)
    assert privacy is not None
    sigma = privacy.noise_multiplier
    if sigma is None:
        assert privacy.epsilon is not None
        sigma = noise_multiplier(privacy.epsilon, privacy.delta, rate, steps)
    spent = NoisySteps(sigma, rate, steps)
    return SitePrivacy(
        epsilon=epsilon([spent], privacy.delta),
        delta=privacy.delta,
        unit=unit,
        clip_norm=privacy.clip_norm,
        noise_multiplier=sigma,
        sample_rate=rate,
        steps=steps,
    )


def draws_of(privacy: Mapping[str, SitePrivacy], identity: Mapping[str, Any]) -> dict[str, Draws]:
    """Where each site of a private run draws its noise from: from the run and the site, so a resumed run repeats it.

    ``privacy``: what the run costs each site; empty unless it is private.
    """
    if not privacy:
        return {}
    of = {key: value for key, value in identity.items() if key not in ("engine", "device", "versions")}
    of["data"] = {key: value for key, value in of["data"].items() if key not in ("root", "sites")}  # paths
    of["training"] = {key: value for key, value in of["training"].items() if key not in SAME_BITS}
    run = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()
    return {site: Draws(item.noise_multiplier, f"{run} {site}") for site, item in privacy.items()}
