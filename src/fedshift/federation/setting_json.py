"""A setting as plain values, and back again in another process. It holds names and options, never code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from fedshift.data.domain import Preprocessing
from fedshift.errors import FedshiftError
from fedshift.federation.federation import CallOwner, OnRefusal
from fedshift.federation.messages import Reply
from fedshift.federation.plain_values import Frozen
from fedshift.federation.randomness import Draws
from fedshift.federation.site_runner import Setting
from fedshift.federation.training import Training
from fedshift.import_paths import find
from fedshift.models import registry as models


class MethodRecipe(Frozen):
    """A method.

    Attributes:
        name: by which it is registered; sites of a deployment are told this.
        class_path: the class to import, within one machine.
        options: which the class parses.
    """

    name: str = ""
    class_path: str = Field("", alias="class")
    options: dict[str, Any]


class SettingRecipe(Frozen):
    """A `Setting`. The classes of its sections parse them, which depend on the method's and the network's name."""

    method: MethodRecipe
    training: dict[str, Any]
    network: dict[str, Any]
    preprocessing: dict[str, Any]
    input_shape: tuple[int, ...]
    classes: int
    sources: int
    seed: int
    device: str = ""
    refuse: tuple[str, ...]
    on_refusal: OnRefusal
    draws: dict[str, Draws] = Field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The fields that were given, for JSON."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


def setting_recipe(setting: Setting) -> SettingRecipe:
    """Write a setting as plain values."""
    return SettingRecipe(
        method=MethodRecipe.model_validate(setting.method.calls.recipe()),
        training=setting.training.model_dump(mode="json"),
        network=setting.network.model_dump(mode="json"),
        preprocessing=setting.preprocessing.model_dump(mode="json"),
        input_shape=tuple(setting.input_shape),
        classes=setting.classes,
        sources=setting.sources,
        seed=setting.seed,
        device=setting.device,
        refuse=tuple(sorted(setting.refuse)),
        on_refusal=setting.on_refusal,
        draws=dict(setting.draws),
    )


def setting_from(recipe: SettingRecipe, permit: Callable[[str], None] = models.only_known) -> Setting:
    """Build the setting that `setting_recipe` wrote.

    ``permit``: as in `fedshift.models.registry.parse`, for a network that does not come with fedshift. Raises
    ValidationError: a section cannot be parsed.
    """
    method: CallOwner = find(recipe.method.class_path).model_validate(recipe.method.options)
    return Setting(
        method=method,
        training=Training.model_validate(recipe.training),
        network=models.parse(recipe.network, permit=permit),
        preprocessing=Preprocessing.model_validate(recipe.preprocessing),
        input_shape=recipe.input_shape,
        classes=recipe.classes,
        sources=recipe.sources,
        seed=recipe.seed,
        device=recipe.device,
        refuse=frozenset(recipe.refuse),
        on_refusal=recipe.on_refusal,
        draws=recipe.draws,
    )


def reply_from(import_path: str, content: Mapping[str, Any]) -> Reply:
    """Build a reply of the class at ``import_path``. Raises FedshiftError: the class is not a `Reply`."""
    kind = find(import_path)
    if not (isinstance(kind, type) and issubclass(kind, Reply)):
        raise FedshiftError(f"{import_path} is not a Reply")
    return kind(**content)
