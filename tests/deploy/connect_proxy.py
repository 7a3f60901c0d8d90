"""A proxy on loopback that knows HTTP's CONNECT and nothing else, as those of hospitals for outgoing TLS."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading


class ConnectProxy:
    """Passes bytes on between whoever asks and where they ask for.

    Args:
        user: ``name:password`` that it asks for; empty: it asks for none.
        answers: what it says, if it passes nothing on.
    """

    def __init__(self, user: str = "", answers: bytes = b"") -> None:
        self.asked: list[str] = []
        """What was asked for: ``host:port`` of each tunnel that was made."""
        self.seen = b""
        """All that passed, of which TLS shows nothing."""
        self._user, self._answers = user, answers
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        self.url = f"http://{f'{user}@' if user else ''}127.0.0.1:{self.port}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            self._open.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (piece := client.recv(4096)):
                return
            head += piece
        if self._answers:
            client.sendall(self._answers)
            client.close()
            return
        first, *lines = head.decode().split("\r\n")
        word, target, _ = first.split()
        wanted = f"Proxy-Authorization: Basic {base64.b64encode(self._user.encode()).decode()}"
        if word != "CONNECT" or (self._user and wanted not in lines):
            client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            client.close()
            return
        host, _, port = target.rpartition(":")
        try:
            server = socket.create_connection((host, int(port)))
        except OSError:
            client.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            client.close()
            return
        self.asked.append(target)
        self._open.append(server)
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        threading.Thread(target=self._pass_on, args=(server, client), daemon=True).start()
        self._pass_on(client, server)

    def _pass_on(self, come: socket.socket, go: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := come.recv(1 << 16):
                if len(self.seen) < 1 << 16:
                    self.seen += data
                go.sendall(data)
        for end in (come, go):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for connection in (self._door, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
