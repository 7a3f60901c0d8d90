"""Checks of requests to a site, and the site's kept answers, which it repeats if the same request comes again."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedshift.deploy.remote.policy import MASKED, SEALED, WEIGHTS, whole_number
from fedshift.deploy.remote.requests import CallAnswer, CallRequest, Hello, plain_name
from fedshift.deploy.remote.wire import Body, Message, Residuals, body_of, unseal
from fedshift.encryption import read_private, write_private
from fedshift.errors import FedshiftError, Refused
from fedshift.federation.messages import Content, Statistics, promised_kinds
from fedshift.federation.plain_values import Closed, parse_json
from fedshift.federation.replies import reply_type
from fedshift.federation.site_memory import SiteMemory
from fedshift.json_objects import read_object, write_object
from fedshift.methods.base import Method

RESIDUALS = "wire-residuals"
"""The site memory that holds the rounding residuals of the models it sent."""


_PLAIN = re.compile(r"\w[\w. -]*")
"""A name that leads to no other folder."""
_WEIGHTS = (".safetensors", ".npz")


def check_files(site: str, options: BaseModel) -> None:
    """Check that the options of a request name nothing but files, or folders, of weights in ``FEDSHIFT_WEIGHTS``.

    Otherwise a request could have the site open any file, or download one. Refused if an option names another file.
    """
    folder = os.environ.get("FEDSHIFT_WEIGHTS")
    for field, value in options:
        if isinstance(value, BaseModel):
            check_files(site, value)
        loads = field == "pretrained" and value is not False
        if not (loads or isinstance(value, Path)):
            continue
        file = Path(str(value))
        ready = folder is not None and _holds_weights(Path(folder) / file)
        # A path that nothing is loaded from may stay, such as a default.
        idle = not loads and file.suffix in _WEIGHTS and not file.exists()
        if not _PLAIN.fullmatch(str(value)) or not (ready or idle):
            raise Refused(
                f"site '{site}': {field} must be the plain name of a .safetensors or .npz file, or of a folder with a "
                "model.safetensors, that lies in this site's FEDSHIFT_WEIGHTS"
            )


def _holds_weights(path: Path) -> bool:
    if path.is_dir():
        return (path / "model.safetensors").is_file() and (path / "config.json").is_file()
    return path.is_file() and path.suffix in _WEIGHTS


def shared_kinds(method: Method, request: Hello | CallRequest, on_refusal: str) -> tuple[str, ...]:
    """The kinds that a site must allow before a run of a method can begin.

    Under secure aggregation models leave masked; with sealed routing some leave sealed. Each request is
    checked again.
    """
    if on_refusal == "leave_out":
        return ()
    sealed = request.routing == "sealed" and seals_all(method)
    models = MASKED if request.aggregation == "secure" else SEALED if sealed else WEIGHTS
    return tuple(models if kind == WEIGHTS else kind for kind in method.calls.shares)


def seals_all(method: Method) -> bool:
    """Whether the models that a method routes can leave a site sealed, and no other in the same reply."""
    calls = {call: promised_kinds(reply_type(method, call)) for call in method.traits.routed}
    return bool(calls) and all(
        field == method.traits.routed[call].field or kind != WEIGHTS
        for call in calls
        for field, kind in calls[call].items()
    )


def audit_entry(header: Mapping[str, Any], message: Message) -> dict[str, Any]:
    """The audit log's entry for what came, which may be no request at all."""
    setting = header.get("setting")
    method = setting.get("method") if isinstance(setting, Mapping) else None
    envelope = header.get("envelope")
    envelope = envelope if isinstance(envelope, Mapping) else {}
    return {
        "run": str(header.get("run"))[:200],
        "do": str(header.get("do"))[:40],
        "method": str(method.get("name"))[:100] if isinstance(method, Mapping) else None,
        "call": str(header.get("call"))[:100] if "call" in header else None,
        "round": whole_number(envelope.get("round", header.get("round", 0))),
        "exchange": whole_number(envelope.get("exchange", 0)),
        "received_bytes": message.size,
        "received_digest": message.digest,
    }


def narrow_reply(memory: SiteMemory, request: CallRequest, sent: Mapping[str, Any]) -> Body:
    """Write a reply as bytes, and remember its rounding residual for the call's next reply."""
    if request.wire == "float32":
        return body_of(sent)
    remembered = memory.get(RESIDUALS)
    whole: Residuals = dict(remembered) if isinstance(remembered, Statistics) else {}
    prefix = f"{request.call}|"
    residuals = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
    body = body_of(sent, request.wire, residuals)
    whole |= {f"{prefix}{name}": value for name, value in residuals.items()}
    memory[RESIDUALS] = Statistics(whole)
    return body


# Answers --------------------------------------------------------------------------------------------------------------


class _Kept(Closed):
    """The file of a kept answer: its header, and the digest of the whole message."""

    header: str
    digest: str


def _answer_file(folder: Path, exchange: int, key: str) -> Path:
    return folder / f"answer-{exchange}-{plain_name(key)[:16]}.json"


def keep_answer(folder: Path, exchange: int, key: str, answer: Message) -> None:
    """Keep an answer until a checkpoint covers it.

    The file is not flushed, since its digest shows whether the answer is whole.

    UserError if the file cannot be written.
    """
    file = _answer_file(folder, exchange, key)
    write_private(file.with_suffix(".safetensors"), answer.body, flush=False)
    kept = _Kept(header=answer.header, digest=answer.digest)
    write_object(file, kept.model_dump(), private=True, flush=False)


def kept_answer(folder: Path, exchange: int, key: str) -> tuple[Message, Mapping[str, Content]] | None:
    """The kept answer to this request and its content; None if there is none, or a damaged one: it is made again."""
    file = _answer_file(folder, exchange, key)
    try:
        kept = _Kept.model_validate(read_object(file))
        answer = Message(kept.header, read_private(file.with_suffix(".safetensors")), kept.digest)
        _, held, _ = unseal(answer)
        text = parse_json(CallAnswer, kept.header, "a kept answer")
    except (OSError, ValueError, FedshiftError):
        return None
    return (answer, held) if text.answers == key else None


def drop_covered(folder: Path, request: CallRequest) -> None:
    """Remove answers that a checkpoint covers, and memory files that no checkpoint or kept answer names."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {*request.kept.values(), *request.memory.values()}
    for file in folder.glob("answer-*.json"):
        number = file.name.split("-")[1]
        if number.isdecimal() and int(number) <= request.checkpoint:
            file.with_suffix(".safetensors").unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        else:
            with contextlib.suppress(FedshiftError, ValueError):
                kept = _Kept.model_validate(read_object(file))
                wanted |= set(parse_json(CallAnswer, kept.header, "a kept answer").memory.values())
    for file in folder.glob("*.safetensors"):
        if not file.name.startswith("answer-") and file.name not in wanted:
            file.unlink(missing_ok=True)
