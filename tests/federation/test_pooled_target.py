"""A pool that also holds a target's samples: a mini-batch of every domain at a time, and no label of the target's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import CNN, domains, federation

import fedshift
from fedshift.errors import FedshiftError
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Batch, Envelope, Site
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.methods.pooled.deepall import DeepAll

OWN = '''
"""Cross-entropy at the sources, and predictions at the target that are as sure as can be."""
import torch.nn.functional as F

from fedshift.federation.messages import Update
from fedshift.methods.base import Method


class Sure(Method):
    traits = Method.traits.derive(name="sure", pooled=True, target="unlabelled")

    def mini_batches(self, batches_per_epoch, rounds):
        return rounds * batches_per_epoch

    def target_mini_batches(self, batches_per_epoch, rounds):
        return rounds * batches_per_epoch

    def round(self, federation, state):
        (pool,) = federation.sources
        steps = -(-federation.share(pool) // 4)
        update = federation.ask(self.fit, to=federation.sources, weights=state.weights, steps=steps).only()
        return state.advance(update.weights, report={"losses": {pool: update.loss}})

    def fit(self, site, weights, steps):
        model = site.model(weights)

        def loss_of(batches):
            sources, target = batches
            loss = sum(F.cross_entropy(model(batch.inputs), batch.targets) for batch in sources)
            surest = model(target.inputs).log_softmax(1)
            return loss - 0.1 * (surest.exp() * surest).sum(1).mean()

        loss = site.minimise_over(site.domain_batches(steps), loss_of, model, remember="optimizer")
        return Update(site.weights_of(model), site.samples, loss)
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "sure.py"
    file.write_text(OWN)
    return file


@pytest.fixture(scope="module")
def method(own: Path) -> Method:
    return registry.method_class(f"{own}:Sure")()


def begun(where: Federation, left: int = 100) -> Site:
    """The pool's site at the beginning of an exchange."""
    assert isinstance(where, LocalFederation)
    site = where._runners["pool"].site
    site.begin(Envelope(1, 1, 0.0, left))
    return site


def test_every_domain_has_a_batch_at_a_time(method: Method) -> None:
    found = domains(CNN)
    site = begun(federation(method, found))
    assert (site.samples, site.domains) == (47, 3)
    seen: list[tuple[tuple[Batch, ...], Batch]] = []
    for sources, target in site.domain_batches(10):
        assert target is not None
        seen.append((sources, target))
    assert len(seen) == 10
    assert site.mini_batches == 10 * 4
    labels = torch.from_numpy(np.concatenate([domain.labels for domain in found]))
    begins, ends = (0, 41, 46), (41, 46, 47)
    for number, (begin, end, size) in enumerate(zip(begins, ends, (8, 5, 2), strict=True)):
        batches = [sources[number] for sources, _ in seen]
        for batch in batches:
            assert set(batch.domains.tolist()) == {number}
            assert torch.equal(batch.targets, labels[batch.rows])
            assert len(batch.rows) in (size, size + 1)  # a last batch of one joins the one before
        rows = [row for batch in batches for row in batch.rows.tolist()]
        assert set(rows) == set(range(begin, end))
        # Pass after pass, each in its own order: nothing comes again before all the others came.
        if end - begin > 1:
            passes = [rows[place : place + end - begin] for place in range(0, len(rows), end - begin)]
            assert len(passes) >= 2
            assert all(len(set(one)) == len(one) for one in passes)
            assert passes[0] != passes[1]
    targets = [target for _, target in seen]
    inputs = torch.cat([inputs for inputs, _, _ in site.unlabelled.all_batches(100)])  # type: ignore[union-attr]
    for target in targets:
        assert target.labels is None
        assert torch.equal(target.inputs, inputs[target.rows])
        with pytest.raises(FedshiftError, match="unlabelled target for labels"):
            _ = target.targets
    assert sorted(row for target in targets[:2] for row in target.rows.tolist()) == list(range(14))


def test_it_ends_with_the_budget(method: Method) -> None:
    """Each batch of a domain counts; the step that is under way is finished."""
    for left, steps in ((0, 0), (1, 1), (4, 1), (5, 2), (8, 2)):
        site = begun(federation(method), left)
        assert len(list(site.domain_batches(10))) == steps
        assert site.mini_batches == 4 * steps


def test_a_pool_without_a_target() -> None:
    site = begun(federation(DeepAll()))
    assert site.unlabelled is None
    assert [target for _, target in site.domain_batches(2)] == [None, None]
    assert site.mini_batches == 2 * 3


def test_an_experiment_counts_the_target_s_samples(own: Path, tmp_path: Path) -> None:
    """What is pooled leaves its site; and all methods do the same work, the target's included."""
    rng = np.random.default_rng(0)
    for name, samples in (("a", 30), ("b", 24), ("c", 40)):
        np.savez(tmp_path / f"{name}.npz", x=rng.normal(size=(samples, 5)).astype(np.float32), y=np.arange(samples) % 3)
    options = {
        "name": "pooled",
        "data": {"name": "arrays", "sites": {name: str(tmp_path / f"{name}.npz") for name in "abc"}},
        "protocol": {"kind": "adapt_to_one", "targets": ["a"], "seeds": [0], "test_fraction": 0.2},
        "model": "linear",
        "training": {"rounds": 2, "batch_size": 8},
        "methods": [{"name": f"{own}:Sure", "label": "sure"}, "source_only", "kd3a", "oracle", "fedavg"],
        "engine": {"threads": 1},
        "device": "cpu",
    }
    foretold = fedshift.check(options)
    results = fedshift.run(options, tmp_path / "runs")
    of = {run.method: run for run in results.runs}
    trained = of["sure"].data["training_samples"]
    sources = sum(trained.values()) * 5 * 4
    assert of["source_only"].bytes_up["raw_data"] == sources
    assert of["sure"].bytes_up["raw_data"] == sources + 24 * 5 * 4  # 80 % of the target's 30
    for name in ("kd3a", "oracle", "fedavg"):
        assert "raw_data" not in of[name].bytes_up
    for method in foretold.methods:
        if method.label != "sure":  # its formula is not written
            assert method.bytes_up == sum(of[method.label].bytes_up.values()), method.label
            assert method.bytes_down == sum(of[method.label].bytes_down.values()), method.label
    work = {run.mini_batches for run in results.runs}
    assert max(work) - min(work) <= 2  # a pool ends with a whole step of all its domains
