"""A real job of 8 processes hangs because one rank skips a collective: the log and `cockpit stacks` name this rank."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.client import Client
from agents.protocol import STACKS_FACT, Event
from agents.rundir.runs import resolve
from tests.unit.agents.fleet import SOURCE, poll_until
from tests.unit.agents.loop.hanging import ODD
from tests.unit.agents.loop.test_loop import cockpit, until

HANGING = Path(__file__).with_name("hanging.py")
WORLD = 8


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Client]:
    """A client of the job `hanging.py`, which hangs at step 20."""
    job = subprocess.Popen(
        [sys.executable, str(HANGING), str(WORLD), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        start_new_session=True,
    )
    try:
        until(tmp_path, lambda seen: len(seen["ranks"]) == WORLD)
        client = Client(resolve("hung", tmp_path).clients)
        yield client
        client.close()
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def line_of(call: str) -> int:
    lines = HANGING.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == call)


def test_the_odd_rank_and_its_line_are_named(hung: Client, tmp_path: Path) -> None:
    def explained() -> list[Event]:
        return [event for event in hung.state.events if STACKS_FACT in event.facts]

    poll_until(hung, explained)
    sentence = (
        f"7 of 8 ranks wait in all_reduce (hanging.py:{line_of('all_reduce(gradients)')}); "
        f"rank 3 waits in all_reduce (hanging.py:{line_of('all_reduce(metrics)')})"
    )
    assert [event.text for event in explained()] == [sentence]
    facts = explained()[0].facts
    assert (facts[STACKS_FACT], facts["rank"], facts["odd"]) == (WORLD, ODD, 1)

    seen = cockpit(tmp_path, "stacks", "hung")
    assert (seen["sentence"], seen["odd"], seen["unanswered"]) == (sentence, [ODD], [])
    assert [len(group["ranks"]) for group in seen["groups"]] == [WORLD - 1, 1]
    (one,) = cockpit(tmp_path, "stacks", "hung", "--ranks", str(ODD))["ranks"]
    (thread,) = one["threads"]
    assert (one["rank"], one["doing"]) == (ODD, "all-reduce of metrics")
    assert [frame["code"] for frame in thread["frames"] if frame["function"] == "train"] == [
        "all_reduce(metrics)"
    ]

    os.kill(hung.state.hellos[5].pid, signal.SIGSTOP)
    seen = cockpit(tmp_path, "stacks", "hung")
    assert [missing["rank"] for missing in seen["unanswered"]] == [5]
    assert "is suspended" in seen["unanswered"][0]["why"] and seen["odd"] == [ODD, 5]
    assert len(explained()) == 1
