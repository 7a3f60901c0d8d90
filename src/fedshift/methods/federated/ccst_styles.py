"""Representations of styles: extract styles from a site's samples, and apply styles to samples.

Styles are named tensors whose first axis counts styles. Samples are as stored; images have values in [0, 1].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from fedshift.errors import UserError
from fedshift.functional.colour import grey, lab_to_rgb, rgb_to_lab
from fedshift.functional.spectra import interpolated, low_frequencies
from fedshift.functional.styles import StyleAccumulator, adain, channel_styles
from fedshift.methods.federated.ccst_vgg import decoder, encoder

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
        return interpolated(samples, style["amplitude"], torch.ones(()).to(samples), self.half).clamp(0, 1)


class Columns(StyleSpace):
    """For vectors: mean and deviation of every column over a site's samples, as for an image's channels.

    Args:
        own: the style of the site whose samples are changed.
    """

    def __init__(self, own: Style | None = None) -> None:
        self.own = own

    def of_each(self, samples: Tensor) -> Style:
        raise UserError("style_space: a single vector has no style; use style_mode: overall")

    def of_all(self, batches: Iterable[Tensor]) -> Style:
        return overall(batches)

    def apply(self, samples: Tensor, style: Style) -> Tensor:
        assert self.own is not None
        own_mean, own_deviation = self.own["mean"].to(samples), self.own["deviation"].to(samples)
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

    Args:
        space: applies styles. None: they are applied to the network's features, see `hook`.
        bank: the styles, tensors (K, J, …).
        domains: which of the K domains each of a sample's L versions has, (N, L).
        numbers: which of the J styles it has, (N, L).
        own: the site's domain. In this style, samples are unchanged.
        unbiased: as in `adain`.
    """

    def __init__(
        self, space: StyleSpace | None, bank: Style, domains: Tensor, numbers: Tensor, own: int, *, unbiased: bool
    ) -> None:
        self.domains, self.numbers = domains, numbers
        self._space, self._bank, self._own, self._unbiased = space, bank, own, unbiased
        self._cache: Tensor | None = None
        self._filled = torch.zeros(domains.shape, dtype=torch.bool)
        self._now: tuple[Style, Tensor] | None = None

    def restyle(self, samples: Tensor, rows: Tensor, draws: torch.Generator) -> Tensor:
        """Each sample in one of its versions, which is drawn each time."""
        rows = rows.cpu()
        version = torch.randint(self.domains.shape[1], (len(rows),), generator=draws)
        domains, numbers = (table[rows, version].to(samples.device) for table in (self.domains, self.numbers))
        style = {part: tensor[domains, numbers] for part, tensor in self._bank.items()}
        foreign = domains != self._own
        if self._space is None:
            self._now = style, foreign
            return samples
        if self._space.cached:
            return self._remembered(samples, style, foreign, rows, version)
        return _where(foreign, self._space.apply(samples, style), samples)

    def _remembered(self, samples: Tensor, style: Style, foreign: Tensor, rows: Tensor, version: Tensor) -> Tensor:
        """As `restyle`, for slow spaces: a version is computed once and kept with 8 bits, as in an image file."""
        assert self._space is not None
        if self._cache is None:
            self._cache = torch.empty((*self.domains.shape, *samples.shape[1:]), dtype=torch.uint8)
        new = (~self._filled[rows, version] & foreign.cpu()).nonzero().flatten()
        if len(new):
            place = new.to(samples.device)
            made = self._space.apply(samples[place], {part: tensor[place] for part, tensor in style.items()})
            self._cache[rows[new], version[new]] = (made * 255).round().to(torch.uint8).cpu()
            self._filled[rows[new], version[new]] = True
        return _where(foreign, self._cache[rows, version].to(samples) / 255, samples)

    def hook(self, stage: nn.Module) -> RemovableHandle:
        """Apply AdaIN to the output of a network's stage in training mode, with the styles of the last batch.

        Copies of the stage do the same.
        """

        def restyled(module: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
            if self._now is None or not module.training or len(output) != len(self._now[1]):
                return None
            style, foreign = self._now
            return _where(foreign, adain(output, style["mean"], style["deviation"], unbiased=self._unbiased), output)

        return stage.register_forward_hook(restyled)


def _where(chosen: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """``first`` for the chosen samples, ``second`` for the others."""
    return torch.where(chosen.view(-1, *[1] * (first.dim() - 1)), first, second)
