"""CCST and `styles`: what samples look like in the styles of the other sites, in every space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_ccst import SIZES, begun, coloured, inside, seen, site_of, styled
from tiny import MLP, domains, images, run, setting, vectors

from fedshift.errors import UserError
from fedshift.functional.colour import rgb_to_lab
from fedshift.functional.styles import channel_styles
from fedshift.methods.composition.styles import StylesOption, decoder, encoder
from fedshift.methods.federated.ccst import CCST
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.kd3a import KD3A

# Versions of a sample -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [None, 2, 1])
def test_the_augmented_set_has_n_times_l_samples(level: int | None) -> None:
    """At level K every image has one untouched copy and one in the style of every other site; labels stay."""
    method, found = CCST(level=level), [images(name, number) for name, number in SIZES.items()]
    where, _ = begun(method, found)
    drawn = seen(method, where, "a")
    assert sum(len(versions) for versions in drawn.values()) == 6 * (level or 3)
    original = torch.from_numpy(found[1].inputs).float() / 255  # type: ignore[arg-type]
    untouched = sum(torch.allclose(v, original[row], atol=1e-5) for row, versions in drawn.items() for v in versions)
    domains_of = site_of(where, "a").scratch["styler"].domains
    assert untouched == int((domains_of == 0).sum())
    assert level is not None or untouched == 6
    site = site_of(where, "a")
    with inside(method, site):
        for batch in site.batches():
            assert torch.equal(batch.targets, torch.from_numpy(found[1].labels)[batch.rows])
        for batch in site.all_batches():  # not for training: as they are
            torch.testing.assert_close(batch.inputs * 0.25 + 0.5, original[batch.rows])


def test_overall_styles_are_those_of_the_sites_and_images_take_them_on() -> None:
    method, found = CCST(), [images(name, number) for name, number in SIZES.items()]
    where, _ = begun(method, found)
    bank: Any = site_of(where, "a").memory["styles"]
    assert set(bank) == set(SIZES)
    for domain in found:
        pixels = torch.from_numpy(domain.inputs).double() / 255  # type: ignore[arg-type]
        assert bank[domain.name]["mean"].item() == pytest.approx(pixels.mean().item(), abs=1e-6)
        assert bank[domain.name]["deviation"].item() == pytest.approx((pixels.var(correction=0) + 1e-5).sqrt().item())
    original = torch.from_numpy(found[1].inputs).float() / 255  # type: ignore[arg-type]
    for row, versions in seen(method, where, "a").items():
        mean, deviation = channel_styles(original[row : row + 1])
        for name in "bc":
            style = bank[name]
            expected = (original[row] - mean[0]) / deviation[0] * style["deviation"][0] + style["mean"][0]
            assert any(torch.allclose(version, expected.clamp(0, 1), atol=1e-5) for version in versions)


def test_single_styles_are_of_images_of_the_site() -> None:
    method, found = CCST(style_mode="single", bank_size=5), [images(name, number) for name, number in SIZES.items()]
    where, _ = begun(method, found)
    bank: Any = site_of(where, "c").memory["styles"]
    for domain in found:
        means = channel_styles(torch.from_numpy(domain.inputs).float() / 255)[0].flatten().tolist()  # type: ignore[arg-type]
        shared = bank[domain.name]["mean"].flatten().tolist()
        assert len(shared) == 5
        assert all(min(abs(mean - known) for known in means) < 1e-6 for mean in shared)
        assert len({round(mean, 7) for mean in shared}) == 5  # five different images
    few = CCST(style_mode="single", bank_size=9)
    where, _ = begun(few, found)
    assert len(site_of(where, "a").memory["styles"]["a"]["mean"]) == 9  # type: ignore[index]


def test_one_style_per_batch() -> None:
    options: dict[str, Any] = {"style_mode": "single", "bank_size": 6}
    found = [images(name, 30) for name in "abc"]
    spread: list[int] = []
    for same in (False, True):
        method = CCST(**options, one_style_per_batch=same)
        where, _ = begun(method, found)
        with inside(method, site_of(where, "a")):
            styler = site_of(where, "a").scratch["styler"]
        first = {
            (domain, number)
            for row in range(8)  # the first mini-batch's number of images
            for domain, number in zip(styler.domains[row].tolist(), styler.numbers[row].tolist(), strict=True)
        }
        spread.append(len(first))
    assert spread[1] == 3 < spread[0]


def test_the_target_is_in_no_bank() -> None:
    method = styled(KD3A())
    _, where = run(method, domains(MLP), MLP, rounds=1)
    bank: Any = site_of(where, "large").memory["styles"]
    assert set(bank) == {"large", "small", "one"}
    assert "styles" not in site_of(where, "target").memory
    entries = [entry for entry in where.ledger.entries if entry.kind == "styles"]
    assert {entry.site for entry in entries} == set(bank)


def test_vectors_take_on_the_columns_of_a_site() -> None:
    method, found = CCST(), [vectors(name, number) for name, number in SIZES.items()]
    where, _ = begun(method, found, MLP)
    site = site_of(where, "a")
    bank: Any = site.memory["styles"]
    x = torch.from_numpy(found[1].inputs)  # type: ignore[arg-type]
    torch.testing.assert_close(bank["a"]["mean"][0], x.mean(0), atol=1e-6, rtol=0)
    own, other = bank["a"], bank["b"]
    expected = (x - own["mean"]) / own["deviation"] * other["deviation"] + other["mean"]
    site.begin(type(site.envelope)(9, 1, 0.0, 10_000))
    with inside(method, site):
        drawn = [(row, s) for b in site.batches(30) for row, s in zip(b.rows.tolist(), b.inputs, strict=True)]
    for row in range(6):
        assert any(number == row and torch.allclose(s, expected[row], atol=1e-5) for number, s in drawn)


def test_lab_moves_the_lab_statistics() -> None:
    method, found = CCST(style_space="lab"), [coloured(name, number) for name, number in SIZES.items()]
    where, _ = begun(method, found)
    bank: Any = site_of(where, "a").memory["styles"]
    pixels = torch.from_numpy(found[0].inputs).float() / 255  # type: ignore[arg-type]
    torch.testing.assert_close(bank["b"]["mean"][0], rgb_to_lab(pixels).mean((0, 2, 3)), atol=1e-3, rtol=1e-4)
    state, _ = run(method, found)
    assert state.weights != run(CCST(), found)[0].weights


def test_low_frequencies_are_swapped() -> None:
    """The mean of what comes out is the other site's; higher frequencies stay."""
    method, found = CCST(style_space="lowfreq"), [images(name, number) for name, number in SIZES.items()]
    where, _ = begun(method, found)
    bank: Any = site_of(where, "a").memory["styles"]
    pixels = [torch.from_numpy(domain.inputs).float() / 255 for domain in found]  # type: ignore[arg-type]
    amplitudes = torch.fft.fft2(pixels[0]).abs().mean(0)[0]
    expected = torch.stack([amplitudes[u, :2] for u in (-1, 0, 1)])
    torch.testing.assert_close(bank["b"]["amplitude"][0, 0], expected, atol=1e-3, rtol=1e-4)
    for row, versions in seen(method, where, "a").items():
        for name, mean in (("b", pixels[0].mean()), ("c", pixels[2].mean())):
            changed = [v for v in versions if v.min() > 0 and v.max() < 1 and abs(v.mean() - mean) < 1e-4]
            for version in changed:
                before, after = (torch.fft.fft2(image)[0] for image in (pixels[1][row], version))
                torch.testing.assert_close(after[2:-1], before[2:-1], atol=1e-2, rtol=1e-3)
            assert changed or any(v.min() == 0 or v.max() == 1 for v in versions), name
    assert where.ledger.total["up"]["styles"] == 3 * 4 * 6
    assert run(method, found)[0].weights != run(CCST(style_space="lowfreq", half_width=0), found)[0].weights


def test_features_take_styles_on_after_the_stage_in_training_only() -> None:
    method, found = CCST(style_space="feature"), [images(name, number) for name, number in SIZES.items()]
    where, _ = begun(method, found)
    site = site_of(where, "a")
    assert site.memory["styles"]["b"]["mean"].shape == (1, 3)  # type: ignore[index]
    site.begin(type(site.envelope)(9, 1, 0.0, 10_000))
    with inside(method, site):
        model = site.model()
        batch = next(iter(site.batches()))
        _, styled = model.with_stages(batch.inputs, ("conv1",))
        _, plain = model.eval().with_stages(batch.inputs, ("conv1",))
        foreign = site.scratch["styler"]._now[1]
    assert foreign.any()
    for row in range(len(batch.inputs)):
        assert torch.allclose(styled["conv1"][row], plain["conv1"][row]) != bool(foreign[row])
    bank: Any = site.memory["styles"]
    means = styled["conv1"].mean((2, 3))
    for row in foreign.nonzero().flatten().tolist():
        assert any(torch.allclose(means[row], bank[name]["mean"][0], atol=1e-4) for name in "bc")
    outside = site.model()  # no hook is left behind
    _, after = outside.with_stages(batch.inputs, ("conv1",))
    assert torch.equal(after["conv1"], plain["conv1"])


@pytest.fixture
def vgg_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random weights under the published names; the encoder's file also has layers that are not needed."""
    monkeypatch.setenv("FEDSHIFT_WEIGHTS", str(tmp_path))
    draws = torch.Generator().manual_seed(0)

    def write(name: str, shapes: dict[int, tuple[int, int, int]]) -> None:
        tensors = {}
        for layer, (out, into, kernel) in shapes.items():
            tensors[f"{layer}.weight"] = (
                torch.randn(out, into, kernel, kernel, generator=draws) * (2 / (into * kernel**2)) ** 0.5
            )
            tensors[f"{layer}.bias"] = torch.zeros(out)
        save_file(tensors, tmp_path / name)

    write(
        "vgg19_normalised.safetensors",
        {0: (3, 3, 1), 2: (64, 3, 3), 5: (64, 64, 3), 9: (128, 64, 3), 12: (128, 128, 3), 16: (256, 128, 3)}
        | {19: (256, 256, 3), 22: (256, 256, 3), 25: (256, 256, 3), 29: (512, 256, 3), 32: (4, 512, 3)},
    )
    write(
        "adain_decoder.safetensors",
        {1: (256, 512, 3), 5: (256, 256, 3), 8: (256, 256, 3), 11: (256, 256, 3), 14: (128, 256, 3)}
        | {18: (128, 128, 3), 21: (64, 128, 3), 25: (64, 64, 3), 28: (3, 64, 3)},
    )
    return tmp_path


@pytest.mark.slow
def test_vgg(vgg_files: Path) -> None:
    """512 means and 512 deviations a style, 4,096 bytes; grey and colour images; each version is made once."""
    for make in (images, coloured):
        method, found = CCST(style_space="vgg", vgg_size=16), [make("a", 3), make("b", 2)]
        state, where = run(method, found, rounds=1)
        assert where.ledger.total["up"]["styles"] == 2 * 4096
        assert where.ledger.total["down"]["styles"] == 2 * 2 * 4096
        state.weights.check_finite("a run")
        styler = site_of(where, "a").scratch["styler"]
        assert styler._cache.shape == (3, 2, *found[0].inputs.shape[1:])
    maps = encoder(Path("vgg19_normalised.safetensors"), "x")(torch.rand(1, 3, 32, 32))
    assert maps.shape == (1, 512, 4, 4)
    assert decoder(Path("adain_decoder.safetensors"), "x")(maps).shape == (1, 3, 32, 32)


def test_vgg_without_its_files_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_WEIGHTS", str(tmp_path))
    network = setting(FedAvg(), domains()).build_network()
    with pytest.raises(UserError, match=rf"styles: style_space: no weights file at {tmp_path}/vgg19_normalised\.safe"):
        StylesOption(style_space="vgg").check(network, (3, 8, 8), 2)
    save_file({"0.weight": torch.zeros(2, 3, 1, 1)}, tmp_path / "vgg19_normalised.safetensors")
    with pytest.raises(UserError, match=r"adain_decoder\.safetensors"):
        StylesOption(style_space="vgg").check(network, (3, 8, 8), 2)
    with pytest.raises(UserError, match=r"has \(2, 3, 1, 1\) under '0\.weight', expected \(3, 3, 1, 1\)"):
        encoder(Path("vgg19_normalised.safetensors"), "ccst.style_space")
