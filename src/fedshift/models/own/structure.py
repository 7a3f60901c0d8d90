"""Finds out how any module is made: its classifier, what comes before, and the stages of what it computes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch import Tensor, nn

from fedshift.errors import UserError, nearest
from fedshift.models.made_up import mark_tokens, reads_tokens
from fedshift.models.network import Network
from fedshift.models.own.forward_trial import SAMPLES, Event, Trial, forward, one_line, try_module
from fedshift.models.own.stages import ALIGNED, stages_of, within


class Parts(BaseModel):
    """What a user says about the parts of a network. Paths are those of ``named_modules()``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    classifier: str | None = Field(None, description="path of the last layer, which reads vectors; none: found")
    stages: dict[str, str] | tuple[str, ...] | None = Field(
        None, description="paths of modules from shallow to deep, or name: path; none: found"
    )
    aligned: tuple[str, ...] | None = Field(
        None, description="the stages that methods such as csac align by default; none: the deepest maps"
    )


class Structure(BaseModel):
    """How a module is made. A model file holds it, so that whoever loads the model takes the module apart alike.

    Attributes:
        classifier: path of the last layer; None if there is none that reads vectors and gives the scores.
        embedding_size: width of what that layer reads; of the scores if there is none.
        stages: stage name → path of a module.
        aligned: the stages that methods align by default.
        contiguous: whether the module cannot read images in the channels-last memory format.
        remark: why there is no classifier.
        tokens: whether the module reads tokens and no numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    classifier: str | None
    embedding_size: PositiveInt
    stages: dict[str, str]
    aligned: tuple[str, ...]
    contiguous: bool
    remark: str = ""
    tokens: bool = False

    @property
    def sentences(self) -> tuple[str, ...]:
        """What was found, for a person."""
        if self.classifier is None:
            head = f"classifier: none found ({self.remark}); methods that need one ask for model.parts.classifier"
        else:
            head = f"classifier: {self.classifier}, which reads {self.embedding_size} features"
        stages = [f"{name}*" if name in self.aligned else name for name in self.stages]
        text = f"stages: {', '.join(stages)} (* aligned by default)" if stages else "stages: none found"
        return (head, text)


class WholeNetwork(Network):
    """A network that is not divided into features and a classifier.

    Methods that only train it can use it. Those that need either part are told that there is none.
    """

    def __init__(self, module: nn.Module, **keywords: Any) -> None:
        super().__init__(module, nn.Identity(), **keywords)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores (n, classes)."""
        scores: Tensor = self.features(inputs)
        return scores

    def __dir__(self) -> list[str]:
        listed: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        return [name for name in listed if name != "classifier"]  # TorchScript asks for all that is listed

    @property
    def classifier(self) -> nn.Module:  # type: ignore[override]
        """There is none. Raises UserError: always."""
        raise UserError(
            "model.parts.classifier: the method needs the network's last layer by itself, and none was found; name the "
            "module that reads vectors (n, d) and gives the scores"
        )


def structure_of(module: nn.Module, input_shape: tuple[int, ...], classes: int, parts: Parts, name: str) -> Structure:
    """Find out how a module is made, by a forward pass of two made-up samples in evaluation mode.

    ``module``: the module. It does not change. Raises UserError: the module cannot read such samples, does not give
    scores (n, classes), or has no part that is named.
    """
    trial = try_module(module, input_shape, name)
    _check_scores(trial.scores, classes, name)
    classifier, width, remark = _classifier(module, trial, parts, name)
    head = "" if classifier is None else classifier
    calls = trial.calls
    before = [event for event in trial.events if event.path and calls[event.path] == 1]
    before = [event for event in before if not within(event.path, head) and not within(head, event.path)]
    stages, aligned = stages_of(before)
    if parts.stages is not None:
        named = parts.stages if isinstance(parts.stages, Mapping) else {path: path for path in parts.stages}
        known = [event.path for event in before]
        for path in named.values():
            if path not in known:
                raise UserError(
                    f"model.parts.stages: '{name}' has no module '{path}' that is called once, before the classifier, "
                    f"and gives a tensor; {nearest(path, known)}"
                )
        stages, aligned = dict(named), tuple(named)[-ALIGNED:]
    if parts.aligned is not None:
        for stage in parts.aligned:
            if stage not in stages:
                raise UserError(f"model.parts.aligned: there is no stage '{stage}'; {nearest(stage, stages)}")
        aligned = parts.aligned
    return Structure(
        classifier=classifier,
        embedding_size=width or classes,
        stages=stages,
        aligned=aligned,
        contiguous=trial.contiguous,
        remark=remark,
        tokens=reads_tokens(module),
    )


def assemble(module: nn.Module, structure: Structure, classes: int) -> Network:
    """The module as a `Network`. Its modules are used, not copied.

    Raises ValueError: it has no such parts, as where a model file describes another module.
    """
    paths = {path for path, _ in module.named_modules() if path}
    missing = {*structure.stages.values(), *filter(None, (structure.classifier,))} - paths
    if missing or structure.classifier == "" or not set(structure.aligned) <= set(structure.stages):
        raise ValueError("the module has not the parts that are said of it")
    if structure.tokens:
        mark_tokens(module)
    if structure.contiguous:
        module.register_forward_pre_hook(_as_contiguous)
    keywords: dict[str, Any] = {
        "embedding_size": structure.embedding_size,
        "classes": classes,
        "stages": {name: f"features.{path}" for name, path in structure.stages.items()},
        "alignment_stages": structure.aligned,
    }
    if structure.classifier is None:
        network: Network = WholeNetwork(module, **keywords)
    else:
        network = Network(module, _replace(module, structure.classifier, nn.Identity()), **keywords)
        network.backbone = "features"
    network.channels_last = not structure.contiguous
    return network


def _as_contiguous(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # A clone, since images of one channel count as contiguous in either format, and their strides would stay.
    return tuple(
        value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value for value in inputs
    )


def _replace(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """The module at ``path``, in whose place stands ``new`` now."""
    parent, _, child = path.rpartition(".")
    outer = module.get_submodule(parent)
    old = outer.get_submodule(child)
    setattr(outer, child, new)
    return old


def _check_scores(scores: object, classes: int, name: str) -> None:
    wanted = f"it must return a tensor of scores ({SAMPLES}, {classes}), or of masks ({SAMPLES}, {classes}, …)"
    if not isinstance(scores, Tensor):
        raise UserError(f"model '{name}' returns {type(scores).__name__} for {SAMPLES} samples; {wanted}")
    if tuple(scores.shape[:2]) != (SAMPLES, classes) or scores.dim() == 3:
        raise UserError(
            f"model '{name}' returns a tensor of shape {tuple(scores.shape)} for {SAMPLES} samples of {classes} "
            f"classes; {wanted}"
        )
    if not scores.is_floating_point():
        raise UserError(f"model '{name}' returns {scores.dtype}; {wanted}, before any argmax")
    if not bool(torch.isfinite(scores).all()):
        raise UserError(f"model '{name}' returns NaN or infinite scores for samples in [0, 1]: check its layers")


# The classifier ------------------------------------------------------------------------------------------------------


def _classifier(module: nn.Module, trial: Trial, parts: Parts, name: str) -> tuple[str | None, int, str]:
    """Path of the classifier, width of what it reads, and why there is none."""
    events = [event for event in trial.events if event.path]
    if parts.classifier is not None:
        result = [event for event in events if event.path == parts.classifier]
        if not result:
            raise UserError(
                f"model.parts.classifier: '{name}' calls no module '{parts.classifier}'; "
                f"{nearest(parts.classifier, [event.path for event in events])}"
            )
        fault = _unfit(module, result[-1], trial)
        if fault:
            raise UserError(f"model.parts.classifier: '{parts.classifier}' of '{name}' {fault}")
        return parts.classifier, _width(result[-1]), ""
    # The last layer that computes something. An identity or a flattening passes on what was computed before.
    layers = [
        event
        for event in events
        if not any(event.module.children()) and not isinstance(event.module, nn.Identity | nn.Flatten)
    ]
    if not layers:
        return None, 0, "it calls no module"
    last = layers[-1]
    if not any(True for _ in last.module.parameters()):
        return None, 0, f"the last layer, {last.path}, has no parameters"
    fault = _unfit(module, last, trial)
    return (None, 0, f"the last layer, {last.path}, {fault}") if fault else (last.path, _width(last), "")


def _width(event: Event) -> int:
    return cast(Tensor, event.read).shape[1]


def _unfit(module: nn.Module, event: Event, trial: Trial) -> str:
    """Why a module cannot be the classifier; empty if it can."""
    if trial.calls[event.path] > 1:
        return "is called several times"
    sides = trial.scores.shape[2:]
    if event.read is None or event.read.dim() != trial.scores.dim() or event.read.shape[2:] != sides:
        shape = "several values" if event.read is None else f"an array of shape {tuple(event.read.shape)}"
        return f"reads {shape}, not {'maps of the size of the masks' if sides else 'vectors (n, d)'}"
    if not _gives_the_scores(module, event, trial):
        return "does not give the scores"
    divided = copy.deepcopy(module)
    head = _replace(divided, event.path, nn.Identity())
    if {id(tensor) for tensor in head.parameters()} & {id(tensor) for tensor in divided.parameters()}:
        return "shares its parameters with other layers"
    try:
        features, _ = forward(divided, trial.samples)
    except Exception as error:
        return f"cannot be taken out ({one_line(error)})"
    return "" if _same(features, event.read) else "is not the last thing that is computed"


class _Answer(nn.Module):
    """Gives the same scores whatever it reads."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, *_: object) -> Tensor:
        return self.scores.clone()


def _gives_the_scores(module: nn.Module, event: Event, trial: Trial) -> bool:
    """Whether what a layer gives are the scores, whatever it gives.

    Other scores take the place of its own: large and small ones of both signs. A ReLU, a scale or a softmax behind the
    layer changes them, though it may leave those of some weights as they are; so does dropout, which only trains.
    """
    scores = trial.scores
    if event.gave.shape != scores.shape:
        return False
    other = torch.linspace(-50, 50, scores.numel()).flip(0).reshape(scores.shape).to(scores)
    replaced = copy.deepcopy(module)
    _replace(replaced, event.path, _Answer(other))
    try:
        given, _ = forward(replaced, trial.samples)
    except Exception:  # what reads the layer's own values, such as its weights
        return False
    if not _same(given, other):
        return False
    try:
        given, _ = forward(replaced, trial.samples, training=True)
    except Exception:  # it cannot train, which is said elsewhere
        return True
    return not isinstance(given, Tensor) or _same(given, other)


def _same(a: object, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
