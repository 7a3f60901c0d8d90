"""The local engine with a pool of worker processes, which map the same data files into memory.

A worker is a fresh interpreter that runs `fedshift.federation.local.worker`, so it does not run the caller's program
again. A site and its memory stay at one worker. The messages are those that would cross a network.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from fedshift import errors, trust
from fedshift.data.domain import Domain, SparseRows
from fedshift.encryption import present_key
from fedshift.errors import FedshiftError, KindRefused, TrainingDiverged, UserError
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.federation import Federation
from fedshift.federation.local.cards import Card, dealt, environment
from fedshift.federation.local.commands import (
    CallCommand,
    CallDone,
    Command,
    Done,
    Failed,
    LoadCommand,
    OwnCommand,
    SaveCommand,
    Saved,
    SettingCommand,
    SharedRows,
    SiteCommand,
)
from fedshift.federation.local.content_files import ContentFiles, remove, take
from fedshift.federation.local.in_process import names_of
from fedshift.federation.messages import Content, Statistics, decode, encode
from fedshift.federation.setting_json import reply_from, setting_recipe
from fedshift.federation.site_runner import Setting, SitePlan, about_sites
from fedshift.weights import Weights

BUFFERED_ANSWERS = 4
"""Answers that may wait for an earlier site's answer before workers pause. This bounds the server's memory."""
_AHEAD = 4096
"""Bytes of a message that may wait at a worker which is at work. The socket holds as many; to send a larger one could
wait for the worker while it waits for its answer to be read."""
_START_SECONDS = 120
_SOCKET_PATH = 100
"""Characters of a socket's path that every system accepts."""


class SharedFiles:
    """The samples of domains as files, which every process that sees ``folder`` maps into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shared: dict[tuple[int, int], tuple[Domain, str]] = {}

    def share(self, domain: Domain) -> str:
        """Write the domain's arrays once, as files that every worker maps into memory; return their folder."""
        key = id(domain.inputs), id(domain.labels)  # a domain in the scale of another seed has the same arrays
        if key not in self._shared:
            folder = Path(tempfile.mkdtemp(prefix="domain-", dir=self.folder))
            inputs = domain.inputs
            if isinstance(inputs, SparseRows):
                for part in ("data", "indices", "indptr"):
                    np.save(folder / f"{part}.npy", getattr(inputs, part))
                (folder / "width").write_text(str(inputs.width))
            else:
                np.save(folder / "inputs.npy", inputs)
            np.save(folder / "labels.npy", domain.labels)
            if domain.masks is not None:
                np.save(folder / "masks.npy", domain.masks)
            if domain.groups is not None:
                np.save(folder / "groups.npy", domain.groups)
            self._shared[key] = (domain, str(folder))  # keep the arrays, so that their ids stay unique
        return self._shared[key][1]

    def forget(self) -> None:
        """Remove the shared files. Workers keep what they have mapped."""
        for _, folder in self._shared.values():
            shutil.rmtree(folder, ignore_errors=True)
        self._shared.clear()


A = TypeVar("A", bound=Done)


def answer_of(kind: type[A], message: bytes) -> tuple[dict[str, Any], A]:
    """A worker's answer: its content, and what it says, of this kind. Raises FedshiftError: the worker's own error."""
    content, header = decode(message)
    if "error" in header:
        failed = Failed.model_validate(header)
        raise getattr(errors, failed.error, FedshiftError)(failed.message)
    text = kind.model_validate(header)
    return take(text.file) if text.file else content, text


P = TypeVar("P")


class Once(Generic[P]):
    """What is put somewhere once for all sites of an exchange that get the same object.

    ``put``: puts a piece of content there; None: it does not go there.
    """

    def __init__(self, put: Callable[[str, Content], P | None], drop: Callable[[P], None] = lambda there: None) -> None:
        self._put, self._drop, self._exchange = put, drop, -1
        self._kept: dict[tuple[str, int], tuple[Content, P]] = {}

    def of(self, command: Command, name: str, value: Content) -> P | None:
        """Where a piece of a command's content is."""
        exchange = command.envelope.exchange if isinstance(command, CallCommand) else -1
        if exchange != self._exchange:
            self._exchange = exchange
            self.clear()
        if (name, id(value)) not in self._kept:
            if (there := self._put(name, value)) is None:
                return None
            self._kept[name, id(value)] = value, there  # with the object, so that its id stays its own
        return self._kept[name, id(value)][1]

    def clear(self) -> None:
        """Remove all of it."""
        for _, there in self._kept.values():
            self._drop(there)
        self._kept.clear()


class Pool(Protocol):
    """Processes that hold sites: workers of this machine, or actors of a cluster."""

    device: str | None

    @property
    def size(self) -> int: ...

    def share(self, domain: Domain) -> str: ...

    def forget(self) -> None: ...

    def pack(self, command: Command, **content: Any) -> Any: ...

    def may_wait(self, message: Any) -> bool: ...

    def send(self, worker: int, message: Any) -> None: ...

    def ready(self, workers: Sequence[int]) -> list[int]: ...

    def receive(self, kind: type[A], worker: int) -> tuple[dict[str, Any], A]: ...

    def close(self) -> None: ...


class WorkerPool(SharedFiles):
    """Worker processes, each with ``threads`` threads and a card of ``cards``. A pool serves any number of runs."""

    def __init__(self, workers: int, threads: int, cards: Sequence[Card] = ()) -> None:
        chosen = dealt(cards, workers) if cards else []
        self.device = chosen[0].alone if chosen else None
        """What each worker calls its card; None: the device is that of the setting."""
        self._folder = tempfile.TemporaryDirectory(prefix="fedshift-pool-", ignore_cleanup_errors=True)
        super().__init__(Path(self._folder.name))
        files = ContentFiles(self.folder if present_key() is None else None)
        self._once = Once(lambda name, value: files.write({name: value}), remove)
        key = secrets.token_bytes(32)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        # TMPDIR may be too long for a socket's path; a relative path may be shorter.
        whole = str(Path(self._folder.name) / "pool.sock")
        address = min(whole, os.path.relpath(whole), key=len)
        if len(address) > _SOCKET_PATH:
            raise UserError(f"the folder of temporary files ({tempfile.gettempdir()}) has too long a path: set TMPDIR")
        variables = {**os.environ, **trust.for_children(), "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        with Listener(address, "AF_UNIX", backlog=workers, authkey=key) as listener:
            for number in range(workers):
                process = subprocess.Popen(
                    [sys.executable, "-m", "fedshift.federation.local.worker", address, str(threads), str(number)],
                    stdin=subprocess.PIPE,
                    env={**variables, **environment(chosen[number : number + 1])},
                    start_new_session=True,  # Ctrl-C reaches only the server, which closes its workers
                )
                assert process.stdin is not None
                process.stdin.write(key)
                process.stdin.close()
                self._processes.append(process)
            listener._listener._socket.settimeout(_START_SECONDS)  # type: ignore[attr-defined]
            arrived: dict[int, Connection] = {}  # workers connect in any order, and send their number
            for _ in range(workers):
                try:
                    connection = listener.accept()
                    arrived[int(connection.recv_bytes())] = connection
                except (EOFError, OSError) as error:
                    self.close()
                    raise FedshiftError(
                        "a worker process did not start: run with engine.workers=1 to see why"
                    ) from error
            self.connections = [arrived[number] for number in range(workers)]

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.connections)

    def ready(self, workers: Sequence[int]) -> list[int]:
        """Those of these workers whose answers are there, at least one."""
        there = wait([self.connections[worker] for worker in workers])
        return [self.connections.index(connection) for connection in there]  # type: ignore[arg-type]

    def pack(self, command: Command, **content: Any) -> bytes:
        """A command as a message, with its content or the files that have it."""
        files = {name: self._once.of(command, name, value) for name, value in content.items()}
        small = {name: value for name, value in content.items() if files[name] is None}
        return encode(small, command.model_copy(update={"pieces": tuple(filter(None, files.values()))}).plain())

    def may_wait(self, message: bytes) -> bool:
        """Whether a message may be sent to a worker that is at work."""
        return len(message) <= _AHEAD

    def send(self, worker: int, message: bytes) -> None:
        """Send a packed command to one worker. `receive` waits for the answer."""
        try:
            self.connections[worker].send_bytes(message)
        except OSError as error:
            raise self._worker_error(worker) from error

    def receive(self, kind: type[A], worker: int) -> tuple[dict[str, Any], A]:
        """Wait for a worker's answer: its content, and what it says, of this kind.

        Raises FedshiftError: the worker died, or its own error.
        """
        try:
            message = self.connections[worker].recv_bytes()
        except (EOFError, OSError) as error:
            raise self._worker_error(worker) from error
        return answer_of(kind, message)

    def _worker_error(self, worker: int) -> FedshiftError:
        process = self._processes[worker]
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        reason = (
            "was killed, perhaps for lack of memory" if code is not None and code < 0 else f"ended with code {code}"
        )
        return FedshiftError(f"worker process {worker} {reason}; run again to continue from the last round")

    def close(self) -> None:
        """Stop the workers and remove the shared files."""
        for connection in self.connections:
            connection.close()  # a worker stops when its connection closes
        deadline = time.monotonic() + 2
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.connections, self._processes = [], []
        self._folder.cleanup()


@dataclass
class _Turns:
    """The requests of an exchange that one worker answers, one after the other."""

    left: deque[Request] = field(default_factory=deque)  # those that are not sent
    packed: Any = None  # the message of the first of these, if it is made
    sent: deque[str] = field(default_factory=deque)  # the sites of those that are sent and not answered


class PoolFederation(Federation):
    """Sites in the processes of a pool. Each site stays at one worker; the largest sites are placed first."""

    def __init__(self, pool: Pool, plans: Sequence[SitePlan], setting: Setting, **options: Any) -> None:
        super().__init__(
            setting.method,
            about=about_sites(plans, setting, setting.build_network()),
            sources=names_of(plans, "source"),
            targets=names_of(plans, "target"),
            seed=setting.seed,
            **options,
        )
        self._pool = pool
        self._worker_of: dict[str, int] = {}
        load = [0] * pool.size
        for plan in sorted(plans, key=lambda plan: -sum(len(rows) for _, rows, _ in plan.parts)):
            worker = load.index(min(load))
            load[worker] += sum(len(rows) for _, rows, _ in plan.parts)
            self._worker_of[plan.name] = worker
        recipe = setting_recipe(setting)
        recipe = recipe.model_copy(update={"device": pool.device or recipe.device})
        for worker in range(len(load)):
            self._call(Done, worker, SettingCommand(setting=recipe))
        for plan in plans:
            shared: dict[str, tuple[SharedRows, ...]] = {}
            rows: dict[str, Statistics] = {}
            for group, parts in (("parts", plan.parts), ("unlabelled", plan.unlabelled), ("held_out", plan.held_out)):
                shared[group] = tuple(
                    SharedRows(folder=pool.share(domain), name=domain.name, number=number, scale=domain.scale)
                    for domain, _, number in parts
                )
                rows[group] = Statistics({str(i): torch.from_numpy(chosen) for i, (_, chosen, _) in enumerate(parts)})
            command = SiteCommand(
                name=plan.name,
                role=plan.role,
                refuse=tuple(sorted(plan.refuse)),
                parts=shared["parts"],
                unlabelled=shared["unlabelled"],
                held_out=shared["held_out"],
            )
            self._call(Done, self._worker_of[plan.name], command, **rows)

    def _call(self, kind: type[A], worker: int, command: Command, **content: Any) -> tuple[dict[str, Any], A]:
        """Send a command to one worker and wait for its answer, of this kind."""
        self._pool.send(worker, self._pool.pack(command, **content))
        return self._pool.receive(kind, worker)

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        """Keep the workers at work, each with its sites; yield answers in the order asked, with only a few waiting."""
        turns: dict[int, _Turns] = {}
        order: list[str] = []
        for request in requests:
            order.append(request.site)
            turns.setdefault(self._worker_of[request.site], _Turns()).left.append(request)
        waiting: dict[str, Answer[Any] | Missing] = {}
        for site in order:
            self._hand_out(call, turns, waiting, site)
            while site not in waiting:
                for worker in self._pool.ready([worker for worker, turn in turns.items() if turn.sent]):
                    name = turns[worker].sent.popleft()
                    waiting[name] = self._answer(name, worker)
                self._hand_out(call, turns, waiting, site)
            yield waiting.pop(site)

    def _hand_out(self, call: str, turns: Mapping[int, _Turns], waiting: Mapping[str, Any], awaited: str) -> None:
        """Send each free worker its next request, and one more if that can wait there: so it never waits for this
        process, which may be busy with a reply."""
        for worker, turn in turns.items():
            while turn.left and (len(waiting) < BUFFERED_ANSWERS or turn.left[0].site == awaited):
                request = turn.left[0]
                if turn.packed is None:
                    command = CallCommand(site=request.site, call=call, envelope=request.envelope)
                    turn.packed = self._pool.pack(command, **request.content)
                if len(turn.sent) > 1 or (turn.sent and not self._pool.may_wait(turn.packed)):
                    break
                self._pool.send(worker, turn.packed)
                turn.sent.append(turn.left.popleft().site)
                turn.packed = None

    def _answer(self, site: str, worker: int) -> Answer[Any] | Missing:
        try:
            content, done = self._pool.receive(CallDone, worker)
        except (TrainingDiverged, KindRefused) as error:
            return Missing(site, error)
        return Answer(site, reply_from(done.reply, content), done.mini_batches)

    def own_weights(self, site: str, weights: Weights) -> Weights:
        if site not in self._worker_of or not self.method.calls.keep_own_weights:
            return weights
        content, _ = self._call(Done, self._worker_of[site], OwnCommand(site=site), weights=weights)
        own_weights: Weights = content["weights"]
        return own_weights

    def save_memory(self, folder: Path) -> dict[str, dict[str, str]]:
        version = self.progress.exchange
        out: dict[str, dict[str, str]] = {}
        for name, worker in self._worker_of.items():
            command = SaveCommand(site=name, folder=str(folder / name), version=version)
            out[name] = self._call(Saved, worker, command)[1].files
        return out

    def load_memory(self, folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
        for name, worker in self._worker_of.items():
            self._call(Done, worker, LoadCommand(site=name, folder=str(folder / name), files=dict(files.get(name, {}))))
