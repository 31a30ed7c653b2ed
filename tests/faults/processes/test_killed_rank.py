"""Fault 1: every client learns which rank was killed, with its coordinates and the cause; the other ranks end too."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.client import Client
from agents.rundir.failure_file import last_failure
from agents.rundir.hub_file import read_hub_file
from tests.ranks.driver import Driver, eventually
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import poll_until

WORK = """
from agents.rank.agent import Agent
from agents.protocol import Board
from tests.unit.agents.fleet import make_board, make_hello, make_step

def work(place):
    "Steps as a trainer's, seen by a hub; one waits for its peers and cannot heed a stop."
    step, since = 0, time.monotonic()
    agent = Agent(place.hub, lambda: (step, "tp all-gather, layer 2", since))
    board = make_board()
    shown = Board(0, 0, board.digest(), board.states()) if place.rank == 0 else None
    agent.introduce(make_hello(place.rank, place.world, run="a-run"), shown)
    note(place, "pid", os.getpid())
    while place.rank == 3 or not place.stop_requested():
        place.set_operation(step, "tp all-gather, layer 2")
        agent.send(make_step(place.rank, step))
        time.sleep(0.02)
        step += 1
    agent.close()
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.clean()


def test_a_killed_rank_is_reported_with_place_and_cause(driver: Driver, opened: Opened) -> None:
    driver.run_dir.mkdir(parents=True, exist_ok=True)
    (driver.run_dir / "failure.txt").write_text("2026-11-21 12:00:00 rank 1 failed in an earlier attempt\n")
    run = driver.start(WORK, 4, hub="auto")
    pids = driver.pids(4)
    eventually((driver.run_dir / "hub.json").exists)
    client = opened(Client(read_hub_file(driver.run_dir).endpoints.clients))
    poll_until(client, lambda: len(client.state.steps) == 4)
    assert last_failure(driver.run_dir) is None, "that was another attempt"
    os.kill(pids[2], signal.SIGKILL)
    status, _, stderr = driver.end(run, 30)  # asserts that no rank process is left
    assert status == 1
    sentence, file = stderr.splitlines()
    assert sentence.startswith("rank 2 (dp2) was killed by SIGKILL at step ")
    assert sentence.endswith(" in tp all-gather, layer 2") and file.startswith("reports of all ranks: ")
    reports = (driver.run_dir / "failure.txt").read_text()
    assert "\nrank 3 (dp3) was ended because of the failure, last at step " in reports
    assert "\nrank 0 (dp0) had ended without an error, last at step " in reports

    poll_until(client, lambda: client.state.events and client.state.events[-1].text == "the hub has ended")
    told = [event for event in client.state.events if event.source == "run"]
    assert [(event.level, event.text) for event in told] == [("error", sentence)]
    assert client.state.gone[2].over and client.state.gone[2].text == sentence
    assert last_failure(driver.run_dir) == sentence  # a client that connects later reads this
