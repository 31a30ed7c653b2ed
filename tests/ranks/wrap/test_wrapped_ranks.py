"""`cockpit wrap torchrun` with two ranks of an unchanged script: the run is shown, steered and stopped, and its result
equals that of the script without `cockpit wrap`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).with_name("plain_job.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WRAP = [sys.executable, "-m", "cockpit", "wrap", "--run", "plain"]
DEADLINE_S = 200.0


def environ(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "COCKPIT_RUNS": str(tmp_path / "runs")}


def cockpit(tmp_path: Path, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "cockpit", *words, "--json"],
        env=environ(tmp_path),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return json.loads(done.stdout) if done.stdout else None


def test_two_wrapped_ranks(tmp_path: Path) -> None:
    alone = subprocess.run(
        [*TORCHRUN, SCRIPT, "120", "0.0"], env=environ(tmp_path), cwd=tmp_path, capture_output=True, text=True
    )
    wrapped = subprocess.run(
        [*WRAP, *TORCHRUN, SCRIPT, "120", "0.0"],
        env=environ(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (alone.returncode, wrapped.returncode) == (0, 0), wrapped.stderr
    assert alone.stdout == wrapped.stdout and wrapped.stdout.startswith("result ")
    assert "cockpit wrap" not in wrapped.stderr


def test_two_wrapped_ranks_are_steered(tmp_path: Path) -> None:
    out = (tmp_path / "out").open("w+")
    program = subprocess.Popen(
        [*WRAP, *TORCHRUN, SCRIPT, "4000", "0.05"],
        env=environ(tmp_path),
        cwd=tmp_path,
        stdout=out,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not ((state := cockpit(tmp_path, "snapshot")) and state["summary"]):
            assert time.monotonic() < deadline and program.poll() is None
            time.sleep(0.5)
        steps = [one["step"] for one in state["ranks"]]
        assert {"data", "forward", "backward", "optimizer"} <= steps[0]["phases"].keys()
        assert steps[0]["comm"]["dp"]["bytes"] == 4 * (16 * 32 + 32 + 32 + 1)  # 2 (P-1)/P n
        applied = cockpit(tmp_path, "set", "lr_scale=0.5", "--wait")
        assert (applied["state"], applied["acks"]) == ("applied", 2)
        hub = json.loads(next((tmp_path / "runs").glob("*/hub.json")).read_text())["pid"]
        os.kill(hub, signal.SIGKILL)  # it comes back
        while not (stopped := cockpit(tmp_path, "set", "stop", "--wait")) or stopped["state"] != "applied":
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert program.wait(DEADLINE_S) == 0
        out.seek(0)
        ends = re.findall(r"stopped after step (\d+)", out.read())
        assert len(ends) == 2 and len(set(ends)) == 1
    finally:
        program.terminate()
        program.wait(DEADLINE_S)
