"""Plug-ins of local training, an option of every federated method: ``local: [mixstyle, {name: jigsaw, weight: 1}]``.

A plug-in works where a labelled site's loss of a mini-batch is computed (`Site.minimise`), so methods have no code for
it. It acts on each mini-batch in the order of the list: with ``[amplitude_mix, jigsaw]`` both views are puzzled, with
``[jigsaw, amplitude_mix]`` the site's images are. Nothing more is sent: heads stay at their sites, in their memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field

from fedshift.methods.choices import read_choice
from fedshift.methods.composition.labels import CutMixOption, LabelSmoothingOption, MixupOption
from fedshift.methods.composition.mixstyle import MixStyleOption
from fedshift.methods.composition.plug_in import LocalOption
from fedshift.methods.composition.puzzles import JigsawOption
from fedshift.methods.composition.regularisers import DropoutOption, SharpnessOption, StochasticDepthOption
from fedshift.methods.composition.triplets import TripletsOption
from fedshift.methods.composition.views import AmplitudeMixOption, AugmentOption, LabelGradientOption

LocalPlugIn = (
    MixStyleOption
    | AmplitudeMixOption
    | LabelGradientOption
    | JigsawOption
    | TripletsOption
    | LabelSmoothingOption
    | MixupOption
    | CutMixOption
    | SharpnessOption
    | DropoutOption
    | StochasticDepthOption
    | AugmentOption
)
PLUG_INS: Mapping[str, type[LocalOption]] = {kind.model_fields["name"].default: kind for kind in get_args(LocalPlugIn)}


def _read(value: Any) -> Any:
    if isinstance(value, str | Mapping):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of plug-ins, such as [mixstyle]")
    return tuple(read_choice(item, "name", PLUG_INS, "plug-in of local training") for item in value)


LocalPlugIns = Annotated[
    tuple[Annotated[LocalPlugIn, Field(discriminator="name")], ...],
    BeforeValidator(_read),
]
"""The field ``local`` of a method."""
