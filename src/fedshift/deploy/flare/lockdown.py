"""Locks down FLARE's processes at a site, so that a coordinator can ask only for what our jobs need.

``python -m fedshift.deploy.flare.lockdown MODULE ARGUMENTS`` calls `lock_down`, then runs one of FLARE's modules of
a site: its client, or the process of a job. FLARE itself allows more. Its client runs ``sys.shell`` and others without
checking a right, unless the sender asks for the check. Role ``super`` may do everything. A job that is marked as
bring-your-own-code passes the class allow list. The sender is the coordinator, whom a site need not trust.
"""

from __future__ import annotations

import gc
import importlib
import io
import logging
import runpy
import sys
import uuid
import zipfile
from collections.abc import Callable
from typing import Any

from fedshift.errors import UserError
from fedshift.extras import runs_program

CLIENT = "nvflare.private.fed.app.client.client_train"
JOB = "nvflare.private.fed.app.client.worker_process"
MODULE = "fedshift.deploy.flare.lockdown"
_ENGINE = "fedshift.deploy.flare.engine"
"""What FLARE imports in a job's process."""
UNLOCKABLE = 2
"""Exit code of a process that cannot be locked down."""

VERSION = "2.9."
"""The versions of FLARE whose source was read for this module."""

TOPICS = {
    "scheduler.check_resource": "check_resources",
    "scheduler.cancel_resource": None,
    "train.deploy": "submit_job",
    "train.start_job": None,
    "train.abort": None,
    "train.notify_job_status": None,
}
"""The topics that a job needs → the command that FLARE's server sends with each. A job at this site sends the last."""

JOB_COMMANDS = ("abort",)
"""The commands that a job's process accepts from the client, beside its tasks."""

_DEPLOY, _CANCEL, _NOTIFY = "train.deploy", "scheduler.cancel_resource", "train.notify_job_status"
_CLIENT_CONFIG = "config/config_fed_client.json"
_FILES = {_CLIENT_CONFIG, "config/config_fed_server.json"}
_SIGNATURES = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
_LARGEST = 1 << 20

Set = Callable[[Any, str, Any], None]
"""Replaces a name: `setattr`, or in a test a function that can undo it."""

_log = logging.getLogger("fedshift.lockdown")


class Unlockable(UserError):
    """This version of FLARE differs from those that were read."""


def lock_down(put: Set = setattr) -> None:
    """Lock FLARE down in this process. Unlockable if FLARE differs from the version that was read. Then nothing was
    replaced."""
    try:
        changes = _changes()
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise Unlockable(f"this version of FLARE cannot be locked down, so it is not started: {error}") from error
    for owner, name, value in changes:
        put(owner, name, value)


def _changes() -> list[tuple[Any, str, Any]]:
    """All replacements: object, name, new value. A name that is missing raises one of several errors."""
    version = str(importlib.import_module("nvflare").__version__)
    if not version.startswith(VERSION):
        raise AttributeError(f"it is {version}, and {VERSION}x is what is known")
    admin = _module("private.fed.client.admin")
    processors = _module("private.fed.client.client_req_processors").ClientRequestProcessors
    commands = _module("private.fed.client.admin_commands").AdminCommands
    agent = admin.FedAdminAgent
    base = _module("private.fed.client.fed_client_base")
    allow_list = _module("app_common.widgets.component_path_authorizer").ComponentPathAuthorizer
    rights = _module("fuel.sec.authz").AuthorizationService
    return [
        (processors, "request_processors", _keep_needed(processors.request_processors)),
        (agent, "_dispatch_request", _guard(_defined_attribute(agent, "_dispatch_request"))),
        (commands, "commands", _kept_commands(commands.commands)),
        (rights, "authorize", staticmethod(_restrict(rights, _defined_attribute(rights, "authorize").__func__))),
        # The class allow list holds for a job that is marked as bringing code, too.
        (allow_list, "_job_has_byoc", staticmethod(_never(_defined_attribute(allow_list, "_job_has_byoc")))),
        # FLARE's agent tells anybody in its network about this process, and stops it on request.
        (base, "NetAgent", _silent(base.NetAgent)),
    ]


def dial_with_ours(manager: Any = None) -> None:
    """Have FLARE dial with our driver. ``manager``: of FLARE's drivers; None: this process's. Unlockable if FLARE would
    use another one."""
    ours = importlib.import_module("fedshift.deploy.flare.dialling").DiallingTcpDriver
    try:
        manager = manager or _module("fuel.f3.communicator").driver_mgr
        manager.register(ours)  # FLARE keeps the first driver of a scheme
        used = {manager.find_driver_class(scheme) for scheme in ours.supported_transports()}
    except (ImportError, AttributeError) as error:
        raise Unlockable(f"this version of FLARE takes no driver of ours, so it is not started: {error}") from error
    if used != {ours}:
        raise Unlockable("this version of FLARE dials with another driver than ours, so it is not started")


def _module(name: str) -> Any:
    return importlib.import_module(f"nvflare.{name}")


def _defined_attribute(owner: type, name: str) -> Any:
    """An attribute that a class itself defines; KeyError if it inherits it or has none."""
    return vars(owner)[name]


# The client -----------------------------------------------------------------------------------------------------------


def _keep_needed(processors: list[Any]) -> list[Any]:
    """Those of the client's processors that a job needs; KeyError if one is missing."""
    kept = [processor for processor in processors if set(processor.get_topics()) <= TOPICS.keys()]
    topics = {topic for processor in kept for topic in processor.get_topics()}
    if topics != TOPICS.keys():
        raise KeyError(f"nothing answers {', '.join(sorted(TOPICS.keys() - topics))}")
    return kept


def _guard(dispatch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``_dispatch_request`` of FLARE's agent, after a check by `_refusal`."""
    replies = _module("private.admin_defs")
    messages, keys = _module("private.defs"), _module("fuel.f3.cellnet.defs").MessageHeaderKey
    header, origin_key, message_class = messages.RequestHeader, keys.ORIGIN, replies.Message
    authorize, command_key = header.REQUIRE_AUTHZ, header.ADMIN_COMMAND
    error_reply, new_cell_message = replies.error_reply, messages.new_cell_message
    job_key, meta_key = header.JOB_ID, header.JOB_META

    def dispatch_request(agent: Any, request: Any) -> Any:
        message = request.payload
        if not isinstance(message, message_class):
            reason = "no message of FLARE's"
        else:
            asked = {"command": message.get_header(command_key), "job": message.get_header(job_key)}
            origin, client = str(request.get_header(origin_key, "")), str(agent.cell.get_fqcn())
            reason = _refusal(message.topic, message.body, message.get_header(meta_key), origin, client, **asked)
        if reason:
            _log.warning(f"refused what {request.get_header(origin_key, 'somebody')} asked for: {reason}")
            return new_cell_message({}, error_reply(f"this site refuses it: {reason}"))
        if message.topic == _DEPLOY:
            # Only this request names a person. FLARE checks that person's right only if the sender asks for it.
            message.set_header(authorize, "true")
        return dispatch(agent, request)

    return dispatch_request


def _refusal(topic: Any, body: Any, meta: Any, origin: str, client: str, *, command: Any, job: Any) -> str:
    """Why a request to the client is refused; empty if it is not."""
    if not isinstance(topic, str) or topic not in TOPICS:
        return f"{str(topic)[:80]!r} is not needed for a job"
    if command != TOPICS[topic]:
        return f"the command {str(command)[:80]!r} does not belong to {topic!r}"
    if topic == _NOTIFY:
        if not origin.startswith(f"{client}."):
            return "only a job of this site says how it is"
    elif origin != "server":
        return "only the coordinator may ask this"
    if topic != _CANCEL and not _is_id(job):
        return "that is no job's id"
    return _app_refusal(body, meta, job) if topic == _DEPLOY else ""


def _is_id(job: Any) -> bool:
    """Whether this is a job id as FLARE makes them. It becomes a folder's name and a word of a command line."""
    try:
        return isinstance(job, str) and str(uuid.UUID(job)) == job
    except ValueError:
        return False


def _app_refusal(body: Any, meta: Any, job: Any) -> str:
    """Why a job's folder is refused; empty if it is not. It may hold two settings files and their signatures."""
    if not isinstance(meta, dict) or meta.get("job_id") != job:
        return "the job's description is of another job"
    if meta.get("byoc"):
        return "the job says that it brings code of its own"
    if meta.get("launcher_spec") or meta.get("flower_predeployed"):
        return "the job wants to be started in another way"
    if str(meta.get("submitter_role", "")).strip().lower() == "super":
        return "role 'super' has no rights here"
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as packed:
            entries = packed.infolist()
    except (zipfile.BadZipFile, TypeError, ValueError, NotImplementedError):
        return "the job's folder is no zip file"
    files = {entry.filename for entry in entries if not entry.is_dir()}
    folders = {entry.filename.rstrip("/") for entry in entries if entry.is_dir()}
    allowed = _FILES | {f"{folder}{name}" for folder in ("", "config/") for name in _SIGNATURES}
    strange = sorted((files - allowed) | (folders - {"", "config"}))
    if strange:
        return f"the job's folder holds {strange[0][:80]!r}; no code and nothing else travels with a job"
    if _CLIENT_CONFIG not in files:
        return f"the job's folder has no {_CLIENT_CONFIG}"
    if sum(entry.file_size for entry in entries) > _LARGEST:
        return f"the job's folder is larger than {_LARGEST >> 20} MB"
    return ""


# Rights ---------------------------------------------------------------------------------------------------------------


def _restrict(service: Any, authorize: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """FLARE's check of a right, except that no role has all rights, and that without rules nobody has any."""

    def authorize_restricted(ctx: Any) -> Any:
        if not ctx or "super" in (ctx.user.role, ctx.submitter.role):
            return False, "role 'super' has no rights here"
        authorizer = service.the_authorizer
        if authorizer is None or not authorizer.get_policy():
            return False, "this site has no authorization.json"
        return authorize(ctx)

    return authorize_restricted


def _never(_: Any) -> Callable[..., bool]:
    return lambda *_, **__: False


def _silent(agent: Any) -> type:
    """A stand-in for FLARE's network agent that registers nothing."""
    if not callable(agent.close):
        raise TypeError("its agent of the network cannot be closed")

    class Silent:
        def __init__(self, *_: Any) -> None:
            pass

        def close(self) -> None:
            """Nothing is open."""

    return Silent


# Jobs -----------------------------------------------------------------------------------------------------------------


def _kept_commands(commands: list[Any]) -> list[Any]:
    """Those of the commands of a job's process that are needed; KeyError if one is missing."""
    kept = [command for command in commands if command.get_command_name() in JOB_COMMANDS]
    if len(kept) != len(JOB_COMMANDS):
        raise KeyError("a job's process cannot be aborted")
    return kept


def main() -> None:
    """Lock FLARE down, then run one of its modules in this process."""
    module = sys.argv[1] if len(sys.argv) > 1 else ""
    if module not in (CLIENT, JOB):
        print(f"error: {module!r} is none of FLARE's processes at a site", file=sys.stderr)
        sys.exit(UNLOCKABLE)
    runs_program("site")
    gc.disable()  # imports make no garbage, and searching for it takes a sixth of their time
    try:
        lock_down()
        dial_with_ours()
    except Unlockable as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(UNLOCKABLE)
    if module == JOB:
        importlib.import_module(_ENGINE)
    gc.freeze()
    gc.enable()
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
