"""FedSAM and FedASAM: sites look for flat minima, whose mean generalizes better.

Caldarola, Caputo, Ciccone: Improving Generalization in Federated Learning by Seeking Flat Minima. ECCV 2022.

Setting: domain generalization, as FedAvg.
Wire: FedAvg's.

At every site, instead of a step down ∇L(θ), a step down the gradient where the loss is worst nearby:
    ε = ρ ∇L(θ)/‖∇L(θ)‖                                           SAM   (Foret et al., ICLR 2021)
    ε = ρ T²∇L(θ)/‖T∇L(θ)‖,  T = |θ| + η                          ASAM  (Kwon et al., ICML 2021)
    θ ← θ − γ ∇L(θ + ε)

Where papers and code differ, and what was chosen
 1. ρ = 0.05 for SAM, ρ = 0.5 and η = 0.2 for ASAM (``setting: asam``). The paper tunes all three for each data set.
 2. The paper averages the server's models over the last quarter of rounds (SWA): ``average: swa`` does that here.
 3. The code (debcaldarola/fedsam, models/clients/minimizers.py, `ASAM.ascent_step`) scales only tensors with "weight"
    in their name, and T of biases is 1 (``scaled_biases: false``); the paper scales all weights. ``setting:
    asam_released`` is ASAM with the code's T.
 4. BatchNorm sees each batch twice, at θ and at θ + ε, and its statistics move in both passes. So would the code's,
    whose passes are both in training mode (models/clients/sam_client.py, `run_epoch`); its own networks have none.

Should reproduce: no published table of this setting is known to us; as ρ goes to 0 it is FedAvg.
"""

from __future__ import annotations

from fedshift.data.domain import ALL_TASKS
from fedshift.methods.composition.regularisers import Sharpness
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries


class FedSAM(Sharpness, FedAvg):
    """A preset: FedAvg with the plug-in ``sharpness``."""

    traits = FedAvg.traits.derive(
        name="fedsam",
        citation="Caldarola et al., ECCV 2022",
        group="rivals",
        advice="For flat minima, at twice the cost, best as setting: asam with average: swa: 51.70 on SURF and "
        "64.58 on PACS features, where FedAvg has 51.06 and 64.32; neither is more than chance.",
        settings={
            "asam": {"adaptive": True, "radius": 0.5},
            "asam_released": {"adaptive": True, "radius": 0.5, "scaled_biases": False},
        },
        tasks=ALL_TASKS,
        includes=("sharpness",),
        tests=MethodTests(
            options={
                "radius": tries(0.0, 0.5),
                "eta": tries(1.0, adaptive=True),
                "scaled_biases": tries(False, adaptive=True),
            },
        ),
    )
