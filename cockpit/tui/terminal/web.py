"""``cockpit serve --web``: serves the screen to browsers with textual-serve, on a loopback address and with a token.

The address that the command prints contains the token. A browser sends the cookies of a host to every port of the host,
so the server does not put the token into a cookie: it serves everything below a random path, and the browser keeps a
second secret in a cookie for this path only. Each browser tab has its own cockpit process, which is a viewer unless an
option of the command sets another role.
"""

import asyncio
import contextlib
import ipaddress
import secrets
import shlex
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web
from textual_serve.app_service import AppService
from textual_serve.server import Server

from cockpit.data.sources.connection import CockpitError

SESSIONS = 8  # maximum number of open tabs: each has its own process
MESSAGE_BYTES = 1 << 20  # maximum size of a message of a tab, such as pasted text
LARGEST = 1000  # columns or rows
TAKES_S = 10.0  # a tab is closed if its process does not read a message for this long
ENDS_S = 3.0  # how long a process may take to end after its tab was closed; then it is killed
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


class MessageError(Exception):
    """A tab has sent something that the page of textual-serve does not send."""


class TabProcess(AppService):
    """The cockpit process of one tab."""

    async def run(self) -> None:
        """Send the process's output to the tab, and close the tab when the process ends."""
        await super().run()
        await self.remote_close()

    async def stop(self) -> None:
        """Ask the process to end; kill it if it does not. A process that no longer reads its input would stay."""
        process, task = self._process, self._task
        self._task = None
        if process is None or task is None:
            return
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(ENDS_S):
                    await self.send_meta({"type": "quit"})
                    await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
            task.cancel()
            await asyncio.gather(process.wait(), task, return_exceptions=True)

    async def take(self, message: object) -> object:
        """Pass a message of the tab to the process. Returns the answer to the tab; None if it gets none. Raises
        MessageError if the message is malformed, TimeoutError if the process does not read it."""
        async with asyncio.timeout(TAKES_S):
            match message:
                case ["stdin", str(text)]:
                    await self.send_bytes(text.encode("utf-8", "replace"))
                case ["resize", {"width": width, "height": height}]:
                    await self.set_terminal_size(cells(width), cells(height))
                case ["ping", data]:
                    return ["pong", data]
                case ["blur", *_]:
                    await self.blur()
                case ["focus", *_]:
                    await self.focus()
                case _:
                    raise MessageError
        return None


def cells(value: object) -> int:
    """A width or height in cells that a tab has sent; raises MessageError if it is not legal."""
    if isinstance(value, int) and 1 <= value <= LARGEST:
        return value
    raise MessageError


class WebScreen(Server):
    """Serves the screen of one run to browsers that present the token, below the path `path`."""

    def __init__(self, command: str, host: str, port: int, title: str, announce: Callable[[str], None]):
        shown = f"[{host}]" if ":" in host else host
        super().__init__(f"exec {command}", host, port, title, public_url=f"http://{shown}:{port}")
        self.token = secrets.token_urlsafe(24)
        self.path = f"/{secrets.token_urlsafe(12)}"
        self.cookie = f"cockpit_{secrets.token_hex(4)}"  # two runs may be served on two ports of this host
        self._session = secrets.token_urlsafe(24)  # the value of the cookie
        self._announce = announce
        self._authority = f"{shown}:{port}"
        self._tabs: set[web.WebSocketResponse] = set()

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        return f"{self.public_url}{self.path}/?token={self.token}"

    def initialize_logging(self) -> None:
        """Log nothing, because standard error is the user's terminal."""

    async def on_startup(self, app: web.Application) -> None:
        self._announce(self.address)

    async def on_shutdown(self, app: web.Application) -> None:
        for tab in list(self._tabs):
            await tab.close()

    async def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded])
        app.add_subapp(self.path, await super()._make_app())
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reject requests that come from other sites or lack the token. To the response to any other request, add
        security headers."""
        origin = request.headers.get("Origin")
        if request.host != self._authority or origin not in (None, self.public_url):
            return web.Response(status=403, text=f"this cockpit answers only at {self.public_url}\n")
        with_token = _same(request.query.get("token", ""), self.token)
        if not with_token and not _same(request.cookies.get(self.cookie, ""), self._session):
            return web.Response(
                status=403, text="open the address with the token that cockpit serve printed\n"
            )
        if with_token:  # keep the token out of the address bar and the history
            response: web.StreamResponse = web.Response(status=303, headers={"Location": f"{self.path}/"})
            response.set_cookie(self.cookie, self._session, path=self.path, httponly=True, samesite="Strict")
        else:
            response = await handler(request)
            if isinstance(response, web.Response) and response.content_type == "text/html" and response.text:
                response.text = response.text.replace("</body>", FOCUS)
        if not response.prepared:
            response.headers.update(HEADERS)
            response.headers["Content-Security-Policy"] = POLICY.format(host=self._authority)
        return response

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run a process for a tab while its connection is open."""
        if len(self._tabs) >= SESSIONS:
            raise web.HTTPServiceUnavailable(
                text=f"{SESSIONS} tabs are open, the most that this cockpit serves\n"
            )
        try:
            width, height = (cells(int(request.query.get(name, 80))) for name in ("width", "height"))
        except (MessageError, ValueError):
            raise web.HTTPBadRequest(text=f"width and height are 1 to {LARGEST}\n") from None
        socket = web.WebSocketResponse(heartbeat=15, max_msg_size=MESSAGE_BYTES)
        self._tabs.add(socket)

        async def close() -> None:
            await socket.close()

        write, write_text, files = socket.send_bytes, socket.send_str, self.download_manager
        process = TabProcess(
            self.command, write_bytes=write, write_str=write_text, close=close, download_manager=files
        )
        try:
            await socket.prepare(request)
            await process.start(width, height)
            await self._process_messages(socket, process)
        except (MessageError, TimeoutError):
            await socket.close(code=WSCloseCode.POLICY_VIOLATION)
        finally:
            await process.stop()
            self._tabs.discard(socket)
        return socket

    async def _process_messages(self, websocket: web.WebSocketResponse, app_service: Any) -> None:
        async for message in websocket:
            try:
                envelope = msgspec.json.decode(message.data) if message.type == WSMsgType.TEXT else None
            except (ValueError, RecursionError):
                raise MessageError from None
            answer = await app_service.take(envelope)
            if answer is not None:
                await websocket.send_json(answer)


def _same(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), secret.encode())


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
