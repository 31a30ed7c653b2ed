"""``cockpit serve --web``: serves the screen to browsers with textual-serve, on a loopback address and with a token.

The address that the command prints contains the token; the browser keeps the token in a cookie. Each browser tab has
its own cockpit process, which is a viewer unless an option of the command sets another role.
"""

import ipaddress
import secrets
import shlex
import sys
from collections.abc import Awaitable, Callable

from aiohttp import web
from textual_serve.server import Server

from cockpit.data.sources.connection import CockpitError

COOKIE = "cockpit_token"
SESSIONS = 8  # maximum number of open tabs: each has its own process
# The page of textual-serve names a font on another site; this policy keeps the browser from fetching it.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self' ws://{host}; frame-ancestors 'none'"
)
HEADERS = {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
# Without the focus, keys do nothing before the first click.
FOCUS = """<script>
  new MutationObserver((changes, observer) => {
    const input = document.querySelector("#terminal textarea");
    if (input) { input.focus(); observer.disconnect(); }
  }).observe(document.getElementById("terminal"), {childList: true, subtree: true});
</script></body>"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebScreen(Server):
    """Serves the screen of one run to browsers that present the token."""

    def __init__(self, command: str, host: str, port: int, title: str, announce: Callable[[str], None]):
        shown = f"[{host}]" if ":" in host else host
        super().__init__(command, host, port, title, public_url=f"http://{shown}:{port}")
        self.token = secrets.token_urlsafe(24)
        self._announce = announce
        self._authority = f"{shown}:{port}"
        self._open = 0

    def initialize_logging(self) -> None:
        """Log nothing, because standard error is the user's terminal."""

    async def on_startup(self, app: web.Application) -> None:
        self._announce(f"{self.public_url}/?token={self.token}")

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._guarded)
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reject requests that come from other sites or lack the token. To the response to any other request, add
        security headers."""
        origin = request.headers.get("Origin")
        if request.host != self._authority or origin not in (None, self.public_url):
            return web.Response(status=403, text=f"this cockpit answers only at {self.public_url}\n")
        given = request.query.get("token") or request.cookies.get(COOKIE, "")
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            return web.Response(
                status=403, text="open the address with the token that cockpit serve printed\n"
            )
        if "token" in request.query:  # keep the token out of the address bar and the history
            response: web.StreamResponse = web.Response(status=303, headers={"Location": "/"})
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="Strict")
        else:
            response = await handler(request)
            if isinstance(response, web.Response) and response.content_type == "text/html" and response.text:
                response.text = response.text.replace("</body>", FOCUS)
        if not response.prepared:
            response.headers.update(HEADERS)
            response.headers["Content-Security-Policy"] = POLICY.format(host=self._authority)
        return response

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        if self._open >= SESSIONS:
            raise web.HTTPServiceUnavailable(
                text=f"{SESSIONS} tabs are open, the most that this cockpit serves\n"
            )
        self._open += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self._open -= 1


def web_address(text: str) -> tuple[str, int]:
    """Parse ``[ADDRESS:]PORT``. Raises CockpitError unless the address is a loopback address."""
    address, _, port = text.rpartition(":")
    host = address.strip("[]") or "127.0.0.1"
    host = "127.0.0.1" if host == "localhost" else host
    try:
        local, number = ipaddress.ip_address(host).is_loopback, int(port)
    except ValueError:
        raise CockpitError(
            f"--web {text} is not legal; legal: a port, such as 8080, or 127.0.0.1:8080"
        ) from None
    if not local:
        raise CockpitError(
            f"--web serves only this machine, not {host}; from another machine: ssh -L {number}:127.0.0.1:{number} HOST"
        )
    if not 0 < number < 65536:
        raise CockpitError(f"--web {text}: {number} is not a port; legal: 1 to 65535")
    return host, number


def serve_web(target: str, address: str, operator: bool, announce: Callable[[str], None]) -> int:
    """Serve the screen of the run `target` until the process is interrupted. `announce` is called with the address to
    open."""
    host, port = web_address(address)
    words = [sys.executable, "-m", "cockpit", "attach", target, *(["--operator"] if operator else [])]
    server = WebScreen(shlex.join(words), host, port, f"cockpit · {target}", announce)
    try:
        server.serve()
    except OSError as error:
        raise CockpitError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return 0
