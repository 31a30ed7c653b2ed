"""Tests of all exports, each read back by a library that reads its format."""

import contextlib
import csv
import json
import re
import socket
import struct
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from agents import protocol
from agents.recording.reader import Recording
from cockpit.cli.main import run
from cockpit.data.sources.connection import CockpitError
from cockpit.export.command import EXTRA, FORMATS, listen_address
from cockpit.export.tables import TABLES
from cockpit.export.updates import updates
from tests.unit.agents.conftest import Opened, make_run, opened, own_hub
from tests.unit.agents.fleet import Fleet, HubProcess
from tests.unit.agents.recorder_run import MakeRun
from tests.unit.cockpit.conftest import STEPS

__all__ = ["make_run", "opened", "own_hub"]
Said = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[4]


def export(runs: Path, form: str, out: Path) -> Path:
    assert run(["export", str(runs / "r-1"), "--format", form, "--out", str(out)]) == 0
    return out


def test_every_kind_has_a_table() -> None:
    # its updates are also recorded under their own kinds, so their rows would appear twice
    told_before = {protocol.Recalled}
    assert {*TABLES, protocol.Unknown} | told_before == set(get_args(protocol.Update))


def test_ndjson(runs: Path, capsys: Said) -> None:
    assert run(["export", str(runs / "r-1"), "--format", "ndjson"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    numbers = [line["hub_seq"] for line in lines]
    assert numbers == list(range(1, len(lines) + 1)), "each update once, despite many segments"
    assert [line["step"] for line in lines if line["kind"] == "summary"] == list(range(STEPS))
    assert lines[0]["kind"] == "hello" and lines[0]["facts"] == {"steps": STEPS}


def test_csv(runs: Path, tmp_path: Path) -> None:
    out = export(runs, "csv", tmp_path / "csv")
    tables = {path.stem: list(csv.DictReader(path.open())) for path in out.iterdir()}
    assert [int(row["step"]) for row in tables["steps"]] == list(range(STEPS))
    assert tables["steps"][0]["mfu"] == "", "a missing value is never zero"
    assert len(tables["ranks"]) == 2 * STEPS and tables["ranks"][0]["comm.dp.bytes"] == "1024"
    assert [(row["expert"], row["load"]) for row in tables["experts"]] == [("0", "3"), ("1", "5")]
    assert json.loads(tables["commands"][0]["changes"]) == {"micro_batches": 8}
    assert [row["name"] for row in tables["knobs"]] == ["micro_batches", "recompute"]


def test_parquet(runs: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = export(runs, "parquet", tmp_path / "parquet")
    steps = parquet.read_table(out / "steps.parquet")
    assert steps["step"].to_pylist() == list(range(STEPS))
    assert (str(steps.schema.field("loss").type), str(steps.schema.field("oversubscribed").type)) == (
        "double",
        "bool",
    )
    assert steps["mfu"].null_count == STEPS
    knobs = parquet.read_table(out / "knobs.parquet")
    assert knobs["value"].to_pylist() == ["4", "none"], "values of several types are text"


def test_tensorboard(runs: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = export(runs, "tensorboard", tmp_path / "tb")
    events = accumulator.EventAccumulator(str(out), size_guidance={"scalars": 0}).Reload()
    loss = events.Scalars("train/loss")
    assert [event.step for event in loss] == list(range(STEPS))
    assert {event.value for event in loss} == {2.0}
    assert "train/mfu" not in events.Tags()["scalars"]


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a W&B file, which is in LevelDB's log format after a header of seven bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full record, or the last part of a split record
            yield whole
            whole = b""


def test_wandb_offline(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = export(runs, "wandb", tmp_path / "wandb")
    (path,) = out.glob("wandb/offline-run-*/*.wandb")
    records = [internal.Record.FromString(record) for record in records_of(path)]
    history = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["step"] for row in history] == list(range(STEPS))
    assert history[0]["train/loss"] == 2.0 and "train/mfu" not in history[0]


def samples(text: str) -> dict[tuple[str, ...], float]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name != "run"),
        ): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_file(runs: Path, tmp_path: Path) -> None:
    found = samples(export(runs, "prometheus", tmp_path / "run.prom").read_text())
    assert found["cockpit_loss",] == 2.0 and found["cockpit_step",] == STEPS - 1
    assert found["cockpit_rank_step_seconds", "1"] == 0.01
    assert found["cockpit_rank_up", "1"] == 0.0, "the rank has said goodbye"
    assert found["cockpit_knob", "micro_batches"] == 4
    assert ("cockpit_mfu_ratio",) not in found, "a missing value has no sample"
    assert found["cockpit_up",] == 0.0, "the run has no hub"


def test_the_dashboard_uses_exported_names(runs: Path, tmp_path: Path) -> None:
    text = export(runs, "prometheus", tmp_path / "run.prom").read_text()
    exported = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    dashboard = (ROOT / "docs" / "join" / "grafana.json").read_text()
    used = set(re.findall(r"cockpit_\w+", dashboard))
    assert len(used) > 12 and used <= exported


def test_prometheus_of_a_live_run(own_hub: HubProcess, opened: Opened, capsys: Said) -> None:
    pytest.importorskip("prometheus_client")
    from cockpit.export.prometheus import _is_live, serve

    fleet = opened(Fleet(own_hub.endpoints.ranks, 2))
    listening: list[int] = []
    ready = threading.Event()

    def started(port: int) -> None:
        listening.append(port)
        ready.set()

    status: list[int] = []
    url = f"ipc://{own_hub.endpoints.directory}"
    thread = threading.Thread(target=lambda: status.append(serve(url, "127.0.0.1", 0, started)), daemon=True)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("cockpit.export.prometheus.LINGER_S", 0.1)
    thread.start()
    while not ready.wait(0.02):
        fleet.turn()
        assert thread.is_alive()
    found: dict[tuple[str, ...], float] = {}
    while found.get(("cockpit_step",), 0) < 3 or ("cockpit_rank_up", "1") not in found:
        fleet.turn()
        with urllib.request.urlopen(f"http://127.0.0.1:{listening[0]}/metrics", timeout=5) as answer:
            found = samples(answer.read().decode())
    assert found["cockpit_up",] == 1.0 and found["cockpit_rank_up", "1"] == 1.0
    assert _is_live(own_hub.folder), "so an export of its recording has cockpit_up 1 too"
    fleet.close()
    own_hub.stop()
    thread.join(15)
    monkeypatch.undo()
    assert status == [0]


def test_a_gap_is_bridged_once(make_run: MakeRun) -> None:
    from agents.hub.telemetry.update_log import UpdateLog

    run = make_run(UpdateLog(log_updates=64), queue_bytes=0, commit_s=0.2, gap_interval_s=0.0)
    run.begin()
    run.train(100)
    run.until(lambda: any("has a gap" in text for text in run.events))
    run.until(run.written)
    run.recorder.close()
    steps = [
        update.step for _, update in updates(Recording(run.path)) if isinstance(update, protocol.Summary)
    ]
    assert steps == list(range(100)), "the updates of the gap are in the snapshot after it"


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if form.needs])
def test_a_missing_library_names_the_extra(
    runs: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("cockpit.export.prom", FORMATS[form].needs))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, FORMATS[form].needs, None)
    assert run(["export", str(runs / "r-1"), "--format", form, "--out", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.endswith(f"install it with pip install '{EXTRA}'\n")


def test_an_output_that_cannot_be_written_gets_one_sentence(runs: Path, tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "file").write_text("")
    for form in ("csv", "ndjson"):
        assert (
            run(["export", str(runs / "r-1"), "--format", form, "--out", str(tmp_path / "file" / "x")]) == 2
        )
        assert "cannot be written" in capsys.readouterr().err
    assert run(["export", str(runs / "r-1"), "--format", "xml"]) == 2
    assert "ndjson" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("form", ["ndjson", "prometheus"])
def test_a_full_disk_gets_one_sentence(
    runs: Path, form: str, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert run(["export", str(runs / "r-1"), "--format", form]) == 1
    assert capsys.readouterr().err == "standard output cannot be written: No space left on device\n"


def test_slow_scrapers_are_closed_and_block_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.exposition import make_wsgi_app
    from prometheus_client.registry import CollectorRegistry

    from cockpit.export import http_server

    monkeypatch.setattr(http_server, "ANSWERED_S", 0.2)
    before = threading.active_count()
    server = http_server.BoundedServer("127.0.0.1", 0, make_wsgi_app(CollectorRegistry()), "scrapes")
    slow = [socket.create_connection(("127.0.0.1", server.server_port), timeout=30) for _ in range(40)]
    try:
        most = 0
        for one in slow:
            with contextlib.suppress(OSError):
                one.sendall(b"GET /metrics HTTP/1.1\r\nX")
            most = max(most, threading.active_count())
        assert most <= before + 1 + http_server.CONNECTIONS
        for one in slow:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(100) == b"", "it is closed by one of the limits"
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
            assert answer.status == 200
    finally:
        for one in slow:
            one.close()
        server.close()


def test_where_prometheus_may_be_served() -> None:
    assert listen_address("9464") == ("127.0.0.1", 9464)
    assert listen_address("[::1]:9464") == ("::1", 9464)
    for text in ("0.0.0.0:9464", "[::]:9464", "[::ffff:0.0.0.0]:9464", "[::ffff:0:0]:9464"):
        with pytest.raises(CockpitError, match="listen on every network"):
            listen_address(text)
    for text in ("everywhere:9464", "127.0.0.1:x", "127.0.0.1:99999", ""):
        with pytest.raises(CockpitError, match="legal: PORT"):
            listen_address(text)
