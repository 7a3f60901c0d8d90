"""CLIP from a local folder: its image tower as a frozen backbone, and a head that begins as its zero-shot classifier.

Radford et al.: Learning Transferable Visual Models From Natural Language Supervision. ICML 2021.

    s · x̂ · t̂_c        x̂: an image's feature of length 1; t̂_c: that of the text of class c; s: CLIP's scale

The folder is one that transformers' ``save_pretrained`` writes: ``config.json`` of a CLIPModel, ``model.safetensors``,
the tokenizer's files. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.extras import import_extra
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions, image_shape
from fedshift.models.networks.vision import GreyToColour
from fedshift.models.pretrained import find_file, load_whole, one_line


class Clip(NetworkOptions):
    """CLIP's image tower, up to the space that it shares with texts: a backbone of ``frozen``, with ``scale: clip``."""

    name: Literal["clip"] = "clip"
    pretrained: Path = Field(description="folder of the CLIP model, also below FEDSHIFT_WEIGHTS")

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        channels, *sides = image_shape(self.name, input_shape)
        model = _model(self.pretrained)
        size = model.config.vision_config.image_size
        if sides != [size, size] or channels not in (1, 3):
            raise UserError(
                f"model 'clip': {self.pretrained.name} reads colour or grey images of {size} × {size}, but these are "
                f"{channels} × {sides[0]} × {sides[1]}; with frozen, write model.size: {size}"
            )
        width = model.config.projection_dim
        features = nn.Sequential(GreyToColour(), _ImageTower(model)) if channels == 1 else _ImageTower(model)
        return Network(
            features,
            nn.Linear(width, classes),
            embedding_size=width,
            classes=classes,
            stages={"image": "features"},
            alignment_stages=("image",),
        )


class ClipText(NetworkOptions):
    """A linear classifier on CLIP's image features, which begins as the texts of the classes: zero-shot, if untrained.

    Its only stage is ``input``, the features at length 1. What else methods train is beside it (``promptfl``,
    ``fedclip``). The towers are never trained and never sent.
    """

    name: Literal["clip_text"] = "clip_text"
    pretrained: Path = Field(description="folder of the CLIP model, that of the backbone")
    class_names: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="what each class is called in a text, in the order of the labels"
    )
    template: str = Field("a photo of a {}.", description="the text of a class; {} is its name")

    @field_validator("template")
    @classmethod
    def _with_name(cls, template: str) -> str:
        if template.count("{}") != 1:
            raise ValueError("the template needs {} once, where the name of a class goes")
        return template

    def fingerprint(self) -> str:
        """A checksum of what makes features of texts: the text tower's weights, its configuration, the tokenizer."""
        return _encoder(self.pretrained).fingerprint()

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        if len(self.class_names) != classes:
            raise UserError(
                f"model.class_names: {len(self.class_names)} names for {classes} classes; name each, in their order"
            )
        encoder, width = _encoder(self.pretrained), math.prod(input_shape)
        if encoder.width != width:
            raise UserError(
                f"model 'clip_text' reads the {encoder.width} image features of {self.pretrained.name}, but the data "
                f"have {width} numbers; write model: {{name: frozen, backbone: {{name: clip, pretrained: …}}, head: …}}"
            )
        return Network(
            UnitLength(),
            TextClassifier(encoder, self.class_names, self.template),
            embedding_size=width,
            classes=classes,
            stages={"input": "features"},
            alignment_stages=("input",),
        )


class UnitLength(nn.Module):
    """Features (n, …) flattened and divided by their length."""

    def forward(self, features: Tensor) -> Tensor:
        return functional.normalize(features.flatten(1))


class TextEncoder:
    """CLIP's text tower with its tokenizer. It never changes, so copies of a network share it.

    Attributes:
        width: of a text's feature.
        scale: s.
    """

    def __init__(self, model: Any, tokenizer: Any, what: str) -> None:
        self.width: int = model.config.projection_dim
        self.scale = float(model.logit_scale.detach().exp())
        self._longest: int = model.config.text_config.max_position_embeddings
        self._tokenizer, self._what = tokenizer, what
        tower = nn.ModuleDict({"text": model.text_model, "projection": model.text_projection})
        self._towers = {torch.device("cpu"): copy.deepcopy(tower).requires_grad_(False).eval()}

    def __deepcopy__(self, memo: dict[int, Any]) -> TextEncoder:
        return self

    def fingerprint(self) -> str:
        """A checksum of the weights and of the tokens of a text with every printable sign of ASCII."""
        signs = "".join(map(chr, range(32, 127)))
        digest = hashlib.sha256(json.dumps([self.scale, self._tokenizer(signs)["input_ids"]]).encode())
        for name, tensor in self._on(torch.device("cpu")).state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()[:32]

    @property
    def token_width(self) -> int:
        """Width of a token's embedding."""
        tower: Any = self._on(torch.device("cpu"))["text"]
        return int(tower.embeddings.token_embedding.embedding_dim)

    def tokens(self, texts: tuple[str, ...]) -> Tensor:
        """The tokens of texts, int64 (n, length). Raises UserError: a text is too long for CLIP."""
        read = [self._tokenizer(text)["input_ids"] for text in texts]
        longest = max(range(len(texts)), key=lambda index: len(read[index]))
        if len(read[longest]) > self._longest:
            raise UserError(
                f"model: {self._what} reads texts of at most {self._longest} tokens, but '{texts[longest]:.60}' has "
                f"{len(read[longest])}: shorten it"
            )
        # A text's feature is that of its last token, which sees no token behind it, so that any can fill the rest.
        return torch.tensor([ids + ids[-1:] * (len(read[longest]) - len(ids)) for ids in read])

    def features(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        """The features of texts, (n, width), of length 1.

        ``tokens``: int64 (n, length). ``context``: embeddings (m, token width), or (n, m, token width), that stand in
        place of those of the m tokens behind the first.
        """
        tower: Any = self._on(tokens.device)
        hook = None
        if context is not None:
            replaced = context.expand(len(tokens), *context.shape[-2:])

            def put_in(_: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
                rest = embedded[:, 1 + replaced.shape[1] :]
                return torch.cat([embedded[:, :1], replaced, rest], dim=1)

            hook = tower["text"].embeddings.token_embedding.register_forward_hook(put_in)
        try:
            pooled = tower["text"](input_ids=tokens).pooler_output
        finally:
            if hook is not None:
                hook.remove()
        return functional.normalize(tower["projection"](pooled))

    def _on(self, device: torch.device) -> nn.ModuleDict:
        if device not in self._towers:
            self._towers[device] = copy.deepcopy(self._towers[torch.device("cpu")]).to(device)
        return self._towers[device]


class TextClassifier(nn.Linear):
    """The zero-shot classifier as a linear layer: the rows of its weight are s · t̂_c."""

    def __init__(self, encoder: TextEncoder, names: tuple[str, ...], template: str) -> None:
        super().__init__(encoder.width, len(names))
        self.encoder, self.names = encoder, names
        with torch.no_grad():
            texts = tuple(template.format(name) for name in names)
            self.weight.copy_(encoder.scale * encoder.features(encoder.tokens(texts)))
            self.bias.zero_()


class _ImageTower(nn.Module):
    """Images (n, 3, h, w) → features (n, width)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower, self.projection = copy.deepcopy(model.vision_model), copy.deepcopy(model.visual_projection)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.projection(self.tower(pixel_values=images).pooler_output)
        return features


def _encoder(folder: Path) -> TextEncoder:
    return _encoder_of(*_state_of(folder))


@functools.lru_cache(maxsize=1)
def _encoder_of(folder: Path, state: int) -> TextEncoder:
    transformers = import_extra("transformers", extra="networks", what="model clip_text")
    model = _model_of(folder, state)
    # Without them transformers makes a tokenizer that knows no word.
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise UserError(f"model.pretrained: {folder} has no tokenizer.json or vocab.json: add the tokenizer's files")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds: of JSON, of files, of a tokenizer's own
        raise UserError(
            f"model.pretrained: {folder} has a tokenizer that cannot be read ({one_line(error)})"
        ) from error
    return TextEncoder(model, tokenizer, folder.name)


def _model(folder: Path) -> Any:
    return _model_of(*_state_of(folder))


def _state_of(folder: Path) -> tuple[Path, int]:
    """The folder, and what changes when its weights do."""
    whole = find_file(folder / "config.json").parent.absolute()
    return whole, find_file(whole / "model.safetensors").stat().st_mtime_ns


@functools.lru_cache(maxsize=1)
def _model_of(folder: Path, state: int) -> Any:
    """The whole CLIP model. Whoever trains or moves a part of it takes a copy."""
    transformers = import_extra("transformers", extra="networks", what="model clip")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"model.pretrained: {folder / 'config.json'} cannot be read ({one_line(error)})") from error
    if not isinstance(config, transformers.CLIPConfig):
        raise UserError(f"model.pretrained: {folder} describes a model of kind '{config.model_type}', not clip")
    with torch.random.fork_rng(devices=[]):
        model = transformers.CLIPModel(config)
    load_whole(model, folder / "model.safetensors", "clip")
    return model.requires_grad_(False).eval()
