"""Styles of samples, an option of every federated method: ``prepare: styles``.

Chen, Jiang, Dou, Chen: Federated Domain Generalization for Image Recognition via Cross-Client Style Transfer. WACV
2023. `fedshift.methods.federated.ccst` has its equations, and where paper and code differ.

Before the first round every source sends styles and gets those of all. Then it draws its samples in these styles.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from fedshift.errors import UserError, nearest
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Reply, Styles
from fedshift.federation.randomness import generator
from fedshift.federation.replies import LARGEST_VALUE, About, Bounds, Tensors
from fedshift.federation.site import Site
from fedshift.functional.colour import grey, lab_to_rgb, rgb_to_lab
from fedshift.functional.spectra import interpolate_amplitudes, low_frequencies
from fedshift.functional.styles import EPSILON, adain, channel_styles
from fedshift.methods.composition.preparation import Preparation
from fedshift.models.made_up import made_up
from fedshift.models.network import Network
from fedshift.models.pretrained import find_file, read_weights

_AT_ONCE = 256
_RANGES = {"pixel": (0.0, 1.01), "lab": (-200.0, 200.0)}
"""Between which values means and deviations lie."""
_FIELD = "styles: style_space"
"""Of messages: the same in a method's options and in ``prepare``."""
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "vgg": {"style_space": "vgg"},
    "released": {"style_space": "vgg", "unbiased_content": True, "one_style_per_batch": True},
}
"""Named settings of methods with these options."""


@dataclass(frozen=True)
class SharedStyles(Reply):
    """What a site sends before training: its styles."""

    styles: Styles


@dataclass(frozen=True)
class Received(Reply):
    """An empty reply: the styles have arrived."""


class StyleOptions(BaseModel):
    """The options of styles."""

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


class StylesOption(StyleOptions, Preparation):
    """Sources draw their samples in the styles of all sources (CCST)."""

    memory_names = ("styles",)
    cost = 0.1

    name: Literal["styles"] = "styles"

    def _numbers(self, network: Network, input_shape: tuple[int, ...]) -> int:
        """How many numbers a style has."""
        if self.style_space == "vgg":
            return 2 * CHANNELS
        if self.style_space == "feature":
            with torch.no_grad():  # a copy, since the network stays in its mode
                network = copy.deepcopy(network).cpu().eval()
                _, maps = network.with_stages(made_up(network, 1, input_shape), (self.stage_of(network),))
            return 2 * next(iter(maps.values())).shape[1]
        return 2 * input_shape[0]

    def bounds(self, call: str, about: About) -> Bounds:
        if call != "share_styles":
            return {}
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

    def check(self, network: Network, input_shape: tuple[int, ...], sources: int) -> None:
        self.check_samples(input_shape)
        self.check_network(network)
        self._check_level(sources)

    def check_network(self, network: Network) -> None:
        """Raise UserError if the stage or the files of Φ are not there."""
        if self.style_space == "feature":
            self.stage_of(network)
        if self.style_space == "vgg":
            for file in (self.vgg_encoder, self.vgg_decoder):
                find_file(file, _FIELD)

    def _check_level(self, sources: int) -> None:
        if self.level is not None and self.level > sources:
            raise UserError(f"styles: level: {self.level} of {sources} source domains cannot be chosen; lower it")

    def check_samples(self, shape: tuple[int, ...]) -> None:
        """Raise UserError if styles cannot be applied to samples of this shape."""
        if len(shape) != 3 and (self.style_space != "pixel" or self.style_mode == "single"):
            raise UserError(
                f"{_FIELD}: {self.style_space} in mode {self.style_mode} needs images; vectors have style_space: "
                "pixel and style_mode: overall"
            )
        if self.style_space == "lab" and shape[0] != 3:
            raise UserError(f"{_FIELD}: lab needs colour images, these have {shape[0]} channel(s)")

    def stage_of(self, network: Network) -> str:
        """The name of the stage in whose maps styles are measured (style_space: feature)."""
        stage = self.stage or next(iter(network.stages))
        if stage not in network.stages:
            raise UserError(f"styles: stage: the network has no stage '{stage}'; {nearest(stage, network.stages)}")
        return stage

    # Server -------------------------------------------------------------------------------------------------------

    def start(self, federation: Federation) -> None:
        self._check_level(len(federation.sources))
        replies = federation.ask(self.share_styles, to=federation.sources)
        bank = {site: reply.styles for site, reply in replies.items()}  # without a site that refuses
        federation.ask(self.receive_styles, to=federation.sources, bank=bank)

    # Source -------------------------------------------------------------------------------------------------------

    def share_styles(self, site: Site) -> SharedStyles:
        """The style of all images of a source together, or the styles of some of them."""
        try:
            self.check_samples(site.data.input_shape)
        except UserError as error:
            raise UserError(f"site '{site.name}': {error}") from None
        return SharedStyles(self._styles(site))

    def receive_styles(self, site: Site, bank: Mapping[str, Styles]) -> Received:
        """Keep the styles of all sources. A site that did not share its own adds it here."""
        site.memory["styles"] = bank if site.name in bank else {**bank, site.name: self._styles(site)}
        site.scratch.pop("styler", None)
        return Received()

    def _styles(self, site: Site) -> Styles:
        space = self.space(site)
        if self.style_mode == "overall":
            site_styles = space.of_all(self.samples(site, torch.arange(site.samples)))
        else:
            draws, number = site.generator_for("styles"), self.bank_size
            rows = torch.randperm(site.samples, generator=draws)[:number]
            if site.samples < number:
                rows = torch.randint(site.samples, (number,), generator=draws)
            images, again = rows.unique(return_inverse=True)  # type: ignore[no-untyped-call]
            each = [space.of_each(samples) for samples in self.samples(site, images)]
            site_styles = {name: torch.cat([styles[name] for styles in each]).cpu()[again] for name in each[0]}
        return Styles({name: tensor.cpu() for name, tensor in site_styles.items()})

    def samples(self, site: Site, rows: Tensor) -> Iterator[Tensor]:
        """What styles are computed from, a part after the other: stored samples, or what a stage of the start gives."""
        if self.style_space != "feature":
            yield from (site.data.stored_rows(part) for part in torch.split(rows, _AT_ONCE))
            return
        model = site.model().eval()
        stage = self.stage_of(model)
        for part in torch.split(rows, _AT_ONCE):
            with torch.no_grad():
                _, maps = model.with_stages(site.data.batch(part)[0], (stage,))
            if maps[stage][0, 0].numel() == 1:  # the mean over one pixel would be a single sample's feature
                raise UserError(
                    f"styles: stage: maps of '{stage}' have one pixel, so a style would be a sample's feature: "
                    "name an earlier stage"
                )
            yield maps[stage]

    def space(self, site: Site, site_style: Style | None = None) -> StyleSpace:
        """Φ, which measures and applies styles; ``site_style`` is that of this site, which vectors need."""
        if len(site.data.input_shape) != 3:
            return Columns(site_style)
        if self.style_space == "vgg":
            made = Vgg(self.unbiased_content, (self.vgg_encoder, self.vgg_decoder), self.vgg_size, _FIELD)
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
        position = names.index(site.name)
        space = None  # in the network's features, a hook applies the style
        if self.style_space != "feature":
            space = self.space(site, {part: tensor[position, 0] for part, tensor in styles.items()})
        return Styler(space, styles, domains, numbers, position, unbiased=self.unbiased_content)

    @contextmanager
    def inside(self, site: Site) -> Iterator[None]:
        """While a call runs, draw the site's samples in the styles of the bank. A target has no bank."""
        if "styles" not in site.memory:
            yield
            return
        if "styler" not in site.scratch:
            site.scratch["styler"] = self._styler(site)
        styler: Styler = site.scratch["styler"]
        plain, site.data = site.data, site.data.with_restyle(styler.restyle)
        handle = None
        if self.style_space == "feature":
            stage = site.network.stages[self.stage_of(site.network)]
            handle = styler.hook(site.network.get_submodule(stage))
        try:
            yield
        finally:
            site.data = plain
            if handle is not None:
                handle.remove()


# Styles: how they are computed and applied ----------------------------------------------------------------------------


Style = Mapping[str, Tensor]


class StyleSpace(ABC):
    """One representation of styles."""

    cached = False
    """Whether `apply` is so slow that its results should be cached."""

    @abstractmethod
    def of_each(self, samples: Tensor) -> Style:
        """The style of every sample."""

    @abstractmethod
    def of_all(self, batches: Iterable[Tensor]) -> Style:
        """One style of all samples together."""

    @abstractmethod
    def apply(self, samples: Tensor, style: Style) -> Tensor:
        """The samples in other styles, one style per sample."""

    def to(self, device: torch.device) -> StyleSpace:
        """This representation on another device."""
        return self


class Channels(StyleSpace):
    """Mean and deviation of the channels: AdaIN on the pixels themselves."""

    def __init__(self, unbiased: bool) -> None:
        self.unbiased = unbiased

    def encode(self, images: Tensor) -> Tensor:
        return images

    def decode(self, maps: Tensor, like: Tensor) -> Tensor:
        return maps

    def of_each(self, samples: Tensor) -> Style:
        means, deviations = channel_styles(self.encode(samples))
        return {"mean": means, "deviation": deviations}

    def of_all(self, batches: Iterable[Tensor]) -> Style:
        return overall(self.encode(samples) for samples in batches)

    def apply(self, samples: Tensor, style: Style) -> Tensor:
        maps = adain(self.encode(samples), style["mean"], style["deviation"], unbiased=self.unbiased)
        return self.decode(maps, samples).clamp(0, 1)


class Lab(Channels):
    """AdaIN in L*a*b*, which separates lightness from colour."""

    def encode(self, images: Tensor) -> Tensor:
        return rgb_to_lab(images)

    def decode(self, maps: Tensor, like: Tensor) -> Tensor:
        return lab_to_rgb(maps)


class Vgg(Channels):
    """AdaIN in the features of a pre-trained encoder, then its decoder. This is the paper's."""

    cached = True

    def __init__(self, unbiased: bool, files: tuple[Path, Path], size: int, field: str) -> None:
        super().__init__(unbiased)
        self.size = size
        self.encoder: nn.Module = encoder(files[0], field)
        self.decoder: nn.Module = decoder(files[1], field)

    def to(self, device: torch.device) -> StyleSpace:
        self.encoder, self.decoder = self.encoder.to(device), self.decoder.to(device)
        return self

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        sized = functional.interpolate(images, (self.size, self.size), mode="bilinear", align_corners=False)
        maps: Tensor = self.encoder(sized.expand(-1, 3, -1, -1))
        return maps

    @torch.no_grad()
    def decode(self, maps: Tensor, like: Tensor) -> Tensor:
        images = self.decoder(maps)
        images = functional.interpolate(images, like.shape[2:], mode="bilinear", align_corners=False, antialias=True)
        return images if like.shape[1] == 3 else grey(images)


class LowFrequencies(StyleSpace):
    """Amplitudes of frequencies up to ``half`` on both axes. Images keep their own phases."""

    def __init__(self, half: int) -> None:
        self.half = half

    def of_each(self, samples: Tensor) -> Style:
        return {"amplitude": low_frequencies(samples, self.half)}

    def of_all(self, batches: Iterable[Tensor]) -> Style:
        total, number = torch.zeros(()), 0
        for samples in batches:
            total, number = total + low_frequencies(samples, self.half).cpu().double().sum(0), number + len(samples)
        return {"amplitude": (total / number).float()[None]}

    def apply(self, samples: Tensor, style: Style) -> Tensor:
        return interpolate_amplitudes(samples, style["amplitude"], torch.ones(()).to(samples), self.half).clamp(0, 1)


class Columns(StyleSpace):
    """For vectors: mean and deviation of every column over a site's samples, as for an image's channels.

    ``own``: the style of the site whose samples are changed.
    """

    def __init__(self, site_style: Style | None = None) -> None:
        self.site_style = site_style

    def of_each(self, samples: Tensor) -> Style:
        raise UserError("style_space: a single vector has no style; use style_mode: overall")

    def of_all(self, batches: Iterable[Tensor]) -> Style:
        return overall(batches)

    def apply(self, samples: Tensor, style: Style) -> Tensor:
        assert self.site_style is not None
        own_mean, own_deviation = self.site_style["mean"].to(samples), self.site_style["deviation"].to(samples)
        return (samples - own_mean) / own_deviation * style["deviation"] + style["mean"]


def overall(batches: Iterable[Tensor]) -> Style:
    """One mean and one deviation per channel over all ``batches``."""
    sums = StyleAccumulator()
    for values in batches:
        sums.add(values)
    mean, deviation = sums.result()
    return {"mean": mean[None], "deviation": deviation[None]}


class Styler:
    """Changes a site's samples to the styles of a bank when they are drawn for training.

    ``space``: applies styles. None: they are applied to the network's features, see `hook`. ``bank``: the styles,
    tensors (K, J, …). ``domains``: which of the K domains each of a sample's L versions has, (N, L). ``numbers``: which
    of the J styles it has, (N, L). ``own``: the site's domain. In this style, samples are unchanged. ``unbiased``: as
    in `adain`.
    """

    def __init__(
        self,
        space: StyleSpace | None,
        bank: Style,
        domains: Tensor,
        numbers: Tensor,
        site_domain: int,
        *,
        unbiased: bool,
    ) -> None:
        self.domains, self.numbers = domains, numbers
        self._space, self._bank, self._site_domain, self._unbiased = space, bank, site_domain, unbiased
        self._cache: Tensor | None = None
        self._filled = torch.zeros(domains.shape, dtype=torch.bool)
        self._now: tuple[Style, Tensor] | None = None

    def restyle(self, samples: Tensor, rows: Tensor, draws: torch.Generator) -> Tensor:
        """Each sample in one of its versions, which is drawn each time."""
        rows = rows.cpu()
        version = torch.randint(self.domains.shape[1], (len(rows),), generator=draws)
        domains, numbers = (table[rows, version].to(samples.device) for table in (self.domains, self.numbers))
        style = {part: tensor[domains, numbers] for part, tensor in self._bank.items()}
        foreign = domains != self._site_domain
        if self._space is None:
            self._now = style, foreign
            return samples
        if self._space.cached:
            return self._restyle_cached(samples, style, foreign, rows, version)
        return _where(foreign, self._space.apply(samples, style), samples)

    def _restyle_cached(self, samples: Tensor, style: Style, foreign: Tensor, rows: Tensor, version: Tensor) -> Tensor:
        """As `restyle`, for slow spaces: a version is computed once and kept with 8 bits, as in an image file."""
        assert self._space is not None
        if self._cache is None:
            self._cache = torch.empty((*self.domains.shape, *samples.shape[1:]), dtype=torch.uint8)
        new = (~self._filled[rows, version] & foreign.cpu()).nonzero().flatten()
        if len(new):
            positions = new.to(samples.device)
            made = self._space.apply(samples[positions], {part: tensor[positions] for part, tensor in style.items()})
            self._cache[rows[new], version[new]] = (made * 255).round().to(torch.uint8).cpu()
            self._filled[rows[new], version[new]] = True
        return _where(foreign, self._cache[rows, version].to(samples) / 255, samples)

    def hook(self, stage: nn.Module) -> RemovableHandle:
        """Apply AdaIN to the output of a network's stage in training mode, with the styles of the last batch.

        Copies of the stage do the same.
        """

        def apply_style(module: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
            if self._now is None or not module.training or len(output) != len(self._now[1]):
                return None
            style, foreign = self._now
            return _where(foreign, adain(output, style["mean"], style["deviation"], unbiased=self._unbiased), output)

        return stage.register_forward_hook(apply_style)


def _where(chosen: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """``first`` for the chosen samples, ``second`` for the others."""
    return torch.where(chosen.view(-1, *[1] * (first.dim() - 1)), first, second)


# Encoder and decoder of arbitrary style transfer ----------------------------------------------------------------------
# VGG-19 up to relu4_1 and its mirror image (Huang and Belongie, ICCV 2017). Weights are read from files whose names are
# positions in a sequence of layers, as in the published files. Encoder: ``0`` (a 1×1 convolution that normalises
# colours), ``2``, ``5``, ``9``, … ``28``. Decoder: ``1``, ``5``, … ``27``.


CHANNELS = 512  # of relu4_1
_ENCODER = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, 256, "pool", 512)
_DECODER = (256, "up", 256, 256, 256, 128, "up", 128, 64, "up", 64, 3)


def encoder(file: Path, field: str) -> nn.Sequential:
    """The encoder: maps images (n, 3, h, w) in [0, 1] to (n, 512, ⌈h/8⌉, ⌈w/8⌉).

    ``field``: path of the option that names the file, for messages. Raises UserError: the file is missing or does not
    fit.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 3, 1)]
    width = 3
    for part in _ENCODER:
        if isinstance(part, str):
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
            continue
        layers += [nn.ReflectionPad2d(1), nn.Conv2d(width, part, 3), nn.ReLU()]
        width = part
    return _load_frozen(nn.Sequential(*layers), file, field)


def decoder(file: Path, field: str) -> nn.Sequential:
    """The decoder: maps the encoder's output to images (n, 3, h, w) of about [0, 1].

    ``file``: as in `encoder`. ``field``: as in `encoder`. Raises UserError: as in `encoder`.
    """
    layers: list[nn.Module] = []
    width = CHANNELS
    for part in _DECODER:
        if isinstance(part, str):
            layers.append(nn.Upsample(scale_factor=2, mode="nearest"))
            continue
        layers += [nn.ReflectionPad2d(1), nn.Conv2d(width, part, 3), nn.ReLU()]
        width = part
    return _load_frozen(nn.Sequential(*layers[:-1]), file, field)


def _load_frozen(layers: nn.Sequential, file: Path, field: str) -> nn.Sequential:
    """``layers`` with the weights of ``file``, frozen. Layers of the file that come later are ignored."""
    stored = read_weights(find_file(file, field))
    wanted: dict[str, Tensor] = layers.state_dict()
    for name, tensor in wanted.items():
        if name not in stored or stored[name].shape != tensor.shape:
            has = tuple(stored[name].shape) if name in stored else "nothing"
            raise UserError(f"{field}: {file} has {has} under '{name}', expected {tuple(tensor.shape)}")
    with torch.no_grad():
        layers.load_state_dict({name: stored[name] for name in wanted})
    return layers.eval().requires_grad_(False)


class StyleAccumulator:
    """The overall style of many images: mean and deviation per channel over all pixels of all images, in one pass.

    The variance is the mean of the images' variances plus the variance of their means. Sums are float64.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sums: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Add images or maps (n, c, h, w), or vectors (n, d) whose columns count as channels."""
        # On the CPU, because not every accelerator has float64.
        rows = values.detach().cpu().double().transpose(0, 1).flatten(1)  # (c, values of the channel)
        self._count += rows.shape[1]
        self._sums = rows.sum(1) if self._sums is None else self._sums + rows.sum(1)
        squares = rows.square().sum(1)
        self._squares = squares if self._squares is None else self._squares + squares

    def result(self, epsilon: float = EPSILON) -> tuple[Tensor, Tensor]:
        """Mean and deviation of all that was added."""
        if self._sums is None or self._squares is None or not self._count:
            raise UserError("a style needs at least one image")
        mean = self._sums / self._count
        variance = (self._squares / self._count - mean.square()).clamp(min=0)
        return mean.float(), (variance + epsilon).sqrt().float()


def style_assignment(samples: int, domains: int, level: int, generator: torch.Generator) -> Tensor:
    """Draw which L of K domains each sample takes its style from, without replacement.

    A sample that draws its own domain stays as it is there. So L = K keeps one untouched copy of each.
    """
    if not 1 <= level <= domains:
        raise UserError(f"a sample can take 1 to {domains} of {domains} styles, found level {level}")
    return torch.rand(samples, domains, generator=generator).argsort(1)[:, :level]
