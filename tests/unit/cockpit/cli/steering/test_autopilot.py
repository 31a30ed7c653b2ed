"""`cockpit advise` and `cockpit autopilot` against a real hub and ranks whose step time follows a script."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agents.client import Client
from agents.protocol import (
    Changes,
    Estimate,
    Message,
    Previewed,
    Summary,
)
from agents.state.preview_checks import Check, check_event, trust
from cockpit.cli.main import run
from cockpit.cli.steer import autopilot
from tests.unit.agents.fleet import Fleet, HubProcess, poll_until

Said = pytest.CaptureFixture[str]
STEPS = ["--steps", "4"]


class Truth:
    """The step times of the ranks, `ms`, and the step times that previews predict, `previews`, as functions of the knob
    values."""

    def __init__(self) -> None:
        self.ms: Callable[[Changes], float] = lambda values: 10.0
        self.previews: Callable[[Changes], float] = lambda values: self.ms(values)
        self.reach = 0.05  # half the width of a predicted interval, relative to the prediction
        self.oversubscribed = False


@contextmanager
def flying(folder: Path, truth: Truth) -> Iterator[tuple[HubProcess, Fleet]]:
    """A hub with ranks that train; their leader answers preview queries."""
    hub = HubProcess(folder / "r-1").start()
    fleet = Fleet(hub.endpoints.ranks)
    fleet.step_ms = lambda values: truth.ms(dict(values))  # type: ignore[method-assign]

    def preview(changes: Changes) -> Previewed:
        board = fleet.boards[0]
        now, then = (truth.previews(values) for values in (board.values, board.values | changes))
        low, high = (1 - truth.reach) * then, (1 + truth.reach) * then
        estimate = Estimate("step_ms", now, then, low, high, "planned")
        return Previewed("", changes, board.revision, "", True, [estimate])

    send = fleet.agents[0].send

    def send_of_shared_cores(*messages: Message) -> None:
        send(
            *(
                structs.replace(one, oversubscribed=truth.oversubscribed) if isinstance(one, Summary) else one
                for one in messages
            )
        )

    fleet.agents[0].send = send_of_shared_cores  # type: ignore[method-assign]
    fleet.agents[0].preview(preview)
    fleet.introduce()
    done = threading.Event()

    def train() -> None:
        while not done.wait(0.02):
            fleet.turn()

    thread = threading.Thread(target=train)
    thread.start()
    client = Client(hub.endpoints.clients)
    poll_until(client, lambda: client.state.board and client.state.summaries and client.state.steps)
    client.close()
    try:
        yield hub, fleet
    finally:
        done.set()
        thread.join()
        fleet.close()
        hub.clean_up()


@pytest.fixture
def truth() -> Truth:
    return Truth()


@pytest.fixture
def flight(
    tmp_path: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[HubProcess, Fleet]]:
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path))
    with flying(tmp_path, truth) as found:
        yield found


def lines(capsys: Said, *words: str, status: int) -> list[dict[str, Any]]:
    assert run([*words, "--json"]) == status
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def by_micro_batches(times: dict[int, float]) -> Callable[[Changes], float]:
    return lambda values: times[int(str(values["micro_batches"]))]


FASTER = {1: 30.0, 2: 20.0, 4: 10.0, 8: 5.0}
Flight = tuple[HubProcess, Fleet]


def test_it_keeps_what_is_better_and_stops_when_nothing_is_left(
    capsys: Said, truth: Truth, flight: Flight
) -> None:
    truth.ms = by_micro_batches(FASTER)
    said = lines(capsys, "autopilot", "--within", "micro_batches=1..8", *STEPS, status=0)
    assert [one["event"] for one in said] == ["move", "outcome", "stop"]
    assert said[0]["changes"] == {"micro_batches": 8} and said[0]["gain"] == pytest.approx(0.5, abs=0.01)
    assert said[1]["trial"]["state"] == "kept" and said[-1]["kept"] == 1
    assert flight[1].boards[0].values == {"micro_batches": 8, "recompute": "none"}
    log = lines(capsys, "log", status=0)
    reasons = [one["trial"]["reason"] for one in log if "trial" in one]
    assert reasons and "autopilot: " in reasons[-1] and "predicted gain 50.0 %" in reasons[-1]


def test_only_within_the_bounds_and_only_if_it_is_worth_it(
    capsys: Said, truth: Truth, flight: Flight
) -> None:
    truth.ms = by_micro_batches(FASTER)
    said = lines(capsys, "autopilot", "--within", "micro_batches=1,2,4", *STEPS, status=0)
    assert [one["event"] for one in said] == ["stop"]
    said = lines(capsys, "autopilot", "--within", "micro_batches=1..8", "--gain", "60", *STEPS, status=0)
    assert "is predicted to gain 60 %" in said[-1]["text"] and len(said) == 1
    assert flight[1].boards[0].revision == 0, "nothing was changed"


@pytest.mark.parametrize("most", [1, 64])
def test_two_knobs_are_changed_at_once_if_only_both_help(
    capsys: Said, truth: Truth, flight: Flight, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(autopilot, "MOST", most)  # number of changes that are previewed at once
    truth.ms = lambda values: 5.0 if values == {"micro_batches": 8, "recompute": "full"} else 10.0
    words = ["autopilot", "--within", "micro_batches=1..8", "recompute=none,full", *STEPS]
    said = lines(capsys, *words, status=0)
    assert [one["event"] for one in said] == ["move", "outcome", "stop"]
    assert said[1]["trial"]["changes"] == {"micro_batches": 8, "recompute": "full"}
    assert flight[1].boards[0].values == {"micro_batches": 8, "recompute": "full"}


def test_a_change_that_may_also_be_slower_is_not_tried(capsys: Said, truth: Truth, flight: Flight) -> None:
    truth.ms, truth.reach = by_micro_batches(FASTER), 1.2
    (stop,) = lines(capsys, "autopilot", "--within", "micro_batches=1..8", *STEPS, status=0)
    assert stop["text"].endswith("with --undecided: micro_batches=8 (step time -110.0 .. +10.0 %)")
    (advice,) = lines(capsys, "advise", status=0)
    assert [one["undecided"] for one in advice["changes"]] == [True]
    assert run(["advise"]) == 0
    assert re.search(r"micro_batches=8 .*% +undecided ", capsys.readouterr().out)
    assert flight[1].boards[0].revision == 0, "nothing was changed"
    words = ["autopilot", "--within", "micro_batches=1..8", "--undecided", *STEPS]
    assert lines(capsys, *words, status=0)[1]["trial"]["state"] == "kept"


def test_a_measurement_outside_the_prediction_stops_it(capsys: Said, truth: Truth, flight: Flight) -> None:
    truth.previews = by_micro_batches(FASTER)
    said = lines(capsys, "autopilot", "--within", "micro_batches=1..8", *STEPS, status=4)
    assert said[1]["trial"]["state"] == "reverted" and "outside the predicted" in said[-1]["text"]
    assert flight[1].boards[0].values["micro_batches"] == 4
    # The run remembers the trial, so the same advice is not given again.
    (advice,) = lines(capsys, "advise", status=0)
    assert not advice["changes"]
    assert advice["left_out"][0].startswith("micro_batches=8 is left out: a trial of this run was not faster")


def test_another_operators_change_stops_it_and_the_trial_is_reverted(
    capsys: Said, truth: Truth, flight: Flight
) -> None:
    truth.ms = by_micro_batches(FASTER)
    client = Client(flight[0].endpoints.clients)

    def interfere() -> None:
        poll_until(client, lambda: any(trial.state == "after" for trial in client.state.trials.values()))
        client.propose({"recompute": "full"}, who="bob")
        poll_until(client, lambda: any(one.who == "bob" for one in client.state.commands.values()))

    thread = threading.Thread(target=interfere)
    thread.start()
    words = ["autopilot", "--within", "micro_batches=1..8", "--steps", "300"]
    said = lines(capsys, *words, status=4)
    thread.join()
    client.close()
    assert "bob made another change" in said[-1]["text"]
    assert flight[1].boards[0].values == {"micro_batches": 4, "recompute": "full"}


def test_ctrl_c_reverts_the_trial(capsys: Said, truth: Truth, flight: Flight) -> None:
    truth.ms = by_micro_batches(FASTER)
    client = Client(flight[0].endpoints.clients)

    def interrupt() -> None:
        poll_until(client, lambda: any(trial.state == "after" for trial in client.state.trials.values()))
        # Sent to the process, so that the signal interrupts the wait of the main thread.
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # an earlier test may have changed it
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        said = lines(capsys, "autopilot", "--within", "micro_batches=1..8", "--steps", "300", status=130)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, handler)
        client.close()
    assert said[-1]["event"] == "outcome" and "reverted" in said[-1]["text"]
    assert flight[1].boards[0].values["micro_batches"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["micro_batches"], "micro_batches is not a bound; give knob=low..high or knob=value,value"),
        (["micro_batches=8..1"], "micro_batches=8..1 is not a range of numbers"),
        (["lr=0..1"], "there is no knob lr; the knobs are micro_batches, recompute"),
        (["micro_batches=1..8", "micro_batches=4"], "micro_batches is given twice"),
        (["recompute=none,ful"], "recompute = ful is not legal; legal: "),
        (["micro_batches=9..11"], "the bounds of micro_batches contain no legal value; legal: 1 2 4 8"),
        (["micro_batches=1..8", "--allow-loss", "recompute"], "--allow-loss recompute has no effect; bound"),
    ],
)
def test_illegal_bounds_are_refused(capsys: Said, flight: Flight, words: list[str], said: str) -> None:
    assert run(["autopilot", "--within", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_advice_in_words(capsys: Said, truth: Truth, flight: Flight) -> None:
    truth.ms = by_micro_batches(FASTER)
    assert run(["advise"]) == 0
    text = capsys.readouterr().out
    assert "computation takes" in text and "micro_batches=2" not in text
    assert re.search(r"on the knob board +step time +likely +from", text), text
    assert re.search(r"micro_batches=8 .*% +-50.0 ", text), text


def test_on_shared_cores_it_says_that_it_cannot_rank(capsys: Said, truth: Truth, flight: Flight) -> None:
    truth.ms, truth.oversubscribed = by_micro_batches(FASTER), True
    client = Client(flight[0].endpoints.clients)
    poll_until(client, lambda: client.state.summaries and client.state.summaries[-1].oversubscribed)
    client.close()
    (advice,) = lines(capsys, "advise", status=0)
    assert not advice["changes"] and advice["why"].startswith("ranks share cores")
    assert advice["bottleneck"]["text"].startswith("computation takes")
    (stop,) = lines(capsys, "autopilot", "--within", "micro_batches=1..8", status=3)
    assert "ranks share cores" in stop["text"]


def test_a_preview_states_how_often_earlier_ones_were_right(
    capsys: Said, truth: Truth, flight: Flight
) -> None:
    checks = [Check("step_ms", 10.0, 8.0, 7.0, 9.0, measured) for measured in (8.0, 10.0)]
    client = Client(flight[0].endpoints.clients)
    for revision, check in enumerate(checks):
        flight[1].agents[0].send(check_event(0.0, revision, {"recompute": ("none", "full")}, [check]))
    poll_until(
        client, lambda: trust(client.state.events) and trust(client.state.events)["step_ms"].checks == 2
    )
    client.close()
    (answer,) = lines(capsys, "preview", "micro_batches=8", status=0)
    step = answer["estimates"][0]
    assert (step["checks"], step["hits"], step["mean_error"]) == (2, 1, pytest.approx(0.1))
    assert run(["preview", "micro_batches=8"]) == 0
    assert "1/2 inside, error 10 %" in capsys.readouterr().out
