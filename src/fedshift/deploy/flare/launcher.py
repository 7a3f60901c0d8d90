"""Starts a job's process at a site behind our lock. FLARE's client builds it, as a kit's ``resources.json`` says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher

from fedshift.deploy.flare.lockdown import JOB, MODULE


class LockedJobLauncher(ClientProcessJobLauncher):  # type: ignore[misc]
    """FLARE's launcher of processes, whose command starts `lockdown`. FLARE refuses a second launcher beside it."""

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> Any:
        """Start a job's process, unless the job brings code. FLARE calls this."""
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        if Path(workspace.get_app_custom_dir(job_meta.get(JobConstants.JOB_ID))).exists():
            raise RuntimeError("the job brings code of its own, so it is not started")
        return super().launch_job(job_meta, fl_ctx)

    def get_command(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> str:
        """The command line of a job's process; RuntimeError if FLARE would start another. FLARE calls this."""
        line = str(super().get_command(job_meta, fl_ctx))
        start = f"{sys.executable} -m {JOB} "
        if not line.startswith(start):
            raise RuntimeError("FLARE starts a job's process in a way that is not known here, so it is not started")
        return f"{sys.executable} -m {MODULE} {JOB} {line[len(start) :]}"
