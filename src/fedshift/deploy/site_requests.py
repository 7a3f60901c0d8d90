"""Checks of requests to a site, and the site's kept answers, which it repeats if the same request comes again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedshift.deploy.remote.policy import MASKED, SEALED, WEIGHTS, whole_number
from fedshift.deploy.remote.wire import Body, Message, Residuals, body_of, unseal
from fedshift.digests import Damaged, read_object, write_object
from fedshift.encryption import read_private, write_private
from fedshift.errors import FedshiftError, Refused
from fedshift.federation.messages import Content, Statistics, promised_kinds
from fedshift.federation.replies import reply_type
from fedshift.federation.site import Envelope
from fedshift.federation.site_memory import SiteMemory
from fedshift.methods.base import Method

RESIDUALS = "wire-residuals"
"""The site memory that holds the rounding residuals of the models it sent."""


SCORES = ".scores"
"""What a file ends with that holds the scores of a run's last model, beside the run's folder."""
_PLAIN = re.compile(r"\w[\w. -]*")
"""A name that leads to no other folder."""
_WEIGHTS = (".safetensors", ".npz")
_SUFFIXES = (".json", ".jsonl", ".lock", ".secret", SCORES)
"""Of files in a site's memory that belong to no run."""


def plain_name(name: Any) -> str:
    """Check a name from a message that becomes part of a path.

    Raises:
        FedshiftError: the name could lead out of the folder.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w=+-][\w.=+-]{0,200}", name):
        raise FedshiftError("a message names a file that is not a plain name")
    return name


def run_name(name: Any) -> str:
    """Check the name of a run, whose folder in a site's memory lies beside files of that memory.

    Raises:
        FedshiftError: the name could lead out of the memory, or is that of such a file.
    """
    if Path(plain_name(name)).suffix in _SUFFIXES:
        raise FedshiftError(f"a run may not have a name that ends with {', '.join(_SUFFIXES)}")
    return str(name)


def envelope_of(fields: Any) -> Envelope:
    """The envelope in a request's header.

    Raises:
        FedshiftError: it is not a valid envelope.
    """
    if isinstance(fields, Mapping) and set(fields) == {"exchange", "round", "progress", "mini_batches_left"}:
        progress, numbers = fields["progress"], [fields[name] for name in ("exchange", "round", "mini_batches_left")]
        real = isinstance(progress, int | float) and not isinstance(progress, bool) and 0 <= progress <= 1
        if real and all(whole_number(number) >= 0 for number in numbers):
            return Envelope(**fields)
    raise FedshiftError("a request has no valid envelope (exchange, round, progress, mini_batches_left)")


def check_files(site: str, options: BaseModel) -> None:
    """Check that the options of a request name nothing but files, or folders, of weights in ``FEDSHIFT_WEIGHTS``.

    Otherwise a request could have the site open any file, or download one.

    Raises:
        Refused: an option names another file.
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


def digest_of(header: Mapping[str, Any]) -> str:
    """A digest of run, setting and part: requests with equal digests use the same runner."""
    own = [header["run"], header["setting"], header["part"]]
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def shared_kinds(method: Method, header: Mapping[str, Any], on_refusal: str) -> tuple[str, ...]:
    """The kinds that a site must allow before a run of a method can begin.

    Under secure aggregation models leave masked; with sealed routing some leave sealed. Each request is
    checked again.
    """
    if on_refusal == "leave_out":
        return ()
    sealed = header.get("routing") == "sealed" and seals_all(method)
    models = MASKED if header.get("aggregation") == "secure" else SEALED if sealed else WEIGHTS
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
    """The audit log's entry for a request."""
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


def narrowed(memory: SiteMemory, header: Mapping[str, Any], sent: Mapping[str, Any]) -> Body:
    """Write a reply as bytes, and remember its rounding residual for the call's next reply."""
    if header["wire"] == "float32":
        return body_of(sent)
    remembered = memory.get(RESIDUALS)
    whole: Residuals = dict(remembered) if isinstance(remembered, Statistics) else {}
    prefix = f"{header['call']}|"
    own = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
    body = body_of(sent, header["wire"], own)
    whole |= {f"{prefix}{name}": value for name, value in own.items()}
    memory[RESIDUALS] = Statistics(whole)
    return body


# Answers --------------------------------------------------------------------------------------------------------------


def _answer_file(folder: Path, header: Mapping[str, Any]) -> Path:
    return folder / f"answer-{int(header['envelope']['exchange'])}-{plain_name(header['key'])[:16]}.json"


def keep_answer(folder: Path, header: Mapping[str, Any], answer: Message) -> None:
    """Keep an answer until a checkpoint covers it.

    The file is not flushed, since its digest shows whether the answer is whole.

    Raises:
        UserError: the file cannot be written.
    """
    file = _answer_file(folder, header)
    write_private(file.with_suffix(".safetensors"), answer.body, flush=False)
    write_object(file, {"header": answer.header, "digest": answer.digest}, private=True, flush=False)


def kept_answer(folder: Path, header: Mapping[str, Any]) -> tuple[Message, Mapping[str, Content]] | None:
    """The kept answer to this request and its content; None if there is none, or a damaged one: it is made again."""
    file = _answer_file(folder, header)
    try:
        kept = read_object(file)
        answer = Message(kept["header"], read_private(file.with_suffix(".safetensors")), kept["digest"])
        whole, _, held = unseal(answer)
    except (OSError, ValueError, KeyError, TypeError, FedshiftError):
        return None
    return (answer, held) if whole.get("answers") == header["key"] else None


def drop_covered(folder: Path, header: Mapping[str, Any]) -> None:
    """Remove answers that a checkpoint covers, and memory files that no checkpoint or kept answer names."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {*header["kept"].values(), *header["memory"].values()}
    checkpoint = int(header["checkpoint"])
    for file in folder.glob("answer-*.json"):
        number = file.name.split("-")[1]
        if number.isdecimal() and int(number) <= checkpoint:
            file.with_suffix(".safetensors").unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        else:
            with contextlib.suppress(Damaged, ValueError, KeyError, TypeError):
                wanted |= set(json.loads(read_object(file)["header"])["memory"].values())
    for file in folder.glob("*.safetensors"):
        if not file.name.startswith("answer-") and file.name not in wanted:
            file.unlink(missing_ok=True)
