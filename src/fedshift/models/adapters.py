"""Low-rank adapters: of a large network only small matrices and the head are trained and sent.

Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022.

    h = W x + s · B A x        W is fixed; A and B are trained, B is 0 at first

Everything that is fixed is no part of the network's state any more, so no method sends, averages or remembers it.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedshift.errors import UserError, nearest
from fedshift.extras import import_extra
from fedshift.models.instance_methods import stay_in_evaluation, with_method
from fedshift.models.made_up import made_up
from fedshift.models.network import Network
from fedshift.models.own.forward_trial import SAMPLES, forward, one_line
from fedshift.weights import Weights

_NORMALISATION = (_NormBase, nn.LayerNorm, nn.GroupNorm)
_PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_AGREES = 1e-3
"""Largest difference of scores, beside their size, between adapters and the same numbers added to the weights."""
_FIXED = "_fixed_by_adapters"
"""The attribute of a module that says which of its tensors are fixed, and whether each was a parameter."""


class Adapters(BaseModel):
    """Only low-rank matrices beside chosen layers, and the network's head, are trained and sent."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: int = Field(8, ge=1, le=1024, description="r: rank of the matrices")
    scale: PositiveFloat = Field(2.0, description="s: what their product is multiplied by (LoRA's α/r)")
    targets: tuple[str, ...] | None = Field(
        None,
        description="layers that get adapters, by their paths or the ends of these, such as attn.qkv; none: every "
        "linear and convolution layer before the head",
    )
    normalisation: bool = Field(
        False, description="whether normalisation layers are trained and sent, too; false: they keep what they loaded"
    )
    second_only: bool = Field(
        False,
        description="whether only B is trained; the mean of the sites' products is then the product of their means",
    )


def with_adapters(network: Network, adapters: Adapters, input_shape: tuple[int, ...], seed: int) -> Network:
    """A network of which only adapters and the head are trained, and are its state.

    ``network``: changed in place. Returns ``network`` itself. Raises UserError: peft is not installed, the network has
    no head, or a target cannot have an adapter.
    """
    peft = import_extra("peft", extra="networks", what="training.adapters")
    whole = _trained_whole(network, adapters)
    kept = {id(tensor) for module in whole for tensor in (*module.parameters(), *module.buffers())}
    trained = {id(value) for module in whole for value in module.parameters() if value.requires_grad}
    paths = _targets(network, adapters, input_shape)
    options = peft.LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.scale * adapters.rank,
        target_modules="|".join(re.escape(path) for path in paths),
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Other numbers than those that the network's own weights were drawn from.
        torch.default_generator.manual_seed(int.from_bytes(sha256(f"adapters {seed}".encode()).digest()[:7]))
        peft.inject_adapter_in_model(options, network)
    for path in paths:
        layer: Any = network.get_submodule(path)
        kept |= {id(layer.lora_B["default"].weight)}
        if not adapters.second_only:
            kept |= {id(layer.lora_A["default"].weight)}
    for parameter in network.parameters():
        if id(parameter) in trained:
            parameter.requires_grad_(True)
    for module in network.modules():
        _fix(module, kept)
        if isinstance(module, _NormBase) and getattr(module, _FIXED, None) is not None:
            # It uses the statistics that it loaded. BatchNorm's own way of loading adds a count of batches, which is no
            # part of the state here.
            with_method(module, "train", stay_in_evaluation)
            with_method(module, "_load_from_state_dict", nn.Module._load_from_state_dict)
            module.eval()
    if len(input_shape) == 3 and network.channels_last:
        network.to(memory_format=torch.channels_last)
    return network


def _trained_whole(network: Network, adapters: Adapters) -> list[nn.Module]:
    """The parts of a network that are trained as they are, beside adapters: its head, and normalisation if asked."""
    head = network.classifier
    if not [*head.parameters(), *head.buffers()]:
        raise UserError("training.adapters: the network has no head with parameters; name it: model.parts.classifier")
    layers = network.features.modules() if adapters.normalisation else ()
    return [head, *(layer for layer in layers if isinstance(layer, _NORMALISATION))]


def merge_adapters(network: Network, weights: Weights) -> Weights:
    """The weights of the same network without adapters, whose products are added to the layers' own weights.

    ``network``: the one that ``weights`` belong to; it is not changed. Returns ``weights`` itself if the network has no
    adapters.
    """
    if not has_adapters(network):
        return weights
    plain = copy.deepcopy(network).cpu()
    plain.load_state_dict(dict(weights))
    _merge(plain)
    return Weights({name: tensor.contiguous() for name, tensor in plain.state_dict().items()})


def has_adapters(network: nn.Module) -> bool:
    """Whether a network is one of `with_adapters`."""
    return any(hasattr(module, _FIXED) for module in network.modules())


def check_adapters(network: Network, input_shape: tuple[int, ...]) -> None:
    """Try whether a network with adapters gives the scores of the one that they are merged into.

    Raises UserError: it does not: some layer's weights are used without calling the layer.
    """
    trial = copy.deepcopy(network).cpu().eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for layer in _adapted_layers(trial).values():
            weight = layer.lora_B["default"].weight
            weight.copy_(torch.randn_like(weight) * 0.1)
        samples = made_up(trial, SAMPLES, input_shape, torch.default_generator)
        try:
            scores = trial(samples)
            _merge(trial)
            plain = trial(samples)
        except Exception as error:
            raise UserError(f"training.adapters: the network fails with adapters ({one_line(error)})") from error
    if float((scores - plain).abs().max()) > _AGREES * max(1.0, float(plain.abs().max())):
        raise UserError(
            "training.adapters: the network uses weights of some layer without calling the layer, so an adapter there "
            "has no effect: name other targets"
        )


def _targets(network: Network, adapters: Adapters, input_shape: tuple[int, ...]) -> list[str]:
    """Paths of the layers that get adapters."""
    head = {id(module) for module in network.classifier.modules()}
    device = next(iter(network.state_dict().values())).device
    with torch.random.fork_rng(devices=[]):
        _, events = forward(network, made_up(network, SAMPLES, input_shape).to(device))
    called = {event.path for event in events if id(event.module) not in head}
    fitting = [path for path, module in network.named_modules() if path in called and _fits(module)]
    if adapters.targets is None:
        if not fitting:
            raise UserError("training.adapters: the network has no linear or convolution layer before its head")
        return fitting
    chosen: list[str] = []
    for target in adapters.targets:
        result = [path for path in fitting if path == target or path.endswith(f".{target}")]
        if not result:
            raise UserError(
                f"training.adapters.targets: no linear or convolution layer before the head is called '{target}'; "
                f"{nearest(target, [path.removeprefix('features.') for path in fitting])}"
            )
        chosen += result
    return list(dict.fromkeys(chosen))


def _fits(module: nn.Module) -> bool:
    """Whether peft's adapter of a layer computes what the layer does, and can be merged."""
    kind = next((kind for kind in _PLAIN if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward:
        return False
    if isinstance(module, nn.Linear):
        return True
    layer: Any = module
    return layer.groups == 1 and layer.padding_mode == "zeros" and set(layer.dilation) == {1}


def _adapted_layers(network: nn.Module) -> dict[str, Any]:
    """Path → each layer that has an adapter."""
    return {path: module for path, module in network.named_modules() if hasattr(module, "lora_B")}


def _merge(network: Network) -> None:
    """Add each adapter to its layer, and give the network its whole state back."""
    for path, layer in _adapted_layers(network).items():
        base, first, second = layer.base_layer, layer.lora_A["default"].weight, layer.lora_B["default"].weight
        # Not by peft, whose product is wrong for convolutions of 1 × 1 × 1.
        product = (second.detach().flatten(1) @ first.detach().flatten(1)).view(base.weight.shape)
        base.weight.add_(layer.scaling["default"] * product)
        parent, _, child = path.rpartition(".")
        setattr(network.get_submodule(parent), child, base)
    for module in network.modules():
        for name, is_parameter in getattr(module, _FIXED, {}).items():
            tensor = module._buffers.pop(name)
            assert tensor is not None
            if is_parameter:
                module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                module.register_buffer(name, tensor)


def _fix(module: nn.Module, kept: set[int]) -> None:
    """Make a module's own tensors, but for those that are kept, buffers that are no part of its state."""
    fixed = dict(_own_tensors(module, kept))
    for name in fixed:
        tensor = getattr(module, name).detach()
        delattr(module, name)
        module.register_buffer(name, tensor, persistent=False)
    if fixed:
        setattr(module, _FIXED, fixed)


def _own_tensors(module: nn.Module, kept: set[int]) -> Iterator[tuple[str, bool]]:
    """Name of each tensor to fix, and whether it is a parameter."""
    persistent: Mapping[str, Tensor | None] = {
        name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
    }
    for tensors, is_parameter in ((module._parameters, True), (persistent, False)):
        for name, tensor in tensors.items():
            if tensor is not None and id(tensor) not in kept:
                yield name, is_parameter
