"""The way to the coordinator through a proxy: HTTP's CONNECT, in which both ends' own TLS runs on undisturbed."""

from __future__ import annotations

import base64
import http.client
import os
import socket
import urllib.request
from urllib.parse import unquote, urlsplit

ENVIRONMENT = "environment"
PROXY = "FEDSHIFT_PROXY"
"""The variable that tells a site's processes the proxy."""


def proxy_address(url: str) -> tuple[str, int, dict[str, str]]:
    """The host and port of a proxy, and the headers that name its user.

    Raises:
        ValueError: it is no address of a proxy.

    Example:
        >>> proxy_address("http://proxy.example.org:3128")
        ('proxy.example.org', 3128, {})
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/"):
        raise ValueError("must be http://host:port, or environment")
    if parts.username is None:
        return parts.hostname, port, {}
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return parts.hostname, port, {"Proxy-Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def proxy_for(host: str, setting: str | None) -> str | None:
    """The proxy on the way to a host; None: there is none. ValueError if the environment names something else than a
    proxy. ``setting``: of the site's file: an address, `ENVIRONMENT` or None."""
    if setting != ENVIRONMENT:
        return setting
    address = urllib.request.getproxies_environment().get("https")
    if not address or urllib.request.proxy_bypass(host):
        return None
    proxy_address(address)
    return address


def connect_to(host: str, port: int, proxy: str | None, seconds: float | None = None) -> socket.socket:
    """A TCP connection to a host, through a proxy if there is one, for a protocol in which this end speaks first.

    What the host says before would be lost with the proxy's answer, which is read ahead. In TLS it says nothing.

    Raises:
        OSError: it cannot be made; the message of a proxy that refuses has its answer.
    """
    if proxy is None:
        return socket.create_connection((host, port), timeout=seconds)
    server, at, headers = proxy_address(proxy)
    way = http.client.HTTPConnection(server, at, timeout=seconds)
    way.set_tunnel(host, port, headers)
    try:
        way.connect()
    except http.client.HTTPException as error:
        way.close()
        raise OSError(f"the proxy {server}:{at} gives no HTTP answer: {error!r}") from None
    except OSError as error:
        way.close()
        raise OSError(f"the proxy {server}:{at}: {error.strerror or error}") from None
    assert way.sock is not None
    return way.sock


def proxy_variables(proxy: str, scheme: str) -> dict[str, str]:
    """What FLARE's process of a site has in its environment: for our driver, or for the libraries of grpc and http."""
    if scheme == "tcp":
        return {PROXY: proxy}
    return {**dict.fromkeys(("grpc_proxy", "https_proxy", "HTTPS_PROXY"), proxy), "no_proxy": "", "NO_PROXY": ""}


def proxy_of_process() -> str | None:
    """The proxy that this process was told."""
    return os.environ.get(PROXY)
