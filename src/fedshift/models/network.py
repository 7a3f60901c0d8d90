"""The shape that every network has: features, then a classifier, with named stages."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from fedshift.data.tasks.objective import CLASSES, Objective
from fedshift.errors import UserError, nearest
from fedshift.models.instance_methods import has_method, stay_in_evaluation, with_method, without_method

Change = Callable[[Tensor], Tensor]
"""What is made of the output of a stage."""


class Network(nn.Module):
    """A feature extractor followed by a classifier.

    Args:
        features: maps a batch of inputs to (n, embedding_size).
        classifier: maps (n, embedding_size) to (n, classes).
        embedding_size: width of the features.
        classes: number of classes, or of structures for segmentation.
        stages: stage name → path of the module whose output is that stage, from shallow to deep.
        alignment_stages: the stages that methods align by default (CSAC's set R).
        seed: the seed that the weights were drawn from; `fedshift.models.registry.build` sets it. A method that adds
            a block draws it from this seed and never from the weights: their last bits differ between processors.
    """

    objective: Objective = CLASSES
    """What it learns; a run sets it."""
    channels_last = True
    """Whether it reads images in the channels-last memory format. A user's own network may not."""
    backbone: str | None = None
    """Path of the part that can be loaded with trained weights, all but the new layers; whoever makes it sets it."""

    def __init__(
        self,
        features: nn.Module,
        classifier: nn.Module,
        *,
        embedding_size: int,
        classes: int,
        stages: Mapping[str, str],
        alignment_stages: Sequence[str],
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        self.embedding_size = embedding_size
        self.classes = classes
        self.stages = dict(stages)
        self.alignment_stages = tuple(alignment_stages)
        self.seed = seed

    def __deepcopy__(self, memo: dict[int, Any]) -> Network:
        made: Network = _copy(self, memo)
        return made

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (n, classes)."""
        logits: Tensor = self.classifier(self.features(inputs))
        return logits

    def at(self, source: int) -> Network:
        """The network that predicts at one source. Here the same at each.

        Args:
            source: the source's number in the order of the names.
        """
        return self

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of which this network was made."""
        return {
            "embedding_size": self.embedding_size,
            "classes": self.classes,
            "stages": self.stages,
            "alignment_stages": self.alignment_stages,
            "seed": self.seed,
        }

    def with_parts(
        self,
        features: nn.Module,
        classifier: nn.Module,
        *,
        embedding_size: int | None = None,
        moved_to: str | None = None,
    ) -> Network:
        """A network of these modules with this network's classes, stages, seed and objective.

        Args:
            features: the new feature extractor.
            classifier: the new classifier.
            embedding_size: width of the new features; None: as it was.
            moved_to: name of the child of ``features`` that holds the old features; None: ``features`` are the old.

        Returns:
            A plain `Network`, which shares the modules given to it.
        """
        prefix = "features" if moved_to is None else f"features.{moved_to}"
        changed: dict[str, Any] = {
            "stages": {name: path.replace("features", prefix, 1) for name, path in self.stages.items()}
        }
        if embedding_size is not None:
            changed["embedding_size"] = embedding_size
        made = Network(features, classifier, **{**self.keywords, **changed})
        made.objective = self.objective
        return made

    def with_stages(self, inputs: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """One forward pass that also keeps the outputs of the named stages.

        Args:
            inputs: a batch of samples.
            names: the stages to keep.

        Returns:
            Logits (n, classes), and the stages' outputs in the order of ``names``.

        Raises:
            UserError: the network has no stage of that name.
        """
        with StageReader(self, names) as read:
            return read(inputs)


class StageReader:
    """`Network.with_stages` of many mini-batches: what looks at the stages stays attached until this is closed.

    It is attached by the first pass, so that it sees what was attached before, such as plug-ins, has made of a stage. A
    copy of the network that is made in between must not be used.

    Args:
        network: whose stages.
        names: the stages to keep.

    Raises:
        UserError: the network has no stage of that name.
    """

    def __init__(self, network: Network, names: Sequence[str]) -> None:
        for name in names:
            if name not in network.stages:
                raise UserError(f"the network has no stage '{name}'; {nearest(name, network.stages)}")
        self._network, self._names = network, tuple(names)
        self._seen: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> StageReader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (n, classes), and the stages' outputs in the order of the names."""
        if not self._handles:
            for name in self._names:
                stage = self._network.get_submodule(self._network.stages[name])
                self._handles.append(stage.register_forward_hook(functools.partial(self._keep, name)))
        logits = self._network(inputs)
        seen, self._seen = self._seen, {}  # a graph lives no longer than its mini-batch
        return logits, {name: seen[name] for name in self._names}

    def _keep(self, name: str, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self._seen[name] = output.float()  # bf16 stays inside the network


@contextmanager
def changed_stages(network: Network, changes: Mapping[str, Change]) -> Iterator[None]:
    """A context in which some stages of a network give other outputs.

    Args:
        network: hooks are put into it; a copy made in between must not be used.
        changes: name of a stage → what is made of its output.
    """
    with ExitStack() as attached:
        for name, change in changes.items():
            stage = network.get_submodule(network.stages[name])
            handle = stage.register_forward_hook(lambda _module, _inputs, output, change=change: change(output))
            attached.callback(handle.remove)
        yield


def with_layer_rates(network: Network, rates: Mapping[str, float]) -> Network:
    """Mark layers with factors of the learning rate, from which `rate_factors` takes those of their parameters.

    The mark is at the module and not at a name or a parameter, so copies of a network and its parts have it, too.

    Args:
        network: its modules are marked in place.
        rates: path of a layer, or name of a stage, → factor. A stage is all that comes after the one before it. Where
            several name a layer, the one that names the fewest layers counts.

    Returns:
        ``network`` itself.

    Raises:
        UserError: nothing that is trained has such a name.
    """
    trained = [path for path, module in network.named_modules() if _has_trained(module)]
    layers = _stage_layers(network)
    named: dict[str, list[str]] = {}
    for name in rates:
        of_stage = layers.get(name)
        named[name] = [path for path in trained if (_lies_in(path, name) if of_stage is None else path in of_stage)]
        if not named[name]:
            names = [stage for stage, paths in layers.items() if not set(paths).isdisjoint(trained)]
            above = [
                path for path, _ in network.named_modules() if path.count(".") <= name.count(".")
            ]  # keeps it short
            names += [path for path in above if any(_lies_in(layer, path) for layer in trained)]
            raise UserError(
                f"training.layer_rates: no layer that is trained is called '{name}'; {nearest(name, names)}"
            )
    for name in sorted(rates, key=lambda name: (-len(named[name]), name not in layers, name.count("."))):
        for path in named[name]:
            setattr(network.get_submodule(path), _FACTOR, rates[name])
    return network


def rate_factors(modules: Iterable[nn.Module]) -> dict[Tensor, float]:
    """The factor of the learning rate of every parameter in ``modules``; 1 without a mark of `with_layer_rates`."""
    factors: dict[Tensor, float] = {}
    for module in modules:
        for layer in module.modules():
            for parameter in layer.parameters(recurse=False):
                factors.setdefault(parameter, getattr(layer, _FACTOR, 1.0))
    return factors


def with_thawing(network: Network) -> Network:
    """Mark a network's backbone, so that `freeze_backbone` finds it in copies and in what a method makes of it.

    Returns:
        ``network`` itself.

    Raises:
        UserError: it has none.
    """
    if network.backbone is None:
        raise UserError(
            "training.thaw_after: the network has no backbone that could be loaded with trained weights; leave it out, "
            "or choose a network with the field pretrained, such as resnet18"
        )
    for module in network.get_submodule(network.backbone).modules():
        setattr(module, _BACKBONE, True)
    return network


def freeze_backbone(network: nn.Module, frozen: bool) -> None:
    """Freeze the backbone that `with_thawing` marked, or let it train again.

    Frozen parameters need no gradient, and BatchNorm layers stay in evaluation mode. What was fixed before stays fixed.

    Args:
        network: changed in place.
        frozen: whether it is frozen.
    """
    if getattr(network, _FROZEN, False) == frozen:
        return
    marked = (module for module in network.modules() if getattr(module, _BACKBONE, False))
    for module in {part: None for top in marked for part in top.modules()}:  # a method may have put in layers
        if frozen:
            waiting = [name for name, value in module.named_parameters(recurse=False) if value.requires_grad]
            setattr(module, _WAITING, waiting)
        elif (waiting := vars(module).pop(_WAITING, None)) is None:
            continue
        _keep_mode(module, frozen)
        for name in waiting:
            module.get_parameter(name).requires_grad_(not frozen)
    setattr(network, _FROZEN, frozen)


def waiting_parameters(modules: Iterable[nn.Module]) -> set[Tensor]:
    """The parameters in ``modules`` that are frozen now and will train later."""
    layers = (layer for module in modules for layer in module.modules())
    return {layer.get_parameter(name) for layer in layers for name in getattr(layer, _WAITING, ())}


def _keep_mode(layer: nn.Module, frozen: bool) -> None:
    """Let a BatchNorm layer stay in evaluation mode, or no longer; what stayed so before it was frozen does further."""
    if not frozen:
        if vars(layer).pop(_STAYS, False):
            without_method(layer, "train")
    elif isinstance(layer, _BatchNorm) and not has_method(layer, "train"):
        with_method(layer, "train", stay_in_evaluation)
        setattr(layer, _STAYS, True)


def _stage_layers(network: Network) -> dict[str, list[str]]:
    """Stage → the paths of its modules, which are listed in the order of the forward pass."""
    paths = [path for path, _ in network.named_modules() if path]
    layers: dict[str, list[str]] = {}
    first = 0
    for stage, end in network.stages.items():
        last = max((number for number, path in enumerate(paths) if _lies_in(path, end)), default=-1)
        layers[stage] = paths[first : last + 1]
        first = max(first, last + 1)
    return layers


def map_channels(network: Network) -> dict[str, int]:
    """The channels of each stage with a convolution of its own: those of its last."""
    channels: dict[str, int] = {}
    for stage, paths in _stage_layers(network).items():
        for module in map(network.get_submodule, paths):
            if isinstance(module, nn.Conv2d):
                channels[stage] = module.out_channels
    return channels


def _lies_in(path: str, outer: str) -> bool:
    return f"{path}.".startswith(f"{outer}.")


def _has_trained(module: nn.Module) -> bool:
    """Whether a parameter of the module itself is trained."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def copy_with(network: Network, weights: Mapping[str, Tensor] | None = None) -> Network:
    """A deep copy in training mode, with ``weights`` if given.

    `copy.deepcopy`, `load_state_dict` and `train` do the same. For a small network the last two take half as long as a
    step, and sites copy it in every exchange. So where layers are loaded as torch loads them, the copy is made of the
    weights.
    """
    memo: dict[int, Any] = {}
    looked = _Look()
    looked.at(network, "")
    replaced = _pairs_to_replace(looked, weights)
    for value, tensor in replaced:
        new = torch.empty_like(value).copy_(tensor)
        memo[id(value)] = nn.Parameter(new, value.requires_grad) if isinstance(value, nn.Parameter) else new
    copied = copy.deepcopy(network, memo)
    if weights is not None and not replaced:
        copied.load_state_dict(dict(weights))
    return copied if looked.trains else copied.train()


@dataclass
class _Look:
    """What one pass over a network's modules shows. `modules` and `state_dict` take several times as long.

    Attributes:
        state: the tensors of its state by name, as `state_dict` has them if it is ``plain``.
        plain: whether all modules leave it to torch how their state is named and loaded.
        trains: whether all are in training mode, and leave it to torch to set that.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    plain: bool = True
    trains: bool = True

    def at(self, module: nn.Module, prefix: str) -> None:
        """Look at a module and those within it."""
        self.plain = self.plain and _loads_plainly(module)
        self.trains = self.trains and module.training and not _has_its(module, ("train",))
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None and name not in module._non_persistent_buffers_set:
                    self.state[f"{prefix}{name}"] = value
        for name, child in module._modules.items():
            if child is not None:
                self.at(child, f"{prefix}{name}.")


def _pairs_to_replace(looked: _Look, weights: Mapping[str, Tensor] | None) -> list[tuple[Tensor, Tensor]]:
    """Each tensor of a network's state beside that of the same name in ``weights``; none if torch has to load them."""
    if weights is None or not looked.plain:
        return []
    state = looked.state
    fits = state.keys() == weights.keys() and len({id(value) for value in state.values()}) == len(state)
    fits = fits and all(value.shape == weights[name].shape for name, value in state.items())
    return [(value, weights[name]) for name, value in state.items()] if fits else []


def _loads_plainly(module: nn.Module) -> bool:
    """Whether a module leaves it to torch how its state is named and loaded."""
    hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks or module._state_dict_hooks
    has_own = hooks or _has_its(module, _LOADING) or has_method(module, "_load_from_state_dict")
    return not has_own and type(module)._load_from_state_dict in _LOADERS


def _has_its(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a module or its class has methods of its own of these names."""
    kind: Any = type(module)
    return _has_other(kind, names) or not vars(module).keys().isdisjoint(names)


@functools.cache
def _has_other(kind: Any, names: tuple[str, ...]) -> bool:
    return any(getattr(kind, name) is not getattr(nn.Module, name) for name in names)


def _copy(module: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a module in a tenth of the time.

    A module has a dozen dictionaries of hooks, mostly empty. `copy.deepcopy` takes longer for them than for the weights
    of a small network, which sites copy in every exchange.
    """
    kind: Any = type(module)
    if id(module) in memo or _has_other(kind, _PICKLING):
        return copy.deepcopy(module, memo)  # it is copied already, or says itself how it is copied
    made = kind.__new__(kind)
    memo[id(module)] = made
    news = vars(made)
    for name, value in vars(module).items():
        if name == "_modules":
            news[name] = {key: child if child is None else _child(child, memo) for key, child in value.items()}
        elif type(value) in _ATOMS:
            news[name] = value
        elif type(value) in _CONTAINERS and not value:
            news[name] = type(value)()
        else:
            news[name] = copy.deepcopy(value, memo)
    return made


def _child(module: nn.Module, memo: dict[int, Any]) -> Any:
    return copy.deepcopy(module, memo) if hasattr(module, "__deepcopy__") else _copy(module, memo)


_FACTOR = "learning_rate_factor"
_BACKBONE, _FROZEN, _WAITING = "in_backbone", "backbone_is_frozen", "waiting_parameters"
_STAYS = "stays_in_evaluation"
_PICKLING = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
_LOADING = ("load_state_dict", "state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")
_LOADERS = {nn.Module._load_from_state_dict, _NormBase._load_from_state_dict}  # BatchNorm's differs for old files
_CONTAINERS = frozenset((dict, OrderedDict, set))
_ATOMS = frozenset((bool, int, float, str, type(None)))
