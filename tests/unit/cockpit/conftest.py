"""A fixture that creates a folder of ended runs."""

from pathlib import Path

import pytest

from agents.hub.recorder import Limits, Recorder
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Board, CommandState, Event, Experts, Gone, LayerLoad
from tests.unit.agents.fleet import make_board, make_hello, make_step, make_summary

STEPS = 30


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: `r-1` has two ranks and 30 recorded steps, and `bare` has no recording."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "r-1").mkdir()
    (folder / "bare").mkdir()
    sequence = UpdateLog()
    recorder = Recorder(
        folder / "r-1" / "run.db", sequence, Limits(segment_bytes=5000, commit_s=0.01, snapshot_multiple=0)
    )
    board = make_board()
    for rank in range(2):
        sequence.publish(make_hello(rank, 2, facts={"steps": STEPS}))
    sequence.publish(Board(0, 0, board.digest(), board.states()))
    for step in range(STEPS):
        for rank in range(2):
            sequence.publish(make_step(rank, step))
        sequence.publish(make_summary(step))
        recorder.follow()
    sequence.publish(Experts(STEPS - 1, [LayerLoad(0, [3, 5], 1)]))
    changes = {"micro_batches": 8}
    sequence.publish(
        CommandState("c", 1, "applied", changes, {"micro_batches": 4}, "ada", 9.0, 2, 2, applied_step=20)
    )
    sequence.publish(Event(10.0, "warning", "rank 1", "an event of rank 1"))
    for rank in range(2):
        sequence.publish(Gone(rank, clean=True))
    recorder.close()
    return folder
