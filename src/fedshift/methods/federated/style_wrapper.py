"""A wrapper that adds style transfer to a method: sites share styles and apply them to their samples (see `ccst`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedshift.errors import UserError, nearest
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Reply, Styles
from fedshift.federation.randomness import generator
from fedshift.federation.replies import LARGEST_VALUE, About, Bounds, Tensors
from fedshift.federation.site import Site
from fedshift.functional.styles import style_assignment
from fedshift.methods.base import Samples, State
from fedshift.methods.federated.ccst_styles import (
    Channels,
    Columns,
    Lab,
    LowFrequencies,
    Style,
    Styler,
    StyleSpace,
    Vgg,
)
from fedshift.methods.federated.ccst_vgg import CHANNELS
from fedshift.methods.traits import Traits
from fedshift.methods.wrapper import Wrapper
from fedshift.models.network import Network
from fedshift.models.pretrained import find_file
from fedshift.weights import Weights

_AT_ONCE = 256
_RANGES = {"pixel": (0.0, 1.01), "lab": (-200.0, 200.0)}
"""Between which values means and deviations lie."""


@dataclass(frozen=True)
class SharedStyles(Reply):
    """What a site sends before training: its styles."""

    styles: Styles


@dataclass(frozen=True)
class Received(Reply):
    """An empty reply: the styles have arrived."""


class StyleWrapper(Wrapper):
    """Style transfer around another method."""

    traits = Wrapper.traits.derive(
        settings={
            "vgg": {"style_space": "vgg"},
            "released": {"style_space": "vgg", "unbiased_content": True, "one_style_per_batch": True},
        },
    )
    own_memory: ClassVar[tuple[str, ...]] = ("styles",)

    style_space: Literal["pixel", "lab", "lowfreq", "feature", "vgg"] = Field(
        "pixel", description="Φ: pixels (columns of vectors), Lab, low frequencies, the network, or VGG-19 (paper)"
    )
    style_mode: Literal["overall", "single"] = Field("overall", description="one style of a site, or J of its images")
    level: PositiveInt | None = Field(None, description="L: source domains whose styles an image takes; none = all K")
    bank_size: PositiveInt = Field(32, description="J: styles a site sends (style_mode: single)")
    one_style_per_batch: bool = Field(
        False, description="blocks of a mini-batch's size share one style per domain (code; style_mode: single)"
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

    def adjust_traits(self, traits: Traits) -> Traits:
        """The inner method's, at a little more."""
        inner = super().adjust_traits(traits)
        return replace(inner, relative_cost=inner.relative_cost + 0.1)

    def _numbers(self, network: Network, input_shape: tuple[int, ...]) -> int:
        """How many numbers a style has."""
        if self.style_space == "vgg":
            return 2 * CHANNELS
        if self.style_space == "feature":
            with torch.no_grad():  # a copy, since the network stays in its mode
                network = copy.deepcopy(network).cpu().eval()
                _, maps = network.with_stages(torch.zeros(1, *input_shape), (self._stage(network),))
            return 2 * next(iter(maps.values())).shape[1]
        return 2 * input_shape[0]

    def bounds(self, call: str, about: About) -> Bounds:
        if call != "share_styles":
            return super().bounds(call, about)
        styles = self.bank_size if self.style_mode == "single" else 1
        images = len(about.input_shape) == 3
        if self.style_space == "lowfreq" and images:
            channels, height, width = about.input_shape
            window = (styles, channels, 2 * self.half_width + 1, self.half_width + 1)
            return {"styles": Tensors({"amplitude": window}, low=0, high=1.001 * height * width)}
        shape = (styles, self._numbers(about.network, about.input_shape) // 2)
        # Pixels are from 0 to 1. What columns and features hold is not known here.
        low, high = _RANGES.get(self.style_space if images else "", (-LARGEST_VALUE, LARGEST_VALUE))
        return {"styles": Tensors({"mean": shape, "deviation": shape}, low=low, high=high)}

    def check(self, network: Network) -> None:
        if self.style_space == "feature":
            self._stage(network)
        if self.style_space == "vgg":
            for file in (self.vgg_encoder, self.vgg_decoder):
                find_file(file, self._field)
        super().check(network)

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        """Check that styles can be applied to samples of this shape.

        Raises:
            UserError: they cannot.
        """
        if len(samples.shape) != 3 and (self.style_space != "pixel" or self.style_mode == "single"):
            raise UserError(
                f"{self._field}: {self.style_space} in mode {self.style_mode} needs images; vectors have style_space: "
                "pixel and style_mode: overall"
            )
        if self.style_space == "lab" and samples.shape[0] != 3:
            raise UserError(f"{self._field}: lab needs colour images, these have {samples.shape[0]} channel(s)")
        return super().check_samples(samples)

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
        federation.ask(self.receive_styles, to=federation.sources, bank=bank)
        return super().start(federation, weights)

    # Source -------------------------------------------------------------------------------------------------------

    def share_styles(self, site: Site) -> SharedStyles:
        """The style of all images of a source together, or the styles of some of them."""
        try:
            self.check_samples(Samples(site.data.input_shape))
        except UserError as error:
            raise UserError(f"site '{site.name}': {error}") from None
        return SharedStyles(self._styles(site))

    def receive_styles(self, site: Site, bank: Mapping[str, Styles]) -> Received:
        """Keep the styles of all sources. A site that did not share its own adds it here."""
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
            images, again = rows.unique(return_inverse=True)  # type: ignore[no-untyped-call]
            each = [space.of_each(samples) for samples in self._samples(site, images)]
            found = {name: torch.cat([styles[name] for styles in each]).cpu()[again] for name in each[0]}
        return Styles({name: tensor.cpu() for name, tensor in found.items()})

    def _samples(self, site: Site, rows: Tensor) -> Iterator[Tensor]:
        """What styles are computed from: stored samples, or the outputs of a stage of the common start."""
        if self.style_space != "feature":
            yield from (site.data.stored(part) for part in torch.split(rows, _AT_ONCE))
            return
        model = site.model().eval()
        stage = self._stage(model)
        for part in torch.split(rows, _AT_ONCE):
            with torch.no_grad():
                _, maps = model.with_stages(site.data.batch(part)[0], (stage,))
            if maps[stage][0, 0].numel() == 1:  # the mean over one pixel would be a single sample's feature
                raise UserError(
                    f"{self.name}.stage: maps of '{stage}' have one pixel, so a style would be a sample's feature: "
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
        """The `Styler` of this site. It is the same for a whole run."""
        bank = cast(Mapping[str, Styles], site.memory["styles"])
        names = sorted(bank)
        draws = generator(site.seed, site.name, "style assignment")
        level = min(self.level or len(names), len(names))  # a site that shares no style is not in the bank
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
        space = None  # in the network's features, a hook applies the style
        if self.style_space != "feature":
            space = self._space(site, {part: tensor[own, 0] for part, tensor in styles.items()})
        return Styler(space, styles, domains, numbers, own, unbiased=self.unbiased_content)

    @contextmanager
    def inside(self, site: Site) -> Iterator[None]:
        """While the wrapped call runs, draw the site's samples in the styles of the bank. A target has no bank."""
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
