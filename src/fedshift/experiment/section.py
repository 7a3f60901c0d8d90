"""What every section of an experiment file is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of an experiment file. It is immutable and accepts no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")
