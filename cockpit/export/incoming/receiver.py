"""An OTLP receiver over HTTP: decodes exports and hands them to another thread.

The receiver accepts the protobuf encoding of OTLP, uncompressed or compressed with gzip or deflate. A refused request
gets an HTTP status and a message of one sentence, which OpenTelemetry's SDKs log.
"""

import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from cockpit.export.incoming.exports import ExportError, Quantity, metrics_of, spans_of
from cockpit.export.incoming.runs import ExportedRuns, RefusedError

MOST_BYTES = 4 << 20  # maximum size of an export, also after it is decompressed
WAITING = 64  # exports that are received and not yet taken
TAKEN_S = 8.0  # time in which an export is taken; the first one of a program starts a hub
PROTOBUF = "application/x-protobuf"
INVALID = 3  # google.rpc.Code.INVALID_ARGUMENT


class HttpError(Exception):
    """A refused request: its HTTP `status`, and a message of one sentence."""

    def __init__(self, status: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass
class _Job:
    work: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)
    refused: str = ""


class Receiver:
    """A WSGI application that queues exports; `work` processes them in the thread that calls it. `names`: the
    OpenTelemetry metric names that the application reads, and what each means."""

    def __init__(self, runs: ExportedRuns, names: Mapping[str, Quantity]) -> None:
        self._runs, self._names = runs, names
        self._jobs: queue.Queue[_Job] = queue.Queue(WAITING)
        self._paths: dict[str, Callable[[bytes], Any]] = {
            "/v1/metrics": self._metrics,
            "/v1/traces": self._traces,
        }

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        try:
            status, answer = "200 OK", self._answer(environ)
        except HttpError as error:
            status, answer = error.status, Status(code=INVALID, message=str(error))
        body: bytes = answer.SerializeToString()
        start(status, [("Content-Type", PROTOBUF), ("Content-Length", str(len(body)))])
        return [body]

    def work(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a queued export and process it; then end the runs whose programs have ended or are
        silent."""
        try:
            job = self._jobs.get(timeout=timeout_s)
        except queue.Empty:
            pass
        else:
            try:
                job.work()
            except RefusedError as error:
                job.refused = str(error)
            finally:
                job.done.set()
        self._runs.end_old()

    def _answer(self, environ: WSGIEnvironment) -> Any:
        path = environ.get("PATH_INFO", "")
        if not (take := self._paths.get(path)):
            raise HttpError(
                "404 Not Found", f"this receiver has no {path[:40]}; it has {' and '.join(self._paths)}"
            )
        if environ["REQUEST_METHOD"] != "POST":
            raise HttpError("405 Method Not Allowed", "an export is a POST")
        kind = environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
        if kind != PROTOBUF:
            raise HttpError(
                "415 Unsupported Media Type",
                f"the content type is {kind[:60] or 'missing'}; legal: {PROTOBUF} (the protocol http/protobuf)",
            )
        try:
            return take(_body(environ))
        except DecodeError:
            raise HttpError("400 Bad Request", f"the body is not an export for {path}") from None
        except ExportError as error:
            raise HttpError("413 Content Too Large", str(error)) from None

    def _metrics(self, body: bytes) -> ExportMetricsServiceResponse:
        found = list(metrics_of(ExportMetricsServiceRequest.FromString(body), self._names))
        response = ExportMetricsServiceResponse()
        for source, readings in found:
            if refused := self._taken(partial(self._runs.take, source, readings)):
                response.partial_success.error_message = refused
                response.partial_success.rejected_data_points += len(readings)
        return response

    def _traces(self, body: bytes) -> ExportTraceServiceResponse:
        found = list(spans_of(ExportTraceServiceRequest.FromString(body)))
        response = ExportTraceServiceResponse()
        for source, spans in found:
            if refused := self._taken(partial(self._runs.note, source, spans)):
                response.partial_success.error_message = refused
                response.partial_success.rejected_spans += len(spans)
        return response

    def _taken(self, work: Callable[[], None]) -> str:
        """Queue `work` for the thread that calls `Receiver.work`, and wait up to `TAKEN_S` for it. Returns why the
        export is not shown, or ""."""
        job = _Job(work)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise HttpError("503 Service Unavailable", "too many exports are waiting") from None
        job.done.wait(TAKEN_S)
        return job.refused


def _body(environ: WSGIEnvironment) -> bytes:
    try:
        size = int(environ.get("CONTENT_LENGTH") or "")
    except ValueError:
        raise HttpError("411 Length Required", "the length of the export is missing") from None
    if not 0 <= size <= MOST_BYTES:
        raise HttpError("413 Content Too Large", _too_large())
    body: bytes = environ["wsgi.input"].read(size)
    encoding = environ.get("HTTP_CONTENT_ENCODING", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise HttpError(
            "415 Unsupported Media Type", f"the encoding {encoding[:40]} is unknown; legal: gzip, deflate"
        )
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, by its header
    try:
        body = unpacker.decompress(body, MOST_BYTES + 1)
    except zlib.error:
        raise HttpError("400 Bad Request", f"the body is not {encoding}") from None
    if len(body) > MOST_BYTES:
        raise HttpError("413 Content Too Large", _too_large())
    if not unpacker.eof:
        raise HttpError("400 Bad Request", f"the body is not {encoding}, or a part of it is missing")
    return body


def _too_large() -> str:
    return f"an export has at most {MOST_BYTES >> 20} MiB"
