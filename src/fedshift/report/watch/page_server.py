"""Serves the page of running experiments to this machine alone."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedshift.errors import UserError
from fedshift.report.watch.live_page import experiments_in, watch_page

ADDRESS = "127.0.0.1"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server that shows ``folder`` to this machine alone.

    UserError if there is no such folder, or the port is taken.
    """
    experiments_in(folder)
    try:
        return ThreadingHTTPServer((ADDRESS, port), partial(_Page, folder))
    except OSError as error:
        raise UserError(f"--port: {port} cannot be used ({error.strerror}): choose another one") from None


class _Page(BaseHTTPRequestHandler):
    """Answers GET / and nothing else."""

    def __init__(self, folder: Path, *args: Any) -> None:
        self._folder = folder
        super().__init__(*args)

    def do_GET(self) -> None:
        # A page of a stranger may have a name that leads here; this machine's own names are the only ones answered.
        assert isinstance(self.server, ThreadingHTTPServer)
        addresses = [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]
        if self.headers.get("Host") not in addresses:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        if self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = watch_page(self._folder).encode()
        except UserError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal is the user's."""
