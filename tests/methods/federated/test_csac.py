"""CSAC: what is frozen, what is fused, L_AL (equation 6) written out, every option, and the ablations of its tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lost import site_of
from tiny import CNN, LINEAR, MLP, NORMED, federation, run, start_of, step_on

from fedshift.errors import UserError
from fedshift.federation.site import Envelope
from fedshift.methods.base import Samples
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import Weights
from tried import slow_after

SHORT: dict[str, Any] = {"acquisition_steps": 3, "calibration_steps": 2}


def short(**options: Any) -> CSAC:
    return CSAC(**{**SHORT, **options})


IDENTITIES: dict[str, dict[str, Any]] = {
    "the constant of the MMD has no gradient": {"mmd_constant": True},
    "uniform attention only matters without attention": {"uniform_attention": "per_row"},
    "the stages of the network are the default": {"stages": ("conv1", "conv2")},
    "the last stage of this network is the smallest": {"projection_size": "smallest"},
    "a label is a name": {"label": "mine"},
}


@pytest.mark.parametrize("case", slow_after(2, IDENTITIES))
def test_an_option_that_must_not_change_the_weights(case: str) -> None:
    found, _ = run(short(**IDENTITIES[case]))
    assert found.weights == run(short())[0].weights


def test_the_constant_shows_in_the_loss_alone() -> None:
    """Σ α · 2/(n−1) for |R| = 2 rows that sum to 1: λ · 2 · 2/(n−1) a batch, 8 samples at the large site."""
    one, other = (run(short(mmd_constant=constant))[0].report["losses"]["large"] for constant in (True, False))
    assert one - other == pytest.approx(0.6 * 2 * 2 / 7, rel=1e-4)


def test_switches_that_leave_nothing_to_minimise_or_name_no_stage() -> None:
    where = federation(short())
    network = site_of(where).network
    short().check(network)
    short(stages=("hidden", "conv1")).check(network)
    with pytest.raises(
        UserError,
        match=r"csac.stages: the network has no stage 'conv9'; did you mean 'conv\d'\? known: conv1, conv2, hidden",
    ):
        short(stages=("conv1", "conv9")).check(network)
    with pytest.raises(UserError, match="nothing to minimise"):
        short(alignment_weight=0, cross_entropy=False).check(network)


def test_work() -> None:
    method = CSAC()
    assert method.mini_batches(7, 40) == 30 * 7 + 40 * 10 * 7
    assert CSAC(acquisition_steps=1800, calibration_steps=200).mini_batches(7, 40) == 1800 + 40 * 200


def test_what_was_released_is_the_distance_of_logits_beside_cross_entropy() -> None:
    """Acquisition without smoothing, then cross-entropy + 0.6 · MMD(logits, frozen logits), computed here by hand."""
    method = CSAC.model_validate({"setting": "released", "acquisition_steps": 3, "calibration_steps": 1})
    where = federation(method)
    state = method.start(where, start_of(method))
    site = site_of(where)
    frozen = site.model(site.memory.weights("local_model")).eval()
    model = site.model(state.weights)
    where.round = 1
    update = dict(where.ask(method.calibrate, to=["large"], weights=state.weights).items())["large"]
    assert "projections" not in site.memory
    site.begin(Envelope(2, 1, where.progress.used["large"] / where.budget["large"], 100))
    batch = next(iter(site.batches(steps=1)))
    ours, theirs = model(batch.inputs), frozen(batch.inputs).detach()
    n, both = len(ours), torch.cat([ours, theirs])
    squared = torch.cdist(both, both).square()
    kernel = sum(torch.exp(-squared / (2 * a * squared.mean().detach())) for a in (1 / 27, 1 / 9, 1 / 3, 1, 3))
    within = (kernel[:n, :n].sum() - kernel[:n, :n].trace()) + (kernel[n:, n:].sum() - kernel[n:, n:].trace())
    distance = within / (n * (n - 1)) - 2 / n**2 * kernel[:n, n:].sum()
    assert update.loss == pytest.approx(
        float((F.cross_entropy(ours, batch.targets) + 0.6 * distance).detach()), rel=1e-4
    )


@pytest.mark.parametrize("network", [CNN, NORMED], ids=["plain", "batch_norm"])
def test_the_acquired_model_is_frozen_bit_for_bit(network: dict[str, object]) -> None:
    method = short()
    where = federation(method, network=network)
    state = method.start(where, start_of(method, network=network))
    acquired = {name: site_of(where, name).memory.weights("local_model").clone() for name in where.sources}
    assert acquired["large"] != acquired["small"]
    projections: list[Weights] = []
    for _ in range(3):
        state = step_on(method, where, state)
        for name in where.sources:
            assert site_of(where, name).memory.weights("local_model") == acquired[name]
        projections.append(site_of(where).memory.weights("projections"))
    assert projections[0] != projections[1] != projections[2]  # they are trained and go on


def test_projections_go_on_or_are_drawn_anew() -> None:
    def drawn(**options: Any) -> Weights:
        method = short(**options)
        where = federation(method)
        step_on(method, where, method.start(where, start_of(method)))
        site = site_of(where)
        before = site.memory.weights("projections")
        site.begin(Envelope(9, 2, 0.0, 0))  # no budget: nothing is trained
        method.calibrate(site, start_of(method))
        assert (site.memory.weights("projections") == before) == (not options)
        return site.memory.weights("projections")

    assert drawn() != drawn(reset_projection_each_round=True)


def test_the_mirrored_switch_trains_the_local_model() -> None:
    method = short(frozen="fused")
    where = federation(method)
    state = method.start(where, start_of(method))
    before = site_of(where).memory.weights("local_model")
    updates = dict(where.ask(method.calibrate, to=["large"], weights=state.weights).items())
    assert site_of(where).memory.weights("local_model") == updates["large"].weights != before


def test_acquisition_is_training_with_smoothed_labels() -> None:
    method = short()
    where = federation(method)
    update = where.ask(method.acquire, to=["large"]).only()
    assert where.ledger.total["down"] == {}  # the common start comes from the seed
    site = site_of(where)
    site.begin(Envelope(1, 0, 0.0, 100))
    model = site.model(start_of(method))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for batch in site.batches(steps=3):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.targets, label_smoothing=0.1).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(update.weights[name], tensor, atol=1e-6, rtol=1e-5)
    assert site.memory.weights("local_model") == update.weights


def test_calibration_without_alignment_is_plain_training_bit_for_bit() -> None:
    """λ = 0: what FedAvg's step does with the same batches."""
    csac, fedavg = short(alignment_weight=0, calibration_steps=5), FedAvg(steps_per_round=5)
    there, here = federation(csac), federation(fedavg)
    state = csac.start(there, start_of(csac))
    here.progress.exchange = there.progress.exchange
    theirs = there.ask(csac.calibrate, to=there.sources, weights=state.weights)
    for ours, (name, update) in zip(
        here.ask(fedavg.fit, to=here.sources, weights=state.weights), theirs.items(), strict=True
    ):
        assert (update.weights, update.loss) == (ours.weights, ours.loss), name
    assert "projections" not in site_of(there).memory


def test_acquiring_again_forgets_the_features_of_before() -> None:
    method = short()
    where = federation(method)
    for _ in range(2):
        step_on(method, where, method.start(where, start_of(method)))
    site = site_of(where)
    reference = site.model(site.memory.weights("local_model")).eval()
    inputs = next(site.all_batches()).inputs
    with torch.no_grad():
        torch.testing.assert_close(site.scratch["frozen_features"][0], reference(inputs), atol=1e-6, rtol=1e-5)


# Networks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "network", [LINEAR, MLP, NORMED, {**MLP, "dropout": 0.3}], ids=["linear", "mlp", "batch_norm", "dropout"]
)
@pytest.mark.parametrize(
    "options", [{}, {"measure": "mse"}, {"attention": "none", "alignment": "same_layer"}, {"frozen": "fused"}], ids=str
)
def test_networks_of_vectors(network: dict[str, object], options: dict[str, Any]) -> None:
    state, _ = run(short(**options), network=network)
    assert state.weights != start_of(CSAC(), network=network)


def test_on_frozen_features_alignment_moves_projections_only() -> None:
    """A linear head has nothing trainable before its one stage: the model is that of λ = 0."""
    aligned, where = run(short(), network=LINEAR)
    assert aligned.weights == run(short(alignment_weight=0), network=LINEAR)[0].weights
    assert "projections" in site_of(where).memory


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"alignment_weight": 0}, False), ({"stages": ()}, False)])
def test_texts_are_warned_of_where_stages_are_aligned(options: dict[str, Any], warned: bool) -> None:
    method = CSAC(**options)
    assert bool(method.check_samples(Samples((8,), tokens=True))) is warned
    assert method.check_samples(Samples((8,))) == ()
