"""What a role's service reads of the role's own file, without torch: where logs go, the monitor's port, the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedshift.deploy.proxy import ENVIRONMENT, proxy_address
from fedshift.deploy.sinks import FileSink, Sink
from fedshift.errors import UserError, in_words

COORDINATOR_FILE = "COORDINATOR.yaml"
"""The coordinator's own file, beside its kit.json. It may be absent."""


class RoleFile(BaseModel):
    """The part of SITE.yaml, or of COORDINATOR.yaml, that the service reads."""

    model_config = ConfigDict(frozen=True)

    memory: Path = Field(Path("memory"), description="where the site remembers, relative to this file")
    sink: Sink | None = Field(
        None, description="where a copy of each line of the log goes: syslog, otlp (OpenTelemetry) or file"
    )
    monitor: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="port of this machine alone (127.0.0.1) for /healthz and Prometheus' /metrics; none = no port"
    )
    proxy: str | None = Field(
        None,
        description="the proxy on the way to the coordinator, http://host:port; environment: https_proxy and no_proxy; "
        "none = a direct connection",
    )

    @field_validator("proxy")
    @classmethod
    def _proxy(cls, proxy: str | None) -> str | None:
        if proxy is not None and proxy != ENVIRONMENT:
            proxy_address(proxy)
        return proxy


def role_file(file: Path) -> RoleFile:
    """Read what the service needs of a role's own file; the defaults if there is none."""
    try:
        options: Any = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {file}: {error}".splitlines()[0]) from None
    try:
        result = RoleFile.model_validate(options if isinstance(options, Mapping) else {})
    except ValidationError as error:
        fault = error.errors()[0]
        raise UserError(f"{file}: {fault['loc'][0]}: {in_words(fault)}") from None
    if isinstance(result.sink, FileSink):
        whole = file.parent.resolve() / result.sink.path
        return result.model_copy(update={"sink": result.sink.model_copy(update={"path": whole})})
    return result


def audit_log_of(file: Path) -> Path:
    """The audit log of the site that a SITE.yaml describes."""
    return (file.parent / role_file(file).memory / "audit.jsonl").resolve()
