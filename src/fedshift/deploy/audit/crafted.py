"""Crafted networks: weights that a curious coordinator sends so that a site's update shows single samples.

The first layer of a fully connected network measures a sample along a direction and lets it pass where it exceeds the
unit's threshold; the later layers only hand a gradient back. Two layouts of the first layer:

``bins``: all units measure along one direction, with rising thresholds. Two neighbours differ in the samples between
their thresholds (Fowl et al.: Robbing the Fed, ICLR 2022).

``traps``: each unit measures along a direction of its own, with a threshold that one sample in so many exceeds
(Boenisch et al.: When the Curious Abandon Honesty, EuroS&P 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedshift.data.domain import DataSet
from fedshift.data.site_data import SiteData
from fedshift.deploy.privacy.exposure import ExposureWatch
from fedshift.deploy.remote.policy import Policy
from fedshift.errors import Refused, UserError
from fedshift.federation.randomness import generator
from fedshift.federation.site import Envelope, Site
from fedshift.federation.site_memory import SiteMemory
from fedshift.federation.training import Training
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.models.networks.mlp import Mlp
from fedshift.models.wide import WideLinear
from fedshift.weights import Weights

Layout = Literal["bins", "traps"]
LAYOUTS: tuple[Layout, ...] = ("bins", "traps")
_SMALL = 1e-3
"""Size of the first layer's weights. The smaller they are, the larger is their update beside them."""
READ = 0.01
"""A sample counts as read when the error is below this part of the mean sample's error."""
_KNOWN = 2000
_WIDEST = 2000
"""Samples that the attacker knows, and units of the network that it chooses, at most."""


@dataclass(frozen=True)
class CraftedCase:
    """What a crafted network read off one answer of a site."""

    network: dict[str, Any]  # the network, of the experiment or of the coordinator's choice
    chosen: bool  # whether it is of the coordinator's choice
    layout: Layout  # how its first layer was crafted
    samples: int  # training samples of the site
    read: int  # how many of them the answer shows, if it leaves
    exposure: float  # the score that the site's check gives the answer
    refused: str | None  # the rule of the site's policy that keeps the answer; None if it leaves

    def record(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))


def crafted_cases(
    view: SiteData, others: SiteData, data: DataSet, network_options: NetworkOptions, policy: Policy, seed: int
) -> Iterator[CraftedCase]:
    """Attack a site with the experiment's network, if it can be crafted, and with a wide one.

    The coordinator also chooses the training: one step on all samples. Where the experiment's network begins with other
    layers than fully connected ones, only the wide network is tried. ``others``: samples of other sites, from which the
    attacker takes thresholds.
    """
    wide = Mlp(hidden=(min(_WIDEST, max(64, 8 * view.samples)),))
    rows = torch.linspace(0, others.samples - 1, min(others.samples, _KNOWN)).long()
    known = others.batch(rows)[0].cpu()
    for options, chosen in ((network_options, False), (wide, True)):
        try:
            fully_connected(models.build(options, data.input_shape, len(data.classes), seed))
        except UserError:
            continue
        for layout in LAYOUTS:
            yield _try_network(view, known, data, options, chosen, layout, policy, seed)


def _try_network(
    view: SiteData,
    known: Tensor,
    data: DataSet,
    options: NetworkOptions,
    chosen: bool,
    layout: Layout,
    policy: Policy,
    seed: int,
) -> CraftedCase:
    network = models.build(options, data.input_shape, len(data.classes), seed)
    crafted = craft(network, known, view.samples, layout, generator(seed, "crafted", layout))
    training = Training(batch_size=max(2, view.samples), lr=1.0)
    network, memory = network.to(view.device), SiteMemory(())
    site = Site("site", "source", len(data.classes), 1, training, memory, seed, view.device, network, view)
    with torch.random.fork_rng(devices=[view.device] if view.device.type == "cuda" else []):
        site.begin(Envelope(exchange=1, round=1, progress=0.0, mini_batches_left=2**31))
        with ExposureWatch(site) as watch:
            sent = FedAvg().fit(site, crafted)
    score = watch.score()
    originals = torch.cat([inputs.cpu() for inputs, _, _ in view.all_batches(256)])
    read = samples_read(read_off(network.cpu(), crafted, sent.weights, layout), originals)
    refused = None
    whole = options.model_dump(mode="json")
    try:
        policy.check_exposure(site.name, "fit", score, watch.samples())
    except Refused:
        refused = f"policy.exposure: {policy.exposure:g}"
    if isinstance(policy.models, tuple) and whole not in policy.models:
        refused = "policy.models"
    return CraftedCase(whole, chosen, layout, view.samples, read, round(score, 3), refused)


def craft(network: Network, known: Tensor, expected: int, layout: Layout, generator: torch.Generator) -> Weights:
    """Weights for ``network`` whose update shows single samples. UserError if the network is built otherwise.

    ``network``: a chain of fully connected layers with ReLU, such as `mlp` without BatchNorm; ``known``: (n, …),
    samples like those of the site, from which the attacker takes thresholds: public ones, or noise of the mean and
    deviation that a site told.
    """
    layers = fully_connected(network)
    with torch.no_grad():
        for layer in layers[1:]:  # each unit hands the mean of its inputs on
            assert layer.bias is not None
            layer.weight.fill_(1 / layer.in_features)
            layer.bias.zero_()
        last = layers[-1]
        # Every class gets another slope, so that the error of each sample comes back, to all units alike.
        slopes = torch.linspace(-1, 1, last.out_features, device=last.weight.device) / (_SMALL * last.in_features)
        last.weight.copy_(slopes.expand(last.in_features, -1) if isinstance(last, WideLinear) else slopes[:, None])
        first, flat = layers[0], known.flatten(1)
        units = first.out_features
        draws = torch.randn(1 if layout == "bins" else units, flat.shape[1], generator=generator).to(flat)
        directions = draws / draws.norm(dim=1, keepdim=True)
        measured = flat @ directions.t()
        if layout == "bins":
            places = (torch.arange(units, device=flat.device) + 0.5) / units
            thresholds = measured[:, 0].quantile(places.to(flat))
        else:
            thresholds = measured.quantile(1 - 1 / max(2, expected), dim=0)
        rows = _SMALL * directions.expand(units, -1)
        first.weight.copy_(rows.t() if isinstance(first, WideLinear) else rows)
        assert first.bias is not None
        first.bias.copy_(-_SMALL * thresholds)
    return Weights({name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()})


def read_off(network: Network, before: Weights, after: Weights, layout: Layout) -> Tensor:
    """What the attacker reads off an update: (units, d), the input of the first layer that each unit shows."""
    first = fully_connected(network)[0]
    name = next(name for name, module in network.named_modules() if module is first)
    moved, bias = (before[f"{name}.{part}"].double() - after[f"{name}.{part}"].double() for part in ("weight", "bias"))
    moved = moved.t() if isinstance(first, WideLinear) else moved
    if layout == "bins":  # thresholds rise: a unit reacts to what the next one does, and to its own bin
        moved = torch.cat([moved[:-1] - moved[1:], moved[-1:]])
        bias = torch.cat([bias[:-1] - bias[1:], bias[-1:]])
    shown = bias.abs() > 0
    return (moved[shown] / bias[shown, None]).float()


def samples_read(candidates: Tensor, originals: Tensor) -> int:
    """How many of ``originals`` (n, d) some candidate shows, with less than `READ` of the mean sample's error."""
    flat = originals.flatten(1).double()
    limit = READ * (flat - flat.mean(0)).square().sum(1).mean()
    result = torch.zeros(len(flat), dtype=torch.bool)
    for some in torch.split(candidates.double(), 64) if len(candidates) else ():
        # The expanded square would lose the small errors that matter here.
        far = torch.cdist(some, flat, compute_mode="donot_use_mm_for_euclid_dist")
        result |= far.amin(0).square() < limit
    return int(result.sum())


def fully_connected(network: Network) -> list[nn.Linear | WideLinear]:
    """The layers of a chain of two or more fully connected ones with ReLU; UserError for another network."""
    result: list[nn.Linear | WideLinear] = []
    for module in network.modules():
        if next(module.children(), None) is not None or isinstance(module, nn.Flatten | nn.ReLU | nn.Dropout):
            continue
        if not isinstance(module, nn.Linear | WideLinear) or module.bias is None:
            raise UserError(f"a network with {type(module).__name__} is not crafted")
        result.append(module)
    if len(result) < 2:
        raise UserError("a network of a single layer has no units to craft")
    return result
