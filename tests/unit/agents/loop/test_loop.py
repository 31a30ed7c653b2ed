"""`agents.join`: the cockpit can show and steer a connected loop, and telemetry never stops the loop."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import agents
from agents.client import Client
from agents.loop import join as loop_module
from agents.loop import start_hub
from agents.protocol import Ack, Command, Event, Gone, Step, Summary
from agents.recording.reader import Recording
from agents.rundir.hub_file import lock_for_hub
from agents.rundir.runs import RECORD_FILE
from agents.transport.reach import Reach
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import SOURCE, HubProcess, poll_until

LOOPING = Path(__file__).with_name("looping.py")

DEADLINE_S = 30.0


def cockpit(runs: Path, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "cockpit", *words, "--json"],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "COCKPIT_RUNS": str(runs)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return json.loads(done.stdout) if done.stdout else done.stderr


@contextmanager
def running(runs: Path, *options: str, world: int = 2) -> Iterator[list[subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(LOOPING), str(rank), str(world), str(runs), str(port), *options],
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
        )
        for rank in range(world)
    ]
    try:
        yield ranks
        (runs / "stop").touch()
        assert [rank.wait(20) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def until(runs: Path, true: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        seen = cockpit(runs, "snapshot")
        if isinstance(seen, dict) and true(seen):
            return seen
        assert time.monotonic() < deadline, seen


def test_a_knob_switches_on_two_processes_at_one_step(tmp_path: Path) -> None:
    with running(tmp_path, "agree"):
        seen = until(tmp_path, lambda seen: len(seen["ranks"]) == 2 and seen["summary"])
        assert [rank["coords"] for rank in seen["ranks"]] == [{"dp": 0}, {"dp": 1}]
        assert [rank["step"]["tokens"] for rank in seen["ranks"]] == [100, 200]
        assert seen["ranks"][1]["step"]["loss"] == 3.0
        assert {"forward", "backward", "agree"} <= seen["ranks"][0]["step"]["phases"].keys()
        assert seen["summary"]["loss"] == pytest.approx((2.0 * 100 + 3.0 * 200) / 300)
        assert seen["summary"]["tokens_per_s"] > 0
        assert seen["summary"]["grad_norm"] is None and seen["summary"]["dropped"] is None
        assert [(knob["name"], knob["value"]) for knob in seen["knobs"]] == [("grad_accum", 4)]
        answer = cockpit(tmp_path, "set", "grad_accum=1", "--wait")
        assert (answer["state"], answer["acks"], answer["world"]) == ("applied", 2, 2)
        applied = [(tmp_path / f"applied-{rank}").read_text().split() for rank in range(2)]
        assert applied[0] == applied[1] and applied[0][1] == "1"
        assert int(applied[0][0]) + 1 == answer["applied_step"]
        assert "not legal; legal: 1, 2, 4, 8" in str(cockpit(tmp_path, "set", "grad_accum=3", "--wait"))


def test_without_agree_ranks_report_and_have_no_knobs(tmp_path: Path) -> None:
    with running(tmp_path):
        seen = until(tmp_path, lambda seen: sum(bool(rank["step"]) for rank in seen["ranks"]) == 2)
        assert seen["knobs"] == []
        # The total is unknown, because rank 0 does not get the values of the other ranks.
        assert seen["summary"]["tokens_per_s"] is None
        assert seen["summary"]["loss"] == 2.0


def test_a_loop_that_is_shorter_than_the_start_of_its_hub_is_recorded(tmp_path: Path) -> None:
    with agents.join("short", run_dir=tmp_path / "short") as loop:
        for number in range(3):
            with loop.step() as step:
                step.report(loss=1.0 + number)
    with closing(Recording(tmp_path / "short" / RECORD_FILE)) as recording:
        found = [moment.update for moment in recording.moments()]
    assert [update.loss for update in found if isinstance(update, Summary)] == [1.0, 2.0, 3.0]
    assert [update.clean for update in found if isinstance(update, Gone)] == [True]


def test_two_loops_of_one_second_are_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path))
    monkeypatch.setattr("agents.rundir.run_folder.time.strftime", lambda *_: "20260101-000000")
    with agents.join("one"), agents.join("one"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"one-20260101-000000", "one-20260101-000000-2"}


def test_a_folder_that_another_job_uses_is_refused_with_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.rundir.hub_file.ENDING_S", 0.0)
    with lock_for_hub(tmp_path), agents.join("one", run_dir=tmp_path) as loop, loop.step():
        pass
    assert f"the run has no hub: another hub already serves {tmp_path}: another job uses" in caplog.text
    assert not (tmp_path / "hub.log").exists()


def test_a_mistake_of_the_program_gets_one_sentence() -> None:
    def declare(loop: agents.Loop, **options: Any) -> None:
        known = {"legal": [1, 2], "value": 1, "apply": print, "loss_neutral": True}
        loop.knob("k", **({"type": int} | known | options))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="rank = 2 of world = 2 is not legal"):
        agents.join("r", rank=2, world=2)
    with pytest.raises(ValueError, match="length <= 64"):
        agents.join("r", axes={"x" * 65: 0})
    with (
        agents.join("r", rank=0, world=2, hub="none") as loop,
        pytest.raises(ValueError, match="knob k must switch on all 2 ranks together, which needs agree="),
    ):
        declare(loop)
    with agents.join("r", hub="none") as loop:
        with pytest.raises(ValueError, match="k = 3 is not legal; legal: 1, 2"):
            declare(loop, value=3)
        with pytest.raises(ValueError, match="legal= takes a list"):
            declare(loop, legal=["a"])
        with pytest.raises(ValueError, match="a list is not a knob's type"):
            declare(loop, type=list)
        declare(loop)
        with pytest.raises(ValueError, match="declared twice"):
            declare(loop)
        with loop.step():
            pass
        with pytest.raises(ValueError, match="before the first step"):
            loop.knob("late", bool, value=False, apply=print, loss_neutral=True)


class Sent:
    """A fake agent that records the messages sent."""

    def __init__(self, loop: agents.Loop) -> None:
        self.messages: list[Any] = []
        loop._agent.send = lambda *messages: self.messages.extend(messages)  # type: ignore[method-assign]

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


def test_a_telemetry_failure_is_logged_once_and_the_loop_continues(caplog: pytest.LogCaptureFixture) -> None:
    def broken(mine: bytes) -> list[bytes]:
        if b"ranks" in mine or done:
            raise RuntimeError("the group is gone")
        return [mine, mine]

    done: list[int] = []
    with agents.join("r", rank=1, world=2, agree=broken, hub="none") as loop:
        sent = Sent(loop)
        for number in range(5):
            with loop.step() as step:
                step.report(loss="no number", tokens=7)
            done.append(number)
    assert len(done) == 5
    assert len([record for record in caplog.records if "telemetry has failed" in record.message]) == 1
    assert [step.step for step in sent.of(Step)] == [0, 2, 3, 4]  # `agree` failed in step 1
    assert all(step.loss is None and step.tokens == 7 for step in sent.of(Step))


def test_exceptions_of_the_loop_propagate() -> None:
    with agents.join("r", hub="none") as loop:
        with pytest.raises(KeyError), loop.step() as step, step.phase("forward"):
            raise KeyError("mine")
        with loop.step() as step:
            for number in range(200):
                with step.phase(f"{number} {'x' * 99}"):
                    pass
            assert len(step.phases) < 64 and max(map(len, step.phases)) == 64
        with loop.step() as step:
            assert step.number == 2
            with step.phase("forward"):
                assert loop.doing[1] == "forward"


def test_a_hub_that_cannot_start_does_not_stop_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with agents.join("r", run_dir=tmp_path / "file" / "run") as loop, loop.step():
        pass
    assert "has no hub" in caplog.text
    monkeypatch.setattr(loop_module, "endpoint_for", lambda *_: Reach(f"ipc://{tmp_path}/nobody"))
    with agents.join("r") as loop:
        began = time.perf_counter()
        for _ in range(300):
            with loop.step() as step:
                step.report(loss=1.0)
        assert time.perf_counter() - began < 5


def test_a_single_rank_votes_alone_and_reports_a_failing_apply(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with agents.join("r", hub="none") as loop:
        sent = Sent(loop)
        settled: list[Ack] = []
        loop._agent.settle = settled.append  # type: ignore[method-assign]
        loop.knob("lr", float, legal=(0.0, 1.0), value=0.5, apply=lambda _: 1 / 0, loss_neutral=False)
        loop._agent._orders.receive(Command(3, "c", {"lr": 1}), loop._hello, None)
        with loop.step() as step:
            step.report(loss=3.0, tokens=10, grad_norm=float("nan"))
        assert (loop._board.values["lr"], loop._board.revision) == (0.5, 3)
    assert (settled[0].state, settled[0].step, settled[0].digest) == ("rejected", 1, loop._board.digest())
    assert settled[0].why == "lr was not applied: ZeroDivisionError('division by zero')"
    assert settled[0].why in caplog.text
    (summary,) = sent.of(Summary)
    assert summary.loss == 3.0 and summary.tokens_per_s > 0 and summary.revision == 0


class Around:
    """Provides the `agree=` functions of ranks that are threads of one process."""

    def __init__(self, world: int) -> None:
        self._barrier, self._said = threading.Barrier(world, timeout=DEADLINE_S), [b""] * world

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def agree(mine: bytes) -> list[bytes]:
            self._said[rank] = mine
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
            return said

        return agree


@pytest.mark.parametrize("fails", [[1], [0, 1]])
def test_a_rank_that_fails_to_apply_is_named(own_hub: HubProcess, opened: Opened, fails: list[int]) -> None:
    def train(rank: int) -> None:
        def turn(value: int) -> None:
            if rank in fails and value == 8:
                raise MemoryError("no room")

        url = own_hub.endpoints.ranks
        with agents.join("r", rank, 2, agree=around.of(rank), hub=url) as loop:
            loop.knob("k", int, legal=[1, 2, 8], value=1, apply=turn, loss_neutral=True)
            while not any(ended):
                with loop.step():
                    time.sleep(0.01)
                if rank == 0 and ending.is_set():
                    ended.append(True)
                around.of(rank)(b"")

    around, ending, ended = Around(2), threading.Event(), []
    client = opened(Client(own_hub.endpoints.clients))
    ranks = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(2)]
    for thread in ranks:
        thread.start()
    try:
        poll_until(client, lambda: client.state.board and client.state.board.knobs)
        half = client.propose({"k": 8})
        why = "k was not applied: MemoryError('no room')"
        poll_until(
            client,
            lambda: (
                half in client.state.commands
                and client.state.commands[half].why
                == (why if 0 in fails else f"rank 1 reports rejected: {why}")
            ),
        )
        command = client.state.commands[half]
        errors = [event.text for event in client.state.events if event.level == "error"]
        if 0 in fails:  # no rank applied it, so it is not partially applied
            assert (command.state, errors) == ("rejected", [])
        else:
            assert (command.state, command.acks, command.settled) == ("applied", 1, False)
            assert errors == [f"rank 1 reports rejected for revision 1, other ranks applied: {why}"]
        whole = client.propose({"k": 2})
        poll_until(client, lambda: whole in client.state.commands and client.state.commands[whole].settled)
        assert (client.state.commands[whole].state, client.state.commands[whole].acks) == ("applied", 2)
        assert [event.text for event in client.state.events if event.level == "error"] == errors
    finally:
        ending.set()
        for thread in ranks:
            thread.join(DEADLINE_S)


def test_a_whole_number_has_no_fraction() -> None:
    with agents.join("r", hub="none") as loop:
        loop.knob("n", int, legal=(1, 8), value=4, apply=print, loss_neutral=True)
        with pytest.raises(ValueError, match=r"n = 2.7 is not legal; it takes whole numbers"):
            loop._board.prepare({"n": 2.7})
        loop._board.commit(1, {"n": 2.0}, loop._board.prepare({"n": 2.0}))
        assert type(loop._board.values["n"]) is int


def test_a_name_with_slashes_names_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders: list[Path] = []
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path))
    monkeypatch.setattr(start_hub, "_start", lambda *given: (folders.append(given[2]), (None, None))[1])
    for run in ("team/exp 1", "../../away", "/"):
        start_hub.endpoint_for(ExitStack(), "auto", run, None, 0, 1, None)
    assert {folder.parent for folder in folders} == {tmp_path}
    assert folders[0].name.startswith("team-exp 1-") and folders[1].name.startswith("-..-away-")


def test_an_illegal_step_number_is_refused_and_a_legal_one_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step is never recorded under another number than the one that the program gave."""
    sent: list[Any] = []
    with agents.join(run="a", hub="none") as loop:
        monkeypatch.setattr(loop._agent, "send", lambda *messages: sent.extend(messages))
        for number in (7, -5, 1.5, 2**60, float("nan"), "9", 8.0, None, 2**53):
            with loop.step(number) as step:  # type: ignore[arg-type]
                step.report(loss=1.0)
    assert [one.step for one in sent if isinstance(one, Step)] == [7, 8, 9, 2**53]
    assert [one.step for one in sent if isinstance(one, Summary)] == [7, 8, 9, 2**53]
    why = "step -5 is not recorded; legal: a whole number from 0 to 9007199254740992"
    assert caplog.messages == [why]
    assert [one.text for one in sent if isinstance(one, Event)] == [
        f"{why}; further such steps are not reported"
    ]


def test_a_rank_whose_step_number_is_refused_still_takes_part_in_the_vote() -> None:
    """The other ranks wait for its part of the exchange."""
    exchanged: list[bytes] = []

    def agree(own: bytes) -> list[bytes]:
        exchanged.append(own)
        return [own, own]

    with agents.join(run="a", rank=1, world=2, agree=agree, hub="none") as loop:
        at_start = len(exchanged)
        for number in (0, -5, 1):
            with loop.step(number):
                pass
    assert len(exchanged) - at_start == 3
