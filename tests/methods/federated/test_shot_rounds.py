"""SHOT over several rounds and sources: the rate of every step, the loss it reports, and sources without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_shot import ROLES, everything, short
from tiny import MLP, NORMED, domains, evaluated, run, setting, vectors

from fedshift.federation.site import Site
from fedshift.methods.federated.shot import SHOT, ensemble_weights, members_by_name
from fedshift.models.network import Network


def test_the_rate_falls_over_all_of_a_targets_work() -> None:
    """Three rounds of two steps are six steps at η·(1 + 10·i/6)^−0.75, whichever round they are in."""
    used: list[float] = []

    class Watched(SHOT):
        def _optimizer(self, site: Site, model: Network) -> Any:
            optimizer, set_rates = super()._optimizer(site, model)

            def watched() -> None:
                set_rates()
                if site.role == "target":
                    used.append(optimizer.param_groups[0]["lr"])

            return optimizer, watched

    found = [vectors("a", 8), vectors("b", 8)]
    run(Watched(bottleneck=16, target_epochs=2), found, MLP, roles=ROLES, rounds=3, budget=6)
    assert used == pytest.approx([0.05 * (1 + 10 * number / 6) ** -0.75 for number in range(6)])


def test_a_source_that_sent_no_model_has_no_say() -> None:
    method = short()
    state, where = run(method, network=NORMED)
    models = members_by_name(state.weights, where.sources)
    absent = sorted(models)[1]
    present = {source: model for source, model in models.items() if source != absent}
    whole = ensemble_weights(present, where.sources)
    assert members_by_name(whole, where.sources) == present
    model = evaluated(method, whole, network=NORMED)
    inputs, _ = everything(where, "large")
    with torch.no_grad():
        each = []
        for weights in present.values():
            member = setting(method, domains(NORMED), NORMED).build_network()
            member.load_state_dict(dict(weights))
            each.append(member.eval()(inputs).softmax(1))
        torch.testing.assert_close(model(inputs).softmax(1), sum(each) / 2, atol=1e-6, rtol=1e-5)
