"""A setting as JSON, and back again in another process. It holds names and options, never code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fedshift.data.domain import Preprocessing
from fedshift.errors import FedshiftError
from fedshift.federation.federation import CallOwner
from fedshift.federation.messages import Reply
from fedshift.federation.randomness import Draws
from fedshift.federation.site_runner import Setting
from fedshift.federation.training import Training
from fedshift.import_paths import find
from fedshift.models import registry as models


def setting_recipe(setting: Setting) -> dict[str, Any]:
    """Write a setting as plain values for JSON."""
    return {
        "method": setting.method.calls.recipe(),
        "training": setting.training.model_dump(mode="json"),
        "network": setting.network.model_dump(mode="json"),
        "preprocessing": setting.preprocessing.model_dump(mode="json"),
        "input_shape": list(setting.input_shape),
        "classes": setting.classes,
        "sources": setting.sources,
        "seed": setting.seed,
        "device": setting.device,
        "refuse": sorted(setting.refuse),
        "on_refusal": setting.on_refusal,
        "draws": {site: asdict(draws) for site, draws in setting.draws.items()},
    }


def setting_from(recipe: Mapping[str, Any], permit: Callable[[str], None] = models.only_known) -> Setting:
    """Build the setting that `setting_recipe` wrote.

    Args:
        recipe: the setting.
        permit: as in `fedshift.models.registry.parse`, for a network that does not come with fedshift.
    """
    method: CallOwner = find(recipe["method"]["class"]).model_validate(recipe["method"]["options"])
    return Setting(
        method=method,
        training=Training.model_validate(recipe["training"]),
        network=models.parse(recipe["network"], permit=permit),
        preprocessing=Preprocessing.model_validate(recipe["preprocessing"]),
        input_shape=tuple(recipe["input_shape"]),
        classes=recipe["classes"],
        sources=recipe["sources"],
        seed=recipe["seed"],
        device=recipe["device"],
        refuse=frozenset(recipe["refuse"]),
        on_refusal=recipe["on_refusal"],
        draws={site: Draws(**draws) for site, draws in recipe.get("draws", {}).items()},
    )


def reply_from(import_path: str, content: Mapping[str, Any]) -> Reply:
    """Build a reply of the class at ``import_path``.

    Raises:
        FedshiftError: the class is not a `Reply`.
    """
    kind = find(import_path)
    if not (isinstance(kind, type) and issubclass(kind, Reply)):
        raise FedshiftError(f"{import_path} is not a Reply")
    return kind(**content)
