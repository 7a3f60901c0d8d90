"""Oracle: train on the target's own labels.

The upper bound of domain adaptation in KD3A's tables (Feng et al., ICML 2021, Tables 6 and 8).

Setting: domain adaptation, *an upper bound and not a method*: the target's training samples with labels, nothing else.
Wire: the model goes to the target and back each round; no source takes part.

    min_θ  Σ_i CE(f_θ(x_i^T), y_i^T)

Where papers and code differ: no choice is needed. Equal work: as many mini-batches as all sites of the other methods
together, spread evenly over the rounds.

Should reproduce: Digit-5 97.0, Office-Caltech10 99.4, DomainNet 63.0 (averages as printed by KD3A).
"""

from __future__ import annotations

from fedshift.methods.method_tests import MethodTests
from fedshift.methods.pooled.deepall import InOnePlace


class Oracle(InOnePlace):
    """Cross-entropy on the target's labels: the result if every sample had a label."""

    traits = InOnePlace.traits.derive(
        name="oracle",
        citation="as in Feng et al., ICML 2021",
        group="pooled",
        advice="The upper bound, with the target's labels: 84.32 on Amazon Review, 89.99 on PACS features.",
        sends="the target's model",
        target="labelled",
        tests=MethodTests(rates=(0.015, 0.02)),
    )
