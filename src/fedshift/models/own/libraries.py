"""Networks of timm, torchvision, Hugging Face's transformers, MONAI and segmentation-models-pytorch.

Each library is imported when one of its networks is used.

Nothing is downloaded: weights lie in a file, or in the cache of the hub where the library put them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedshift.data.domain import NO_TOKEN
from fedshift.errors import UserError, nearest
from fedshift.models.own.segmentation_libraries import monai_network, smp_network
from fedshift.models.pretrained import copy_weights, find_file, light_torchvision, must_be_downloaded, read_weights

PRETRAINED = ("timm", "torchvision", "hf")
"""Libraries whose networks can begin with weights that somebody trained."""
NAMES = (*PRETRAINED, "monai", "smp")
Pretrained = bool | str


def maker(library: str, name: str) -> Callable[..., nn.Module]:
    """What makes a network of a library: a function of input shape, classes and options.

    ``library``: one of `NAMES`. Raises UserError: the library is not installed, or has no such network.
    """
    makers = {
        "timm": _timm,
        "torchvision": _torchvision,
        "hf": _hugging_face,
        "monai": monai_network,
        "smp": smp_network,
    }
    return makers[library](name)


class Scores(nn.Module):
    """Gives the scores of a network of transformers, which returns them among other things."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.model(pixel_values=images).logits
        return scores


class TextScores(nn.Module):
    """Gives the scores of a network of transformers for tokens (n, length), which are `NO_TOKEN` after a text's end."""

    def __init__(self, model: nn.Module, filling: int) -> None:
        super().__init__()
        self.model, self.filling = model, filling

    def forward(self, tokens: Tensor) -> Tensor:
        there = tokens != NO_TOKEN
        scores: Tensor = self.model(
            input_ids=torch.where(there, tokens, self.filling), attention_mask=there.long()
        ).logits
        return scores


def _timm(name: str) -> Callable[..., nn.Module]:
    timm = _library("timm", f"timm:{name}", "networks")
    if not timm.is_model(name):
        raise UserError(f"model: timm has no network '{name}'; {_near(name, timm.list_models())}")
    reserved = {"in_chans", "num_classes", *inspect.signature(timm.create_model).parameters}

    def make(shape: tuple[int, ...], classes: int, *, pretrained: Pretrained = False, **options: Any) -> nn.Module:
        _refuse(options, reserved, f"timm:{name}")
        made: nn.Module = timm.create_model(name, num_classes=classes, in_chans=shape[0], **options)
        if pretrained is not False:
            repository = timm.get_pretrained_cfg(name).hf_hub_id if pretrained is True else None
            _load(made, classes, f"timm:{name}", pretrained, repository)
        return made

    return make


def _torchvision(name: str) -> Callable[..., nn.Module]:
    torchvision = _library("torchvision", f"torchvision:{name}", "", load=light_torchvision)
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise UserError(f"model: torchvision has no classifier '{name}'; {_near(name, known)}")

    def make(shape: tuple[int, ...], classes: int, *, pretrained: Pretrained = False, **options: Any) -> nn.Module:
        _refuse(options, {"num_classes", "weights", "progress"}, f"torchvision:{name}")
        made: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
        if pretrained is True:
            if must_be_downloaded(True, name):
                raise _missing(
                    f"torchvision:{name}",
                    f"import torchvision; torchvision.models.get_model('{name}', weights='DEFAULT')",
                )
            weights = torchvision.models.get_model_weights(name)["DEFAULT"]
            result = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
            copy_weights(made, result, origin=f"torchvision's {name}", model=name, head=_head(made, classes, name))
        elif pretrained is not False:
            _load(made, classes, f"torchvision:{name}", pretrained, None)
        return made

    return make


def _hugging_face(name: str) -> Callable[..., nn.Module]:
    transformers = _library("transformers", f"hf:{name}", "networks")
    auto = importlib.import_module("transformers.models.auto.configuration_auto")

    def make(shape: tuple[int, ...], classes: int, *, pretrained: Pretrained = False, **options: Any) -> nn.Module:
        _refuse(options, {"num_labels", "trust_remote_code"}, f"hf:{name}")
        common = {"num_labels": classes, **options}
        if len(shape) == 3:
            common = {"num_channels": shape[0], **common}
        if name in auto.CONFIG_MAPPING_NAMES:  # a kind of network, such as vit: its options say its sizes
            sized = {"image_size": shape[1], **common} if len(shape) == 3 else common
            config = transformers.AutoConfig.for_model(name, **sized)
        else:
            try:
                config = transformers.AutoConfig.from_pretrained(
                    name, local_files_only=True, trust_remote_code=False, **common
                )
            except (OSError, ValueError):
                code = (
                    f"import huggingface_hub as h; h.snapshot_download('{name}', allow_patterns=['*.json', '*.safe*'])"
                )
                raise _missing(f"hf:{name}", code) from None
        made = _of_config(transformers, config, name, shape)
        if pretrained is not False:
            _load(made.model, classes, f"hf:{name}", pretrained, name if pretrained is True else None)
        return made

    return make


def _of_config(transformers: Any, config: Any, name: str, shape: tuple[int, ...]) -> Scores | TextScores:
    """The classifier of images or of text that a configuration describes."""
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    images = type(config) in mappings.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    text = type(config) in mappings.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if not images and not text:
        raise UserError(f"model 'hf:{name}': transformers has no classifier of images or of text of this kind")
    if not text or (images and len(shape) == 3):
        return Scores(transformers.AutoModelForImageClassification.from_config(config, trust_remote_code=False))
    if len(shape) != 1:
        raise UserError(f"model 'hf:{name}' reads tokens, integers (n, length), but the data have samples {shape}")
    # Some networks find the end of a text by what fills it, so there must be such a token.
    filling = config.pad_token_id if isinstance(config.pad_token_id, int) and config.pad_token_id >= 0 else 0
    config.pad_token_id, config.loss_type = (
        filling,
        "ForSequenceClassification",
    )  # else it warns of the loss, which is ours
    made = transformers.AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    return TextScores(made, filling)


def _library(package: str, model: str, extra: str, load: Callable[[], Any] | None = None) -> Any:
    try:
        return load() if load is not None else importlib.import_module(package)
    except ImportError:
        wanted = f"fedshift[{extra}]" if extra else package
        raise UserError(f"model '{model}' needs {package}, which is not installed: pip install '{wanted}'") from None


def _refuse(options: dict[str, Any], reserved: set[str], model: str) -> None:
    """Raise UserError for an option that fedshift sets itself, or that could load files."""
    for option in options:
        if option in reserved:
            raise UserError(f"model.{option}: this option of '{model}' cannot be set; weights come by pretrained")


def _near(name: str, known: list[str]) -> str:
    return nearest(name, known).partition(" known: ")[0] if len(known) > 100 else nearest(name, known)


def _load(module: nn.Module, classes: int, model: str, source: Pretrained, repository: str | None) -> None:
    """Copy weights from a file, or from what the hub's cache holds of a repository."""
    if repository is None and source is True:
        raise UserError(f"model.pretrained: there are no weights of '{model}' on the hub; give a file")
    path = find_file(Path(str(source))) if repository is None else _cached_file(repository, model)
    copy_weights(
        module, read_weights(path), origin=f"weights file {path}", model=model, head=_head(module, classes, model)
    )


def _cached_file(repository: str, model: str) -> Path:
    folder = Path(repository)
    if (folder / "model.safetensors").is_file():
        return folder / "model.safetensors"
    hub = importlib.import_module("huggingface_hub")
    result = hub.try_to_load_from_cache(repository, "model.safetensors")
    if not isinstance(result, str):
        raise _missing(model, f"import huggingface_hub as h; h.hf_hub_download('{repository}', 'model.safetensors')")
    return Path(result)


def _missing(model: str, code: str) -> UserError:
    return UserError(
        f"model '{model}': its files are not on this machine, and nothing is downloaded by itself; get them once with: "
        f'python -c "{code}"'
    )


def _head(module: nn.Module, classes: int, model: str) -> str:
    """Path of the last layer that gives one score per class."""
    linear = {path: part for path, part in module.named_modules() if isinstance(part, nn.Linear)}
    fitting: list[str] = [path for path, part in linear.items() if part.out_features == classes]
    if not fitting:
        raise UserError(
            f"model.pretrained: '{model}' has no linear layer of {classes} scores to put the weights before"
        )
    return fitting[-1]
