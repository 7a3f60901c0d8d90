"""Source-only: pool the data of all sources, train one model, and use it at the target without adaptation.

The lower bound of domain adaptation in KD3A's tables (Feng et al., ICML 2021, Tables 1 and 6 to 9).

Setting: domain adaptation, *not private*: the data of all sources are in one place; the target takes no part.
Wire: as DeepAll, every training sample of a source once.

    min_θ  Σ_k Σ_i CE(f_θ(x_i^k), y_i^k)

Where papers and code differ: no choice is needed; it is DeepAll under its name in this setting. Equal work: as many
mini-batches as all sites of the other methods together, the target's included.

Should reproduce: Amazon Review average 74.6 as printed (the released code gave 81.8 on these arrays).
"""

from __future__ import annotations

from fedshift.methods.method_tests import MethodTests
from fedshift.methods.pooled.deepall import DeepAll


class SourceOnly(DeepAll):
    """Cross-entropy on the pooled data of all sources; nothing is adapted."""

    traits = DeepAll.traits.derive(
        name="source_only",
        citation="as in Feng et al., ICML 2021",
        group="pooled",
        advice="No adaptation: 82.34 on Amazon Review and 60.68 on PACS features, where FedAvg has 82.61 and 61.31.",
        sends="**all training samples** of the sources",
        tests=MethodTests(rates=(0.02, 0.005)),
    )
