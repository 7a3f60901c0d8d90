"""Cross-client styles within one mini-batch: every sample draws its own version."""

from __future__ import annotations

import pytest
import torch
from test_ccst import begun, inside, seen, site_of
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


def test_own_samples_stay_as_they_are_bit_for_bit() -> None:
    bank = {"mean": torch.tensor([[[0.9]]]), "deviation": torch.tensor([[[0.5]]])}
    samples = torch.rand(4, 1, 3, 3)
    table = torch.zeros(4, 2, dtype=torch.int64)
    styler = Styler(Channels(False), bank, table, table, site_domain=0, unbiased=False)
    assert torch.equal(styler.restyle(samples, torch.arange(4), torch.Generator()), samples)


def test_a_batchs_worth_of_images_shares_its_styles() -> None:
    """``one_style_per_batch``: rows 0 to 7, 8 to 15, … (a batch size of 8) have one style per domain each."""
    method = CCST(style_mode="single", bank_size=6, one_style_per_batch=True)
    where, _ = begun(method, [images(name, 30) for name in "abc"])
    site = site_of(where, "a")
    with inside(method, site):
        styler = site.scratch["styler"]
    blocks = []
    for first in range(0, 30, 8):
        pairs = {
            (int(domain), int(number))
            for row in range(first, min(30, first + 8))
            for domain, number in zip(styler.domains[row], styler.numbers[row], strict=True)
        }
        assert len(pairs) == 3, "one style of each domain"
        blocks.append(tuple(sorted(pairs)))
    assert len(set(blocks)) > 1, "and another in the next batch's worth"


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


def test_a_bank_of_images_is_as_large_as_it_says() -> None:
    method = CCST(style_mode="single", bank_size=5)
    where, _ = begun(method, [images(name, 12) for name in "abc"])
    sizes = {name: len(styles["mean"]) for name, styles in site_of(where, "a").memory["styles"].items()}  # type: ignore[union-attr]
    assert sizes == {"a": 5, "b": 5, "c": 5}


@pytest.mark.parametrize("own", [0, 1])
def test_which_domain_is_the_sites_own(own: int) -> None:
    bank = {"mean": torch.tensor([[[0.3]], [[0.7]]]), "deviation": torch.full((2, 1, 1), 1e-3)}
    table = torch.tensor([[0, 1]] * 40)
    styler = Styler(Channels(False), bank, table, torch.zeros_like(table), site_domain=own, unbiased=False)
    samples = torch.full((40, 1, 3, 3), 0.5)
    drawn = styler.restyle(samples, torch.arange(40), torch.Generator().manual_seed(0)).mean((1, 2, 3))
    other = (0.7, 0.3)[own]
    assert {round(value, 3) for value in drawn.tolist()} == {0.5, other}


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


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_each_site_keeps_its_own_samples_and_its_data(name: str) -> None:
    """At full level every image has one untouched copy, at whichever site; and none is styled outside a step."""
    sizes = {"b": 8, "a": 6, "c": 7}
    method, found = CCST(), [images(site, number) for site, number in sizes.items()]
    where, _ = begun(method, found)
    original = next(torch.from_numpy(one.inputs).float() / 255 for one in found if one.name == name)  # type: ignore[arg-type]
    drawn = seen(method, where, name)
    untouched = [sum(torch.allclose(v, original[row], atol=1e-5) for v in versions) for row, versions in drawn.items()]
    assert untouched == [1] * sizes[name]
    site = site_of(where, name)
    plain = site.data
    with inside(method, site):
        assert site.data is not plain
    assert site.data is plain


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_versions_that_stay_as_they_are_have_the_sites_own_number(name: str) -> None:
    """Numbers are places among the sites' names in order, whatever the order in which sites were listed."""
    method, found = CCST(), [images(site, number) for site, number in {"b": 8, "a": 6, "c": 7}.items()]
    where, _ = begun(method, found)
    site = site_of(where, name)
    with inside(method, site):
        styler = site.scratch["styler"]
    samples, untouched = torch.rand(5, 1, 12, 12), []
    for place, of in enumerate("abc"):
        styler.domains[:] = place
        if torch.equal(styler.restyle(samples, torch.arange(5), torch.Generator()), samples):
            untouched.append(of)
    assert untouched == [name]
