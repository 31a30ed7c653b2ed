"""An HTTP server with a limit on the number and duration of connections."""

import socket
import sys
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

CONNECTIONS = 16  # one thread per connection; further connections are closed at once
ANSWERED_S = 10.0  # a connection that stays open for longer is closed, because its client is too slow


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because standard error is the user's terminal."""


class BoundedServer(ThreadingMixIn, WSGIServer):
    """Serves `application` from its own thread until `close`. Raises OSError if it cannot listen on the address."""

    daemon_threads = True

    def __init__(self, address: str, port: int, application: WSGIApplication, name: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._open: dict[Any, float] = {}  # start time of each open connection
        super().__init__((address, port), _Quiet)
        self.set_app(application)
        self._thread = threading.Thread(target=self.serve_forever, name=name, daemon=True)
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
        """Close slow connections. The server calls this method twice a second. A socket timeout would not close a slow
        connection, because each received byte restarts the timeout."""
        for request, since in list(self._open.items()):
            if time.monotonic() - since > ANSWERED_S:
                try:
                    # the thread of the connection then reads the end of the stream
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect early; report other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
