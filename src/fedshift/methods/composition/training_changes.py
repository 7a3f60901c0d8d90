"""How one method of an experiment trains otherwise than the others: its ``training`` option.

A run of such a method is, bit for bit, that of an experiment whose training section has these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)

from fedshift.federation.training import Training

OF_THE_EXPERIMENT = ("measure_every", "matrix_products", "precision", "privacy", "adapters", "thaw_after")
"""Fields that all methods of an experiment share: what leaves a site, how it computes, and what is measured."""


class _Changes(BaseModel):
    """Base of `TrainingChanges`: only what was given is kept and written."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _of_a_method(cls, options: Any) -> Any:
        for name in OF_THE_EXPERIMENT if isinstance(options, Mapping) else ():
            if name in options:
                raise ValueError(f"{name} is the same for all methods: write it in the experiment's training section")
        return options

    @model_serializer(mode="wrap")
    def _serialize_set(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = plain(self)
        return {name: value for name, value in written.items() if name in self.model_fields_set}

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given, with their values."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    def on(self, training: Training) -> Training:
        """An experiment's training section with these changes.

        Raises ValidationError: the values do not go together.
        """
        length = ("steps", "mini_batches")
        other = length if any(name in self.model_fields_set for name in length) else ()  # one of the two is given
        kept = {name: getattr(training, name) for name in training.model_fields_set if name not in other}
        return Training.model_validate(kept | self.given)


if TYPE_CHECKING:

    class TrainingChanges(_Changes):
        """Fields of ``training`` for one method."""

else:
    TrainingChanges = create_model(
        "TrainingChanges",
        __base__=_Changes,
        __module__=__name__,
        __doc__="Fields of ``training`` for one method.",
        **{
            name: (field.annotation, field)
            for name, field in Training.model_fields.items()
            if name not in OF_THE_EXPERIMENT
        },
    )
