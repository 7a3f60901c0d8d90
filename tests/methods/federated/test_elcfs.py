"""FedDG-ELCFS: a round beside a plain re-implementation, settings and options, what crosses the wire, bad input."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tiny import CNN, LINEAR, NORMED_CNN, domains, evaluated, federation, images, run, setting, start_of, vectors
from torch import Tensor

from fedshift.data.domain import Domain
from fedshift.errors import ReplyRefused, UserError
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Spectra
from fedshift.federation.randomness import generator
from fedshift.federation.site import Batch
from fedshift.methods.base import Samples
from fedshift.methods.federated.elcfs import ELCFS, _Bank
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import Weights

WIDE = 0.2  # of 12 pixels: b = 2


def transformed(image: Tensor, donor: Tensor, rate: float, half: int) -> Tensor:
    """By NumPy's whole transform, one channel, pixels in [0, 1]."""
    own, other = np.fft.fft2(image.numpy()), np.fft.fft2(donor.numpy())
    mixed = np.abs(own)
    for u in range(-half, half + 1):
        for v in range(-half, half + 1):
            mixed[u, v] = (1 - rate) * mixed[u, v] + rate * np.abs(other)[u, v]
    return torch.from_numpy(np.clip(np.real(np.fft.ifft2(mixed * np.exp(1j * np.angle(own)))), 0, 1)).float()


def drawn_rates(law: str, images: int, draws: torch.Generator) -> Tensor:
    """How much of an image's amplitude is another's, by image."""
    if law == "uniform":
        return torch.rand(images, generator=draws)
    if law == "own amplitude gone":
        torch.randint(1, (images,), generator=draws)
        return torch.ones(images)
    return (1 + torch.randint(9, (images,), generator=draws)) / 10


def plain_round(
    inner_rate: float,
    order: str,
    *,
    half: int = 2,
    drawn: bool = False,
    law: str = "uniform",
    share: float = 16 / 24,
    network: dict[str, object] = CNN,
) -> Weights:
    """One round at the sites ``a`` and ``b`` by the equations, without functional calls, windows or shared code.

    drawn: the foreign site of an image is drawn, as with one copy. share: of site ``a``.
    """
    method, second = ELCFS(), order == "second"
    found = [images("a", 16), images("b", 8)]
    whole = setting(method, found, network, momentum=0.0, lr=0.05)
    start = whole.build_network()
    trained: list[dict[str, Tensor]] = []
    for own, other in ((0, 1), (1, 0)):
        name, pixels = found[own].name, torch.from_numpy(found[own].inputs).float() / 255
        foreign, labels = torch.from_numpy(found[other].inputs).float() / 255, torch.from_numpy(found[own].labels)
        shuffle, donors = generator(3, name, 3, "batches"), generator(3, name, 3, "donors")
        model = copy.deepcopy(start).train()
        for rows in torch.split(torch.randperm(len(labels), generator=shuffle), 8):
            if drawn:
                torch.randint(1, (len(rows),), generator=donors)  # which site: there is one
            chosen = (torch.rand(len(rows), generator=donors) * len(foreign)).long()
            rates = drawn_rates(law, len(rows), donors)
            mixed = torch.stack(
                [
                    transformed(pixels[i, 0], foreign[j, 0], float(r), half)[None]
                    for i, j, r in zip(rows, chosen, rates, strict=True)
                ]
            )
            inputs, copies = ((values - 0.5) / 0.25 for values in (pixels[rows], mixed))
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(
                F.cross_entropy(model(inputs), labels[rows]), parameters, create_graph=second
            )
            if second:
                ahead = [p - inner_rate * g for p, g in zip(parameters, gradients, strict=True)]
                named = dict(zip(dict(model.named_parameters()), ahead, strict=True))
                moved = torch.func.functional_call(model, named, (copies,))
                extra = torch.autograd.grad(F.cross_entropy(moved, labels[rows]), parameters)
            else:
                twin = copy.deepcopy(model)
                with torch.no_grad():
                    for p, g in zip(twin.parameters(), gradients, strict=True):
                        p -= inner_rate * g
                extra = torch.autograd.grad(F.cross_entropy(twin(copies), labels[rows]), list(twin.parameters()))
                if order != "none":  # the pass on the copies is one of the model's own
                    for own_buffer, moved_buffer in zip(model.buffers(), twin.buffers(), strict=True):
                        own_buffer.copy_(moved_buffer)
            if order == "none":
                extra = tuple(torch.zeros_like(one) for one in extra)
            with torch.no_grad():
                for p, g, more in zip(parameters, gradients, extra, strict=True):
                    p -= 0.05 * (g + more)
        trained.append(model.state_dict())
    return Weights({key: share * trained[0][key] + (1 - share) * trained[1][key] for key in trained[0]})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window": WIDE}, {"order": "second"}),
        ({"window": WIDE, "meta_gradient": "first"}, {"order": "first"}),
        ({"window": WIDE, "setting": "light"}, {"order": "first", "drawn": True}),
        (
            {"setting": "released", "bank_share": 1.0},  # which spectra leave a site is drawn there, see below
            {"order": "first", "drawn": True, "half": 0, "law": "own amplitude gone", "share": 0.67},
        ),
        ({"setting": "ccst_port"}, {"order": "none", "drawn": True, "half": 0, "law": "tenths", "share": 0.5}),
    ],
    ids=str,
)
def test_a_round_is_the_equations(options: dict[str, Any], expected: dict[str, Any]) -> None:
    method = ELCFS.model_validate({"inner_rate": 0.5, **options})
    state, _ = run(method, [images("a", 16), images("b", 8)], rounds=1, momentum=0.0, lr=0.05)
    for key, tensor in plain_round(0.5, **expected).items():
        torch.testing.assert_close(state.weights[key], tensor, atol=2e-5, rtol=1e-4)


def test_the_released_setting_sends_an_eighth_of_the_spectra_and_of_each_one_number() -> None:
    method = ELCFS.model_validate({"setting": "released"})
    where = federation(method, [images("a", 16), images("b", 8)])
    method.start(where, start_of(method))
    assert where.ledger.total["up"]["spectra"] == 4 * (2 + 1)


def test_the_copies_of_an_image_have_its_label() -> None:
    """Of two foreign sites: the loss of all copies is the mean of the losses of either site's."""
    method, found = ELCFS(), [images("a", 8)]
    model = setting(method, found).build_network()
    labels, first, second = torch.tensor([0, 1, 2, 0]), torch.randn(4, 1, 12, 12), torch.randn(4, 1, 12, 12)
    batch = Batch(torch.randn(4, 1, 12, 12), labels, torch.zeros(4, dtype=torch.int64), torch.arange(4))
    site: Any = SimpleNamespace(objective=model.objective)
    loss = method._meta_loss(site, model, dict(model.named_parameters()), batch, torch.cat([first, second]))
    each = [F.cross_entropy(model(copies), labels) for copies in (first, second)]
    torch.testing.assert_close(loss, (each[0] + each[1]) / 2)


def test_laws_of_the_rate() -> None:
    method = ELCFS()
    where = federation(method)
    method.start(where, start_of(method))
    site = where._runners["large"].site  # type: ignore[attr-defined]
    expected = {
        "released": {1.0},
        "ccst": {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9},
        "demo": {0.2, 0.4, 0.6, 0.8, 1.0},
    }
    for law, values in expected.items():
        drawn = _Bank(ELCFS(rates=law), site)._rates(500)  # type: ignore[arg-type]
        assert {round(value, 6) for value in drawn.tolist()} == values
    uniform = _Bank(ELCFS(), site)._rates(4000)
    assert 0 <= uniform.min() < 0.01
    assert 0.99 < uniform.max() < 1
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.02)


def test_copies_for_all_foreign_sites() -> None:
    """K − 1 copies in the order of the sites' names, each under an amplitude of its site."""
    method = ELCFS(window=0.0, copies="all", rates="released")
    flat = [
        type(images("x", 1))(n, np.full((4, 1, 12, 12), v, np.uint8), np.arange(4) % 3)
        for n, v in zip("abc", (51, 102, 204), strict=True)
    ]
    where = federation(method, flat)
    method.start(where, start_of(method, flat))
    site = where._runners["a"].site  # type: ignore[attr-defined]
    inputs = next(iter(site.all_batches())).inputs
    copies = site.pixels(_Bank(method, site).copies(inputs))
    assert copies.shape == (8, 1, 12, 12)
    torch.testing.assert_close(copies.mean((1, 2, 3)), torch.tensor([0.4] * 4 + [0.8] * 4))


# The wire -------------------------------------------------------------------------------------------------------------


def test_only_the_window_travels_and_only_once() -> None:
    method = ELCFS(window=WIDE, bank_share=0.5)
    found = domains(NORMED_CNN, {"a": 20, "b": 10, "c": 4})
    _, where = run(method, found, NORMED_CNN, rounds=2)
    each = 4 * 1 * 5 * 3
    assert where.ledger.total["up"]["spectra"] == each * (10 + 5 + 2)
    assert where.ledger.total["down"]["spectra"] == 2 * each * (10 + 5 + 2)
    kinds = {(entry.call, entry.kind) for entry in where.ledger.entries if entry.kind == "spectra"}
    assert kinds == {("share_spectra", "spectra"), ("receive", "spectra")}
    assert isinstance(where, LocalFederation)
    bank = where._runners["a"].site.memory["bank"]
    assert sorted(bank) == ["b", "c"]  # type: ignore[arg-type]
    assert isinstance(bank["b"], Spectra)  # type: ignore[index]
    assert bank["b"]["amplitude"].shape == (5, 1, 5, 3)  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "expected", "passes"),
    [
        ({"window": WIDE}, {"order": "second"}, 2),
        ({"window": WIDE, "setting": "light"}, {"order": "first", "drawn": True}, 2),
        ({"setting": "ccst_port"}, {"order": "none", "drawn": True, "half": 0, "law": "tenths", "share": 0.5}, 1),
    ],
    ids=str,
)
def test_statistics_of_batch_norm_follow_both_passes_but_in_the_port_that_at_the_start(
    options: dict[str, Any], expected: dict[str, Any], passes: int
) -> None:
    """By a round on a network with BatchNorm, whose copies pass a twin (CCST's train_meta asks a copy of the model)."""
    method = ELCFS.model_validate({"inner_rate": 0.5, **options})
    found = [images("a", 16), images("b", 8)]
    state, _ = run(method, found, NORMED_CNN, rounds=1, momentum=0.0, lr=0.05)
    plain = plain_round(0.5, network=NORMED_CNN, **expected)
    for key, tensor in plain.items():
        if tensor.is_floating_point() and not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(state.weights[key], tensor, atol=5e-5, rtol=1e-3)
    counts = {int(value) for key, value in state.weights.items() if key.endswith("num_batches_tracked")}
    assert counts == {passes * 2}  # the larger site has two mini-batches


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"size": 16}, {"channels": 3}])
def test_images_of_different_sizes_or_grey_and_colour_say_which_site(other: dict[str, int]) -> None:
    method = ELCFS()
    where = federation(method, [images("a", 4), images("b", 4, **other), images("c", 4)])
    with pytest.raises(ReplyRefused, match="the reply of site 'b' in round 0"):
        method.start(where, start_of(method))


def test_vectors_have_no_spectra() -> None:
    with pytest.raises(UserError, match="the samples are not images"):
        ELCFS().check_samples(Samples(vectors("a", 3).inputs.shape[1:]))


def test_a_window_below_one_frequency_is_a_warning() -> None:
    (warning,) = ELCFS().check_samples(Samples((1, 28, 28)))
    assert "window of 3×3" in warning
    assert "0.036" in warning
    assert ELCFS(window=0.05).check_samples(Samples((1, 28, 28))) == ()
    assert ELCFS(window=0).check_samples(Samples((1, 28, 28))) == ()
    assert ELCFS().check_samples(Samples((3, 224, 224))) == ()
    assert ELCFS()._half_width(28, 28) == 1
    assert ELCFS(window=0)._half_width(28, 28) == 0


# What it is for -------------------------------------------------------------------------------------------------------


def lit(name: str, number: int, offsets: tuple[int, int, int], seed: int) -> Domain:
    """Handwritten digits 0, 1 and 2 (scikit-learn), each class lit as ``offsets`` say; a random offset if all agree."""
    digits = load_digits(n_class=3)
    draw = np.random.default_rng([seed, sum(name.encode())])
    rows = draw.choice(len(digits.target), number, replace=False)
    light = np.array(offsets)[digits.target[rows]]
    if len(set(offsets)) == 1:
        light = draw.choice([20, 70, 120], number)
    pixels = digits.images[rows] * 6 + light[:, None, None] + draw.normal(size=(number, 8, 8)) * 12
    padded = np.pad(pixels, ((0, 0), (2, 2), (2, 2)), mode="edge")[:, None]
    return Domain(name, np.clip(padded, 0, 255).astype(np.uint8), digits.target[rows].astype(np.int64))


@pytest.mark.slow
def test_it_unlearns_what_light_says_about_the_class() -> None:
    """At every source the light gives the class away, at the unseen site it says nothing: FedAvg follows it (measured
    46 and 48 percent with seeds 0 and 1), foreign amplitudes break it (98 and 99).
    """
    orders = {"a": (20, 70, 120), "b": (20, 120, 70), "c": (70, 20, 120)}
    found = [lit(name, 96, offsets, 0) for name, offsets in orders.items()]
    unseen = lit("unseen", 200, (0, 0, 0), 0)
    inputs = (torch.from_numpy(np.asarray(unseen.inputs)).float() / 255 - 0.5) / 0.25
    accuracies = {}
    for method in (ELCFS(window=0.0, rates="released", local_epochs=4), FedAvg(local_epochs=4)):
        options: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "budget": 400, "rounds": 2}
        state, _ = run(method, found, LINEAR, seed=0, **options)
        with torch.no_grad():
            right = evaluated(method, state.weights, found, LINEAR)(inputs).argmax(1).numpy() == unseen.labels
        accuracies[method.name] = 100 * right.mean()
    assert accuracies["elcfs"] > 85, accuracies
    assert 35 < accuracies["fedavg"] < 70, accuracies


def test_a_part_of_the_spectra_is_drawn_and_not_the_first() -> None:
    whole, half = ELCFS(window=WIDE), ELCFS(window=WIDE, bank_share=0.5)
    found = [images("a", 12), images("b", 12), images("c", 12)]
    first = 0
    for name in "abc":
        sites = [federation(method, found, CNN) for method in (whole, half)]
        all_rows, drawn = (
            method.share_spectra(where._runners[name].site).spectra["amplitude"]  # type: ignore[attr-defined]
            for method, where in zip((whole, half), sites, strict=True)
        )
        places = [int((all_rows == row).flatten(1).all(1).nonzero()[0, 0]) for row in drawn]
        assert len(set(places)) == 6, "each once"
        first += places == list(range(6))
    assert first == 0
