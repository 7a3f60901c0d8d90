"""The proxy on a site's way to its coordinator: what it is asked for, and what a site says when it refuses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from connect_proxy import ConnectProxy
from outcomes import one_line

from fedshift.deploy.proxy import connect_to, proxy_address, proxy_for, proxy_variables
from fedshift.deploy.role_file import role_file


@pytest.fixture
def server() -> Iterator[int]:
    """The port of a server that answers what it is sent, as one of TLS does: whoever connects speaks first."""
    door = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = door.accept()
            except OSError:
                return
            with client:
                client.sendall(client.recv(5))

    threading.Thread(target=serve, daemon=True).start()
    yield door.getsockname()[1]
    door.close()


@pytest.mark.parametrize("user", ["", "site:p%40ss"])
def test_a_connection_goes_through_the_proxy(user: str, server: int) -> None:
    proxy = ConnectProxy(user.replace("%40", "@"))
    url = f"http://{user + '@' if user else ''}127.0.0.1:{proxy.port}"
    with connect_to("localhost", server, url, 10) as way:
        way.sendall(b"hello")
        assert way.recv(5) == b"hello"
    assert proxy.asked == [f"localhost:{server}"]
    proxy.close()


@pytest.mark.parametrize(
    ("user", "answers", "message"),
    [
        ("site:secret", b"", "407"),
        ("", b"HTTP/1.1 503 Closed\r\n\r\n", "503"),
        ("", b"SSH-2.0\r\n\r\n", "no HTTP answer|Tunnel"),
    ],
)
def test_a_proxy_that_refuses_is_said(user: str, answers: bytes, message: str, server: int) -> None:
    proxy = ConnectProxy(user, answers)
    with pytest.raises(OSError, match=message) as error:
        connect_to("localhost", server, f"http://127.0.0.1:{proxy.port}", 10)
    assert str(proxy.port) in str(error.value)
    proxy.close()
    with pytest.raises(OSError, match="proxy 127"):
        connect_to("localhost", server, "http://127.0.0.1:9", 10)


def test_the_environment_is_asked_only_where_the_site_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", "inside.example.org")
    assert proxy_for("fl.example.org", None) is None
    assert proxy_for("fl.example.org", "environment") == "http://127.0.0.1:3128"
    assert proxy_for("inside.example.org", "environment") is None
    assert proxy_for("inside.example.org", "http://other:1") == "http://other:1"
    monkeypatch.setenv("https_proxy", "nonsense")
    with pytest.raises(ValueError, match="host:port"):
        proxy_for("fl.example.org", "environment")


def test_addresses(tmp_path: Path) -> None:
    assert proxy_address("http://a%3Ab:c@proxy:80/")[2] == {"Proxy-Authorization": "Basic YTpiOmM="}
    for wrong in ("proxy:3128", "https://proxy:3128", "http://proxy", "http://proxy:x", "http://proxy:1/path"):
        (tmp_path / "SITE.yaml").write_text(yaml.safe_dump({"proxy": wrong}))
        with one_line("host:port"):
            role_file(tmp_path / "SITE.yaml")


def test_only_the_libraries_of_grpc_and_http_are_told_by_the_environment() -> None:
    assert list(proxy_variables("http://p:1", "tcp")) == ["FEDSHIFT_PROXY"]
    assert proxy_variables("http://p:1", "grpc")["grpc_proxy"] == "http://p:1"


def test_a_proxy_is_waited_for_as_long_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, float | None]] = []

    def connection(host: str, port: int, timeout: float | None = None) -> object:
        asked.append((host, port, timeout))
        raise OSError("nobody is there")

    monkeypatch.setattr("fedshift.deploy.proxy.http.client.HTTPConnection", connection)
    with pytest.raises(OSError, match="nobody is there"):
        connect_to("far.example", 443, "http://proxy.example:3128", seconds=0.5)
    assert asked == [("proxy.example", 3128, 0.5)]
