"""Alone: every labelled site trains its own model.

The reference for the question whether a site gains from taking part ("win-win", protocol source_target).

Setting: no federation. Sites with labels train; a site without labels cannot train alone.
Wire: nothing for the training. The ledger shows K·S(θ) per round: the sites' models, which are sent to be measured and
saved.

    site k:  min_{θ_k}  Σ_i CE(f_{θ_k}(x_i^k), y_i^k)

A site that trained predicts with its own model. At other sites the prediction is the mean of all models' softmax.

Where papers and code differ: no choice is needed. With a single labelled site this is Source-only. Equal work: all
sites together train on as many mini-batches as with every other method.

Should reproduce: MDFNet's Source-only rows, where one site has labels (ACC_s of Image-CLEF and Office-Home).
"""

from __future__ import annotations

from pydantic import Field, PositiveInt

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.methods.base import Method, State
from fedshift.methods.federated.shot import Ensemble, ensemble_weights, members_by_name
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights


class Alone(Method):
    """The task's loss at every labelled site, and no exchange."""

    traits = Traits(
        name="alone",
        citation="reference row of the win-win gain, fedshift 2026",
        group="both",
        advice="What each labelled site reaches by itself; gains are measured from it.",
        sends="only its model, to be measured",
        tasks=WITHOUT_MASKS,
        memory_names=("model", "optimizer"),
        trains_privately=True,
    )

    local_epochs: PositiveInt = Field(1, description="passes over a site's data per round")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * self.local_epochs * batches_per_epoch

    def evaluated_network(self, network: Network, sources: int) -> Network:
        return _EachItsOwn(network, sources)

    def start(self, federation: Federation, weights: Weights) -> State:
        return State(ensemble_weights(dict.fromkeys(federation.sources, weights), federation.sources))

    def round(self, federation: Federation, state: State) -> State:
        updates = federation.ask(self.fit, to=federation.sources)
        models = members_by_name(state.weights, federation.sources)  # a site that misses a round keeps its model
        models |= {site: update.weights for site, update in updates.items()}
        return state.advance(ensemble_weights(models, federation.sources), report={"losses": updates.numbers("loss")})

    def fit(self, site: Site) -> Update:
        """Train with cross-entropy from the site's own model; in its first round from the common start."""
        model = site.model(site.memory.weights("model") if "model" in site.memory else None)
        loss = site.minimise(
            lambda batch: site.objective.loss(model(batch.inputs), batch.targets),
            model,
            epochs=self.local_epochs,
            remember="optimizer",
        )
        site.memory["model"] = trained = site.weights_of(model)
        return Update(trained, site.samples, loss)


class _EachItsOwn(Ensemble):
    """An ensemble in which a source predicts with its own model."""

    def at(self, source: int) -> Network:
        member = self.members[source]
        assert isinstance(member, Network)
        return member
