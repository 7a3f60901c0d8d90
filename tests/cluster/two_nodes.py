"""A real SLURM on this machine: a controller and two nodes, with a folder that they share.

Each node has processes and a host name of its own, and its own FUSE mount of the shared folder, so that neither
`flock` nor a number of a process says anything of the other node, as on two machines.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "bindfs", "unshare")
PACKAGES = "slurm-wlm munge bindfs"
NODE = 'hostname "$1" && bindfs "$2" "$3" && exec slurmd -D -N "$1"'


def wait_for(condition: Callable[[], object], seconds: float = 180.0, what: str = "") -> None:
    """Wait until ``condition()`` is true; other tests may keep the machine busy."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain {what or condition}"
        time.sleep(0.2)


@dataclass
class Slurm:
    """A running SLURM.

    Attributes:
        folder: of its own files.
        shared: the folder that all nodes, and this process, see under this path.
    """

    folder: Path
    shared: Path
    services: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Of what talks to this SLURM."""
        quick = {"OMP_NUM_THREADS": "1", "FEDSHIFT_SILENCE": "20", "FEDSHIFT_GRACE": "10", "COLUMNS": "300"}
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return {**os.environ, **quick, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: object) -> str:
        """Run a command of SLURM; returns what it prints."""
        done = subprocess.run([*map(str, words)], env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def fedshift(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run ``fedshift …`` on this machine."""
        command = [sys.executable, "-m", "fedshift", *map(str, words)]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, cwd=self.shared
        )

    def start_node(self, name: str) -> None:
        command = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["sh", "-c", NODE, "node", name, str(self.folder / "back"), str(self.shared)]
        self.nodes[name] = self._started(command, name)

    def kill_node(self, name: str) -> None:
        """All its processes are gone at once, as without power."""
        self.nodes[name].kill()
        self.nodes.pop(name).wait()

    def jobs(self, *options: str) -> list[str]:
        """The jobs in the queue, as "number_task state node"."""
        return self.call("squeue", "--noheader", "--array", "--format", "%i %T %N", *options).splitlines()

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        for name in ("back", "state", "log"):
            (self.folder / name).mkdir()
        self.shared.mkdir()
        program = self.folder / "bin" / "fedshift"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedshift "$@"\n')
        program.chmod(0o755)
        subprocess.run(["bindfs", str(self.folder / "back"), str(self.shared)], check=True)
        self._write_configuration()
        munge = self.folder / "munge"
        options = (("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))
        paths = [f"--{option}={munge}.{end}" for option, end in options]
        command = ["munged", "--force", "--foreground", f"--key-file={key}", *paths]
        self.services.append(self._started(command, "munged"))
        wait_for(Path(f"{munge}.sock").exists, what="for munged")
        self.services.append(self._started(["slurmctld", "-D"], "slurmctld"))
        for name in ("n1", "n2"):
            self.start_node(name)
        wait_for(self.is_idle, what="for the nodes")

    def is_idle(self) -> bool:
        return self.call("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == ["idle"] * 2

    def stop(self) -> None:
        for process in (*self.nodes.values(), *reversed(self.services)):
            process.kill()
            process.wait()
        subprocess.run(["fusermount", "-u", "-z", str(self.shared)], check=False)

    def logs(self) -> str:
        """What the services and the jobs wrote, for the message of a failed test."""
        files = [*(self.folder / "log").iterdir(), *self.shared.glob("**/slurm/*.err")]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in sorted(files))

    def _started(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)

    def _write_configuration(self) -> None:
        host, (controller, *ports) = socket.gethostname(), free_ports(3)
        nodes = [
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=4000"
            for number, port in enumerate(ports, 1)
        ]
        (self.folder / "slurm.conf").write_text(
            f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.sock,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/%n.pid
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdLogFile={self.folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout=15
KillWait=10
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SlurmdParameters=config_overrides
{nodes[0]}
{nodes[1]}
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n1,n2 MaxTime=60 State=UP PriorityTier=10
"""
        )


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A SLURM of two nodes; skipped where it cannot be."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent or os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip(f"needs root, /dev/fuse and the packages {PACKAGES}; not here: {', '.join(absent) or 'the rights'}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path must be short
    running = Slurm(folder, folder / "shared")
    try:
        running.start()
        yield running
    finally:
        running.stop()
        if sys.exc_info()[0] is not None or os.environ.get("KEEP_SLURM"):
            print(running.logs())
        else:
            shutil.rmtree(folder, ignore_errors=True)
