"""One result whatever the engine: sites in this process, in another or in two give the same weights bit for bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from tiny import CNN, NORMED, domains, federation, run, start_of, step_on, vectors

from fedshift.data.domain import Domain, SparseRows
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.federation.federation import Federation
from fedshift.federation.local import content_files
from fedshift.federation.local.commands import Done, SaveCommand
from fedshift.federation.local.content_files import LARGE, ContentFiles, take
from fedshift.federation.local.pool import BUFFERED_ANSWERS, WorkerPool, answer_of
from fedshift.federation.local.worker import Worker, read_domain
from fedshift.federation.messages import PerSite, encode, encode_file
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.methods.rounds import start_run
from fedshift.weights import Weights

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"local_epochs": 1},
    "fedprox": {"local_epochs": 1, "proximal_weight": 0.1, "robust": "median"},
    "csac": {"acquisition_epochs": 1, "calibration_epochs": 1},
    "deepall": {"local_epochs": 1},
}
OWN = '''
"""A method in a person's own file, with calls that go wrong."""
import os
import signal
import time
from dataclasses import dataclass

from fedshift.errors import TrainingDiverged, UserError
from fedshift.federation.messages import Reply
from fedshift.methods.base import Method


@dataclass(frozen=True)
class Note(Reply):
    text: str
    number: float = 0.0


class Own(Method):
    traits = Method.traits.derive(name="own", memory_names=("count",))

    def round(self, federation, state):
        return state.advance(state.weights)

    def mini_batches(self, batches_per_epoch, rounds):
        return 0

    def note(self, site, number=0.0):
        time.sleep(0.002 * (site.samples % 7))
        site.memory["count"] = int(site.memory.get("count", 0)) + 1
        return Note(f"{site.name} {site.memory['count']}", number)

    def when(self, site):
        return Note(site.name, time.monotonic())

    def mistake(self, site):
        raise UserError(f"a mistake at {site.name}")

    def diverge(self, site):
        raise TrainingDiverged("too fast")

    def defect(self, site):
        return 1 / 0

    def leak(self, site):
        return 3

    def die(self, site):
        if site.name == "small":
            os.kill(os.getpid(), signal.SIGKILL)
        return Note("alive")
'''


@pytest.fixture(scope="module")
def pools(two_workers: WorkerPool) -> Iterator[dict[int, WorkerPool]]:
    one_worker = WorkerPool(1, threads=1)
    yield {1: one_worker, 2: two_workers}
    one_worker.close()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return registry.method_class(f"{file}:Own")()


def method_of(name: str) -> Method:
    return registry.parse({"name": name, **METHODS[name]})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_same_bits_in_process_and_in_a_pool(name: str, workers: int, pools: dict[int, WorkerPool]) -> None:
    method = method_of(name)
    options: dict[str, Any] = {"momentum": 0.9, "reset_optimizer_each_round": False}
    here, one = run(method, **options)
    there, many = run(method, pool=pools[workers], **options)
    assert there.weights == here.weights
    assert here.weights != start_of(method)
    assert there.report == here.report
    assert many.progress == one.progress
    assert {str(entry) for entry in many.ledger.entries} == {str(entry) for entry in one.ledger.entries}
    assert many.ledger.total == one.ledger.total


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="this torch was built without oneDNN",
)
def test_products_by_onednn_train_the_same_model_in_any_process(pools: dict[int, WorkerPool]) -> None:
    """The option reaches networks and a method's own modules, in workers too; other kernels, other last bits."""
    method = registry.parse({"name": "mdfnet", "decoder": 600})
    found = [vectors(name, number, 600) for name, number in (("labelled", 40), ("target", 32))]
    where: dict[str, Any] = {
        "found": found,
        "network": {"name": "mlp", "hidden": [600, 6]},
        "roles": {"target": "target"},
        "batch_size": 16,
    }
    default, _ = run(method, **where)
    here, _ = run(method, **where, matrix_products="onednn")
    there, _ = run(method, **where, matrix_products="onednn", pool=pools[2])
    assert there.weights == here.weights
    assert here.weights != default.weights
    for key, tensor in default.weights.items():
        torch.testing.assert_close(here.weights[key], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_batch_norm_dropout_and_augmentation_in_a_pool(name: str, pools: dict[int, WorkerPool]) -> None:
    """What draws random numbers by itself, at sites that share a worker or do not."""
    method = method_of(name)
    network = {**NORMED, "dropout": 0.5}
    assert run(method, network=network)[0].weights == run(method, network=network, pool=pools[2])[0].weights
    assert (
        run(method, augmentation="ccst", rounds=1)[0].weights
        == run(method, augmentation="ccst", rounds=1, pool=pools[1])[0].weights
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "csac"])
def test_site_memory_moves_between_engines(name: str, pools: dict[int, WorkerPool], tmp_path: Path) -> None:
    """One round here, saved; the second round in a pool; and the other way round."""
    method = method_of(name)
    options: dict[str, Any] = {"momentum": 0.9, "reset_optimizer_each_round": False}
    whole, _ = run(method, **options)
    for number, (first, second) in enumerate([(None, pools[2]), (pools[1], None)]):
        before = federation(method, pool=first, **options)
        state = step_on(method, before, start_run(method, before, start_of(method)))
        files = before.save_memory(tmp_path / str(number))
        after = federation(method, pool=second, **options)
        after.load_memory(tmp_path / str(number), files)
        after.progress = before.progress
        assert step_on(method, after, state).weights == whole.weights


def many(number: int) -> list[Domain]:
    return domains(CNN, {f"site-{index}": 2 + index * 5 % 11 for index in range(number)})


@pytest.mark.slow
def test_replies_come_in_the_order_asked(own: Any, pools: dict[int, WorkerPool]) -> None:
    found = many(4 * BUFFERED_ANSWERS)
    where = federation(own, found, pool=pools[2])
    for order, count in ((where.sources, 1), (tuple(reversed(where.sources)), 2)):
        number = PerSite({site: float(index) for index, site in enumerate(order)})
        replies = where.ask(own.note, to=order, number=number)
        assert [(reply.text, reply.number) for reply in replies] == [
            (f"{site} {count}", index) for index, site in enumerate(order)
        ]


@pytest.mark.slow
def test_workers_do_not_wait_for_a_slow_server(own: Any, pools: dict[int, WorkerPool]) -> None:
    """While the server is at the first reply, a worker answers two requests more; the machine has one clock."""
    where = federation(own, many(4), pool=pools[1])
    replies = iter(where.ask(own.when, to=where.sources))
    next(replies)
    time.sleep(1)
    late = time.monotonic()
    assert [reply.number < late for reply in replies] == [True, True, False]


@pytest.mark.slow
def test_large_models_cross_in_files(pools: dict[int, WorkerPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is written once, removed, and has the same bits; where there is no room, it crosses in a message."""
    method, written = method_of("fedavg"), list[str]()
    options: dict[str, Any] = {"found": [vectors("a", 20, 200), vectors("b", 20, 200), vectors("c", 20, 200)]}
    options["network"] = {"name": "mlp", "hidden": [200]}
    here, _ = run(method, **options)
    assert here.weights.nbytes > 2 * LARGE

    def write(path: Path, content: Any) -> None:
        written.append(path.name)
        encode_file(path, content)

    monkeypatch.setattr(content_files, "encode_file", write)
    there, where = run(method, pool=pools[2], **options)
    assert there.weights == here.weights
    assert len(written) == where.progress.exchange, "one for all three sites of an exchange"
    left = [file.name for file in pools[2].folder.glob("content-*")]
    assert left == written[-1:], "answers are removed as they are read, a request when the next exchange begins"

    def full(path: Path, content: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(content_files, "encode_file", full)
    assert run(method, pool=pools[2], **options)[0].weights == here.weights
    assert not [*pools[2].folder.glob("content-*")]


def test_nothing_is_in_clear_where_files_are_encrypted(tmp_path: Path) -> None:
    large = {"weights": Weights({"w": torch.zeros(LARGE)})}
    assert ContentFiles(None).write(large) is None
    file = ContentFiles(tmp_path).write(large)
    assert file is not None
    assert take(file) == large
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_largest_sites_are_spread_first(own: Any, pools: dict[int, WorkerPool]) -> None:
    found = domains(CNN, {"a": 2, "b": 9, "c": 3, "d": 8, "e": 7})
    where: Any = federation(own, found, pool=pools[2])
    assert where._worker_of == {"b": 0, "d": 1, "e": 1, "c": 0, "a": 0}


def engines(own: Any, pools: dict[int, WorkerPool], **options: Any) -> Iterator[Federation]:
    yield federation(own, **options)
    yield federation(own, pool=pools[2], **options)


@pytest.mark.slow
def test_errors_of_a_call_keep_their_class(own: Any, pools: dict[int, WorkerPool]) -> None:
    for where in engines(own, pools):
        with pytest.raises(UserError, match=r"^a mistake at large$") as user:
            where.ask(own.mistake, to=["large"]).only()
        assert user.value.exit_code == 2
        with pytest.raises(FedshiftError, match=r"^too fast$") as diverged:
            where.ask(own.diverge, to=["one"]).only()
        assert type(diverged.value).__name__ == "TrainingDiverged"
        with pytest.raises(FedshiftError, match=r"leak .*not a Reply"):
            where.ask(own.leak, to=["one"]).only()
    with pytest.raises(ZeroDivisionError):
        federation(own).ask(own.defect, to=["one"]).only()
    with pytest.raises(FedshiftError, match=r"(?s)Traceback.*return 1 / 0.*ZeroDivisionError"):
        where.ask(own.defect, to=["one"]).only()
    assert where.ask(own.note, to=["one"]).only().text == "one 1"  # the worker serves on
    with pytest.raises(UserError, match=r"refuses .*numbers"):
        federation(own, pool=pools[2], refuse=["numbers"])


@pytest.mark.parametrize("kind", [UserError, TrainingDiverged, FedshiftError])
def test_an_error_of_a_worker_keeps_its_class(kind: type[FedshiftError], monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: Worker, command: SaveCommand, content: dict[str, Any]) -> None:
        raise kind(f"cannot save {command.site}")

    monkeypatch.setattr(Worker, "save", save)
    answer = Worker().answer(encode({}, SaveCommand(site="large", folder="there", version=1).plain()))
    with pytest.raises(FedshiftError, match=r"^cannot save large$") as error:
        answer_of(Done, answer)
    assert type(error.value) is kind


@pytest.mark.slow
def test_a_killed_worker_is_named_in_one_line(own: Any) -> None:
    pool = WorkerPool(2, threads=1)
    try:
        where: Any = federation(own, pool=pool)
        worker = where._worker_of["small"]
        assert where._worker_of["large"] != worker
        with pytest.raises(FedshiftError, match=f"worker process {worker} was killed") as lost:
            list(where.ask(own.die, to=["small", "large"]))
        assert "\n" not in str(lost.value)
        with pytest.raises(FedshiftError, match=f"worker process {worker} was killed"):  # and when nothing can be sent
            list(where.ask(own.note, to=["small"]))
        other = pool._processes[1 - worker]
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        with pytest.raises(FedshiftError, match=f"worker process {1 - worker} was killed"):
            list(where.ask(own.note, to=["large"]))
    finally:
        pool.close()


@pytest.mark.slow
def test_domains_are_shared_once_and_unchanged(pools: dict[int, WorkerPool]) -> None:
    sparse = SparseRows(np.ones(3, np.float32), np.array([0, 2, 1]), np.array([0, 2, 3]), 4)
    for domain in (domains()[0], domains(NORMED)[0], Domain("bags", sparse, np.array([0, 1]))):
        folder = pools[2].share(domain)
        assert pools[2].share(domain) == folder
        found = read_domain(domain.name, Path(folder))
        assert np.array_equal(found.labels, domain.labels)
        if isinstance(domain.inputs, SparseRows):
            assert np.array_equal(found.inputs.dense(np.arange(2)), sparse.dense(np.arange(2)))  # type: ignore[union-attr]
        else:
            assert np.array_equal(found.inputs, domain.inputs)
