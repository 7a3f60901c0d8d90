"""MetaReg: a regulariser of the classifier, learnt so that what is trained with it works at another domain.

Balaji, Sankaranarayanan, Chellappa: MetaReg: Towards Domain Generalization using Meta-Regularization. NeurIPS 2018.
No official code was released: what follows is the paper.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

Common features F, a task network T_i per source, and R_φ(θ) = Σ_j φ_j |θ_j| on a task network's weights.
    stage 1   for every domain i in turn: F, T_i ← a step on CE of domain i                      (base model)
              draw a ≠ b:  β^1 = θ(T_a),  β^{k+1} = β^k − α ∇_β [L_a(β^k) + R_φ(β^k)],  k = 1 … l
              φ ← φ − γ ∇_φ L_b(β^{l+1})                                    through all l steps  (episodes)
    stage 2   a fresh task network T and F train on all sources with L + R_φ, φ held fixed       (final model)
Every L_a and L_b is of a mini-batch of its own (Algorithm 1).

Where the paper is silent, and what was chosen
 1. How long each stage takes: ``meta_share`` of the run is stage 1. Both stages use the experiment's optimiser.
 2. φ begins at 0 and stays at least 0; it learns at ``regulariser_rate`` times the learning rate. The paper meta-learns
    φ once F and T_i have settled; here from the beginning.
 3. The regulariser is on all parameters of the classifier but biases.
 4. Between the stages the published classifier is the mean of all T_i.
 5. The episode's batches move no BatchNorm statistics, of F as it stands or of T_a.
 6. In stage 1 every mini-batch, of one source, is an optimiser step. In stage 2 a step counts K mini-batches, one of
    each source; with ``domain_batches: split`` these are the parts of one. The l + 1 further ones of an episode train
    neither F nor any T_i, and do not count.

Should reproduce: Rotated MNIST 85.70, 98.87, 98.32, 98.58, 98.93, 89.44 (94.97).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.federation.site_memory import begin_momentum
from fedshift.functional.averaging import weighted_average
from fedshift.functional.meta_learning import answer_at, inner_step
from fedshift.methods.heads import redrawn
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.side_modules import DomainTraining
from fedshift.models.network import Network
from fedshift.weights import Weights


class MetaReg(DomainTraining):
    """A meta-learnt weighted L1 penalty on the classifier."""

    traits = DomainTraining.traits.derive(
        name="metareg",
        citation="Balaji et al., NeurIPS 2018",
        group="pooled",
        advice="For a classifier that overfits on fixed features: 54.76 on SURF, where deepall has 53.19 and "
        "with its mini-batches 54.52; below deepall at both ends of Rotated MNIST.",
        small={"meta_share": 0.75},
        tasks=WITHOUT_MASKS,
        memory_names=("optimizer", "parts", "regulariser"),
        takes_plug_ins=False,
        relative_cost=1.5,
        own_gradients=True,
        tests=MethodTests(
            options={"meta_share": tries(0.0, 1.0), "inner_steps": tries(1), "regulariser_rate": tries(20.0)},
            golden={"meta_share": 0.4},
            rates=(0.0025, 0.003),
        ),
    )

    meta_share: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="share of the run that is stage 1")
    inner_steps: PositiveInt = Field(3, description="l: steps through which φ is learnt")
    inner_rate: PositiveFloat | None = Field(None, description="α; none = the learning rate")
    regulariser_rate: PositiveFloat = Field(1.0, description="learning rate of φ beside that of the networks")

    def steps(self, mini_batches: int, domains: int) -> float:
        """As many as mini-batches in stage 1."""
        first = self.meta_share * mini_batches
        return first + super().steps(round(mini_batches - first), domains)

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        parts = self.parts(site, lambda: Parts(model, site.domains))
        first = site.envelope.progress < self.meta_share
        # In stage 1 each domain's mini-batch makes a step of its own, so divided ones would make too many.
        drawing = self.model_copy(update={"domain_batches": "full"}) if first else self
        batches = drawing.of_sources(site, steps)
        if first:
            loss = self.first_stage(site, model, parts, batches)
        else:
            if not parts.second_stage:
                model.classifier.load_state_dict(parts.fresh.state_dict())
                parts.second_stage.fill_(True)
                site.memory.pop("optimizer", None)  # momentum of other parameters
            loss = site.minimise_over(
                batches, lambda drawn: self.second_stage(model, parts, drawn), model, remember="optimizer"
            )
        site.memory["parts"] = site.weights_of(parts)
        return Update(site.weights_of(model), site.samples, loss)

    def first_stage(self, site: Site, model: Network, parts: Parts, batches: Iterable[tuple[Batch, ...]]) -> float:
        """A step of F and T_i on every domain in turn, then one of φ; the mean loss of the former."""
        draws = site.generator_for("pairs")
        streams = [site.domain_stream(number, "episode") for number in range(site.domains)]
        optimizers = {
            "optimizer": site.optimizer(model.features, parts.tasks, memory="optimizer"),
            "regulariser": site.optimizer(parts.penalties, memory="regulariser"),
        }
        begin_momentum(optimizers["optimizer"])  # a turn has gradients of one T_i
        for group in optimizers["regulariser"].param_groups:
            group["lr"] = self.regulariser_rate * site.learning_rate
        losses: list[Tensor] = []

        def loss_of(of_domain: tuple[int, Batch] | None) -> Tensor:
            if of_domain is None:
                return self.episode(model, parts, streams, self.inner_rate or site.learning_rate, draws)
            number, batch = of_domain
            loss = model.objective.loss(parts.tasks[number](model.features(batch.inputs)), batch.targets)
            losses.append(loss.detach())
            return loss

        item = [None] if len(streams) > 1 else []
        turns = (turn for drawn in batches for turn in (*enumerate(drawn), *item))
        site.minimise_over(turns, loss_of, model.features, parts, optimizers=optimizers.values())
        for memory, optimizer in optimizers.items():
            site.remember_optimizer(optimizer, memory)
        parts.keep_positive()
        mean = weighted_average([Weights(task.state_dict()) for task in parts.tasks], [1.0] * len(parts.tasks))
        model.classifier.load_state_dict(dict(mean))
        return float(torch.stack(losses).double().mean()) if losses else 0.0

    def episode(
        self, model: Network, parts: Parts, streams: Sequence[Iterator[Batch]], rate: float, draws: torch.Generator
    ) -> Tensor:
        """What φ descends: T_a's loss at b after l steps at a with R_φ."""
        parts.keep_positive()
        pairs = list(itertools.permutations(range(len(streams)), 2))
        a, b = pairs[int(torch.randint(len(pairs), (), generator=draws))]

        def draw(domain: int) -> tuple[Tensor, Tensor]:
            batch = next(streams[domain])
            with torch.no_grad():
                return answer_at(model, {}, batch.inputs, part="features"), batch.targets

        near = [draw(a) for _ in range(self.inner_steps)]
        return episode_loss(model.objective.loss, parts.tasks[a], list(parts.penalties), near, draw(b), rate)

    def second_stage(self, model: Network, parts: Parts, batches: tuple[Batch, ...]) -> Tensor:
        """L + R_φ on all sources."""
        inputs, labels = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
        penalties = [penalty.detach() for penalty in parts.penalties]
        regulariser = weighted_l1(penalised_parameters(dict(model.classifier.named_parameters())), penalties)
        return model.objective.loss(model(inputs), labels) + regulariser


class Parts(nn.Module):
    """What trains beside the model: T_i for every source, φ, and the fresh classifier that stage 2 begins with."""

    second_stage: Tensor

    def __init__(self, model: Network, domains: int) -> None:
        super().__init__()
        self.tasks = nn.ModuleList(redrawn(model.classifier) for _ in range(domains))
        self.fresh = redrawn(model.classifier).requires_grad_(False)
        result = penalised_parameters(dict(model.classifier.named_parameters()))
        self.penalties = nn.ParameterList(torch.zeros_like(parameter) for parameter in result)
        self.register_buffer("second_stage", torch.zeros((), dtype=torch.bool))

    @torch.no_grad()
    def keep_positive(self) -> None:
        """φ ≥ 0."""
        for penalty in self.penalties:
            penalty.clamp_min_(0)


def penalised_parameters(parameters: dict[str, Tensor]) -> list[Tensor]:
    """The parameters that R_φ is about: all but biases."""
    return [value for name, value in parameters.items() if not name.endswith("bias")]


def episode_loss(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    task: nn.Module,
    penalties: list[Tensor],
    near: Sequence[tuple[Tensor, Tensor]],
    far: tuple[Tensor, Tensor],
    rate: float,
) -> Tensor:
    """L_b(β^{l+1}): a task network's loss at another domain after l steps with R_φ, differentiable by φ.

    ``task``: t_a; it does not change. ``penalties``: φ. ``near``: features and labels of domain a, for each of the l
    steps. ``rate``: α.
    """
    ahead = {name: value.detach().requires_grad_(True) for name, value in task.named_parameters()}
    for features, labels in near:
        loss = loss_of(answer_at(task, ahead, features), labels)
        loss = loss + weighted_l1(penalised_parameters(ahead), penalties)
        gradients = torch.autograd.grad(loss, list(ahead.values()), create_graph=True, materialize_grads=True)
        ahead = inner_step(ahead, gradients, rate, second_order=True)
    return loss_of(answer_at(task, ahead, far[0]), far[1])


def weighted_l1(parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """``R_φ(θ) = Σ_i φ_i |θ_i|`` (MetaReg, section 3.3)."""
    return torch.stack([(w * p.abs()).sum() for p, w in zip(parameters, weights, strict=True)]).sum()
