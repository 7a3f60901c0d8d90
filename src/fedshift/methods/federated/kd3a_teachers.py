"""The sources' models at KD3A's target: their predictions, their focus, and the alignment with their statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedshift.errors import TrainingDiverged
from fedshift.federation.messages import BYTES_PER_NUMBER
from fedshift.federation.site import Batch, Site
from fedshift.functional.batchnorm import batchnorm_objective
from fedshift.functional.consensus_focus import FocusTally
from fedshift.models.network import Network
from fedshift.weights import Weights

_INFERENCE_BATCH = 500
_KEPT_BYTES = 256 * 2**20
"""The most that predictions of all teachers for all samples may take to be kept in memory."""


class Teachers:
    """The sources' models at the target: their predictions for its samples, and what each adds to the consensus.

    If nothing is augmented and all predictions fit in `_KEPT_BYTES`, they are computed once, in large batches, and the
    focus is that of all samples. Otherwise they are computed for every batch and not kept, and the focus is that of the
    samples in training.

    A model with finite weights may still predict numbers that are not finite (a source that diverges). Such predictions
    are replaced by equal probabilities, which pass no gate, and the model is not among the `finite` ones.

    Args:
        site: the target.
        models: the sources' models.
        gate: confidence from which a teacher votes.
        own_statistics: use the teachers' BatchNorm statistics; otherwise those of the batch.
        whole_epoch: whether training passes over all samples.
        tally: adds up the focus of each teacher; None if it is not needed.
    """

    def __init__(
        self,
        site: Site,
        models: Sequence[Weights],
        gate: float,
        *,
        own_statistics: bool,
        whole_epoch: bool,
        tally: FocusTally | None,
    ) -> None:
        self._site, self._gate = site, gate
        self._own_statistics, self._tally = own_statistics, tally
        self._networks = [site.model(weights).requires_grad_(False) for weights in models]
        for network in self._networks:
            network.train(not self._own_statistics)
        self._confident = self._judged = 0
        self._finite = torch.ones(len(models), dtype=torch.bool, device=site.device)
        self._all: Tensor | None = None
        kept = len(models) * site.samples * site.classes * BYTES_PER_NUMBER <= _KEPT_BYTES
        if kept and whole_epoch and self._own_statistics and site.data.deterministic:
            self._all = torch.cat(list(self._ask_all()), dim=1)
            self._judge(self._all)

    @torch.no_grad()
    def _ask(self, inputs: Tensor) -> Tensor:
        found = torch.stack([network(inputs).softmax(1) for network in self._networks])
        finite = found.isfinite().all(2)
        self._finite &= finite.all(1)
        return found.where(finite[:, :, None], torch.full_like(found, 1 / found.shape[2]))

    def _ask_all(self) -> Iterator[Tensor]:
        return (self._ask(inputs) for inputs, _, _ in self._site.data.all_batches(_INFERENCE_BATCH))

    def _judge(self, said: Tensor) -> None:
        self._confident += int((said.amax(2) > self._gate).any(0).sum())
        self._judged += said.shape[1]
        if self._tally is not None:
            self._tally.add(said)

    def predictions(self, batch: Batch) -> Tensor:
        """The teachers' probabilities for a batch, (K, b, C)."""
        if self._all is not None:
            return self._all[:, batch.rows.to(self._all.device)]
        said = self._ask(batch.inputs)
        self._judge(said)
        return said

    def judged(self) -> tuple[Tensor | None, float]:
        """Consensus focus (K,), or None without a tally; and the share of samples on which a teacher is confident."""
        if not self._judged:  # no batch was left for this exchange
            for network in self._networks:
                network.eval()
            for said in self._ask_all():
                self._judge(said)
        return None if self._tally is None else self._tally.focus(), self._confident / self._judged

    def finite(self, names: Iterable[str]) -> list[str]:
        """The names of the models whose predictions were all finite.

        Args:
            names: one per model.

        Raises:
            TrainingDiverged: there is no such model.
        """
        names = list(names)
        found = [name for name, finite in zip(names, self._finite.tolist(), strict=True) if finite]
        if not found:
            raise TrainingDiverged(
                f"no source's model ({', '.join(names)}) predicts finite numbers at site '{self._site.name}': lower "
                "training.lr"
            )
        return found

    def weights(self, models: Mapping[str, Weights]) -> Mapping[str, Weights]:
        """The models as they are aggregated: as received, or with BatchNorm statistics updated by target batches."""
        if self._own_statistics:
            return models
        return {name: self._site.weights_of(network) for name, network in zip(models, self._networks, strict=True)}


class BatchNormAlignment:
    """The objective of BatchNorm-MMD (12) for a network in training: its features against the statistics of models.

    Args:
        network: h_T, whose BatchNorm layers' inputs are π.
        models: site → model, of the K sources and the target.
        shares: site → α.
    """

    def __init__(self, network: Network, models: Mapping[str, Weights], shares: Mapping[str, float]) -> None:
        self._network = network
        self._objectives: list[Tensor] = []
        alphas = [shares[site] for site in models]
        place = next(network.parameters()).device
        for name, module in network.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                means, variances = (
                    torch.stack([model[f"{name}.{part}"] for model in models.values()]).to(place)
                    for part in ("running_mean", "running_var")
                )
                hook = self._hook(means, variances, torch.tensor(alphas, device=place))
                module.register_forward_pre_hook(hook)

    def _hook(
        self, means: Tensor, variances: Tensor, shares: Tensor
    ) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._objectives.append(batchnorm_objective(inputs[0], means, variances, shares))

        return keep

    def objective(self, inputs: Tensor) -> Tensor:
        """Σ_l Σ_k α_k (‖mean(π_l) − m_lk‖² + ‖mean(π_l²) − (v_lk + m_lk²)‖²) for a batch, a scalar."""
        self._objectives.clear()
        self._network(inputs)
        return torch.stack(self._objectives).sum()


def with_private(site: Site, weights: Weights) -> Weights:
    """``weights`` with the site's private tensors in place of those of the same name."""
    return weights.merge(site.memory.weights("private")) if "private" in site.memory else weights
