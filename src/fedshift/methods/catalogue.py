"""The list of methods, with facts about each that can be read without importing torch.

A test compares every entry with its class, and prints the entry that the class should have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedshift.data.domain import ALL_TASKS, WITHOUT_MASKS, Task

RULES = ("norm_clipping", "median", "trimmed_mean", "krum", "trust")
"""The rules of robust aggregation."""


@dataclass(frozen=True)
class Entry:
    """One line of ``fedshift methods``. `federated` and `pooled` make it with what most such methods have.

    Args:
        place: ``module:Class``.
        scenario: what sites there are, and whether their data are pooled.
        shares: kinds of content that leave a site.
        citation: where it was published.
        settings: named settings beside the paper's.
        reads: what the server reads of the sites' models. Secure aggregation needs ``sums``.
        rules: the rules of robust aggregation that the method takes.
        server: whether it takes a server's optimiser.
        local: whether it takes plug-ins of local training.
        tasks: what its equations can learn.
    """

    place: str
    scenario: str
    shares: tuple[str, ...]
    citation: str
    settings: tuple[str, ...]
    reads: Literal["sums", "norms", "models"]
    rules: tuple[str, ...]
    server: bool
    local: bool
    tasks: tuple[Task, ...]


_MODELS = ("weights", "numbers")
_CLASSES: tuple[Task, ...] = ("classification",)


def federated(
    place: str,
    citation: str,
    settings: tuple[str, ...] = (),
    *,
    scenario: str = "unseen target",
    sends: tuple[str, ...] = (),
    reads: Literal["sums", "norms", "models"] = "sums",
    rules: tuple[str, ...] = RULES,
    server: bool = True,
    local: bool = True,
    tasks: tuple[Task, ...] = _CLASSES,
) -> Entry:
    """An entry with the defaults of a method derived from `FedAvg`.

    Args:
        place: ``file:Class`` in ``methods/federated``.
        sends: kinds of content that leave a site besides a model and numbers.
        citation, settings, scenario, reads, rules, server, local, tasks: see `Entry`.
    """
    module = f"fedshift.methods.federated.{place}"
    return Entry(module, scenario, (*_MODELS, *sends), citation, settings, reads, rules, server, local, tasks)


def pooled(
    place: str,
    citation: str,
    settings: tuple[str, ...] = (),
    *,
    scenario: str = "unseen target",
    local: bool = True,
    tasks: tuple[Task, ...] = _CLASSES,
) -> Entry:
    """An entry of a method that trains on all samples in one place.

    Args:
        place: ``file:Class`` in ``methods/pooled``.
        citation, settings, local, tasks: see `Entry`.
        scenario: what sites there are, without ``, pooled``.
    """
    module, shares = f"fedshift.methods.pooled.{place}", ("raw_data", *_MODELS)
    reads: Literal["models"] = "models"
    return Entry(module, f"{scenario}, pooled", shares, citation, settings, reads, (), False, local, tasks)


_NO_LABELS = "target without labels"
_EACH_MODEL = ("norm_clipping", "krum")
"""The rules that leave single models to the method."""

ENTRIES: Mapping[str, Entry] = {
    "deepall": pooled("deepall:DeepAll", "Li et al., ICCV 2017", tasks=ALL_TASKS),
    "fedavg": federated("fedavg:FedAvg", "McMahan et al., AISTATS 2017", tasks=ALL_TASKS),
    "recipe": federated("recipe:Recipe", "fedshift 2026", tasks=ALL_TASKS),
    "fedprox": federated("fedprox:FedProx", "Li et al., MLSys 2020", tasks=ALL_TASKS),
    "scaffold": federated("scaffold:Scaffold", "Karimireddy et al., ICML 2020", tasks=ALL_TASKS),
    "fednova": federated("fednova:FedNova", "Wang et al., NeurIPS 2020", reads="models", rules=(), tasks=ALL_TASKS),
    "feddyn": federated("feddyn:FedDyn", "Acar et al., ICLR 2021", ("released",), tasks=ALL_TASKS),
    "moon": federated("moon:Moon", "Li et al., CVPR 2021", tasks=WITHOUT_MASKS),
    "fedbn": federated("fedbn:FedBN", "Li et al., ICLR 2021", tasks=ALL_TASKS),
    "silobn": federated("fedbn:SiloBN", "Andreux et al., MICCAI DCL 2020", tasks=ALL_TASKS),
    "fedsam": federated("fedsam:FedSAM", "Caldarola et al., ECCV 2022", ("asam", "asam_released"), tasks=ALL_TASKS),
    "fediir": federated("fediir:FedIIR", "Guo et al., ICML 2023", ("released",), tasks=WITHOUT_MASKS),
    "feddg_ga": federated(
        "feddg_ga:GeneralizationAdjustment", "Zhang et al., CVPR 2023", ("released",), reads="norms", tasks=ALL_TASKS
    ),
    "gperxan": federated("gperxan:GPerXAN", "Le et al., CVPR 2024", tasks=WITHOUT_MASKS),
    "fedomg": federated(
        "fedomg:FedOMG", "Nguyen et al., ICLR 2025", ("released",), reads="models", rules=_EACH_MODEL, tasks=ALL_TASKS
    ),
    "csac": federated("csac:CSAC", "Yuan et al., IEEE TKDE 2023", ("released", "practical"), tasks=WITHOUT_MASKS),
    "elcfs": federated(
        "elcfs:ELCFS", "Liu et al., CVPR 2021", ("released", "ccst_port", "light"), sends=("spectra",), tasks=ALL_TASKS
    ),
    "fedsr": federated("fedsr:FedSR", "Nguyen et al., NeurIPS 2022", ("released",)),
    "fedl2r": federated("fedsr:FedL2R", "Nguyen et al., NeurIPS 2022", ("released",), tasks=WITHOUT_MASKS),
    "fedcmi": federated("fedsr:FedCMI", "Nguyen et al., NeurIPS 2022", ("released",)),
    "fedadg": federated(
        "fedadg:FedADG", "Zhang et al., arXiv 2021", ("released", "released_vlcs", "least_squares"), local=False
    ),
    "ccst": federated("ccst:CCST", "Chen et al., WACV 2023", ("vgg", "released"), sends=("styles",), tasks=ALL_TASKS),
    "styles": federated(
        "ccst:StyleTransfer", "Chen et al., WACV 2023", ("vgg", "released"), sends=("styles",), tasks=ALL_TASKS
    ),
    "copa": federated(
        "copa:COPA",
        "Wu and Gong, ICCV 2021",
        ("batch_norm",),
        scenario="unseen target, or one without labels",
        reads="models",
        tasks=WITHOUT_MASKS,
    ),
    "jigen": pooled("jigen:JiGen", "Carlucci et al., CVPR 2019", tasks=WITHOUT_MASKS),
    "masf": pooled("masf:MASF", "Dou et al., NeurIPS 2019", ("released",)),
    "dger": pooled("dger:DGER", "Zhao et al., NeurIPS 2020"),
    "dmg": pooled("dmg:DMG", "Chattopadhyay et al., ECCV 2020", ("released",), tasks=WITHOUT_MASKS),
    "fact": pooled("fact:FACT", "Xu et al., CVPR 2021", ("released",)),
    "epi_fcr": pooled("epi_fcr:EpiFCR", "Li et al., ICCV 2019", ("released",), tasks=WITHOUT_MASKS),
    "mixstyle": pooled("mixstyle:MixStyle", "Zhou et al., ICLR 2021", tasks=WITHOUT_MASKS),
    "eisnet": pooled("eisnet:EISNet", "Wang et al., ECCV 2020"),
    "crossgrad": pooled("crossgrad:CrossGrad", "Shankar et al., ICLR 2018", ("original",), tasks=WITHOUT_MASKS),
    "metareg": pooled("metareg:MetaReg", "Balaji et al., NeurIPS 2018", local=False, tasks=WITHOUT_MASKS),
    "feature_critic": pooled(
        "feature_critic:FeatureCritic", "Li et al., ICML 2019", ("released",), tasks=WITHOUT_MASKS
    ),
    "source_only": pooled("source_only:SourceOnly", "as in Feng et al., ICML 2021", tasks=ALL_TASKS),
    "oracle": federated(
        "oracle:Oracle",
        "as in Feng et al., ICML 2021",
        scenario="target with labels, an upper bound",
        reads="models",
        rules=(),
        server=False,
        tasks=ALL_TASKS,
    ),
    "kd3a": federated(
        "kd3a:KD3A", "Feng et al., ICML 2021", ("released",), scenario=_NO_LABELS, reads="models", rules=_EACH_MODEL
    ),
    "alone": federated(
        "alone:Alone",
        "reference row of the win-win gain, fedshift 2026",
        reads="models",
        rules=(),
        server=False,
        tasks=WITHOUT_MASKS,
    ),
    "recipe_unlabelled": federated(
        "recipe_unlabelled:RecipeUnlabelled", "fedshift 2026", scenario=_NO_LABELS, reads="models"
    ),
    "shot": federated(
        "shot:SHOT",
        "Liang et al., ICML 2020",
        ("digits", "pretrained"),
        scenario=_NO_LABELS,
        reads="models",
        rules=(),
        server=False,
    ),
    "fada": federated(
        "fada:FADA",
        "Peng et al., ICLR 2020",
        ("every_step",),
        scenario=_NO_LABELS,
        sends=("features",),
        reads="models",
        rules=_EACH_MODEL,
        local=False,
        tasks=WITHOUT_MASKS,
    ),
    "mdfnet": federated(
        "mdfnet:MDFNet",
        "P²MDCL, anonymous, ICLR 2022 submission",
        ("practical",),
        scenario="labelled and unlabelled sites",
        rules=("norm_clipping", "median", "trimmed_mean", "krum"),
    ),
    "mdan": pooled("mdan:MDAN", "Zhao et al., NeurIPS 2018", scenario=_NO_LABELS, tasks=WITHOUT_MASKS),
    "m3sda": pooled("m3sda:M3SDA", "Peng et al., ICCV 2019", ("reimplementation",), scenario=_NO_LABELS),
    "dael": pooled("dael:DAEL", "Zhou et al., IEEE TIP 2021", scenario=_NO_LABELS),
    "cmss": pooled("cmss:CMSS", "Yang et al., ECCV 2020", scenario=_NO_LABELS, tasks=WITHOUT_MASKS),
    "dsbn": pooled("dsbn:DSBN", "Chang et al., CVPR 2019", ("released",), scenario=_NO_LABELS, local=False),
    "cdan": pooled("cdan:CDAN", "Long et al., NeurIPS 2018", ("released",), scenario=_NO_LABELS),
    "srdc": pooled("srdc:SRDC", "Tang et al., CVPR 2020", ("released",), scenario=_NO_LABELS),
}

NEEDS_CLASSES: Mapping[str, str] = {
    "fedsr": "its codes are drawn towards a reference of their class",
    "fedcmi": "its codes are drawn towards a reference of their class",
    "fedadg": "its generator makes features of a given class",
    "masf": "it compares which classes are confused with each other",
    "dger": "it weighs each class by how rare it is, and makes classifiers unsure among classes",
    "fact": "its student learns the teacher's probabilities of classes",
    "eisnet": "its triplets are of one class or of two",
    "kd3a": "its teachers vote on the class of a sample",
    "recipe_unlabelled": "the target learns from guessed classes",
    "shot": "the target learns from guessed classes",
    "mdfnet": "unlabelled sites learn from guessed classes",
    "m3sda": "two classifiers are trained to differ in their probabilities of classes",
    "dael": "experts learn from each other's probabilities and from guessed classes",
    "dsbn": "it aligns the mean features of each class, and learns from guessed classes",
    "cdan": "its domain classifier reads the probabilities of classes",
    "srdc": "it clusters samples by class",
}
"""Why the equations of a method for classification alone need classes."""

SUMS = tuple(name for name, entry in ENTRIES.items() if entry.reads == "sums")
"""The methods whose server reads only sums of the sites' models, so that secure aggregation can hide each of them."""

ROUTED: Mapping[str, str] = {
    "kd3a": "the target's model",
    "fada": "the target's model",
    "shot": "no model",
    "copa": "feature extractors",
}
"""Those whose server hands models on or keeps them unread, so that they can be sealed; and what it reads then."""
