"""What each method is for, when it pays, and where that was measured; the pages below ``benchmarks/`` have the tables.

p is of the one test for every row (`fedshift.evaluation.significance`), with targets as clusters and corrected for the
lines of its table; "p here" of these targets only. benchmarks/claims.yaml has every p, and tests compute all numbers
again from the committed results.
"""

from __future__ import annotations

from collections.abc import Mapping

_UNMEASURED = "Not measured here"

GROUPS: Mapping[str, Mapping[str, str]] = {
    "unseen site: the model is for a site that took no part": {
        "fedavg": "Begin here: the cheapest, and the row that others have to beat.",
        "recipe": "For images: 98.19 on Rotated MNIST, where pooled training on the same moved images has 99.43, and "
        "fedavg on images as they are, in a fifth of the exchanges, 90.32. On vectors and colour images it reads the "
        "new site's unlabelled samples, and no gain over FedAvg is shown over targets: +6.81 on PACS images (p = "
        "0.067), +5.46 on their features (p = 0.366), +5.01 on SURF (p = 0.820), +0.20 on heart disease (p = 1.000).",
        "csac": "Take setting: practical, as good and cheaper. No gain over FedAvg is shown: +1.17 on Rotated MNIST, "
        "where it was chosen (p = 0.584), +0.68 on PACS features (p = 1.000); the paper's has +0.54 (p = 0.629) and "
        "+0.73 (p = 1.000). Train long: −1.11 at 40 epochs. Give it a robust rule where a site may be bad.",
        "elcfs": "For images that differ in colour and contrast; no gain over FedAvg is shown over targets: +14.05 "
        "Dice on generated fundus images, nearly all at one camera (p = 0.305), +0.46 on Rotated MNIST (p = 1.000). "
        "Spectra of single images leave the sites.",
        "copa": "No gain shown: +0.99 over FedAvg on Rotated MNIST (p = 1.000). Each site's classifier reaches the "
        "others.",
        "fedl2r": "FedSR's simpler half, and as good; no gain shown: +0.89 over FedAvg on Rotated MNIST (p = 1.000).",
        "fedsr": "No gain shown: +0.88 over FedAvg on Rotated MNIST (p = 1.000), for a larger model; try fedl2r first.",
        "fedcmi": "FedSR's other half; no gain shown: +0.57 over FedAvg on Rotated MNIST (p = 1.000).",
        "ccst": "For sites that differ in style; no gain shown in pixels: +0.27 over FedAvg on Rotated MNIST (p = "
        "1.000).",
        "styles": f"CCST's style transfer around another method. {_UNMEASURED} but as ccst.",
        "fedadg": "No gain shown: +0.14 over FedAvg on Rotated MNIST (p = 1.000); it also sends a generator.",
    },
    "unlabelled site: the model is for one site that has no labels": {
        "recipe_unlabelled": "For image features: 74.61 on PACS features (FedAvg 61.31, "
        "pooled DSBN 71.16) and 57.24 on SURF (FedAvg 50.43, pooled DSBN 60.22); in "
        "win-win 62.34 at the unlabelled sites of PACS and 49.20 of SURF (SHOT 57.74 and 44.46), and the labelled "
        "sites lose nothing. Five digits learned from the start: 75.91, FedAvg 73.42; one run of 15 fell far below.",
        "kd3a": "For networks with BatchNorm, as released: 69.85 on PACS features, +8.54 over FedAvg (p = 0.375; at "
        "these targets p here = 0.040); in the paper's setting 57.47, and 0.34 below FedAvg on Amazon Review (p = "
        "1.000).",
        "shot": "For good image features: 69.15 on PACS features, +7.84 over FedAvg (p = 0.652); −2.74 on Amazon "
        "Review (p = 0.113).",
        "fada": "For text and histograms, if features of single samples may leave; no gain over FedAvg is shown: "
        "+0.57 on Amazon Review (p = 1.000), 55.06 against 50.43 on SURF; 60.74 against 61.31 on PACS features.",
    },
    "both: sites with labels and sites without, both measured": {
        "mdfnet": "Take setting: practical: 61.49 on PACS features where Source-only has 56.84, and the labelled "
        "sites lose 0.12; as the paper sets it they lose 2.73.",
        "alone": "What each labelled site reaches by itself; gains are measured from it.",
    },
    "pooled references: all samples in one place, not private": {
        "deepall": "What pooling is worth: +2.95 over FedAvg on Rotated MNIST (p = 0.314; at these angles p here < "
        "0.001), +0.87 on PACS features (p = 1.000).",
        "jigen": "For images whose parts say the class; no gain shown: 75.72 on PACS images, +1.15 over deepall (p = "
        "1.000).",
        "mixstyle": "For convolutional networks, at no cost worth naming; no gain on PACS images (73.16, where deepall "
        "has 74.57).",
        "fact": "For images that differ in colour and texture; no gain shown: 75.26 on PACS images, +0.69 over "
        "deepall (p = 1.000).",
        "eisnet": "JiGen with metric learning; not measured since its triplets are those of its authors' code.",
        "crossgrad": "For domains that change gradually, such as angles; no gain shown: 95.16 on Rotated MNIST and "
        "53.21 on SURF, where deepall has 95.15 and 53.19.",
        "dmg": "For domains that need some features of their own; no gain on SURF (53.50, where deepall has 53.19).",
        "dger": "For domains whose classes look alike after alignment: 56.31 on SURF, where deepall has 53.19 and by "
        "equal mini-batches alone 55.94; 94.61 on Rotated MNIST, below deepall (95.15).",
        "epi_fcr": "For three domains or more, at several times the cost; no gain shown: 55.24 on SURF, where deepall "
        "with its equal mini-batches has 55.94.",
        "masf": "For three domains or more, with small steps; no gain shown: 54.65 on SURF, where deepall with its "
        "equal mini-batches has 55.94.",
        "metareg": "For a classifier that overfits on fixed features: 56.69 on SURF, where deepall has 53.19 and by "
        "equal mini-batches alone 55.94; 93.86 on Rotated MNIST, below deepall (95.15).",
        "feature_critic": "For fine-tuning a trained model: 56.39 on SURF, where deepall has 53.19 and by equal "
        "mini-batches alone 55.94; 94.45 on Rotated MNIST, below deepall (95.15).",
        "source_only": "No adaptation: 82.34 on Amazon Review and 60.68 on PACS features, where FedAvg has 82.61 and "
        "61.31.",
        "oracle": "The upper bound, with the target's labels: 84.32 on Amazon Review, 89.99 on PACS features.",
        "mdan": "A steady choice: 82.79 on Amazon Review and 62.99 on PACS features, where FedAvg has 82.61 and 61.31.",
        "m3sda": "For image features: 66.76 on PACS features where FedAvg has 61.31; no gain on Amazon Review (82.30).",
        "dael": "For images: 66.37 on PACS features, +5.05 over FedAvg (p = 0.375); vectors have no strong view: "
        "−1.77 on Amazon Review (p = 1.000).",
        "cmss": "Needs training.clip_norm; 82.53 on Amazon Review, 56.58 on PACS features where FedAvg has 61.31.",
        "dsbn": "For networks with BatchNorm: 71.16 on PACS features where FedAvg has 61.31, 60.22 against 50.43 on "
        "SURF.",
        "cdan": "For image features: 66.24 in win-win on PACS features, +9.39 over Source-only (p here = 0.025); it "
        "loses 5.83 on SURF (p here = 0.004).",
        "srdc": "59.00 in win-win on PACS features, +2.15 over Source-only (p here = 0.160); it loses 6.60 on SURF (p "
        "here = 0.004).",
    },
    "rivals: other federated methods, for comparison": {
        "fedprox": "For sites that drift apart; −0.49 to FedAvg on Rotated MNIST (p = 0.956).",
        "scaffold": "For sites of very different size, at twice the traffic: 56.80 on SURF, +5.74 over FedAvg (p = "
        "1.000; at these targets p here = 0.008), where FedAvg by equal shares has 53.69; level with equal shares on "
        "PACS features.",
        "fednova": "For sites that make different numbers of steps: 53.25 on SURF, where FedAvg has 51.06.",
        "feddyn": "For many rounds at sites that differ; no gain shown: +1.60 over FedAvg on SURF (p = 1.000), +1.57 "
        "on PACS features (p = 1.000).",
        "moon": "For sites whose features drift apart. With its default weight −2.56 to FedAvg on SURF (p = 1.000) "
        "and −2.31 on PACS features (p = 0.759).",
        "fedbn": "For networks with BatchNorm, and for the sites that take part; at an unseen site 50.42 on SURF, "
        "where FedAvg has 51.06.",
        "silobn": "As fedbn, but a new site measures its own samples; no gain shown: +2.66 over FedAvg on PACS "
        "features (p = 1.000), −0.37 on SURF.",
        "fedsam": "For flat minima, at twice the cost, best as setting: asam with average: swa: 51.70 on SURF and "
        "64.58 on PACS features, where FedAvg has 51.06 and 64.32; neither is more than chance.",
        "fediir": "For classifiers that should agree; the classifier's gradient leaves the sites. No gain: 50.67 on "
        "SURF, where FedAvg has 51.06.",
        "feddg_ga": "For sites of which some are harder: 53.96 on SURF, as FedAvg by equal shares (53.69), with which "
        "it begins.",
        "gperxan": "For convolutional networks with BatchNorm at sites that differ in style; on vectors no gain "
        "(50.45 on SURF, where FedAvg has 51.06).",
        "fedomg": "For sites of very different size that all can be trusted: 60.19 on SURF, the best row, but −4.28 "
        "at amazon, so that no gain over targets is shown (+9.14 over FedAvg, p = 1.000). It follows the site with "
        "the shortest update. Level with equal shares on PACS features.",
    },
}
"""Title of the group → name of the method → advice."""
