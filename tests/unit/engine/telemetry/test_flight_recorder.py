"""Tests `newest_collectives`, which describes a process's newest collectives from PyTorch's flight recorder."""

import json
from typing import Any

import pytest

from engine.telemetry import flight_recorder
from engine.telemetry.flight_recorder import GROUPS, newest_collectives


def entry(record: int, group: str, number: int, retired: bool, p2p: bool = False) -> dict[str, Any]:
    return {
        "record_id": record,
        "process_group": [group, "dp"],
        "profiling_name": "gloo:recv" if p2p else "gloo:all_reduce",
        "collective_seq_id": 0 if p2p else number,
        "p2p_seq_id": number if p2p else 0,
        "is_p2p": p2p,
        "retired": retired,
    }


def dumping(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> None:
    def dump(collectives: bool, active: bool) -> bytes:
        return json.dumps({"entries": entries}).encode()

    monkeypatch.setattr(flight_recorder.c10d, "_dump_fr_trace_json", dump)


def test_the_newest_collective_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    dumping(monkeypatch, entry(2, "0", 8, False), entry(1, "0", 7, True), entry(0, "1", 3, True, p2p=True))
    assert newest_collectives() == (
        "gloo:all_reduce number 8 of group 0 dp not complete, gloo:recv number 3 of group 1 dp complete"
    )


def test_many_groups_and_no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    dumping(monkeypatch, *(entry(number, str(number), 1, True) for number in range(GROUPS + 3)))
    assert newest_collectives().count(" number 1 of group ") == GROUPS
    assert newest_collectives().startswith(f"gloo:all_reduce number 1 of group {GROUPS + 2} ")
    monkeypatch.delattr(flight_recorder.c10d, "_dump_fr_trace_json")
    assert newest_collectives() == ""
