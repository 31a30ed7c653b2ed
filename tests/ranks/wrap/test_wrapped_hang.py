"""A wrapped job of eight ranks hangs when one rank skips a collective: the log names the rank and its current line."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.ranks.wrap.test_wrapped_ranks import DEADLINE_S, TORCHRUN, WRAP, cockpit, environ

pytestmark = pytest.mark.exhaustive

SCRIPT = Path(__file__).with_name("hanging_job.py")
NAMED_S = 30.0  # time after the last step in which the rank must be named


def line_of(call: str) -> int:
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == call)


def log_of(tmp_path: Path) -> dict[str, float]:
    """The time of each message in the run's log, by the message's text."""
    words = [*WRAP[:3], "log", "--json"]
    lines = subprocess.run(words, env=environ(tmp_path), capture_output=True, text=True).stdout.splitlines()
    return {event["text"]: event["time_s"] for event in map(json.loads, lines) if "text" in event}


@pytest.mark.timeout(400)
def test_the_odd_rank_of_a_wrapped_job_and_its_line_are_named(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [*WRAP, *TORCHRUN[:-1], "8", str(SCRIPT)],
        env=environ(tmp_path),
        cwd=tmp_path,
        stdout=(tmp_path / "out").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (state := cockpit(tmp_path, "status")) or state["state"] != "STALLED":
            assert time.monotonic() < deadline and program.poll() is None
            time.sleep(0.5)
        time.sleep(3)  # the stacks are collected
        others = f"7 of 8 ranks wait in all_reduce ({SCRIPT.name}:{line_of('dist.all_reduce(total)')})"
        odd = f"rank 5 is in read_next_shard ({SCRIPT.name}:{line_of('time.sleep(1)')})"
        sentence = f"{others}; {odd}"
        log = log_of(tmp_path)
        stuck = next(text for text in log if text.startswith("the run is stuck"))
        assert "7 of 8 ranks wait in a collective; rank 5 (dp5) not arrived: between phases" in stuck, log
        assert sentence in log, log
        assert log[sentence] - state["summary"]["time_s"] < NAMED_S
        assert f": {odd}; {others}" in cockpit(tmp_path, "status")["diagnosis"]["text"]
        found = cockpit(tmp_path, "stacks")
        assert (found["sentence"], found["odd"]) == (sentence, [5])
    finally:
        program.terminate()  # torchrun then ends its ranks
        program.wait(DEADLINE_S)
