"""FedADG: federated adversarial domain generalization.

Zhang, Lei, Shi, Huang, Chen: Federated Learning with Domain Generalization. arXiv 2021.

Setting: domain generalization; the target is never seen.
Wire: feature extractor F, classifier Cl and generator G up and down per site and round, 2·K·4·(|F| + |Cl| + |G|), and
two numbers. The discriminator D and its random projection stay at their site.

Every site moves its class-conditional features towards one *reference distribution* that a common generator makes:
h = F(x), h' = G(z, y) with z uniform on [0, 1), D(·|y) ∈ (0, 1).
    D:      max E D(h'|y)² + E (1 − D(h|y))²                                                 features detached
    F, Cl:  min (1 − λ)·L_err + λ·E (1 − D(h|y))²,  L_err cross-entropy with labels 1 − ε and ε/(C − 1)
    G:      min E (1 − D(h'|y))²
In every round a site first trains F and Cl on L_err alone for E₀ epochs. Then, for E₁ epochs, it trains all three in
turn on every mini-batch, with the same z for D and G. It keeps the epoch that is best on its held-out samples. The
server averages F, Cl and G.

Where the paper and its code differ. The defaults are the paper's; ``setting: released`` is the authors' code for PACS
(a copy of it: Haoxiang-Wang/FedADG, pacs-ours/localTrain.py, `localTrain.train_step`, unless another is named),
``released_vlcs`` their code for VLCS (src/localTrain.py, as before), ``least_squares`` the paper with the code's loss
of D.
 1. D's loss is −(D(h')² + (1 − D(h))²) in the paper and the VLCS code, (1 − D(h'))² + D(h)² in the PACS code. The
    optimum is the same (``discriminator_loss``).
 2. In the PACS code G minimises D(h')², which moves it towards the features. The VLCS code detaches h' before G's
    loss, so G is never trained (``generator``).
 3. In the paper the projection is random and fixed; in the code D's optimiser trains it (``trainable_projection``).
 4. The code's learning rate grows from 1e-7 over 100 epochs (PACS) or 500 (VLCS; `localTrain.__init__`), which is more
    than a run has (``warm_up``, in local epochs over all rounds).
 5. Where the paper leaves it open, the default is the PACS code: y has 0.7 instead of 1 and is appended to the
    projected h, and ε = 0.01. The VLCS code projects h and y together, with 0.6 and ε = 0.2 (``condition``,
    ``condition_value``, ``label_smoothing``). Both give all sites the same weight (``weighting: uniform``).
No setting changes these:
 6. The code keeps D and its optimiser over rounds (`localTrain.__init__`). Here D is kept;
    ``training.reset_optimizer_each_round: false`` keeps momentum.
 7. The code's classifier is two linear layers with nothing between (pacs-ours/Nets.py, `task_classifier`); here it is
    the network's own. Its learning rate falls when the held-out loss does not; here it has the experiment's schedule.
 8. The best epoch is chosen by the accuracy on the samples that the protocol holds out at a site. So results of the
    selection rule ``source`` are slightly too good. A site without held-out samples keeps the last epoch, as does
    ``keep: last``.
Widths of G and D follow the features' width d, as in the paper's AlexNet: noise d/2, hidden units d, projection d/4.
The VLCS code trains for 5 and 10 epochs per round: ``task_epochs``, ``adversarial_epochs``.

Should reproduce (PACS, ResNet-18, as printed by CSAC): 77.8, 74.7, 92.9, 79.5, average 81.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Count, Reply
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.randomness import generator as seeded
from fedshift.federation.site import Batch, Site
from fedshift.federation.training import set_learning_rate
from fedshift.functional.losses import smoothed_cross_entropy
from fedshift.methods.base import Method, State
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights

_LEAST_RATE = 1e-7


@dataclass(frozen=True)
class Update(Reply):
    """What a site sends: feature extractor and classifier, the generator, N_k and the mean loss of F and Cl."""

    weights: Weights
    generator: Weights
    samples: Count
    loss: float


class Generator(nn.Module):
    """G: maps noise (n, noise) and a class (n, C) to features of that class (n, d)."""

    def __init__(self, noise: int, classes: int, hidden: int, width: int) -> None:
        super().__init__()
        self.noise = noise
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.LeakyReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        for layer in (self.layers[0], self.layers[2]):
            nn.init.xavier_uniform_(cast(Tensor, layer.weight), gain=0.5)

    def forward(self, noise: Tensor, condition: Tensor) -> Tensor:
        features: Tensor = self.layers(torch.cat([noise, condition], 1))
        return features


class Discriminator(nn.Module):
    """D with its projection: maps features and class to the probability that the features were generated, (n, 1)."""

    def __init__(self, projection: Tensor, classes: int, *, before: bool, trainable: bool) -> None:
        super().__init__()
        self.before = before
        if trainable:
            self.projection: Tensor = nn.Parameter(projection)
        else:
            self.register_buffer("projection", projection)
        size = len(projection)
        inputs = size if before else size + classes
        self.layers = nn.Sequential(nn.Linear(inputs, size), nn.LeakyReLU(), nn.Linear(size, 1), nn.Sigmoid())

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        if self.before:
            projected = torch.cat([features, condition], 1) @ self.projection.T
        else:
            projected = torch.cat([features @ self.projection.T, condition], 1)
        answer: Tensor = self.layers(projected)
        return answer


class WithGenerator(Network):
    """A network and the generator that is trained and sent with it."""

    def __init__(self, network: Network, generator: Generator) -> None:
        super().__init__(network.features, network.classifier, **network.keywords)
        self.generator = generator


class FedADG(Method):
    """Features of all sites are moved to one reference distribution, which is learned, too."""

    traits = Traits(
        name="fedadg",
        citation="Zhang et al., arXiv 2021",
        group="unseen",
        advice="No gain shown: +0.14 over FedAvg on Rotated MNIST (p = 1.000); it also sends a generator.",
        sends="a model, and a generator",
        settings={
            "released": {
                "generator": "towards_features",
                "discriminator_loss": "least_squares",
                "trainable_projection": True,
                "warm_up": 100,
            },
            "released_vlcs": {
                "generator": "frozen",
                "trainable_projection": True,
                "warm_up": 500,
                "condition": "before",
                "condition_value": 0.6,
                "label_smoothing": 0.2,
            },
            "least_squares": {"discriminator_loss": "least_squares"},
        },
        small={"task_epochs": 1, "adversarial_epochs": 1},
        needs_classes="its generator makes features of a given class",
        memory_names=(
            "discriminator",
            "optimizer",
            "generator_optimizer",
            "discriminator_optimizer",
        ),
        averages={"fit": Averaged(("weights", "generator"))},
        server_reads="sums",
        takes_plug_ins=False,
        relative_cost=1.8,
        own_gradients=True,
        tests=MethodTests(
            where="fast",
            beside={"task_epochs": 1, "adversarial_epochs": 1},
            options={
                "task_epochs": tries(0, 2),
                "adversarial_weight": tries(0.0, 0.6),
                "label_smoothing": tries(0.3),
                "condition_value": tries(0.3),
                "adversary_rate": tries(0.1),
                "warm_up": tries(9),
                "noise": tries(5),
                "generator_hidden": tries(4),
                "projection": tries(3),
                "keep": tries("last", where="held out", adversarial_epochs=3),
            },
            golden={"setting": "least_squares", "task_epochs": 3, "adversarial_epochs": 2},
        ),
    )

    task_epochs: NonNegativeInt = Field(3, description="E₀: epochs of F and Cl on L_err alone, in every round")
    adversarial_epochs: PositiveInt = Field(7, description="E₁: epochs in which D, F with Cl, and G train in turn")
    adversarial_weight: Annotated[float, Field(ge=0, le=1)] = Field(
        0.15, description="λ: L_F against L_err; 0 = without"
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(0.01, description="ε of L_err (VLCS code: 0.2)")
    generator: Literal["formula", "towards_features", "frozen"] = Field(
        "formula", description="G raises D(h'), lowers it (PACS code), or is not trained (VLCS code)"
    )
    discriminator_loss: Literal["least_squares", "formula"] = Field(
        "formula", description="−(D(h')² + (1 − D(h))²), or (1 − D(h'))² + D(h)² (PACS code)"
    )
    trainable_projection: bool = Field(False, description="D's projection is trained (code); false: it stays random")
    condition: Literal["before", "after"] = Field(
        "after", description="y is appended before the projection (VLCS) or after it"
    )
    condition_value: PositiveFloat = Field(0.7, description="the value of 1 in the one-hot y (0.6 on VLCS)")
    adversary_rate: NonNegativeFloat = Field(0.7, description="learning rate of G and D, times that of F and Cl")
    warm_up: PositiveInt | None = Field(
        None, description="local epochs in which the learning rate grows from 1e-7 (code)"
    )
    noise: PositiveInt | None = Field(None, description="numbers in z; none = d/2")
    generator_hidden: PositiveInt | None = Field(None, description="hidden units of G; none = d")
    projection: PositiveInt | None = Field(None, description="width of D's projection; none = d/4")
    keep: Literal["best", "last"] = Field("best", description="the local epoch that is sent: best on held-out data")
    weighting: Literal["samples", "uniform"] = Field("uniform", description="shares N_k/ΣN, or 1/K (code)")

    def adjust_traits(self, traits: Traits) -> Traits:
        """Sites choose the best local epoch by their held-out samples."""
        return replace(traits, uses_held_out=self.keep == "best")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * (self.task_epochs + self.adversarial_epochs) * batches_per_epoch

    def adapt_network(self, network: Network, sources: int) -> Network:
        width = network.embedding_size
        with drawn_from(derive_seed(network.seed, "generator")):
            made = Generator(self.noise or max(1, width // 2), network.classes, self.generator_hidden or width, width)
        return WithGenerator(network, made)

    def evaluated_network(self, network: Network, sources: int) -> Network:
        return network.with_parts(network.features, network.classifier)

    # Server -------------------------------------------------------------------------------------------------------

    def start(self, federation: Federation, weights: Weights) -> State:
        return State(weights.without("generator"), parts={"generator": weights.select("generator")})

    def round(self, federation: Federation, state: State) -> State:
        made = cast(Weights, state.parts["generator"])
        updates = federation.ask(self.fit, to=federation.sources, weights=state.weights, generator=made)
        mean = updates.mean(self.weighting)
        report = {"losses": mean.numbers["loss"], "aggregation_weights": mean.shares}
        return state.advance(mean.model(), parts={"generator": mean.model("generator")}, report=report)

    # Site ---------------------------------------------------------------------------------------------------------

    def fit(self, site: Site, weights: Weights, generator: Weights) -> Update:
        """Train E₀ epochs on the task and E₁ adversarial epochs; the best of the latter is sent."""
        site.training.check_whole_batches(self.name)
        model = cast(WithGenerator, site.model(weights.merge(generator)))
        game = _Game(self, site, model)
        best: tuple[float, Weights, Weights] | None = None
        total, before = 0.0, site.mini_batches
        for epoch in range(self.task_epochs + self.adversarial_epochs):
            game.set_rates((site.envelope.round - 1) * (self.task_epochs + self.adversarial_epochs) + epoch)
            begun, adversarial = site.mini_batches, epoch >= self.task_epochs
            loss = site.minimise(
                game.adversarial_loss if adversarial else game.task_loss,
                model.features,
                model.classifier,
                optimizers=[game.optimizer],
            )
            total += loss * (site.mini_batches - begun)
            if self.keep == "best" and adversarial and site.held_out is not None:
                right = _accuracy(site, model)
                if best is None or right > best[0]:
                    best = right, site.weights_of(model), site.weights_of(game.discriminator)
        game.remember()
        _, kept, discriminator = best or (0.0, site.weights_of(model), site.weights_of(game.discriminator))
        site.memory["discriminator"] = discriminator
        mean = total / max(1, site.mini_batches - before)
        return Update(kept.without("generator"), kept.select("generator"), site.samples, mean)


class _Game:
    """F with Cl, G and D at a site in one exchange, and the loss of each."""

    def __init__(self, method: FedADG, site: Site, model: WithGenerator) -> None:
        self.method, self.site, self.model = method, site, model
        self.discriminator = _discriminator(method, site, model)
        self.optimizer = site.optimizer(model.features, model.classifier, memory="optimizer")
        self._for_generator = site.optimizer(model.generator, memory="generator_optimizer")
        self._for_discriminator = site.optimizer(self.discriminator, memory="discriminator_optimizer")
        self._noise = site.generator_for("noise")

    def set_rates(self, epoch: int) -> None:
        """Learning rates of this local epoch, counted from 0 over all rounds."""
        rate, warm_up = self.site.learning_rate, self.method.warm_up
        if warm_up is not None:
            rate = max(_LEAST_RATE, rate * min(1.0, epoch / warm_up))
        for optimizer, factor in (
            (self.optimizer, 1.0),
            (self._for_generator, self.method.adversary_rate),
            (self._for_discriminator, self.method.adversary_rate),
        ):
            set_learning_rate(optimizer, factor * rate)

    def remember(self) -> None:
        """Keep momentum, if the experiment says so."""
        self.site.remember_optimizer(self.optimizer, "optimizer")
        self.site.remember_optimizer(self._for_generator, "generator_optimizer")
        self.site.remember_optimizer(self._for_discriminator, "discriminator_optimizer")

    def task_loss(self, batch: Batch) -> Tensor:
        """L_err."""
        return self._error(self.model.features(batch.inputs), batch.targets)

    def adversarial_loss(self, batch: Batch) -> Tensor:
        """Train D and G on the batch. Returns the loss of F and Cl."""
        method, model, critic = self.method, self.model, self.discriminator
        condition = scaled_one_hot(batch.targets, self.site.classes, method.condition_value)
        noise = torch.rand(len(batch.inputs), model.generator.noise, generator=self._noise).to(condition)
        with torch.no_grad():
            model.eval()
            extracted = model.features(batch.inputs)
            model.train()
            generated = model.generator(noise, condition)
        answers = critic(generated, condition), critic(extracted, condition)
        self._step(discriminator_loss(*answers, method.discriminator_loss), self._for_discriminator, critic)
        if method.generator != "frozen":
            # The paper trains G last. G's loss does not depend on F's update nor F's on G's, so G may come first.
            answer = critic(model.generator(noise, condition), condition)
            self._step(reference_loss(answer, method.generator), self._for_generator, model.generator)
        features = model.features(batch.inputs)
        alignment = alignment_loss(critic(features, condition))
        return total_loss(self._error(features, batch.targets), alignment, method.adversarial_weight)

    def _error(self, features: Tensor, labels: Tensor) -> Tensor:
        return smoothed_cross_entropy(self.model.classifier(features), labels, self.method.label_smoothing, "others")

    def _step(self, loss: Tensor, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.site.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), self.site.training.clip_norm)
        optimizer.step()


def _discriminator(method: FedADG, site: Site, model: WithGenerator) -> Discriminator:
    """The site's discriminator, from its memory; in the first round drawn from the site's seed."""
    width = model.embedding_size
    size = method.projection or max(1, width // 4)
    before = method.condition == "before"
    matrix = random_projection(
        width + site.classes if before else width, size, seeded(site.seed, site.name, "projection")
    )
    with drawn_from(derive_seed(site.seed, site.name, "discriminator")):
        made = Discriminator(matrix, site.classes, before=before, trainable=method.trainable_projection)
    if "discriminator" in site.memory:
        made.load_state_dict(dict(site.memory.weights("discriminator")))
    return site.place(made)


@torch.no_grad()
def _accuracy(site: Site, model: Network) -> float:
    """Share of held-out samples that the model predicts correctly."""
    model.eval()
    right = [(model(batch.inputs).argmax(1) == batch.targets).float() for batch in site.held_out_batches()]
    model.train()
    return float(torch.cat(right).mean())


def discriminator_loss(
    generated: Tensor, extracted: Tensor, form: Literal["least_squares", "formula"] = "least_squares"
) -> Tensor:
    """Loss of the discriminator, a scalar. Both forms are least at D(h') = 1, D(h) = 0."""
    _check(generated, extracted)
    if form == "formula":
        return -(generated.square().mean() + (1 - extracted).square().mean())
    return (1 - generated).square().mean() + extracted.square().mean()


def alignment_loss(extracted: Tensor) -> Tensor:
    """Loss of the feature extractor while D is fixed, ``E (1 − D(h|y))²``, a scalar."""
    _check(extracted)
    return (1 - extracted).square().mean()


def reference_loss(generated: Tensor, form: Literal["formula", "towards_features"] = "formula") -> Tensor:
    """Loss of the generator while D is fixed, a scalar."""
    _check(generated)
    return (1 - generated).square().mean() if form == "formula" else generated.square().mean()


def total_loss(task: Tensor, alignment: Tensor, weight: float = 0.15) -> Tensor:
    """Loss of extractor and classifier, ``(1 − λ)·L_err + λ·L_F``, a scalar."""
    return (1 - weight) * task + weight * alignment


def scaled_one_hot(labels: Tensor, classes: int, value: float = 0.7) -> Tensor:
    """The condition y of generator and discriminator: ``value`` at the label, 0 elsewhere."""
    return value * functional.one_hot(labels, classes).float()


def random_projection(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    """A random matrix (outputs, inputs), divided by its Frobenius norm."""
    if min(inputs, outputs) < 1:
        raise UserError(f"a random projection needs sizes of at least 1, found {inputs} and {outputs}")
    return functional.normalize(torch.randn(outputs * inputs, generator=generator), dim=0).view(outputs, inputs)


def _check(*answers: Tensor) -> None:
    if not all(answer.numel() for answer in answers):
        raise UserError("the losses of FedADG need the discriminator's answer to at least one sample")
