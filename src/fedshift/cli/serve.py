"""``fedshift serve``: predictions of an exported model over HTTP, without torch. No sample is logged or kept."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedshift.errors import UserError, in_words
from fedshift.onnx_model import OnnxModel, TooUnlike
from fedshift.text import json_text

LARGEST_BODY = 16 * 2**20
"""Bytes of a request."""
_LOOPBACK = ("127.0.0.1", "localhost")
_TOGETHER = 4
"""Requests that are answered at the same time; the others are told to come again."""
_SECONDS = 30
"""How long a connection may say nothing."""


class Asked(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rows: list[Any] = Field(min_length=1)
    accept_shift: bool = False


class PredictServer(ThreadingHTTPServer):
    """Answers ``GET /healthz``, ``POST /predict`` and ``POST /estimate`` with JSON.

    Args:
        model: the model.
        host, port: the address; port 0: any that is free.
        names: host names that requests may name, beside those of this machine's loopback.

    Raises:
        UserError: the address cannot be used.
    """

    daemon_threads = True

    def __init__(self, model: OnnxModel, host: str, port: int, names: Collection[str] = ()) -> None:
        handler = partial(_Answers, model, {*_LOOPBACK, *names}, threading.BoundedSemaphore(_TOGETHER))
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            raise UserError(f"--port: {host}:{port} cannot be used ({error.strerror}): choose another one") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that broke off: a traceback could hold a part of a sample."""


class _Answers(BaseHTTPRequestHandler):
    timeout = _SECONDS

    def __init__(self, model: OnnxModel, names: Collection[str], slots: threading.BoundedSemaphore, *args: Any) -> None:
        self._model, self._names, self._slots = model, names, slots
        super().__init__(*args)

    def do_GET(self) -> None:
        if not self._is_ours():
            self._answer(HTTPStatus.FORBIDDEN, {"error": "another host is named: fedshift serve --name"})
        elif self.path == "/healthz":
            self._answer(HTTPStatus.OK, {"status": "ok", "task": self._model.task, "classes": self._model.classes})
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": "there are /healthz, /predict and /estimate"})

    def do_POST(self) -> None:
        if not self._is_ours() or self.path not in ("/predict", "/estimate"):
            self.do_GET()
        elif self.headers.get_content_type() != "application/json":  # what a stranger's page cannot send unasked
            self._answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, {"error": "Content-Type: application/json is needed"})
        elif not self._slots.acquire(blocking=False):
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "busy: ask again"})
        else:
            try:
                self._answer(*self._handle_request())
            finally:
                self._slots.release()

    def _is_ours(self) -> bool:
        """Whether the request names a host that is served: a stranger's name may lead here, too."""
        return self.headers.get("Host", "").partition(":")[0] in self._names

    def _handle_request(self) -> tuple[HTTPStatus, dict[str, Any]]:
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal():
            return HTTPStatus.LENGTH_REQUIRED, {"error": "Content-Length is needed"}
        if len(size) > 10 or int(size) > LARGEST_BODY:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"a request has at most {LARGEST_BODY} bytes"}
        try:
            return self._compute(Asked.model_validate_json(self.rfile.read(int(size))))
        except ValidationError as error:
            fault = error.errors(include_input=False)[0]
            return HTTPStatus.BAD_REQUEST, {
                "error": f"{'.'.join(map(str, fault['loc']))}: {in_words(fault)}".lstrip(": ")
            }
        except TooUnlike as error:
            return HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}
        except UserError as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except Exception as error:  # its text could hold a part of a sample
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": type(error).__name__}

    def _compute(self, asked: Asked) -> tuple[HTTPStatus, dict[str, Any]]:
        if self.path == "/estimate":
            return HTTPStatus.OK, self._model.estimate(asked.rows).plain()
        return HTTPStatus.OK, self._model.predict(asked.rows, asked.accept_shift)

    def _answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json_text(content).encode()
        self.close_connection = True
        self.send_response(status)
        for name, value in (
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: requests hold samples."""


def serve(exported: Path, host: str, port: int, names: Collection[str]) -> None:
    """Serve a model until Ctrl-C or SIGTERM.

    UserError if there is no model that can be served, or the address cannot be used.
    """
    with PredictServer(OnnxModel.load(exported), host, port, names) as server:
        typer.echo(f"http://{host}:{server.server_port}/predict, /estimate and /healthz; Ctrl-C ends it", err=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("ended", err=True)
