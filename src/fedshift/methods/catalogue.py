"""The list of methods, with facts about each that can be read without importing torch.

A test compares every entry with its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedshift.data.domain import ALL_TASKS, WITHOUT_MASKS


@dataclass(frozen=True)
class Entry:
    """One line of ``fedshift methods``.

    Args:
        place: ``module:Class``.
        scenario: what sites there are, and whether their data are pooled.
        shares: kinds of content that leave a site.
        citation: where it was published.
        settings: named settings beside the paper's.
    """

    place: str
    scenario: str
    shares: tuple[str, ...]
    citation: str
    settings: tuple[str, ...] = ()


_FEDERATED, _POOLED = "fedshift.methods.federated", "fedshift.methods.pooled"
_MODELS = ("weights", "numbers")
_ALL_DATA = ("raw_data", *_MODELS)

ENTRIES: Mapping[str, Entry] = {
    "deepall": Entry(f"{_POOLED}.deepall:DeepAll", "unseen target, pooled", _ALL_DATA, "Li et al., ICCV 2017"),
    "fedavg": Entry(f"{_FEDERATED}.fedavg:FedAvg", "unseen target", _MODELS, "McMahan et al., AISTATS 2017"),
    "recipe": Entry(f"{_FEDERATED}.recipe:Recipe", "unseen target", _MODELS, "fedshift 2026"),
    "fedprox": Entry(f"{_FEDERATED}.fedprox:FedProx", "unseen target", _MODELS, "Li et al., MLSys 2020"),
    "scaffold": Entry(f"{_FEDERATED}.scaffold:Scaffold", "unseen target", _MODELS, "Karimireddy et al., ICML 2020"),
    "fednova": Entry(f"{_FEDERATED}.fednova:FedNova", "unseen target", _MODELS, "Wang et al., NeurIPS 2020"),
    "feddyn": Entry(f"{_FEDERATED}.feddyn:FedDyn", "unseen target", _MODELS, "Acar et al., ICLR 2021"),
    "moon": Entry(f"{_FEDERATED}.moon:Moon", "unseen target", _MODELS, "Li et al., CVPR 2021"),
    "fedbn": Entry(f"{_FEDERATED}.fedbn:FedBN", "unseen target", _MODELS, "Li et al., ICLR 2021"),
    "silobn": Entry(f"{_FEDERATED}.fedbn:SiloBN", "unseen target", _MODELS, "Andreux et al., MICCAI DCL 2020"),
    "fedsam": Entry(f"{_FEDERATED}.fedsam:FedSAM", "unseen target", _MODELS, "Caldarola et al., ECCV 2022", ("asam",)),
    "fediir": Entry(f"{_FEDERATED}.fediir:FedIIR", "unseen target", _MODELS, "Guo et al., ICML 2023"),
    "feddg_ga": Entry(
        f"{_FEDERATED}.feddg_ga:GeneralizationAdjustment",
        "unseen target",
        _MODELS,
        "Zhang et al., CVPR 2023",
        ("released",),
    ),
    "gperxan": Entry(f"{_FEDERATED}.gperxan:GPerXAN", "unseen target", _MODELS, "Le et al., CVPR 2024"),
    "fedomg": Entry(f"{_FEDERATED}.fedomg:FedOMG", "unseen target", _MODELS, "Nguyen et al., ICLR 2025", ("released",)),
    "csac": Entry(
        f"{_FEDERATED}.csac:CSAC", "unseen target", _MODELS, "Yuan et al., IEEE TKDE 2023", ("released", "practical")
    ),
    "elcfs": Entry(
        f"{_FEDERATED}.elcfs:ELCFS",
        "unseen target",
        (*_MODELS, "spectra"),
        "Liu et al., CVPR 2021",
        ("released", "ccst_port", "light"),
    ),
    "fedsr": Entry(f"{_FEDERATED}.fedsr:FedSR", "unseen target", _MODELS, "Nguyen et al., NeurIPS 2022", ("released",)),
    "fedl2r": Entry(
        f"{_FEDERATED}.fedsr:FedL2R", "unseen target", _MODELS, "Nguyen et al., NeurIPS 2022", ("released",)
    ),
    "fedcmi": Entry(
        f"{_FEDERATED}.fedsr:FedCMI", "unseen target", _MODELS, "Nguyen et al., NeurIPS 2022", ("released",)
    ),
    "fedadg": Entry(
        f"{_FEDERATED}.fedadg:FedADG",
        "unseen target",
        _MODELS,
        "Zhang et al., arXiv 2021",
        ("released", "released_vlcs", "least_squares"),
    ),
    "ccst": Entry(
        f"{_FEDERATED}.ccst:CCST", "unseen target", (*_MODELS, "styles"), "Chen et al., WACV 2023", ("vgg", "released")
    ),
    "styles": Entry(
        f"{_FEDERATED}.ccst:StyleTransfer",
        "unseen target",
        (*_MODELS, "styles"),
        "Chen et al., WACV 2023",
        ("vgg", "released"),
    ),
    "copa": Entry(
        f"{_FEDERATED}.copa:COPA",
        "unseen target, or one without labels",
        _MODELS,
        "Wu and Gong, ICCV 2021",
        ("batch_norm",),
    ),
    "jigen": Entry(f"{_POOLED}.jigen:JiGen", "unseen target, pooled", _ALL_DATA, "Carlucci et al., CVPR 2019"),
    "masf": Entry(f"{_POOLED}.masf:MASF", "unseen target, pooled", _ALL_DATA, "Dou et al., NeurIPS 2019"),
    "dger": Entry(f"{_POOLED}.dger:DGER", "unseen target, pooled", _ALL_DATA, "Zhao et al., NeurIPS 2020"),
    "dmg": Entry(f"{_POOLED}.dmg:DMG", "unseen target, pooled", _ALL_DATA, "Chattopadhyay et al., ECCV 2020"),
    "fact": Entry(f"{_POOLED}.fact:FACT", "unseen target, pooled", _ALL_DATA, "Xu et al., CVPR 2021", ("released",)),
    "epi_fcr": Entry(f"{_POOLED}.epi_fcr:EpiFCR", "unseen target, pooled", _ALL_DATA, "Li et al., ICCV 2019"),
    "mixstyle": Entry(f"{_POOLED}.mixstyle:MixStyle", "unseen target, pooled", _ALL_DATA, "Zhou et al., ICLR 2021"),
    "eisnet": Entry(f"{_POOLED}.eisnet:EISNet", "unseen target, pooled", _ALL_DATA, "Wang et al., ECCV 2020"),
    "crossgrad": Entry(
        f"{_POOLED}.crossgrad:CrossGrad", "unseen target, pooled", _ALL_DATA, "Shankar et al., ICLR 2018"
    ),
    "metareg": Entry(f"{_POOLED}.metareg:MetaReg", "unseen target, pooled", _ALL_DATA, "Balaji et al., NeurIPS 2018"),
    "feature_critic": Entry(
        f"{_POOLED}.feature_critic:FeatureCritic", "unseen target, pooled", _ALL_DATA, "Li et al., ICML 2019"
    ),
    "source_only": Entry(
        f"{_POOLED}.source_only:SourceOnly", "unseen target, pooled", _ALL_DATA, "as in Feng et al., ICML 2021"
    ),
    "oracle": Entry(
        f"{_FEDERATED}.oracle:Oracle", "target with labels, an upper bound", _MODELS, "as in Feng et al., ICML 2021"
    ),
    "kd3a": Entry(f"{_FEDERATED}.kd3a:KD3A", "target without labels", _MODELS, "Feng et al., ICML 2021", ("released",)),
    "alone": Entry(
        f"{_FEDERATED}.alone:Alone", "unseen target", _MODELS, "reference row of the win-win gain, fedshift 2026"
    ),
    "shot": Entry(
        f"{_FEDERATED}.shot:SHOT", "target without labels", _MODELS, "Liang et al., ICML 2020", ("digits", "pretrained")
    ),
    "fada": Entry(
        f"{_FEDERATED}.fada:FADA",
        "target without labels",
        (*_MODELS, "features"),
        "Peng et al., ICLR 2020",
        ("every_step",),
    ),
    "mdfnet": Entry(
        f"{_FEDERATED}.mdfnet:MDFNet",
        "labelled and unlabelled sites",
        _MODELS,
        "P²MDCL, anonymous, ICLR 2022 submission",
        ("practical",),
    ),
    "mdan": Entry(f"{_POOLED}.mdan:MDAN", "target without labels, pooled", _ALL_DATA, "Zhao et al., NeurIPS 2018"),
    "m3sda": Entry(
        f"{_POOLED}.m3sda:M3SDA",
        "target without labels, pooled",
        _ALL_DATA,
        "Peng et al., ICCV 2019",
        ("reimplementation",),
    ),
    "dael": Entry(f"{_POOLED}.dael:DAEL", "target without labels, pooled", _ALL_DATA, "Zhou et al., IEEE TIP 2021"),
    "cmss": Entry(f"{_POOLED}.cmss:CMSS", "target without labels, pooled", _ALL_DATA, "Yang et al., ECCV 2020"),
    "dsbn": Entry(f"{_POOLED}.dsbn:DSBN", "target without labels, pooled", _ALL_DATA, "Chang et al., CVPR 2019"),
    "cdan": Entry(
        f"{_POOLED}.cdan:CDAN", "target without labels, pooled", _ALL_DATA, "Long et al., NeurIPS 2018", ("released",)
    ),
    "srdc": Entry(
        f"{_POOLED}.srdc:SRDC", "target without labels, pooled", _ALL_DATA, "Tang et al., CVPR 2020", ("released",)
    ),
}

RULES = ("norm_clipping", "median", "trimmed_mean", "krum", "trust")
"""The rules of robust aggregation."""

SUMS = (
    "fedavg",
    "recipe",
    "fedprox",
    "scaffold",
    "feddyn",
    "moon",
    "fedbn",
    "silobn",
    "fedsam",
    "fediir",
    "gperxan",
    "csac",
    "elcfs",
    "fedsr",
    "fedl2r",
    "fedcmi",
    "fedadg",
    "ccst",
    "styles",
    "mdfnet",
)
"""The methods whose server reads only sums of the sites' models, so that secure aggregation can hide each of them."""

NORMS = ("feddg_ga",)
"""Those whose server reads sums, and numbers of single sites."""

ROBUST: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*SUMS, *NORMS, "copa"), RULES),
    "fedomg": ("norm_clipping", "krum"),
    "kd3a": ("norm_clipping", "krum"),
    "fada": ("norm_clipping", "krum"),
    "mdfnet": ("norm_clipping", "median", "trimmed_mean", "krum"),
}
"""Which rules go with a method; those that are not named average no models of sites, or cannot do it with bad sites."""

SERVER = (*ROBUST, "fednova")
"""The methods that a server's optimiser goes with."""

LOCAL = tuple(
    name for name, entry in ENTRIES.items() if "raw_data" not in entry.shares and name not in ("fada", "fedadg")
)
"""The methods that plug-ins of local training go with."""


_EVERY_TASK = (
    "deepall",
    "fedavg",
    "fedprox",
    "scaffold",
    "fednova",
    "feddyn",
    "fedbn",
    "silobn",
    "fedsam",
    "feddg_ga",
    "fedomg",
    "elcfs",
    "ccst",
    "styles",
    "source_only",
    "oracle",
)
_NO_MASKS = ("moon", "gperxan", "csac", "alone")


def tasks(name: str) -> tuple[str, ...]:
    """The tasks that a method's equations allow; the others of the list are for classification."""
    if name == "recipe":  # its moved images and dropout were only tried with these
        return ("classification", "segmentation")
    return ALL_TASKS if name in _EVERY_TASK else WITHOUT_MASKS if name in _NO_MASKS else ("classification",)


def reads(name: str) -> str:
    """What the server reads of the sites' models: ``sums``, ``norms`` or ``models``."""
    return "sums" if name in SUMS else "norms" if name in NORMS else "models"
