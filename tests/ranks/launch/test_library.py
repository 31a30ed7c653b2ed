"""Runs the examples of docs/join/library.md as they are printed there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "join" / "library.md").read_text(), re.DOTALL)


@pytest.mark.timeout(180)
def test_a_run_with_callbacks(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        EXAMPLES[0].replace(
            '"run.name=mine"', f'"run.name=mine", "run.dir={tmp_path}", "grid.tp=1", "grid.ep=2"'
        )
    )
    done = run(sys.executable, "-W", "error::DeprecationWarning", str(script))
    assert re.findall(r"step (\d): loss \d\.\d+, \d+ tokens/s", done) == list("012345")
    assert re.findall(r"rank 3: step (\d), \d+ ms", done) == list("012345")
    assert list(tmp_path.glob("mine-*"))


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
def test_a_trainer_in_an_own_process_group(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(EXAMPLES[1])
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8")
    assert "micro-batches 4" in run(sys.executable, *launcher, str(script))


def run(*command: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_own_training_loop(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(EXAMPLES[2])
    done = run(sys.executable, "-W", "error", str(script), COCKPIT_RUNS=str(tmp_path))
    assert done == "" and list(tmp_path.glob("my-job-*"))


AFTER_THE_LOOP = """
import json, subprocess, sys, time
from agents.loop.adapters.torch_ranks import TorchRanks
agree, rank = TorchRanks().agree, dist.get_rank()
for mine, everyone in ((b"", [b"", b""]), (b"x" * (rank + 1), [b"x", b"xx"]), (b"a\\0" * rank, [b"", b"a\\0"])):
    assert agree(mine) == everyone, (mine, agree(mine))
command = [sys.executable, "-m", "cockpit", "snapshot", "--json"]
while rank == 0:  # the hub may start later than this short job ends
    done = subprocess.run(command, capture_output=True, text=True)
    ranks = json.loads(done.stdout)["ranks"] if done.returncode == 0 else []
    if [one["step"] and one["step"]["step"] for one in ranks] == [3, 3]:
        print(done.stdout)
        break
    time.sleep(0.2)
dist.barrier()
"""


@pytest.mark.timeout(180)
def test_a_loop_with_ddp_and_agreeing_over_torch(tmp_path: Path) -> None:
    script = tmp_path / "agree.py"
    script.write_text(EXAMPLES[3].replace("agent.close()", AFTER_THE_LOOP + "agent.close()"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    shown = json.loads(run(sys.executable, *launcher, str(script), COCKPIT_RUNS=str(tmp_path)))
    assert [rank["coords"] for rank in shown["ranks"]] == [{"dp": 0}, {"dp": 1}]
    assert shown["summary"]["loss"] == pytest.approx(sum(rank["step"]["loss"] for rank in shown["ranks"]) / 2)
