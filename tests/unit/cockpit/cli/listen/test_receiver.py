"""The HTTP receiver of `cockpit listen`: compressed, hostile and refused requests, and illegal options."""

import contextlib
import gzip
import http.client
import socket
import time
import zlib
from typing import Any

import pytest

from cockpit.cli.main import run

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)

from cockpit.export.incoming import receiver as receiving
from cockpit.export.incoming import runs as exported
from cockpit.export.incoming.exports import MOST_TIMES
from cockpit.export.incoming.receiver import Receiver
from tests.unit.cockpit.cli.listen.exports import DEADLINE_S, LOSS, PROTOBUF, STEP_MS, Noted, request


def answer(receiver: Receiver, body: bytes, path: str = "/v1/metrics", **environ: Any) -> tuple[str, bytes]:
    """The status and body of the receiver's response to one request."""
    import io

    asked = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": path,
        "CONTENT_TYPE": PROTOBUF,
        "CONTENT_LENGTH": str(len(body)),
    }
    found: list[str] = []
    parts = receiver(
        asked | {"wsgi.input": io.BytesIO(body)} | environ, lambda status, *_: found.append(status) or print
    )
    return found[0], b"".join(parts)


BOMB = gzip.compress(bytes(receiving.MOST_BYTES + 1))
TIMES = request(
    *((LOSS, {"as_double": 1.0, "time_unix_nano": at}) for at in range(MOST_TIMES + 1))
).SerializeToString()


@pytest.mark.parametrize(
    ("body", "environ", "status", "sentence"),
    [
        (
            b"{}",
            {"CONTENT_TYPE": "application/json"},
            "415",
            "application/json; legal: application/x-protobuf",
        ),
        (b"", {"CONTENT_TYPE": ""}, "415", "missing"),
        (b"\xff\xff", {}, "400", "is not an export"),
        (TIMES, {}, "413", "at most 1024 points in time"),
        (b"\x0a" * 2000, {}, "400", "is not an export"),
        (b"", {"CONTENT_LENGTH": ""}, "411", "length"),
        (b"", {"CONTENT_LENGTH": "-1"}, "413", "at most 4 MiB"),
        (b"", {"CONTENT_LENGTH": str(2**40)}, "413", "at most 4 MiB"),
        (BOMB, {"HTTP_CONTENT_ENCODING": "gzip"}, "413", "at most 4 MiB"),
        (b"x", {"HTTP_CONTENT_ENCODING": "gzip"}, "400", "is not gzip"),
        (b"x", {"HTTP_CONTENT_ENCODING": "br"}, "415", "br is unknown; legal: gzip, deflate"),
        (b"", {"REQUEST_METHOD": "GET"}, "405", "POST"),
        (b"", {"PATH_INFO": "/v1/logs"}, "404", "/v1/metrics and /v1/traces"),
    ],
    ids=range(13),  # the bytes that gzip writes depend on the time
)
def test_what_is_no_export_is_refused_with_one_sentence(
    noted: Noted, body: bytes, environ: dict[str, str], status: str, sentence: str
) -> None:
    got, text = answer(noted.receiver, body, **environ)
    assert got.startswith(status) and sentence in Status.FromString(text).message
    assert not noted.steps


def test_compressed_exports_and_a_refusal_of_the_run(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "TAKEN_S", 0.0)
    body = request((STEP_MS, {"count": 1, "sum": 10.0})).SerializeToString()
    assert answer(noted.receiver, zlib.compress(body), HTTP_CONTENT_ENCODING="deflate") == ("200 OK", b"")
    noted.receiver.work(0)
    assert len(noted.steps) == 1
    monkeypatch.setattr(exported, "MOST_RUNS", 1)
    monkeypatch.setattr(receiving.threading.Event, "wait", lambda *_: noted.receiver.work(0))
    other = request((STEP_MS, {"count": 1, "sum": 10.0}), run_id="other").SerializeToString()
    status, text = answer(noted.receiver, other)
    partial = ExportMetricsServiceResponse.FromString(text).partial_success
    assert (status, partial.rejected_data_points) == ("200 OK", 1) and "already" in partial.error_message


def test_garbage_at_the_port_ends_nothing(listening: str) -> None:
    host, port = listening.removeprefix("http://").split(":")
    for garbage in (
        b"\xff" * 4096,
        b"POST /v1/metrics HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    ):
        with (
            socket.create_connection((host, int(port)), timeout=DEADLINE_S) as one,
            contextlib.suppress(OSError),
        ):
            one.sendall(garbage)
            one.shutdown(socket.SHUT_WR)
            while one.recv(4096):
                pass
    deadline = time.monotonic() + DEADLINE_S
    connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
    connection.request("POST", "/v1/metrics", b"", {"Content-Type": PROTOBUF})
    assert connection.getresponse().status == 200 and time.monotonic() < deadline


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--otlp", "0.0.0.0:4318"], "every network"),
        (["--otlp", "192.0.2.1:4318"], "OTLP has no keys"),
        (["--otlp", "x"], "cannot listen on x"),
        (["--otlp", "0", "--metric", "a=speed"], "legal: NAME=FIELD, with one of step, step_ms, loss"),
        (["--otlp", "0", "--name", "x" * 65], "at most 64 characters"),
    ],
)
def test_illegal_options(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["listen", *words]) == 2
    assert sentence in capsys.readouterr().err
