"""Serves metrics to who scrapes them, over HTTP, and bounds what the others cost."""

import logging
import socket
import threading
import time
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import choose_encoder

logger = logging.getLogger(__name__)


def readable_accept(accept: str) -> str:
    """An Accept header; empty, for the plain format, if it names a version that is none."""
    try:
        choose_encoder(accept)
    except (TypeError, ValueError):
        return ""
    return accept


class MetricsServer:
    """One port, with a thread for each connection while that lasts; until ``close``.

    A connection over ``max_connections`` is closed as it comes; one that is silent for
    ``silence_s``, or has lasted ``longest_s``, is closed whatever it does.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        max_connections: int = 16,
        silence_s: float = 5.0,
        longest_s: float = 15.0,
    ) -> None:
        """Port 0 picks one. Raises OSError: it cannot be bound."""

        class Server(_Server):
            address_family = _family(host, port)

        metrics = make_wsgi_app(registry)

        def app(environ: dict[str, Any], start_response: Any) -> Any:
            accept = readable_accept(environ.get("HTTP_ACCEPT", ""))
            try:
                return metrics({**environ, "HTTP_ACCEPT": accept}, start_response)
            except TimeoutError:
                logger.warning("metrics not told: the event loop does not answer")
                start_response("503 Service Unavailable", [("Content-Length", "0")])
                return [b""]

        self._server = cast(_Server, make_server(host, port, app, Server, _Handler))
        self._server.max_connections = max_connections
        self._server.silence_s, self._server.longest_s = silence_s, longest_s
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Accept no more. Waits only until the thread has noticed."""
        ending = threading.Thread(target=self._server.shutdown, name="metrics end", daemon=True)
        ending.start()
        self._server.socket.shutdown(socket.SHUT_RDWR)  # whoever waits for a connection goes on
        ending.join()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """Accepts and ends connections on one thread; each is served on another."""

    daemon_threads = True
    max_connections: int
    silence_s: float
    longest_s: float

    def __init__(self, *args: Any) -> None:
        self._began_s: dict[Any, float] = {}  # of each connection that is open
        super().__init__(*args)

    def server_bind(self) -> None:
        """As HTTPServer's, which asks DNS for our name: half a minute, where nobody answers."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start to serve a connection, or close it."""
        if len(self._began_s) >= self.max_connections:
            self.shutdown_request(request)
            return
        self._began_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        """Called on the thread that served it."""
        self._began_s.pop(request, None)
        super().close_request(request)

    def service_actions(self) -> None:
        """End connections that take too long; called about twice a second."""
        now = time.monotonic()
        for request, began_s in list(self._began_s.items()):
            if now - began_s > self.longest_s:
                with suppress(OSError):  # it may just have ended
                    request.shutdown(socket.SHUT_RDWR)  # whoever waits for it goes on

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who connects may leave at any time, and fall silent."""
        logger.debug("scrape ended early", exc_info=True)


class _Handler(WSGIRequestHandler):
    server: _Server

    def setup(self) -> None:
        self.request.settimeout(self.server.silence_s)
        super().setup()

    def log_message(self, format: str, *args: object) -> None:
        """No line for each scrape."""


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
