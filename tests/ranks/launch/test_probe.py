"""`engine probe` with two ranks: it writes a hardware description that the planner reads, and Ctrl-C ends it
cleanly."""

import json
import os
import signal
import tomllib
from pathlib import Path

from engine.config.toml import load as load_layout
from engine.planner.hardware.table import load
from engine.planner.timing.predict import predict
from engine.planner.workload.job import Job
from tests.ranks.driver import TIMEOUT_S
from tests.ranks.program import Program, run
from tests.unit.cockpit.schemas import check
from tests.unit.engine.config.test_layout import DEMO

GRID = ["grid.pp=1", "grid.dp_shard=2", "grid.tp=1", "grid.ep=2"]
PROBE = ["-m", "engine", "probe", str(DEMO), *GRID, "--device", "cpu"]


def test_two_ranks_write_a_description(tmp_path: Path) -> None:
    out = tmp_path / "own.toml"
    done = run(*PROBE, "--quick", "--json", "--out", str(out), timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    hardware = load(out)
    assert hardware.measured and (hardware.measured.ranks, hardware.measured.backend) == (2, "gloo")
    assert {(row.axis, row.kind) for row in hardware.measured.collectives} == {
        ("ep", "all_to_all"),
        ("dp", "all_gather"),
        ("dp", "reduce_scatter"),
        ("dp", "all_reduce"),
        ("control", "all_gather"),
    }
    assert all(row.latency or row.per_byte for row in hardware.measured.collectives)
    assert hardware.device.peak["fp32"] > 1e8 and hardware.efficiency.operation > 1e-7
    check("engine-probe", json.loads(done.stdout))
    assert json.loads(done.stdout)["device"] == tomllib.loads(out.read_text())["device"]
    low, middle, high = predict(Job.of(load_layout(DEMO, GRID)), hardware).step_s
    assert 0 < low < middle < high


def test_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    out = tmp_path / "own.toml"
    probe = Program(*PROBE, "--out", str(out))
    assert "pass 1" in probe.stderr.readline()  # the ranks measure
    os.killpg(probe.pid, signal.SIGINT)  # like a terminal, signal the parent and the ranks
    _, rest = probe.communicate(timeout=TIMEOUT_S)
    assert probe.returncode == 130, rest
    assert "Traceback" not in rest and not out.exists() and not list(tmp_path.iterdir())
