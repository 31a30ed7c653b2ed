"""Merges the traces of several ranks (torch.profiler JSON) into one file for Perfetto.

Each rank becomes a process named by its rank and coordinates. torch's ids of processes, threads and flows are unique
only within one rank, so all of them are replaced. Times come from each machine's own clock, so ranks on different
machines are aligned only as well as these clocks.
"""

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from agents.rundir.bounded_read import open_ordinary

PLACE = "cockpit"  # key under which the engine writes the rank and its coordinates
PROCESS = ("process_name", "process_labels", "process_sort_index")
FLOWS = 1 << 32  # number of flow ids per rank; a flow id of rank 2**20 is still exact in JSON

Event = dict[str, Any]


class TraceError(Exception):
    """A file is not the trace of a rank. The message is one sentence."""


def merge(files: Mapping[int, Path], out: Path) -> int:
    """Merge the traces in `files` (by rank) and write them to `out`, compressed with gzip. Returns the number of
    events.

    Only one trace at a time is in memory. Raises TraceError if a file is not a trace, and OSError if a file
    cannot be read or written.
    """
    start_ns = min(_start_ns(_read(path)) for path in files.values())
    unfinished = out.with_name(f".{out.name}.partial")
    count = 0
    try:
        with gzip.open(unfinished, "wt", compresslevel=5) as file:
            file.write('{"displayTimeUnit": "ms", "baseTimeNanoseconds": ' + f'{start_ns}, "traceEvents": [')
            numbers = _Numbers()
            for rank, path in sorted(files.items()):
                count += _write(file, _renumbered(_read(path), rank, start_ns, numbers), first=not count)
            file.write("\n]}\n")
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _write(file: TextIO, events: Iterable[Event], first: bool) -> int:
    count = 0
    for event in events:
        file.write(("\n" if first and not count else ",\n") + json.dumps(event))
        count += 1
    return count


def _read(path: Path) -> dict[str, Any]:
    """The trace in `path`, with only those events that are well formed and belong to a process."""
    try:
        with open_ordinary(path) as file:
            trace = json.loads(file.read())
    except ValueError as error:
        raise TraceError(f"{path} is not JSON: {error}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise TraceError(f"{path} is not a trace: it has no list traceEvents")
    trace["traceEvents"] = [event for event in trace["traceEvents"] if _well_formed(event)]
    return trace


def _well_formed(event: object) -> bool:
    return (
        isinstance(event, dict)
        and isinstance(event.get("pid"), int)
        and all(isinstance(event.get(name, 0), int | float) for name in ("tid", "ts", "dur"))
    )


def _base_ns(trace: Mapping[str, Any]) -> int:
    """The base time of the trace in ns, to which the times of the trace's events are relative."""
    base = trace.get("baseTimeNanoseconds", 0)
    return base if isinstance(base, int) else 0


def _start_ns(trace: Mapping[str, Any]) -> int:
    """The absolute time of the trace's first event, in ns."""
    return _base_ns(trace) + round(1000 * min((event.get("ts", 0) for event in _timed(trace)), default=0))


def _timed(trace: Mapping[str, Any]) -> list[Event]:
    return [event for event in trace["traceEvents"] if event.get("ph") != "M"]


class _Numbers:
    """Assigns process and thread ids that are unique in the merged file."""

    def __init__(self) -> None:
        self._given: dict[tuple[object, ...], int] = {}

    def number(self, *key: object) -> int:
        return self._given.setdefault(key, len(self._given) + 1)


def _renumbered(trace: Mapping[str, Any], rank: int, start_ns: int, numbers: _Numbers) -> Iterator[Event]:
    """The events of one rank, with times relative to `start_ns`: first the metadata events that name processes and
    threads, then all other events by time."""
    late_us = (_base_ns(trace) - start_ns) / 1000
    named = [event for event in trace["traceEvents"] if event.get("ph") == "M"]
    events = sorted(_timed(trace), key=lambda event: (event.get("ts", 0), -event.get("dur", 0)))
    labels = {event["pid"]: "" for event in events}
    for event in named:
        if event.get("name") == "process_labels" and event["pid"] in labels:
            labels[event["pid"]] = str((event.get("args") or {}).get("labels", ""))
    for pid, label in labels.items():
        process = {"ph": "M", "pid": numbers.number(rank, pid), "tid": 0}
        yield process | {"name": "process_name", "args": {"name": _process_name(trace, rank, label)}}
        yield process | {"name": "process_sort_index", "args": {"sort_index": process["pid"]}}
    lanes = _Lanes()
    for event in named:
        if event["pid"] in labels and event.get("name") not in PROCESS:
            yield _moved(event, rank, 0.0, 0, numbers)
    for event in events:
        lane = lanes.lane(event) if event.get("ph") == "X" else 0
        moved = _moved(event, rank, late_us, lane, numbers)
        if lane and lanes.is_new(event, lane):
            name = {"name": f"asynchronous {lane} of thread {event.get('tid', 0)}"}
            yield {
                "ph": "M",
                "pid": moved["pid"],
                "tid": moved["tid"],
                "name": "thread_name",
                "args": name,
            }
        yield moved


def _moved(event: Event, rank: int, late_us: float, lane: int, numbers: _Numbers) -> Event:
    """A copy of `event` with the ids and times that it has in the merged file."""
    pid, tid = event["pid"], event.get("tid", 0)
    moved = dict(event, pid=numbers.number(rank, pid), tid=numbers.number(rank, pid, tid, lane))
    if "ts" in event:
        moved["ts"] = round(event["ts"] + late_us, 3)  # exact: times are whole ns
    if isinstance(event.get("id"), int):
        moved["id"] = rank * FLOWS + event["id"] % FLOWS
    return moved


class _Lanes:
    """Distributes the events of a thread over lanes, so that no events in a lane overlap without nesting. In the merged
    trace, each lane is a thread of its own.

    Perfetto drops an event that begins within another event of the same thread and ends after it. torch writes such
    events for asynchronous collectives, such as gloo's send and recv.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, float], list[list[float]]] = {}
        self._named: set[tuple[int, float, int]] = set()

    def lane(self, event: Event) -> int:
        """The number of the first lane in which `event` overlaps only with events that contain all of it. The caller
        must pass events in order of their start times and, for equal start times, the longest event first."""
        lanes = self._ends.setdefault((event["pid"], event.get("tid", 0)), [])
        start = round(1000 * event.get("ts", 0))
        end = start + round(1000 * event.get("dur", 0))
        for number, ends in enumerate(lanes):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                return number
        lanes.append([end])
        return len(lanes) - 1

    def is_new(self, event: Event, lane: int) -> bool:
        """Whether `event` is the first event of its thread in lane number `lane`."""
        key = event["pid"], event.get("tid", 0), lane
        new = key not in self._named
        self._named.add(key)
        return new


def _process_name(trace: Mapping[str, Any], rank: int, label: str) -> str:
    """The name of a rank's process, such as ``rank 3 (pp0 dp1 tp1) GPU 0``. Perfetto does not decode escaped
    characters, so the name is ASCII."""
    place = trace.get(PLACE)
    coords = place.get("coords") if isinstance(place, dict) else None
    at = " ".join(f"{axis}{index}" for axis, index in coords.items()) if isinstance(coords, dict) else ""
    words = (f"rank {rank}", f"({at})" if at else "", "" if label == "CPU" else label)
    return " ".join(word for word in words if word).encode("ascii", "replace").decode()
