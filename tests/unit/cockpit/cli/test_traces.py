"""Traces of several ranks, merged into one file."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cockpit.cli.steer.profile import _identity, _wait
from cockpit.export.traces import TraceError, merge


def slice_(start_us: float, duration_us: float, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 70, "tid": 7, "ts": start_us, "dur": duration_us, "name": name, **more}


def trace(path: Path, base_ns: int, events: list[dict[str, Any]], **more: Any) -> Path:
    names = [{"ph": "M", "pid": 70, "tid": 0, "name": "process_name", "args": {"name": "python"}}]
    path.write_text(json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": [*names, *events], **more}))
    return path


def merged(files: dict[int, Path], out: Path) -> list[dict[str, Any]]:
    count = merge(files, out)
    events: list[dict[str, Any]] = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    assert len(events) == count
    return events


def test_ranks_become_processes_on_one_clock(tmp_path: Path) -> None:
    """The ranks' traces have the same process id and different reference times."""
    flow = {"ph": "s", "pid": 70, "tid": 7, "ts": 5.001, "id": 1, "name": "flow"}
    place = {"cockpit": {"rank": 1, "coords": {"pp": 1, "tp": 0}}}
    files = {
        1: trace(tmp_path / "1", 3_000, [slice_(4.0, 2.0, "late"), flow], **place),
        0: trace(tmp_path / "0", 1_000, [slice_(5.001, 2.0, "early"), flow]),
    }
    events = merged(files, tmp_path / "out")
    at = {event["name"]: event["ts"] for event in events if event["ph"] == "X"}
    assert at == {"early": 0.0, "late": 0.999}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 1 (pp1 tp0)"]
    assert {names[event["pid"]] for event in events if event["name"] == "late"} == {"rank 1 (pp1 tp0)"}
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2


def test_overlapping_events_get_threads_of_their_own(tmp_path: Path) -> None:
    """Perfetto drops an event that begins within another event of the same thread and ends after it."""
    events = [
        slice_(0, 10, "step"),
        slice_(1, 3, "c10d::send"),
        slice_(2, 6, "gloo:send"),
        slice_(3, 6, "gloo:recv"),
        slice_(5, 1, "nested"),
        slice_(9, 1, "reused lane"),
    ]
    found = merged({0: trace(tmp_path / "0", 0, events)}, tmp_path / "out")
    tids = {event["name"]: event["tid"] for event in found if event["ph"] == "X"}
    assert tids["step"] == tids["c10d::send"] == tids["nested"] == tids["reused lane"]
    assert len({tids["step"], tids["gloo:send"], tids["gloo:recv"]}) == 3
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert names[tids["gloo:recv"]] == "asynchronous 2 of thread 7"


def test_events_that_are_malformed_are_left_out(tmp_path: Path) -> None:
    hostile: list[Any] = [None, 3, {"ph": "X"}, slice_(1, 1, "text", tid="seven"), slice_(1, 1, "good")]
    found = merged({0: trace(tmp_path / "0", 0, hostile)}, tmp_path / "out")
    assert [event["name"] for event in found if event["ph"] == "X"] == ["good"]


@pytest.mark.parametrize(("text", "why"), [("{", "is not JSON"), ("[]", "has no list traceEvents")])
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "0").write_text(text)
    with pytest.raises(TraceError, match=why):
        merge({0: tmp_path / "0"}, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0"]


def test_a_trace_from_before_a_resume_does_not_count_as_the_new_one(tmp_path: Path) -> None:
    """A resumed run trains step 7 again, and its trace replaces the earlier trace of step 7."""
    path = tmp_path / "step000007-rank1.json"
    path.write_text("of the first process")
    earlier = {path: _identity(path)}
    connection = SimpleNamespace(store=SimpleNamespace(state=SimpleNamespace(gone={})))
    assert _wait(connection, {1: path}, earlier, 0.0) == [1]  # type: ignore[arg-type]
    (tmp_path / "new").write_text("of the resumed process")
    (tmp_path / "new").replace(path)
    assert _wait(connection, {1: path}, earlier, 0.0) == []  # type: ignore[arg-type]
