"""A job that died is followed by the next one at once: the service does not wait until FLARE says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")

from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.flare.jobs import Attendance, RunningDeployment
from fedshift.files import write_bytes
from fedshift.json_objects import write_object


class Server:
    """Stands for FLARE's, to which every job runs for ever."""

    def __init__(self) -> None:
        self.jobs = 0

    def get_system_info(self) -> Any:
        return SimpleNamespace(client_info=[SimpleNamespace(name="north")])

    def submit_job(self, folder: str) -> str:
        self.jobs += 1
        return f"job-{self.jobs}"

    def get_job_meta(self, job: str) -> dict[str, str]:
        return {"status": "RUNNING"}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    deployment = Deployment(tmp_path, "study")
    deployment.want("run")
    write_bytes(tmp_path / "kit.json", json.dumps({"project": {"sites": ["north"]}}).encode())
    write_object(deployment.folder / "experiment.json", {"engine": {}})
    return deployment


def look(job: RunningDeployment, server: Server) -> int:
    """Look once, and once more for a next job; how many jobs there were."""
    job.look(server)
    job._next_status = 0.0
    job.look(server)
    return server.jobs


def died(deployment: Deployment) -> list[str]:
    return [event["status"] for event in deployment.events() if event.get("is") == "died"]


@pytest.mark.slow
def test_a_killed_job_is_seen_by_the_service_itself(deployment: Deployment) -> None:
    server, job = Server(), RunningDeployment(Attendance(), deployment)
    assert look(job, server) == 1
    running = [sys.executable, "-S", "-c", "print(flush=True); input()", "-n", "job-1"]
    with subprocess.Popen(running, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        noted = {"pid": process.pid, "job": "job-1"}
        write_object(deployment.folder / "process.json", noted)
        assert look(job, server) == 1
        process.kill()
    assert look(job, server) == 2
    assert died(deployment) == ["KILLED"]
    deployment.end("job-1", "aborted")  # what a job that was left still writes ends no other
    assert look(job, server) == 2


def test_an_aborted_job_says_so_itself(deployment: Deployment) -> None:
    server, job = Server(), RunningDeployment(Attendance(), deployment)
    look(job, server)
    deployment.end("job-1", "aborted")
    assert look(job, server) == 2
    assert died(deployment) == ["ABORTED"]


def test_a_job_ends_as_soon_as_a_sites_process_of_it_has_ended(deployment: Deployment) -> None:
    line = "FederatedServer - INFO - Failing job {} due to reported failure from north: ?"
    server, attendance = Server(), Attendance()
    job = RunningDeployment(attendance, deployment)
    look(job, server)
    attendance.read_line(line.format("job-0"))
    look(job, server)
    assert deployment.new_job_requested() is None, "that was another job"
    attendance.read_line(line.format("job-1"))
    look(job, server)
    assert deployment.new_job_requested() == "the process of a site has ended"
    deployment.end("job-1", "again")  # as the job does within a quarter of a second
    assert look(job, server) == 2
    assert died(deployment) == ["SITE_FAILED"]
