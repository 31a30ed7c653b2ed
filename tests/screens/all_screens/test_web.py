"""The web server that shows the app in a browser accepts only connections from this machine that have the token; the
browser shows the real application."""

import asyncio
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from aiohttp import ClientSession, CookieJar, WSMsgType, web

from agents.rundir.runs import newest_live
from cockpit.data.sources.connection import CockpitError
from cockpit.tui.terminal.web import WebScreen, web_address
from tests.unit.agents.fleet import Fleet, HubProcess

WAIT_S = 30.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8080", ("127.0.0.1", 8080)),
        ("localhost:80", ("127.0.0.1", 80)),
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("[::1]:8080", ("::1", 8080)),
    ],
)
def test_an_address_of_this_machine(text: str, found: tuple[str, int]) -> None:
    assert web_address(text) == found


@pytest.mark.parametrize(
    "text", ["0.0.0.0:80", "192.168.1.4:80", "[::]:80", "x:80", "80:x", "0", "70000", ""]
)
def test_another_address_is_refused(text: str) -> None:
    with pytest.raises(CockpitError, match=r"legal|ssh -L"):
        web_address(text)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Path]:
    """The folder of a live run."""
    hub = HubProcess(tmp_path / "runs" / "r-1").start()
    deadline = time.monotonic() + WAIT_S
    while newest_live(tmp_path / "runs") is None:
        assert time.monotonic() < deadline, "the hub did not start"
        time.sleep(0.02)
    fleet, done = Fleet(hub.endpoints.ranks), threading.Event()

    def train() -> None:
        while not done.wait(0.05):
            fleet.turn()

    thread = threading.Thread(target=train)
    thread.start()
    yield tmp_path / "runs" / "r-1"
    done.set()
    thread.join()
    fleet.close()
    hub.clean_up()


def free_port() -> int:
    """A free port on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


@asynccontextmanager
async def served(command: str) -> AsyncIterator[WebScreen]:
    screen = WebScreen(command, "127.0.0.1", free_port(), "test", lambda _: None)
    runner = web.AppRunner(await screen._make_app())
    await runner.setup()
    await web.TCPSite(runner, screen.host, screen.port).start()
    try:
        yield screen
    finally:
        await runner.cleanup()


async def test_only_the_token_opens_it() -> None:
    async with served("true") as screen, ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser:
        here = screen.public_url

        async def status(path: str, **headers: str) -> int:
            async with browser.get(here + path, headers=headers) as answer:
                return answer.status

        for path in ("/", "/ws", "/static/js/textual.js", "/?token=x", "/download/x"):
            assert await status(path) == await status(screen.path + path) == 403, path
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert await status(f"{screen.path}/?token={screen.token}", **headers) == 403
        async with browser.get(screen.address) as answer:
            assert answer.status == 200 and str(answer.url) == f"{here}{screen.path}/", (
                "the address bar has no token"
            )
            assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
            assert (await answer.text()).count("input.focus()") == 1
        assert await status(f"{screen.path}/static/js/textual.js") == 200
        (cookie,) = browser.cookie_jar
        assert screen.token not in cookie.value and screen.path not in cookie.value


async def test_another_server_of_the_host_gets_no_secret_and_two_runs_have_their_own() -> None:
    """A browser sends a cookie to all ports of a host, if the path of the cookie fits."""
    async with (
        served("true") as one,
        served("true") as two,
        ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser,
    ):
        for screen in (one, two, one):
            async with browser.get(screen.address) as answer:
                assert answer.status == 200
        for screen in (one, two):
            async with browser.get(f"{screen.public_url}{screen.path}/") as answer:
                assert answer.status == 200
        sent = []

        async def listen(request: web.Request) -> web.Response:
            sent.append(request.headers.get("Cookie"))
            return web.Response()

        other = web.Application()
        other.router.add_get("/{tail:.*}", listen)
        runner = web.AppRunner(other)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", free_port())
        await site.start()
        for path in ("/", "/ws", "/static/x", "/x/"):
            async with browser.get(f"{site.name}{path}"):
                pass
        await runner.cleanup()
        assert sent == [None] * 4


DEAF = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
print("__GANGLION__", flush=True)
time.sleep(1000)
"""
MALFORMED = [
    '["resize", {"width": "x", "height": 3}]',
    '["resize", {"width": 100000000, "height": 3}]',
    '["resize", []]',
    '["stdin", 3]',
    '["stdin"]',
    '["what"]',
    '{"a": 1}',
    "[]",
    "not json",
    "[" * 100_000,
    b"binary",
]


@pytest.mark.parametrize("message", [*MALFORMED, None], ids=range(len(MALFORMED) + 1))
async def test_no_message_leaves_a_process_behind(
    message: str | bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the tab does not read its input, so it does not end by itself. None: the tab is closed."""
    monkeypatch.setattr("cockpit.tui.terminal.web.ENDS_S", 0.05)
    number = tmp_path / "pid"
    command = shlex.join([sys.executable, "-c", DEAF, str(number)])
    async with served(command) as screen, ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser:
        async with browser.get(screen.address):
            pass
        async with (
            asyncio.timeout(WAIT_S),
            browser.ws_connect(f"{screen.public_url}{screen.path}/ws") as stream,
        ):
            while not number.exists() or not number.read_text():
                await asyncio.sleep(0.02)
            process = psutil.Process(int(number.read_text()))
            if isinstance(message, bytes):
                await stream.send_bytes(message)
            elif message is not None:
                await stream.send_str(message)
                assert (await stream.receive()).type in (WSMsgType.CLOSE, WSMsgType.CLOSED)
        async with asyncio.timeout(WAIT_S):
            while process.is_running():
                await asyncio.sleep(0.02)


async def test_the_application_answers_over_the_socket(training: Path) -> None:
    command = f"{sys.executable} -m cockpit attach {training}"
    async with served(command) as screen, ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser:
        async with browser.get(screen.address):
            pass
        seen = b""
        async with browser.ws_connect(f"{screen.public_url}{screen.path}/ws?width=100&height=30") as stream:
            async with asyncio.timeout(WAIT_S):
                while b"LIVE" not in seen or b"VIEWER" not in seen:
                    message = await stream.receive()
                    assert message.type in (WSMsgType.BINARY, WSMsgType.TEXT), message
                    seen += message.data if isinstance(message.data, bytes) else message.data.encode()


@asynccontextmanager
async def page(profile: Path, url: str) -> AsyncIterator[Callable[[str], Awaitable[object]]]:
    """Open a page in a headless browser. Yields a function that evaluates JavaScript in this page (Chrome DevTools
    protocol)."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", url]
    browser = await asyncio.create_subprocess_exec(
        "chromium", f"--user-data-dir={profile}", *words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        port_file = profile / "DevToolsActivePort"
        while not port_file.exists() or not port_file.read_text().strip():
            await asyncio.sleep(0.1)
        tools = f"http://127.0.0.1:{port_file.read_text().split()[0]}"
        async with ClientSession() as session:
            async with session.get(f"{tools}/json") as answer:
                tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
            async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"]) as control:

                async def evaluate(script: str) -> object:
                    await control.send_json(
                        {"id": 1, "method": "Runtime.evaluate", "params": {"expression": script}}
                    )
                    answer = await control.receive_json()
                    return answer["result"]["result"].get("value")

                yield evaluate
    finally:
        browser.terminate()
        await browser.wait()


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
async def test_a_real_browser_shows_it(training: Path, tmp_path: Path) -> None:
    """The page gets the class `-first-byte` when the first output of the application arrives."""
    command = f"{sys.executable} -m cockpit attach {training}"
    async with (
        served(command) as screen,
        asyncio.timeout(2 * WAIT_S),
        page(tmp_path / "profile", screen.address) as evaluate,
    ):
        while "-first-byte" not in str(await evaluate("document.body && document.body.className")):
            await asyncio.sleep(0.2)
        assert await evaluate("location.href") == f"{screen.public_url}{screen.path}/"
        assert await evaluate("document.activeElement.tagName") == "TEXTAREA", "keys work without a click"
