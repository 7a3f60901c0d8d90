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
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshift.data.domain import Domain, SparseRows
from fedshift.encryption import present_key
from fedshift.errors import OUT_OF_MEMORY, FedshiftError, is_out_of_memory
from fedshift.extras import runs_program
from fedshift.federation.local.allocator import keep_freed_memory
from fedshift.federation.local.commands import (
    KINDS,
    CallCommand,
    CallDone,
    Done,
    Failed,
    LoadCommand,
    OwnCommand,
    SaveCommand,
    Saved,
    SettingCommand,
    SiteCommand,
)
from fedshift.federation.local.content_files import ContentFiles
from fedshift.federation.messages import decode, decode_file, encode, reply_content
from fedshift.federation.setting_json import setting_from
from fedshift.federation.site_runner import Setting, SitePlan, SiteRunner
from fedshift.import_paths import CHILD, place_of
from fedshift.models.network import Network
from fedshift.models.registry import any_code

Answer = tuple[dict[str, Any], Done]
"""The content of an answer, and what it says."""


class Worker:
    """Answers the pool's commands. It holds the sites of one setting at a time."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: where large content of answers may be left for the pool; None: nowhere."""
        self._files = ContentFiles(folder)
        self._setting: Setting | None = None
        self._network: Network | None = None
        self._runners: dict[str, SiteRunner] = {}

    def setting(self, command: SettingCommand, content: dict[str, Any]) -> Answer:
        self._setting, self._runners = setting_from(command.setting, any_code), {}
        self._network = self._setting.build_network()
        return {}, Done()

    def site(self, command: SiteCommand, content: dict[str, Any]) -> Answer:
        assert self._setting is not None
        parts, unlabelled, held_out = (
            [
                (
                    replace(read_domain(part.name, Path(part.folder)), scale=part.scale),
                    content[group][str(number)].numpy(),
                    part.number,
                )
                for number, part in enumerate(getattr(command, group))
            ]
            for group in ("parts", "unlabelled", "held_out")
        )
        plan = SitePlan(command.name, command.role, parts, unlabelled, held_out, frozenset(command.refuse))
        self._runners[plan.name] = SiteRunner(plan, self._setting, network=self._network)
        return {}, Done()

    def call(self, command: CallCommand, content: dict[str, Any]) -> Answer:
        reply, mini_batches = self._runners[command.site].run(command.call, command.envelope, content)
        return reply_content(reply), CallDone(reply=place_of(type(reply)), mini_batches=mini_batches)

    def save(self, command: SaveCommand, content: dict[str, Any]) -> Answer:
        memory = self._runners[command.site].site.memory
        return {}, Saved(files=memory.save(Path(command.folder), command.version))

    def own_weights(self, command: OwnCommand, content: dict[str, Any]) -> Answer:
        runner = self._runners[command.site]
        return {"weights": runner.method.own_weights(content["weights"], runner.site.memory)}, Done()

    def load(self, command: LoadCommand, content: dict[str, Any]) -> Answer:
        self._runners[command.site].site.memory.load(Path(command.folder), command.files)
        return {}, Done()

    def answer(self, command: bytes, *more: bytes) -> bytes:
        """Answer a command, an error included; ``more`` holds further pieces of its content."""
        works: dict[str, Callable[[Any, dict[str, Any]], Answer]] = {
            "setting": self.setting,
            "site": self.site,
            "call": self.call,
            "save": self.save,
            "load": self.load,
            "own": self.own_weights,
        }
        try:
            content, header = decode(command)
            whole = dict(content)
            for piece in more:
                whole.update(decode(piece)[0])
            do = str(header.get("do"))
            asked = KINDS[do].model_validate(header, strict=False)  # JSON's lists may stand for tuples
            for file in asked.pieces:
                whole.update(decode_file(Path(file)))
            answer, text = works[do](asked, whole)
            written = self._files.write(answer)
            if written is not None:
                answer, text = {}, text.model_copy(update={"file": written})
            return encode(answer, text.model_dump())
        except FedshiftError as error:
            return encode({}, Failed(error=type(error).__name__, message=str(error)).model_dump())
        except Exception as error:
            return encode({}, _failure(error).model_dump())

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


def _failure(error: Exception) -> Failed:
    """What the server is told of an error: one line where memory ran out, else, of a bug, the whole traceback."""
    if is_out_of_memory(error):
        return Failed(error="UserError", message=OUT_OF_MEMORY)
    trace = "".join(traceback.format_exception(error))
    return Failed(error="FedshiftError", message=f"a worker failed:\n{trace}")


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
            Worker(folder if present_key() is None else None).serve(connection)
    finally:
        # The folder holds every site's samples. The server removes it, or this worker if the server was killed.
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
