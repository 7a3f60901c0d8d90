"""FedBN and SiloBN: what BatchNorm learns of a site stays there.

FedBN: Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR
2021. SiloBN: Andreux, du Terrail, Beguier, Tramel: Siloed Federated Learning for Multi-Centric Histopathology Datasets.
DCL workshop of MICCAI 2020.

Setting: domain generalization with networks that have BatchNorm. Made for the sites that take part; for others see 2.
Wire: FedAvg's, or less: see 2.

    FedBN   scale, shift, running mean and variance of every BatchNorm stay at the site; all else is averaged
    SiloBN  running mean and variance stay at the site; scale and shift are averaged like all else

Where papers and code differ, and what was chosen
 1. The released FedBN (med-air/FedBN, federated/fed_digits.py, `communication`) skips every tensor whose name holds
    "bn". Here: every BatchNorm layer, whatever its name.
 2. A site that nobody trained on has no normalisation of its own. ``unseen: mean`` gives it the mean of the sites' (the
    appendix of FedBN's paper), for which each site sends a copy of its own. ``unseen: target`` measures statistics on
    all samples of the new site that are predicted together (SiloBN's paper): then nothing of a site's normalisation
    leaves it, and under FedBN scale and shift are those of the common start.
 3. The accuracy at sources that is recorded is that of the published model; only the protocol ``participants``
    measures each site with its own. With ``unseen: target`` it is measured batch by batch, in the order of the samples.
 4. ``unseen: target`` needs many samples: the statistics of one alone are poor, or those of the common start.

Should reproduce: no published table of this setting is known to us.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedshift.errors import UserError
from fedshift.federation.messages import Content, Update
from fedshift.federation.site import Site
from fedshift.functional.averaging import is_buffer
from fedshift.methods.composition.new_site import NewSite
from fedshift.methods.composition.options import AtSites
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests
from fedshift.models.adapters import has_adapters
from fedshift.models.network import Network
from fedshift.weights import Weights

Unseen = Literal["mean", "target"]


class FedBN(FedAvg):
    """FedAvg of all but BatchNorm, which each site has of its own."""

    traits = FedAvg.traits.derive(
        name="fedbn",
        citation="Li et al., ICLR 2021",
        group="rivals",
        advice="For networks with BatchNorm, and for the sites that take part; at an unseen site 50.42 on SURF, "
        "where FedAvg has 51.06.",
        memory_names=("optimizer", "normalisation"),
        tests=MethodTests(where="normed"),
    )

    unseen: Unseen = Field("mean", description="normalisation of a new site: the sites' mean, or of its samples")

    def check(self, network: Network) -> None:
        if not normalisation_of(network.state_dict(), self.stays):
            more = ", or write training.adapters.normalisation: true" if has_adapters(network) else ""
            raise UserError(f"{self.name} needs a network with BatchNorm: choose another network, or fedavg{more}")

    def stays(self, name: str) -> bool:
        """Whether a tensor of a BatchNorm layer stays at the site."""
        return True

    def personal(self, weights: Weights) -> set[str]:
        return normalisation_of(weights, self.stays)

    def own_weights(self, weights: Weights, memory: Mapping[str, Content]) -> Weights:
        kept = memory.get("normalisation")
        return super().own_weights(weights.merge(kept) if isinstance(kept, Weights) else weights, memory)

    def evaluated_network(self, network: Network, sources: int) -> Network:
        return network if self.unseen == "mean" else with_batch_statistics(network)

    def at_sites(self, input_shape: tuple[int, ...]) -> AtSites:
        given = super().at_sites(input_shape)
        if self.unseen == "mean":
            return given
        return replace(given, new_site=_Measured(given.new_site.batch_norm or 0, given.new_site.classifier))

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train the common model with the site's own normalisation."""
        personal = self.personal(weights)
        kept = site.memory.weights("normalisation") if "normalisation" in site.memory else {}
        update = super().fit(site, Weights({name: kept.get(name, value) for name, value in weights.items()}))
        site.memory["normalisation"] = update.weights.select(lambda name: name in personal)
        if self.unseen == "mean":
            return update
        unchanged = {name: weights[name] if name in personal else value for name, value in update.weights.items()}
        return Update(Weights(unchanged), update.samples, update.loss)


class SiloBN(FedBN):
    """FedAvg of all but BatchNorm's statistics, which each site has of its own."""

    traits = FedBN.traits.derive(
        name="silobn",
        citation="Andreux et al., MICCAI DCL 2020",
        group="rivals",
        advice="As fedbn, but a new site measures its own samples; no gain shown: +2.66 over FedAvg on PACS "
        "features (p = 1.000), −0.37 on SURF.",
        tests=MethodTests(where="normed"),
    )

    unseen: Unseen = Field("target", description="statistics of a new site: its samples', or the sites' mean")

    def stays(self, name: str) -> bool:
        return is_buffer(name)


def normalisation_of(names: Iterable[str], stays: Callable[[str], bool]) -> set[str]:
    """The names of BatchNorm's tensors that ``stays`` accepts.

    ``names``: of all tensors of a model. A BatchNorm layer is what has a running mean. ``stays``: whether a tensor of
    such a layer is wanted.
    """
    known = set(names)
    layers = {name.rpartition(".")[0] for name in known if name.rpartition(".")[2] == "running_mean"}
    return {name for name in known if name.rpartition(".")[0] in layers and stays(name)}


def with_batch_statistics(network: Network) -> Network:
    """A copy of a network whose BatchNorm layers normalise by the batch in evaluation, too.

    Running statistics do not change. They serve where a channel has one number in a batch, which has no deviation.
    """
    answering = copy.deepcopy(network)
    for layer in _layers(answering):
        layer.track_running_stats = False
        layer.register_forward_pre_hook(_by_the_batch)
    return answering


def _layers(network: Network) -> list[_BatchNorm]:
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def _by_the_batch(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    (batch,) = inputs
    if not layer.track_running_stats:
        layer.training = batch.numel() > batch.shape[1]


@dataclass(frozen=True)
class _Measured(NewSite):
    """Statistics of all of a new site's samples, in place of those of each batch."""

    def adapt(self, network: Network, batches: Callable[[], Iterable[Tensor]]) -> Network:
        answering = copy.deepcopy(network)
        for layer in _layers(answering):
            layer.track_running_stats = layer.running_mean is not None
        return super().adapt(answering, batches)
