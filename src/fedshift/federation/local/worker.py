"""A worker process, which holds sites and runs calls at them. `fedshift.federation.local.pool` starts it."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshift.data.domain import Domain, SparseRows
from fedshift.errors import OUT_OF_MEMORY, FedshiftError, is_out_of_memory
from fedshift.extras import runs_program
from fedshift.federation.local.allocator import keep_freed_memory
from fedshift.federation.messages import decode, encode, reply_content
from fedshift.federation.setting_json import setting_from
from fedshift.federation.site import Envelope
from fedshift.federation.site_runner import Setting, SitePlan, SiteRunner
from fedshift.import_paths import CHILD, place_of
from fedshift.models.network import Network
from fedshift.models.registry import any_code

Answer = tuple[dict[str, Any], dict[str, Any]]


class Worker:
    """Answers the pool's commands. It holds the sites of one setting at a time."""

    def __init__(self) -> None:
        self._setting: Setting | None = None
        self._network: Network | None = None
        self._runners: dict[str, SiteRunner] = {}

    def setting(self, header: dict[str, Any], content: dict[str, Any]) -> Answer:
        self._setting, self._runners = setting_from(header["setting"], any_code), {}
        self._network = self._setting.build_network()
        return {}, {}

    def site(self, header: dict[str, Any], content: dict[str, Any]) -> Answer:
        assert self._setting is not None
        parts, unlabelled, held_out = (
            [
                (read_domain(part["name"], Path(part["folder"])), content[group][str(i)].numpy(), part["number"])
                for i, part in enumerate(header[group])
            ]
            for group in ("parts", "unlabelled", "held_out")
        )
        refuse = frozenset(header["refuse"])
        plan = SitePlan(header["name"], header["role"], parts, unlabelled, held_out, refuse)
        self._runners[plan.name] = SiteRunner(plan, self._setting, network=self._network)
        return {}, {}

    def call(self, header: dict[str, Any], content: dict[str, Any]) -> Answer:
        envelope = Envelope(**header["envelope"])
        reply, mini_batches = self._runners[header["site"]].run(header["call"], envelope, content)
        return reply_content(reply), {"reply": place_of(type(reply)), "mini_batches": mini_batches}

    def save(self, header: dict[str, Any], content: dict[str, Any]) -> Answer:
        memory = self._runners[header["site"]].site.memory
        return {}, {"files": memory.save(Path(header["folder"]), header["version"])}

    def own(self, header: dict[str, Any], content: dict[str, Any]) -> Answer:
        runner = self._runners[header["site"]]
        return {"weights": runner.method.own_weights(content["weights"], runner.site.memory)}, {}

    def load(self, header: dict[str, Any], content: dict[str, Any]) -> Answer:
        self._runners[header["site"]].site.memory.load(Path(header["folder"]), header["files"])
        return {}, {}

    def answer(self, command: bytes, *more: bytes) -> bytes:
        """Answer a command, an error included; ``more`` holds further pieces of its content."""
        commands: dict[str, Callable[[dict[str, Any], dict[str, Any]], Answer]] = {
            "setting": self.setting,
            "site": self.site,
            "call": self.call,
            "save": self.save,
            "load": self.load,
            "own": self.own,
        }
        try:
            content, header = decode(command)
            whole = dict(content)
            for piece in more:
                whole.update(decode(piece)[0])
            return encode(*commands[header["do"]](header, whole))
        except FedshiftError as error:
            return encode({}, {"error": type(error).__name__, "message": str(error)})
        except Exception as error:
            return encode({}, _failure(error))

    def serve(self, connection: Connection) -> None:
        """Answer commands until the pool closes the connection."""
        while True:
            try:
                command = connection.recv_bytes()
            except (EOFError, OSError):
                return
            answer = self.answer(command)
            try:
                connection.send_bytes(answer)
            except OSError:
                return


def _failure(error: Exception) -> dict[str, str]:
    """What the server is told of an error: one line where memory ran out, else, of a bug, the whole traceback."""
    if is_out_of_memory(error):
        return {"error": "UserError", "message": OUT_OF_MEMORY}
    trace = "".join(traceback.format_exception(error))
    return {"error": "FedshiftError", "message": f"a worker failed:\n{trace}"}


def read_domain(name: str, folder: Path) -> Domain:
    """Read the domain that `WorkerPool.share` wrote; its arrays are mapped into memory."""
    labels = np.load(folder / "labels.npy", mmap_mode="r", allow_pickle=False)
    grouped = (folder / "groups.npy").exists()
    groups = np.load(folder / "groups.npy", mmap_mode="r", allow_pickle=False) if grouped else None
    if (folder / "inputs.npy").exists():
        inputs = np.load(folder / "inputs.npy", mmap_mode="r", allow_pickle=False)
        masked = (folder / "masks.npy").exists()
        masks = np.load(folder / "masks.npy", mmap_mode="r", allow_pickle=False) if masked else None
        return Domain(name, inputs, labels, groups, masks=masks)
    data, indices, indptr = (
        np.load(folder / f"{part}.npy", mmap_mode="r", allow_pickle=False) for part in ("data", "indices", "indptr")
    )
    return Domain(name, SparseRows(data, indices, indptr, int((folder / "width").read_text())), labels, groups)


def main() -> None:
    """Run a worker: ``python -m fedshift.federation.local.worker ADDRESS THREADS NUMBER``, with the key on stdin."""
    address, threads, number = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # a scheduler tells every process; the server says when its round has ended
    torch.set_num_threads(threads)
    keep_freed_memory()
    atexit.register(gc.freeze)  # otherwise Python searches all of torch's objects for garbage at exit
    runs_program("worker")
    key = sys.stdin.buffer.read()
    os.environ[CHILD] = "1"
    folder = Path(address).resolve().parent
    try:
        with Client(address, "AF_UNIX", authkey=key) as connection:
            connection.send_bytes(number.encode())
            Worker().serve(connection)
    finally:
        # The folder holds every site's samples. The server removes it, or this worker if the server was killed.
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
