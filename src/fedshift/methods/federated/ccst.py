"""CCST: cross-client style transfer, which goes before any other method, too.

Chen, Jiang, Dou, Chen: Federated Domain Generalization for Image Recognition via Cross-Client Style Transfer. WACV
2023.

Setting: domain generalization by changed data. The target is never seen, and its style is not used. ``ccst`` trains
FedAvg on the stylised samples; any federated method does with ``prepare: styles``, such as ``{name: csac, prepare:
styles}``.
Wire: once, J styles of every source up, K·J·s bytes, and the bank of all K·J styles down to each, K·K·J·s, with s bytes
per style. Then what the method sends. A site may refuse the kind ``styles``. With ``engine.on_refusal:
leave_out`` it then trains in its own style and those of the others, and sends none.

 1. Style of an image: S(I) = (μ(Φ(I)), σ(Φ(I))) per channel; J of them (*single*), or one over all pixels of all images
    of the site (*overall*), σ = sqrt(E x² − μ² + 1e-5)
 2. The server sends the bank B = {S of all sites} to all sources.
 3. Every image takes the styles of L of the K source domains, without replacement. In the style of its own domain it is
    unchanged. In another: F' = σ_S · (F − μ(F))/σ(F) + μ_S in Φ, decoded
 4. The method trains on these images.

Where the paper and its code differ. **The defaults differ from the paper in one point: Φ.** The paper's Φ is VGG-19 up
to relu4_1 with a trained decoder, at 512 pixels, which needs the weights of both. ``setting: vgg`` is the paper;
``released`` is its code, with the same Φ. By default Φ is ``pixel`` (the image's own channels), which needs no file.
Others are ``lab``, ``lowfreq`` (amplitudes of low frequencies instead of μ and σ), and ``feature``: AdaIN after a stage
of the network that is trained, without a decoder, with the styles of the common start. It is meant for a pre-trained
network. Code: JeremyCJM/CCST.
 1. In the code, the content's deviation has n − 1 in the denominator, the overall style's has n. The paper has one σ.
    Here both have n, so that the result has exactly the chosen style (``unbiased_content``).
    Code: style_transfer/AdaIN/function.py, `calc_mean_std`, and ``mean_std_computation_effcientMem.py``, `calc_sum`.
 2. In single mode, the code draws one image of the other site's folder for each mini-batch of content. In the paper the
    bank has J styles of a site, and an image takes one of them. Here J = 32 (``one_style_per_batch``).
    Code: ``style_transfer/AdaIN/CCST_SingleStyleTransfer.py``, main script.
No setting changes these:
 3. The number of styles of an image (``level``) is called L here and K in the code. By default it is K, the number of
    source domains, the paper's best row: every image is used unchanged and in the style of every other site
    (``data/data_list_generator.py``, option ``--K``).
 4. In the paper an epoch passes over N_k·L images. Here an epoch is N_k images, each in one of its L versions, drawn
    each time. So shares and work are those of the method. The versions are fixed for a run.
 5. Vectors: ``pixel`` means columns, whose μ and σ are the site's. Not in the paper.
 6. All sites have the same weight, as in the code (``weighting: uniform``, the default of ``ccst``). The code offers
    FedProx with μ = 0.01 (``federated/fed_run.py``, `train_fedprox`; ``proximal_weight``).

Should reproduce: no row of the published tables can be made without the decoder's weights and a pre-trained ResNet-50.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat

from fedshift.methods.composition.styles import SETTINGS, StyleOptions
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.method_tests import MethodTests, Try, tries

_TRIED = {
    "style_space": (Try(("lowfreq", "feature")), Try(("lab",), {}, "colour")),
    "level": tries(1, 2),
    "bank_size": tries(4, style_mode="single"),
    "one_style_per_batch": tries(True, style_mode="single"),
    "half_width": tries(0, style_space="lowfreq"),
    "stage": tries("conv2", style_space="feature"),
}
_ELSEWHERE = {
    "style_space": ("vgg",),
    "vgg_encoder": ("another",),
    "vgg_decoder": ("another",),
    "vgg_size": ("another",),
}
"""What tests try of the options of styles, and what has tests of its own."""


class CCST(StyleOptions, FedProx):
    """A preset: FedProx of equal shares, whose μ is 0 by default, with ``prepare: styles``."""

    traits = FedProx.traits.derive(
        name="ccst",
        citation="Chen et al., WACV 2023",
        group="unseen",
        advice="For sites that differ in style; no gain shown in pixels: +0.27 over FedAvg on Rotated MNIST (p = "
        "1.000).",
        sends="a model, and once **styles**",
        settings=SETTINGS,
        includes=("styles",),
        tests=MethodTests(options={"proximal_weight": tries(3.0), **_TRIED}, elsewhere=_ELSEWHERE),
    )

    weighting: Literal["samples", "uniform"] = Field("uniform", description="shares N_k/ΣN, or 1/K (code)")
    proximal_weight: NonNegativeFloat = Field(0.0, description="μ of FedProx (code: 0.01 as an option); 0 = FedAvg")


class StyledFedAvg(StyleOptions, FedAvg):
    """A preset: FedAvg with ``prepare: styles``."""

    traits = FedAvg.traits.derive(
        name="styles",
        citation="Chen et al., WACV 2023",
        group="unseen",
        advice="CCST's style transfer before FedAvg, or before another method: `{name: csac, prepare: styles}`. Not "
        "measured here but as ccst.",
        sends="a model, and once **styles**",
        settings=SETTINGS,
        includes=("styles",),
        tests=MethodTests(
            options=_TRIED, elsewhere=_ELSEWHERE, golden={"method": {"name": "fedavg", "local_epochs": 5}}
        ),
    )
