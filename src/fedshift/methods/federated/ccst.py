"""CCST: cross-client style transfer, and style transfer in front of any other method.

Chen, Jiang, Dou, Chen: Federated Domain Generalization for Image Recognition via Cross-Client Style Transfer. WACV
2023.

Setting: domain generalization by changed data; the target is never seen and its style is in no bank. ``ccst`` trains
FedAvg on the stylised samples, ``styles`` any federated method: ``{name: styles, method: {name: csac, …}}``.
Wire: once, every source's J styles up and the bank of all K·J styles down to each, K·J·s and K·K·J·s with s bytes a
style (kind ``styles``, which a site may refuse: with ``engine.on_refusal: leave_out`` it then trains in its own style
and those of the others, and gives none); then what the method behind sends.

 1. Style of an image: S(I) = (μ(Φ(I)), σ(Φ(I))) per channel; J of them (*single*), or one over all pixels of all images
    of the site (*overall*), σ = sqrt(E x² − μ² + 1e-5)
 2. The server sends the bank B = {S of all sites} to all sources.
 3. Every image takes the styles of L of the K source domains, without replacement. Its own domain: it stays as it is.
    Another: F' = σ_S · (F − μ(F))/σ(F) + μ_S in Φ, decoded
 4. The method behind trains on what comes out.

Where the paper and its code differ. **The defaults are not the paper's in one point: Φ.** The paper's is VGG-19 up to
relu4_1 with a trained decoder, at 512 pixels, which needs the weights of both. ``setting: vgg`` is the paper;
``released`` is its code, with the same Φ. By default Φ is ``pixel`` (the image's own channels), which needs no file;
others are ``lab``, ``lowfreq`` (amplitudes of low frequencies for μ and σ), and ``feature``: AdaIN after a stage of the
network that is trained, without a decoder, with the styles of the common start, meant for a pre-trained network.
 1. The code's content deviation has n − 1 in the denominator, the overall style's n. The paper has one σ: here n in
    both, so that what comes out has the style asked for (``unbiased_content``).
 2. Single mode in the code draws one image of the other site's folder per mini-batch of content; in the paper J styles
    of a site are in the bank and an image takes one of them, J = 32 here (``one_style_per_batch``).
No setting changes these:
 3. The level is L here, K in the code. All K by default, the paper's best row: every image is seen as it is and in the
    style of every other site.
 4. The paper writes N_k·L images and passes over all of them in an epoch. Here an epoch is N_k images, each in one of
    its L versions drawn anew, so that shares and work are those of the method behind. Versions are fixed for a run.
 5. Vectors: ``pixel`` means columns, whose μ and σ are the site's. Not in the paper.
 6. Sites count alike, as in the code (``weighting: uniform``, the default of ``ccst``). The code offers FedProx with
    μ = 0.01 (``proximal_weight``).

Should reproduce: no row of the published tables can be made without the decoder's weights and a pre-trained ResNet-50.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
)
from torch import Tensor

from fedshift.errors import UserError, nearest
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Reply, Styles
from fedshift.federation.randomness import generator
from fedshift.federation.recipes import place_of
from fedshift.federation.site import Site
from fedshift.functional.styles import style_assignment
from fedshift.methods import registry
from fedshift.methods.base import Method, RunPlan, State, Traffic
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.in_front import InFront
from fedshift.methods.settings import Settings
from fedshift.methods.style_spaces import Channels, Columns, Lab, LowFrequencies, Style, Styler, StyleSpace, Vgg
from fedshift.models.network import Network
from fedshift.models.pretrained import find_file
from fedshift.models.style_transfer import CHANNELS
from fedshift.weights import Weights

_AT_ONCE = 256


@dataclass(frozen=True)
class SharedStyles(Reply):
    """What a site sends before training: its styles."""

    styles: Styles


@dataclass(frozen=True)
class Received(Reply):
    """Nothing."""


class _StyleTransfer(InFront):
    """Style transfer and the method behind it."""

    citation: ClassVar[str] = "Chen et al., WACV 2023"
    settings: ClassVar[Settings] = {
        "vgg": {"style_space": "vgg"},
        "released": {"style_space": "vgg", "unbiased_content": True, "one_style_per_batch": True},
    }
    own_shares: ClassVar[tuple[str, ...]] = ("styles",)
    own_memory: ClassVar[tuple[str, ...]] = ("styles",)
    own_steps: ClassVar[tuple[str, ...]] = ("share_styles", "receive_styles")

    style_space: Literal["pixel", "lab", "lowfreq", "feature", "vgg"] = Field(
        "pixel", description="Φ: pixels (columns of vectors), Lab, low frequencies, the network, or VGG-19 (paper)"
    )
    style_mode: Literal["overall", "single"] = Field("overall", description="one style of a site, or J of its images")
    level: PositiveInt | None = Field(None, description="L: source domains whose styles an image takes; none = all K")
    bank_size: PositiveInt = Field(32, description="J: styles a site sends (style_mode: single)")
    one_style_per_batch: bool = Field(
        False, description="as many images as a mini-batch has share one style per domain (code; style_mode: single)"
    )
    unbiased_content: bool = Field(False, description="n − 1 in the content's deviation (code)")
    half_width: Annotated[int, Field(ge=0, le=1)] = Field(
        1, description="b: frequencies up to b on both axes are swapped (style_space: lowfreq); 0 = brightness"
    )
    stage: str | None = Field(None, description="stage of the network (style_space: feature); none = the first")
    vgg_encoder: Path = Field(
        Path("vgg19_normalised.safetensors"), description="VGG-19's weights, absolute or below FEDSHIFT_WEIGHTS"
    )
    vgg_decoder: Path = Field(Path("adain_decoder.safetensors"), description="the decoder's weights, likewise")
    vgg_size: PositiveInt = Field(512, description="pixels at which images are encoded (style_space: vgg)")

    @property
    def relative_cost(self) -> float:  # type: ignore[override]
        """Seconds of a mini-batch beside plain cross-entropy."""
        return super().relative_cost + 0.1

    def traffic(self, plan: RunPlan) -> Traffic:
        assert plan.network is not None
        styles = self.bank_size if self.style_mode == "single" else 1
        one = 4 * styles * self._numbers(plan.network, plan.input_shape)
        return super().traffic(plan) + Traffic(up=plan.sources * one, down=plan.sources**2 * one)

    def _numbers(self, network: Network, input_shape: tuple[int, ...]) -> int:
        """Numbers in one style."""
        if self.style_space == "vgg":
            return 2 * CHANNELS
        if self.style_space == "feature":
            with torch.no_grad():
                _, maps = network.eval().with_stages(torch.zeros(1, *input_shape), (self._stage(network),))
            return 2 * next(iter(maps.values())).shape[1]
        if self.style_space == "lowfreq":
            return input_shape[0] * (2 * self.half_width + 1) * (self.half_width + 1)
        return 2 * input_shape[0]

    def check(self, network: Network) -> None:
        if self.style_space == "feature":
            self._stage(network)
        if self.style_space == "vgg":
            for file in (self.vgg_encoder, self.vgg_decoder):
                find_file(file, self._field)
        super().check(network)

    def check_samples(self, input_shape: tuple[int, ...]) -> tuple[str, ...]:
        """Raises UserError when samples of this shape cannot take a style on."""
        if len(input_shape) != 3 and (self.style_space != "pixel" or self.style_mode == "single"):
            raise UserError(
                f"{self._field}: {self.style_space} in mode {self.style_mode} needs images; vectors have style_space: "
                "pixel and style_mode: overall"
            )
        if self.style_space == "lab" and input_shape[0] != 3:
            raise UserError(f"{self._field}: lab needs colour images, these have {input_shape[0]} channel(s)")
        return super().check_samples(input_shape)

    def adapt_network(self, network: Network, sources: int) -> Network:
        if self.level is not None and self.level > sources:
            raise UserError(f"{self.name}.level: {self.level} of {sources} source domains cannot be chosen; lower it")
        return super().adapt_network(network, sources)

    @property
    def _field(self) -> str:
        return f"{self.name}.style_space"

    def _stage(self, network: Network) -> str:
        stage = self.stage or next(iter(network.stages))
        if stage not in network.stages:
            raise UserError(f"{self.name}.stage: the network has no stage '{stage}'; {nearest(stage, network.stages)}")
        return stage

    # Server -------------------------------------------------------------------------------------------------------

    def start(self, federation: Federation, weights: Weights) -> State:
        replies = federation.ask(self.share_styles, to=federation.sources)
        bank = {site: reply.styles for site, reply in replies.items()}  # without a site that refuses
        first = next(iter(bank))
        for site, styles in bank.items():
            styles.check_like(bank[first], f"styles of site '{site}' beside those of '{first}' (grey and colour?)")
        federation.ask(self.receive_styles, to=federation.sources, bank=bank)
        return super().start(federation, weights)

    # Source -------------------------------------------------------------------------------------------------------

    def share_styles(self, site: Site) -> SharedStyles:
        """At a source, once: the style of all its images, or those of some of them."""
        try:
            self.check_samples(site.data.input_shape)
        except UserError as error:
            raise UserError(f"site '{site.name}': {error}") from None
        return SharedStyles(self._styles(site))

    def receive_styles(self, site: Site, bank: Mapping[str, Styles]) -> Received:
        """At a source, once: the styles of all sources. A site that gave none away knows its own all the same."""
        site.memory["styles"] = bank if site.name in bank else {**bank, site.name: self._styles(site)}
        site.scratch.pop("styler", None)
        return Received()

    def _styles(self, site: Site) -> Styles:
        space = self._space(site)
        if self.style_mode == "overall":
            found = space.of_all(self._samples(site, torch.arange(site.samples)))
        else:
            draws, number = site.generator_for("styles"), self.bank_size
            rows = torch.randperm(site.samples, generator=draws)[:number]
            if site.samples < number:
                rows = torch.randint(site.samples, (number,), generator=draws)
            each = [space.of_each(samples) for samples in self._samples(site, rows)]
            found = {name: torch.cat([styles[name] for styles in each]) for name in each[0]}
        return Styles({name: tensor.cpu() for name, tensor in found.items()})

    def _samples(self, site: Site, rows: Tensor) -> Iterator[Tensor]:
        """What styles are taken of: stored samples, or the outputs of a stage of the common start."""
        if self.style_space != "feature":
            yield from (site.data.stored(part) for part in torch.split(rows, _AT_ONCE))
            return
        model = site.model().eval()
        stage = self._stage(model)
        for part in torch.split(rows, _AT_ONCE):
            with torch.no_grad():
                _, maps = model.with_stages(site.data.batch(part)[0], (stage,))
            if maps[stage][0, 0].numel() == 1:  # its mean is the feature itself, of a single sample
                raise UserError(
                    f"{self.name}.stage: maps of '{stage}' have one pixel here, whose style is the sample's feature: "
                    "name an earlier stage"
                )
            yield maps[stage]

    def _space(self, site: Site, own: Style | None = None) -> StyleSpace:
        if len(site.data.input_shape) != 3:
            return Columns(own)
        if self.style_space == "vgg":
            made = Vgg(self.unbiased_content, (self.vgg_encoder, self.vgg_decoder), self.vgg_size, self._field)
            return made.to(site.device)
        if self.style_space == "lowfreq":
            return LowFrequencies(self.half_width)
        return Lab(self.unbiased_content) if self.style_space == "lab" else Channels(self.unbiased_content)

    def _styler(self, site: Site) -> Styler:
        """What gives the bank's styles to this site's samples; the same for a whole run."""
        bank = cast(Mapping[str, Styles], site.memory["styles"])
        names = sorted(bank)
        draws = generator(site.seed, site.name, "style assignment")
        level = min(self.level or len(names), len(names))  # a site that gives no style away is not in the bank
        domains = style_assignment(site.samples, len(names), level, draws)
        styles = {part: torch.stack([bank[name][part] for name in names]).to(site.device) for part in bank[names[0]]}
        number = next(iter(styles.values())).shape[1]
        if self.one_style_per_batch:
            batch = site.training.batch_size
            blocks = torch.randint(number, (-(-site.samples // batch), len(names)), generator=draws)
            numbers = blocks[torch.arange(site.samples)[:, None] // batch, domains]
        else:
            numbers = torch.randint(number, domains.shape, generator=draws)
        own = names.index(site.name)
        space = None  # in the network's own features it is a hook that gives the style
        if self.style_space != "feature":
            space = self._space(site, {part: tensor[own, 0] for part, tensor in styles.items()})
        return Styler(space, styles, domains, numbers, own, unbiased=self.unbiased_content)

    @contextmanager
    def inside(self, site: Site) -> Iterator[None]:
        """The site's samples are drawn in the styles of the bank. A target has none."""
        if "styles" not in site.memory:
            yield
            return
        if "styler" not in site.scratch:
            site.scratch["styler"] = self._styler(site)
        styler: Styler = site.scratch["styler"]
        plain, site.data = site.data, site.data.restyled(styler.restyle)
        handle = None
        if self.style_space == "feature":
            stage = site.network.stages[self._stage(site.network)]
            handle = styler.hook(site.network.get_submodule(stage))
        try:
            yield
        finally:
            site.data = plain
            if handle is not None:
                handle.remove()


class CCST(_StyleTransfer):
    """FedAvg on images in the styles of all sites."""

    name: ClassVar[str] = "ccst"
    title: ClassVar[str] = "CCST"

    local_epochs: PositiveInt = Field(1, description="E: passes over a site's data per round")
    steps_per_round: PositiveInt | None = Field(None, description="mini-batches per round instead of whole epochs")
    weighting: Literal["samples", "uniform"] = Field("uniform", description="shares N_k/ΣN, or 1/K (code)")
    proximal_weight: NonNegativeFloat = Field(0.0, description="μ of FedProx (code: 0.01 as an option); 0 = FedAvg")

    @functools.cached_property
    def inner(self) -> Method:
        """FedAvg, as FedProx whose pull may be 0."""
        return FedProx(
            local_epochs=self.local_epochs,
            steps_per_round=self.steps_per_round,
            weighting=self.weighting,
            proximal_weight=self.proximal_weight,
        )


class StyleTransfer(_StyleTransfer):
    """Any federated method on images in the styles of all sites."""

    name: ClassVar[str] = "styles"
    title: ClassVar[str] = "Cross-client styles"

    method: SerializeAsAny[Method] = Field(
        {"name": "fedavg"},
        validate_default=True,
        description="the method behind: its name, or a mapping with name and options",
    )

    @property
    def inner(self) -> Method:
        return self.method

    @field_validator("method", mode="before")
    @classmethod
    def _by_name(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, Method):
            return value
        options = {"name": value} if isinstance(value, str) else value
        if not isinstance(options, Mapping):
            raise ValueError("must be the name of a method, or a mapping with name and options")
        context = info.context or {}
        try:
            return registry.parse(options, context.get("folder"), context.get("permit"))
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}") from None

    @field_validator("method")
    @classmethod
    def _without_styles(cls, method: Method) -> Method:
        behind = method
        while isinstance(behind, InFront):
            if isinstance(behind, _StyleTransfer):
                raise ValueError(f"{behind.name} has styles of its own; choose another method")
            behind = behind.inner
        return method

    @field_serializer("method")
    def _with_name(self, method: Method) -> dict[str, Any]:
        place = place_of(type(method))
        known = registry.METHODS.get(method.name) == place
        return {"name": method.name if known else place, **method.model_dump(mode="json")}
