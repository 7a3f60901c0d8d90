"""DeepAll: one pool of all sources, trained as one site; raw data are said to leave."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tiny import CNN, domains, federation, run, start_of

from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.weights import Weights


def test_it_is_plain_training_on_all_samples() -> None:
    rounds, budget = 3, 10  # 4 + 4 + 2 mini-batches
    state, where = run(DeepAll(), rounds=rounds, budget=budget)
    assert isinstance(where, LocalFederation)
    assert where.sources == ("pool",)
    site = where._runners["pool"].site
    assert site.samples == 47
    assert site.domains == 3
    model, used = site.model(start_of(DeepAll())), 0
    for exchange, steps in ((1, 4), (2, 4), (3, 2)):
        site.begin(type(site.envelope)(exchange, exchange, 0.0, budget - used))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, fused=True)
        for batch in site.batches(steps=steps):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.inputs), batch.targets).backward()
            optimizer.step()
            used += 1
    assert used == budget == where.progress.used["pool"]
    assert state.weights == Weights(model.state_dict())


def test_batches_mix_domains_and_say_which() -> None:
    where = federation(DeepAll())
    assert isinstance(where, LocalFederation)
    site = where._runners["pool"].site
    site.begin(type(site.envelope)(1, 1, 0.0, 100))
    batches = list(site.batches())
    assert sorted(torch.cat([batch.domains for batch in batches]).tolist()) == [0] * 41 + [1] * 5 + [2]
    labels = torch.cat([torch.from_numpy(domain.labels) for domain in domains(CNN)])
    for batch in batches:
        assert torch.equal(batch.targets, labels[batch.rows])


def test_work() -> None:
    assert DeepAll(local_epochs=3).mini_batches(10, 4) == 120
