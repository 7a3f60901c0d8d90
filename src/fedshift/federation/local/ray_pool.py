"""The sites of one run as actors of a Ray cluster, with the interface and the messages of a `WorkerPool`.

What sites share in an exchange, such as the model, is put into the cluster once. An actor whose node is gone does not
come back by itself, because its sites' memory went with it: the run goes on from its checkpoint with new actors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedshift.errors import SitesLost
from fedshift.federation.local.commands import Command
from fedshift.federation.local.pool import A, Once, SharedFiles, answer_of
from fedshift.federation.local.ray_cluster import check_room, join_cluster, settle_in, wait_for, where
from fedshift.federation.local.worker import Worker
from fedshift.federation.messages import Content, encode


class SitesActor:
    """Holds sites, as a worker process does. Its answers are those of a `Worker`."""

    def __init__(self, variables: Mapping[str, str], threads: int) -> None:
        settle_in(variables, threads)
        self._worker = Worker()

    def answer(self, command: bytes, *content: bytes) -> bytes:
        """Answer a command, with the pieces of its content."""
        return self._worker.answer(command, *content)


class RayPool(SharedFiles):
    """Actors that share the sites of a run. It serves any number of runs, one after another.

    ``wait``: seconds until an answer that does not come is an error. ``folder``: a folder that all nodes see, for
    samples. ``device``: what each actor calls its card; None: the device is that of the setting. Raises UserError: the
    cluster is not there, or has no room. Raises SitesLost: the actors do not start in time.
    """

    def __init__(
        self,
        address: str,
        actors: int,
        threads: int,
        cards: float,
        wait: float,
        folder: Path,
        device: str | None = None,
    ) -> None:
        self.device = device
        folder.mkdir(parents=True, exist_ok=True)
        self._open = ExitStack()
        self._wait = wait
        self._once: Once[Any] = Once(lambda name, value: self._ray.put(encode({name: value})))
        try:
            self._ray = self._open.enter_context(join_cluster(address))
            check_room(self._ray, actors, threads, cards)
            samples = tempfile.TemporaryDirectory(prefix=".ray-", dir=folder, ignore_cleanup_errors=True)
            super().__init__(Path(self._open.enter_context(samples)))
            made = self._ray.remote(SitesActor).options(
                num_cpus=threads, num_gpus=cards, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
            )
            self._actors = [made.remote(where(), threads) for _ in range(actors)]
            self._asked: dict[int, Any] = {}
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The number of actors."""
        return len(self._actors)

    def pack(self, command: Command, **content: Content) -> tuple[Any, ...]:
        """A command as a message, and its content in the cluster."""
        pieces = [self._once.of(command, name, value) for name, value in content.items()]
        return encode({}, command.plain()), *pieces

    def may_wait(self, message: tuple[Any, ...]) -> bool:
        """Whether a message may be sent to an actor that is at work: never."""
        return False

    def send(self, worker: int, message: tuple[Any, ...]) -> None:
        """Send a packed command to one actor. `receive` waits for the answer."""
        self._asked[worker] = self._actors[worker].answer.remote(*message)

    def ready(self, workers: Sequence[int]) -> list[int]:
        """Those of these actors whose answers are there, at least one."""
        by_answer = {self._asked[worker]: worker for worker in workers}
        return [by_answer[there] for there in self._wait_for(list(by_answer))]

    def receive(self, kind: type[A], worker: int) -> tuple[dict[str, Any], A]:
        """Wait for an actor's answer, as `WorkerPool.receive`."""
        answer = self._asked.pop(worker)
        self._wait_for([answer])
        try:
            return answer_of(kind, self._ray.get(answer, timeout=self._wait))
        except self._ray.exceptions.RayError as error:
            raise SitesLost(f"the process of sites {worker} in the cluster is gone ({type(error).__name__})") from error

    def _wait_for(self, answers: Sequence[Any]) -> list[Any]:
        return wait_for(self._ray, answers, self._wait)

    def close(self) -> None:
        """End the actors, remove the samples and leave the cluster."""
        for actor in getattr(self, "_actors", ()):
            self._ray.kill(actor)
        self._actors, self._asked = [], {}
        self._once.clear()
        self._open.close()
