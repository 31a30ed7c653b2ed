"""Waits until a request of a client is answered or has its final outcome, or until a timeout."""

import time

from msgspec import structs

from agents.client import WAIT_S, Client
from agents.protocol import RESTART, CommandState, Event, Previewed, RankStacks, StacksCollected, TrialState
from agents.state.run_state import RunState

LAST_S = 2.0
# A hub that was killed is restarted within a few seconds. One that is silent for this long was killed with its run.
SILENT_S = 30.0


class RunOverError(Exception):
    """The run ended before the request was answered or had its final outcome. The message is one sentence for the
    user."""


class _End:
    """Detects the end of the run: all ranks have left for good, and the hub has had `LAST_S` seconds to publish
    outcomes."""

    def __init__(self) -> None:
        self._seen_s: float | None = None

    def over(self, state: RunState) -> bool:
        gone = bool(state.hellos) and all(
            rank in state.gone and state.gone[rank].over for rank in state.hellos
        )
        if not gone:
            self._seen_s = None
            return False
        self._seen_s = self._seen_s or time.monotonic()
        return time.monotonic() - self._seen_s > LAST_S


def check_hub(client: Client) -> None:
    """Raise RunOverError if the hub has sent nothing for `SILENT_S` seconds. The hub of a live run sends a frame each
    second."""
    if (client.age_s or 0.0) > SILENT_S:
        raise RunOverError(f"the hub has been silent for {SILENT_S:g} s; the run has probably ended")


def wait_for_command(client: Client, id: str, timeout_s: float, settled: bool = True) -> CommandState:
    """Poll until the outcome of the proposal `id` no longer changes; with `settled=False`, only until the hub has
    answered it.

    On timeout, the TimeoutError states in one sentence how far the proposal got. A proposal that this client's role
    does not allow is returned as rejected and does not appear in the run's log.
    """
    deadline, end = time.monotonic() + timeout_s, _End()
    while True:
        state = _known(client, id)
        if state and (state.final or not settled):
            return state
        if end.over(client.state):
            return _state_after_end(id, state)
        remaining = min(deadline - time.monotonic(), WAIT_S)
        if remaining <= 0:
            raise TimeoutError(_unsettled(client, state, timeout_s))
        client.poll(remaining)


def wait_for_restart(client: Client, id: str, timeout_s: float) -> Event | CommandState:
    """Poll until the ranks train again after the change of the layout that the proposal `id` requested; returns rank
    0's report. If the change is refused, expires or is rolled back, returns its state.

    The report is recognised by the revision of the knobs. The number of a restart would not do: launchers count from 1
    again when a run is resumed, and the log has the reports of earlier launchers. On timeout, the TimeoutError states
    in one sentence how far the change got. Raises RunOverError if the run ends after the change was applied.
    """
    deadline, end = time.monotonic() + timeout_s, _End()
    while True:
        state = _known(client, id)
        if state and state.state not in ("accepted", "applied"):
            return state
        if state and (report := _restart(client.state, state.revision)):
            return report
        check_hub(client)
        if end.over(client.state):
            if state is None or state.state == "accepted":
                return _state_after_end(id, state)
            raise RunOverError("the run ended before its ranks trained in the new layout")
        remaining = min(deadline - time.monotonic(), WAIT_S)
        if remaining <= 0:
            if state and state.state == "applied":
                raise TimeoutError(f"the ranks do not train in the new layout within {timeout_s:g} s")
            raise TimeoutError(_unsettled(client, state, timeout_s))
        client.poll(remaining)


def _restart(state: RunState, revision: int) -> Event | None:
    """The first report of a restart whose ranks train with `revision` or a later one; None if none has arrived yet."""
    for event in state.events:
        found = event.facts.get("revision")
        if RESTART in event.facts and isinstance(found, int) and found >= revision > 0:
            return event
    return None


def wait_for_trial(client: Client, id: str, timeout_s: float) -> TrialState:
    """Poll until the trial `id` has ended. On timeout, the TimeoutError states in one sentence how far the trial got;
    the trial continues. Also raises TimeoutError if this client's role does not allow the trial, and RunOverError if
    the run ends first.
    """
    deadline, end = time.monotonic() + timeout_s, _End()
    while not ((trial := client.state.trials.get(id)) and trial.settled):
        if id in client.denied:
            raise TimeoutError(client.denied[id])
        if time.monotonic() >= deadline:
            how = (
                f"the trial is in the state {trial.state}"
                if trial
                else client.refused or "the hub did not answer"
            )
            raise TimeoutError(f"{how} after {timeout_s:g} s")
        check_hub(client)
        if end.over(client.state):
            how = f"the trial is in the state {trial.state}" if trial else "the trial did not start"
            raise RunOverError(f"the run ended; {how}")
        client.poll(WAIT_S)
    return trial


def wait_for_preview(client: Client, id: str, timeout_s: float) -> Previewed:
    """Poll until the preview query `id` is answered. On timeout, the TimeoutError states in one sentence why there is
    no answer. Also raises TimeoutError if this client's role does not allow the query, and RunOverError if the run
    ends first.
    """
    deadline, end = time.monotonic() + timeout_s, _End()
    while id not in client.previews:
        if end.over(client.state):
            raise RunOverError("the run ended before the request was answered")
        if id in client.denied:
            raise TimeoutError(client.denied[id])
        if time.monotonic() >= deadline:
            raise TimeoutError(client.refused or f"no preview answer within {timeout_s:g} s")
        client.poll(0.05)
    return client.previews[id]


def wait_for_stacks(client: Client, id: str, timeout_s: float) -> tuple[list[RankStacks], StacksCollected]:
    """Poll until the stack query `id` is answered. Raises PermissionError if this client's role does not allow the
    query, and RunOverError if the run ends first. On timeout, the TimeoutError states in one sentence why there is no
    answer.
    """
    deadline, end = time.monotonic() + timeout_s, _End()
    while id not in client.stacks_collected:
        if id in client.denied:
            raise PermissionError(client.denied[id])
        if end.over(client.state):
            raise RunOverError("the run ended before the request was answered")
        if time.monotonic() >= deadline:
            raise TimeoutError(
                client.refused
                or f"the hub sent no stacks within {timeout_s:g} s (a hub of an older release sends none)"
            )
        client.poll(0.05)
    return list(client.stacks.get(id, {}).values()), client.stacks_collected[id]


def _known(client: Client, id: str) -> CommandState | None:
    """The state of a proposal. One that this client's role does not allow is rejected, and not part of the run's
    state."""
    state = client.state.commands.get(id)
    if state is None and id in client.denied:
        return CommandState(id, 0, "rejected", {}, {}, "", time.time(), why=client.denied[id])
    return state


def _state_after_end(id: str, state: CommandState | None) -> CommandState:
    """The state that is reported for command `id` if the run ended before the hub published the command's final
    state."""
    if state is None:
        return CommandState(
            id, 0, "expired", {}, {}, "", time.time(), why="the run ended before the request was answered"
        )
    if state.state == "accepted":
        why = "the run ended, probably before the change was applied; see the log for the outcome"
        return structs.replace(state, state="expired", why=why)
    return (
        state if state.why else structs.replace(state, why="the run ended before every rank had acknowledged")
    )


def _unsettled(client: Client, state: CommandState | None, timeout_s: float) -> str:
    if client.refused:
        return client.refused
    if client.age_s is None:
        return f"no hub answered at {client.endpoint} within {timeout_s:g} s"
    if state is None:
        return f"the hub did not answer the proposal within {timeout_s:g} s"
    if state.state == "accepted":
        why = f": {state.why}" if state.why else ""
        return (
            f"revision {state.revision} was accepted, but no rank has applied it within {timeout_s:g} s{why}"
        )
    reached = f"{state.state} on {state.acks} of {state.world} ranks"
    return f"revision {state.revision} is {reached} after {timeout_s:g} s"
