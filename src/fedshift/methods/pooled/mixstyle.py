"""MixStyle: the styles of feature maps are mixed between samples.

Zhou, Yang, Qiao, Xiang: Domain Generalization with MixStyle. ICLR 2021.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

In training, with probability p in each forward pass, behind each of some stages of the network
    MixStyle(x) = γ_mix · (x − μ(x))/σ(x) + β_mix                                      (5)
    γ_mix = λσ(x) + (1−λ)σ(x̃),  β_mix = λμ(x) + (1−λ)μ(x̃),  λ ~ Beta(α, α)            (3, 4)
where x̃ is the batch in another order, μ and σ are a sample's mean and deviation per channel, held constant.

Where papers and code differ, and what was chosen. Code: ``KaiyangZhou/Dassl.pytorch``, dassl/modeling/ops/mixstyle.py,
MixStyle; its settings are in ``KaiyangZhou/mixstyle-release``, imcls/configs/trainers/mixstyle.
 1. ``partners: random``, the default, is a plain shuffle of a batch of all domains. ``cross_domain`` is the paper's
    "MixStyle w/ domain label" as the code has it: a batch is of two domains, half of each, drawn anew in each step, and
    a half's partners are the other half in a random order (pacs_crossdomain.yaml; there a batch is of 128, and 150
    epochs stand beside 50 with ``random``).
 2. The paper mixes behind residual blocks 1 to 3 for PACS and 1 to 2 for Office-Home. Default here: behind every stage
    that has positions, but the stem and the last stage of the network. For ResNet-18 these are blocks 1 to 3.
 3. Whether a pass is mixed, and λ and the partners, are drawn for each stage anew, as in the code.

Should reproduce: PACS ResNet-18 82.8 on average; with ``cross_domain`` 84.1, 78.8, 96.1, 75.9 (83.7).
"""

from __future__ import annotations

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.methods.base import Samples
from fedshift.methods.composition.mixstyle import Mixing
from fedshift.methods.composition.plug_in import check_images
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.deepall import DeepAll


class MixStyle(Mixing, DeepAll):
    """A preset: `deepall` with the plug-in ``mixstyle``."""

    traits = DeepAll.traits.derive(
        name="mixstyle",
        citation="Zhou et al., ICLR 2021",
        group="pooled",
        advice="For convolutional networks, at no cost worth naming; no gain on PACS images (73.16, where deepall "
        "has 74.57) while it also mixed behind the stem.",
        tasks=WITHOUT_MASKS,
        includes=("mixstyle",),
        tests=MethodTests(
            options={
                "probability": tries(0.0, 1.0),
                "alpha": tries(5.0, probability=1.0),
                "partners": tries("cross_domain", probability=1.0),
                "stages": tries(("conv2",), (), probability=1.0),
            },
        ),
    )

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        check_images(self.name, samples.shape, "vectors have no statistics over positions")
        return ()
