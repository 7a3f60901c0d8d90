"""The settings of local training that every method of an experiment shares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from torch import Tensor, nn

from fedshift.data.site_data import class_chances
from fedshift.data.transforms import Augmentation, NamedAugmentation
from fedshift.errors import UserError, nearest
from fedshift.extras import compiler_comes_later
from fedshift.functional import schedules
from fedshift.models import registry as models
from fedshift.models.adapters import Adapters, with_adapters
from fedshift.models.network import Network, with_layer_rates, with_thawing
from fedshift.models.network_options import NetworkOptions
from fedshift.models.products import Precision, Products, with_precision, with_products

M = TypeVar("M", bound=nn.Module)

Weight = Annotated[float, Field(gt=0, le=1e6)]
ClassWeights = Literal["balanced"] | dict[str, Weight] | tuple[Weight, ...]

_EXPLODED = 1e4


def has_exploded(loss: float, before: float) -> bool:
    """Whether a finite loss is so far above an earlier one, or above 1, that training diverges."""
    return loss > _EXPLODED * max(1.0, before)


def _named_by_text(weights: object) -> object:
    """Weights by the names of classes, which YAML may read as numbers."""
    return {str(name): weight for name, weight in weights.items()} if isinstance(weights, Mapping) else weights


class Privacy(BaseModel):
    """Differential privacy of the training samples of each site: noisy steps, which cost ε at δ in a run.

    With ``epsilon``, the most that a run may cost, each site adds the noise that this takes. With ``noise_multiplier``
    all sites add the same noise, and the cost of each follows from it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epsilon: PositiveFloat | None = Field(None, description="ε: what a run may cost each site")
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="δ: probability with which ε may not hold; far below one over a site's samples"
    )
    clip_norm: PositiveFloat = Field(1.0, description="C: largest norm of a sample's gradient, or of a group's mean")
    noise_multiplier: Annotated[float, Field(ge=0.05)] | None = Field(
        None, description="σ: deviation of the noise, in clip_norm; in place of epsilon"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("write either epsilon or noise_multiplier")
        return self


SAME_BITS = ("loader_workers",)
"""Fields of `Training` on which no bit of a run depends."""


class Training(BaseModel):
    """How sites train (batches, optimiser, learning rate, augmentation), and how many rounds an experiment has."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rounds: PositiveInt = Field(40, description="R: rounds of the method that needs the most mini-batches")
    batch_size: PositiveInt = Field(64, le=2**31 - 1, description="B: samples in a mini-batch")
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="optimiser of every site; adamw decays weights apart from the gradient"
    )
    lr: PositiveFloat = Field(0.01, description="η: learning rate")
    lr_schedule: Literal["constant", "linear", "cosine", "inverse_power"] = Field(
        "constant", description="how the learning rate falls with the share of a run's mini-batches that is done"
    )
    lr_end: NonNegativeFloat = Field(0.0, description="learning rate at the end of a linear or cosine schedule")
    lr_step: Literal["exchange", "mini_batch"] = Field(
        "exchange", description="when the learning rate changes: from exchange to exchange, or with every mini-batch"
    )
    lr_warmup: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of a run's mini-batches in which the learning rate grows from a hundredth of the schedule's "
        "to all of it; it needs lr_step: mini_batch",
    )
    layer_rates: dict[str, Annotated[float, Field(gt=0, le=1000)]] = Field(
        default_factory=dict,
        description="layers, by their path or their stage's name, with factors of the learning rate: "
        "{features.backbone: 0.1}; 1 for those that are not named",
    )
    thaw_after: NonNegativeInt = Field(
        0,
        description="rounds in which a loaded backbone is frozen, and what comes before them; then it trains, at its "
        "rate in layer_rates. 0: it trains from the beginning",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="momentum of SGD")
    nesterov: bool = Field(False, description="Nesterov's form of momentum")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="L2 penalty on all trained parameters; for adamw the share of them that a rate of 1 takes off"
    )
    clip_norm: PositiveFloat | None = Field(None, description="largest norm of a gradient; none = not clipped")
    reset_optimizer_each_round: bool = Field(
        True, description="a new optimiser each round (false: momentum is kept at the site)"
    )
    mini_batches: PositiveInt | None = Field(
        None, description="mini-batches each site may train on in a run; none = what the most demanding method needs"
    )
    measure_every: PositiveInt = Field(
        1, description="rounds from one measurement of the model to the next; the last round is always measured"
    )
    matrix_products: Products = Field(
        "default", description="who multiplies the matrices of linear layers on the processor; onednn suits AMD's"
    )
    precision: Precision = Field(
        "float32",
        description="of the network's products: bf16 and, with scaled losses, fp16 are faster on devices with units",
    )
    compile: bool = Field(False, description="torch's compiler makes the network's steps; needs a compiler here")
    loader_workers: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="threads that read the next mini-batches' samples from disk while a step is computed"
    )
    augmentation: NamedAugmentation = Field(default_factory=Augmentation, description="a preset's name or its parts")

    class_weights: Annotated[ClassWeights | None, BeforeValidator(_named_by_text)] = Field(
        None,
        description="samples are drawn so that classes have these weights: {class: weight}, 1 for those that are not "
        "named; balanced: by each site's own counts, all its classes equally often; none: every sample once in an "
        "epoch",
    )
    steps: PositiveInt | None = Field(
        None,
        description="optimiser steps of a run, at each site or of the pooled model, in place of mini_batches",
    )
    accumulate: PositiveInt = Field(
        1,
        description="parts of a mini-batch whose gradients are added up before a step, so that it needs less memory; "
        "equal to the whole one where the loss is a mean over samples and no layer looks at the mini-batch",
    )
    privacy: Privacy | None = Field(None, description="differential privacy of every site's samples; none: no noise")
    adapters: Adapters | None = Field(
        None, description="train and send low-rank adapters and the head only (docs/own_network.md); none: everything"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.precision != "float32" and self.matrix_products == "onednn":
            raise ValueError(f"matrix_products: onednn multiplies in float32: leave it out beside {self.precision}")
        if self.lr_warmup and self.lr_step == "exchange":
            # The first exchange may be an eighth of the run, all of which would have a hundredth of the rate.
            raise ValueError("lr_warmup grows with every mini-batch: write lr_step: mini_batch beside it")
        if self.privacy is not None and self.clip_norm is not None:
            raise ValueError("clip_norm is for whole gradients; private training has privacy.clip_norm in its place")
        if self.privacy is not None and self.class_weights is not None:
            raise ValueError("class_weights draws some samples more often than privacy accounts for: leave it out")
        if self.thaw_after and self.adapters is not None:
            raise ValueError("thaw_after trains the backbone later, and adapters keep it fixed: leave out one of them")
        if self.steps is not None and self.mini_batches is not None:
            raise ValueError("steps and mini_batches both say how long a run is: leave out one of them")
        if self.accumulate > 1 and self.privacy is not None:
            raise ValueError("accumulate: private training adds up the gradients of single samples: leave it out")
        if self.thaw_after >= self.rounds:
            raise ValueError(
                f"thaw_after: of {self.rounds} rounds the backbone would be frozen in all: lower it, or choose "
                "model.trained_from"
            )
        return self

    @model_validator(mode="after")
    def _computes_privately(self) -> Self:
        if self.privacy is not None and self.precision != "float32":
            raise ValueError(
                f"precision: {self.precision} rounds the gradients of single samples, which privacy clips: leave it out"
            )
        if self.privacy is not None and self.compile:
            raise ValueError("compile: privacy needs hooks at every layer, which are not compiled: leave it out")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = plain(self)
        for name in ("thaw_after", "steps", "accumulate", "compile", "loader_workers"):
            if getattr(self, name) == type(self).model_fields[name].default:
                written.pop(name, None)  # private noise is drawn from the settings, which are those of earlier runs
        return written

    def learning_rate(self, progress: float) -> float:
        """The learning rate when a share ``progress``, in [0, 1], of a run's mini-batches is done."""
        rate = self.lr
        if self.lr_schedule == "linear":
            rate = schedules.linear(progress, self.lr, self.lr_end)
        elif self.lr_schedule == "cosine":
            rate = schedules.cosine(progress, self.lr, self.lr_end)
        elif self.lr_schedule == "inverse_power":
            rate = schedules.inverse_power(progress, self.lr)
        return rate * schedules.warm_up(progress, self.lr_warmup) if self.lr_warmup else rate

    def check_one_rate(self, name: str) -> None:
        """Refuse `layer_rates` for a method whose equations hold for one learning rate.

        Raises UserError: layers have learning rates of their own.
        """
        if self.layer_rates:
            raise UserError(
                f"training.layer_rates: {name} computes with one learning rate for all layers; leave it out, or choose "
                "another method, such as fedavg"
            )

    def check_whole_batches(self, name: str) -> None:
        """Refuse `accumulate` for a method that takes steps of its own, or whose mini-batches cannot be divided.

        Raises UserError: mini-batches come in parts.
        """
        if self.accumulate > 1:
            raise UserError(f"training.accumulate: {name} needs its mini-batches whole: leave it out")

    def chances(self, labels: Tensor) -> Tensor | None:
        """In what proportion samples of these classes (n,) are drawn; None: each once in an epoch."""
        weights = self.class_weights
        if weights is None:
            return None
        assert not isinstance(weights, dict)  # `for_classes` has put them in order
        return class_chances(labels, None if weights == "balanced" else weights)

    def for_classes(self, classes: Sequence[str]) -> Self:
        """These settings with the weights of classes in the order of ``classes``.

        Raises UserError: a weight is of no class, or there are not as many as classes.
        """
        weights = self.class_weights
        if isinstance(weights, Mapping):
            for name in weights:
                if name not in classes:
                    raise UserError(f"training.class_weights: there is no class '{name}'; {nearest(name, classes)}")
            return self.model_copy(update={"class_weights": tuple(weights.get(name, 1.0) for name in classes)})
        if isinstance(weights, tuple) and len(weights) != len(classes):
            raise UserError(f"training.class_weights: {len(weights)} weights for {len(classes)} classes; name them")
        return self

    def network(self, options: NetworkOptions, input_shape: tuple[int, ...], classes: int, seed: int) -> Network:
        """The network that a run starts from, with its adapters, the learning rates of its layers and its backbone.

        ``classes``: number of classes, or of structures for segmentation. Raises UserError: the network cannot read
        such samples, cannot have these adapters, or lacks a named layer or a backbone to thaw.
        """
        network = models.build(options, input_shape, classes, seed)
        if self.adapters is not None:
            network = with_adapters(network, self.adapters, input_shape, seed)
        if self.layer_rates:
            network = with_layer_rates(network, self.layer_rates)
        return with_thawing(network) if self.thaw_after else network

    def prepare(self, module: M) -> M:
        """A module that multiplies as these settings say; it is changed in place."""
        return with_precision(with_products(module, self.matrix_products), self.precision)

    def build_optimizer(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        factors: Mapping[Tensor, float] | None = None,
        waiting: Collection[Tensor] = (),
    ) -> torch.optim.Optimizer:
        """The optimiser of these settings, over those ``parameters`` that require a gradient.

        ``factors``: of the learning rates of single parameters; each group of the optimiser notes its own as
        ``factor``. 1 for others. ``waiting``: parameters that are frozen now and train later. They are counted, so that
        what is remembered of the others fits an optimiser of both.
        """
        compiler_comes_later()
        by_factor: dict[float, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.requires_grad or parameter in waiting:
                by_factor.setdefault((factors or {}).get(parameter, 1.0), []).append(parameter)
        groups = [{"params": some, "lr": lr * factor, "factor": factor} for factor, some in by_factor.items()]
        if self.optimizer != "sgd":
            kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
            return kind(groups, lr=lr, weight_decay=self.weight_decay, fused=True)
        return torch.optim.SGD(
            groups, lr=lr, momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay, fused=True
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give an optimiser of `Training.build_optimizer` another learning rate; its groups keep their factors."""
    for group in optimizer.param_groups:
        group["lr"] = group["factor"] * rate
