"""Networks with one more block between features and classifier, whose weights follow from the network's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fedshift.federation.randomness import derive_seed
from fedshift.models.network import Network


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Inside, PyTorch's CPU generator starts at ``seed``; afterwards it stands where it stood."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reset every accelerator's generator.
        torch.default_generator.manual_seed(seed)
        yield


def with_block(
    network: Network,
    block: Callable[[int], nn.Module],
    *,
    size: int,
    classifier: Callable[[int, int], nn.Module] | None = None,
    names: tuple[str, str] = ("backbone", "block"),
) -> Network:
    """``network`` with a block behind its features, and perhaps another classifier. Modules are shared, not copied.

    block: makes the block for features of a given width. size: the width of what it puts out. classifier: makes a
    classifier from width and classes; none = the network's own, which needs ``size`` to be the width it reads. names:
    of the two parts of the features.

    New weights are drawn from a seed that the network's own classifier gives: they differ between the seeds of an
    experiment, and every process finds the same.
    """
    first = [float(value) for value in next(network.classifier.parameters()).detach().flatten()[:8]]
    inner, outer = names
    with drawn_from(derive_seed(outer, *first)):
        features = nn.Sequential(OrderedDict([(inner, network.features), (outer, block(network.embedding_size))]))
        made = network.classifier if classifier is None else classifier(size, network.classes)
    return Network(
        features,
        made,
        embedding_size=size,
        classes=network.classes,
        stages={name: path.replace("features", f"features.{inner}", 1) for name, path in network.stages.items()},
        alignment_stages=network.alignment_stages,
    )
