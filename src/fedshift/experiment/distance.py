"""The proxy A-distance of two sites, measured while both keep their samples.

d_A = 2(1 − 2ε), where ε is the error of a linear classifier that tells the two sites' inputs apart (Ben-David et al.,
Machine Learning 2010). Each site receives the classifier and returns the gradient of the logistic loss on one half of
its samples. At the end it returns the share of the other half that the classifier gets wrong. Only weights and numbers
leave a site. A site that refuses one of these kinds is not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.data.domain import DataSet
from fedshift.errors import UserError
from fedshift.experiment.config.engine_section import Engine
from fedshift.experiment.protocols.base import Split
from fedshift.extras import compiler_comes_later
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Reply
from fedshift.federation.randomness import generator
from fedshift.federation.site import Role, Site
from fedshift.federation.site_runner import Setting, SitePlan
from fedshift.federation.training import Training
from fedshift.methods.base import Method, State
from fedshift.models import registry as models
from fedshift.weights import Weights

_ITERATIONS = 50
_RIDGE = 1e-3
"""Weight of the classifier's squared norm in the loss. Without it, separable sites have no best classifier."""


@dataclass(frozen=True)
class Slope(Reply):
    """The mean logistic loss on one half of a site's samples, and its gradient."""

    gradient: Weights
    loss: float


@dataclass(frozen=True)
class Wrong(Reply):
    """The share of the second half of a site's samples that the classifier assigns to the other site."""

    share: float


class SiteClassifier(Method):
    """Logistic regression that predicts which of two sites a sample comes from: one source or one target."""

    traits = Method.traits.derive(name="site_classifier")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return 0

    def round(self, federation: Federation, state: State) -> State:
        """Train the classifier: `torch.optim.LBFGS` with gradients that the sites compute."""
        compiler_comes_later()
        sites = (*federation.sources, *federation.targets)
        plane = {name: tensor.clone().requires_grad_() for name, tensor in state.weights.items()}
        optimizer = torch.optim.LBFGS(list(plane.values()), max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

        def closure() -> float:
            replies = list(federation.ask(self.slope, to=sites, weights=Weights(plane).clone()))
            for name, tensor in plane.items():
                ridge = 2 * _RIDGE * tensor.detach() if name == "weight" else torch.zeros_like(tensor)
                tensor.grad = sum((reply.gradient[name] / len(sites) for reply in replies), start=ridge)
            penalty = _RIDGE * float(plane["weight"].detach().square().sum())
            return penalty + sum(reply.loss for reply in replies) / len(sites)

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return state.advance(Weights(plane).clone())

    def slope(self, site: Site, weights: Weights) -> Slope:
        """The loss and its gradient on the first half of a site's samples. Both sites have the same weight."""
        plane = {name: tensor.to(site.device).requires_grad_() for name, tensor in weights.items()}
        loss = -F.logsigmoid(_side(site) * _scores(site, 0, plane)).mean()
        gradients = torch.autograd.grad(loss, list(plane.values()))
        return Slope(Weights(dict(zip(plane, (gradient.cpu() for gradient in gradients), strict=True))), loss.item())

    def wrong(self, site: Site, weights: Weights) -> Wrong:
        """The error on the second half of a site's samples. A score of 0 counts as half an error."""
        with torch.no_grad():
            scores = _side(site) * _scores(site, 1, weights.to(site.device))
        return Wrong(float((scores < 0).double().mean() + (scores == 0).double().mean() / 2))


def _side(site: Site) -> int:
    return 1 if site.role == "source" else -1


def _scores(site: Site, half: int, plane: Weights | dict[str, Tensor]) -> Tensor:
    """The classifier's scores of one half of a site's samples. A single sample is in both halves."""
    if "inputs" not in site.scratch:
        site.scratch["inputs"] = torch.cat([batch.inputs.flatten(1) for batch in site.all_batches()])
    inputs: Tensor = site.scratch["inputs"]
    order = torch.randperm(len(inputs), generator=generator(site.seed, site.name, 0, "halves"))
    chosen = order[half::2] if len(order) > 1 else order
    scores: Tensor = inputs[chosen.to(inputs.device)] @ plane["weight"] + plane["bias"]
    return scores


def proxy_distances(data: DataSet, split: Split, setting: Setting, engine: Engine) -> dict[str, float]:
    """The proxy A-distance of each pair of a labelled and an unlabelled site.

    Args:
        split: which sites have labels, and the rows that each trains on.
        setting: the setting of a run on these data. The classifier uses its seed and its device.

    Returns:
        "labelled-unlabelled" → distance, without sites that refuse weights or numbers.
    """
    method = SiteClassifier()
    width = torch.Size(data.input_shape).numel()
    setting = replace(
        setting,
        method=method,
        training=Training(batch_size=256),
        network=models.parse({"name": "linear"}),
        classes=2,
        sources=1,
        refuse=frozenset(),
        on_refusal="stop",
    )
    start = State(Weights({"weight": torch.zeros(width), "bias": torch.zeros(())}))
    result = {}
    for source, rows in split.train.items():
        for target, others in split.unlabelled.items():
            refuse = {*engine.refuse, *engine.refuse_at.get(source, ()), *engine.refuse_at.get(target, ())}
            if refuse.intersection(method.calls.shares):
                continue
            roles: dict[str, Role] = {source: "source", target: "target"}
            plans = [
                SitePlan(name, roles[name], [(data.domains[name], chosen, 0)])
                for name, chosen in ((source, rows), (target, others))
            ]
            where = LocalFederation(plans, setting, budget={}, rounds=1)
            plane = method.round(where, start).weights
            errors = [reply.share for reply in where.ask(method.wrong, to=(source, target), weights=plane)]
            result[f"{source}-{target}"] = proxy_distance(sum(errors) / 2)
    return result


def proxy_distance(error: float) -> float:
    """Proxy A-distance ``d_A = 2(1 − 2ε)``, at least 0: 0 for equal domains, 2 for domains that differ always.

    Source: Ben-David et al. (Machine Learning 2010).
    """
    if not 0 <= error <= 1:
        raise UserError(f"an error rate lies in [0, 1], found {error}")
    return max(0.0, 2 * (1 - 2 * error))
