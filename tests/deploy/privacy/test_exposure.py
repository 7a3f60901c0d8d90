"""The exposure of a call's update: low in honest training of every method, high for crafted networks of many kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny import images, normed_for, run, setting, vectors
from torch import Tensor, nn

from fedshift.data.domain import Domain
from fedshift.deploy.audit.crafted import craft, fully_connected
from fedshift.deploy.privacy import exposure as watch_module
from fedshift.deploy.privacy.exposure import ExposureWatch
from fedshift.deploy.remote.policy import Policy
from fedshift.federation.messages import Reply
from fedshift.federation.site import Envelope
from fedshift.federation.site_runner import SitePlan, SiteRunner
from fedshift.functional.exposure import exposure, largest_shares
from fedshift.methods import registry
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.models.network import Network
from fedshift.weights import Weights
from tried import slow_after

LIMIT = Policy().exposure_limit(100)
"""For the crafted networks below, at a site of 100 samples or more."""
HELD = [
    name
    for name in registry.names()
    if name != "zero_shot"  # which asks no site
    and not registry.method_class(name).traits.pooled
    and "features" not in registry.method_class(name)().calls.shares
]
"""The rule does not hold for a method that sends features: those show single samples themselves."""
ONCE = {"batch_size": 10_000, "lr": 1.0}


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The exposure of every call that is run, in parts of the limit."""
    scores: list[float] = []
    plain = SiteRunner.run

    def run_watched(self: SiteRunner, call: str, envelope: Envelope, content: Mapping[str, Any]) -> tuple[Reply, int]:
        with ExposureWatch(self.site) as watch:
            done = plain(self, call, envelope, content)
        scores.append(watch.score() / Policy().exposure_limit(watch.samples()))
        return done

    monkeypatch.setattr(SiteRunner, "run", run_watched)
    return scores


@pytest.mark.threat("crafted_network")
@pytest.mark.parametrize("name", slow_after(12, HELD))
def test_no_honest_call_of_a_method_is_refused(name: str, scores: list[float]) -> None:
    method = registry.parse({"name": name})
    network = normed_for(method)
    make = vectors if network["name"] == "mlp" else images
    run(method, [make("north", 41), make("south", 30)], network, rounds=1)
    assert max(scores) > 0 or name == "promptfl"  # which has no layer that reads samples
    assert max(scores) < 1


def noise(samples: int, width: int = 8, classes: int = 3) -> Domain:
    draws = np.random.default_rng(3)
    return Domain("north", draws.normal(size=(samples, width)).astype(np.float32), np.arange(samples) % classes)


def score(
    domain: Domain,
    network: Mapping[str, Any],
    change: Callable[[Network], None],
    local_epochs: int = 1,
    **training: Any,
) -> float:
    """The exposure of FedAvg's call on a network whose weights ``change`` crafted."""
    method = FedAvg(local_epochs=local_epochs)
    whole = setting(method, [domain], network, **{**ONCE, **training})
    runner = SiteRunner(SitePlan("north", "source", [(domain, np.arange(len(domain)), 0)]), whole)
    crafted = whole.build_network()
    with torch.no_grad():
        change(crafted)
    weights = Weights({key: tensor.contiguous() for key, tensor in crafted.state_dict().items()})
    with ExposureWatch(runner.site) as watch:
        runner.run("fit", Envelope(1, 1, 0.0, 1000), {"weights": weights})
    return watch.score()


def like(width: int = 8) -> Tensor:
    return torch.randn(4000, width, generator=torch.Generator().manual_seed(1))


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def bins(network: Network) -> None:
    craft(network, like(), 100, "bins", draws())


def traps(network: Network) -> None:
    craft(network, like(), 100, "traps", draws())


def mix(network: Network) -> None:
    """Bins whose units answer to each class differently: only sums of several units show a sample."""
    bins(network)
    last = fully_connected(network)[-1]
    last.weight.copy_(torch.randn(last.weight.shape, generator=draws()) * last.weight.abs().max())


def double(network: Network) -> None:
    """Bins of which each comes four times: a unit is most like its copies, which show nothing."""
    bins(network)
    first = fully_connected(network)[0]
    assert first.bias is not None
    first.bias.copy_(first.bias[::4].repeat_interleave(4)[: len(first.bias)])


def a_few(network: Network) -> None:
    """Bins among the highest fifth only: most samples have no part."""
    bins(network)
    first = fully_connected(network)[0]
    assert first.bias is not None
    highest = (like() @ first.weight[0]).quantile(0.8 + 0.2 * (torch.arange(len(first.bias)) + 0.5) / len(first.bias))
    first.bias.copy_(-highest)


def second(network: Network) -> None:
    """The first layer hands all inputs on, the second is crafted."""
    first, after, last = fully_connected(network)
    assert first.bias is not None
    assert after.bias is not None
    assert last.bias is not None
    first.weight.zero_()
    first.weight[: first.in_features].copy_(torch.eye(first.in_features))
    first.bias.fill_(10.0)
    direction = torch.randn(first.in_features, generator=draws())
    after.weight.zero_()
    after.weight[:, : first.in_features] = 1e-3 * direction
    measured = (like() + 10.0) @ (1e-3 * direction)
    after.bias.copy_(-measured.quantile((torch.arange(len(after.bias)) + 0.5) / len(after.bias)))
    last.weight.copy_(torch.linspace(-1, 1, last.out_features)[:, None].expand_as(last.weight))
    last.bias.zero_()


def add_norms(network: Network) -> None:
    """Thresholds by BatchNorm's shift."""
    linear, norm = network.features.hidden1[0], network.features.hidden1[1]
    linear.weight.copy_(torch.randn(1, linear.in_features, generator=draws()).expand_as(linear.weight))
    places = (torch.arange(len(norm.bias)) + 0.5) / len(norm.bias)
    norm.bias.copy_(-torch.distributions.Normal(0.0, 1.0).icdf(places))
    classifier = network.classifier
    classifier.weight.copy_(0.01 * torch.linspace(-1, 1, 3)[:, None].expand_as(classifier.weight))


WIDE = {"name": "mlp", "hidden": [1000]}


@pytest.mark.threat("crafted_network")
@pytest.mark.parametrize(
    ("network", "change"),
    [
        (WIDE, bins),
        (WIDE, traps),
        (WIDE, mix),
        (WIDE, double),
        (WIDE, a_few),
        ({"name": "mlp", "hidden": [16, 1000]}, second),
        ({**WIDE, "batch_norm": True}, add_norms),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_crafted_networks_show_samples(network: Mapping[str, Any], change: Callable[[Network], None]) -> None:
    assert score(noise(100), network, change) > LIMIT
    assert score(noise(100), {**network, "hidden": [16, 16]}, lambda _: None) < LIMIT


def test_what_counts_for_a_score() -> None:
    """A sample that is seen three times is one sample; one row of 40 with a small entry is not all that moves a layer;
    and sites of a few samples are watched, too.
    """
    assert score(noise(100), WIDE, bins, local_epochs=3, lr=1e-5) > LIMIT
    inputs = np.zeros((40, 5), np.float32)
    inputs[0, 0] = 0.1
    assert score(Domain("north", inputs, np.arange(40) % 3), {"name": "linear"}, lambda network: None) < 0.07
    for samples in (1, 2, 9):
        assert 0 <= score(noise(samples), {"name": "mlp", "hidden": [4]}, lambda _: None) <= 1


def test_a_convolution_that_hands_images_on() -> None:
    """Filters that copy the image, and bins behind them."""
    domain = images("north", 100)

    def change(network: Network) -> None:
        convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
        for convolution in convolutions:
            assert convolution.bias is not None
            convolution.weight.zero_()
            convolution.weight[:, 0, 2, 2] = 1.0
            convolution.bias.fill_(3.0)
        hidden = next(module for module in network.modules() if isinstance(module, nn.Linear))
        with torch.no_grad():
            pixels = (torch.from_numpy(domain.inputs).float() / 255 - 0.5) / 0.25
            read = network.features[:-1](pixels)
        direction = torch.randn(hidden.in_features, generator=draws())
        hidden.weight.copy_(1e-3 * direction.expand_as(hidden.weight))
        places = (torch.arange(hidden.out_features) + 0.5) / hidden.out_features
        hidden.bias.copy_(-(read @ (1e-3 * direction)).quantile(places))
        classifier = network.classifier
        classifier.weight.copy_(torch.linspace(-1, 1, 3)[:, None].expand_as(classifier.weight))

    cnn = {"name": "mnist_cnn", "channels": [2, 2], "hidden": 1000}
    assert score(domain, cnn, change) > LIMIT
    assert score(domain, {**cnn, "hidden": 16}, lambda _: None) < LIMIT


def test_filters_that_react_to_single_images() -> None:
    """One image has a bright spot, of which only the filters of one network make anything."""
    domain = images("north", 40)

    def change(network: Network) -> None:
        first = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
        assert first.bias is not None
        first.weight.copy_(torch.randn(first.weight.shape, generator=draws()))
        pixels = (torch.from_numpy(domain.inputs).float() / 255 - 0.5) / 0.25
        first.bias.zero_()
        strongest = first(pixels).amax((2, 3)).sort(0, descending=True).values
        first.bias.copy_(-(strongest[0] + strongest[1]) / 2)  # exactly one image passes each filter

    assert score(domain, {"name": "mnist_cnn", "channels": [200, 2], "hidden": 4}, change) > 0.5


def test_the_running_mean_of_a_few_samples() -> None:
    """BatchNorm's means leave, too: here no gradient flows, and each mean tells of one sample."""

    def change(network: Network) -> None:
        add_norms(network)
        linear = network.features.hidden1[0]
        rows = torch.from_numpy(domain.inputs)
        linear.weight.copy_(1e4 * rows[: len(linear.weight)] / rows[: len(linear.weight)].norm(dim=1, keepdim=True))
        network.classifier.weight.zero_()

    draws_ = np.random.default_rng(0)
    lone = np.eye(64, dtype=np.float32) * 50 + draws_.normal(size=(64, 64)).astype(np.float32) * 0.01
    domain = Domain("north", lone.astype(np.float32), np.arange(64) % 3)
    assert score(domain, {"name": "mlp", "hidden": [64], "batch_norm": True}, change) > LIMIT


def test_shares_and_limits_by_hand() -> None:
    """Units of three samples, and of two."""
    # (3, 1, 0) less ½ of (0, 1, 1) is (3, ½, −½); (0, 1, 1) less ⅒ of (3, 1, 0) is (−0.3, 0.9, 1).
    shares = largest_shares(torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 1.0]]), together=())
    assert shares.tolist() == pytest.approx([9 / 9.5, 0.5, 1 / 1.9])
    # (1, 2, 0) plus (−1, −2, 1) is the third sample alone.
    opposite = largest_shares(torch.tensor([[1.0, -1.0], [2.0, -2.0], [0.0, 1.0]]), together=())
    assert opposite[2].item() == pytest.approx(1.0)
    assert largest_shares(torch.tensor([[3.0], [1.0]])).tolist() == pytest.approx([0.9, 0.1])
    assert largest_shares(torch.tensor([[3.0], [1.0]]), of_all=9.0)[0] == pytest.approx(0.5)
    assert (largest_shares(torch.zeros(0, 4)).tolist(), largest_shares(torch.zeros(3, 4)).tolist()) == ([], [0.0] * 3)
    assert largest_shares(torch.tensor([[float("inf")], [1.0]])).tolist() == [1.0, 1.0]
    # The sum of shares is divided by ten at least: three that stand alone are 0.3.
    assert exposure(torch.tensor([0.5] * 40 + [0.01] * 60)) == pytest.approx(0.5)
    assert exposure(torch.tensor([1.0, 1.0, 1.0, 0.0])) == pytest.approx(0.3)
    limits = [Policy().exposure_limit(samples) for samples in (5, 24, 32, 60, 160)]
    assert limits == pytest.approx([0.8, 0.8, 0.7, 0.56, 0.46])
    assert [Policy(exposure=most).exposure_limit(3) for most in (1, 0.9)] == [1, 0.9]


def test_of_a_large_site_every_third_sample_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score(noise(300), WIDE, bins)
    monkeypatch.setattr(watch_module, "_WATCHED", 100)
    assert score(noise(300), WIDE, bins) == pytest.approx(whole, abs=0.1)
    assert score(noise(300), WIDE, bins) != whole
    assert score(noise(300), {"name": "mlp", "hidden": [16]}, lambda _: None) < LIMIT / 2


def test_places_of_a_filter_do_not_cancel() -> None:
    """What a sample adds at two places of an image counts by its size, whatever the signs."""
    layer = nn.Conv2d(1, 2, 1)
    slopes = torch.full((20, 2, 2, 2), 0.01)
    slopes[0] = 5.0
    turned = slopes.clone()
    turned[0, :, 0] *= -1

    def shown(slopes: Tensor) -> float:
        rows = SimpleNamespace(samples=20, seen=None, read=[], watch=lambda: None)
        site = SimpleNamespace(data=rows, unlabelled=None, held_out=None, network=layer, samples=20)
        with ExposureWatch(cast(Any, site)) as watch:
            (layer(torch.ones(20, 1, 2, 2)) * slopes).sum().backward()
        return watch.score()

    assert shown(turned) == pytest.approx(shown(slopes))
    assert shown(turned) > 1.5 * shown(torch.full_like(slopes, 0.01))
