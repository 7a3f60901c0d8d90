"""CCST: cross-client style transfer; and a wrapper that adds style transfer to any other method.

Chen, Jiang, Dou, Chen: Federated Domain Generalization for Image Recognition via Cross-Client Style Transfer. WACV
2023.

Setting: domain generalization by changed data. The target is never seen, and its style is not used. ``ccst`` trains
FedAvg on the stylised samples, ``styles`` any federated method: ``{name: styles, method: {name: csac, …}}``.
Wire: once, J styles of every source up, K·J·s bytes, and the bank of all K·J styles down to each, K·K·J·s, with s bytes
per style. Then what the inner method sends. A site may refuse the kind ``styles``. With ``engine.on_refusal:
leave_out`` it then trains in its own style and those of the others, and sends none.

 1. Style of an image: S(I) = (μ(Φ(I)), σ(Φ(I))) per channel; J of them (*single*), or one over all pixels of all images
    of the site (*overall*), σ = sqrt(E x² − μ² + 1e-5)
 2. The server sends the bank B = {S of all sites} to all sources.
 3. Every image takes the styles of L of the K source domains, without replacement. In the style of its own domain it is
    unchanged. In another: F' = σ_S · (F − μ(F))/σ(F) + μ_S in Φ, decoded
 4. The inner method trains on these images.

Where the paper and its code differ. **The defaults differ from the paper in one point: Φ.** The paper's Φ is VGG-19 up
to relu4_1 with a trained decoder, at 512 pixels, which needs the weights of both. ``setting: vgg`` is the paper;
``released`` is its code, with the same Φ. By default Φ is ``pixel`` (the image's own channels), which needs no file.
Others are ``lab``, ``lowfreq`` (amplitudes of low frequencies instead of μ and σ), and ``feature``: AdaIN after a stage
of the network that is trained, without a decoder, with the styles of the common start. It is meant for a pre-trained
network.
 1. In the code, the content's deviation has n − 1 in the denominator, the overall style's has n. The paper has one σ.
    Here both have n, so that the result has exactly the chosen style (``unbiased_content``).
 2. In single mode, the code draws one image of the other site's folder for each mini-batch of content. In the paper the
    bank has J styles of a site, and an image takes one of them. Here J = 32 (``one_style_per_batch``).
No setting changes these:
 3. The number of styles of an image (``level``) is called L here and K in the code. By default it is K, the number of
    source domains, the paper's best row: every image is used unchanged and in the style of every other site.
 4. In the paper an epoch passes over N_k·L images. Here an epoch is N_k images, each in one of its L versions, drawn
    each time. So shares and work are those of the inner method. The versions are fixed for a run.
 5. Vectors: ``pixel`` means columns, whose μ and σ are the site's. Not in the paper.
 6. All sites have the same weight, as in the code (``weighting: uniform``, the default of ``ccst``). The code offers
    FedProx with μ = 0.01 (``proximal_weight``).

Should reproduce: no row of the published tables can be made without the decoder's weights and a pre-trained ResNet-50.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
)

from fedshift.import_paths import place_of
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.federated.style_wrapper import StyleWrapper
from fedshift.methods.wrapper import Wrapper


class CCST(StyleWrapper):
    """FedAvg on images in the styles of all sites."""

    traits = StyleWrapper.traits.derive(
        name="ccst",
        citation="Chen et al., WACV 2023",
        group="unseen",
        advice="For sites that differ in style; no gain shown in pixels: +0.27 over FedAvg on Rotated MNIST (p = "
        "1.000).",
        sends="a model, and once **styles**",
    )

    local_epochs: PositiveInt = Field(1, description="E: passes over a site's data per round")
    steps_per_round: PositiveInt | None = Field(None, description="mini-batches per round instead of whole epochs")
    weighting: Literal["samples", "uniform"] = Field("uniform", description="shares N_k/ΣN, or 1/K (code)")
    proximal_weight: NonNegativeFloat = Field(0.0, description="μ of FedProx (code: 0.01 as an option); 0 = FedAvg")

    @functools.cached_property
    def inner(self) -> Method:
        """FedProx, which is FedAvg if its μ is 0."""
        return FedProx(
            local_epochs=self.local_epochs,
            steps_per_round=self.steps_per_round,
            weighting=self.weighting,
            proximal_weight=self.proximal_weight,
        )


class StyleTransfer(StyleWrapper):
    """Any federated method on images in the styles of all sites."""

    traits = StyleWrapper.traits.derive(
        name="styles",
        citation="Chen et al., WACV 2023",
        group="unseen",
        advice="CCST's style transfer around another method. Not measured here but as ccst.",
        sends="a model, and once **styles**",
    )

    method: SerializeAsAny[Method] = Field(
        {"name": "fedavg"},
        validate_default=True,
        description="the inner method: its name, or a mapping with name and options",
    )

    @property
    def inner(self) -> Method:
        return self.method

    @field_validator("method", mode="before")
    @classmethod
    def _by_name(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, Method):
            return value
        options = {"name": value} if isinstance(value, str) else value
        if not isinstance(options, Mapping):
            raise ValueError("must be the name of a method, or a mapping with name and options")
        context = info.context or {}
        try:
            return registry.parse(options, context.get("folder"), context.get("permit"))
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}") from None

    @field_validator("method")
    @classmethod
    def _without_styles(cls, method: Method) -> Method:
        inner = method
        while isinstance(inner, Wrapper):
            if isinstance(inner, StyleWrapper):
                raise ValueError(f"{inner.name} already changes styles; choose another method")
            inner = inner.inner
        return method

    @field_serializer("method")
    def _with_name(self, method: Method) -> dict[str, Any]:
        place = place_of(type(method))
        known = registry.METHODS.get(method.name) == place
        return {"name": method.name if known else place, **method.model_dump(mode="json")}
