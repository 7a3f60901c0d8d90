"""The ``search`` section of an experiment file: what is drawn, how often, and which rules choose among the draws."""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from fedshift.section import Section

Choosing = Literal["training_domains", "leave_one_domain_out", "oracle"]
Range = tuple[float, float]


class Space(Section):
    """The values of one field: exactly one of these kinds."""

    choices: Annotated[tuple[Any, ...], Field(min_length=1)] | None = Field(None, description="one of these values")
    uniform: Range | None = Field(None, description="a number between two")
    log_uniform: Range | None = Field(None, description="a number between two, uniform in its logarithm")
    integer: Range | None = Field(None, description="a whole number between two, both included")
    log_integer: Range | None = Field(None, description="the same, uniform in its logarithm")

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        kinds = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        if len(kinds) != 1:
            raise ValueError(f"write exactly one of {', '.join(type(self).model_fields)}")
        (name, value), *_ = kinds.items()
        if name != "choices" and not value[0] < value[1]:
            raise ValueError(f"{name}: the first number must be below the second")
        if name.startswith("log") and value[0] <= 0:
            raise ValueError(f"{name}: both numbers must be above 0")
        return self

    def draw(self, purpose: str) -> Any:
        """A value; the same ``purpose`` gives the same."""
        share = float(np.random.default_rng(list(hashlib.sha256(purpose.encode()).digest())).random())
        if self.choices is not None:
            return self.choices[int(share * len(self.choices))]
        if self.integer is not None:
            low, high = self.integer
            return int(low + math.floor(share * (high - low + 1)))
        if self.uniform is not None:
            low, high = self.uniform
            return low + share * (high - low)
        pair = self.log_uniform or self.log_integer
        assert pair is not None
        value = math.exp(math.log(pair[0]) + share * (math.log(pair[1]) - math.log(pair[0])))
        return value if self.log_uniform is not None else round(value)


class Search(Section):
    """Draws of every method's settings, and the rules that choose among them.

    Source: Gulrajani & Lopez-Paz, ICLR 2021 (DomainBed); for TPE Bergstra, Bardenet, Bengio, Kégl, NeurIPS 2011.
    """

    spaces: dict[str, Space] = Field(
        min_length=1,
        description="field → its values: training.lr, of all methods; LABEL.training.lr or LABEL.option, of one",
    )
    draws: PositiveInt = Field(20, description="of each method; every draw is run with each of protocol.seeds")
    seed: int = Field(0, ge=0, description="of the draws")
    sampler: Literal["random", "optuna"] = Field(
        "random",
        description="random: draws do not depend on results; optuna: each follows from those before, by Optuna's TPE, "
        "for each target by itself (needs fedshift[search])",
    )
    defaults_first: bool = Field(True, description="whether the first draw is what the file says")
    rules: tuple[Choosing, ...] = Field(
        ("training_domains", "leave_one_domain_out", "oracle"),
        min_length=1,
        description="who chooses: held-out parts of the sources; sources that are left out, which takes further runs; "
        "oracle: the target's labels, a bound and no result",
    )
