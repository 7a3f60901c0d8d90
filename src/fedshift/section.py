"""What every section of an experiment file is, and every part of a stored file that is read as strictly."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Section(BaseModel):
    """A section of a file. It is immutable and accepts no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sparing(Section):
    """A section that leaves out fields which came later, where they are not set: earlier files stay as they were.

    Private noise is drawn from settings, and files and caches are compared with them.
    """

    later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = plain(self)
        fields = type(self).model_fields
        for name in self.later:
            if getattr(self, name) == fields[name].get_default(call_default_factory=True):
                written.pop(name, None)
        return written
