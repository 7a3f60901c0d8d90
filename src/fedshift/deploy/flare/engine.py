"""The NVIDIA FLARE engine: a controller that carries the messages of a `RemoteFederation`, an executor that answers.

FLARE starts one process per job at the coordinator and at each site, and builds one of these two classes in it. No
other class of ours is on a site's allow list. A message crosses as text and bytes, so FLARE's decomposers handle only
plain values. docs/flare.md says which interfaces of FLARE are used, and why.
"""

from __future__ import annotations

import gc
import os
import queue
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedshift.deploy.coordinator import coordinate
from fedshift.deploy.flare.certificates import revoked_sites
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.flare.kits import Kit, load_kit
from fedshift.deploy.flare.parts import (
    TOPIC,
    Parcel,
    Parcels,
    SiteParts,
    part_of,
    parts_at_site,
    room_of,
    written_in_parts,
)
from fedshift.deploy.remote.incoming import Arriving, Held, Spool
from fedshift.deploy.remote.transport import Lost, NewJobNeeded, Sign
from fedshift.deploy.remote.wire import Message, error_answer
from fedshift.deploy.site_server import SiteProgram, open_site, tell_people
from fedshift.errors import FedshiftError, UserError

KIT, SITE = "FEDSHIFT_KIT", "FEDSHIFT_SITE"
"""Environment variables of a job's process: the kit's folder at the coordinator, the SITE.yaml at a site."""
TASK = "fedshift"
_LOOK_AGAIN = 0.25
Arrivals = queue.Queue[tuple[str, Held | Lost | Sign]]
_AROUND = 1 << 16
"""Bytes that FLARE may add to a message."""


class CoordinatingController(Controller):  # type: ignore[misc]
    """What the coordinator's side of any job has. ``transport`` carries its messages."""

    def __init__(self) -> None:
        super().__init__(task_check_period=0.02)

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to clean up."""

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """FLARE calls this."""
        self.log_warning(fl_ctx, f"a reply of site '{client.name}' came too late")

    def transport(self, fl_ctx: FLContext, *rules: Any) -> FlareTransport:
        """Carries messages from now on; ``rules``: of `FlareTransport`."""
        transport = FlareTransport(self, fl_ctx, *rules)
        fl_ctx.get_engine().register_aux_message_handler(TOPIC, transport.parcels.answer)
        return transport


class FlareCoordinator(CoordinatingController):
    """The coordinator's side of a job: runs the experiment of the deployment of a name."""

    def __init__(self, deployment: str) -> None:
        super().__init__()
        self._deployment = Deployment(Path(os.environ[KIT]), deployment)

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self._deployment.record({"what": "reply", "site": client.name, "is": "refused", "reason": "it came too late"})

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the whole experiment and write down its outcome. FLARE calls this."""
        deployment, job = self._deployment, str(fl_ctx.get_job_id())
        deployment.note_process(job)
        kit = own_kit()
        largest, revoked_now = kit.project.largest_message, partial(revoked_sites, kit)
        transport = self.transport(fl_ctx, abort_signal, deployment.new_job_requested, largest, revoked_now)
        gc.freeze()  # modules stay loaded: `Parcels`, which collects garbage often, need not search them
        try:
            revoked = revoked_now()
            coordinate(deployment.folder, transport, [site for site in deployment.sites if site not in revoked])
            deployment.end(job, "finished")
        except NewJobNeeded as error:
            deployment.end(job, "again", str(error))
        except Aborted as error:
            deployment.end(job, "aborted", str(error))
        except FedshiftError as error:
            deployment.end(job, "failed", str(error), error.exit_code)
        except Exception as error:  # a bug, or a fault of the machine: the service tries again, and shows this
            deployment.record({"what": "job", "is": "failed", "reason": repr(error)})
            raise


class Aborted(FedshiftError):
    """FLARE has ended the job."""


class FlareTransport:
    """Carries messages as FLARE tasks: one task per site, which the site's process fetches.

    Args:
        new_job_requested: says why the run should continue in a new job; None if it should not.
        largest: MiB of the largest message that is sent or accepted.
        revoked: names the sites that the coordinator refuses now.
    """

    def __init__(
        self,
        controller: Controller,
        fl_ctx: FLContext,
        abort_signal: Signal,
        new_job_requested: Callable[[], str | None],
        largest: int,
        revoked: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        self._controller, self._context, self._abort = controller, fl_ctx, abort_signal
        self._new_job_requested, self._largest, self._revoked = new_job_requested, largest, revoked
        self.parcels = Parcels(largest << 20)

    def exchange(
        self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
    ) -> Generator[tuple[str, Message | Lost | Sign], None, None]:
        with Spool() as spool:
            yield from self._exchange(messages, deadline, patience, spool)

    def _exchange(
        self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float], spool: Spool
    ) -> Generator[tuple[str, Message | Lost | Sign], None, None]:
        arrived: Arrivals = queue.Queue()
        fetched: set[str] = set()
        tasks: dict[str, Task] = {}
        tickets: list[str] = []
        try:
            for site, ticket, task, arriving in self._pack(list(messages), spool):
                tickets.append(ticket)
                tasks[site] = self._send(site, task, arrived, spool, arriving)
            begun = time.monotonic()
            waiting = set(tasks)
            while waiting:
                if arrived.empty():
                    yield "", Sign.QUIET
                try:
                    site, held = arrived.get(timeout=_LOOK_AGAIN)
                except queue.Empty:
                    self._check_job()
                    limits = {site: None if site in fetched else patience.get(site) for site in sorted(waiting)}
                    for site, lost in self._lost_sites(tasks, limits, time.monotonic() - begun, deadline):
                        waiting.discard(site)
                        yield site, lost
                    continue
                if isinstance(held, Sign):
                    fetched.add(site)
                    yield site, held
                elif site in waiting:
                    waiting.discard(site)
                    yield site, spool.take(held) if isinstance(held, Held) else held
        finally:
            for ticket in tickets:
                self.parcels.close(ticket)
            for task in tasks.values():
                self._controller.cancel_task(task)

    def _lost_sites(
        self, tasks: Mapping[str, Task], limits: Mapping[str, float | None], passed: float, deadline: float
    ) -> Iterator[tuple[str, Lost]]:
        """The sites that are given up, and why. ``limits``: of each site that is waited for, the seconds in which it
        has to fetch its task; None: it has."""
        revoked = self._revoked()
        for site, until_fetched in limits.items():
            reason = self._why_lost(tasks[site], passed, deadline, until_fetched)
            if site in revoked:
                reason = "its kit was revoked"
            if reason:
                yield site, Lost(reason)

    def _pack(self, messages: list[tuple[str, Message]], spool: Spool) -> list[tuple[str, str, Shareable, Arriving]]:
        """What FLARE carries to each site: name, ticket, task, and where the body of the answer goes if it is large.

        A large body is written to files, once for all sites that get the same, from which they fetch it.
        """
        room = room_of(len(messages))
        written: dict[int, Sequence[Path]] = {}
        packed: list[tuple[str, str, Shareable, Arriving]] = []
        for site, message in messages:
            check_size(message, self._largest)
            if len(message.body) > room and id(message.body) not in written:
                written[id(message.body)] = written_in_parts(message.body, room, spool)
            arriving = Arriving(spool)
            ticket = self.parcels.open(Parcel(written.get(id(message.body), ()), part_of(room), arriving))
            task = shareable_of(message, room)
            task["ticket"], task["room"] = ticket, room
            packed.append((site, ticket, task, arriving))
        return packed

    def _send(self, site: str, data: Shareable, arrived: Arrivals, spool: Spool, arriving: Arriving) -> Task:
        # FLARE passes these parameters by name.
        def on_sent(client_task: ClientTask, fl_ctx: FLContext) -> None:
            arrived.put((client_task.client.name, Sign.FETCHED))

        def on_received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            answer, apart = message_from(client_task.result), size_apart(client_task.result)
            client_task.result = None  # otherwise FLARE holds the message until it next checks the task
            held: Held | Lost | None
            if isinstance(answer, Lost):
                held = answer
            elif apart:
                held = arriving.complete(answer.header, answer.digest, apart) or Lost(
                    "its reply did not come as a whole"
                )
            else:
                held = spool.hold(answer)
            if held is not None:
                arrived.put((client_task.client.name, held))

        task = Task(name=TASK, data=data, after_task_sent_cb=on_sent, result_received_cb=on_received)
        self._controller.send(task, self._context, targets=[site])
        return task

    def _check_job(self) -> None:
        """Raise if the job has ended, or should end."""
        if self._abort.triggered:
            raise Aborted("the job was ended")
        reason = self._new_job_requested()
        if reason:
            raise NewJobNeeded(reason)

    @staticmethod
    def _why_lost(task: Task, passed: float, deadline: float, patience: float | None) -> str | None:
        """Why a site is lost; None while it may still answer."""
        # OK is set after the reply was put into the queue, where it may have come since the queue was found empty.
        if task.completion_status not in (None, TaskCompletionStatus.OK):
            return f"FLARE ended its task ({task.completion_status})"
        if passed > deadline:
            return f"no reply within {deadline:g} s"
        if patience is not None and passed > patience:
            return f"it was lost before, and did not fetch its request within {patience:g} s"
        return None


class FlareSite(Executor):  # type: ignore[misc]
    """A site's side of a job: answers each task with the answer of the site's program."""

    def __init__(self) -> None:
        super().__init__()
        self._program: SiteProgram | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Answer a task. FLARE calls this.

        It raises nothing, since a failed executor would end the job of all sites. An error is an answer.
        """
        message = message_from(shareable)
        if isinstance(message, Lost):
            return shareable_of(error_answer(None, FedshiftError(message.reason)))
        parts = parts_at_site(shareable, fl_ctx, abort_signal)
        room = shareable["room"] if parts else None
        try:
            self._program = self._program or self.open(fl_ctx)
            peer = fl_ctx.get_peer_context()
            server = peer.get_identity_name() if peer else ""
            largest = self.largest()
            whole = _whole(message, size_apart(shareable), parts, largest)
            answer = self._program.handle(whole, f"{server} job {fl_ctx.get_job_id()}")
            del whole
            check_size(answer, largest)
            told = shareable_of(answer, room)
            if parts is not None and size_apart(told):
                parts.bring(answer.body)
        except Exception as error:
            tell_people(error)
            told = shareable_of(error_answer(message, error))
        return told

    def open(self, fl_ctx: FLContext) -> SiteProgram:
        """Make the site's program."""
        return open_site(Path(os.environ[SITE]), in_service=True)

    def largest(self) -> int:
        """MiB of the largest message that the site sends or accepts."""
        return own_kit().project.largest_message


def _whole(message: Message, size: int, parts: SiteParts | None, largest: int) -> Message:
    """A message together with its body of ``size`` bytes, if that has to be fetched."""
    if not size:
        return message
    if parts is None or size > largest << 20:
        raise UserError("the coordinator offers a message that this site cannot fetch, or one that is too large")
    return Message(message.header, parts.fetch(size), message.digest)


def own_kit() -> Kit:
    """The kit of this process's role."""
    return load_kit(Path(os.environ[KIT]))


def check_size(message: Message, largest: int) -> None:
    """Raise UserError if a message of more than ``largest`` MiB is to be sent. FLARE would end the process, and say
    little."""
    size = len(message.header) + len(message.body)
    if size + _AROUND > largest << 20:
        raise UserError(
            f"a message of {size / 1e6:.0f} MB is larger than this project allows ({largest} MiB): raise "
            "largest_message in the project file, call fedshift project provision, and hand the new kit.json out (in "
            "a FLARE project of your own: of the recipe)"
        )


def shareable_of(message: Message, room: int | None = None) -> Shareable:
    """A message in the form that FLARE carries: two texts and bytes; without the body if that has more than ``room``
    bytes, and crosses in parts."""
    out = Shareable()
    out["header"], out["body"], out["digest"] = message.header, message.body, message.digest
    if room is not None and len(message.body) > room:
        out["body"], out["apart"] = b"", len(message.body)
    return out


def size_apart(shareable: Shareable) -> int:
    """The bytes of a message's body that crosses in parts; 0 if the body is in the message."""
    size = shareable.get("apart") if isinstance(shareable, Shareable) else None
    return size if type(size) is int and size > 0 else 0


def message_from(shareable: Any) -> Message | Lost:
    """The message that FLARE brought, or why there is none."""
    if not isinstance(shareable, Shareable):
        return Lost("FLARE brought no message")
    code = shareable.get_return_code()
    if code != ReturnCode.OK:
        return Lost(f"its process failed ({code})")
    header, body, digest = shareable.get("header"), shareable.get("body"), shareable.get("digest")
    if not (isinstance(header, str) and isinstance(body, bytes) and isinstance(digest, str)):
        return Lost("what it sent is no message")
    return Message(header, body, digest)
