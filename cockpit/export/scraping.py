"""The HTTP server that Prometheus scrapes: a few connections at once, and none for long."""

import socket
import sys
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import CollectorRegistry

CONNECTIONS = 16  # a thread each; one more is closed at once
ANSWERED_S = 10.0  # a connection that is open for longer is closed: it asks or reads too slowly


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: standard error is the terminal of whoever serves."""


class ScrapeServer(ThreadingMixIn, WSGIServer):
    """Serves `registry` at an address from a thread of its own, until `close`. OSError: it cannot be listened on."""

    daemon_threads = True

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._open: dict[Any, float] = {}  # connections, and since when
        super().__init__((address, port), _Quiet)
        self.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self.serve_forever, name="scrapes", daemon=True)
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= CONNECTIONS:
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second. A time-out of the socket would not do: it begins anew with each byte."""
        for request, since in list(self._open.items()):
            if time.monotonic() - since > ANSWERED_S:
                try:
                    request.shutdown(socket.SHUT_RDWR)  # its thread then meets the end of the stream
                except OSError:
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left early is no news; anything else is a mistake of ours, and is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
