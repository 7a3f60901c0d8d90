"""How a setting is written as JSON and made again in another process: by names and options, never by code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedshift.data.domain import Preprocessing
from fedshift.errors import FedshiftError
from fedshift.federation.federation import StepOwner
from fedshift.federation.messages import Reply
from fedshift.federation.site_runner import Setting
from fedshift.federation.training import Training
from fedshift.import_paths import find
from fedshift.models import registry as models


def setting_recipe(setting: Setting) -> dict[str, Any]:
    """A setting as JSON."""
    return {
        "method": setting.method.recipe(),
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
    }


def setting_from(recipe: Mapping[str, Any]) -> Setting:
    """The setting that `setting_recipe` wrote."""
    method: StepOwner = find(recipe["method"]["class"]).model_validate(recipe["method"]["options"])
    return Setting(
        method=method,
        training=Training.model_validate(recipe["training"]),
        network=models.parse(recipe["network"]),
        preprocessing=Preprocessing.model_validate(recipe["preprocessing"]),
        input_shape=tuple(recipe["input_shape"]),
        classes=recipe["classes"],
        sources=recipe["sources"],
        seed=recipe["seed"],
        device=recipe["device"],
        refuse=frozenset(recipe["refuse"]),
        on_refusal=recipe["on_refusal"],
    )


def reply_from(place: str, content: Mapping[str, Any]) -> Reply:
    """A reply of the class at ``place``. Raises FedshiftError when that is not a `Reply`."""
    kind = find(place)
    if not (isinstance(kind, type) and issubclass(kind, Reply)):
        raise FedshiftError(f"{place} is not a Reply")
    return kind(**content)
