"""Cross-client styles within one mini-batch: every sample draws its own version."""

from __future__ import annotations

import torch
from test_ccst import begun, inside, site_of
from tiny import images

from fedshift.methods.composition.styles import Channels, Style, Styler
from fedshift.methods.federated.ccst import CCST


def test_samples_of_a_batch_take_styles_independently() -> None:
    """Three flat styles and 300 samples of the first: about a third of one batch has each, and it is its version."""
    means = torch.tensor([0.2, 0.5, 0.8]).view(3, 1, 1)
    bank = {"mean": means, "deviation": torch.full((3, 1, 1), 1e-3)}
    domains = torch.stack([torch.tensor([0, 1, 2]).roll(row) for row in range(300)])
    styler = Styler(Channels(False), bank, domains, torch.zeros_like(domains), site_domain=0, unbiased=False)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    samples = 0.2 + 0.01 * torch.rand(300, 1, 6, 6)
    drawn = styler.restyle(samples, rows, torch.Generator().manual_seed(2)).mean((1, 2, 3))
    for mean in (0.5, 0.8):
        assert 70 < int((drawn - mean).abs().lt(0.02).sum()) < 130
    own = (drawn - 0.2).abs() < 0.02
    assert 70 < int(own.sum()) < 130
    # Which version of a row is which domain differs: with one version for all, every third row would be alike.
    version = torch.randint(3, (300,), generator=torch.Generator().manual_seed(2))
    expected = torch.tensor([0.2, 0.5, 0.8])[[domains[row, v] for row, v in zip(rows, version, strict=True)]]
    torch.testing.assert_close(drawn, expected, atol=0.02, rtol=0)


def test_the_assignment_holds_for_the_whole_run() -> None:
    """Another exchange draws other versions of a row, from the same few."""
    method = CCST(level=2)
    where, _ = begun(method, [images(name, 12) for name in "abc"])
    site = site_of(where, "b")
    tables = []
    for exchange in (5, 6):
        site.begin(type(site.envelope)(exchange, 1, 0.0, 100))
        site.scratch.clear()
        with inside(method, site):
            tables.append(site.scratch["styler"].domains)
    assert torch.equal(*tables)


class Costly(Channels):
    """Pixels, as if taking a style on were expensive; counts how many it made."""

    cached = True

    def __init__(self) -> None:
        super().__init__(unbiased=False)
        self.made = 0

    def apply(self, samples: torch.Tensor, style: Style) -> torch.Tensor:
        self.made += len(samples)
        return super().apply(samples, style)


def test_a_costly_version_is_made_once_and_is_that_of_its_row_and_domain() -> None:
    bank = {"mean": torch.tensor([0.2, 0.5, 0.8]).view(3, 1, 1), "deviation": torch.full((3, 1, 1), 0.05)}
    domains = torch.tensor([[0, 1, 2]] * 20)
    samples, draws, space = torch.rand(20, 1, 6, 6), torch.Generator().manual_seed(0), Costly()
    cached = Styler(space, bank, domains, torch.zeros_like(domains), site_domain=0, unbiased=False)
    plain = Styler(Channels(False), bank, domains, torch.zeros_like(domains), site_domain=0, unbiased=False)
    again = torch.Generator().manual_seed(0)
    for _ in range(60):
        rows = torch.randperm(20, generator=torch.Generator().manual_seed(1))
        first, second = (
            styler.restyle(samples[rows], rows, generator) for styler, generator in ((cached, draws), (plain, again))
        )
        torch.testing.assert_close(first, second, atol=0.5 / 255 + 1e-6, rtol=0)
    assert space.made == 40  # every row in both foreign styles


def test_pixels_stay_between_black_and_white() -> None:
    samples = torch.rand(3, 1, 6, 6)
    style = {"mean": torch.full((3, 1), 0.5), "deviation": torch.full((3, 1), 2.0)}
    styled = Channels(False).apply(samples, style)
    assert (styled.min(), styled.max()) == (0, 1)
