"""How a site's client dials the coordinator: FLARE's ``tcp``, with bounded frames, through the site's proxy if it
has one, and again soon after a failure.

FLARE's clients take no other scheme, so `lockdown` registers this driver before FLARE registers its own.
"""

from __future__ import annotations

import logging

from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.net_utils import get_ssl_context
from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver

from fedshift.deploy.flare.drivers.shared_connection import SharedConnection
from fedshift.deploy.flare.limits import RECONNECT
from fedshift.deploy.proxy import connect_to, proxy_of_process

_HANDSHAKE_SECONDS = 10.0
_log = logging.getLogger("fedshift.dialling")


class DiallingTcpDriver(TcpDriver):  # type: ignore[misc]
    """Dials ``tcp://host:port`` and ``stcp://host:port``."""

    def connect(self, connector: ConnectorInfo) -> None:
        """Dial until there is a connection, and read from it until it ends. FLARE calls this again and again.

        FLARE itself waits up to 10 s between two tries; here a coordinator that was started again is found soon.
        """
        self.connector = connector
        params = connector.params
        context = get_ssl_context(params, ssl_server=False)
        if context is None:
            raise CommError(CommError.BAD_CONFIG, "a site dials with certificates only")
        address = (params[DriverParams.HOST.value], int(params[DriverParams.PORT.value]))
        while not connector.stopped.is_set():
            try:
                plain = connect_to(*address, proxy_of_process(), _HANDSHAKE_SECONDS)
                secure = context.wrap_socket(plain)  # it closes the plain socket if it fails
            except OSError as error:
                _log.debug(f"{address[0]} port {address[1]} cannot be reached: {error}")
                connector.stopped.wait(RECONNECT)
                continue
            secure.settimeout(None)
            connection = SharedConnection(secure, connector, secure=True)
            self.add_connection(connection)
            connection.read_loop()
            self.close_connection(connection)
            return
