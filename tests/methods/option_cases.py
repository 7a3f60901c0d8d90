"""Another value for every option of every method, and a small set-up in which it must matter.

Those of methods on pooled data are in `pooled_option_cases`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Try:
    """Values of an option, each of which must give another result than the default and than each other.

    values: what is tried. beside: other options that the default has too. where: the set-up, see `test_options`.
    """

    values: tuple[Any, ...]
    beside: dict[str, Any] = field(default_factory=dict)
    where: str = ""


def of(*values: Any, where: str = "", **beside: Any) -> tuple[Try, ...]:
    return (Try(values, beside, where),)


BASE: dict[str, dict[str, Any]] = {
    "csac": {"acquisition_steps": 3, "calibration_steps": 2}, "elcfs": {"window": 0.2, "inner_rate": 0.5},
    "fedsr": {"steps_per_round": 4, "cmi_weight": 0.1}, "fedl2r": {"steps_per_round": 4, "l2r_weight": 0.1},
    "fedcmi": {"steps_per_round": 4, "cmi_weight": 0.1}, "fedadg": {"task_epochs": 1, "adversarial_epochs": 1},
    "copa": {"local_epochs": 2}, "kd3a": {"gate_start": 0.6, "gate_end": 0.9}, "shot": {"bottleneck": 16},
    "fada": {"steps_per_round": 3, "identifier_width": 5}, "m3sda": {"generator_steps": 2},
    "cdan": {"width": 16, "projected": 32},
}  # fmt: skip
"""What keeps a run short, or makes a method's parts matter in one."""

WHERE: dict[str, str] = {
    "fedadg": "fast", "kd3a": "kd3a", "mdfnet": "normed", "dsbn": "normed", "srdc": "mlp", "mdan": "mlp", "cmss": "mlp",
    "cdan": "mlp", "m3sda": "mlp", "dael": "fast", "fedbn": "normed", "silobn": "normed", "gperxan": "normed images",
    "recipe_unlabelled": "normed",
}  # fmt: skip
"""A method's usual set-up; `images` where it is not named."""

_LOCAL = {
    "local_epochs": of(2),
    "steps_per_round": of(2),
    "fine_tune": of({"epochs": 1}, {"steps": 3, "lr": 0.5}, where="finished"),
}
_FEDERATED = {**_LOCAL, "weighting": of("uniform")}
_TRAINED = {name: tries for name, tries in _FEDERATED.items() if name != "fine_tune"}
_CODES = {
    "steps_per_round": of(2),
    "local_epochs": of(2, steps_per_round=None),
    "independent_batches": of(True),
    "weighting": of("samples"),
    "representation": of(3),
}
_PENALISED = {
    "penalty_weight": of(0.0, 3.0),
    "penalty_start": of(1),
    "weight_before": of(3.0, penalty_start=1),
    "rescaled": of(True, penalty_weight=3.0),
}
_LENGTH = {"l2r_weight": of(0.3, 0.0), "norm": of("norm")}
_CLASSES = {
    "cmi_weight": of(0.3, 0.0), "share_reference": of(False), "learned_factor": of(True), "samples": of(3),
}  # fmt: skip
_STYLES = {
    "style_space": (Try(("lowfreq", "feature")), Try(("lab",), where="colour")),
    "style_mode": of("single"),
    "level": of(1, 2),
    "bank_size": of(4, style_mode="single"),
    "one_style_per_batch": of(True, style_mode="single"),
    "unbiased_content": of(True),
    "half_width": of(0, style_space="lowfreq"),
    "stage": of("conv2", style_space="feature"),
}

FEDERATED_METHODS: dict[str, dict[str, tuple[Try, ...]]] = {
    "zero_shot": {},
    "linear_probe": {**_FEDERATED, "start_at": of("texts")},
    "promptfl": {**_FEDERATED, "context": of(2), "per_class": of(True)},
    "fedclip": {**_FEDERATED, "loss": of("classes")},
    "alone": {"local_epochs": of(2)},
    "fedavg": _FEDERATED,
    "recipe": {
        **_FEDERATED,
        "weighting": of("samples"),
        "augmentation": of("none", {"shear": 0.2}),
        "momentum": of(0.0, 0.5),
        "dropout": of(0.0, 0.3, where="mlp"),
    },
    "fedprox": {**_FEDERATED, "proximal_weight": of(0.0, 3.0)},
    "scaffold": {**_FEDERATED, "weighting": of("samples")},
    "fednova": {**_LOCAL, "proximal_weight": of(3.0), "effective_steps": of("steps", proximal_weight=3.0)},
    "feddyn": {**_LOCAL, "alpha": of(1.0), "alpha_by_samples": of(True), "clip_norm": of(0.1)},
    "fedlc": {**_FEDERATED, "calibration": of(0.0, 4.0)},
    "fedntd": {**_FEDERATED, "distillation_weight": of(0.0, 5.0), "temperature": of(3.0)},
    "feddc": {**_FEDERATED, "weighting": of("samples"), "alpha": of(1.0)},
    "moon": {**_FEDERATED, "contrastive_weight": of(0.0, 5.0), "temperature": of(0.1), "projection": of(4)},
    "fedbn": {**_FEDERATED, "unseen": of("target")},
    "silobn": {**_FEDERATED, "unseen": of("mean")},
    "fedsam": {
        **_FEDERATED,
        "radius": of(0.0, 0.5),
        "adaptive": of(True),
        "eta": of(1.0, adaptive=True),
        "scaled_biases": of(False, adaptive=True),
    },
    "fediir": {
        **_FEDERATED,
        "penalty_weight": of(0.0, 1.0),
        "ema": of(0.0),
        "mean_from_zero": of(True),
        "gradient_weighting": of("batches"),
    },
    "afl": {**_LOCAL, "weights_rate": of(0.0, 1.0), "rule": of("exponential")},
    "fedvrex": {**_LOCAL, **_PENALISED},
    "fedirm": {
        **_FEDERATED,
        "weighting": of("samples"),
        **_PENALISED,
        "estimate": of("halves", penalty_weight=3.0),
    },
    "fedfish": {**_LOCAL, "meta_rate": of(0.1, 1.0), "order": of("fixed")},
    "fedccrl": {
        **_LOCAL,
        "shared": of(1.0),
        "contrast_weight": of(0.0, 3.0),
        "agreement_weight": of(0.0, 9.0),
        "temperature": of(1.0, contrast_weight=3.0),
        "alpha": of(5.0),
        "augmix": of(False),
    },
    "stablefdg": {
        **_FEDERATED,
        "sharing": of(0.0, 1.0),
        "exploring": of(0.0, 1.0),
        "exploration": of(0.0, exploring=1.0),
        "added": of(0.0, 2.5, exploring=1.0),
        "mixing": of(5.0, exploring=1.0),
        "attention_size": of(2),
    },
    "mcgdm": {
        **_FEDERATED,
        "intra_weight": of(0.0, 9.0),
        "inter_weight": of(0.0, 9.0),
        "view": of({"brightness": 0.3}),
    },
    "mcsad": {
        **_FEDERATED,
        "style_rate": of(0.0, 30.0),
        "contrast_weight": of(0.0, 3.0),
        "agreement_weight": of(0.0, 9.0),
        "temperature": of(5.0, agreement_weight=9.0),
        "through": of(False),
    },
    "pardon": {
        **_FEDERATED,
        "style_space": of("pixel"),
        "stage": of("conv2"),
        "style_images": of(2),
        "strength": of(0.0, 1.0),
        "contrast_weight": of(0.0, 9.0),
        "margin": of(0.05, 2.0),
        "norm_weight": of(0.0, 2.0),
    },
    "fedgma": {**_FEDERATED, "agreement": of(0.0, 0.6)},
    "feddg_ga": {**_LOCAL, "step": of(0.0, 0.5), "centred": of(False), "shared_step": of(True), "late_step": of(True)},
    "gperxan": {**_FEDERATED, "guide_weight": of(0.0, 3.0), "unseen": of("target")},
    "fedper": _FEDERATED,
    "fedrep": {**_FEDERATED, "head_epochs": of(1, 3)},
    "fedbabu": {**_FEDERATED, "fine_tune": of(None, {"steps": 2}, where="finished")},
    "ditto": {
        **_FEDERATED,
        "proximal_weight": of(0.0, 3.0, where="finished"),
        "personal_epochs": of(2, where="finished"),
    },
    "fedala": {
        **_FEDERATED,
        "shares_rate": of(0.0, 0.2, where="three rounds"),
        "mixed_tensors": of(1, 4, where="three rounds"),
        "sampled": of(0.3, where="three rounds"),
    },
    "apfl": {**_FEDERATED, "share": of(0.2, 1.0, where="finished"), "adaptive": of(False, where="three rounds")},
    "pfedme": {**_FEDERATED, "proximal_weight": of(0.0, 5.0), "inner_steps": of(2), "inner_rate": of(0.01)},
    "per_fedavg": {
        **_FEDERATED,
        "fine_tune": of(None, {"steps": 2}, where="finished"),
        "order": of("hessian_free"),
        "difference": of(0.5, order="hessian_free"),
    },
    "fedrod": {**_FEDERATED, "balance": of(0.0, 0.5)},
    "fedproto": {
        "local_epochs": of(2),
        "prototype_weight": of(0.0, 5.0, where="three rounds"),
        "smallest_class": of(1, 4),
        "weighting": of("uniform"),
    },
    "fedomg": {**_LOCAL, "kappa": of(0.0, 0.9), "server_rate": of(0.5), "rescaled": of(True), "shares_twice": of(True)},
    "csac": {
        "acquisition_epochs": of(2, 3, acquisition_steps=None, acquisition_epochs=1),
        "acquisition_steps": of(2),
        "calibration_epochs": of(2, 3, calibration_steps=None, calibration_epochs=1),
        "calibration_steps": of(1),
        "label_smoothing": of(0.0, 0.4),
        "aggregation": of("similarity", "average"),
        "distance": of("l1", "cosine"),
        "distance_power": of(2.0),
        "granularity": of("module"),
        "alignment_weight": of(0.0, 3.0),
        "alignment": of("same_layer"),
        "attention": of("position", "channel", "none"),
        "uniform_attention": of("per_row", attention="none"),
        "scale": of(True),
        "query_key": of(True),
        "measure": of("mse"),
        "mmd_estimator": of("biased"),
        "logit_mmd": of(True),
        "cross_entropy": of(False),
        "frozen": of("fused"),
        "projection_channels": of(5),
        "projection_size": of("smallest", stages=("conv2", "conv1")),
        "projection": of("pooled"),
        "reset_projection_each_round": of(True),
        "stages": of(("conv2",), ("conv2", "hidden"), ()),
    },
    "elcfs": {
        "local_epochs": of(2),
        "window": of(0.0, 0.3),
        "rates": of("released", "ccst", "demo"),
        "copies": of("one"),
        "bank_share": of(0.125),
        "inner_rate": of(0.1, 0.0),
        "clip": of(1e-3),
        "meta_gradient": of("first", "none"),
        "boundary_weight": of(0.0, 1.0, where="masks"),
        "boundary": of("released", where="masks"),
        "temperature": of(0.5, where="masks"),
        "weighting": of("rounded", "uniform"),
    },
    "fedsr": {**_CODES, **_LENGTH, **_CLASSES},
    "fedl2r": {**_CODES, **_LENGTH},
    "fedcmi": {**_CODES, **_CLASSES},
    "fedadg": {
        "task_epochs": of(0, 2),
        "adversarial_epochs": of(2),
        "adversarial_weight": of(0.0, 0.6),
        "label_smoothing": of(0.3),
        "generator": of("towards_features", "frozen"),
        "discriminator_loss": of("least_squares"),
        "trainable_projection": of(True),
        "condition": of("before"),
        "condition_value": of(0.3),
        "adversary_rate": of(0.1),
        "warm_up": of(9),
        "noise": of(5),
        "generator_hidden": of(4),
        "projection": of(3),
        "keep": of("last", where="held out", adversarial_epochs=3),
        "weighting": of("samples"),
    },
    "ccst": {**_STYLES, **_FEDERATED, "weighting": of("samples"), "proximal_weight": of(3.0)},
    "styles": {**_STYLES, **_FEDERATED},
    "copa": {
        **_TRAINED,
        "local_epochs": of(1, 3),
        "hybrid_normalisation": of(False, where="normed images"),
        "adaptation": of(True, threshold=0.2),
        "threshold": of(0.2, adaptation=True),
        "strong": of({"brightness": 0.1}, adaptation=True, threshold=0.2),
    },
    "kd3a": {
        "aggregations_per_epoch": of(2.0, 0.5),
        "gate_start": of(0.8),
        "gate_end": of(0.6),
        "vote": of("top1", "mean"),
        "labels": of("hard"),
        "focus": of("shapley", "samples", "h_divergence", "information_gain"),
        "focus_permutations": of(1, focus="shapley"),
        "target_share": of("confident"),
        "share_momentum": of(0.7),
        "batch_norm": (Try(("linear", "off")), Try(("loss",), {"batch_norm_weight": 0.01})),  # at weight 1 it diverges
        "batch_norm_weight": of(0.02, batch_norm="loss", batch_norm_weight=0.01),
        "teacher_statistics": of("batch"),
        "private_classifier": of(True),
        "mixup": of(0.0, 2.0),
    },
    "recipe_unlabelled": {
        **_TRAINED,
        "begin": of(0.0, 0.8),
        "information_weight": of(0.0, 0.3),
        "pseudo_label_weight": of(0.0, 1.0),
        "trust": of(0.0, where="fast", begin=0.0),
    },
    "shot": {
        "source_epochs": of(2),
        "target_epochs": of(2),
        "bottleneck": of(8),
        "label_smoothing": of(0.0, 0.4),
        "pseudo_label_weight": of(0.0, 1.0),
        "backbone_rate": of(0.0, 0.1),
        "decay": of(False),
    },
    "fada": {
        "steps_per_round": of(2),
        "variant": of("I", "II"),
        "adversarial_weight": of(0.0, 0.5),
        "disentangling_weight": of(0.0, 1.0),
        "identifier_width": of(7),
        "identifier_rate": of(0.1),
        "gain": of("absolute"),
    },
    "mdfnet": {
        "local_epochs": of(2),
        "mask": of("inputs"),
        "evaluation": of("threshold"),
        "interaction": of("features"),
        "interaction_weight": of(0.0, 5.0),
        "reconstruction": of("sum"),
        "reconstruction_weight": of(0.0, 5.0),
        "decoder": of(3),
        "self_supervision": of(False),
        "threshold": of(0.9),
        "entropy_weight": of(0.0, 5.0),
        "r": of("round"),
        "rho": of(1.0),
        "decay": of(False, "unlabelled"),
        "draw": of(False),
        "keep_momentum": of(False, where="normed with momentum"),
        "readiness": of(0.9, 0.01),
        "lend": of(0.25, 0.5),
    },
}

ELSEWHERE: dict[tuple[str, str], tuple[Any, ...]] = {
    ("csac", "mmd_constant"): (True,),  # in the loss alone
    ("csac", "projection"): ("strided",),  # what `released` means for small maps: test_csac_alignment
    ("mdfnet", "interaction"): ("literal",),  # without a lower bound: test_mdfnet has its value, training diverges
    ("recipe_unlabelled", "pseudo_labels"): (
        "neighbours",
        "centroids",
    ),  # the tiny target's are those of centroids: its own test
    ("recipe_unlabelled", "fine_tune"): (),  # refused: test_fine_tune
    ("recipe", "averaged"): (0.0,),  # no part of a round: test_recipe
    ("recipe", "templates"): (None,),  # the same
    ("recipe", "colour_augmentation"): ("none",),  # the tiny images have one channel: the same
    ("recipe", "colour_momentum"): (0.0,),  # the same
    ("dsbn", "mixed"): ("logits",),  # the tiny teacher is unsure, so both say the same classes: test_dsbn
    ("cdan", "projection"): ("outer",),  # what `auto` means for small networks
    **{(name, "style_space"): ("vgg",) for name in ("ccst", "styles")},
    ("pardon", "style_space"): ("lab", "vgg"),  # the tiny images have one channel: test_pardon
    **{
        (name, option): ("another",)
        for name in ("ccst", "styles", "pardon")
        for option in ("vgg_encoder", "vgg_decoder", "vgg_size")
    },
}
"""Options and values that have tests of their own, in `test_options` but for those that name another place."""
